"""One segment: a data file and its journal, and how much of either is taken.

Everything here is touched on the event-loop thread only, except `data` and `journal`, whose methods block and
are called in I/O threads.
"""

import attrs
import numpy as np
import numpy.typing as npt

from adp_gateway.device.base import DeviceFile

from .base import Extent
from .eviction import Queue
from .format import RECORD_BYTES, UNIT_BYTES, aligned
from .index import Entry
from .journal import Journal
from .leases import Cohort, LeaseLedger, Subject
from .transfer import Source


@attrs.frozen
class Layout:
    """How a segment's size is shared out, so that both files together never exceed it.

    Every commit has room reserved for its kill: an object can always be deleted, also when the disk is full.
    """

    segment_bytes: int

    @property
    def journal_bytes(self) -> int:
        """Room for the journal: one 32nd. Objects of 12 KiB and more fill the data file before that."""
        return aligned(self.segment_bytes // 32)

    @property
    def data_bytes(self) -> int:
        """Room for payloads, and so the largest object."""
        return self.segment_bytes - self.journal_bytes

    @property
    def max_commits(self) -> int:
        """How many objects the journal takes."""
        return (self.journal_bytes - RECORD_BYTES) // (2 * RECORD_BYTES)


@attrs.define(eq=False, kw_only=True)
class Segment:
    """The segment's state in this process."""

    segment_id: int
    layout: Layout
    data: DeviceFile
    journal: Journal
    tail_bytes: int = 0  # where the next payload goes
    commits: int = 0  # journal slots spoken for, each of which stands for a commit and its kill
    readers: int = 0  # leases and device reads under way
    writers: int = 0  # device writes under way
    objects: int = 0
    object_bytes: int = 0
    live_bytes: int = 0  # charges of the objects
    is_sealed: bool = False
    is_trimmed: bool = False  # the data file ends where its last payload does
    is_dirty: bool = False  # acknowledged writes may not be on the medium yet
    queue: Queue = Queue.PROBATION  # this and the next are the policy's
    turn: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether nobody would notice if the files went."""
        return not self.readers and not self.writers

    @property
    def charge_bytes(self) -> int:
        """What this segment counts for against the capacity: never less than what it takes on the device."""
        if not self.is_trimmed:
            return self.layout.segment_bytes
        return self.tail_bytes + aligned(RECORD_BYTES + 2 * RECORD_BYTES * self.commits)

    @property
    def is_mostly_dead(self) -> bool:
        """Whether at most half of it is objects, so that moving all of them is worth what it gives back."""
        return self.live_bytes <= self.charge_bytes // 2 and 2 * self.objects <= max(
            self.layout.max_commits, 1
        )

    def has_room(self, length: int) -> bool:
        """Whether `allocate` would succeed."""
        return (
            not self.is_sealed
            and self.commits < self.layout.max_commits
            and self.tail_bytes + extent_bytes(length) <= self.layout.data_bytes
        )

    def allocate(self, length: int) -> int:
        """The offset for an object of `length` bytes and a place in the journal. Call `has_room` first."""
        offset = self.tail_bytes
        self.tail_bytes += extent_bytes(length)
        self.commits += 1
        return offset

    def free(self, offset: int, length: int) -> None:
        """Take back an allocation that was never written. In the middle of the file, its bytes stay idle."""
        self.commits -= 1
        if self.tail_bytes == offset + extent_bytes(length):
            self.tail_bytes = offset


@attrs.define(eq=False)
class SegmentLease:
    """A `ReadLease` on a version of an object: its segment stays while it is held."""

    subject: Subject
    entry: Entry
    segment: Segment
    _ledger: LeaseLedger
    _cohort: Cohort | None

    @property
    def length(self) -> int:
        """Bytes in the object."""
        return self.entry.length

    @property
    def checksum(self) -> int:
        """XXH3-64, as the writer gave it."""
        return self.entry.checksum

    @property
    def extents(self) -> tuple[Extent, ...]:
        """One extent: an object is never split over segments, nor within one."""
        if self._cohort is None:
            raise ValueError("the lease has been released")
        if not self.entry.length:
            return ()
        return (Extent(self.segment.data.fileno(), self.entry.offset, self.entry.length),)

    @property
    def source(self) -> Source:
        """What an I/O thread needs to read it."""
        entry = self.entry
        return Source(self.segment.data, entry.offset, entry.length, entry.checksum)

    def release(self) -> None:
        """Give the lease back; idempotent."""
        cohort, self._cohort = self._cohort, None
        if cohort is not None:
            self.segment.readers -= 1
            self._ledger.leave(cohort)


def extent_bytes(length: int) -> int:
    """What an object takes of a data file. An empty one takes a unit too: its offset must be its own."""
    return aligned(max(length, 1))


def object_charge(length: int) -> int:
    """What an object counts for: its extent, and the records of its commit and its kill."""
    return extent_bytes(length) + 2 * RECORD_BYTES


def object_charges(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`object_charge` of each."""
    return -(-np.maximum(lengths, 1) // UNIT_BYTES) * UNIT_BYTES + 2 * RECORD_BYTES
