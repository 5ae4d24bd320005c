"""Requests and replies as values (spec section 5). Encoding lives in `codec`, order in `connection`.

A vector request carries `keys` of one width. Messages with payload (`Write`, `ReadReply`) say in their items
how many bytes follow the body; the bytes themselves never pass through these objects.
"""

from collections.abc import Iterable, Iterator
from typing import TypeAlias

import attrs

from .constants import ErrorCode, Feature


@attrs.frozen(kw_only=True)
class Extension:
    """A tagged field of the handshake that not every peer knows (section 4.4)."""

    tag: int
    data: bytes


@attrs.frozen(kw_only=True)
class Limits:
    """What the gateway accepts, as told in the handshake (section 4.3). Sizes in bytes."""

    max_body_bytes: int = 1 << 20
    max_payload_bytes: int = 16 << 20
    max_items: int = 16384
    max_key_bytes: int = 128
    max_object_bytes: int = 64 << 20
    max_command_bytes: int = 256 << 10
    max_requests: int = 256
    max_inflight_bytes: int = 256 << 20
    max_lease_ms: int = 60_000


@attrs.frozen(kw_only=True)
class Hello:
    """The client's first frame. `max_body_bytes` and `max_payload_bytes` bound what it will receive."""

    min_version: int = 1
    max_version: int = 1
    features: Feature = Feature.NONE
    max_body_bytes: int = 1 << 20
    max_payload_bytes: int = 16 << 20
    token: bytes = attrs.field(default=b"", repr=False)
    agent: str = ""
    extensions: tuple[Extension, ...] = ()


@attrs.frozen(kw_only=True)
class Welcome:
    """The gateway's answer to HELLO: version, features, limits, and the id of this boot of the gateway."""

    version: int = 1
    features: Feature = Feature.NONE
    boot_id: bytes
    limits: Limits = attrs.field(factory=Limits)
    agent: str = ""
    extensions: tuple[Extension, ...] = ()


@attrs.frozen(kw_only=True)
class Exist:
    """Which of these objects are there? `lease_ms` > 0 asks for a lease on those that are."""

    namespace: bytes
    keys: tuple[bytes, ...]
    lease_ms: int = 0


@attrs.frozen(kw_only=True)
class Read:
    """Send these objects. `capacities[i]` is the memory for item i; a larger object is TOO_LARGE, unsent."""

    namespace: bytes
    keys: tuple[bytes, ...]
    capacities: tuple[int, ...]


@attrs.frozen(kw_only=True)
class WriteItem:
    """Bytes `[offset, offset + length)` of an object; `checksum` is the XXH3-64 of the whole object."""

    object_bytes: int
    offset: int = 0
    length: int
    checksum: int


@attrs.frozen(kw_only=True)
class Write:
    """Store these objects. An item with offset > 0 continues the last object of the frame before."""

    namespace: bytes
    keys: tuple[bytes, ...]
    items: tuple[WriteItem, ...]


@attrs.frozen(kw_only=True)
class Delete:
    """Remove these objects, each after every outstanding read of it."""

    namespace: bytes
    keys: tuple[bytes, ...]


@attrs.frozen(kw_only=True)
class Check:
    """Verify these objects on the device. A reader that got bytes with a wrong checksum asks for this."""

    namespace: bytes
    keys: tuple[bytes, ...]


@attrs.frozen(kw_only=True)
class Fence:
    """Nothing of this connection after it starts before everything before it is done."""


@attrs.frozen(kw_only=True)
class Ping:
    """Are you there?"""

    nonce: int = 0


@attrs.frozen(kw_only=True)
class Goodbye:
    """No more requests: from a client that leaves, or (request id 0) from a gateway that drains."""

    code: ErrorCode = ErrorCode.OK
    text: str = ""


@attrs.frozen(kw_only=True)
class ErrorMessage:
    """Why the sender closes this connection now. The last frame it sends."""

    code: ErrorCode
    text: str = ""


@attrs.frozen(kw_only=True)
class Release:
    """Give back leases (feature LEASES)."""

    lease_ids: tuple[int, ...]


@attrs.frozen(kw_only=True)
class RegionOpen:
    """Register shared memory (feature REGIONS); its descriptor travels with the frame's first byte."""

    region: int
    region_bytes: int


@attrs.frozen(kw_only=True)
class RegionClose:
    """Forget a region; answered when no transfer uses it any more."""

    region: int


@attrs.frozen(kw_only=True)
class RegionTarget:
    """Where an object goes: `[offset, offset + capacity)` of a region."""

    region: int
    offset: int
    capacity: int


@attrs.frozen(kw_only=True)
class ReadRegion:
    """READ whose bytes go into registered memory instead of the socket."""

    namespace: bytes
    keys: tuple[bytes, ...]
    targets: tuple[RegionTarget, ...]


@attrs.frozen(kw_only=True)
class RegionSource:
    """Where an object comes from: `[offset, offset + length)` of a region."""

    region: int
    offset: int
    length: int
    checksum: int


@attrs.frozen(kw_only=True)
class WriteRegion:
    """WRITE whose bytes come from registered memory instead of the socket."""

    namespace: bytes
    keys: tuple[bytes, ...]
    sources: tuple[RegionSource, ...]


@attrs.frozen(kw_only=True)
class Credit:
    """The window from now on (feature CREDITS): requests in flight, and their bytes."""

    requests: int
    inflight_bytes: int


@attrs.frozen(kw_only=True)
class StatusReply:
    """Outcome of items `[first, first + len(statuses))`, one ErrorCode byte each.

    `status` other than OK answers the whole request: no items, and `retry_after_ms` if OVERLOADED.
    """

    status: ErrorCode = ErrorCode.OK
    retry_after_ms: int = 0
    first: int = 0
    statuses: bytes = b""


@attrs.frozen(kw_only=True)
class ExistReply:
    """A StatusReply for EXIST, with the lease that was granted (`lease_id` 0: none)."""

    status: ErrorCode = ErrorCode.OK
    retry_after_ms: int = 0
    first: int = 0
    statuses: bytes = b""
    lease_id: int = 0
    lease_ms: int = 0


@attrs.frozen(kw_only=True)
class ReadItem:
    """Item `index` of a READ: its outcome and, if OK, bytes `[offset, offset + length)` in this frame."""

    index: int
    status: ErrorCode = ErrorCode.OK
    object_bytes: int = 0
    offset: int = 0
    length: int = 0
    checksum: int = 0


@attrs.frozen(kw_only=True)
class ReadItems:
    """The items of a READ's reply by column; `len`, `[at]` and `for` see them by item.

    A reply has hundreds of items and nearly always they are alike. Columns are made, checked and used with a
    few calls for all of them, where an object for each costs microseconds of the engine's interpreter.
    """

    indices: tuple[int, ...] = ()
    statuses: bytes = b""  # an ErrorCode each
    object_bytes: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    checksums: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[ReadItem]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, at: int) -> ReadItem:
        return ReadItem(
            index=self.indices[at],
            status=ErrorCode(self.statuses[at]),
            object_bytes=self.object_bytes[at],
            offset=self.offsets[at],
            length=self.lengths[at],
            checksum=self.checksums[at],
        )

    @property
    def is_whole(self) -> bool:
        """Whether every item is OK, and all bytes of its object are in this frame."""
        return not (any(self.statuses) or any(self.offsets)) and self.lengths == self.object_bytes

    @property
    def is_run(self) -> bool:
        """Whether there are items, consecutive and in order."""
        return bool(self.indices) and self.indices == tuple(
            range(self.indices[0], self.indices[0] + len(self.indices))
        )


def read_items(items: "Iterable[ReadItem] | ReadItems") -> ReadItems:
    """`items` by column."""
    if isinstance(items, ReadItems):
        return items
    rows = tuple(items)
    return ReadItems(
        indices=tuple(row.index for row in rows),
        statuses=bytes(row.status for row in rows),
        object_bytes=tuple(row.object_bytes for row in rows),
        offsets=tuple(row.offset for row in rows),
        lengths=tuple(row.length for row in rows),
        checksums=tuple(row.checksum for row in rows),
    )


@attrs.frozen(kw_only=True)
class ReadReply:
    """Outcomes of some items of a READ; the payload is their bytes in this order."""

    status: ErrorCode = ErrorCode.OK
    retry_after_ms: int = 0
    items: ReadItems = attrs.field(factory=ReadItems, converter=read_items)


@attrs.frozen(kw_only=True)
class ReadRegionReply:
    """Outcomes of some items of a READ_REGION; `length` bytes are in place, none follow."""

    status: ErrorCode = ErrorCode.OK
    retry_after_ms: int = 0
    items: ReadItems = attrs.field(factory=ReadItems, converter=read_items)


@attrs.frozen(kw_only=True)
class Pong:
    """The answer to a Ping, with its nonce."""

    nonce: int = 0


@attrs.frozen(kw_only=True)
class GoodbyeReply:
    """Everything that was asked has been answered; the connection can be closed."""


Keyed: TypeAlias = Exist | Read | Write | Delete | Check | ReadRegion | WriteRegion
Request: TypeAlias = Keyed | Hello | Fence | Ping | Goodbye | Release | RegionOpen | RegionClose
Reply: TypeAlias = Welcome | StatusReply | ExistReply | ReadReply | ReadRegionReply | Pong | GoodbyeReply
Notice: TypeAlias = Goodbye | ErrorMessage | Credit
Message: TypeAlias = Request | Reply | Notice


def payload_lengths(message: Message) -> tuple[int, ...]:
    """Bytes of each item that follow the message's body on the wire; empty for messages without payload."""
    if isinstance(message, ReadReply):
        return message.items.lengths
    if isinstance(message, Write):
        return tuple(item.length for item in message.items)
    return ()
