"""The contract between a session and whatever keeps the objects.

The store knows nothing of the protocol or of sockets: it answers in status bytes (whose values the protocol
happens to share; a test holds the two together) and in leases on bytes that will not move.

Rules that every store keeps, and that `tests/conformance/test_stores.py` asks of each:

* An object is visible whole or not at all. Overwriting replaces it in one step; a reader of the old object
  keeps the old bytes.
* The bytes behind a `ReadLease` neither change nor move until it is released, whatever happens to the key.
* A delete makes the key absent for new readers at once, and returns only when the readers that were there
  before have released.
* What is held (`hold`) is neither evicted nor deleted; a delete waits until the holds that it met have ended,
  and meanwhile the object is there for everybody, but nobody gets a new hold on it.
* Damaged bytes are never handed out: the first to notice gets CORRUPT, from then on the object is absent,
  held or not.
* An account (`quotas`) never has more than its quota: a put that would exceed it evicts the coldest of the
  account's own objects, none that is leased or being written, and none of anybody else's.
* Cancelling an awaiting caller (through anyio) leaves nothing half visible. An operation whose device work
  has begun finishes it before the cancellation is delivered, so the caller's buffers are free on return.

A namespace has 32 bytes, a key 1 to 128. All methods are called from the one event-loop thread that entered
the store.
"""

import enum
from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs


class Status(enum.IntEnum):
    """The outcome for one item, one byte on its way out."""

    OK = 0
    NOT_FOUND = 1
    CORRUPT = 2
    CAPACITY_EXHAUSTED = 3
    REFUSED = 6
    GATEWAY_FAULT = 7
    TOO_LARGE = 8


@attrs.frozen
class Extent:
    """`length` bytes at `offset` of the open file `fd`; fit for `os.sendfile` and `os.preadv`."""

    fd: int
    offset: int
    length: int


@attrs.frozen(kw_only=True)
class PutItem:
    """One object to store. `data` is read until the put returns, never later; `checksum` is its XXH3-64.

    An Extent as `data` is a part of somebody else's file, who may write to it, or cut it off, at any time:
    what is stored is what was hashed, byte for byte, or nothing.
    """

    key: bytes
    checksum: int
    data: memoryview | Extent

    @property
    def length(self) -> int:
        """Bytes in the object."""
        return self.data.length if isinstance(self.data, Extent) else self.data.nbytes


class ReadLease(Protocol):
    """The right to read one object. Its bytes stay as they are until `release`."""

    @property
    def length(self) -> int:
        """Bytes in the object."""
        ...

    @property
    def checksum(self) -> int:
        """XXH3-64 of the object, as its writer gave it."""
        ...

    @property
    def extents(self) -> tuple[Extent, ...]:
        """Where the bytes are, in order; empty for an empty object. The descriptors belong to the store."""
        ...

    def release(self) -> None:
        """Give the lease back; once is enough, more often is harmless."""
        ...


class Hold(Protocol):
    """A promise that the objects which one `hold` found stay there until `release`, in some version."""

    @property
    def items(self) -> int:
        """How many items are held."""
        ...

    def release(self) -> None:
        """End it; once is enough, more often is harmless."""
        ...


@attrs.frozen(kw_only=True)
class AccountStats:
    """What belongs to one account. `used_bytes` as it counts against the quota, which None leaves open."""

    name: str
    objects: int
    used_bytes: int
    quota_bytes: int | None
    evicted_objects: int  # to keep to the quota, since the store was opened


@attrs.frozen(kw_only=True)
class StoreStats:
    """A snapshot. Counters run from the moment the store was opened; everything in bytes or objects."""

    capacity_bytes: int
    used_bytes: int  # what counts against the capacity, headers and reserves included
    object_bytes: int
    objects: int
    segments: int
    leases: int
    held_items: int  # an object counts once for each hold on it
    stored_objects: int
    evicted_objects: int
    evicted_bytes: int
    corrupt_objects: int  # dropped because bytes and checksum disagreed
    faulted_objects: int  # dropped because the device could not read them
    device_errors: Mapping[str, int] = attrs.field(factory=dict)  # commands that failed, by operation
    moved_objects: int = 0  # written again to make room without losing them
    moved_bytes: int = 0
    accounts: tuple[AccountStats, ...] = ()


class ObjectStore(Protocol):
    """Whole objects by (namespace, key). Every vector answers with one `Status` byte per item, in order."""

    @property
    def max_object_bytes(self) -> int:
        """The largest object that a put will take."""
        ...

    def exist(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        """OK or NOT_FOUND for each key, from the index alone: no device, no lease, no promise."""
        ...

    def hold(self, namespace: bytes, keys: Sequence[bytes]) -> tuple[bytes, Hold]:
        """As `exist`, and hold what is OK. NOT_FOUND also where a delete waits for earlier holds.

        As cheap as `exist`: what is held is counted only when a delete or an eviction asks. `keys` is kept as
        it is until the hold has ended. Does not count as use.
        """
        ...

    def open_read(self, namespace: bytes, keys: Sequence[bytes]) -> list[ReadLease | None]:
        """Pin each object that is there; None is a miss. Release every lease, whatever happens after."""
        ...

    async def verify(self, leases: Sequence[ReadLease]) -> bytes:
        """Read and hash each object: OK, CORRUPT or GATEWAY_FAULT. A failed one is dropped from the index.

        Leases must come from this store's `open_read` and not be released yet.
        """
        ...

    async def read_into(
        self, leases: Sequence[ReadLease], buffers: Sequence[memoryview], *, is_verified: bool = True
    ) -> bytes:
        """Read each object into the start of its buffer and verify it there; statuses as for `verify`.

        TOO_LARGE where the buffer is shorter than the object. The bytes of a buffer whose status is not OK
        are undefined.

        Not `is_verified`: nobody looks at the bytes, and only system calls touch the buffers, so these may be
        memory that another process can take away. Where it has, the item is REFUSED and the object is none
        the worse for it.
        """
        ...

    async def put_many(self, namespace: bytes, items: Sequence[PutItem]) -> bytes:
        """Store each item: OK once it is committed and what it replaces is void; it survives the process then
        and, in durable mode, a power cut.

        CORRUPT: data and checksum disagree. CAPACITY_EXHAUSTED: nothing more may be evicted, or the device is
        full. TOO_LARGE: above `max_object_bytes`, or by itself above the quota of the namespace's account.
        REFUSED: an Extent that its file does not have.
        GATEWAY_FAULT: the device failed. Items fail one by one; an item that failed leaves its key as it was.
        Cancelled: each item is stored or not, none in part.
        """
        ...

    async def delete_many(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        """Delete each key: OK, NOT_FOUND, or GATEWAY_FAULT where the delete could not be recorded.

        A key that is held is deleted when the holds on it have ended, the others at once; from then on new
        readers miss. Returns when the leases that were open on these keys have been released and the delete
        will survive a restart. Cancelled: keys that are still held stay, the others are absent, until a
        restart at least.
        """
        ...

    async def check_many(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        """Verify by key: OK, NOT_FOUND, CORRUPT or GATEWAY_FAULT. Does not count as use."""
        ...

    async def flush(self) -> None:
        """Return when everything acknowledged so far is on the device.

        Raises:
            StorageError: the device refused; what was acknowledged may be lost in a power cut.
        """
        ...

    def stats(self) -> StoreStats:
        """Counters and sizes of this moment."""
        ...

    @property
    def trouble(self) -> str | None:
        """Why the store cannot be relied on at this moment, for people; None if it can."""
        ...
