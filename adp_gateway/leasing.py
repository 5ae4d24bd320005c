"""Leases of one connection: granted by EXIST, ended by RELEASE, by their time, or with the connection.

The store's holds do the work; a lease is a hold with a number and a deadline. What all leases together keep
in memory is charged against one budget, of which one connection gets at most half. Above it, or above
`MAX_LEASES`, EXIST is answered without a lease: nobody waits for one, and nobody is refused an answer.
"""

import heapq
import math
from collections.abc import Sequence

import anyio
import attrs

from adp_client.protocol.constants import ErrorCode
from adp_client.protocol.messages import Exist

from .shared import Shared
from .store.base import Hold, ObjectStore

MAX_LEASES = 4096  # of one connection
MAX_LEASE_MS = 20_000  # well below the time that a client usually gives a DELETE, which waits for leases
ITEM_OVERHEAD_BYTES = 192  # a key's object, its place in the vector, and its count once that has been taken
LEASE_OVERHEAD_BYTES = 1024


@attrs.frozen
class Granted:
    """What EXIST says. `lease_id` 0: without a lease."""

    statuses: bytes
    lease_id: int = 0
    lease_ms: int = 0


@attrs.frozen
class _Lease:
    hold: Hold
    deadline: float
    cost_bytes: int


class Leases:
    """See the module. `expire` is its one task."""

    def __init__(self, shared: Shared, store: ObjectStore) -> None:
        self._shared = shared
        self._store = store
        self._leases: dict[int, _Lease] = {}
        self._last_id = 0
        self._deadlines: list[tuple[float, int]] = []  # a heap; leases that have ended may still be in it
        self._cost_bytes = 0
        self._is_over = False
        self._wake = anyio.Event()

    def look_up(self, message: Exist) -> Granted:
        """Which objects are there, with a lease on those that are if one is asked for and can be had."""
        lease_ms = min(message.lease_ms, self._shared.limits.max_lease_ms)
        cost_bytes = _cost_bytes(message.keys) if lease_ms else 0
        if not lease_ms or not self._admit(cost_bytes):
            return Granted(self._store.exist(message.namespace, message.keys))
        try:
            statuses, hold = self._store.hold(message.namespace, message.keys)
        except BaseException:
            self._shared.lease_admission.leave(cost_bytes)
            raise
        if not hold.items:
            self._shared.lease_admission.leave(cost_bytes)
            return Granted(statuses)
        self._last_id += 1
        deadline = anyio.current_time() + lease_ms / 1000
        self._leases[self._last_id] = _Lease(hold, deadline, cost_bytes)
        self._cost_bytes += cost_bytes
        self._shared.counters.leases_granted += 1
        self._shared.counters.leased_items += hold.items
        is_next = not self._deadlines or deadline < self._deadlines[0][0]
        heapq.heappush(self._deadlines, (deadline, self._last_id))
        if is_next:
            self._wake.set()
        return Granted(statuses, self._last_id, lease_ms)

    def release(self, lease_ids: Sequence[int]) -> bytes:
        """OK for each lease that this ends, STALE_EPOCH for one that this connection does not have."""
        statuses = bytearray()
        for lease_id in lease_ids:
            is_here = self._end(lease_id)
            self._shared.counters.leases_released += is_here
            statuses.append(ErrorCode.OK if is_here else ErrorCode.STALE_EPOCH)
        if len(self._deadlines) > 2 * len(self._leases) + 64:
            self._deadlines = [(lease.deadline, lease_id) for lease_id, lease in self._leases.items()]
            heapq.heapify(self._deadlines)
        return bytes(statuses)

    def leave(self) -> None:
        """The connection is gone, and its leases with it. Idempotent."""
        self._is_over = True
        for lease_id in tuple(self._leases):
            self._end(lease_id)
        self._deadlines.clear()

    async def expire(self) -> None:
        """End each lease when its time is over. Runs until it is cancelled."""
        while True:
            now = anyio.current_time()
            while self._deadlines and self._deadlines[0][0] <= now:
                _, lease_id = heapq.heappop(self._deadlines)
                self._shared.counters.leases_expired += self._end(lease_id)
            self._wake = anyio.Event()
            next_deadline = self._deadlines[0][0] if self._deadlines else math.inf
            with anyio.CancelScope(deadline=next_deadline):
                await self._wake.wait()

    def _admit(self, cost_bytes: int) -> bool:
        admission = self._shared.lease_admission
        if self._is_over or len(self._leases) >= MAX_LEASES:
            return False
        if self._leases and self._cost_bytes + cost_bytes > admission.budget_bytes // 2:
            return False
        return admission.admit(cost_bytes)

    def _end(self, lease_id: int) -> bool:
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return False
        self._cost_bytes -= lease.cost_bytes
        self._shared.lease_admission.leave(lease.cost_bytes)
        self._shared.counters.leased_items -= lease.hold.items
        lease.hold.release()
        return True


def _cost_bytes(keys: Sequence[bytes]) -> int:
    return LEASE_OVERHEAD_BYTES + len(keys) * (ITEM_OVERHEAD_BYTES + len(keys[0]))
