"""The fixed frame header (spec section 3.1).

    0      4  5  6      8                16         20         24         28         32
    +------+--+--+------+----------------+----------+----------+----------+----------+
    | magic|v |op| flags|   request id   | body     | payload  | body     | header   |
    | ADP/ |u8|u8| u16  |      u64       | bytes u32| bytes u32| CRC u32  | CRC u32  |
    +------+--+--+------+----------------+----------+----------+----------+----------+

Little endian. CRCs are CRC-32 (zlib); the header's covers bytes 0..27. The payload has no checksum of its own
here: each object's XXH3-64 stands in the body. Magic, version, opcode and flags keep their places for ever,
so that any version can refuse any other.
"""

import struct
import zlib

import attrs

from .constants import HEADER_BYTES, MAGIC, VERSION, ErrorCode, Flag, Opcode
from .errors import LocalProtocolError

_HEADER = struct.Struct("<4sBBHQIII")
_CRC = struct.Struct("<I")
assert _HEADER.size + _CRC.size == HEADER_BYTES

_KNOWN_FLAGS = int(Flag.REPLY | Flag.MORE)
_KNOWN_OPCODES = frozenset(Opcode)


@attrs.frozen(kw_only=True)
class FrameHeader:
    """One decoded header. `body_bytes` of body and then `payload_bytes` of payload follow it."""

    opcode: Opcode
    flags: Flag = Flag.NONE
    request_id: int
    body_bytes: int = 0
    payload_bytes: int = 0
    body_crc: int = 0


def encode_header(header: FrameHeader) -> bytes:
    """The 32 bytes of `header`."""
    front = _HEADER.pack(
        MAGIC,
        VERSION,
        header.opcode,
        header.flags,
        header.request_id,
        header.body_bytes,
        header.payload_bytes,
        header.body_crc,
    )
    return front + _CRC.pack(zlib.crc32(front))


def check_beginning(raw: memoryview) -> None:
    """Raise LocalProtocolError if `raw`, fewer bytes than a header, cannot be the beginning of one.

    So a peer that speaks something else, and less than a header of it, is told at once and not when its time
    is up.
    """
    if not MAGIC.startswith(bytes(raw[: len(MAGIC)])):
        raise LocalProtocolError(f"not an ADP frame: it begins with {bytes(raw)!r}", ErrorCode.BAD_MAGIC)


def decode_header(raw: memoryview) -> FrameHeader:
    """Parse 32 bytes. Raises LocalProtocolError with the code that the sender deserves."""
    magic, version, opcode, flags, request_id, body_bytes, payload_bytes, body_crc = _HEADER.unpack_from(raw)
    if magic != MAGIC:
        raise LocalProtocolError(f"not an ADP frame: it begins with {magic!r}", ErrorCode.BAD_MAGIC)
    if version != VERSION:
        raise LocalProtocolError(f"frame of version {version}", ErrorCode.UNSUPPORTED_VERSION)
    if _CRC.unpack_from(raw, _HEADER.size)[0] != zlib.crc32(raw[: _HEADER.size]):
        raise LocalProtocolError("header checksum does not match", ErrorCode.BAD_CHECKSUM)
    if opcode not in _KNOWN_OPCODES:
        raise LocalProtocolError(f"unknown opcode {opcode}", ErrorCode.UNKNOWN_OPCODE)
    if flags & ~_KNOWN_FLAGS:
        raise LocalProtocolError(f"unknown flags {flags:#x}")
    return FrameHeader(
        opcode=Opcode(opcode),
        flags=Flag(flags),
        request_id=request_id,
        body_bytes=body_bytes,
        payload_bytes=payload_bytes,
        body_crc=body_crc,
    )


def check_body(header: FrameHeader, body: memoryview) -> None:
    """Raise LocalProtocolError unless `body` is what the header's checksum speaks of."""
    if zlib.crc32(body) != header.body_crc:
        raise LocalProtocolError("body checksum does not match", ErrorCode.BAD_CHECKSUM)
