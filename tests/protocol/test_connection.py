"""Two cores talk; then each is lied to."""

import zlib
from collections.abc import Callable

import attrs
import pytest

from adp_client.protocol import Connection, ErrorCode, Feature, Opcode, Role
from adp_client.protocol.codec import OPCODES, encode_body
from adp_client.protocol.constants import Flag
from adp_client.protocol.errors import LocalProtocolError, RemoteProtocolError
from adp_client.protocol.events import (
    HelloReceived,
    NoticeReceived,
    Opened,
    PayloadExpected,
    PeerClosed,
    ReplyReceived,
    RequestExpired,
    RequestReceived,
)
from adp_client.protocol.frames import FrameHeader, encode_header
from adp_client.protocol.messages import (
    Check,
    Credit,
    Delete,
    ErrorMessage,
    Exist,
    ExistReply,
    Fence,
    Goodbye,
    GoodbyeReply,
    Hello,
    Limits,
    Message,
    Ping,
    Pong,
    Read,
    ReadItem,
    ReadRegion,
    ReadRegionReply,
    ReadReply,
    RegionOpen,
    RegionSource,
    RegionTarget,
    Release,
    Request,
    StatusReply,
    Welcome,
    Write,
    WriteItem,
    WriteRegion,
    payload_lengths,
)
from adp_client.protocol.state import State
from protocol.wire import BOOT, NAMESPACE, drain, pair, receive

KEYS = (b"key-1", b"key-2")


def frame(
    message: Message,
    opcode: Opcode,
    request_id: int = 1,
    flags: Flag = Flag.NONE,
) -> bytes:
    """A frame made by hand, as a peer might send it that does not ask the core."""
    body = encode_body(message)
    return (
        encode_header(
            FrameHeader(
                opcode=opcode,
                flags=flags,
                request_id=request_id,
                body_bytes=len(body),
                payload_bytes=sum(payload_lengths(message)),
                body_crc=zlib.crc32(body),
            )
        )
        + body
    )


def read_item(index: int = 0, **fields: int) -> ReadItem:
    return ReadItem(index=index, **{"object_bytes": 5, "length": 5, "checksum": 1, **fields})


def write_item(**fields: int) -> WriteItem:
    return WriteItem(**{"object_bytes": 5, "length": 5, "checksum": 1, **fields})


def test_handshake() -> None:
    client, gateway = Connection(Role.CLIENT), Connection(Role.GATEWAY)
    offered = Feature.LEASES | Feature.FRAGMENTS
    hello = Hello(features=offered, token=b"s3cret", agent="a/1")
    assert list(receive(gateway, client.hello(hello))) == [HelloReceived(hello=hello)]
    raw = gateway.accept(Welcome(boot_id=BOOT, features=Feature.FRAGMENTS | Feature.REGIONS))
    (event,) = receive(client, raw)
    assert event == Opened(welcome=Welcome(boot_id=BOOT, features=Feature.FRAGMENTS))
    assert client.state is gateway.state is State.OPEN
    assert client.features is gateway.features is Feature.FRAGMENTS
    assert "s3cret" not in repr(hello)


def test_gateway_refuses_the_handshake() -> None:
    client, gateway = Connection(Role.CLIENT), Connection(Role.GATEWAY)
    list(receive(gateway, client.hello(Hello())))
    raw = gateway.error(ErrorCode.UNAUTHENTICATED, "ü" * 600)
    (event,) = receive(client, raw)
    assert event == NoticeReceived(notice=ErrorMessage(code=ErrorCode.UNAUTHENTICATED, text="ü" * 512))
    assert client.state is gateway.state is State.CLOSED


@pytest.mark.parametrize(
    "welcome", [Welcome(boot_id=BOOT, version=2), Welcome(boot_id=BOOT, features=Feature.CREDITS)]
)
def test_client_refuses_what_it_did_not_offer(welcome: Welcome) -> None:
    client = Connection(Role.CLIENT)
    client.hello(Hello())
    with pytest.raises(RemoteProtocolError):
        list(receive(client, frame(welcome, Opcode.HELLO, 0, Flag.REPLY)))


@pytest.mark.parametrize("chunk", [1, 7, 32, 33, 1000])
def test_a_conversation_in_any_chunks(chunk: int) -> None:
    client, gateway = pair()
    number, raw = client.request(Exist(namespace=NAMESPACE, keys=KEYS))
    (asked,) = receive(gateway, raw, chunk)
    assert asked == RequestReceived(
        request_id=number, message=Exist(namespace=NAMESPACE, keys=KEYS), is_final=True
    )
    raw = gateway.reply(number, ExistReply(statuses=b"\1", first=1), is_final=False)
    raw += gateway.reply(number, ExistReply(statuses=b"\0"))
    events = list(receive(client, raw, chunk))
    assert [event.is_final for event in events] == [False, True]  # type: ignore[union-attr]
    assert client.in_flight == gateway.in_flight == 0


@pytest.mark.parametrize("chunk", [1, 3, 64, 10_000])
def test_payload_lands_in_the_memory_that_was_given(chunk: int) -> None:
    client, gateway = pair()
    number, raw = client.request(Read(namespace=NAMESPACE, keys=KEYS, capacities=(1000, 9)))
    list(receive(gateway, raw))
    reply = ReadReply(items=(read_item(1), read_item(0, object_bytes=700, length=300)))
    raw = gateway.reply(number, reply, is_final=False) + b"WORLD" + b"a" * 300
    rest = ReadReply(items=(read_item(0, object_bytes=700, offset=300, length=400),))
    raw += gateway.reply(number, rest) + b"b" * 400
    raw += gateway.notice(Goodbye(code=ErrorCode.SHUTTING_DOWN))
    memory = bytearray(1000)
    small = bytearray(5)
    at = 0
    events = []
    while at < len(raw) or client.is_waiting_for_memory:
        views = client.receive_buffers()
        if not views:
            expected = events[-1]
            assert isinstance(expected, PayloadExpected)
            assert client.next_event() is None
            if len(expected.lengths) == 2:
                client.accept_payload([memoryview(small), memoryview(memory)[:300]])
            else:
                client.accept_payload([memoryview(memory)[300:700]])
            assert client.is_receiving_payload or chunk > 300
        else:
            count = min(chunk, len(views[0]), len(raw) - at)
            views[0][:count] = raw[at : at + count]
            at += count
            client.bytes_received(count)
        while (event := client.next_event()) is not None:
            events.append(event)
    kinds = [type(event) for event in events]
    assert kinds == [PayloadExpected, ReplyReceived, PayloadExpected, ReplyReceived, NoticeReceived]
    assert small == b"WORLD"
    assert memory[:700] == b"a" * 300 + b"b" * 400
    assert client.state is State.DRAINING


def test_unwanted_payload_is_thrown_away() -> None:
    client, gateway = pair()
    number, raw = client.request(Read(namespace=NAMESPACE, keys=KEYS[:1], capacities=(5,)))
    list(receive(gateway, raw))
    raw = gateway.reply(number, ReadReply(items=(read_item(),)))
    views = client.receive_buffers()
    views[0][: len(raw)] = raw
    client.bytes_received(len(raw))
    assert isinstance(client.next_event(), PayloadExpected)
    for wrong in ([], [memoryview(bytearray(4))], [None, None]):
        with pytest.raises(LocalProtocolError):
            client.accept_payload(wrong)
    client.accept_payload([None])
    with pytest.raises(LocalProtocolError):
        client.accept_payload([None])
    (done,) = receive(client, b"12345")
    assert isinstance(done, ReplyReceived)


def test_write_spans_frames() -> None:
    client, gateway = pair()
    first = Write(namespace=NAMESPACE, keys=KEYS, items=(write_item(), write_item(object_bytes=9, length=4)))
    number, raw = client.request(first, is_final=False)
    assert len(list(receive(gateway, raw + b"1" * 9))) == 2
    last = Write(namespace=NAMESPACE, keys=KEYS[1:], items=(write_item(object_bytes=9, offset=4, length=5),))
    again, raw = client.request(last, request_id=number)
    assert again == number
    *_, done = receive(gateway, raw + b"2" * 5)
    assert done == RequestReceived(request_id=number, message=last, is_final=True)
    (answer,) = receive(client, gateway.reply(number, StatusReply(statuses=b"\0\3")))
    assert isinstance(answer, ReplyReceived)


def test_goodbye_waits_for_answers() -> None:
    client, gateway = pair()
    ping, raw = client.request(Ping(nonce=4))
    bye, more = client.request(Goodbye())
    with pytest.raises(LocalProtocolError):
        client.request(Ping())
    list(receive(gateway, raw + more))
    assert gateway.state is State.LEAVING
    with pytest.raises(LocalProtocolError, match="unanswered"):
        gateway.reply(bye, GoodbyeReply())
    raw = gateway.reply(ping, Pong(nonce=4)) + gateway.reply(bye, GoodbyeReply())
    assert len(list(receive(client, raw))) == 2
    assert client.state is gateway.state is State.CLOSED
    with pytest.raises(LocalProtocolError):
        gateway.reply(ping, Pong())
    assert list(receive(client, b"late")) == []
    client.bytes_received(0)
    assert client.next_event() == PeerClosed(is_clean=False)
    assert client.next_event() is None


def test_a_request_that_was_begun_is_finished_while_the_gateway_drains() -> None:
    client, gateway = pair()
    number, raw = client.request(spanning(HALF), is_final=False)
    list(receive(gateway, raw + b"12"))
    list(receive(client, gateway.notice(Goodbye(code=ErrorCode.SHUTTING_DOWN))))
    _, raw = client.request(spanning(REST), request_id=number)
    *_, done = receive(gateway, raw + b"345")
    assert isinstance(done, RequestReceived)
    assert done.is_final
    (answer,) = receive(client, gateway.reply(number, StatusReply(statuses=b"\0")))
    assert isinstance(answer, ReplyReceived)


def test_draining_gateway_takes_no_new_requests() -> None:
    client, gateway = pair()
    _, crossed = client.request(Ping())
    raw = gateway.notice(Goodbye(code=ErrorCode.SHUTTING_DOWN, text="bye"))
    list(receive(client, raw))
    with pytest.raises(LocalProtocolError):
        client.request(Ping())
    assert len(list(receive(gateway, crossed))) == 1
    _, raw = client.request(Goodbye())
    list(receive(gateway, raw))
    with pytest.raises(LocalProtocolError):
        client.notice(Goodbye())


@pytest.mark.parametrize("cut", ["nothing", "header", "body", "payload", "owed"])
def test_end_of_stream(cut: str) -> None:
    client, gateway = pair()
    if cut != "nothing":
        number, raw = client.request(Read(namespace=NAMESPACE, keys=KEYS[:1], capacities=(5,)))
        list(receive(gateway, raw))
        reply = gateway.reply(number, ReadReply(items=(read_item(),))) + b"123"
        keep = {"header": 10, "body": 40, "payload": len(reply), "owed": 0}[cut]
        list(receive(client, reply[:keep]))
    client.bytes_received(0)
    assert client.next_event() == PeerClosed(is_clean=cut == "nothing")
    assert client.next_event() is None
    assert client.state is State.CLOSED


def test_end_of_stream_before_memory_was_given() -> None:
    client, gateway = pair()
    number, raw = client.request(Read(namespace=NAMESPACE, keys=KEYS[:1], capacities=(5,)))
    list(receive(gateway, raw))
    raw = gateway.reply(number, ReadReply(items=(read_item(),)))
    client.receive_buffers()[0][: len(raw)] = raw
    client.bytes_received(len(raw))
    assert isinstance(client.next_event(), PayloadExpected)
    client.bytes_received(0)
    assert client.next_event() is None
    client.accept_payload([None])
    assert client.next_event() == PeerClosed(is_clean=False)


def test_deadlines_are_told_once() -> None:
    client, gateway = pair()
    assert client.next_deadline() is None
    first, _ = client.request(Exist(namespace=NAMESPACE, keys=KEYS), deadline=5.0)
    second, _ = client.request(Ping(), deadline=3.0)
    client.request(Ping())
    assert client.next_deadline() == 3.0
    client.handle_timeout(2.9)
    assert client.next_event() is None
    client.handle_timeout(3.0)
    assert client.next_event() == RequestExpired(request_id=second)
    assert client.next_deadline() == 5.0
    client.handle_timeout(9.0)
    assert list(drain(client)) == [RequestExpired(request_id=first)]
    assert client.next_deadline() is None
    assert gateway.next_deadline() is None


def test_credits_change_the_window() -> None:
    client, gateway = pair(features=Feature.CREDITS)
    list(receive(client, gateway.notice(Credit(requests=2, inflight_bytes=10))))
    client.request(Ping())
    assert client.fits(10)
    assert not client.fits(11)
    client.request(Ping())
    with pytest.raises(LocalProtocolError):
        client.request(Ping())
    list(receive(client, gateway.notice(Credit(requests=3, inflight_bytes=10))))
    client.request(Ping())


def test_requests_that_cross_a_credit_are_no_violation() -> None:
    client, gateway = pair(features=Feature.CREDITS)
    raw = b"".join(client.request(Ping())[1] for _ in range(3))
    credit = gateway.notice(Credit(requests=1, inflight_bytes=0))
    assert len(list(receive(gateway, raw))) == 3
    list(receive(client, credit))
    assert not client.fits(0)


def test_a_credit_beyond_the_window_is_a_violation() -> None:
    client, gateway = pair(features=Feature.CREDITS)
    for credit in (Credit(requests=0, inflight_bytes=0), Credit(requests=1, inflight_bytes=1 << 60)):
        with pytest.raises(LocalProtocolError, match="credit"):
            gateway.notice(credit)
    with pytest.raises(RemoteProtocolError, match="credit"):
        list(receive(client, frame(Credit(requests=0, inflight_bytes=0), Opcode.CREDIT, 0)))


def test_credits_only_if_agreed() -> None:
    client, gateway = pair()
    with pytest.raises(LocalProtocolError):
        gateway.notice(Credit(requests=1, inflight_bytes=1))
    with pytest.raises(RemoteProtocolError, match="CREDITS"):
        list(receive(client, frame(Credit(requests=1, inflight_bytes=1), Opcode.CREDIT, 0)))


SMALL = Limits(
    max_items=2,
    max_object_bytes=9,
    max_requests=2,
    max_inflight_bytes=20,
    max_key_bytes=8,
    max_payload_bytes=12,
)


def keyed(cls: Callable[..., Request], count: int = 1, width: int = 4, **more: object) -> Request:
    return cls(namespace=NAMESPACE, keys=(b"k" * width,) * count, **more)


@pytest.mark.parametrize(
    "message",
    [
        keyed(Exist, 3),
        keyed(Delete, 1, 9),
        keyed(Check, 3),
        keyed(Read, 1, capacities=(21,)),
        keyed(Write, 1, items=(write_item(object_bytes=10, length=10),)),
        keyed(Write, 2, items=(write_item(object_bytes=8, length=8),) * 2),
        keyed(WriteRegion, 1, sources=(RegionSource(region=1, offset=0, length=10, checksum=0),)),
        keyed(ReadRegion, 1, targets=(RegionTarget(region=1, offset=0, capacity=21),)),
        Release(lease_ids=(1, 2, 3)),
    ],
    ids=lambda message: type(message).__name__,
)
def test_limits_hold_on_both_sides(message: Request) -> None:
    every = Feature.LEASES | Feature.REGIONS
    client, gateway = pair(limits=SMALL, features=every)
    with pytest.raises(LocalProtocolError) as local:
        client.request(message)
    assert local.value.code is ErrorCode.LIMIT_EXCEEDED
    assert client.in_flight == 0
    assert client.fits(20)
    with pytest.raises(RemoteProtocolError) as remote:
        list(receive(gateway, frame(message, OPCODES[type(message)])))
    assert remote.value.code is ErrorCode.LIMIT_EXCEEDED


def test_body_limit_of_the_peer() -> None:
    client, _ = pair(limits=Limits(max_body_bytes=256))
    with pytest.raises(LocalProtocolError) as caught:
        client.request(Exist(namespace=NAMESPACE, keys=(b"k" * 100,) * 3))
    assert caught.value.code is ErrorCode.LIMIT_EXCEEDED


@pytest.mark.parametrize(
    "absurd",
    [
        {"max_body_bytes": 255},
        {"max_key_bytes": 129},
        *({f"max_{name}": 0} for name in ("payload_bytes", "items", "key_bytes", "object_bytes")),
        *({f"max_{name}": 0} for name in ("command_bytes", "requests", "inflight_bytes")),
    ],
    ids=str,
)
def test_limits_that_nobody_could_live_with(absurd: dict[str, int]) -> None:
    """Neither side goes on with them: the client would fail in every verb, one way or another."""
    client, gateway = Connection(Role.CLIENT), Connection(Role.GATEWAY)
    list(receive(gateway, client.hello(Hello())))
    welcome = Welcome(boot_id=bytes(16), limits=Limits(**absurd))
    with pytest.raises(LocalProtocolError, match=next(iter(absurd))):
        gateway.accept(welcome)
    with pytest.raises(RemoteProtocolError, match=next(iter(absurd))):
        list(receive(client, frame(welcome, Opcode.HELLO, 0, Flag.REPLY)))


def test_request_limit() -> None:
    client, gateway = pair(limits=SMALL)
    for _ in range(2):
        list(receive(gateway, client.request(Ping())[1]))
    assert not client.fits(0)
    with pytest.raises(LocalProtocolError):
        client.request(Ping())
    with pytest.raises(RemoteProtocolError) as caught:
        list(receive(gateway, frame(Ping(), Opcode.PING, 3)))
    assert caught.value.code is ErrorCode.LIMIT_EXCEEDED


@pytest.mark.parametrize(
    "message",
    [keyed(Exist, lease_ms=5), Release(lease_ids=(1,)), RegionOpen(region=1, region_bytes=1)],
    ids=lambda message: type(message).__name__,
)
def test_features_must_be_agreed_on(message: Request) -> None:
    client, _ = pair()
    with pytest.raises(LocalProtocolError, match="not agreed on"):
        client.request(message)


def test_features_that_were_agreed_on() -> None:
    client, gateway = pair(features=Feature.LEASES | Feature.REGIONS)
    replies = {
        keyed(Exist, lease_ms=5): ExistReply(statuses=b"\0", lease_id=1, lease_ms=5),
        Release(lease_ids=(1,)): StatusReply(statuses=b"\5"),
        RegionOpen(region=1, region_bytes=1): StatusReply(),
        keyed(ReadRegion, targets=(RegionTarget(region=1, offset=0, capacity=5),)): ReadRegionReply(
            items=(read_item(),)
        ),
        keyed(WriteRegion, sources=(RegionSource(region=1, offset=0, length=5, checksum=1),)): StatusReply(
            statuses=b"\0"
        ),
    }
    for request, reply in replies.items():
        number, raw = client.request(request)
        (asked,) = receive(gateway, raw, descriptors=isinstance(request, RegionOpen))
        assert asked.message == request  # type: ignore[union-attr]
        (answered,) = receive(client, gateway.reply(number, reply))
        assert answered.message == reply  # type: ignore[union-attr]


READ = keyed(Read, 2, capacities=(5, 5))
WRITE = keyed(Write, 2, items=(write_item(), write_item()))
EXIST = keyed(Exist, 2)


@pytest.mark.parametrize(
    ("request_", "replies", "words"),
    [
        (EXIST, [(ExistReply(statuses=b"\0\0\0"), True)], "items 0 to 3 of 2"),
        (EXIST, [(ExistReply(statuses=b"\0"), True)], "unanswered"),
        (EXIST, [(ExistReply(statuses=b"\0"), False)] * 2, "answered twice"),
        (EXIST, [(ExistReply(status=ErrorCode.REFUSED), False)], "refusal is final"),
        (READ, [(ReadReply(items=(read_item(2),)), False)], "item 2 of 2"),
        (READ, [(ReadReply(items=(read_item(),)), False)] * 2, "answered twice"),
        (READ, [(ReadReply(items=(read_item(status=ErrorCode.CORRUPT),)), False)], "not OK"),
        (READ, [(ReadReply(items=(read_item(offset=1, length=4),)), False)], "does not continue"),
        (READ, [(ReadReply(items=(read_item(length=2),)), False)] * 2, "does not continue"),
        (
            READ,
            [
                (ReadReply(items=(read_item(length=2),)), False),
                (ReadReply(items=(read_item(offset=2, length=2, checksum=2),)), False),
            ],
            "does not continue",
        ),
        (READ, [(ReadReply(items=(read_item(length=6),)), False)], "bytes 0 to 6 of 5"),
        (READ, [(ReadReply(items=(read_item(length=0),)), False)], "bytes 0 to 0 of 5"),
        (READ, [(ReadReply(items=(read_item(object_bytes=6),)), False)], "larger than its memory"),
        (READ, [(ReadReply(items=(read_item(length=2), read_item(1))), True)], "unanswered"),
        (Ping(), [(Pong(), False)], "is one frame"),
    ],
)
def test_replies_that_do_not_fit(
    request_: Request, replies: list[tuple[ReadReply, bool]], words: str
) -> None:
    """The same rule stops a careless gateway before it sends, and a client that is lied to."""
    client, gateway = pair()
    number, raw = client.request(request_)
    list(receive(gateway, raw))

    def say() -> None:
        for reply, is_final in replies:
            gateway.reply(number, reply, is_final=is_final)

    with pytest.raises(LocalProtocolError, match=words):
        say()
    raw = b""
    for reply, is_final in replies:
        flags = Flag.REPLY if is_final else Flag.REPLY | Flag.MORE
        raw += frame(reply, OPCODES[type(request_)], number, flags) + b"x" * sum(payload_lengths(reply))
    with pytest.raises(RemoteProtocolError, match=words):
        list(receive(client, raw))


def test_a_reply_belongs_to_its_verb() -> None:
    """Also where the bodies of two verbs look alike."""
    client, gateway = pair()
    number, raw = client.request(keyed(Delete))
    list(receive(gateway, raw))
    with pytest.raises(LocalProtocolError, match="not a reply to DELETE"):
        gateway.reply(number, ExistReply(statuses=b"\0"))
    with pytest.raises(RemoteProtocolError, match="CHECK 1, which is not open"):
        list(receive(client, frame(StatusReply(statuses=b"\0"), Opcode.CHECK, number, Flag.REPLY)))


def test_a_refusal_answers_everything() -> None:
    client, gateway = pair()
    number, raw = client.request(READ)
    list(receive(gateway, raw))
    raw = gateway.reply(number, ReadReply(status=ErrorCode.OVERLOADED, retry_after_ms=20))
    (answer,) = receive(client, raw)
    assert isinstance(answer, ReplyReceived)
    assert client.in_flight == gateway.in_flight == 0
    assert client.fits(client.limits.max_inflight_bytes)


def test_an_item_may_end_badly_after_it_began() -> None:
    client, gateway = pair()
    number, raw = client.request(READ)
    list(receive(gateway, raw))
    raw = gateway.reply(number, ReadReply(items=(read_item(length=2),)), is_final=False) + b"xx"
    worse = ReadItem(index=0, status=ErrorCode.GATEWAY_FAULT)
    raw += gateway.reply(number, ReadReply(items=(worse, read_item(1)))) + b"12345"
    *_, last = receive(client, raw)
    assert isinstance(last, ReplyReceived)
    assert last.is_final


def spanning(*items: WriteItem, keys: tuple[bytes, ...] | None = None) -> Write:
    return Write(namespace=NAMESPACE, keys=keys or KEYS[:1] * len(items), items=items)


OTHER = bytes(32)
HALF = write_item(length=2)
REST = write_item(offset=2, length=3)


@pytest.mark.parametrize(
    ("frames", "words"),
    [
        ([(spanning(HALF), True)], "left unfinished"),
        ([(spanning(HALF, write_item()), False)], "left unfinished"),
        ([(spanning(REST), True)], "continues nothing"),
        ([(spanning(write_item(), REST), True)], "continues nothing"),
        ([(spanning(HALF), False), (spanning(write_item()), True)], "does not continue the one"),
        ([(spanning(HALF), False), (spanning(REST, keys=KEYS[1:]), True)], "does not continue the one"),
        (
            [(spanning(HALF), False), (spanning(write_item(offset=2, length=3, checksum=9)), True)],
            "does not continue the one",
        ),
        (
            [(spanning(HALF), False), (attrs.evolve(spanning(REST), namespace=OTHER), True)],
            "another namespace",
        ),
        (
            [(spanning(write_item()), False), (attrs.evolve(spanning(write_item()), namespace=OTHER), True)],
            "another namespace",
        ),
        ([(spanning(write_item(length=6)), True)], "bytes 0 to 6 of 5"),
        ([(spanning(write_item(length=0)), True)], "bytes 0 to 0 of 5"),
        ([(Fence(), False)], "does not span"),
        ([(spanning(write_item()), True), (spanning(write_item()), True)], "not of this request"),
        ([(spanning(write_item()), False), (Fence(), True)], "not of this request"),
    ],
)
def test_requests_that_do_not_fit(frames: list[tuple[Request, bool]], words: str) -> None:
    client, gateway = pair()

    def say() -> None:
        number: int | None = None
        for message, is_final in frames:
            number, _ = client.request(message, is_final=is_final, request_id=number)

    with pytest.raises(LocalProtocolError, match=words):
        say()
    raw = b""
    for message, is_final in frames:
        flags = Flag.NONE if is_final else Flag.MORE
        raw += frame(message, OPCODES[type(message)], 1, flags) + b"x" * sum(payload_lengths(message))
    with pytest.raises(RemoteProtocolError, match=words):
        list(receive(gateway, raw))


@pytest.mark.parametrize(
    ("message", "opcode", "number", "flags", "role"),
    [
        (Hello(), Opcode.HELLO, 1, Flag.NONE, Role.GATEWAY),
        (Hello(), Opcode.HELLO, 0, Flag.MORE, Role.GATEWAY),
        (ErrorMessage(code=ErrorCode.MALFORMED), Opcode.ERROR, 1, Flag.NONE, Role.CLIENT),
        (Goodbye(), Opcode.GOODBYE, 0, Flag.MORE, Role.CLIENT),
        (Goodbye(), Opcode.GOODBYE, 1, Flag.NONE, Role.CLIENT),
        (Goodbye(), Opcode.GOODBYE, 0, Flag.NONE, Role.GATEWAY),
        (Ping(), Opcode.PING, 1, Flag.NONE, Role.CLIENT),
        (Ping(), Opcode.PING, 0, Flag.NONE, Role.GATEWAY),
        (Pong(), Opcode.PING, 1, Flag.REPLY, Role.CLIENT),
    ],
)
def test_frames_in_the_wrong_place(
    message: Message, opcode: Opcode, number: int, flags: Flag, role: Role
) -> None:
    client, gateway = pair()
    victim = client if role is Role.CLIENT else gateway
    with pytest.raises(RemoteProtocolError):
        list(receive(victim, frame(message, opcode, number, flags)))
    assert victim.state is State.FAILED
    victim.bytes_received(0)
    assert victim.next_event() == PeerClosed(is_clean=False)


@pytest.mark.parametrize("raw", [b"G", b"AD0", b"ADPx", b"SSH-2.0-x\r\n", b"\0"])
def test_another_protocol_is_recognised_before_a_header_is_in(raw: bytes) -> None:
    gateway = Connection(Role.GATEWAY)
    with pytest.raises(RemoteProtocolError) as caught:
        list(receive(gateway, raw))
    assert caught.value.code is ErrorCode.BAD_MAGIC


def test_the_beginning_of_a_header_is_waited_for() -> None:
    client, gateway = pair()
    _, raw = client.request(Ping())
    for byte in raw[:-1]:
        assert list(receive(gateway, bytes([byte]))) == []
    assert len(list(receive(gateway, raw[-1:]))) == 1


def test_a_failed_connection_can_still_say_why() -> None:
    client, gateway = pair()
    with pytest.raises(RemoteProtocolError) as caught:
        list(receive(gateway, b"x" * 64))
    assert gateway.next_event() is None
    raw = gateway.error(caught.value.code, str(caught.value))
    (event,) = receive(client, raw)
    assert event == NoticeReceived(notice=ErrorMessage(code=ErrorCode.BAD_MAGIC, text=str(caught.value)))


def test_what_a_side_may_not_ask_changes_nothing() -> None:
    client = Connection(Role.CLIENT)
    with pytest.raises(LocalProtocolError):
        client.request(Ping())
    client, gateway = pair()
    with pytest.raises(LocalProtocolError, match="to continue"):
        client.request(WRITE, request_id=9)
    with pytest.raises(LocalProtocolError):
        gateway.request(Ping())
    with pytest.raises(LocalProtocolError, match="no request"):
        gateway.reply(1, Pong())
    number, raw = client.request(Ping())
    list(receive(gateway, raw))
    with pytest.raises(LocalProtocolError):
        client.reply(number, Pong())
    assert list(receive(client, gateway.reply(number, Pong())))


def test_payload_limit_of_the_peer() -> None:
    client, gateway = pair(hello=Hello(max_payload_bytes=4))
    number, raw = client.request(READ)
    list(receive(gateway, raw))
    with pytest.raises(LocalProtocolError) as caught:
        gateway.reply(number, ReadReply(items=(read_item(),)), is_final=False)
    assert caught.value.code is ErrorCode.LIMIT_EXCEEDED


def test_is_mid_frame_tells_what_the_peer_still_owes() -> None:
    client, gateway = Connection(Role.CLIENT), Connection(Role.GATEWAY)
    raw = client.hello(Hello(agent="x"))
    for byte in raw[:-1]:
        gateway.receive_buffers()[0][:1] = bytes([byte])
        gateway.bytes_received(1)
        assert gateway.next_event() is None
        assert gateway.is_mid_frame
    gateway.receive_buffers()[0][:1] = raw[-1:]
    gateway.bytes_received(1)
    assert gateway.next_event() == HelloReceived(hello=Hello(agent="x"))
    assert not gateway.is_mid_frame


def test_what_follows_the_last_word_fills_nothing_and_its_end_is_seen() -> None:
    """The gateway has answered GOODBYE, and hears megabytes before it has hung up."""
    client, gateway = pair()
    number, raw = client.request(Goodbye())
    list(receive(gateway, raw))
    gateway.reply(number, GoodbyeReply())
    assert gateway.state is State.CLOSED
    assert list(receive(gateway, bytes(1 << 20))) == []
    assert len(gateway.receive_buffers()[0]) == 1 << 16
    gateway.bytes_received(0)
    assert isinstance(gateway.next_event(), PeerClosed)
