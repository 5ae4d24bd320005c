"""The threads that read for a store: so many and no more, also when the device stops answering.

A system call that hangs cannot be taken back, and its thread and its memory stay with it. What can be given
up is the wait for it. Where a call reads into memory of the thread's own, whoever asked gets an answer after
`io_seconds`, and what the thread still uses is given back when it returns, if ever. Where it reads into the
caller's memory, the caller waits: to let go of memory that is still written to would be worse than any wait.
Once every thread is stuck so, nobody else is made to wait in vain: calls are refused until one is back.
"""

import logging
import math
import threading
from collections.abc import Callable

import anyio
import anyio.lowlevel
import anyio.to_thread
import attrs

from adp_gateway.errors import DeviceFault

logger = logging.getLogger(__name__)


@attrs.define(eq=False)
class Progress:
    """What a call has come to: appended to by its thread, read by everybody."""

    statuses: bytearray = attrs.field(factory=bytearray)
    is_given_up: bool = False  # nobody waits any more: the thread is to return as soon as it can


@attrs.define(eq=False)
class _Call:
    progress: Progress
    give_back: Callable[[], None]
    started_at: float = math.inf
    has_begun: bool = False
    is_back: bool = False
    guard: threading.Lock = attrs.field(factory=threading.Lock)

    def run(self, work: Callable[[Progress], object]) -> None:
        """In the thread."""
        with self.guard:
            if self.progress.is_given_up:
                return  # this thread came too late
            self.has_begun = True
        try:
            work(self.progress)
        finally:
            with self.guard:
                self.is_back = True

    def give_up(self) -> bool:
        """Have nobody wait for it any more. Whether there is a thread inside that goes on all the same."""
        with self.guard:
            self.progress.is_given_up = not self.is_back
            return self.has_begun and not self.is_back


class ReadThreads:
    """`count` threads. Used from one event-loop thread."""

    def __init__(self, count: int, io_seconds: float) -> None:
        self._count = count
        self._io_seconds = io_seconds
        self._limiter = anyio.CapacityLimiter(count)
        self._threads = anyio.CapacityLimiter(math.inf)  # a place in `_limiter` is what entitles to one
        self._inside: set[_Call] = set()
        self._late: list[_Call] = []
        self._is_refusing = False

    async def run(
        self, work: Callable[[Progress], object], *, give_back: Callable[[], None], may_give_up: bool
    ) -> Progress:
        """Run `work` in a thread. `give_back` is called exactly once, on this thread: when the work is over,
        or will never begin. It is over on return unless the progress says `is_given_up`.

        Cancellation: delivered while the call waits for a thread; afterwards when it has ended.

        Raises:
            DeviceFault: the work has not begun, because no thread came free in `io_seconds` or all are stuck.
        """
        call = _Call(Progress(), give_back)
        self.reap()
        try:
            self._refuse_if_stuck()
            await self._enter(call)
        except BaseException:
            give_back()
            raise
        call.started_at = anyio.current_time()
        self._inside.add(call)
        try:
            if may_give_up:
                with anyio.CancelScope(deadline=call.started_at + self._io_seconds, shield=True):
                    await anyio.to_thread.run_sync(
                        call.run, work, abandon_on_cancel=True, limiter=self._threads
                    )
            else:
                await anyio.to_thread.run_sync(call.run, work, limiter=self._threads)
        finally:
            if call.give_up():
                self._late.append(call)
            else:
                self._leave(call)
        if not call.has_begun:
            raise DeviceFault(f"no read thread has begun in {self._io_seconds} s")
        return call.progress

    async def _enter(self, call: _Call) -> None:
        """Wait for a place, for `io_seconds`."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        try:
            self._limiter.acquire_on_behalf_of_nowait(call)
            return
        except anyio.WouldBlock:
            pass
        with anyio.move_on_after(self._io_seconds) as waiting:
            await self._limiter.acquire_on_behalf_of(call)
        if waiting.cancelled_caught:
            self._refuse_if_stuck()
            raise DeviceFault(f"no read thread came free in {self._io_seconds} s")

    def _leave(self, call: _Call) -> None:
        self._inside.discard(call)
        self._limiter.release_on_behalf_of(call)
        call.give_back()

    def reap(self) -> None:
        """Give back what threads have left that nobody waits for any more."""
        for call in [call for call in self._late if call.is_back]:
            self._late.remove(call)
            self._leave(call)

    @property
    def late(self) -> int:
        """How many calls nobody waits for any more, whose threads had not come back when `reap` looked."""
        return len(self._late)

    @property
    def stuck(self) -> int:
        """How many threads have been inside one call for `io_seconds` or longer."""
        now = anyio.current_time()
        return sum(now - call.started_at >= self._io_seconds for call in self._inside)

    def _refuse_if_stuck(self) -> None:
        is_stuck = len(self._inside) == self._count and self.stuck == self._count
        if is_stuck and not self._is_refusing:
            logger.error(
                "the device has not answered any of %d reads for %s s: reads fail until it does",
                self._count,
                self._io_seconds,
            )
        elif self._is_refusing and not is_stuck:
            logger.warning("the device answers reads again")
        self._is_refusing = is_stuck
        if is_stuck:
            raise DeviceFault("the device answers no reads")
