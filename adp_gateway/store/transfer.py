"""What the I/O threads do: bytes between files and memory, hashed on the way, in commands the device takes.

One call serves a whole batch, so a batch costs one hop to a thread and back. Bytes that are only checked pass
through one scratch buffer per thread, of one command's length, which stays in the processor's cache. Objects
that stand side by side and fit one command are written in one.
"""

import os
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import attrs
import xxhash

from adp_gateway.device.base import MAX_EXTENTS, DeviceFile, padded_bytes
from adp_gateway.device.direct import Bounce
from adp_gateway.errors import DeviceFull, MemoryGone, StorageError

from .base import Extent, Status
from .format import Record
from .journal import Journal
from .threads import Progress

#: Read in one call, so that there is an end to each.
PORTION_BYTES = 32 << 20
#: Less than this is not worth a thread of its own.
SHARE_BYTES = 1 << 20


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


class _Run:
    """Objects that stand side by side in `file`, to be written in one command."""

    def __init__(self, file: DeviceFile, max_bytes: int, statuses: bytearray) -> None:
        self._file = file
        self._max_bytes = max_bytes
        self._statuses = statuses
        self._places: list[int] = []
        self._views: list[memoryview] = []
        self._start = 0
        self.size_bytes = 0

    def make_room(self, record: Record) -> None:
        """Write what is here unless `record` goes behind it and into the same command."""
        if self._views and (
            record.offset != self._start + self.size_bytes
            or self.size_bytes + padded_bytes(record.length) > self._max_bytes
            or len(self._views) == MAX_EXTENTS
        ):
            self.write()

    def add(self, place: int, view: memoryview, offset: int) -> None:
        """Behind the others, which `make_room` has seen to; its outcome goes to `statuses[place]`."""
        if not self._views:
            self._start = offset
        self._places.append(place)
        self._views.append(view)
        self.size_bytes += padded_bytes(view.nbytes)

    def write(self) -> None:
        """Write what is here. What fails together is tried again one by one: items fail one by one."""
        try:
            if self._views:
                self._file.write_extents(self._views, self._start)
        except StorageError as error:
            if len(self._views) == 1:
                self._statuses[self._places[0]] = status_of(error)
            else:
                self._write_each()
        self._places.clear()
        self._views.clear()
        self.size_bytes = 0

    def _write_each(self) -> None:
        offset = self._start
        for place, view in zip(self._places, self._views, strict=True):
            try:
                self._file.write_extents([view], offset)
            except StorageError as error:
                self._statuses[place] = status_of(error)
            offset += padded_bytes(view.nbytes)


class Transfers:
    """The blocking half of a store. Safe in any number of threads at once."""

    def __init__(self, max_command_bytes: int) -> None:
        self._step = max_command_bytes
        self._scratch = Bounce(max_command_bytes)

    def verify(
        self, sources: Sequence[Source], *, is_kept: bool = False, progress: Progress | None = None
    ) -> bytes:
        """OK, CORRUPT or GATEWAY_FAULT for each. `is_kept`: what is right is about to be read again.

        This and the other reads write down how far they are in `progress`, and stop there if it is given up.
        """
        scratch = self._scratch.view
        progress = progress or Progress()
        statuses = progress.statuses
        for file, offset, length, checksum in sources:
            if progress.is_given_up:
                break
            try:
                if length <= self._step:
                    is_whole = (
                        file.read_into(scratch[: padded_bytes(length)], offset, is_kept=is_kept) >= length
                    )
                    digest = xxhash.xxh3_64_intdigest(scratch[:length])
                else:
                    is_whole, digest = self._digest(file, offset, length, is_kept)
            except StorageError:
                statuses.append(Status.GATEWAY_FAULT)
            else:
                statuses.append(Status.OK if is_whole and digest == checksum else Status.CORRUPT)
        return bytes(statuses)

    def _digest(self, file: DeviceFile, offset: int, length: int, is_kept: bool) -> tuple[bool, int]:
        hasher = xxhash.xxh3_64()
        scratch = self._scratch.view
        for start in range(0, length, self._step):
            count = min(self._step, length - start)
            if file.read_into(scratch[: padded_bytes(count)], offset + start, is_kept=is_kept) < count:
                return False, 0
            hasher.update(scratch[:count])
        return True, hasher.intdigest()

    def read_into(
        self, sources: Sequence[Source], buffers: Sequence[memoryview], *, progress: Progress | None = None
    ) -> bytes:
        """As `verify`, with the bytes in `buffers` afterwards; each at least as long as its object."""
        progress = progress or Progress()
        statuses = progress.statuses
        for (file, offset, length, checksum), buffer in zip(sources, buffers, strict=True):
            if progress.is_given_up:
                break
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

    def read_unseen(
        self, sources: Sequence[Source], buffers: Sequence[memoryview], *, progress: Progress | None = None
    ) -> bytes:
        """The bytes into `buffers`, which nothing here looks at: REFUSED where the memory has gone."""
        step = self._step
        progress = progress or Progress()
        statuses = progress.statuses
        for (file, offset, length, _), buffer in zip(sources, buffers, strict=True):
            if progress.is_given_up:
                break
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
        statuses = bytearray(len(records))  # OK, until something is wrong
        run = _Run(target.data, self._step, statuses)
        for place, (data, record) in enumerate(zip(payloads, records, strict=True)):
            if record.length > self._step:
                run.write()
                statuses[place] = self._write_long(target.data, data, record)
                continue
            run.make_room(record)
            if isinstance(data, Extent):
                view = self._scratch.view[run.size_bytes :][: record.length]
                if not _take(data, 0, view):
                    statuses[place] = Status.REFUSED
                    continue
            else:
                view = data
            if xxhash.xxh3_64_intdigest(view) != record.checksum:
                statuses[place] = Status.CORRUPT
            elif record.length:
                run.add(place, view, record.offset)
        run.write()
        return self.commit(target, records, statuses)

    def _write_long(self, file: DeviceFile, data: memoryview | Extent, record: Record) -> Status:
        """An object in several commands. Memory of ours is checked first. Of a foreign file every byte is
        taken once, and what was taken is both hashed and written: it counts if it was right."""
        if not isinstance(data, Extent) and xxhash.xxh3_64_intdigest(data) != record.checksum:
            return Status.CORRUPT
        hasher = xxhash.xxh3_64()
        try:
            for start in range(0, record.length, self._step):
                count = min(self._step, record.length - start)
                if isinstance(data, Extent):
                    view = self._scratch.view[:count]
                    if not _take(data, start, view):
                        return Status.REFUSED
                    hasher.update(view)
                else:
                    view = data[start : start + count]
                file.write_extents([view], record.offset + start)
        except StorageError as error:
            return status_of(error)
        if isinstance(data, Extent) and hasher.intdigest() != record.checksum:
            return Status.CORRUPT
        return Status.OK

    def copy(self, data: DeviceFile, copies: Sequence[Copy]) -> bytearray:
        """Write each object a second time where its record says; OK for each that was intact."""
        statuses = bytearray()
        for (file, offset, length, checksum), record in copies:
            hasher = xxhash.xxh3_64()
            status = Status.OK
            try:
                for start in range(0, length, self._step):
                    count = min(self._step, length - start)
                    if file.read_into(self._scratch.view[: padded_bytes(count)], offset + start) < count:
                        break
                    view = self._scratch.view[:count]
                    hasher.update(view)
                    data.write_extents([view], record.offset + start)
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


def shared_out(lengths: Sequence[int], most: int) -> list[slice]:
    """Cut a batch into at most `most` shares of about the same size, none much below `SHARE_BYTES`."""
    total = sum(lengths)
    count = max(1, min(most, total // SHARE_BYTES))
    shares: list[slice] = []
    start = taken = 0
    for end, length in enumerate(lengths, 1):
        taken += length
        if taken * count >= total * (len(shares) + 1) and len(shares) < count - 1:
            shares.append(slice(start, end))
            start = end
    if start < len(lengths) or not shares:
        shares.append(slice(start, len(lengths)))
    return shares


def portions(lengths: Sequence[int]) -> list[slice]:
    """Cut a batch into pieces of at most `PORTION_BYTES`, or of one object."""
    cuts = [0]
    size_bytes = 0
    for at, length in enumerate(lengths):
        if at > cuts[-1] and size_bytes + length > PORTION_BYTES:
            cuts.append(at)
            size_bytes = 0
        size_bytes += length
    return [slice(start, end) for start, end in pairwise([*cuts, len(lengths)])]


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
