"""How a batch of reads is spread over the reader threads, and what is pinned meanwhile."""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel

from adp_gateway.errors import DeviceFault

from .base import Status
from .segment import SegmentLease
from .threads import ReadThreads
from .transfer import portions, shared_out

logger = logging.getLogger(__name__)

#: One of the reads of `Transfers`: statuses, also in the `Progress` that it is given.
Read = Callable[..., bytes]


class Reader:
    """Reads batches. Used from one event-loop thread.

    `on_damage` is told of leases and their statuses, some of which are not OK, as soon as that is known.
    """

    def __init__(
        self,
        threads: ReadThreads,
        share_threads: int,
        on_damage: Callable[[Sequence[SegmentLease], bytes], None],
    ) -> None:
        self._threads = threads
        self._share_threads = share_threads
        self._on_damage = on_damage

    async def read(
        self, leases: Sequence[SegmentLease], read: Read, *args: Sequence[Any], may_give_up: bool
    ) -> bytes:
        """Run `read` in reader threads. `args` have an element for each lease.

        A large batch is shared out, because a device that is asked for one command at a time delivers a part
        of what it can. Never to all threads: others read too. What is in the page cache is copied by one.

        Cancellation: what has begun ends first, or is given up where that is allowed.
        """
        if not leases:
            await anyio.lowlevel.checkpoint()
            return b""
        # Pinned once more: a session that is torn down releases its leases, maybe before the thread is done.
        for lease in leases:
            lease.segment.readers += 1
        try:
            most = 1 if _is_cached(leases[0]) and _is_cached(leases[-1]) else self._share_threads
            shares = shared_out([lease.length for lease in leases], most)
            results = [b""] * len(shares)

            async def run(number: int, share: slice) -> None:
                parts = [arg[share] for arg in args]
                results[number] = await self._read_share(leases[share], read, *parts, may_give_up=may_give_up)

            if len(shares) == 1:
                await run(0, shares[0])
            else:
                async with anyio.create_task_group() as tasks:
                    for number, share in enumerate(shares):
                        tasks.start_soon(run, number, share)
            return b"".join(results)
        finally:
            for lease in leases:
                lease.segment.readers -= 1

    async def _read_share(
        self, leases: Sequence[SegmentLease], read: Read, *args: Sequence[Any], may_give_up: bool
    ) -> bytes:
        """Portion by portion. Behind one that was given up, or found no thread, nothing more is tried: each
        would cost another thread. What has not been tried is a fault, and is not dropped for it."""
        statuses = bytearray()
        for portion in portions([lease.length for lease in leases]):
            work = functools.partial(read, *(arg[portion] for arg in args))
            tried = await self._read_portion(leases[portion], work, may_give_up=may_give_up)
            statuses += tried
            if len(tried) < portion.stop - portion.start:
                break
        return bytes(statuses.ljust(len(leases), bytes([Status.GATEWAY_FAULT])))

    async def _read_portion(self, leases: Sequence[SegmentLease], work: Read, *, may_give_up: bool) -> bytes:
        """In one thread; what it found out. Fewer statuses than leases: it was given up, or never began."""
        for lease in leases:  # for the thread, which may come back when nobody else is here any more
            lease.segment.readers += 1

        def give_back() -> None:
            for lease in leases:
                lease.segment.readers -= 1

        try:
            progress = await self._threads.run(
                lambda progress: work(progress=progress), give_back=give_back, may_give_up=may_give_up
            )
        except DeviceFault as fault:
            logger.debug("%d objects were not read: %s", len(leases), fault)
            return b""
        tried = bytes(progress.statuses)
        if progress.is_given_up and len(tried) < len(leases):
            tried += bytes([Status.GATEWAY_FAULT])  # the one that hangs
        if any(tried):
            self._on_damage(leases[: len(tried)], tried)
        return tried


def _is_cached(lease: SegmentLease) -> bool:
    return lease.segment.data.is_cached(lease.entry.offset, lease.length)
