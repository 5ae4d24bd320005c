"""What EXIST was granted, and how it is given back.

A lease belongs to the epoch that it was granted in: when the connection ends, the gateway ends it too, so the
client has nothing to do then. While the connection lives, every lease that nobody took over is given back:
`Handbacks` queues the ids, and the epoch's writer sends them before anything else, many in one RELEASE.
"""

from collections import deque
from collections.abc import Iterable, Sequence
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


@attrs.define(eq=False)
class Grant:
    """Leases that one epoch was granted. Gone when they are released, or the epoch has ended."""

    epoch: "Epoch"
    lease_ids: tuple[int, ...]
    handback: Handback | None = None

    @property
    def is_live(self) -> bool:
        """Whether nobody has given it back, and its connection is there."""
        return self.handback is None and self.epoch.is_open

    def give_back(self) -> Handback:
        """Never waits; once is enough."""
        if self.handback is None:
            self.handback = self.epoch.release(self.lease_ids)
        return self.handback


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
    _grants: tuple[Grant, ...] = attrs.field(alias="grants", repr=False)

    @property
    def is_live(self) -> bool:
        """Whether it holds: not released, not expired, and the connection it came over is still there; with
        several workers, the connections to all of them that have granted a part of it."""
        return all(grant.is_live for grant in self._grants) and anyio.current_time() < self.expires_at

    async def release(self) -> None:
        """Give it back; return when the gateway has it, or the connection has ended, which ends the lease.

        Once is enough, more often is harmless. Never raises for the network. Cancelled: it is on its way.
        """
        handbacks = self.give_back()
        if all(handback.done.is_set() for handback in handbacks):
            await anyio.lowlevel.checkpoint()
        for handback in handbacks:
            if not handback.done.is_set():
                await handback.done.wait()

    def give_back(self) -> list[Handback]:
        """`release`, without waiting for the gateway."""
        return [grant.give_back() for grant in self._grants]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.release()

    @classmethod
    def joined(cls, leases: "Sequence[Lease]") -> "Lease | None":
        """One lease for all of `leases`, which are its own from now on; None if there are none."""
        if len(leases) <= 1:
            return leases[0] if leases else None
        return cls(
            granted_seconds=min(lease.granted_seconds for lease in leases),
            expires_at=min(lease.expires_at for lease in leases),
            grants=tuple(grant for lease in leases for grant in lease._grants),
        )
