"""`check`: read every byte that a store holds and say what does not match, without a gateway running.

Finding is apart from mending: without `repair` nothing on the device changes.
"""

import contextlib
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from adp_gateway.config import StoreConfig
from adp_gateway.device.base import Device, DeviceFile
from adp_gateway.device.file import FileDevice
from adp_gateway.errors import StorageError
from adp_gateway.store.base import Status
from adp_gateway.store.format import RECORD_BYTES, Kind, Record, data_name, journal_name, to_records
from adp_gateway.store.journal import Journal
from adp_gateway.store.recovery import (
    SegmentScan,
    check_device_format,
    check_place,
    repair_journal,
    scan_segment,
    segment_files,
)
from adp_gateway.store.transfer import Source, Transfers

OnProgress: TypeAlias = Callable[[int, int], None]


class Damage(enum.Enum):
    """What can be wrong."""

    CORRUPT = "bytes and checksum disagree"
    MISSING = "the data file ends before the object does"
    UNREADABLE = "the device cannot read it"
    DOUBTFUL = "a damaged journal record may have been its delete"
    FLIPPED_BIT = "a bit of a journal record, or of the header, has flipped"
    DAMAGED_RECORD = "a journal record does not decode"
    TORN_TAIL = "the journal ends in bytes that are no record"
    HALF_SEGMENT = "one of the two files of a segment is not there"


@attrs.frozen(kw_only=True)
class Problem:
    """One finding. `namespace` and `key` if it concerns an object; `count` of records or bytes if not."""

    damage: Damage
    segment_id: int
    namespace: bytes = b""
    key: bytes = b""
    offset: int = 0
    count: int = 1

    def fields(self) -> dict[str, Any]:
        """For machines; names in hexadecimal digits."""
        where = {"segment": self.segment_id, "offset": self.offset}
        if self.key:
            return {**where, "namespace": self.namespace.hex(), "key": self.key.hex()}
        return {**where, "count": self.count}

    def __str__(self) -> str:
        what = f"object {self.namespace.hex()[:16]}/{self.key.hex()}" if self.key else f"{self.count} found"
        return f"segment {self.segment_id} at {self.offset}: {self.damage.value} ({what})"


@attrs.frozen(kw_only=True)
class CheckReport:
    """The outcome. `repaired`: how many of the problems are gone now."""

    segments: int
    objects: int  # whole ones
    object_bytes: int
    problems: tuple[Problem, ...]
    repaired: int = 0

    @property
    def is_clean(self) -> bool:
        """Whether nothing is left to repair."""
        return self.repaired == len(self.problems)


def check(directory: Path, *, repair: bool = False, on_progress: OnProgress | None = None) -> CheckReport:
    """Re-read every object and journal record of the store in `directory`. Blocks, for as long as that takes.

    With `repair`, damaged objects and leftovers are dropped: what remains is whole. `on_progress` is called
    for each object, with bytes done and bytes in all.

    Raises:
        StoreLocked: a gateway is running on it.
        UnsupportedFormat: a newer version wrote it.
        NotAStore: the directory is somebody else's.
        CorruptRecord: there is no store there, or its superblock is damaged (starting a gateway mends that).
        DeviceFault: the directory cannot be used, or `repair` could not write.
    """
    if not directory.is_dir():
        raise StorageError(f"{directory} is not a directory")
    config = StoreConfig(directory=directory)
    device = FileDevice(directory, max_command_bytes=config.max_command_bytes)
    return check_device(device, repair=repair, on_progress=on_progress)


def check_device(
    device: Device, *, repair: bool = False, on_progress: OnProgress | None = None
) -> CheckReport:
    """As `check`, on any device; locks it and closes it."""
    check_place(device)
    device.lock()
    try:
        check_device_format(device)
        return _Check(device, is_repairing=repair, on_progress=on_progress).run()
    finally:
        device.close()


class _Check:
    def __init__(self, device: Device, *, is_repairing: bool, on_progress: OnProgress | None) -> None:
        self._device = device
        self._on_progress = on_progress
        self._done_bytes = self._total_bytes = 0  # of data files
        self._is_repairing = is_repairing
        self._transfers = Transfers(device.max_command_bytes)
        self._problems: list[Problem] = []
        self._objects = self._object_bytes = self._repaired = 0

    def run(self) -> CheckReport:
        found = segment_files(self._device)
        sizes = {segment_id: self._size(segment_id) for segment_id in found} if self._on_progress else {}
        self._total_bytes = sum(sizes.values())
        for segment_id, kinds in found.items():
            if len(kinds) < 2:
                self._problems.append(Problem(damage=Damage.HALF_SEGMENT, segment_id=segment_id))
                if self._is_repairing:
                    self._device.remove(journal_name(segment_id))
                    self._device.remove(data_name(segment_id))
                    self._repaired += 1
                continue
            with contextlib.ExitStack() as files:
                try:
                    data = files.enter_context(
                        contextlib.closing(self._device.open(data_name(segment_id), has_extents=True))
                    )
                    log = files.enter_context(contextlib.closing(self._device.open(journal_name(segment_id))))
                    scan = scan_segment(
                        data, log, segment_id=segment_id, max_command_bytes=self._device.max_command_bytes
                    )
                except StorageError:
                    self._problems.append(Problem(damage=Damage.UNREADABLE, segment_id=segment_id))
                    continue
                self._check_segment(scan, data, log)
            self._done_bytes += sizes.get(segment_id, 0)
        return CheckReport(
            segments=len(found),
            objects=self._objects,
            object_bytes=self._object_bytes,
            problems=tuple(self._problems),
            repaired=self._repaired,
        )

    def _size(self, segment_id: int) -> int:
        try:
            with contextlib.closing(self._device.open(data_name(segment_id))) as data:
                return data.size()
        except StorageError:
            return 0

    def _check_segment(self, scan: SegmentScan, data: DeviceFile, log: DeviceFile) -> None:
        bad = [(record, Damage.MISSING) for record in to_records(scan.missing)]
        bad += [(record, Damage.DOUBTFUL) for record in to_records(scan.doubtful)]
        for record in to_records(scan.live):
            (status,) = self._transfers.verify([Source(data, record.offset, record.length, record.checksum)])
            if self._on_progress is not None:
                self._on_progress(self._done_bytes + record.offset + record.length, self._total_bytes)
            if status == Status.OK:
                self._objects += 1
                self._object_bytes += record.length
            else:
                bad.append((record, Damage.CORRUPT if status == Status.CORRUPT else Damage.UNREADABLE))
        for record, damage in bad:
            self._problems.append(
                Problem(
                    damage=damage,
                    segment_id=scan.segment_id,
                    namespace=record.namespace,
                    key=record.key,
                    offset=record.offset,
                )
            )
        for damage, count in (
            (Damage.FLIPPED_BIT, scan.flipped_records),
            (Damage.DAMAGED_RECORD, scan.damaged_records),
            (Damage.TORN_TAIL, scan.cut_bytes),
        ):
            if count:
                self._problems.append(
                    Problem(
                        damage=damage,
                        segment_id=scan.segment_id,
                        offset=scan.slots * RECORD_BYTES if damage is Damage.TORN_TAIL else 0,
                        count=count,
                    )
                )
        if self._is_repairing:
            self._repair(scan, [record for record, _ in bad], log)

    def _repair(self, scan: SegmentScan, bad: list[Record], log: DeviceFile) -> None:
        """Kill the damaged objects, cut the tail, which may hold what makes an object doubtful, and only then
        put flipped bits back and blank lost records, which may too."""
        journal = Journal(
            log,
            segment_id=scan.segment_id,
            slots=scan.slots,
            max_command_bytes=self._device.max_command_bytes,
        )
        if bad:
            journal.append([record._replace(kind=Kind.KILL) for record in bad])
            self._repaired += len(bad)
        if log.size() > journal.length_bytes:
            log.truncate(journal.length_bytes)
        journal.sync()
        repair_journal(log, scan)
        self._repaired += bool(scan.cut_bytes) + bool(scan.flipped_records)
        self._repaired += bool(scan.damaged_records and scan.is_repairable)
