"""What the I/O threads do: bytes between files and memory, hashed on the way, in commands the device takes.

One call serves a whole batch, so a batch costs one hop to a thread and back. Bytes that are only checked pass
through one scratch buffer per thread, of one command's length, which stays in the processor's cache.
"""

import os
import threading
from collections.abc import Sequence
from typing import NamedTuple

import attrs
import xxhash

from adp_gateway.device.base import DeviceFile
from adp_gateway.errors import DeviceFull, MemoryGone, StorageError

from .base import Extent, Status
from .format import Record
from .journal import Journal


class Source(NamedTuple):
    """An object on the device."""

    file: DeviceFile
    offset: int
    length: int
    checksum: int


class Copy(NamedTuple):
    """An object to be written a second time, and the record that makes the copy count."""

    source: Source
    record: Record


@attrs.frozen
class Written:
    """How a batch of writes went. `is_journal_suspect`: commits that did not succeed may be on the device."""

    statuses: bytes
    is_journal_suspect: bool = False


@attrs.frozen
class Target:
    """The segment that is written to."""

    data: DeviceFile
    journal: Journal
    is_durable: bool


class _Scratch(threading.local):
    def __init__(self, length: int) -> None:
        self.view = memoryview(bytearray(length))


class Transfers:
    """The blocking half of a store. Safe in any number of threads at once."""

    def __init__(self, max_command_bytes: int) -> None:
        self._step = max_command_bytes
        self._scratch = _Scratch(max_command_bytes)

    def verify(self, sources: Sequence[Source]) -> bytes:
        """OK, CORRUPT or GATEWAY_FAULT for each."""
        scratch = self._scratch.view
        statuses = bytearray()
        for file, offset, length, checksum in sources:
            try:
                if length <= self._step:
                    view = scratch[:length]
                    is_whole = file.read_into(view, offset) == length
                    digest = xxhash.xxh3_64_intdigest(view)
                else:
                    is_whole, digest = self._digest(file, offset, length, scratch)
            except StorageError:
                statuses.append(Status.GATEWAY_FAULT)
            else:
                statuses.append(Status.OK if is_whole and digest == checksum else Status.CORRUPT)
        return bytes(statuses)

    def _digest(self, file: DeviceFile, offset: int, length: int, scratch: memoryview) -> tuple[bool, int]:
        hasher = xxhash.xxh3_64()
        for start in range(0, length, self._step):
            view = scratch[: min(self._step, length - start)]
            if file.read_into(view, offset + start) != len(view):
                return False, 0
            hasher.update(view)
        return True, hasher.intdigest()

    def read_into(self, sources: Sequence[Source], buffers: Sequence[memoryview]) -> bytes:
        """As `verify`, with the bytes in `buffers` afterwards; each at least as long as its object."""
        statuses = bytearray()
        for (file, offset, length, checksum), buffer in zip(sources, buffers, strict=True):
            hasher = xxhash.xxh3_64()
            status = Status.OK
            try:
                for start in range(0, length, self._step):
                    view = buffer[start : min(start + self._step, length)]
                    if file.read_into(view, offset + start) != len(view):
                        status = Status.CORRUPT
                        break
                    hasher.update(view)
            except StorageError:
                status = Status.GATEWAY_FAULT
            if status is Status.OK and hasher.intdigest() != checksum:
                status = Status.CORRUPT
            statuses.append(status)
        return bytes(statuses)

    def read_unseen(self, sources: Sequence[Source], buffers: Sequence[memoryview]) -> bytes:
        """The bytes into `buffers`, which nothing here looks at: REFUSED where the memory has gone."""
        step = self._step
        statuses = bytearray()
        for (file, offset, length, _), buffer in zip(sources, buffers, strict=True):
            status = Status.OK
            try:
                for start in range(0, length, step):
                    count = min(step, length - start)
                    if file.read_into(buffer[start : start + count], offset + start) != count:
                        status = Status.CORRUPT
                        break
            except MemoryGone:
                status = Status.REFUSED
            except StorageError:
                status = Status.GATEWAY_FAULT
            statuses.append(status)
        return bytes(statuses)

    def write(
        self, target: Target, payloads: Sequence[memoryview | Extent], records: Sequence[Record]
    ) -> Written:
        """Check and write each payload where its record says, then commit those that are whole."""
        statuses = bytearray()
        for data, record in zip(payloads, records, strict=True):
            if isinstance(data, Extent):
                statuses.append(self._write_extent(target, data, record))
                continue
            if xxhash.xxh3_64_intdigest(data) != record.checksum:
                statuses.append(Status.CORRUPT)
                continue
            try:
                for start in range(0, record.length, self._step):
                    target.data.write(data[start : start + self._step], record.offset + start)
            except StorageError as error:
                statuses.append(status_of(error))
            else:
                statuses.append(Status.OK)
        return self.commit(target, records, statuses)

    def _write_extent(self, target: Target, extent: Extent, record: Record) -> Status:
        """Every byte is taken out of the foreign file once, and what was taken is both hashed and written.
        An object in one command is written if it is right; one in several counts if it is."""
        hasher = xxhash.xxh3_64()
        view = self._scratch.view[:0]
        try:
            for start in range(0, record.length, self._step):
                if start:
                    target.data.write(view, record.offset + start - self._step)
                view = self._scratch.view[: min(self._step, record.length - start)]
                if not _take(extent, start, view):
                    return Status.REFUSED
                hasher.update(view)
            if hasher.intdigest() != record.checksum:
                return Status.CORRUPT
            if record.length:
                target.data.write(view, record.offset + record.length - len(view))
        except StorageError as error:
            return status_of(error)
        return Status.OK

    def copy(self, data: DeviceFile, copies: Sequence[Copy]) -> bytearray:
        """Write each object a second time where its record says; OK for each that was intact."""
        statuses = bytearray()
        for (file, offset, length, checksum), record in copies:
            hasher = xxhash.xxh3_64()
            status = Status.OK
            try:
                for start in range(0, length, self._step):
                    view = self._scratch.view[: min(self._step, length - start)]
                    if file.read_into(view, offset + start) != len(view):
                        break
                    hasher.update(view)
                    data.write(view, record.offset + start)
            except StorageError as error:
                status = status_of(error)
            if status is Status.OK and hasher.intdigest() != checksum:
                status = Status.CORRUPT
            statuses.append(status)
        return statuses

    def commit(self, target: Target, records: Sequence[Record], statuses: bytearray) -> Written:
        """Append the records whose payload is in. This order is what makes an object whole or absent."""
        whole = [record for record, status in zip(records, statuses, strict=True) if status == Status.OK]
        if not whole:
            return Written(bytes(statuses))
        try:
            if target.is_durable:
                target.data.sync()
            target.journal.append(whole)
            if target.is_durable:
                target.journal.sync()
        except StorageError as error:
            failed = status_of(error)
            return Written(bytes(failed if s == Status.OK else s for s in statuses), is_journal_suspect=True)
        return Written(bytes(statuses))


def status_of(error: StorageError) -> Status:
    """What a client is told about a device's refusal."""
    return Status.CAPACITY_EXHAUSTED if isinstance(error, DeviceFull) else Status.GATEWAY_FAULT


def _take(extent: Extent, start: int, view: memoryview) -> bool:
    """Fill `view` from `start` on; whether the file had that much."""
    done = 0
    try:
        while done < len(view):
            count = os.preadv(extent.fd, (view[done:],), extent.offset + start + done)
            if not count:
                return False
            done += count
    except OSError:
        return False
    return True
