"""Targets: plain functions of bytes. The one promise of each is in its docstring and asserted.

Bytes that come from a peer are accepted, or end in RemoteProtocolError. Anything else that escapes is a
finding: another exception, memory above what was announced, a core that stops making progress. Here are the
targets of the protocol's core; `settings`, `images` and `sessions` have one each.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from adp_client.protocol import Connection, ErrorCode, Feature, Role, buffer
from adp_client.protocol.codec import OPCODES, REPLY_TYPES, decode_body, encode_body
from adp_client.protocol.constants import HEADER_BYTES, Flag
from adp_client.protocol.errors import LocalProtocolError, RemoteProtocolError
from adp_client.protocol.events import HelloReceived, PayloadExpected, RequestReceived
from adp_client.protocol.frames import check_body, decode_header
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

from .images import store_image
from .sealing import sealed, split
from .sessions import session
from .settings import config

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
#: So small that an input fills it: what happens then is worth a look.
SCRATCH_BYTES = 512
#: What a core may hold beside the payload memory that its owner gives: a scratch buffer, and what it grew by.
MEMORY_LIMIT_BYTES = 65536 + SCRATCH_BYTES + 4096 + HEADER_BYTES


@contextmanager
def _small_scratch() -> Iterator[None]:
    usual, buffer.SCRATCH_BYTES = buffer.SCRATCH_BYTES, SCRATCH_BYTES
    try:
        yield
    finally:
        buffer.SCRATCH_BYTES = usual


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


@contextmanager
def _violations_end_it(error: type[LocalProtocolError | RemoteProtocolError]) -> Iterator[None]:
    """The promise: nothing but `error` may end the block, with a code that ends a connection."""
    try:
        yield
    except error as exc:
        if not exc.code.ends_connection:
            raise AssertionError(f"{exc.code.name} cannot end a connection") from exc


@_small_scratch()
def gateway_stream(data: bytes) -> None:
    """A gateway after the handshake, any bytes from its client."""
    chunk, raw = split(data)
    gateway = Connection(Role.GATEWAY)
    client = Connection(Role.CLIENT)
    list(_feed(gateway, client.hello(HELLO), 4096))
    gateway.accept(Welcome(boot_id=BOOT, features=HELLO.features, limits=LIMITS))
    with _violations_end_it(RemoteProtocolError):
        for event in _feed(gateway, raw, chunk):
            if isinstance(event, RequestReceived) and event.is_final:
                _answer(gateway, event)


@_small_scratch()
def client_stream(data: bytes) -> None:
    """A client with requests in flight, any bytes from its gateway."""
    chunk, raw = split(data)
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


@_small_scratch()
def handshake(data: bytes) -> None:
    """Both sides before the handshake, any bytes; what is accepted can be answered."""
    chunk, raw = split(data)
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
    target.__name__: target
    for target in (gateway_stream, client_stream, handshake, frames, config, store_image, session)
}
