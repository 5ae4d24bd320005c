"""Frames made by hand: what the protocol's core would refuse to say."""

import struct
import zlib
from collections.abc import Sequence
from typing import Any

from adp_client.protocol.constants import HEADER_BYTES, MAGIC, VERSION, Opcode

_HEADER = struct.Struct("<4sBBHQIII")
_VECTOR = struct.Struct("<32sIHHII")
_WRITE_ITEM = struct.Struct("<IIIIQ")
_HELLO = struct.Struct("<HHIQIHHI")


def frame(
    opcode: int,
    body: bytes = b"",
    *,
    request_id: int = 1,
    flags: int = 0,
    magic: bytes = MAGIC,
    version: int = VERSION,
    body_bytes: int | None = None,
    payload_bytes: int = 0,
    body_crc: int | None = None,
    header_crc: int | None = None,
) -> bytes:
    """Header and body, right but for what is given; checksums and sizes are worked out unless given."""
    front = _HEADER.pack(
        magic,
        version,
        opcode,
        flags,
        request_id,
        len(body) if body_bytes is None else body_bytes,
        payload_bytes,
        zlib.crc32(body) if body_crc is None else body_crc,
    )
    crc = zlib.crc32(front) if header_crc is None else header_crc
    raw = front + struct.pack("<I", crc)
    assert len(raw) == HEADER_BYTES
    return raw + body


def ping_frame(request_id: int, **fields: Any) -> bytes:
    """A right PING, but for `fields`."""
    return frame(Opcode.PING, bytes(8), request_id=request_id, **fields)


def vector(
    namespace: bytes,
    keys: Sequence[bytes],
    *,
    count: int | None = None,
    width: int | None = None,
    reserved: int = 0,
    argument: int = 0,
    reserved2: int = 0,
) -> bytes:
    """The head and the keys of a vector, right but for what is given."""
    head = _VECTOR.pack(
        namespace,
        len(keys) if count is None else count,
        (len(keys[0]) if keys else 1) if width is None else width,
        reserved,
        argument,
        reserved2,
    )
    return head + b"".join(keys)


def write_item(size: int, offset: int, length: int, checksum: int, *, reserved: int = 0) -> bytes:
    """One item of a WRITE."""
    return _WRITE_ITEM.pack(size, offset, length, reserved, checksum)


def hello_body(
    *,
    versions: tuple[int, int] = (1, 1),
    features: int = 0,
    max_body_bytes: int = 1 << 20,
    max_payload_bytes: int = 16 << 20,
    token: bytes = b"",
    agent: bytes = b"conformance",
    extensions: bytes = b"",
) -> bytes:
    """The body of a HELLO."""
    low, high = versions
    head = _HELLO.pack(
        low, high, max_body_bytes, features, max_payload_bytes, len(token), len(agent), len(extensions)
    )
    return head + token + agent + extensions


def extension(tag: int, data: bytes = b"", *, length: int | None = None) -> bytes:
    """One extension of a handshake."""
    return struct.pack("<HHI", tag, 0, len(data) if length is None else length) + data
