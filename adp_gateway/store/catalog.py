"""All that the store knows: which objects there are, in which segments, and what that adds up to.

Synchronous, without I/O, and touched on the event-loop thread only: every change is complete before anything
else runs, and no lock is needed. `segments.py` moves the bytes and reports here.

The invariant that deletes rest on: once the kills in `unkilled` are written, the journals hold at most one
commit of a key that is not killed, the one that the index points to. So a key that is deleted stays deleted,
whichever segments are removed later, in whatever order.

For that to hold also at every moment in between, at which the process may be killed, a version has to be void
on the device before a later version of its key is. A version goes by its kill, or with the files of its
segment; so kills and removals are one queue, `overdue` and then `unkilled`, worked off in order.
"""

import secrets
from collections.abc import Sequence

import attrs
import numpy as np

from .eviction import EvictionPolicy, Ghosts, TwoQueues
from .format import Kind, Record
from .holds import Holds
from .index import FEW, Entry, Index, KeyMatrix
from .leases import LeaseLedger, Subject
from .quotas import Account, Books, Shelf, Sight
from .segment import Segment, object_charge, object_charges
from .table import ENTRY, Entries

#: For the superblock, the lock and the directory itself.
OVERHEAD_BYTES = 16384


def _small_policy() -> EvictionPolicy:
    return TwoQueues(Ghosts(1024, seed=secrets.randbits(64)))


@attrs.define
class Tally:
    """Counters since the store was opened."""

    stored_objects: int = 0
    evicted_objects: int = 0
    evicted_bytes: int = 0
    moved_objects: int = 0
    moved_bytes: int = 0
    corrupt_objects: int = 0
    faulted_objects: int = 0


@attrs.define(eq=False)
class Overdue:
    """A doomed segment: it has no objects any more, and its files go when `kills` have been written."""

    segment: Segment
    kills: dict[int, list[Record]]


@attrs.define(eq=False)
class Catalog:
    """The state of a segment store."""

    accounts: tuple[Account, ...] = ()
    index: Index = attrs.field(factory=Index)
    ledger: LeaseLedger = attrs.field(factory=LeaseLedger)
    holds: Holds = attrs.field(factory=Holds)
    policy: EvictionPolicy = attrs.field(factory=_small_policy)
    segments: dict[int, Segment] = attrs.field(factory=dict)  # oldest first
    litter: dict[int, int] = attrs.field(factory=dict)  # bytes of segments half made, of which files are left
    active: Segment | None = None
    overdue: list[Overdue] = attrs.field(factory=list)  # what comes before `unkilled`, oldest first
    unkilled: dict[int, list[Record]] = attrs.field(factory=dict)  # kills to be written, by segment
    lost: dict[Subject, list[Entry]] = attrs.field(factory=dict)  # commits left to the next recovery
    stray_bytes: int = 0  # in segments that recovery could neither read nor remove
    next_segment_id: int = 1
    next_sequence: int = 1
    tally: Tally = attrs.field(factory=Tally)
    books: Books = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.books = Books(
            self.accounts, Shelf(self.index.tickets, self.index.named, self._sight, self._cool, self.evict)
        )

    @property
    def doomed(self) -> list[Segment]:
        """Segments whose files are to be removed; they still count."""
        return [overdue.segment for overdue in self.overdue]

    @property
    def used_bytes(self) -> int:
        """What counts against the capacity."""
        charges = sum(segment.charge_bytes for segment in (*self.segments.values(), *self.doomed))
        return OVERHEAD_BYTES + self.stray_bytes + sum(self.litter.values()) + charges

    @property
    def object_bytes(self) -> int:
        """Lengths of all objects together."""
        return sum(segment.object_bytes for segment in self.segments.values())

    def take_sequence(self) -> int:
        """A number above all earlier ones: of two versions of a key, the higher is the current one."""
        sequence = self.next_sequence
        self.next_sequence += 1
        return sequence

    def commit(self, namespace: bytes, key: bytes, entry: Entry) -> bool:
        """A version has been recorded in its journal: make it current, or void if a newer one already is.

        Whether there was another.
        """
        segment = self.segments[entry.segment_id]
        self._void_lost(namespace, key)
        current = self.index.get(namespace, key)
        book = self.books.of(namespace)
        if current is not None:
            if current.sequence > entry.sequence:
                self.void(namespace, key, entry)
                return True
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
        return current is not None

    def commit_many(self, namespace: bytes, keys: Sequence[bytes], entries: Sequence[Entry]) -> None:
        """`commit` each of a batch, all in one segment."""
        if len(keys) >= FEW and len(set(map(len, keys))) == 1:
            self.commit_columns(namespace, keys, np.array(entries, dtype=ENTRY))
            return
        for key, entry in zip(keys, entries, strict=True):
            self.commit(namespace, key, entry)

    def commit_columns(self, namespace: bytes, keys: Sequence[bytes] | KeyMatrix, entries: Entries) -> int:
        """`commit` a batch, at least one, all in one segment and with keys of one length.

        How many met another version. They go one by one, after the others.
        """
        if self.lost:
            for key in keys:
                self._void_lost(namespace, bytes(key))
        left = self.index.put_new(namespace, keys, entries)
        new = np.delete(entries, left) if left else entries
        lengths = new["length"].astype(np.int64)
        segment = self.segments[int(entries["segment_id"][0])]
        segment.objects += len(new)
        segment.object_bytes += int(lengths.sum())
        segment.live_bytes += int(object_charges(lengths).sum())
        book = self.books.of(namespace)
        if book is not None:
            is_new = np.ones(len(entries), dtype=np.bool_)
            is_new[left] = False
            names = [bytes(keys[position]) for position in np.flatnonzero(is_new).tolist()]
            book.add_many(namespace, names, lengths.tolist(), new["sequence"].tolist())
        commits = ((bytes(keys[position]), Entry._make(entries.item(position))) for position in left)
        return sum(self.commit(namespace, key, entry) for key, entry in commits)

    def drop(self, namespace: bytes, key: bytes, *, only: Entry | None = None) -> Entry | None:
        """Make the key absent and void its commit; what was there. With `only`: if that is the version."""
        if only is None:
            self._void_lost(namespace, key)
        entry = self._forget(namespace, key, only)
        if entry is not None:
            self.void(namespace, key, entry)
        return entry

    def evict(self, subject: Subject) -> None:
        """Drop an object that is there, to make room."""
        entry = self.drop(*subject)
        assert entry is not None
        self.policy.evicted(subject[0], (subject[1],))
        self.tally.evicted_objects += 1
        self.tally.evicted_bytes += entry.length

    def lose(self, namespace: bytes, key: bytes, *, only: Entry) -> bool:
        """Make the key absent, but leave its commit for the next recovery to try again.

        Unless the key is written or deleted before that: then the version is void as any other.
        """
        if self._forget(namespace, key, only) is None:
            return False
        self.lost.setdefault((namespace, key), []).append(only)
        return True

    def void(self, namespace: bytes, key: bytes, entry: Entry) -> None:
        """Have the commit of a version killed, if its segment still exists by then."""
        record = Record(Kind.KILL, namespace, key, entry.offset, entry.length, entry.checksum, entry.sequence)
        if entry.segment_id in self.segments:
            self.unkilled.setdefault(entry.segment_id, []).append(record)

    def doom(self, segment: Segment) -> None:
        """Evict whatever is left in a segment and hand its files over for removal."""
        for group in self.index.segment(segment.segment_id):
            lengths = group.entries["length"]
            self.tally.evicted_objects += len(lengths)
            self.tally.evicted_bytes += int(lengths.sum(dtype=np.int64))
            self.policy.evicted(group.namespace, group.keys)
            book = self.books.of(group.namespace)
            if book is not None:
                for key, length in zip(group.keys, lengths.tolist(), strict=True):
                    book.remove((group.namespace, key), length)
        self.index.pop_segment(segment.segment_id)
        segment.objects = segment.object_bytes = segment.live_bytes = 0
        del self.segments[segment.segment_id]
        for kills in (self.unkilled, *(overdue.kills for overdue in self.overdue)):
            kills.pop(segment.segment_id, None)
        for subject, entries in list(self.lost.items()):
            if not (left := [entry for entry in entries if entry.segment_id != segment.segment_id]):
                del self.lost[subject]
            else:
                self.lost[subject] = left
        self.overdue.append(Overdue(segment, self.unkilled))
        self.unkilled = {}

    def marked_bytes(self, segment: Segment) -> int:
        """What the objects of a segment that have been read count for."""
        total = 0
        for group in self.index.segment(segment.segment_id):
            lengths = group.entries["length"][group.entries["uses"] > 0]
            total += int(object_charges(lengths.astype(np.int64)).sum())
        return total

    def keep(self, segment: Segment) -> None:
        """Its turn has come, and it stays; its objects must be read again to earn that again."""
        self.policy.keep(segment)
        self.index.cool_segment(segment.segment_id)

    def seal(self) -> None:
        """Nothing more goes into the active segment."""
        if self.active is not None:
            self.active.is_sealed = True
            self.active = None

    def _void_lost(self, namespace: bytes, key: bytes) -> None:
        if self.lost:
            for entry in self.lost.pop((namespace, key), ()):
                self.void(namespace, key, entry)

    def _forget(self, namespace: bytes, key: bytes, only: Entry | None) -> Entry | None:
        entry = self.index.pop(namespace, key, only=only)
        if entry is None:
            return None
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

    def _cool(self, subject: Subject) -> None:
        self.index.set_uses(*subject, 0)

    def _sight(self, subject: Subject) -> Sight | None:
        entry = self.index.get(*subject)
        if entry is None:
            return None
        is_pinned = self.ledger.is_leased(subject) or self.holds.is_held(*subject)
        return Sight(entry.sequence, entry.length, entry.is_used, is_pinned)
