"""READ_REGION and WRITE_REGION: between the store's files and memory of the client, by system calls only."""

from collections.abc import Iterator, Sequence

import anyio
import attrs

from adp_client.protocol.constants import ErrorCode, Feature
from adp_client.protocol.messages import (
    ReadItem,
    ReadItems,
    ReadRegion,
    ReadRegionReply,
    WriteRegion,
    read_items,
)

from .answers import Answers
from .regions import Region, Regions, is_within
from .replies import READ_ITEM_BYTES, REPLY_HEAD_BYTES
from .store.base import Extent, ObjectStore, PutItem, ReadLease, Status

#: Read in one go: the client checks what is there while the rest is read.
PORTION_BYTES = 4 << 20
#: How many threads read for one request, so that the next portion is under way while one is answered.
THREADS = 1


class SharedTransfers:
    """The region verbs of one connection. Raises nothing for what a client can do wrong."""

    def __init__(self, answers: Answers, store: ObjectStore, regions: Regions) -> None:
        self._answers = answers
        self._store = store
        self._regions = regions

    async def read(self, request_id: int, message: ReadRegion) -> None:
        """Pin, read, answer. Without END_TO_END the objects are verified first, in memory of our own."""
        opened = self._store.open_read(message.namespace, message.keys)
        leases: list[ReadLease] = []
        views: list[memoryview] = []
        places: list[int] = []
        settled: list[ReadItem] = []
        used = _Used()
        try:
            for index, (lease, target) in enumerate(zip(opened, message.targets, strict=True)):
                region = self._regions.get(target.region)
                if region is None:
                    settled.append(ReadItem(index=index, status=ErrorCode.STALE_EPOCH))
                elif not is_within(target.offset, target.capacity, region.size_bytes):
                    settled.append(ReadItem(index=index, status=ErrorCode.REFUSED))
                elif lease is None:
                    settled.append(ReadItem(index=index, status=ErrorCode.NOT_FOUND))
                elif lease.length > target.capacity:
                    settled.append(
                        ReadItem(index=index, status=ErrorCode.TOO_LARGE, object_bytes=lease.length)
                    )
                else:
                    used.enter(region)
                    places.append(index)
                    leases.append(lease)
                    views.append(region.target(target.offset, lease.length))
            if settled:
                self._answer(request_id, read_items(settled), is_last=not leases)
            await self._read_all(request_id, _Wanted(places, leases, views))
        finally:
            for view in views:
                view.release()
            used.leave()
            for pinned in opened:
                if pinned is not None:
                    pinned.release()

    async def _read_all(self, request_id: int, wanted: "_Wanted") -> None:
        """Portion after portion, by `THREADS` at a time; each is answered when it is in place.

        Returns, or raises what the first failure was, when no thread touches the memory any more.
        """
        portions = _portions(wanted.leases)
        left = len(wanted.leases)
        failures: list[Exception] = []

        async def work() -> None:
            nonlocal left
            try:
                for start, end in portions:
                    leases = wanted.leases[start:end]
                    statuses = await self._read(leases, wanted.views[start:end])
                    left -= len(leases)
                    items = _columns(wanted.places[start:end], statuses, leases)
                    self._answer(request_id, items, is_last=not left)
            except Exception as exc:
                failures.append(exc)
                tasks.cancel_scope.cancel()

        async with anyio.create_task_group() as tasks:
            for _ in range(THREADS if sum(lease.length for lease in wanted.leases) > PORTION_BYTES else 1):
                tasks.start_soon(work)
        if failures:
            raise failures[0]

    async def _read(self, leases: Sequence[ReadLease], views: Sequence[memoryview]) -> bytes:
        if Feature.END_TO_END in self._answers.connection.features:
            return await self._store.read_into(leases, views, is_verified=False)
        statuses = bytearray(await self._store.verify(leases))
        right = [at for at, status in enumerate(statuses) if status == Status.OK]
        found = await self._store.read_into(
            [leases[at] for at in right], [views[at] for at in right], is_verified=False
        )
        for at, status in zip(right, found, strict=True):
            statuses[at] = status
        return bytes(statuses)

    def _answer(self, request_id: int, items: ReadItems, *, is_last: bool) -> None:
        """In as many frames as the client's body limit asks for; the window bounds how many items come."""
        most = max(1, (self._answers.max_body_bytes - REPLY_HEAD_BYTES) // READ_ITEM_BYTES)
        self._answers.shared.counters.sent_bytes += sum(items.lengths)
        count = len(items)
        for start in range(0, count, most):
            part = (
                items
                if count <= most
                else read_items(items[at] for at in range(start, min(start + most, count)))
            )
            is_final = is_last and start + most >= count
            self._answers.prompt(request_id, ReadRegionReply(items=part), is_final=is_final)

    async def write(self, request_id: int, message: WriteRegion) -> None:
        """Each object is taken out of its region once, by the store; what was hashed is what is stored."""
        statuses = bytearray([ErrorCode.STALE_EPOCH]) * len(message.keys)
        items: list[PutItem] = []
        places: list[int] = []
        used = _Used()
        try:
            for index, (key, source) in enumerate(zip(message.keys, message.sources, strict=True)):
                region = self._regions.get(source.region)
                if region is None:
                    continue
                if not is_within(source.offset, source.length, region.size_bytes):
                    statuses[index] = ErrorCode.REFUSED
                    continue
                used.enter(region)
                places.append(index)
                data = Extent(region.fd, source.offset, source.length)
                items.append(PutItem(key=key, checksum=source.checksum, data=data))
            if items:
                found = await self._store.put_many(message.namespace, items)
                for index, item, status in zip(places, items, found, strict=True):
                    statuses[index] = status
                    self._answers.shared.counters.received_bytes += item.length
        finally:
            used.leave()
        self._answers.statuses(request_id, bytes(statuses))


@attrs.frozen
class _Wanted:
    """What is to be read: items of the request, their objects, and where these go."""

    places: Sequence[int]
    leases: Sequence[ReadLease]
    views: Sequence[memoryview]


class _Used:
    """The regions that one request uses, each once."""

    def __init__(self) -> None:
        self._regions: dict[int, Region] = {}

    def enter(self, region: Region) -> None:
        if id(region) not in self._regions:
            self._regions[id(region)] = region
            region.enter()

    def leave(self) -> None:
        for region in self._regions.values():
            region.leave()
        self._regions.clear()


def _columns(indices: Sequence[int], statuses: bytes, leases: Sequence[ReadLease]) -> ReadItems:
    lengths = tuple(0 if status else lease.length for status, lease in zip(statuses, leases, strict=True))
    checksums = tuple(0 if status else lease.checksum for status, lease in zip(statuses, leases, strict=True))
    return ReadItems(
        indices=tuple(indices),
        statuses=statuses,
        object_bytes=lengths,
        offsets=(0,) * len(lengths),
        lengths=lengths,
        checksums=checksums,
    )


def _portions(leases: Sequence[ReadLease]) -> Iterator[tuple[int, int]]:
    """Where each portion begins and ends."""
    start = size_bytes = 0
    for at, lease in enumerate(leases):
        if at > start and size_bytes + lease.length > PORTION_BYTES:
            yield start, at
            start, size_bytes = at, 0
        size_bytes += lease.length
    if leases:
        yield start, len(leases)
