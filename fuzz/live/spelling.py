"""Messages as frames, and frames with something wrong."""

import random
import struct
import zlib
from typing import NamedTuple

import attrs

from adp_client.protocol import Opcode
from adp_client.protocol.codec import OPCODES, decode_body, encode_body
from adp_client.protocol.constants import HEADER_BYTES, MAGIC, MAX_KEY_BYTES, VERSION, ErrorCode, Flag
from adp_client.protocol.errors import LocalProtocolError
from adp_client.protocol.frames import FrameHeader, check_body, decode_header, encode_header
from adp_client.protocol.messages import (
    Credit,
    ErrorMessage,
    Exist,
    Fence,
    Goodbye,
    Hello,
    Limits,
    Message,
    Ping,
    Read,
    ReadRegion,
    RegionClose,
    RegionOpen,
    RegionTarget,
    Release,
    StatusReply,
    Write,
    WriteItem,
)


class Spelled(NamedTuple):
    """One frame of a message."""

    message: Message
    is_final: bool = True
    payload: bytes = b""


def frame(
    message: Message,
    request_id: int,
    *,
    is_final: bool = True,
    payload: bytes = b"",
    reply_to: Opcode | None = None,
) -> bytes:
    """The bytes of one frame, of a reply if it is said to what; nothing is checked."""
    body = encode_body(message)
    flags = (Flag.NONE if is_final else Flag.MORE) | (Flag.NONE if reply_to is None else Flag.REPLY)
    opcode = OPCODES[type(message)] if reply_to is None else reply_to
    return _sealed(opcode, flags, request_id, body, len(payload)) + payload


def with_token(raw: bytes, token: bytes) -> bytes:
    """`raw`, with the token in it if it begins with a HELLO that has none: cases are kept without."""
    if not token or len(raw) < HEADER_BYTES:
        return raw
    try:
        header = decode_header(memoryview(raw)[:HEADER_BYTES])
        end = HEADER_BYTES + header.body_bytes
        body = memoryview(raw)[HEADER_BYTES:end]
        check_body(header, body)
        message = decode_body(header.opcode, Flag.REPLY in header.flags, body)
    except LocalProtocolError:
        return raw
    if not isinstance(message, Hello) or message.token:
        return raw
    return frame(attrs.evolve(message, token=token), header.request_id) + raw[end:]


def _sealed(opcode: int, flags: int, request_id: int, body: bytes, payload_bytes: int) -> bytes:
    """A header, of values that may not exist, and its body, with checksums that hold."""
    front = struct.pack(
        "<4sBBHQIII",
        MAGIC,
        VERSION,
        opcode & 0xFF,
        flags & 0xFFFF,
        request_id,
        len(body),
        payload_bytes,
        zlib.crc32(body),
    )
    return front + struct.pack("<I", zlib.crc32(front)) + body


def _lying(header: FrameHeader, body: bytes) -> bytes:
    """A frame whose header speaks of other sizes than follow; its checksums hold."""
    return encode_header(attrs.evolve(header, body_crc=zlib.crc32(body))) + body


def damaged(rng: random.Random, raw: bytes) -> bytes:
    """`raw`, which begins with a valid frame, with one thing wrong in that frame."""
    header = decode_header(memoryview(raw)[:HEADER_BYTES])
    body = bytearray(raw[HEADER_BYTES : HEADER_BYTES + header.body_bytes])
    rest = raw[HEADER_BYTES + header.body_bytes :]
    kind = rng.randrange(9)
    if kind == 0 or (kind in (1, 2) and not body):
        return _flipped(rng, raw, HEADER_BYTES)
    if kind == 1:  # the body, and its checksum does not hold
        return raw[:HEADER_BYTES] + _flipped(rng, bytes(body), len(body)) + rest
    if kind == 2:  # the body, and its checksum holds
        at = rng.randrange(len(body))
        body[at] = rng.choice((0, 1, 0x7F, 0xFF, body[at] ^ 1 << rng.randrange(8)))
        return (
            _sealed(header.opcode, header.flags, header.request_id, bytes(body), header.payload_bytes) + rest
        )
    if kind == 3:  # a length that is not true
        lie = rng.choice((-1, 1, 16, 1000, -len(body)))
        wrong = attrs.evolve(header, body_bytes=max(0, header.body_bytes + lie))
        return _lying(wrong, bytes(body)) + rest
    if kind == 4:
        lie = rng.choice((1, 4, 4096, 2**31, -1, -header.payload_bytes))
        wrong = attrs.evolve(header, payload_bytes=max(0, header.payload_bytes + lie))
        return _lying(wrong, bytes(body)) + rest
    if kind == 5:
        opcode = rng.choice((0, 17, 255, *Opcode))
        return _sealed(opcode, header.flags, header.request_id, bytes(body), header.payload_bytes) + rest
    if kind == 6:
        flags = rng.choice((1, 2, 3, 4, 0x8000, 0xFFFF))
        return _sealed(header.opcode, flags, header.request_id, bytes(body), header.payload_bytes) + rest
    if kind == 7:
        number = rng.choice((0, 1, header.request_id - 1, 2**64 - 1)) % 2**64
        return _sealed(header.opcode, header.flags, number, bytes(body), header.payload_bytes) + rest
    cut = rng.randrange(len(raw))
    return raw[:cut] + rng.randbytes(rng.randrange(1, 9)) + raw[cut:]


def _flipped(rng: random.Random, raw: bytes, within: int) -> bytes:
    at = rng.randrange(within)
    return raw[:at] + bytes([raw[at] ^ 1 << rng.randrange(8)]) + raw[at + 1 :]


def violating(
    rng: random.Random, request_id: int, limits: Limits, namespace: bytes, keys: tuple[bytes, ...]
) -> bytes:
    """One or two whole frames that nobody may send now, or that ask for more than there is."""
    one = (keys[0],)
    vector = bytearray(encode_body(Exist(namespace=namespace, keys=keys)))
    size = 100
    item = WriteItem(object_bytes=size, length=size // 2, checksum=1)
    half = frame(
        Write(namespace=namespace, keys=one, items=(item,)),
        request_id,
        is_final=False,
        payload=bytes(size // 2),
    )

    def counted(count: int, width: int) -> bytes:
        struct.pack_into("<IH", vector, 32, count % 2**32, width % 2**16)
        return _sealed(rng.choice((2, 3, 5, 6)), 0, request_id, bytes(vector), 0)

    def write(item: WriteItem, payload: bytes, number: int = request_id) -> bytes:
        return frame(Write(namespace=namespace, keys=one, items=(item,)), number, payload=payload)

    choices = (
        lambda: frame(Hello(), 0),
        lambda: frame(Goodbye(), request_id) + frame(Ping(), request_id + 1),
        lambda: frame(Goodbye(), 0),
        lambda: frame(Credit(requests=1, inflight_bytes=1), 0),
        lambda: frame(ErrorMessage(code=ErrorCode.MALFORMED, text="fuzz"), 0),
        lambda: _sealed(rng.choice(tuple(Opcode)), 1, request_id, encode_body(StatusReply()), 0),
        lambda: frame(Ping(nonce=1), request_id) + frame(Ping(nonce=2), request_id),
        lambda: frame(Fence(), request_id, is_final=False),
        lambda: counted(0, len(one[0])),
        lambda: counted(2**32 - 1, len(one[0])),
        lambda: counted(len(keys) + 1, len(one[0])),
        lambda: counted(len(keys), 0),
        lambda: counted(len(keys), MAX_KEY_BYTES + 1),
        lambda: counted(limits.max_items + 1, 0),
        lambda: _sealed(2, 0, request_id, bytes(limits.max_body_bytes + 1)[: 1 << 21], 0),
        lambda: _lying(FrameHeader(opcode=Opcode.EXIST, request_id=request_id, body_bytes=2**32 - 1), b""),
        lambda: frame(
            Read(
                namespace=namespace, keys=one * 3, capacities=(min(limits.max_inflight_bytes, 2**32 - 1),) * 3
            ),
            request_id,
        ),
        lambda: (
            _sealed(
                Opcode.WRITE,
                0,
                request_id,
                encode_body(
                    Write(
                        namespace=namespace,
                        keys=one,
                        items=(
                            WriteItem(
                                object_bytes=min(limits.max_object_bytes + 1, 2**32 - 1), length=1, checksum=1
                            ),
                        ),
                    )
                ),
                1,
            )
            + b"x"
        ),
        lambda: write(WriteItem(object_bytes=10, offset=5, length=5, checksum=1), b"12345"),
        lambda: write(WriteItem(object_bytes=10, length=5, checksum=1), b"12345"),
        lambda: write(WriteItem(object_bytes=10, length=0, checksum=1), b""),
        lambda: half + write(attrs.evolve(item, offset=10), bytes(50)),
        lambda: half + write(attrs.evolve(item, offset=50, checksum=2), bytes(50)),
        lambda: half + write(WriteItem(object_bytes=1, length=1, checksum=1), b"x"),
        lambda: half + frame(Ping(), request_id),
        lambda: half,
        lambda: frame(Release(lease_ids=(rng.getrandbits(64),)), request_id),
        lambda: frame(Exist(namespace=namespace, keys=keys, lease_ms=1), request_id),
        lambda: frame(RegionOpen(region=1, region_bytes=1 << 40), request_id),
        lambda: frame(RegionClose(region=1), request_id),
        lambda: frame(
            ReadRegion(
                namespace=namespace, keys=one, targets=(RegionTarget(region=1, offset=0, capacity=1),)
            ),
            request_id,
        ),
    )
    return rng.choice(choices)()


def garbage(rng: random.Random) -> bytes:
    """What ports are sent by those who mean something else, or nothing."""
    return rng.choice(
        (
            b"GET / HTTP/1.1\r\nHost: gateway\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(50),
            b"*1\r\n$4\r\nPING\r\n",
            rng.randbytes(rng.randrange(1, 5000)),
            bytes(rng.randrange(1, 100)),
            MAGIC + rng.randbytes(rng.randrange(28)),
            MAGIC + bytes([VERSION + 1]) + rng.randbytes(27),
            MAGIC + bytes([VERSION]) + rng.randbytes(rng.randrange(27, 500)),
        )
    )
