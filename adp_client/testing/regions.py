"""Shared regions for the gateway that keeps objects in a dict: it reads and writes the files themselves."""

import os
from collections import deque

import attrs
import xxhash

from adp_client.protocol.constants import ErrorCode
from adp_client.protocol.messages import ReadItem, ReadRegion, WriteRegion


@attrs.define
class StoredObject:
    """Bytes, and the checksum that their writer gave."""

    data: bytes
    checksum: int


Objects = dict[tuple[bytes, bytes], StoredObject]


class MemoryRegions:
    """The regions of one connection: number -> descriptor and size."""

    def __init__(self) -> None:
        self.received: deque[int | None] = deque()
        self.regions: dict[int, tuple[int, int]] = {}

    def open(self, number: int, size_bytes: int) -> ErrorCode:
        """Make a region of the descriptor that came along."""
        fd = self.received.popleft()
        if fd is None:
            return ErrorCode.GATEWAY_FAULT
        if number in self.regions or not 0 < size_bytes <= os.fstat(fd).st_size:
            os.close(fd)
            return ErrorCode.REFUSED
        self.regions[number] = fd, size_bytes
        return ErrorCode.OK

    def close(self, number: int) -> ErrorCode:
        """Forget a region."""
        if number not in self.regions:
            return ErrorCode.STALE_EPOCH
        os.close(self.regions.pop(number)[0])
        return ErrorCode.OK

    def leave(self) -> None:
        """Forget everything."""
        for fd in self.received:
            if fd is not None:
                os.close(fd)
        self.received.clear()
        for number in list(self.regions):
            self.close(number)

    def read(self, objects: Objects, message: ReadRegion) -> tuple[ReadItem, ...]:
        """Write the objects to their targets."""
        rows = []
        for index, (key, target) in enumerate(zip(message.keys, message.targets, strict=True)):
            stored = objects.get((message.namespace, key))
            status = self._judge(target.region, target.offset, target.capacity)
            if status is ErrorCode.OK and stored is None:
                status = ErrorCode.NOT_FOUND
            if status is not ErrorCode.OK or stored is None:
                rows.append(ReadItem(index=index, status=status))
                continue
            size = len(stored.data)
            if size > target.capacity:
                rows.append(ReadItem(index=index, status=ErrorCode.TOO_LARGE, object_bytes=size))
                continue
            os.pwrite(self.regions[target.region][0], stored.data, target.offset)
            rows.append(ReadItem(index=index, object_bytes=size, length=size, checksum=stored.checksum))
        return tuple(rows)

    def write(self, objects: Objects, message: WriteRegion) -> bytes:
        """Store what lies in the sources, if it is what the checksums say."""
        statuses = bytearray()
        for key, source in zip(message.keys, message.sources, strict=True):
            status = self._judge(source.region, source.offset, source.length)
            if status is ErrorCode.OK:
                data = os.pread(self.regions[source.region][0], source.length, source.offset)
                if xxhash.xxh3_64_intdigest(data) == source.checksum:
                    objects[message.namespace, key] = StoredObject(data, source.checksum)
                else:
                    status = ErrorCode.CORRUPT
            statuses.append(status)
        return bytes(statuses)

    def _judge(self, number: int, offset: int, length: int) -> ErrorCode:
        if number not in self.regions:
            return ErrorCode.STALE_EPOCH
        return ErrorCode.OK if offset + length <= self.regions[number][1] else ErrorCode.REFUSED
