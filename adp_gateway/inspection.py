"""`stat` and `dump`: what is in a store, read from its journals and changed by nobody.

The files are opened for reading only and no lock is taken, so this may be done beside a gateway that is
serving. What it reports of a live store is a snapshot of no single moment: each segment is as it was when its
turn came, a segment that was removed meanwhile is passed over, and the last record of a journal may still be
on its way. Nothing is ever taken for an object that is none: every record has its checksum.

Memory does not grow with the store: a segment's journal at a time, and a number for each of its objects.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import attrs

from adp_gateway.device.file import LOCK_NAME
from adp_gateway.errors import CorruptRecord, DeviceFault, NotAStore, StorageError
from adp_gateway.store.format import (
    FORMAT_VERSION,
    RECORD_BYTES,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_NAME,
    Kind,
    Record,
    check_superblock,
    data_name,
    decode_header,
    decode_records,
    is_superblock_of_ours,
    journal_name,
    parse_name,
)
from adp_gateway.store.segment import object_charge

_CHUNK_RECORDS = 4096
_BLOCK_BYTES = 512  # what st_blocks counts in, whatever the file system


@attrs.frozen(kw_only=True)
class SegmentSummary:
    """One segment. `objects` are those that its journal says are there.

    device_bytes: what both files take on the device. live_bytes: what the objects take of that, their records
        included; the rest is dead, reserved, or not filled yet.
    age_seconds: since something was last written to it.
    """

    segment_id: int
    segment_bytes: int
    device_bytes: int
    objects: int
    object_bytes: int
    live_bytes: int
    age_seconds: float
    commits: int
    damaged_records: int
    torn_bytes: int

    @property
    def dead_bytes(self) -> int:
        """What is on the device and no object's."""
        return max(0, self.device_bytes - self.live_bytes)


@attrs.define
class SegmentReader:
    """One journal, as it was when this was made; what is appended later is not seen.

    Raises:
        DeviceFault: a file of it is not there (any more), or cannot be read.
    """

    directory: Path
    segment_id: int
    segment_bytes: int = attrs.field(init=False, default=0)
    commits: int = attrs.field(init=False, default=0)
    damaged_records: int = attrs.field(init=False, default=0)
    torn_bytes: int = attrs.field(init=False, default=0)
    _journal_bytes: int = attrs.field(init=False, default=0)
    _data_bytes: int = attrs.field(init=False, default=0)
    _device_bytes: int = attrs.field(init=False, default=0)
    _written: float = attrs.field(init=False, default=0.0)
    _live: dict[int, int] = attrs.field(
        init=False, factory=dict
    )  # offset of an object to the slot of its commit

    def __attrs_post_init__(self) -> None:
        try:
            log, data = self._stat(journal_name(self.segment_id)), self._stat(data_name(self.segment_id))
        except OSError as error:
            raise DeviceFault(f"segment {self.segment_id}: {error.strerror}") from error
        self._journal_bytes, self._data_bytes = log.st_size, data.st_size
        self._device_bytes = (log.st_blocks + data.st_blocks) * _BLOCK_BYTES
        self._written = max(log.st_mtime, data.st_mtime)
        slots = 1
        for slot, record in self._records():
            if record is None:
                continue
            self.damaged_records += slot - slots
            slots = slot + 1
            if record.kind == Kind.COMMIT:
                self.commits += 1
                self._live[record.offset] = slot
            else:
                self._live.pop(record.offset, None)
        self.torn_bytes = max(0, self._journal_bytes - slots * RECORD_BYTES)

    def objects(self) -> Iterator[Record]:
        """The commit of each object, in the order in which they were written.

        Raises:
            DeviceFault: the journal has gone meanwhile.
        """
        for slot, record in self._records():
            if record is None or record.kind != Kind.COMMIT or self._live.get(record.offset) != slot:
                continue
            if record.offset + record.length <= self._data_bytes:
                yield record

    def summary(self, objects: int, object_bytes: int, live_bytes: int) -> SegmentSummary:
        """What it comes to, with what its objects come to."""
        return SegmentSummary(
            segment_id=self.segment_id,
            segment_bytes=self.segment_bytes,
            device_bytes=self._device_bytes,
            objects=objects,
            object_bytes=object_bytes,
            live_bytes=live_bytes,
            age_seconds=max(0.0, time.time() - self._written),
            commits=self.commits,
            damaged_records=self.damaged_records,
            torn_bytes=self.torn_bytes,
        )

    def _stat(self, name: str) -> os.stat_result:
        return (self.directory / name).stat()

    def _records(self) -> Iterator[tuple[int, Record | None]]:
        try:
            with (self.directory / journal_name(self.segment_id)).open("rb") as file:
                try:
                    self.segment_bytes = decode_header(file.read(RECORD_BYTES)).segment_bytes
                except CorruptRecord:
                    file.seek(RECORD_BYTES)
                slot, slots = 1, self._journal_bytes // RECORD_BYTES
                while slot < slots:
                    raw = file.read(min(_CHUNK_RECORDS, slots - slot) * RECORD_BYTES)
                    if not raw:
                        return
                    found = decode_records(raw, segment_id=self.segment_id, slot=slot)
                    for slot, record in enumerate(found, slot):  # noqa: B020 (goes on where the chunk ends)
                        yield slot, record
                    slot += 1
        except OSError as error:
            raise DeviceFault(f"segment {self.segment_id}: {error.strerror}") from error


def segment_ids(directory: Path) -> list[int]:
    """The segments of a store, oldest first.

    Raises:
        NotAStore: there is none.
        UnsupportedFormat: a newer version's.
        StorageError: the directory cannot be read.
    """
    if not directory.is_dir():
        raise StorageError(f"{directory} is not a directory")
    try:
        names = {path.name for path in directory.iterdir()}
        found = sorted({parsed[0] for name in names if (parsed := parse_name(name)) is not None})
        raw = _superblock(directory) if SUPERBLOCK_NAME in names else b""
    except OSError as error:
        raise StorageError(f"{directory} cannot be read: {error.strerror}") from error
    if not is_superblock_of_ours(raw):
        if not found:
            raise NotAStore(f"{directory} holds no store")
        return found  # a gateway would start on it, too
    check_superblock(raw)
    return found


def _superblock(directory: Path) -> bytes:
    with (directory / SUPERBLOCK_NAME).open("rb") as file:
        return file.read(SUPERBLOCK_BYTES)


def is_in_use(directory: Path) -> bool | None:
    """Whether a process has the store open; None where the system does not tell.

    Asked of the kernel's list: trying the lock could keep a gateway from starting in that moment.
    """
    try:
        status = (directory / LOCK_NAME).stat()
        locks = Path("/proc/locks").read_text()
    except FileNotFoundError:
        return False
    except OSError:
        return None
    place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any("FLOCK" in line and place in line.split() for line in locks.splitlines())


@attrs.define
class Totals:
    """Objects of a namespace, or of all."""

    objects: int = 0
    object_bytes: int = 0
    charged_bytes: int = 0  # as they count against a quota

    def add(self, record: Record) -> None:
        """One more."""
        self.objects += 1
        self.object_bytes += record.length
        self.charged_bytes += object_charge(record.length)


@attrs.frozen(kw_only=True)
class StoreSummary:
    """What a store comes to. `unreadable`: what could not be read, in words."""

    directory: Path
    format_version: int
    is_in_use: bool | None
    free_bytes: int
    segments: tuple[SegmentSummary, ...]
    namespaces: dict[bytes, Totals]
    unreadable: tuple[str, ...]

    @property
    def totals(self) -> Totals:
        """Of all objects."""
        parts = self.namespaces.values()
        return Totals(
            sum(part.objects for part in parts),
            sum(part.object_bytes for part in parts),
            sum(part.charged_bytes for part in parts),
        )


def summarise(directory: Path) -> StoreSummary:
    """Read every journal of a store. Blocks. Raises as `segment_ids`."""
    segments: list[SegmentSummary] = []
    namespaces: dict[bytes, Totals] = {}
    unreadable: list[str] = []
    for segment_id in segment_ids(directory):
        try:
            reader = SegmentReader(directory, segment_id)
            here = Totals()
            for record in reader.objects():
                here.add(record)
                namespaces.setdefault(record.namespace, Totals()).add(record)
        except DeviceFault as error:
            if _is_there(directory, segment_id):
                unreadable.append(str(error))
            continue
        segments.append(reader.summary(here.objects, here.object_bytes, here.charged_bytes))
    status = os.statvfs(directory)
    return StoreSummary(
        directory=directory,
        format_version=FORMAT_VERSION,
        is_in_use=is_in_use(directory),
        free_bytes=status.f_bavail * status.f_frsize,
        segments=tuple(segments),
        namespaces=namespaces,
        unreadable=tuple(unreadable),
    )


def walk(directory: Path, *, namespace: bytes = b"", key: bytes = b"") -> Iterator[tuple[int, Record] | str]:
    """Every object whose namespace and key begin so, with its segment; a text for what could not be read.

    After a crash a key may come twice, until a gateway has been started: the higher sequence counts. Raises
    as `segment_ids`.
    """
    for segment_id in segment_ids(directory):
        try:
            for record in SegmentReader(directory, segment_id).objects():
                if record.namespace.startswith(namespace) and record.key.startswith(key):
                    yield segment_id, record
        except DeviceFault as error:
            if _is_there(directory, segment_id):
                yield str(error)


def _is_there(directory: Path, segment_id: int) -> bool:
    """Whether a part of it is still there: one that a gateway has removed meanwhile is no trouble."""
    return any((directory / name(segment_id)).exists() for name in (data_name, journal_name))
