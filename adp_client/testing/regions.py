"""Shared regions for the gateway that keeps objects in a dict: it reads and writes the files themselves."""

import fcntl
import os
import stat
from collections import deque

import attrs
import xxhash

from adp_client.protocol.constants import ErrorCode
from adp_client.protocol.messages import ReadItem, ReadRegion, RegionSource, RegionTarget, WriteRegion


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
        if number in self.regions or not self._is_fit(fd, size_bytes):
            os.close(fd)
            return ErrorCode.REFUSED
        self.regions[number] = fd, size_bytes
        return ErrorCode.OK

    def _is_fit(self, fd: int, size_bytes: int) -> bool:
        """Whether it is a file in memory, to read and write, that is long enough."""
        try:
            status, mode = os.fstat(fd), fcntl.fcntl(fd, fcntl.F_GETFL)
            fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # which only files in memory have
        except OSError:
            return False
        is_writable = mode & os.O_ACCMODE == os.O_RDWR
        return stat.S_ISREG(status.st_mode) and is_writable and 0 < size_bytes <= status.st_size

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
            status = self._put(target, stored.data)
            if status is not ErrorCode.OK:
                rows.append(ReadItem(index=index, status=status))
                continue
            rows.append(ReadItem(index=index, object_bytes=size, length=size, checksum=stored.checksum))
        return tuple(rows)

    def write(self, objects: Objects, message: WriteRegion) -> bytes:
        """Store what lies in the sources, if it is what the checksums say."""
        statuses = bytearray()
        for key, source in zip(message.keys, message.sources, strict=True):
            status = self._judge(source.region, source.offset, source.length)
            if status is ErrorCode.OK:
                data = self._take(source)
                if len(data) < source.length:
                    status = ErrorCode.REFUSED
                elif xxhash.xxh3_64_intdigest(data) == source.checksum:
                    objects[message.namespace, key] = StoredObject(data, source.checksum)
                else:
                    status = ErrorCode.CORRUPT
            statuses.append(status)
        return bytes(statuses)

    def _put(self, target: RegionTarget, data: bytes) -> ErrorCode:
        """REFUSED where the file's owner has cut it off; writing there would make it longer again."""
        fd = self.regions[target.region][0]
        if os.fstat(fd).st_size < target.offset + len(data):
            return ErrorCode.REFUSED
        os.pwrite(fd, data, target.offset)
        return ErrorCode.OK

    def _take(self, source: RegionSource) -> bytes:
        """Less than all of it where the file's owner has cut it off."""
        return os.pread(self.regions[source.region][0], source.length, source.offset)

    def _judge(self, number: int, offset: int, length: int) -> ErrorCode:
        if number not in self.regions:
            return ErrorCode.STALE_EPOCH
        return ErrorCode.OK if offset + length <= self.regions[number][1] else ErrorCode.REFUSED
