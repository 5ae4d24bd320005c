"""What a bad peer does to its own connection, and to nobody else's."""

import random
import socket
import zlib

import anyio
import pytest

from adp_client.protocol.connection import Connection
from adp_client.protocol.constants import ErrorCode, Opcode, Role
from adp_client.protocol.frames import FrameHeader, encode_header
from adp_client.protocol.messages import (
    Check,
    ErrorMessage,
    Exist,
    Extension,
    Hello,
    Ping,
    Read,
    RegionOpen,
    Write,
    WriteItem,
)
from adp_client.transport import SocketTransport
from adp_gateway.errors import StorageError
from adp_gateway.session import Session
from adp_gateway.shared import Patience
from adp_gateway.tenants import Door

from .house import House, house
from .peer import NAMESPACE, Peer, content, key_of
from .waiting import jump, on_a_jumping_clock, on_a_still_clock

pytestmark = pytest.mark.anyio


def frame(**fields: object) -> bytes:
    body: bytes = fields.pop("body", b"")  # type: ignore[assignment]
    header = {"opcode": Opcode.PING, "request_id": 1, "body_bytes": len(body), "body_crc": zlib.crc32(body)}
    return encode_header(FrameHeader(**{**header, **fields})) + body  # type: ignore[arg-type]


def damaged(at: int, value: int, *, with_crc: bool) -> bytes:
    raw = bytearray(frame(body=bytes(8)))
    raw[at] = value
    if with_crc:
        raw[28:32] = zlib.crc32(raw[:28]).to_bytes(4, "little")
    return bytes(raw)


BAD_FRAMES = {
    "http": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", ErrorCode.BAD_MAGIC),
    "magic": (damaged(0, 0x41 ^ 1, with_crc=True), ErrorCode.BAD_MAGIC),
    "version": (damaged(4, 9, with_crc=True), ErrorCode.UNSUPPORTED_VERSION),
    "header checksum": (damaged(9, 1, with_crc=False), ErrorCode.BAD_CHECKSUM),
    "opcode": (damaged(5, 200, with_crc=True), ErrorCode.UNKNOWN_OPCODE),
    "flags": (damaged(7, 0x80, with_crc=True), ErrorCode.MALFORMED),
    "body length": (frame(body_bytes=0xFFFFFFFF), ErrorCode.LIMIT_EXCEEDED),
    "payload length": (frame(payload_bytes=0xFFFFFFFF), ErrorCode.LIMIT_EXCEEDED),
    "no body": (frame(body=b""), ErrorCode.MALFORMED),
    "body checksum": (frame(body=bytes(8), body_crc=1), ErrorCode.BAD_CHECKSUM),
    "body too short": (frame(body=bytes(7)), ErrorCode.MALFORMED),
    "body too long": (frame(body=bytes(9)), ErrorCode.MALFORMED),
    "payload where none belongs": (frame(body=bytes(8), payload_bytes=8), ErrorCode.MALFORMED),
    "a request id again": (frame(body=bytes(8)), ErrorCode.UNEXPECTED_MESSAGE),
    "a count that is not there": (
        frame(opcode=Opcode.EXIST, body=bytes(32) + b"\xff\xff\xff\x7f\x10\0" + bytes(10)),
        ErrorCode.MALFORMED,
    ),
    "HELLO again": (
        Connection(Role.CLIENT).hello(Hello()),
        ErrorCode.UNEXPECTED_MESSAGE,
    ),
}


async def assert_ended(peer: Peer, code: ErrorCode) -> None:
    notices = await peer.closed()
    assert [type(notice) for notice in notices] == [ErrorMessage]
    assert notices[0].code is code  # type: ignore[attr-defined]


async def assert_healthy(peer: Peer) -> None:
    assert await peer.read(key_of(1)) == [b"healthy"]


async def healthy(home: House) -> Peer:
    peer = await home.connect()
    await peer.write({key_of(1): b"healthy"})
    return peer


@pytest.mark.parametrize("name", BAD_FRAMES)
async def test_a_bad_frame_ends_its_own_connection(name: str) -> None:
    raw, code = BAD_FRAMES[name]
    async with house() as home:
        good = await healthy(home)
        bad = await home.connect()
        await bad.call(Ping())  # has the id 1
        await bad.transport.send([raw])
        await assert_ended(bad, code)
        await home.ended[1].wait()
        assert home.shared.counters.violations == {code.name: 1}
        await assert_healthy(good)


async def test_a_bad_frame_instead_of_hello() -> None:
    async with house() as home:
        good = await healthy(home)
        for raw, code in (
            (BAD_FRAMES["http"][0], ErrorCode.BAD_MAGIC),
            (frame(body=bytes(8)), ErrorCode.UNEXPECTED_MESSAGE),
            (frame(opcode=Opcode.HELLO, request_id=0, body_bytes=65537), ErrorCode.LIMIT_EXCEEDED),
        ):
            peer = Peer(home.dial())
            await peer.transport.send([raw])
            peer.connection.hello(Hello())
            await assert_ended(peer, code)
        await assert_healthy(good)


async def test_random_bytes() -> None:
    """With and without a handshake and the magic. Nothing but a closed connection comes of it."""
    async with house(patience=Patience(farewell_seconds=0.2)) as home:
        good = await healthy(home)
        for seed in range(60):
            noise = random.Random(seed).randbytes(1 + seed * 7 % 300)
            peer = Peer(home.dial())
            if seed % 2:
                await peer.open()
            else:
                peer.connection.hello(Hello())
            if seed % 3 == 0:
                noise = b"ADP/\x01" + noise
            await peer.transport.send([noise + bytes(64)])
            await peer.closed()
            await assert_healthy(good)
        assert sum(home.shared.counters.violations.values()) == 60


async def test_what_needs_a_feature_that_was_not_agreed_on() -> None:
    async with house() as home:
        for message in (
            Exist(namespace=NAMESPACE, keys=(b"k",), lease_ms=100),
            RegionOpen(region=1, region_bytes=4096),
        ):
            peer = await home.connect()
            peer.connection.features |= 3  # this side pretends
            await peer.ask(message)
            await assert_ended(peer, ErrorCode.UNEXPECTED_MESSAGE)


async def test_more_than_the_window() -> None:
    async with house() as home:
        peer = await home.connect()
        peer.connection._window.resize(9, 1 << 62)
        keys = tuple(map(key_of, range(16384)))
        await peer.ask(Read(namespace=NAMESPACE, keys=keys, capacities=(64 << 20,) * len(keys)))
        await assert_ended(peer, ErrorCode.LIMIT_EXCEEDED)


@pytest.mark.parametrize("shown", [b"", b"wrong", b"secret and more", b"secre"])
async def test_a_wrong_token(shown: bytes) -> None:
    async with house(door=Door(token=b"secret")) as home:
        peer = Peer(home.dial(), Hello(token=shown))
        await peer.transport.send([peer.connection.hello(peer.hello)])
        await assert_ended(peer, ErrorCode.UNAUTHENTICATED)
        peer = await home.connect(Hello(token=b"secret"))
        assert await peer.exist(key_of(1)) == [ErrorCode.NOT_FOUND]


@pytest.mark.parametrize(
    ("hello", "code"),
    [
        (Hello(min_version=2, max_version=3), ErrorCode.UNSUPPORTED_VERSION),
        (Hello(extensions=(Extension(tag=0x8001, data=b""),)), ErrorCode.UNSUPPORTED_VERSION),
        (Hello(max_body_bytes=63), ErrorCode.LIMIT_EXCEEDED),
    ],
)
async def test_a_hello_that_cannot_be_served(hello: Hello, code: ErrorCode) -> None:
    async with house() as home:
        peer = Peer(home.dial(), hello)
        await peer.transport.send([peer.connection.hello(hello)])
        await assert_ended(peer, code)


async def test_an_extension_that_may_be_ignored() -> None:
    async with house() as home:
        peer = await home.connect(Hello(extensions=(Extension(tag=7, data=b"later"),)))
        assert await peer.exist(b"k") == [ErrorCode.NOT_FOUND]


# ---------------------------------------------------------------- time


@on_a_jumping_clock
@pytest.mark.parametrize("begun", [b"", Connection(Role.CLIENT).hello(Hello())[:40]])
async def test_a_peer_that_never_says_hello(begun: bytes) -> None:
    async with house(patience=Patience(hello_seconds=5)) as home:
        peer = Peer(home.dial())
        start = anyio.current_time()
        await peer.transport.send([begun])
        peer.connection.hello(Hello())
        await assert_ended(peer, ErrorCode.TIMED_OUT)
        assert 5 <= anyio.current_time() - start < 7


@on_a_still_clock
async def test_an_idle_connection_may_stay() -> None:
    async with house() as home:
        peer = await home.connect()
        jump(100_000)
        assert await peer.exist(b"k") == [ErrorCode.NOT_FOUND]


@on_a_still_clock
async def test_a_frame_that_dribbles() -> None:
    """A byte a second is alive, but one frame has only so much time."""
    async with house(patience=Patience(frame_seconds=20)) as home:
        peer = await home.connect()
        raw = frame(opcode=Opcode.EXIST, body=bytes(1000))
        for at in range(20):
            await peer.transport.send([raw[at : at + 1]])
            await anyio.wait_all_tasks_blocked()
            jump(1)
        assert not home.ended[0].is_set()
        jump(1)
        await assert_ended(peer, ErrorCode.TIMED_OUT)


@on_a_jumping_clock
async def test_a_write_whose_next_frame_never_comes() -> None:
    async with house(patience=Patience(frame_seconds=20)) as home:
        peer = await home.connect()
        start = anyio.current_time()
        items = (WriteItem(object_bytes=20, length=10, checksum=0),)
        message = Write(namespace=NAMESPACE, keys=(b"k",), items=items)
        _, raw = peer.connection.request(message, is_final=False)
        await peer.transport.send([raw, content(10)])
        await assert_ended(peer, ErrorCode.TIMED_OUT)
        assert 20 <= anyio.current_time() - start < 23


class Deaf(SocketTransport):
    """Its peer takes nothing."""

    async def send(self, parts: object) -> None:
        raise BrokenPipeError("deaf")


async def test_peers_that_take_no_answer_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with house() as home:
        for port in range(20):
            ours, theirs = socket.socketpair()
            with ours:
                ours.send(Connection(Role.CLIENT).hello(Hello()))
                await Session(Deaf(theirs), home.shared, peer=f"tcp://10.0.0.1:{port}").run()
    assert caplog.messages == ["tcp://10.0.0.1:0: sending failed: deaf"]


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (StorageError("the device is gone"), "peer 0: storage failed: StorageError: the device is gone"),
        (KeyError("bug"), "peer 0: a request failed: KeyError"),
    ],
)
async def test_requests_that_fail_do_not_fill_the_log(
    failure: Exception, line: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail(*_: object) -> bytes:
        raise failure

    async with house() as home:
        peer = await home.connect()
        monkeypatch.setattr(home.store, "check_many", fail)
        for _ in range(20):
            answer = await peer.call(Check(namespace=NAMESPACE, keys=(key_of(1),)))
            assert answer.status is ErrorCode.GATEWAY_FAULT
        assert home.shared.counters.faults == 20
    assert caplog.messages == [line]
    assert (caplog.records[0].exc_info is not None) == isinstance(failure, KeyError)
