"""What a FENCE divides: the requests of one connection fall into eras, and one era works at a time.

A request belongs to the era in which its first frame came. An era opens when every era before it is over, and
is over when a barrier (FENCE or GOODBYE) has ended it and its last request has left. So the reader never has
to stop at a barrier: what comes behind it waits by itself, and the end of the stream is still noticed.
"""

from collections.abc import Callable

import anyio
import attrs


@attrs.define(eq=False)
class Era:
    """The requests between two barriers. `opened` is set when they may start."""

    opened: anyio.Event = attrs.field(factory=anyio.Event)
    active: int = 0  # requests that have come and are not done
    asking: int = 0  # those of them whose last frame has not come yet
    _barrier: Callable[[], None] | None = None
    _following: "Era | None" = None

    @property
    def is_open(self) -> bool:
        """Whether its requests may start now."""
        return self.opened.is_set()


class Fences:
    """The eras of one connection."""

    def __init__(self) -> None:
        self._oldest = self.current = Era()
        self.current.opened.set()
        self._idle = anyio.Event()

    def enter(self) -> Era:
        """A request begins; it belongs to the era returned, and calls `leave` with it when it is done."""
        self.current.active += 1
        return self.current

    def leave(self, era: Era) -> None:
        """A request of `era` is done."""
        assert era.active, "a request left twice"
        era.active -= 1
        self._advance()

    def bar(self, reached: Callable[[], None]) -> None:
        """A barrier: `reached` is called once, when everything before it is done; perhaps at once."""
        era, self.current = self.current, Era()
        era._barrier, era._following = reached, self.current
        self._advance()

    @property
    def is_idle(self) -> bool:
        """No request is open."""
        return self._oldest is self.current and not self.current.active

    async def wait_idle(self) -> None:
        """Return when no request is open."""
        while not self.is_idle:
            await self._idle.wait()

    @property
    def is_asking_before_current(self) -> bool:
        """Whether a request from before the latest barrier still owes frames."""
        era = self._oldest
        while era is not self.current:
            if era.asking:
                return True
            assert era._following is not None
            era = era._following
        return False

    def _advance(self) -> None:
        while self._oldest._barrier is not None and not self._oldest.active:
            reached, following = self._oldest._barrier, self._oldest._following
            assert following is not None
            self._oldest = following
            reached()
            following.opened.set()
        if self.is_idle:
            self._idle.set()
            self._idle = anyio.Event()
