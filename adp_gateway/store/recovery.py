"""From what a crash left to a working catalog. Reads journals only, never payloads.

It does not refuse to start for anything that a crash or a damaged disk can do: what does not decode is cut
off (at the end of a journal) or passed over (in the middle), and counted. Journals are read in pieces, whole
columns of records at a time, and a hole longer than any journal ends one. The one thing it refuses is a store
of a newer format, before it has touched anything.
"""

import contextlib
import errno
import logging
from collections.abc import Iterator
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt

from adp_gateway.device.base import Device, DeviceFile
from adp_gateway.errors import CorruptRecord, DeviceFault, NotAStore, StorageError

from .catalog import Catalog
from .format import (
    NAMESPACE_BYTES,
    RECORD_BYTES,
    SUPERBLOCK_BYTES,
    SUPERBLOCK_NAME,
    UNIT_BYTES,
    Header,
    Kind,
    Record,
    Records,
    check_superblock,
    data_name,
    decode_columns,
    decode_header,
    encode_blank,
    encode_header,
    encode_superblock,
    is_superblock_of_ours,
    journal_name,
    parse_name,
    to_records,
    unflipped_record,
)
from .index import Entry
from .journal import Journal
from .quotas import Account
from .replay import Replay
from .segment import Layout, Segment
from .table import ENTRY

logger = logging.getLogger(__name__)

#: Errors that say nothing about the device, and must not cost a single object.
_OUR_OWN_FAULT: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM})
_PIECE_BYTES: Final = 8192 * RECORD_BYTES  # of a journal, in memory at a time
_LONGEST_GAP_BYTES: Final = 64 << 20  # the journal of the largest segment that nobody asked for
_MOST_BLANKS: Final = 4096  # records to a journal; what has more damage is left as it is
_NAMESPACE: Final = np.dtype((np.void, NAMESPACE_BYTES))


@attrs.frozen(kw_only=True)
class RecoveryReport:
    """What opening a store found, for the log."""

    objects: int = 0
    segments: int = 0
    cut_bytes: int = 0  # torn tails of journals
    repaired_records: int = 0  # with one bit flipped, and put back
    damaged_records: int = 0  # headers, and records in the middle of a journal, that do not decode
    doubtful_commits: int = 0  # dropped: a damaged record may have been their kill
    missing_payloads: int = 0  # commits whose bytes are not in the data file
    superseded_commits: int = 0  # older versions that had not been killed yet
    removed_files: int = 0  # left over from segments half made or half removed
    unreadable_segments: int = 0  # dropped: nobody knows what was in them
    is_superblock_new: bool = False

    def __str__(self) -> str:
        found = [
            f"{self.objects} objects in {self.segments} segments",
            self.cut_bytes and f"{self.cut_bytes} bytes of torn journals cut off",
            self.repaired_records and f"{self.repaired_records} journal records with a flipped bit repaired",
            self.damaged_records and f"{self.damaged_records} damaged journal records",
            self.doubtful_commits and f"{self.doubtful_commits} objects dropped that may have been deleted",
            self.missing_payloads and f"{self.missing_payloads} objects without their bytes dropped",
            self.superseded_commits and f"{self.superseded_commits} older versions dropped",
            self.removed_files and f"{self.removed_files} leftover files removed",
            self.unreadable_segments and f"{self.unreadable_segments} unreadable segments dropped",
            self.is_superblock_new and "superblock written",
        ]
        return ", ".join(str(part) for part in found if part)


@attrs.frozen(kw_only=True)
class SegmentScan:
    """One journal, read and replayed. Nothing has been changed."""

    segment_id: int
    header: Header | None
    data_bytes: int
    journal_bytes: int
    slots: int  # up to and including the last record that decodes; the header has the first
    live: Records
    missing: Records  # committed and not killed, but the data file ends before they do
    doubtful: Records  # committed, and killed by what may have been a kill
    commits: int  # as `Segment.commits`
    tail_bytes: int
    last_sequence: int  # of all records, also those that are void
    flipped_records: int
    damaged_records: int
    repairs: dict[int, bytes]  # what should stand in the slots of both, as far as that is not too much

    @property
    def cut_bytes(self) -> int:
        """What stands behind the last good record."""
        return max(0, self.journal_bytes - self.slots * RECORD_BYTES)

    @property
    def is_repairable(self) -> bool:
        """Whether `repairs` has all of the damage."""
        return len(self.repairs) == self.flipped_records + self.damaged_records

    @property
    def is_void(self) -> bool:
        """Whether the segment was being made when the power went: no header, no record."""
        return self.header is None and self.slots == 1


def check_place(device: Device) -> None:
    """Return if the device is empty, or holds a store, however damaged. Changes nothing.

    A superblock that has been made, but not written, is an empty device. A file of that name that another
    program made is not.

    Raises:
        NotAStore: it is somebody else's.
        StorageError: it cannot be listed.
    """
    names = device.names()
    superblock = b""
    if SUPERBLOCK_NAME in names:
        superblock = _superblock(device)
    others = [name for name in names if name != SUPERBLOCK_NAME or any(superblock)] + device.strangers()
    if not others or is_superblock_of_ours(superblock) or any(_is_journal(device, name) for name in names):
        return
    raise NotAStore(
        f"the data directory holds no store, but is not empty ({others[0]!r} is there): name an empty one"
    )


def _superblock(device: Device) -> bytes:
    with contextlib.closing(device.open(SUPERBLOCK_NAME)) as file:
        raw = memoryview(bytearray(SUPERBLOCK_BYTES))
        return bytes(raw[: file.read_into(raw, 0)])


def _is_journal(device: Device, name: str) -> bool:
    if not name.endswith(".log") or parse_name(name) is None:
        return False
    raw = memoryview(bytearray(RECORD_BYTES))
    try:
        with contextlib.closing(device.open(name)) as file:
            decode_header(bytes(raw[: file.read_into(raw, 0)]))
    except StorageError:
        return False
    return True


def check_device_format(device: Device) -> None:
    """Return if this version can work on what is on the device.

    Raises:
        CorruptRecord: there is no superblock, or a damaged one.
        UnsupportedFormat: a newer version's.
    """
    if SUPERBLOCK_NAME not in device.names():
        raise CorruptRecord("there is no superblock: not a store")
    check_superblock(_superblock(device))


def prepare_superblock(device: Device) -> bool:
    """Check the superblock, or write one where there is none, or a damaged one. Whether it was written.

    Raises:
        UnsupportedFormat: the store is a newer version's.
    """
    if SUPERBLOCK_NAME in device.names():
        with contextlib.suppress(CorruptRecord):
            check_device_format(device)
            if _superblock(device) == encode_superblock():
                return False
        device.remove(SUPERBLOCK_NAME)
    with contextlib.closing(device.create(SUPERBLOCK_NAME)) as file:
        file.write(memoryview(encode_superblock()), 0)
        file.sync()
    device.sync_names()
    return True


def segment_files(device: Device) -> dict[int, set[str]]:
    """Which of "data" and "log" there is, by segment, oldest first."""
    found: dict[int, set[str]] = {}
    for name in device.names():
        parsed = parse_name(name)
        if parsed is not None:
            found.setdefault(parsed[0], set()).add(parsed[1])
    return dict(sorted(found.items()))


def scan_segment(
    data: DeviceFile, journal: DeviceFile, *, segment_id: int, max_command_bytes: int
) -> SegmentScan:
    """Replay one journal.

    Raises:
        DeviceFault: it cannot be read.
    """
    data_bytes = data.size()
    journal_bytes = journal.size()
    header = None
    flipped = 0
    repairs: dict[int, bytes] = {}
    with contextlib.suppress(CorruptRecord):
        raw = _contents(journal, 0, min(RECORD_BYTES, journal_bytes), max_command_bytes)
        header = decode_header(bytes(raw))
        if raw != encode_header(header):
            repairs[0] = encode_header(header)
            flipped += 1
    # No journal has a longer gap than it has room: behind such a hole, a file of any size, comes nothing.
    longest_gap = max(_LONGEST_GAP_BYTES, Layout(header.segment_bytes).journal_bytes if header else 0)
    gap = 0
    replay = Replay()
    damage = _Damage(segment_id)
    for start in range(RECORD_BYTES, journal_bytes, _PIECE_BYTES):
        raw = _contents(journal, start, min(_PIECE_BYTES, journal_bytes - start), max_command_bytes)
        if not np.frombuffer(raw, np.uint8).any():
            gap += len(raw)
            if gap > longest_gap:
                break
            continue
        gap = 0
        slot = start // RECORD_BYTES
        records, is_whole = decode_columns(raw, segment_id=segment_id, slot=slot)
        damage.mend(raw, is_whole, slot=slot)
        replay.add(records, is_whole, slot=slot)
    replayed = replay.outcome(data_bytes=data_bytes)
    repairs |= damage.flipped
    flipped += len(damage.flipped)
    is_headless = header is None and replayed.slots > 1
    if is_headless:
        header = Header(segment_id, 0)  # a size that no segment has: it is not gone on with
        repairs[0] = encode_header(header)
    lost = [slot for slot in damage.lost if slot < replayed.slots]
    if len(lost) == replayed.damaged_records:
        repairs |= {slot: encode_blank(segment_id=segment_id, slot=slot) for slot in lost}
    return SegmentScan(
        segment_id=segment_id,
        header=header,
        data_bytes=data_bytes,
        journal_bytes=journal_bytes,
        slots=replayed.slots,
        live=replayed.live,
        missing=replayed.missing,
        doubtful=replayed.doubtful,
        commits=replayed.commits,
        tail_bytes=replayed.tail_bytes,
        last_sequence=replayed.last_sequence,
        flipped_records=flipped,
        damaged_records=replayed.damaged_records + is_headless,
        repairs=repairs,
    )


class _Damage:
    """What does not decode in one journal: flipped bits are put back, other slots remembered."""

    def __init__(self, segment_id: int) -> None:
        self._segment_id = segment_id
        self.flipped: dict[int, bytes] = {}
        self.lost: list[int] = []

    def mend(self, raw: bytearray, is_whole: npt.NDArray[np.bool_], *, slot: int) -> None:
        """Put flipped bits back, in `raw` and in `is_whole`, of records between two that decode.

        Of the first and last in `raw` only one neighbour is looked at.
        """
        bad = np.flatnonzero(~is_whole)
        neighbours = np.ones(len(is_whole) + 2, dtype=np.bool_)
        neighbours[1:-1] = is_whole
        is_alone = neighbours[bad] & neighbours[bad + 2]
        for position, is_one in zip(bad.tolist(), is_alone.tolist(), strict=True):
            number = slot + position
            start = position * RECORD_BYTES
            whole = None
            if is_one:
                torn = bytes(raw[start : start + RECORD_BYTES])
                whole = unflipped_record(torn, segment_id=self._segment_id, slot=number)
            if whole is not None:
                raw[start : start + RECORD_BYTES] = self.flipped[number] = whole
                is_whole[position] = True
            elif len(self.lost) < _MOST_BLANKS:
                self.lost.append(number)


def recover(device: Device, accounts: tuple[Account, ...] = ()) -> tuple[Catalog, RecoveryReport]:
    """The catalog of whatever is on the device. Blocks. Kills that it calls for wait in `Catalog.unkilled`.

    Every segment comes back sealed; `resume` opens the newest again.

    Raises:
        UnsupportedFormat: the store is a newer version's; nothing has been changed.
        StorageError: the directory itself cannot be listed or written, or this process may not open as many
            files as there are, or not these.
    """
    is_superblock_new = prepare_superblock(device)
    catalog = Catalog(accounts)
    found = segment_files(device)
    catalog.next_segment_id = max(found, default=0) + 1
    cut = repaired = damaged = doubtful = missing = superseded = removed = unreadable = 0
    for segment_id, kinds in found.items():
        names = (journal_name(segment_id), data_name(segment_id))
        if len(kinds) < 2:
            removed += _removed(device, journal_name(segment_id) if "log" in kinds else data_name(segment_id))
            continue
        try:
            opened = _opened(device, segment_id)
        except StorageError as error:
            if isinstance(error.__cause__, OSError) and error.__cause__.errno in _OUR_OWN_FAULT:
                for segment in catalog.segments.values():
                    segment.data.close()
                    segment.journal.close()
                raise
            # Not left for a better day: on that day it would bring back what has been deleted meanwhile.
            logger.warning("segment %d is dropped, its journal cannot be read: %s", segment_id, error)
            unreadable += 1
            are_removed = [_removed(device, name) for name in names]
            if not all(are_removed):
                catalog.stray_bytes += sum(_size(device, name) for name in names)
            continue
        if opened is None:
            removed += sum(_removed(device, name) for name in names)
            continue
        segment, scan = opened
        catalog.segments[segment_id] = segment
        cut += scan.cut_bytes
        repaired += scan.flipped_records
        damaged += scan.damaged_records
        if scan.damaged_records:
            logger.warning(
                "segment %d: %d journal records are damaged: objects may be missing",
                segment_id,
                scan.damaged_records,
            )
        doubtful += len(scan.doubtful)
        missing += len(scan.missing)
        void = [scan.missing]
        if segment.journal.length_bytes == scan.slots * RECORD_BYTES:  # not killed yet
            void.append(scan.doubtful)
        for record in to_records(np.concatenate(void)):
            catalog.void(record.namespace, record.key, _entry(segment_id, record))
        superseded += _commit(catalog, segment_id, scan.live)
        # Above void ones too: should damage to its kill bring a version back, later ones must win over it.
        catalog.next_sequence = max(catalog.next_sequence, scan.last_sequence + 1)
    return catalog, RecoveryReport(
        objects=len(catalog.index),
        segments=len(catalog.segments),
        cut_bytes=cut,
        repaired_records=repaired,
        damaged_records=damaged,
        doubtful_commits=doubtful,
        missing_payloads=missing,
        superseded_commits=superseded,
        removed_files=removed,
        unreadable_segments=unreadable,
        is_superblock_new=is_superblock_new,
    )


def resume(catalog: Catalog, *, segment_bytes: int) -> None:
    """Go on filling the newest segment if it has the size that new ones will have, and room. Blocks."""
    newest = next(reversed(catalog.segments.values()), None)
    if newest is None or newest.layout.segment_bytes != segment_bytes:
        return
    newest.is_sealed = newest.is_trimmed = False
    try:
        if newest.has_room(0):
            newest.data.allocate(newest.layout.data_bytes)
            catalog.active = newest
    except StorageError:
        newest.is_sealed = True
    newest.is_sealed = catalog.active is not newest


def _opened(device: Device, segment_id: int) -> tuple[Segment, SegmentScan] | None:
    """The segment with its torn tail cut off, or None if it is void.

    The tail is cut, not only ignored: an append behind it would be hidden from the next recovery. What made a
    commit doubtful may stand there, so its kill is written first.
    """
    data = journal = None
    try:
        data = device.open(data_name(segment_id), has_extents=True)
        journal = device.open(journal_name(segment_id))
        step = device.max_command_bytes
        scan = scan_segment(data, journal, segment_id=segment_id, max_command_bytes=step)
        if scan.is_void:
            data.close()
            journal.close()
            return None
        appending = Journal(journal, segment_id=segment_id, slots=scan.slots, max_command_bytes=step)
        if len(scan.doubtful):
            with contextlib.suppress(StorageError):  # `recover` has it tried again
                appending.append([record._replace(kind=Kind.KILL) for record in to_records(scan.doubtful)])
        if journal.size() > appending.length_bytes:
            journal.truncate(appending.length_bytes)
        if scan.cut_bytes or len(scan.doubtful):
            journal.sync()
        if appending.length_bytes == (scan.slots + len(scan.doubtful)) * RECORD_BYTES:
            repair_journal(journal, scan)  # only now: what is lost made a commit doubtful
        if scan.data_bytes > scan.tail_bytes:
            data.truncate(scan.tail_bytes)
    except StorageError:
        for file in (data, journal):
            if file is not None:
                file.close()
        raise
    segment = Segment(
        segment_id=segment_id,
        layout=Layout(scan.header.segment_bytes if scan.header else 0),
        data=data,
        journal=appending,
        tail_bytes=scan.tail_bytes,
        commits=scan.commits,
        is_sealed=True,
        is_trimmed=True,
        is_dirty=True,
    )
    return segment, scan


def repair_journal(journal: DeviceFile, scan: SegmentScan) -> None:
    """Write what should stand in damaged slots, and make it last.

    Raises:
        StorageError: the device refused; what is not repaired is found again.
    """
    for slot, whole in scan.repairs.items():
        journal.write(memoryview(whole), slot * RECORD_BYTES)
    if scan.repairs:
        journal.sync()


def _entry(segment_id: int, record: Record) -> Entry:
    return Entry(segment_id, record.offset, record.length, record.checksum, record.sequence)


def _commit(catalog: Catalog, segment_id: int, live: Records) -> int:
    """Commit what a journal holds; how many of them met another version."""
    if not len(live):
        return 0
    entries = np.zeros(len(live), dtype=ENTRY)
    entries["segment_id"] = segment_id
    entries["offset"] = live["unit"].astype(np.uint64) * np.uint64(UNIT_BYTES)
    for name in ("length", "checksum", "sequence"):
        entries[name] = live[name]
    superseded = 0
    for namespace, size, positions in _alike(live):
        keys = live["key"][positions, :size]
        superseded += catalog.commit_columns(namespace, keys, entries[positions])
    return superseded


def _alike(records: Records) -> Iterator[tuple[bytes, int, npt.NDArray[np.int64]]]:
    """The positions of records of one namespace and length of keys, for each."""
    sizes, namespaces = records["key_bytes"], records["namespace"]
    if (sizes == sizes[0]).all() and (namespaces == namespaces[0]).all():
        yield namespaces[0].tobytes(), int(sizes[0]), np.arange(len(records))
        return
    numbers: dict[tuple[bytes, int], int] = {}
    names = np.ascontiguousarray(namespaces).view(_NAMESPACE)[:, 0].tolist()
    pairs = zip(names, sizes.tolist(), strict=True)
    numbered = np.fromiter((numbers.setdefault(pair, len(numbers)) for pair in pairs), np.int64, len(records))
    for (namespace, size), number in numbers.items():
        yield namespace, size, np.flatnonzero(numbered == number)


def _contents(file: DeviceFile, start: int, length: int, max_command_bytes: int) -> bytearray:
    contents = bytearray(length)
    with memoryview(contents) as view:
        for at in range(0, length, max_command_bytes):
            piece = view[at : at + max_command_bytes]
            if file.read_into(piece, start + at) != len(piece):
                raise DeviceFault(f"{file.name} has become shorter while it was read")
    return contents


def _removed(device: Device, name: str) -> bool:
    try:
        device.remove(name)
    except StorageError:
        return False
    return True


def _size(device: Device, name: str) -> int:
    try:
        with contextlib.closing(device.open(name)) as file:
            return file.size()
    except StorageError:
        return 0
