"""One request and its reply: what may be said, in which order, how much (spec sections 5 and 7.2).

Both sides keep an Exchange for every request in flight and feed it the same frames, the client when it sends
and receives, the gateway when it receives and sends; so one set of rules guards both directions.
"""

from operator import le

from .codec import OPCODES, REPLY_TYPES
from .constants import ErrorCode, Feature, Opcode
from .errors import LocalProtocolError
from .messages import (
    Exist,
    ExistReply,
    Keyed,
    Limits,
    Read,
    ReadItem,
    ReadItems,
    ReadRegion,
    ReadRegionReply,
    ReadReply,
    RegionClose,
    RegionOpen,
    Release,
    Reply,
    Request,
    StatusReply,
    Write,
    WriteItem,
    WriteRegion,
)

_NEEDS_REGIONS = (RegionOpen, RegionClose, ReadRegion, WriteRegion)
_UNANSWERED, _ANSWERED = b"\0", b"\1"


class Exchange:
    """A request in flight. Raises LocalProtocolError for a frame that does not belong."""

    def __init__(self, opcode: Opcode, limits: Limits, features: Feature) -> None:
        self.opcode = opcode
        self.deadline: float | None = None
        self.is_asked = False  # the last frame of the request has been seen
        self.is_answered = False  # the final reply has been seen
        self.cost_bytes = 0
        self.count = 0
        self._limits = limits
        self._features = features
        self._capacities: tuple[int, ...] = ()
        self._answered = bytearray()
        self._namespace: bytes | None = None  # of a WRITE
        self._open_write: tuple[bytes, WriteItem] | None = None
        self._open_reads: dict[int, ReadItem] = {}

    # ------------------------------------------------------------ request

    def ask(self, message: Request, is_final: bool) -> int:
        """Take one frame of the request; returns the bytes it adds to the window."""
        if OPCODES[type(message)] is not self.opcode or self.is_asked:
            raise LocalProtocolError("a frame that is not of this request", ErrorCode.UNEXPECTED_MESSAGE)
        if not is_final and not isinstance(message, Write):
            raise LocalProtocolError(f"{self.opcode.name} does not span frames")
        self._check_features(message)
        cost = 0
        if isinstance(message, Write):
            cost = self._ask_write(message, is_final)
        elif isinstance(message, Release):
            self._count_items(len(message.lease_ids))
        elif isinstance(message, Keyed):
            self._check_keys(message.keys)
            self._count_items(len(message.keys))
            if isinstance(message, Read):
                self._capacities = message.capacities
                cost = sum(message.capacities)
            elif isinstance(message, ReadRegion):
                self._capacities = tuple(target.capacity for target in message.targets)
                cost = sum(self._capacities)
            elif isinstance(message, WriteRegion):
                for source in message.sources:
                    self._check_size(source.length)
                    cost += source.length
        self.is_asked = is_final
        self.cost_bytes += cost
        return cost

    def _check_features(self, message: Request) -> None:
        needed = Feature.NONE
        if isinstance(message, _NEEDS_REGIONS):
            needed = Feature.REGIONS
        elif isinstance(message, Release) or (isinstance(message, Exist) and message.lease_ms):
            needed = Feature.LEASES
        if needed & ~self._features:
            raise LocalProtocolError(
                f"{needed.name} was not agreed on in the handshake", ErrorCode.UNEXPECTED_MESSAGE
            )

    def _check_keys(self, keys: tuple[bytes, ...]) -> None:
        if len(keys[0]) > self._limits.max_key_bytes:
            raise LocalProtocolError(f"keys of {len(keys[0])} bytes", ErrorCode.LIMIT_EXCEEDED)

    def _check_size(self, object_bytes: int) -> None:
        if object_bytes > self._limits.max_object_bytes:
            raise LocalProtocolError(f"an object of {object_bytes} bytes", ErrorCode.LIMIT_EXCEEDED)

    def _count_items(self, more: int) -> None:
        self.count += more
        if self.count > self._limits.max_items:
            raise LocalProtocolError(f"{self.count} items in one request", ErrorCode.LIMIT_EXCEEDED)
        self._answered.extend(_UNANSWERED * more)

    def _ask_write(self, message: Write, is_final: bool) -> int:
        self._check_namespace(message.namespace)
        self._check_keys(message.keys)
        cost = 0
        last = len(message.items) - 1
        for position, (key, item) in enumerate(zip(message.keys, message.items, strict=True)):
            if item.offset or self._open_write is not None:
                self._check_continues(position, key, item)
            else:
                self._check_size(item.object_bytes)
                self._count_items(1)
                cost += item.object_bytes
            end = item.offset + item.length
            if end > item.object_bytes or (item.length == 0 and item.object_bytes):
                raise LocalProtocolError(f"bytes {item.offset} to {end} of {item.object_bytes}")
            if end == item.object_bytes:
                self._open_write = None
            elif is_final or position < last:
                raise LocalProtocolError("an object is left unfinished")
            else:
                self._open_write = (key, item)
        return cost

    def _check_namespace(self, namespace: bytes) -> None:
        """An object that spans frames has one name, and so has whatever stands beside it."""
        if self._namespace is None:
            self._namespace = namespace
        elif namespace != self._namespace:
            raise LocalProtocolError("a frame of this request names another namespace")

    def _check_continues(self, position: int, key: bytes, item: WriteItem) -> None:
        if self._open_write is None or position:
            raise LocalProtocolError("an item continues nothing")
        open_key, before = self._open_write
        if (
            key != open_key
            or item.offset != before.offset + before.length
            or item.object_bytes != before.object_bytes
            or item.checksum != before.checksum
        ):
            raise LocalProtocolError("an item does not continue the one before")

    # ------------------------------------------------------------ reply

    def answer(self, message: Reply, is_final: bool) -> None:
        """Take one frame of the reply. After the final one nothing more may come."""
        if type(message) is not REPLY_TYPES[self.opcode] or not self.is_asked:
            raise LocalProtocolError(
                f"not a reply to {self.opcode.name}: {type(message).__name__}", ErrorCode.UNEXPECTED_MESSAGE
            )
        if isinstance(message, (StatusReply, ExistReply, ReadReply, ReadRegionReply)):
            if message.status is not ErrorCode.OK:
                if not is_final:
                    raise LocalProtocolError("a refusal is final")
                self.is_answered = True
                return
            if isinstance(message, (StatusReply, ExistReply)):
                self._answer_statuses(message.first, len(message.statuses))
            else:
                self._answer_reads(message.items)
            if is_final and _UNANSWERED in self._answered:
                raise LocalProtocolError("the final reply leaves items unanswered")
        elif not is_final:
            raise LocalProtocolError(f"a reply to {self.opcode.name} is one frame")
        self.is_answered = is_final

    def _answer_statuses(self, first: int, count: int) -> None:
        if first + count > self.count:
            raise LocalProtocolError(f"items {first} to {first + count} of {self.count}")
        if _ANSWERED in self._answered[first : first + count]:
            raise LocalProtocolError("an item is answered twice")
        self._answered[first : first + count] = _ANSWERED * count

    def _answer_reads(self, items: ReadItems) -> None:
        """All at once if they are what they nearly always are: whole, in order, none answered yet."""
        if items.is_whole and items.is_run:
            first, end = items.indices[0], items.indices[0] + len(items)
            if (
                end <= self.count
                and _ANSWERED not in self._answered[first:end]
                and not self._open_reads
                and all(map(le, items.object_bytes, self._capacities[first:end]))
            ):
                self._answered[first:end] = _ANSWERED * len(items)
                return
        for item in items:
            self._answer_read(item)

    def _answer_read(self, item: ReadItem) -> None:
        if item.index >= self.count:
            raise LocalProtocolError(f"item {item.index} of {self.count}")
        if self._answered[item.index]:
            raise LocalProtocolError(f"item {item.index} is answered twice")
        if item.status is not ErrorCode.OK:
            if item.length:
                raise LocalProtocolError("bytes of an item that is not OK")
            self._open_reads.pop(item.index, None)
            self._answered[item.index] = 1
            return
        before = self._open_reads.get(item.index)
        begun = 0 if before is None else before.offset + before.length
        if item.offset != begun or (
            before is not None
            and (before.object_bytes != item.object_bytes or before.checksum != item.checksum)
        ):
            raise LocalProtocolError(f"item {item.index} does not continue where it was")
        end = item.offset + item.length
        if end > item.object_bytes or (item.length == 0 and item.object_bytes):
            raise LocalProtocolError(f"bytes {item.offset} to {end} of {item.object_bytes}")
        if self.opcode is Opcode.READ_REGION and end - item.offset != item.object_bytes:
            raise LocalProtocolError("a part of an object in a region")
        if item.object_bytes > self._capacities[item.index]:
            raise LocalProtocolError(f"item {item.index} is larger than its memory")
        if end == item.object_bytes:
            self._open_reads.pop(item.index, None)
            self._answered[item.index] = 1
        else:
            self._open_reads[item.index] = item
