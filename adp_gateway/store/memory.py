"""The reference store: a dict. Says what `ObjectStore` means in the fewest lines, and serves tests and demos.

Objects are immutable `bytes`, so a lease is safe by holding one. A descriptor for `os.sendfile` is made only
when somebody asks a lease for its extents, and lives as long as the lease.
"""

import os
from collections import OrderedDict
from collections.abc import Sequence
from typing import cast

import anyio
import anyio.lowlevel
import attrs
import xxhash

from .base import Extent, Hold, PutItem, ReadLease, Status, StoreStats
from .deletes import delete_when_free
from .holds import Holds
from .leases import Cohort, LeaseLedger, Subject
from .quotas import Account, Books, Shelf, Sight


@attrs.define(eq=False)
class StoredObject:
    """The bytes and the checksum that their writer gave, and what eviction goes by."""

    payload: bytes
    checksum: int
    sequence: int = 0
    is_used: bool = False


@attrs.define(eq=False)
class MemoryLease:
    """A `ReadLease` on a `StoredObject`."""

    subject: Subject
    stored: StoredObject
    _ledger: LeaseLedger
    _cohort: Cohort | None
    _memfd: int | None = None

    @property
    def length(self) -> int:
        """Bytes in the object."""
        return len(self.stored.payload)

    @property
    def checksum(self) -> int:
        """XXH3-64, as the writer gave it."""
        return self.stored.checksum

    @property
    def extents(self) -> tuple[Extent, ...]:
        """One extent in a memory file of its own, made on first use."""
        if self._cohort is None:
            raise ValueError("the lease has been released")
        if not self.stored.payload:
            return ()
        if self._memfd is None:
            self._memfd = os.memfd_create("adp-object")
            view = memoryview(self.stored.payload)
            while view:
                view = view[os.write(self._memfd, view) :]
        return (Extent(self._memfd, 0, self.length),)

    def release(self) -> None:
        """Give the lease back; idempotent."""
        if self._cohort is not None:
            self._ledger.leave(self._cohort)
            self._cohort = None
        if self._memfd is not None:
            os.close(self._memfd)
            self._memfd = None


class MemoryStore:
    """`ObjectStore` in RAM: the same limits, and eviction of the least recently used that nobody needs."""

    def __init__(
        self,
        *,
        capacity_bytes: int = 1 << 30,
        max_object_bytes: int = 64 << 20,
        accounts: Sequence[Account] = (),
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._max_object_bytes = min(max_object_bytes, capacity_bytes)
        self._objects: OrderedDict[Subject, StoredObject] = OrderedDict()  # least recently used first
        self._subjects: dict[int, Subject] = {}  # by sequence
        self._object_bytes = 0
        self._ledger = LeaseLedger()
        self._holds = Holds()
        self._books = Books(accounts, Shelf(self._tickets, self._named, self._sight, self._cool, self._evict))
        self._stored = self._evicted = self._evicted_bytes = self._corrupt = 0

    @property
    def max_object_bytes(self) -> int:
        """The largest object that a put will take."""
        return self._max_object_bytes

    def exist(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        """OK or NOT_FOUND for each key."""
        return bytes([(namespace, key) not in self._objects for key in keys])

    def hold(self, namespace: bytes, keys: Sequence[bytes]) -> tuple[bytes, Hold]:
        """As `exist`, and hold what is there."""
        return self._holds.hold(namespace, keys, self.exist(namespace, keys))

    def open_read(self, namespace: bytes, keys: Sequence[bytes]) -> list[ReadLease | None]:
        """Pin each object that is there."""
        return [self._lease((namespace, key), is_use=True) for key in keys]

    async def verify(self, leases: Sequence[ReadLease]) -> bytes:
        """Hash each object; a damaged one is dropped."""
        await anyio.lowlevel.checkpoint()
        return bytes([self._verified(cast(MemoryLease, lease)) for lease in leases])

    async def read_into(
        self, leases: Sequence[ReadLease], buffers: Sequence[memoryview], *, is_verified: bool = True
    ) -> bytes:
        """Copy each object into the start of its buffer, then verify."""
        await anyio.lowlevel.checkpoint()
        statuses = bytearray()
        for lease, buffer in zip(leases, buffers, strict=True):
            if len(buffer) < lease.length:
                statuses.append(Status.TOO_LARGE)
                continue
            if not is_verified:
                statuses.append(_read(lease.extents, buffer))
                continue
            buffer[: lease.length] = cast(MemoryLease, lease).stored.payload
            statuses.append(self._verified(cast(MemoryLease, lease)))
        return bytes(statuses)

    async def put_many(self, namespace: bytes, items: Sequence[PutItem]) -> bytes:
        """Store each item."""
        await anyio.lowlevel.checkpoint()
        return bytes([self._put((namespace, item.key), item) for item in items])

    async def delete_many(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        """Delete each key when nothing holds it, then wait for its readers."""
        statuses = await delete_when_free(
            namespace, keys, holds=self._holds, ledger=self._ledger, drop=lambda *subject: self._drop(subject)
        )
        await anyio.lowlevel.checkpoint()
        return statuses

    async def check_many(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        """Verify by key."""
        await anyio.lowlevel.checkpoint()
        statuses = bytearray()
        for key in keys:
            lease = self._lease((namespace, key), is_use=False)
            if lease is None:
                statuses.append(Status.NOT_FOUND)
                continue
            statuses.append(self._verified(lease))
            lease.release()
        return bytes(statuses)

    async def flush(self) -> None:
        """Memory is the device here."""
        await anyio.lowlevel.checkpoint()

    def stats(self) -> StoreStats:
        """Counters and sizes of this moment."""
        return StoreStats(
            capacity_bytes=self._capacity_bytes,
            used_bytes=self._object_bytes,
            object_bytes=self._object_bytes,
            objects=len(self._objects),
            segments=0,
            leases=self._ledger.readers,
            held_items=self._holds.items,
            stored_objects=self._stored,
            evicted_objects=self._evicted,
            evicted_bytes=self._evicted_bytes,
            corrupt_objects=self._corrupt,
            faulted_objects=0,
            accounts=self._books.stats,
        )

    @property
    def trouble(self) -> str | None:
        """None: memory does not fail."""
        return None

    def damage(self, namespace: bytes, key: bytes) -> None:
        """Flip one bit of a stored object: for tests of what happens then."""
        stored = self._objects[namespace, key]
        flipped = bytes([stored.payload[0] ^ 1]) + stored.payload[1:]
        self._objects[namespace, key] = attrs.evolve(stored, payload=flipped)

    def _lease(self, subject: Subject, *, is_use: bool) -> MemoryLease | None:
        stored = self._objects.get(subject)
        if stored is None:
            return None
        if is_use:
            stored.is_used = True
            self._objects.move_to_end(subject)
        return MemoryLease(subject, stored, self._ledger, self._ledger.enter(subject))

    def _verified(self, lease: MemoryLease) -> Status:
        if xxhash.xxh3_64_intdigest(lease.stored.payload) == lease.checksum:
            return Status.OK
        if self._objects.get(lease.subject) is lease.stored:
            self._drop(lease.subject)
            self._corrupt += 1
        return Status.CORRUPT

    def _put(self, subject: Subject, item: PutItem) -> Status:
        if item.length > self._max_object_bytes:
            return Status.TOO_LARGE
        payload = _payload(item.data)
        if payload is None:
            return Status.REFUSED
        if xxhash.xxh3_64_intdigest(payload) != item.checksum:
            return Status.CORRUPT
        book = self._books.of(subject[0])
        if book is None:
            return self._replace(subject, payload, item.checksum)
        admission = book.admit(subject, item.length)
        if admission != Status.OK:
            assert admission is not None, "nothing is ever under way here"
            return admission
        status = self._replace(subject, payload, item.checksum)
        book.leave(subject, item.length)
        return status

    def _replace(self, subject: Subject, payload: bytes, checksum: int) -> Status:
        replaced = self._objects.get(subject)
        freed = len(replaced.payload) if replaced is not None else 0
        if not self._make_room(len(payload) - freed, keep=subject):
            return Status.CAPACITY_EXHAUSTED
        self._drop(subject)
        self._stored += 1
        self._objects[subject] = StoredObject(payload, checksum, self._stored)
        self._subjects[self._stored] = subject
        self._object_bytes += len(payload)
        book = self._books.of(subject[0])
        if book is not None:
            book.add(subject, len(payload), self._stored)
        return Status.OK

    def _make_room(self, extra_bytes: int, *, keep: Subject) -> bool:
        """Evict until `extra_bytes` more fit; evicts nothing if that cannot be reached."""
        excess = self._object_bytes + extra_bytes - self._capacity_bytes
        victims: list[Subject] = []
        for subject, stored in self._objects.items():
            if excess <= 0:
                break
            if subject != keep and not self._ledger.is_leased(subject) and not self._holds.is_held(*subject):
                victims.append(subject)
                excess -= len(stored.payload)
        if excess > 0:
            return False
        for victim in victims:
            self._evict(victim)
        return True

    def _evict(self, subject: Subject) -> None:
        self._evicted_bytes += len(self._objects[subject].payload)
        self._evicted += 1
        self._drop(subject)

    def _tickets(self, namespace: bytes, keys: Sequence[bytes]) -> list[int]:
        return [self._objects[namespace, key].sequence for key in keys]

    def _named(self, tickets: Sequence[int], _sequences: Sequence[int]) -> list[Subject | None]:
        return [self._subjects.get(ticket) for ticket in tickets]

    def _cool(self, subject: Subject) -> None:
        self._objects[subject].is_used = False

    def _sight(self, subject: Subject) -> Sight | None:
        stored = self._objects.get(subject)
        if stored is None:
            return None
        is_pinned = self._ledger.is_leased(subject) or self._holds.is_held(*subject)
        return Sight(stored.sequence, len(stored.payload), stored.is_used, is_pinned)

    def _drop(self, subject: Subject) -> bool:
        stored = self._objects.pop(subject, None)
        if stored is None:
            return False
        del self._subjects[stored.sequence]
        self._object_bytes -= len(stored.payload)
        book = self._books.of(subject[0])
        if book is not None:
            book.remove(subject, len(stored.payload))
        return True


def _read(extents: Sequence[Extent], buffer: memoryview) -> Status:
    """By a system call, which answers EFAULT where the buffer has no memory behind it any more."""
    at = 0
    for extent in extents:
        while at < extent.length:
            try:
                at += os.preadv(extent.fd, (buffer[at : extent.length],), extent.offset + at)
            except OSError:
                return Status.REFUSED
    return Status.OK


def _payload(data: memoryview | Extent) -> bytes | None:
    """The bytes, once and for all; None if they are not there."""
    if isinstance(data, memoryview):
        return bytes(data)
    try:
        payload = os.pread(data.fd, data.length, data.offset)
    except OSError:
        return None
    return payload if len(payload) == data.length else None
