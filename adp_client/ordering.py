"""Calls that take several requests, and the fences that must wait for them (spec section 5.8).

The gateway orders requests around a FENCE, and each connection keeps that order. A call that asks again after
a first answer (fragments, then their manifest) has to be ordered here: FENCE goes out when such calls that
were made before it have ended, and calls that are made after it begin when it has been answered.

Where no call takes several requests nothing waits and nothing is noted: the gateway's order is enough.
"""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Self

import anyio

from .protocol.errors import RequestTimeout


class Call:
    """One call of a verb: its time, and how often it has been sent again. Leave it to end it."""

    def __init__(self, order: "Order", deadline: float, *, whole: "Call | None" = None) -> None:
        self.deadline = deadline
        self.replays = 0
        self.is_patient = False  # waits for a worker that is gone, until its deadline
        self._order = order
        self._whole = self if whole is None else whole

    def hold(self) -> None:
        """From here to its end the call may ask more than once: a later fence waits for it."""
        self._order.held.add(self._whole)

    def part(self, *, is_patient: bool = False) -> "Call":
        """What one worker is asked of this call. It has replays of its own, and ends with the call."""
        part = Call(self._order, self.deadline, whole=self._whole)
        part.is_patient = is_patient
        return part

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self in self._order.held:
            self._order.held.discard(self)
            self._order.tell()


class Order:
    """The calls of one client. Every state change is synchronous and comes before the wait."""

    def __init__(self) -> None:
        self.held: set[Call] = set()
        self._barriers: list[anyio.Event] = []  # one for each fence that had to wait and is not over
        self._changed = anyio.Event()

    def tell(self) -> None:
        """A call has ended."""
        self._changed.set()
        self._changed = anyio.Event()

    async def begin(self, deadline: float) -> Call:
        """A new call, behind every fence. Raises RequestTimeout if none of its time is left by then."""
        call = Call(self, deadline)
        if self._barriers:
            call.hold()  # the next fence must not overtake it
            try:
                for barrier in tuple(self._barriers):
                    await _within(deadline, barrier)
            except BaseException:
                call.__exit__()
                raise
        return call

    @asynccontextmanager
    async def fence(self, deadline: float, *, is_wide: bool = False) -> AsyncGenerator[Call]:
        """Within: every call that was made before has ended, or is a request that is under way; no call that
        is made now begins, if there was something to wait for, or if the fence is a wide one: over several
        connections, of which each knows its own requests only."""
        call = Call(self, deadline)
        before, barriers = set(self.held), tuple(self._barriers)
        if not before and not barriers and not is_wide:
            yield call
            return
        mine = anyio.Event()
        self._barriers.append(mine)
        try:
            for barrier in barriers:
                await _within(deadline, barrier)
            while before & self.held:
                await _within(deadline, self._changed)
            yield call
        finally:
            self._barriers.remove(mine)
            mine.set()


async def _within(deadline: float, event: anyio.Event) -> None:
    with anyio.CancelScope(deadline=deadline):
        await event.wait()
        return
    raise RequestTimeout("a fence, or what it waited for, took too long")
