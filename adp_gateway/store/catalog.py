"""All that the store knows: which objects there are, in which segments, and what that adds up to.

Synchronous, without I/O, and touched on the event-loop thread only: every change is complete before anything
else runs, and no lock is needed. `segments.py` moves the bytes and reports here.

The invariant that deletes rest on: once the kills in `unkilled` are written, the journals hold at most one
commit of a key that is not killed, the one that the index points to. So a key that is deleted stays deleted,
whichever segments are removed later, in whatever order.
"""

import attrs

from .format import Kind, Record
from .holds import Holds
from .index import Entry, Index
from .leases import LeaseLedger, Subject
from .quotas import Account, Books, Shelf, Sight
from .segment import Segment, object_charge

#: For the superblock, the lock and the directory itself.
OVERHEAD_BYTES = 16384


@attrs.define
class Tally:
    """Counters since the store was opened."""

    stored_objects: int = 0
    evicted_objects: int = 0
    evicted_bytes: int = 0
    corrupt_objects: int = 0
    faulted_objects: int = 0


@attrs.define(eq=False)
class Catalog:
    """The state of a segment store."""

    accounts: tuple[Account, ...] = ()
    index: Index = attrs.field(factory=Index)
    ledger: LeaseLedger = attrs.field(factory=LeaseLedger)
    holds: Holds = attrs.field(factory=Holds)
    segments: dict[int, Segment] = attrs.field(factory=dict)  # oldest first
    doomed: list[Segment] = attrs.field(factory=list)  # without objects; their files are to be removed
    active: Segment | None = None
    unkilled: dict[int, list[Record]] = attrs.field(factory=dict)  # kills to be written, by segment
    stray_bytes: int = 0  # in segments that recovery could not read and left alone
    next_segment_id: int = 1
    next_sequence: int = 1
    tally: Tally = attrs.field(factory=Tally)
    books: Books = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.books = Books(self.accounts, Shelf(self._sight, lambda name: self.index.cool(*name), self.evict))

    @property
    def used_bytes(self) -> int:
        """What counts against the capacity."""
        charges = sum(segment.charge_bytes for segment in (*self.segments.values(), *self.doomed))
        return OVERHEAD_BYTES + self.stray_bytes + charges

    @property
    def object_bytes(self) -> int:
        """Lengths of all objects together."""
        return sum(segment.object_bytes for segment in self.segments.values())

    def take_sequence(self) -> int:
        """A number above all earlier ones: of two versions of a key, the higher is the current one."""
        sequence = self.next_sequence
        self.next_sequence += 1
        return sequence

    def commit(self, namespace: bytes, key: bytes, entry: Entry) -> None:
        """A version has been recorded in its journal: make it current, or void if a newer one already is."""
        segment = self.segments[entry.segment_id]
        segment.members.setdefault(namespace, []).append(key)
        current = self.index.get(namespace, key)
        book = self.books.of(namespace)
        if current is not None:
            if current.sequence > entry.sequence:
                self.void(namespace, key, entry)
                return
            self._uncount(current)
            self.void(namespace, key, current)
            if current.sequence == entry.sequence:
                book = None  # the same version in another place
            elif book is not None:
                book.remove((namespace, key), current.length)
        self.index.put(namespace, key, entry)
        segment.objects += 1
        segment.object_bytes += entry.length
        segment.live_bytes += object_charge(entry.length)
        if book is not None:
            book.add((namespace, key), entry.length, entry.sequence)

    def drop(self, namespace: bytes, key: bytes, *, only: Entry | None = None) -> Entry | None:
        """Make the key absent and void its commit; what was there. With `only`: if that is the version."""
        entry = self._forget(namespace, key, only)
        if entry is not None:
            self.void(namespace, key, entry)
        return entry

    def evict(self, subject: Subject) -> None:
        """Drop an object that is there, to make room."""
        entry = self.drop(*subject)
        assert entry is not None
        self.tally.evicted_objects += 1
        self.tally.evicted_bytes += entry.length

    def lose(self, namespace: bytes, key: bytes, *, only: Entry) -> bool:
        """Make the key absent, but leave its commit for the next recovery to try again."""
        return self._forget(namespace, key, only) is not None

    def void(self, namespace: bytes, key: bytes, entry: Entry) -> None:
        """Have the commit of a version killed, if its segment still exists by then."""
        record = Record(Kind.KILL, namespace, key, entry.offset, entry.length, entry.checksum, entry.sequence)
        if entry.segment_id in self.segments:
            self.unkilled.setdefault(entry.segment_id, []).append(record)

    def doom(self, segment: Segment) -> None:
        """Evict whatever is left in a segment and hand its files over for removal."""
        for namespace, keys in segment.members.items():
            for key in keys:
                entry = self.index.get(namespace, key)
                if entry is not None and entry.segment_id == segment.segment_id:
                    self._forget(namespace, key, entry)
                    self.tally.evicted_objects += 1
                    self.tally.evicted_bytes += entry.length
        del self.segments[segment.segment_id]
        self.unkilled.pop(segment.segment_id, None)
        self.doomed.append(segment)

    def seal(self) -> None:
        """Nothing more goes into the active segment."""
        if self.active is not None:
            self.active.is_sealed = True
            self.active = None

    def _forget(self, namespace: bytes, key: bytes, only: Entry | None) -> Entry | None:
        entry = self.index.get(namespace, key)
        if entry is None or (only is not None and entry.place != only.place):
            return None
        self.index.pop(namespace, key)
        self._uncount(entry)
        book = self.books.of(namespace)
        if book is not None:
            book.remove((namespace, key), entry.length)
        return entry

    def _uncount(self, entry: Entry) -> None:
        segment = self.segments[entry.segment_id]
        segment.objects -= 1
        segment.object_bytes -= entry.length
        segment.live_bytes -= object_charge(entry.length)

    def _sight(self, subject: Subject) -> Sight | None:
        entry = self.index.get(*subject)
        if entry is None:
            return None
        is_pinned = self.ledger.is_leased(subject) or self.holds.is_held(*subject)
        return Sight(entry.sequence, entry.length, entry.is_used, is_pinned)
