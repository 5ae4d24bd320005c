"""The network and the gateway at their worst: cut anywhere, damaged, answered wrongly."""

import zlib
from typing import Any

import anyio
import pytest

from adp_client import Client, ClientConfig
from adp_client.errors import LinkError, LinkLost, LocalProtocolError
from adp_client.protocol.codec import encode_body
from adp_client.protocol.connection import Connection
from adp_client.protocol.constants import ErrorCode, Flag, Opcode, Role
from adp_client.protocol.events import NoticeReceived
from adp_client.protocol.frames import FrameHeader, encode_header
from adp_client.protocol.messages import (
    ErrorMessage,
    Exist,
    ExistReply,
    Limits,
    Read,
    ReadItem,
    ReadReply,
)
from adp_client.protocol.state import State
from adp_client.testing import Faults, FaultyTransport, MemoryGateway, MemoryTransport, memory_pair
from client.support import ENDPOINT, NAMESPACE, QUICK, connected, leftovers, pattern

pytestmark = pytest.mark.anyio

#: A connection for each byte of a transcript, in asyncio's debug mode: seconds, and more on a busy machine.
every_byte = pytest.mark.timeout(180)


async def conversation(client: Client) -> list[Any]:
    """A few verbs whose right answers are known, whatever the network did before."""
    buffers = [bytearray(80), bytearray(80)]
    written = await client.write(NAMESPACE, [b"a", b"b"], [pattern(1, 60), pattern(2, 80)])
    read = await client.read(NAMESPACE, [b"a", b"b"], buffers)
    found = await client.exist(NAMESPACE, [b"a", b"c"])
    return [
        written.statuses,
        read.statuses,
        read.lengths,
        bytes(buffers[0][:60]) == pattern(1, 60),
        bytes(buffers[1]) == pattern(2, 80),
        found.statuses,
    ]


RIGHT = [bytes(2), bytes(2), (60, 80), True, True, b"\0\1"]


async def through(
    faults: list[Faults], *, chunk_bytes: int = 1 << 20
) -> tuple[list[Any], tuple[int, int], int]:
    """The conversation over connections of which the n-th has the n-th faults.

    Returns its result, the bytes that the first connection received and sent, and how many there were.
    """
    gateway = MemoryGateway(chunk_bytes=chunk_bytes)
    made: list[FaultyTransport] = []

    def wrap(inner):
        made.append(FaultyTransport(inner, faults.pop(0) if faults else Faults()))
        return made[-1]

    gateway.wrap = wrap
    async with connected(gateway) as (client, _):
        result = await conversation(client)
        while leftovers(client):
            await client.ping()  # a damaged object is being reported
        return result, (made[0].received_bytes, made[0].sent_bytes), len(gateway.sessions)


async def test_the_conversation_itself_and_byte_by_byte():
    assert (await through([]))[0] == RIGHT
    assert (await through([Faults(dribble=True)]))[0] == RIGHT
    assert (await through([], chunk_bytes=1))[0] == RIGHT


@every_byte
async def test_cut_after_every_received_byte():
    """Wherever the stream ends, the verbs are replayed on a new connection and nothing wrong comes back."""
    _, (received_bytes, _), _ = await through([])
    for cut in range(received_bytes):
        result, _, sessions = await through([Faults(cut_received_at=cut)])
        assert (cut, result) == (cut, RIGHT)
        assert sessions == 2


@every_byte
async def test_cut_after_every_sent_byte():
    _, (_, sent_bytes), _ = await through([])
    for cut in range(sent_bytes):
        result, _, sessions = await through([Faults(cut_sent_at=cut)])
        assert (cut, result) == (cut, RIGHT)
        assert sessions == 2


@every_byte
async def test_a_flipped_bit_is_noticed_everywhere():
    """In a header or body it costs the connection, in a payload it costs the object; never a wrong byte."""
    _, (received_bytes, _), _ = await through([])
    for flip in range(received_bytes):
        result, _, sessions = await through([Faults(flip_received_at=flip)])
        if sessions == 1:
            assert ErrorCode.CORRUPT in result[1]
        else:
            assert result == RIGHT


async def test_b33_a_reset_wakes_everybody():
    """20 open reads, 3 waiting for room, 2 deletes: all end at once, each in its own way."""
    outcomes: list[str] = []

    async def note(call) -> None:
        try:
            outcomes.append(str((await call).statuses))
        except LinkLost as exc:
            outcomes.append("applied?" if exc.maybe_applied else "not applied")

    never = anyio.Event()

    async def script(session, request) -> bool:
        if session is gateway.sessions[0]:
            await never.wait()
        return False

    async with connected(MemoryGateway(limits=Limits(max_requests=22))) as (client, gateway):
        gateway.script = script
        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(note, client.read(NAMESPACE, [b"k"], [bytearray(1)]))
            await anyio.wait_all_tasks_blocked()
            for _ in range(2):
                tasks.start_soon(note, client.delete(NAMESPACE, [b"k"]))
            await anyio.wait_all_tasks_blocked()
            for _ in range(3):
                tasks.start_soon(note, client.write(NAMESPACE, [b"w"], [b"v"]))
            await anyio.wait_all_tasks_blocked()
            gateway.cut()
        assert sorted(outcomes) == ["applied?"] * 2 + [str(b"\0")] * 3 + [str(b"\1")] * 20
        assert leftovers(client) == []
        assert client.stats().replays == 20, "what was not sent is not a replay"


def raw_reply(session, request, **header: Any) -> bytes:
    """A well-formed EXIST reply with some header fields changed."""
    body = encode_body(ExistReply(statuses=b"\1" * len(request.message.keys)))
    fields = {
        "opcode": Opcode.EXIST,
        "flags": Flag.REPLY,
        "request_id": request.request_id,
        "body_bytes": len(body),
        "body_crc": zlib.crc32(body),
        **header,
    }
    return encode_header(FrameHeader(**fields)) + body


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(lambda s, r: raw_reply(s, r, request_id=r.request_id + 1), id="id never used"),
        pytest.param(lambda s, r: raw_reply(s, r) * 2, id="b32 twice"),
        pytest.param(lambda s, r: raw_reply(s, r, opcode=Opcode.DELETE), id="other opcode"),
        pytest.param(lambda s, r: raw_reply(s, r, body_bytes=0xFFFFFFFF), id="b36 huge body"),
        pytest.param(lambda s, r: raw_reply(s, r, payload_bytes=0xFFFFFFFF), id="b36 huge payload"),
        pytest.param(lambda s, r: raw_reply(s, r, body_bytes=0), id="b36 empty body"),
        pytest.param(lambda s, r: raw_reply(s, r, body_crc=1), id="body checksum"),
        pytest.param(lambda s, r: b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(40), id="something else"),
        pytest.param(lambda s, r: raw_reply(s, r)[:40], id="short, then the end"),
        pytest.param(lambda s, r: b"", id="nothing, then the end"),
    ],
)
async def test_a_wrong_answer_costs_the_connection_once_and_nobody_gets_another_ones(answer):
    async def script(session, request) -> bool:
        if session is not gateway.sessions[0] or not isinstance(request.message, Exist):
            return False
        await session.transport.send([answer(session, request)])
        await anyio.wait_all_tasks_blocked()
        session.transport.abort()
        return True

    async with connected() as (client, gateway):
        gateway.put(NAMESPACE, b"here", b"")
        gateway.script = script
        results = [await client.exist(NAMESPACE, [key, b"here"]) for key in (b"gone", b"here", b"gone")]
        assert [r.statuses for r in results][1:] == [b"\0\0", b"\1\0"]
        assert len(gateway.sessions) == 2
        assert leftovers(client) == []


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (lambda s, r: raw_reply(s, r, request_id=r.request_id + 1), ErrorCode.UNEXPECTED_MESSAGE),
        (lambda s, r: raw_reply(s, r, body_bytes=0xFFFFFFFF), ErrorCode.LIMIT_EXCEEDED),
        (lambda s, r: raw_reply(s, r, body_crc=1), ErrorCode.BAD_CHECKSUM),
        (lambda s, r: raw_reply(s, r, body_bytes=0, body_crc=0), ErrorCode.MALFORMED),
        (lambda s, r: b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(40), ErrorCode.BAD_MAGIC),
    ],
)
async def test_a_gateway_that_breaks_the_protocol_is_told_so(answer, code):
    """Spec section 7.3: who sees a violation says which one, and closes."""

    async def script(session, request) -> bool:
        if session is not gateway.sessions[0]:
            return False
        await session.transport.send([answer(session, request)])
        return True

    async with connected() as (client, gateway):
        gateway.script = script
        assert (await client.exist(NAMESPACE, [b"k"])).statuses == b"\1"
        first, _ = gateway.sessions
        await anyio.wait_all_tasks_blocked()
        (notice,) = first.notices
        assert isinstance(notice, ErrorMessage)
        assert notice.code is code
        assert notice.text
        assert gateway.violations == []


async def test_a_gateway_that_breaks_the_protocol_in_the_handshake_is_told_so():
    ends: list[MemoryTransport] = []

    async def dial(endpoint) -> MemoryTransport:
        ours, theirs = memory_pair()
        ends.append(theirs)
        await theirs.send([b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(40)])
        return ours

    async with Client(ClientConfig(endpoint=ENDPOINT, backoff=QUICK), dial=dial) as client:
        while not client.stats().connects_failed:
            await anyio.lowlevel.checkpoint()
        heard = Connection(Role.GATEWAY)
        while not isinstance(event := heard.next_event(), NoticeReceived):
            if event is None:
                heard.bytes_received(await ends[0].receive_some(heard.receive_buffers()))
        assert isinstance(event.notice, ErrorMessage)
        assert event.notice.code is ErrorCode.BAD_MAGIC


async def test_a_connection_that_ends_between_two_frames_of_a_request_loses_it_and_blames_nobody():
    """The writer comes back from the first frame and finds that the reader has heard ERROR meanwhile."""
    gateway = MemoryGateway(limits=Limits(max_payload_bytes=1000))

    class Slow(FaultyTransport):
        async def send(self, parts) -> None:
            await super().send(parts)
            (first, *others) = gateway.sessions
            if len(parts) > 1 and not others:
                with anyio.CancelScope(shield=True):
                    await first.transport.send([first.connection.error(ErrorCode.TIMED_OUT, "enough")])
                    while not first.client_has_heard():
                        await anyio.lowlevel.checkpoint()

    gateway.wrap = lambda inner: Slow(inner, Faults())
    async with connected(gateway) as (client, _):
        epoch = client._link.epoch
        gateway.sessions[0].client_has_heard = lambda: epoch._connection.state is State.CLOSED
        assert (await client.write(NAMESPACE, [b"k"], [bytes(2500)])).is_all_ok
        assert epoch.ending.reason.endswith("TIMED_OUT: enough")
        assert client.stats().replays == 1


async def test_b36_a_gateway_that_always_answers_rubbish_is_dialled_with_backoff_not_in_a_loop():
    async def script(session, request) -> bool:
        await session.transport.send([bytes(64)])
        return True

    async with connected() as (client, gateway):
        gateway.script = script
        with pytest.raises(LinkLost, match="broke the protocol"):
            await client.exist(NAMESPACE, [b"k"])
        assert client.stats().requests == 2


async def test_read_replies_out_of_order_and_in_parts():
    async def script(session, request) -> bool:
        if not isinstance(request.message, Read):
            return False
        stored = [gateway.objects[NAMESPACE, key] for key in request.message.keys]
        pieces = [(2, 0, 50), (0, 0, 100), (2, 50, 50), (1, 0, 100)]
        for index, offset, length in pieces:
            row = ReadItem(
                index=index, object_bytes=100, offset=offset, length=length, checksum=stored[index].checksum
            )
            await session.send_reply(
                request.request_id,
                ReadReply(items=(row,)),
                [stored[index].data[offset : offset + length]],
                is_final=(index, offset) == (1, 0),
            )
        return True

    async with connected() as (client, gateway):
        for at in range(3):
            gateway.put(NAMESPACE, bytes([at]), pattern(at, 100))
        gateway.script = script
        buffers = [bytearray(100) for _ in range(3)]
        read = await client.read(NAMESPACE, [bytes([at]) for at in range(3)], buffers)
        assert read.is_all_ok
        assert [bytes(b) for b in buffers] == [pattern(at, 100) for at in range(3)]


async def test_objects_that_landed_before_the_cut_are_not_asked_for_again():
    asked: list[tuple[bytes, ...]] = []

    async def script(session, request) -> bool:
        if isinstance(request.message, Read):
            asked.append(request.message.keys)
        return False

    faults = [Faults()]
    gateway = MemoryGateway(frame_bytes=1000)
    gateway.wrap = lambda inner: FaultyTransport(inner, faults.pop() if faults else Faults())
    first = faults[0]
    async with connected(gateway) as (client, _):
        keys = [bytes([at]) for at in range(10)]
        for at in range(10):
            gateway.put(NAMESPACE, keys[at], pattern(at, 500))
        gateway.script = script
        first.cut_received_at = 3500
        buffers = [bytearray(500) for _ in keys]
        assert (await client.read(NAMESPACE, keys, buffers)).is_all_ok
        assert [bytes(b) for b in buffers] == [pattern(at, 500) for at in range(10)]
        assert asked[0] == tuple(keys)
        assert 0 < len(asked[1]) < 6
        assert asked[1] == tuple(keys[-len(asked[1]) :])


async def test_b30_fifty_writers_and_a_slow_reader_never_interleave():
    """Frames stay whole; ten writers are cancelled; lookups are not behind all the values."""
    gateway = MemoryGateway(capacity_bytes=4096, chunk_bytes=3000)
    done: list[int] = []

    async def put(client: Client, number: int) -> None:
        with anyio.CancelScope() as scope:
            if number % 5 == 0:
                scope.cancel()
            result = await client.write(NAMESPACE, [b"%02d" % number], [pattern(number, 20_000)])
            assert result.is_all_ok
            done.append(number)

    async with connected(gateway) as (client, _):
        async with anyio.create_task_group() as tasks:
            for number in range(50):
                tasks.start_soon(put, client, number)
            await client.ping()
            assert len(done) < 40
        assert len(done) == 40
        assert all(gateway.objects[NAMESPACE, b"%02d" % n].data == pattern(n, 20_000) for n in done)
        assert gateway.violations == []


async def test_b34_every_verb_fails_with_one_plain_error():
    async def script(session, request) -> bool:
        session.transport.abort()
        return True

    async with connected() as (client, gateway):
        gateway.script = script
        for verb, *arguments in (
            (client.exist, NAMESPACE, [b"k"]),
            (client.read, NAMESPACE, [b"k"], [bytearray(1)]),
            (client.write, NAMESPACE, [b"k"], [b"v"]),
            (client.delete, NAMESPACE, [b"k"]),
            (client.check, NAMESPACE, [b"k"]),
            (client.fence,),
            (client.ping,),
        ):
            with pytest.raises(LinkError) as caught:
                await verb(*arguments)
            assert not isinstance(caught.value, BaseExceptionGroup)


async def test_the_gateways_reason_for_closing_reaches_the_caller():
    async def script(session, request) -> bool:
        await session.transport.send([session.connection.error(ErrorCode.TIMED_OUT, "too slow for me")])
        session.transport.abort()
        return True

    async with connected() as (client, gateway):
        gateway.script = script
        with pytest.raises(LinkLost, match="TIMED_OUT: too slow for me"):
            await client.delete(NAMESPACE, [b"k"])


async def test_a_request_that_the_core_refuses_is_an_error_not_a_wait_without_end():
    """The window is smaller than what was cut for it: with nothing in flight no room will ever come."""
    async with connected() as (client, _):
        client._link.epoch._connection._window.resize(16, 100)
        with pytest.raises(LocalProtocolError, match="101 bytes in flight"):
            await client.read(NAMESPACE, [b"k"], [bytearray(101)])
        assert (await client.read(NAMESPACE, [b"k"], [bytearray(100)])).statuses == b"\1"
