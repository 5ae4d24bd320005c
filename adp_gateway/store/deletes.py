"""A DELETE from its arrival to the moment when nobody reads what it deleted; the same for every store."""

from collections.abc import Callable, Sequence

import anyio

from .base import Status
from .holds import Holds
from .leases import Drain, LeaseLedger


async def delete_when_free(
    namespace: bytes,
    keys: Sequence[bytes],
    *,
    holds: Holds,
    ledger: LeaseLedger,
    drop: Callable[[bytes, bytes], bool],
) -> bytes:
    """Drop each key when nothing holds it, then wait for those who read it then: OK or NOT_FOUND for each.

    `drop` makes a key absent and says whether it was there. Cancelled: what was held is not dropped.
    """
    gone: set[bytes] = set()
    drains: list[Drain] = []
    changed = anyio.Event()

    def tell() -> None:
        changed.set()

    def take(free: Sequence[bytes]) -> None:
        gone.update(key for key in free if drop(namespace, key))
        drains.append(ledger.drain([(namespace, key) for key in free], tell))
        tell()

    wait = holds.when_free(namespace, keys, take)
    try:
        while wait.left or not all(drain.is_done for drain in drains):
            changed = anyio.Event()
            await changed.wait()
    finally:
        wait.abandon()
        for drain in drains:
            ledger.abandon(drain)
    statuses = bytearray()
    for key in keys:
        statuses.append(Status.OK if key in gone else Status.NOT_FOUND)
        gone.discard(key)
    return bytes(statuses)
