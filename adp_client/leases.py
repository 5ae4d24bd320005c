"""What EXIST was granted, and how it is given back.

A lease belongs to the epoch that it was granted in: when the connection ends, the gateway ends it too, so the
client has nothing to do then. While the connection lives, every lease that nobody took over is given back:
`Handbacks` queues the ids, and the epoch's writer sends them before anything else, many in one RELEASE.
"""

from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

import anyio
import anyio.lowlevel
import attrs

from .protocol.messages import Limits

if TYPE_CHECKING:
    from .epoch import Epoch

_RELEASE_HEAD_BYTES = 8
_LEASE_ID_BYTES = 8


@attrs.define(eq=False)
class Handback:
    """Leases of one owner on their way back. `done` is set when the gateway has them, or has gone."""

    left: int
    done: anyio.Event = attrs.field(factory=anyio.Event)

    def count(self) -> None:
        """One lease less."""
        self.left -= 1
        if self.left == 0:
            self.done.set()


class Handbacks:
    """Lease ids of one epoch that are to be released, in the order they came."""

    def __init__(self) -> None:
        self._queue: deque[tuple[int, Handback]] = deque()
        self._under_way: dict[int, list[Handback]] = {}

    def __bool__(self) -> bool:
        return bool(self._queue)

    def add(self, lease_ids: Iterable[int]) -> Handback:
        """Queue ids. Never waits."""
        rows = tuple(lease_ids)
        handback = Handback(len(rows))
        if not rows:
            handback.done.set()
        self._queue.extend((lease_id, handback) for lease_id in rows)
        return handback

    def next_ids(self, limits: Limits) -> tuple[int, ...]:
        """What the next RELEASE names; it stays queued until `sent`."""
        most = min(limits.max_items, (limits.max_body_bytes - _RELEASE_HEAD_BYTES) // _LEASE_ID_BYTES)
        return tuple(lease_id for (lease_id, _), _ in zip(self._queue, range(most), strict=False))

    def sent(self, request_id: int, count: int) -> None:
        """The first `count` ids are on their way."""
        self._under_way[request_id] = [self._queue.popleft()[1] for _ in range(count)]

    def is_answered(self, request_id: int) -> bool:
        """Whether this was a RELEASE; if so, its leases are back."""
        handbacks = self._under_way.pop(request_id, None)
        for handback in handbacks or ():
            handback.count()
        return handbacks is not None

    def drop(self) -> None:
        """The connection ends, and every lease with it."""
        for _, handback in self._queue:
            handback.count()
        self._queue.clear()
        for request_id in tuple(self._under_way):
            self.is_answered(request_id)


@attrs.define(eq=False, kw_only=True)
class Lease:
    """A promise: what the EXIST called OK is neither evicted nor deleted while `is_live`.

    Give it back when you have read what you wanted, or do not want it: `async with lease`, or `release`. A
    lease that is forgotten ends by itself at `expires_at` at the latest; until then no DELETE of its objects
    is answered, yours included.
    """

    #: How long the gateway has granted; the shortest, if the call took several requests.
    granted_seconds: float
    #: On anyio's clock. Counted from before the question was sent; for the gateway it is a little later.
    expires_at: float
    _epoch: "Epoch" = attrs.field(alias="epoch", repr=False)
    _lease_ids: tuple[int, ...] = attrs.field(alias="lease_ids")
    _handback: Handback | None = attrs.field(default=None, init=False)

    @property
    def is_live(self) -> bool:
        """Whether it holds: not released, not expired, and the connection it came over is still there."""
        return self._handback is None and self._epoch.is_open and anyio.current_time() < self.expires_at

    async def release(self) -> None:
        """Give it back; return when the gateway has it, or the connection has ended, which ends the lease.

        Once is enough, more often is harmless. Never raises for the network. Cancelled: it is on its way.
        """
        if self._handback is None:
            self._handback = self._epoch.release(self._lease_ids)
        if self._handback.done.is_set():
            await anyio.lowlevel.checkpoint()
        else:
            await self._handback.done.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.release()
