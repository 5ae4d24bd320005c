"""Targets: plain functions of bytes. The one promise of each is in its docstring and asserted.

Bytes that come from a peer are accepted, or end in RemoteProtocolError. Anything else that escapes is a
finding: another exception, memory above what was announced, a core that stops making progress.
"""

import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from adp_client.protocol import Connection, ErrorCode, Feature, Opcode, Role
from adp_client.protocol.codec import OPCODES, REPLY_TYPES, decode_body, encode_body
from adp_client.protocol.constants import HEADER_BYTES, Flag
from adp_client.protocol.errors import LocalProtocolError, RemoteProtocolError
from adp_client.protocol.events import HelloReceived, PayloadExpected, RequestReceived
from adp_client.protocol.frames import FrameHeader, check_body, decode_header, encode_header
from adp_client.protocol.messages import (
    Delete,
    Exist,
    Fence,
    GoodbyeReply,
    Hello,
    Limits,
    Message,
    Ping,
    Pong,
    Read,
    Reply,
    Welcome,
    Write,
    WriteItem,
)

BOOT = b"boot-id-16-bytes"
NAMESPACE = bytes(32)
LIMITS = Limits(
    max_body_bytes=4096,
    max_payload_bytes=8192,
    max_items=64,
    max_object_bytes=4096,
    max_requests=8,
    max_inflight_bytes=32768,
)
HELLO = Hello(
    features=Feature.LEASES | Feature.REGIONS | Feature.FRAGMENTS | Feature.CREDITS,
    max_body_bytes=4096,
    max_payload_bytes=8192,
)
#: What a core may hold beside the payload memory that its owner gives: a scratch buffer, and what it grew by.
MEMORY_LIMIT_BYTES = 65536 + 65536 + 4096 + HEADER_BYTES


def sealed(data: bytes) -> bytes:
    """Turn arbitrary bytes into frames whose checksums are right, so that a mutation reaches a body's reader.

    Each frame is cut from `data` as: opcode, flags, request id, body length, payload length (one byte each,
    lengths in units of 1 and 4 bytes), then body and payload.
    """
    raw, at = b"", 0
    while at + 5 <= len(data):
        opcode, flags, number, body_bytes, payload_units = data[at : at + 5]
        at += 5
        body = data[at : at + body_bytes]
        at += body_bytes
        payload = data[at : at + 4 * payload_units]
        at += 4 * payload_units
        header = FrameHeader(
            opcode=Opcode(opcode % len(Opcode) + 1),
            flags=Flag(flags & 3),
            request_id=number,
            body_bytes=len(body),
            payload_bytes=len(payload),
            body_crc=zlib.crc32(body),
        )
        raw += encode_header(header) + body + payload
    return raw


def unsealed(raw: bytes) -> bytes:
    """The inverse of `sealed`, for seeds: frames in the five-byte form, but for those too big for it."""
    data, at = b"", 0
    while at < len(raw):
        header = decode_header(memoryview(raw)[at : at + HEADER_BYTES])
        at += HEADER_BYTES
        body, payload = raw[at : at + header.body_bytes], b""
        at += header.body_bytes
        payload = raw[at : at + header.payload_bytes]
        at += header.payload_bytes
        units = -(-len(payload) // 4)
        if len(body) < 256 and header.request_id < 256 and len(payload) == 4 * units:
            data += bytes([header.opcode - 1, header.flags, header.request_id, len(body), units])
            data += body + payload
    return data


def _held_bytes(connection: Connection) -> int:
    return len(connection._buffer._scratch)


def _feed(connection: Connection, raw: bytes, chunk: int) -> Iterator[object]:
    """Give `raw` in pieces of `chunk`; payload memory is bounded by what the frame announced."""
    at = 0
    while True:
        while (event := connection.next_event()) is not None:
            yield event
            if isinstance(event, PayloadExpected):
                assert sum(event.lengths) <= LIMITS.max_payload_bytes
                connection.accept_payload([memoryview(bytearray(n)) for n in event.lengths])
        assert _held_bytes(connection) <= MEMORY_LIMIT_BYTES
        if at >= len(raw):
            return
        views = connection.receive_buffers()
        assert views, "no memory for the next byte, and nobody was asked for some"
        assert len(views[0]), "an empty piece of memory: the core cannot make progress"
        count = min(chunk, len(views[0]), len(raw) - at)
        views[0][:count] = raw[at : at + count]
        connection.bytes_received(count)
        at += count


def _answer(connection: Connection, event: RequestReceived) -> None:
    """Answer a request as a gateway that has nothing would."""
    kind = REPLY_TYPES[OPCODES[type(event.message)]]
    reply: Reply
    if kind is Pong:
        assert isinstance(event.message, Ping)
        reply = Pong(nonce=event.message.nonce)
    elif kind is GoodbyeReply:
        if connection.in_flight > 1:
            return
        reply = GoodbyeReply()
    else:
        reply = kind(status=ErrorCode.REFUSED)
    connection.reply(event.request_id, reply)


def _split(data: bytes) -> tuple[int, bytes]:
    """The first byte says how the rest is read: bit 0 as frames to be sealed, the rest the size of pieces."""
    if not data:
        return 1, b""
    mode, rest = data[0], data[1:]
    return (1 << (mode >> 1) % 16), sealed(rest) if mode & 1 else rest


@contextmanager
def _violations_end_it(error: type[LocalProtocolError | RemoteProtocolError]) -> Iterator[None]:
    """The promise: nothing but `error` may end the block, with a code that ends a connection."""
    try:
        yield
    except error as exc:
        if not exc.code.ends_connection:
            raise AssertionError(f"{exc.code.name} cannot end a connection") from exc


def gateway_stream(data: bytes) -> None:
    """A gateway after the handshake, any bytes from its client."""
    chunk, raw = _split(data)
    gateway = Connection(Role.GATEWAY)
    client = Connection(Role.CLIENT)
    list(_feed(gateway, client.hello(HELLO), 4096))
    gateway.accept(Welcome(boot_id=BOOT, features=HELLO.features, limits=LIMITS))
    with _violations_end_it(RemoteProtocolError):
        for event in _feed(gateway, raw, chunk):
            if isinstance(event, RequestReceived) and event.is_final:
                _answer(gateway, event)


def client_stream(data: bytes) -> None:
    """A client with requests in flight, any bytes from its gateway."""
    chunk, raw = _split(data)
    client = Connection(Role.CLIENT)
    gateway = Connection(Role.GATEWAY)
    list(_feed(gateway, client.hello(HELLO), 4096))
    list(_feed(client, gateway.accept(Welcome(boot_id=BOOT, features=HELLO.features, limits=LIMITS)), 4096))
    keys = (b"1234", b"5678")
    for message in (
        Exist(namespace=NAMESPACE, keys=keys),
        Read(namespace=NAMESPACE, keys=keys, capacities=(8, 4096)),
        Write(
            namespace=NAMESPACE,
            keys=keys[:1],
            items=(WriteItem(object_bytes=4, length=4, checksum=1),),
        ),
        Delete(namespace=NAMESPACE, keys=keys),
        Fence(),
        Ping(nonce=1),
    ):
        client.request(message)
    with _violations_end_it(RemoteProtocolError):
        for _ in _feed(client, raw, chunk):
            pass


def handshake(data: bytes) -> None:
    """Both sides before the handshake, any bytes; what is accepted can be answered."""
    chunk, raw = _split(data)
    gateway = Connection(Role.GATEWAY)
    with _violations_end_it(RemoteProtocolError):
        for event in _feed(gateway, raw, chunk):
            if isinstance(event, HelloReceived):
                gateway.accept(Welcome(boot_id=BOOT, limits=LIMITS))
    client = Connection(Role.CLIENT)
    client.hello(HELLO)
    with _violations_end_it(RemoteProtocolError):
        for _ in _feed(client, raw, chunk):
            pass


def frames(data: bytes) -> None:
    """One frame: what decodes encodes to the same bytes, unless it held feature bits of a later version."""
    if len(data) < HEADER_BYTES:
        return
    raw = memoryview(sealed(data[1:]) if data[0] & 1 else data[1:])
    if len(raw) < HEADER_BYTES:
        return
    with _violations_end_it(LocalProtocolError):
        header = decode_header(raw[:HEADER_BYTES])
        body = raw[HEADER_BYTES : HEADER_BYTES + header.body_bytes]
        check_body(header, body)
        message = decode_body(header.opcode, Flag.REPLY in header.flags, body)
        again = encode_body(message)
        assert again == body or _has_later_features(message, again, bytes(body))


def _has_later_features(message: Message, again: bytes, body: bytes) -> bool:
    return isinstance(message, (Hello, Welcome)) and again[:8] + again[16:] == body[:8] + body[16:]


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target for target in (gateway_stream, client_stream, handshake, frames)
}
