"""Message <-> body bytes (spec section 5): one writer per type, one reader per (opcode, is it a reply).

Readers are strict: a body is exactly its fields, reserved fields are zero, every count is compared with the
bytes that are there before anything of that size is made. They raise LocalProtocolError; `connection`
turns what came from the peer into RemoteProtocolError, once.
"""

import struct
from collections.abc import Callable
from itertools import repeat
from typing import Any

from .constants import (
    BOOT_ID_BYTES,
    MAX_KEY_BYTES,
    MAX_TEXT_BYTES,
    NAMESPACE_BYTES,
    ErrorCode,
    Feature,
    Opcode,
)
from .errors import LocalProtocolError
from .messages import (
    Check,
    Credit,
    Delete,
    ErrorMessage,
    Exist,
    ExistReply,
    Extension,
    Fence,
    Goodbye,
    GoodbyeReply,
    Hello,
    Limits,
    Message,
    Ping,
    Pong,
    Read,
    ReadItems,
    ReadRegion,
    ReadRegionReply,
    ReadReply,
    RegionClose,
    RegionOpen,
    RegionSource,
    RegionTarget,
    Release,
    StatusReply,
    Welcome,
    Write,
    WriteItem,
    WriteRegion,
)
from .workers import decode_worker_map

_HELLO = struct.Struct("<HHIQIHHI")  # min, max, body limit, features, payload limit, token, agent, extensions
_WELCOME = struct.Struct("<HHIQ16sIIIIIIIIQHHI")
_EXTENSION = struct.Struct("<HHI")
_VECTOR = struct.Struct("<32sIHHII")  # namespace, count, key bytes, reserved, argument, reserved
_WRITE_ITEM = struct.Struct("<IIIIQ")
_REGION_TARGET = struct.Struct("<IIQ")
_REGION_SOURCE = struct.Struct("<IIQQ")
_REPLY = struct.Struct("<BBHIII")  # status, reserved, reserved, retry after, first, count
_LEASE = struct.Struct("<QII")
_READ_ITEM = struct.Struct("<IBBHIIIIQ")
_REASON = struct.Struct("<HHI")
_REGION_OPEN = struct.Struct("<IIQ")
_REGION_CLOSE = struct.Struct("<II")
_RELEASE = struct.Struct("<II")
_CREDIT = struct.Struct("<IIQ")
_U64 = struct.Struct("<Q")

#: name -> size in bytes of every fixed part; the spec's table is checked against it.
LAYOUT_BYTES = {
    "hello": _HELLO.size,
    "welcome": _WELCOME.size,
    "extension": _EXTENSION.size,
    "vector head": _VECTOR.size,
    "write item": _WRITE_ITEM.size,
    "region target": _REGION_TARGET.size,
    "region source": _REGION_SOURCE.size,
    "reply head": _REPLY.size,
    "lease": _LEASE.size,
    "read item": _READ_ITEM.size,
    "reason": _REASON.size,
    "region open": _REGION_OPEN.size,
    "region close": _REGION_CLOSE.size,
    "release head": _RELEASE.size,
    "credit": _CREDIT.size,
    "nonce": _U64.size,
}
assert LAYOUT_BYTES["vector head"] == 48
assert LAYOUT_BYTES["read item"] == 32

_ITEM_CODES = {code.value: code for code in ErrorCode if not code.ends_connection}
_NOT_ITEM_CODES = bytes(value for value in range(256) if value not in _ITEM_CODES)


# ---------------------------------------------------------------- reading


class _Cursor:
    """Walks one body; every step checks that the bytes are there."""

    def __init__(self, body: memoryview) -> None:
        self._body = body
        self._at = 0

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        end = self._at + layout.size
        if end > len(self._body):
            raise LocalProtocolError(f"body ends inside a field: {len(self._body)} bytes, {end} needed")
        values = layout.unpack_from(self._body, self._at)
        self._at = end
        return values

    def table(self, layout: struct.Struct, count: int) -> list[tuple[Any, ...]]:
        return list(layout.iter_unpack(self.take(count * layout.size)))

    def columns(self, layout: struct.Struct, count: int) -> list[tuple[Any, ...]]:
        """A table by column: each value of a row, of all rows."""
        raw = self.take(count * layout.size)
        values = struct.unpack("<" + layout.format[1:] * count, raw)
        step = len(values) // count
        return [values[at::step] for at in range(step)]

    def take(self, count: int) -> bytes:
        end = self._at + count
        if end > len(self._body):
            raise LocalProtocolError(f"body ends inside a table: {len(self._body)} bytes, {end} needed")
        raw = bytes(self._body[self._at : end])
        self._at = end
        return raw

    @property
    def left(self) -> int:
        return len(self._body) - self._at

    def finish(self) -> None:
        if self.left:
            raise LocalProtocolError(f"{self.left} bytes too many in the body")


def _zero(*reserved: int) -> None:
    if any(reserved):
        raise LocalProtocolError("a reserved field is not zero")


def _text(raw: bytes) -> str:
    if len(raw) > MAX_TEXT_BYTES:
        raise LocalProtocolError(f"text of {len(raw)} bytes", ErrorCode.LIMIT_EXCEEDED)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        raise LocalProtocolError("text is not UTF-8") from None


def _item_code(value: int) -> ErrorCode:
    code = _ITEM_CODES.get(value)
    if code is None:
        raise LocalProtocolError(f"{value} is not a status")
    return code


def _connection_code(value: int) -> ErrorCode:
    try:
        return ErrorCode(value)
    except ValueError:
        raise LocalProtocolError(f"{value} is not an error code") from None


def _read_extensions(cursor: _Cursor, size: int) -> tuple[Extension, ...]:
    if size != cursor.left:
        raise LocalProtocolError(f"extensions of {size} bytes in {cursor.left}")
    found = []
    while cursor.left:
        tag, reserved, length = cursor.unpack(_EXTENSION)
        _zero(reserved)
        found.append(Extension(tag=tag, data=cursor.take(length)))
    return tuple(found)


def _read_hello(cursor: _Cursor) -> Hello:
    low, high, body, features, payload, token_bytes, agent_bytes, extension_bytes = cursor.unpack(_HELLO)
    if low > high:
        raise LocalProtocolError(f"versions {low} to {high}")
    return Hello(
        min_version=low,
        max_version=high,
        features=_features(features),
        max_body_bytes=body,
        max_payload_bytes=payload,
        token=cursor.take(token_bytes),
        agent=_text(cursor.take(agent_bytes)),
        extensions=_read_extensions(cursor, extension_bytes),
    )


def _features(bits: int) -> Feature:
    """Keep the bits that this version knows; later ones are for later peers (section 4.4)."""
    known = 0
    for feature in Feature:
        known |= feature
    return Feature(bits & known)


def _read_welcome(cursor: _Cursor) -> Welcome:
    (
        version,
        reserved,
        body,
        features,
        boot_id,
        payload,
        items,
        key,
        obj,
        command,
        requests,
        lease,
        reserved2,
        inflight,
        agent_bytes,
        reserved3,
        extension_bytes,
    ) = cursor.unpack(_WELCOME)
    _zero(reserved, reserved2, reserved3)
    agent = _text(cursor.take(agent_bytes))
    extensions = _read_extensions(cursor, extension_bytes)
    decode_worker_map(extensions)  # an extension that is known is as strict as everything else
    return Welcome(
        version=version,
        features=_features(features),
        boot_id=boot_id,
        limits=Limits(
            max_body_bytes=body,
            max_payload_bytes=payload,
            max_items=items,
            max_key_bytes=key,
            max_object_bytes=obj,
            max_command_bytes=command,
            max_requests=requests,
            max_inflight_bytes=inflight,
            max_lease_ms=lease,
        ),
        agent=agent,
        extensions=extensions,
    )


def _read_vector(cursor: _Cursor) -> tuple[bytes, tuple[bytes, ...], int]:
    namespace, count, width, reserved, argument, reserved2 = cursor.unpack(_VECTOR)
    _zero(reserved, reserved2)
    if count == 0:
        raise LocalProtocolError("a vector without items")
    if not 0 < width <= MAX_KEY_BYTES:
        raise LocalProtocolError(f"keys of {width} bytes", ErrorCode.LIMIT_EXCEEDED)
    raw = cursor.take(count * width)
    return namespace, tuple(raw[at : at + width] for at in range(0, len(raw), width)), argument


def _read_exist(cursor: _Cursor) -> Exist:
    namespace, keys, lease_ms = _read_vector(cursor)
    return Exist(namespace=namespace, keys=keys, lease_ms=lease_ms)


def _read_read(cursor: _Cursor) -> Read:
    namespace, keys, argument = _read_vector(cursor)
    _zero(argument)
    capacities = struct.unpack(f"<{len(keys)}I", cursor.take(4 * len(keys)))
    return Read(namespace=namespace, keys=keys, capacities=capacities)


def _read_write(cursor: _Cursor) -> Write:
    namespace, keys, argument = _read_vector(cursor)
    _zero(argument)
    items = []
    for size, offset, length, reserved, checksum in cursor.table(_WRITE_ITEM, len(keys)):
        _zero(reserved)
        items.append(WriteItem(object_bytes=size, offset=offset, length=length, checksum=checksum))
    return Write(namespace=namespace, keys=keys, items=tuple(items))


def _read_delete(cursor: _Cursor) -> Delete:
    namespace, keys, argument = _read_vector(cursor)
    _zero(argument)
    return Delete(namespace=namespace, keys=keys)


def _read_check(cursor: _Cursor) -> Check:
    namespace, keys, argument = _read_vector(cursor)
    _zero(argument)
    return Check(namespace=namespace, keys=keys)


def _read_read_region(cursor: _Cursor) -> ReadRegion:
    namespace, keys, argument = _read_vector(cursor)
    _zero(argument)
    rows = cursor.table(_REGION_TARGET, len(keys))
    targets = tuple(RegionTarget(region=r, capacity=c, offset=o) for r, c, o in rows)
    return ReadRegion(namespace=namespace, keys=keys, targets=targets)


def _read_write_region(cursor: _Cursor) -> WriteRegion:
    namespace, keys, argument = _read_vector(cursor)
    _zero(argument)
    rows = cursor.table(_REGION_SOURCE, len(keys))
    sources = tuple(RegionSource(region=r, length=n, offset=o, checksum=c) for r, n, o, c in rows)
    return WriteRegion(namespace=namespace, keys=keys, sources=sources)


def _read_release(cursor: _Cursor) -> Release:
    count, reserved = cursor.unpack(_RELEASE)
    _zero(reserved)
    if count == 0:
        raise LocalProtocolError("a vector without items")
    return Release(lease_ids=tuple(lease for (lease,) in cursor.table(_U64, count)))


def _read_region_open(cursor: _Cursor) -> RegionOpen:
    region, reserved, size = cursor.unpack(_REGION_OPEN)
    _zero(reserved)
    return RegionOpen(region=region, region_bytes=size)


def _read_region_close(cursor: _Cursor) -> RegionClose:
    region, reserved = cursor.unpack(_REGION_CLOSE)
    _zero(reserved)
    return RegionClose(region=region)


def _read_reply_head(cursor: _Cursor) -> tuple[ErrorCode, int, int, int]:
    status, reserved, reserved2, retry_after_ms, first, count = cursor.unpack(_REPLY)
    _zero(reserved, reserved2)
    code = _item_code(status)
    if code is not ErrorCode.OK and (first or count):
        raise LocalProtocolError("a refused request has no items")
    return code, retry_after_ms, first, count


def _statuses(cursor: _Cursor, count: int) -> bytes:
    return _known_statuses(cursor.take(count))


def _known_statuses(raw: bytes) -> bytes:
    if len(raw.translate(None, _NOT_ITEM_CODES)) != len(raw):
        raise LocalProtocolError("an unknown status byte")
    return raw


def _read_status_reply(cursor: _Cursor) -> StatusReply:
    status, retry_after_ms, first, count = _read_reply_head(cursor)
    return StatusReply(
        status=status, retry_after_ms=retry_after_ms, first=first, statuses=_statuses(cursor, count)
    )


def _read_exist_reply(cursor: _Cursor) -> ExistReply:
    status, retry_after_ms, first, count = _read_reply_head(cursor)
    lease_id, lease_ms, reserved = cursor.unpack(_LEASE)
    _zero(reserved)
    return ExistReply(
        status=status,
        retry_after_ms=retry_after_ms,
        first=first,
        statuses=_statuses(cursor, count),
        lease_id=lease_id,
        lease_ms=lease_ms,
    )


def _read_items(cursor: _Cursor) -> tuple[ErrorCode, int, ReadItems]:
    status, retry_after_ms, first, count = _read_reply_head(cursor)
    _zero(first)
    if not count:
        return status, retry_after_ms, ReadItems()
    indices, codes, pads, pads2, sizes, offsets, lengths, pads3, checksums = cursor.columns(_READ_ITEM, count)
    if any(pads) or any(pads2) or any(pads3):
        _zero(1)
    items = ReadItems(
        indices=indices,
        statuses=_known_statuses(bytes(codes)),
        object_bytes=sizes,
        offsets=offsets,
        lengths=lengths,
        checksums=checksums,
    )
    return status, retry_after_ms, items


def _read_read_reply(cursor: _Cursor) -> ReadReply:
    status, retry_after_ms, items = _read_items(cursor)
    return ReadReply(status=status, retry_after_ms=retry_after_ms, items=items)


def _read_read_region_reply(cursor: _Cursor) -> ReadRegionReply:
    status, retry_after_ms, items = _read_items(cursor)
    return ReadRegionReply(status=status, retry_after_ms=retry_after_ms, items=items)


def _read_reason(cursor: _Cursor) -> tuple[ErrorCode, str]:
    code, reserved, size = cursor.unpack(_REASON)
    _zero(reserved)
    return _connection_code(code), _text(cursor.take(size))


def _read_goodbye(cursor: _Cursor) -> Goodbye:
    code, text = _read_reason(cursor)
    return Goodbye(code=code, text=text)


def _read_error(cursor: _Cursor) -> ErrorMessage:
    code, text = _read_reason(cursor)
    if not code.ends_connection:
        raise LocalProtocolError(f"{code.name} does not end a connection")
    return ErrorMessage(code=code, text=text)


def _read_credit(cursor: _Cursor) -> Credit:
    requests, reserved, inflight_bytes = cursor.unpack(_CREDIT)
    _zero(reserved)
    return Credit(requests=requests, inflight_bytes=inflight_bytes)


READERS: dict[tuple[Opcode, bool], Callable[[_Cursor], Message]] = {
    (Opcode.HELLO, False): _read_hello,
    (Opcode.HELLO, True): _read_welcome,
    (Opcode.EXIST, False): _read_exist,
    (Opcode.EXIST, True): _read_exist_reply,
    (Opcode.READ, False): _read_read,
    (Opcode.READ, True): _read_read_reply,
    (Opcode.WRITE, False): _read_write,
    (Opcode.WRITE, True): _read_status_reply,
    (Opcode.DELETE, False): _read_delete,
    (Opcode.DELETE, True): _read_status_reply,
    (Opcode.CHECK, False): _read_check,
    (Opcode.CHECK, True): _read_status_reply,
    (Opcode.FENCE, False): lambda _: Fence(),
    (Opcode.FENCE, True): _read_status_reply,
    (Opcode.PING, False): lambda cursor: Ping(nonce=cursor.unpack(_U64)[0]),
    (Opcode.PING, True): lambda cursor: Pong(nonce=cursor.unpack(_U64)[0]),
    (Opcode.GOODBYE, False): _read_goodbye,
    (Opcode.GOODBYE, True): lambda _: GoodbyeReply(),
    (Opcode.ERROR, False): _read_error,
    (Opcode.RELEASE, False): _read_release,
    (Opcode.RELEASE, True): _read_status_reply,
    (Opcode.REGION_OPEN, False): _read_region_open,
    (Opcode.REGION_OPEN, True): _read_status_reply,
    (Opcode.REGION_CLOSE, False): _read_region_close,
    (Opcode.REGION_CLOSE, True): _read_status_reply,
    (Opcode.READ_REGION, False): _read_read_region,
    (Opcode.READ_REGION, True): _read_read_region_reply,
    (Opcode.WRITE_REGION, False): _read_write_region,
    (Opcode.WRITE_REGION, True): _read_status_reply,
    (Opcode.CREDIT, False): _read_credit,
}


def decode_body(opcode: Opcode, is_reply: bool, body: memoryview) -> Message:
    """Parse one body. Raises LocalProtocolError if it is not exactly such a message."""
    reader = READERS.get((opcode, is_reply))
    if reader is None:
        raise LocalProtocolError(f"{opcode.name} has no reply", ErrorCode.UNEXPECTED_MESSAGE)
    cursor = _Cursor(body)
    message = reader(cursor)
    cursor.finish()
    return message


# ---------------------------------------------------------------- writing


def _extensions(extensions: tuple[Extension, ...]) -> bytes:
    return b"".join(_EXTENSION.pack(e.tag, 0, len(e.data)) + e.data for e in extensions)


def _write_hello(m: Hello) -> bytes:
    agent, extensions = _encode_text(m.agent), _extensions(m.extensions)
    head = _HELLO.pack(
        m.min_version,
        m.max_version,
        m.max_body_bytes,
        m.features,
        m.max_payload_bytes,
        len(m.token),
        len(agent),
        len(extensions),
    )
    return b"".join((head, m.token, agent, extensions))


def _write_welcome(m: Welcome) -> bytes:
    if len(m.boot_id) != BOOT_ID_BYTES:
        raise LocalProtocolError(f"a boot id is {BOOT_ID_BYTES} bytes")
    agent, extensions, limits = _encode_text(m.agent), _extensions(m.extensions), m.limits
    head = _WELCOME.pack(
        m.version,
        0,
        limits.max_body_bytes,
        m.features,
        m.boot_id,
        limits.max_payload_bytes,
        limits.max_items,
        limits.max_key_bytes,
        limits.max_object_bytes,
        limits.max_command_bytes,
        limits.max_requests,
        limits.max_lease_ms,
        0,
        limits.max_inflight_bytes,
        len(agent),
        0,
        len(extensions),
    )
    return b"".join((head, agent, extensions))


def _encode_text(text: str) -> bytes:
    raw = text.encode("utf-8")
    if len(raw) > MAX_TEXT_BYTES:
        raise LocalProtocolError(f"text of {len(raw)} bytes", ErrorCode.LIMIT_EXCEEDED)
    return raw


def _vector(namespace: bytes, keys: tuple[bytes, ...], argument: int = 0, rows: int | None = None) -> bytes:
    if len(namespace) != NAMESPACE_BYTES:
        raise LocalProtocolError(f"a namespace is {NAMESPACE_BYTES} bytes, not {len(namespace)}")
    if not keys:
        raise LocalProtocolError("a vector without items")
    if rows is not None and rows != len(keys):
        raise LocalProtocolError(f"{len(keys)} keys and {rows} items")
    width = len(keys[0])
    if not 0 < width <= MAX_KEY_BYTES:
        raise LocalProtocolError(f"keys of {width} bytes", ErrorCode.LIMIT_EXCEEDED)
    raw = b"".join(keys)
    if len(raw) != width * len(keys) or any(len(key) != width for key in keys):
        raise LocalProtocolError("keys of different widths in one vector")
    return _VECTOR.pack(namespace, len(keys), width, 0, argument, 0) + raw


def _write_read(m: Read) -> bytes:
    rows = len(m.capacities)
    return _vector(m.namespace, m.keys, rows=rows) + struct.pack(f"<{rows}I", *m.capacities)


def _write_write(m: Write) -> bytes:
    rows = [_WRITE_ITEM.pack(i.object_bytes, i.offset, i.length, 0, i.checksum) for i in m.items]
    return b"".join((_vector(m.namespace, m.keys, rows=len(rows)), *rows))


def _write_read_region(m: ReadRegion) -> bytes:
    rows = [_REGION_TARGET.pack(t.region, t.capacity, t.offset) for t in m.targets]
    return b"".join((_vector(m.namespace, m.keys, rows=len(rows)), *rows))


def _write_write_region(m: WriteRegion) -> bytes:
    rows = [_REGION_SOURCE.pack(s.region, s.length, s.offset, s.checksum) for s in m.sources]
    return b"".join((_vector(m.namespace, m.keys, rows=len(rows)), *rows))


def _write_release(m: Release) -> bytes:
    if not m.lease_ids:
        raise LocalProtocolError("a vector without items")
    return _RELEASE.pack(len(m.lease_ids), 0) + struct.pack(f"<{len(m.lease_ids)}Q", *m.lease_ids)


def _reply_head(status: ErrorCode, retry_after_ms: int, first: int, count: int) -> bytes:
    if status.ends_connection:
        raise LocalProtocolError(f"{status.name} does not answer a request")
    if status is not ErrorCode.OK and (first or count):
        raise LocalProtocolError("a refused request has no items")
    return _REPLY.pack(status, 0, 0, retry_after_ms, first, count)


def _write_status_reply(m: StatusReply) -> bytes:
    return _reply_head(m.status, m.retry_after_ms, m.first, len(m.statuses)) + m.statuses


def _write_exist_reply(m: ExistReply) -> bytes:
    head = _reply_head(m.status, m.retry_after_ms, m.first, len(m.statuses))
    return b"".join((head, _LEASE.pack(m.lease_id, m.lease_ms, 0), m.statuses))


def _write_read_reply(m: ReadReply | ReadRegionReply) -> bytes:
    items, zeros = m.items, repeat(0)
    rows = map(
        _READ_ITEM.pack,
        items.indices,
        items.statuses,
        zeros,
        zeros,
        items.object_bytes,
        items.offsets,
        items.lengths,
        zeros,
        items.checksums,
    )
    return b"".join((_reply_head(m.status, m.retry_after_ms, 0, len(items)), *rows))


def _write_reason(m: Goodbye | ErrorMessage) -> bytes:
    text = _encode_text(m.text)
    return _REASON.pack(m.code, 0, len(text)) + text


WRITERS: dict[type, Callable[[Any], bytes]] = {
    Hello: _write_hello,
    Welcome: _write_welcome,
    Exist: lambda m: _vector(m.namespace, m.keys, m.lease_ms),
    ExistReply: _write_exist_reply,
    Read: _write_read,
    ReadReply: _write_read_reply,
    Write: _write_write,
    StatusReply: _write_status_reply,
    Delete: lambda m: _vector(m.namespace, m.keys),
    Check: lambda m: _vector(m.namespace, m.keys),
    Fence: lambda _: b"",
    Ping: lambda m: _U64.pack(m.nonce),
    Pong: lambda m: _U64.pack(m.nonce),
    Goodbye: _write_reason,
    GoodbyeReply: lambda _: b"",
    ErrorMessage: _write_reason,
    Release: _write_release,
    RegionOpen: lambda m: _REGION_OPEN.pack(m.region, 0, m.region_bytes),
    RegionClose: lambda m: _REGION_CLOSE.pack(m.region, 0),
    ReadRegion: _write_read_region,
    ReadRegionReply: _write_read_reply,
    WriteRegion: _write_write_region,
    Credit: lambda m: _CREDIT.pack(m.requests, 0, m.inflight_bytes),
}

#: The opcode that carries a request or notice. A reply takes its request's.
OPCODES: dict[type, Opcode] = {
    Hello: Opcode.HELLO,
    Exist: Opcode.EXIST,
    Read: Opcode.READ,
    Write: Opcode.WRITE,
    Delete: Opcode.DELETE,
    Check: Opcode.CHECK,
    Fence: Opcode.FENCE,
    Ping: Opcode.PING,
    Goodbye: Opcode.GOODBYE,
    ErrorMessage: Opcode.ERROR,
    Release: Opcode.RELEASE,
    RegionOpen: Opcode.REGION_OPEN,
    RegionClose: Opcode.REGION_CLOSE,
    ReadRegion: Opcode.READ_REGION,
    WriteRegion: Opcode.WRITE_REGION,
    Credit: Opcode.CREDIT,
}

#: What answers a request of this opcode.
REPLY_TYPES: dict[Opcode, type] = {
    Opcode.HELLO: Welcome,
    Opcode.EXIST: ExistReply,
    Opcode.READ: ReadReply,
    Opcode.PING: Pong,
    Opcode.GOODBYE: GoodbyeReply,
    Opcode.READ_REGION: ReadRegionReply,
    **dict.fromkeys(
        (
            Opcode.WRITE,
            Opcode.DELETE,
            Opcode.CHECK,
            Opcode.FENCE,
            Opcode.RELEASE,
            Opcode.REGION_OPEN,
            Opcode.REGION_CLOSE,
            Opcode.WRITE_REGION,
        ),
        StatusReply,
    ),
}


def encode_body(message: Message) -> bytes:
    """The body of `message`. Raises LocalProtocolError if it cannot be said in ADP/1."""
    try:
        return WRITERS[type(message)](message)
    except (struct.error, OverflowError) as exc:
        raise LocalProtocolError(f"{type(message).__name__}: a field is out of range ({exc})") from None
