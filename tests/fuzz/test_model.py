"""What the live fuzzer takes for right: its model of an object, and its watch over a connection."""

import math
import time

import pytest
import xxhash

from adp_client.protocol.codec import OPCODES
from adp_client.protocol.constants import ErrorCode, Feature, Opcode
from adp_client.protocol.messages import (
    Credit,
    Delete,
    ErrorMessage,
    Exist,
    ExistReply,
    Fence,
    Goodbye,
    Hello,
    Limits,
    Message,
    Ping,
    Pong,
    Read,
    ReadItem,
    ReadReply,
    Release,
    StatusReply,
    Welcome,
    Write,
    WriteItem,
)
from fuzz.live.model import Finding, Model
from fuzz.live.spelling import frame
from fuzz.live.watch import Watch

NAMESPACE = bytes(32)
KEY = b"key"
OLD, NEW = b"old bytes", b"new bytes"
OK, MISS = ErrorCode.OK, ErrorCode.NOT_FOUND
LIMITS = Limits(max_requests=4, max_inflight_bytes=4096, max_object_bytes=1024)


def opened(model: Model, features: Feature = ~Feature.NONE) -> Watch:
    watch = Watch(model)
    watch.sent(frame(Hello(features=features), 0))
    watch.received(
        frame(Welcome(boot_id=bytes(16), features=features, limits=LIMITS), 0, reply_to=Opcode.HELLO)
    )
    return watch


def write(data: bytes, *, checksum: int | None = None) -> tuple[Write, bytes]:
    digest = xxhash.xxh3_64_intdigest(data) if checksum is None else checksum
    item = WriteItem(object_bytes=len(data), length=len(data), checksum=digest)
    return Write(namespace=NAMESPACE, keys=(KEY,), items=(item,)), data


def read_reply(data: bytes | None) -> tuple[ReadReply, bytes]:
    if data is None:
        return ReadReply(items=(ReadItem(index=0, status=MISS),)), b""
    digest = xxhash.xxh3_64_intdigest(data)
    item = ReadItem(index=0, object_bytes=len(data), length=len(data), checksum=digest)
    return ReadReply(items=(item,)), data


READ = Read(namespace=NAMESPACE, keys=(KEY,), capacities=(100,))
EXIST = Exist(namespace=NAMESPACE, keys=(KEY,))
DELETE = Delete(namespace=NAMESPACE, keys=(KEY,))


def ask(watch: Watch, number: int, message: Message, payload: bytes = b"") -> None:
    watch.sent(frame(message, number, payload=payload))


def answer(watch: Watch, number: int, message: Message, payload: bytes = b"") -> None:
    asked = watch._asked.get(number)
    opcode = Opcode.PING if asked is None else OPCODES[type(asked.message)]
    watch.received(frame(message, number, payload=payload, reply_to=opcode))


def stored(watch: Watch, number: int, data: bytes) -> None:
    ask(watch, number, *write(data))
    answer(watch, number, StatusReply(statuses=bytes([OK])))


@pytest.mark.parametrize("found", [NEW, None])
def test_what_was_acknowledged_reads_back_or_is_a_miss(found: bytes | None) -> None:
    watch = opened(Model())
    stored(watch, 1, OLD)
    stored(watch, 2, NEW)
    ask(watch, 3, READ)
    answer(watch, 3, *read_reply(found))
    assert watch.is_answered


def test_what_was_replaced_does_not_come_back() -> None:
    watch = opened(Model())
    stored(watch, 1, OLD)
    stored(watch, 2, NEW)
    ask(watch, 3, READ)
    with pytest.raises(Finding, match="replaced or deleted before the read"):
        answer(watch, 3, *read_reply(OLD))


@pytest.mark.parametrize("found", [OLD, NEW, None])
def test_side_by_side_either_may_be_found(found: bytes | None) -> None:
    model = Model()
    one, other = opened(model), opened(model)
    stored(one, 1, OLD)
    ask(other, 1, *write(NEW))
    ask(one, 2, READ)
    answer(other, 1, StatusReply(statuses=bytes([OK])))
    answer(one, 2, *read_reply(found))


def test_a_write_whose_answer_was_lost_stays_possible() -> None:
    model = Model()
    one, other = opened(model), opened(model)
    ask(one, 1, *write(OLD))
    one.ended()
    stored(other, 1, NEW)
    ask(other, 2, READ)
    answer(other, 2, *read_reply(OLD))


def test_a_fence_orders_without_waiting() -> None:
    watch = opened(Model())
    stored(watch, 1, OLD)
    ask(watch, 2, *write(NEW))
    ask(watch, 3, Fence())
    ask(watch, 4, READ)
    answer(watch, 2, StatusReply(statuses=bytes([OK])))
    answer(watch, 3, StatusReply())
    with pytest.raises(Finding, match="replaced or deleted"):
        answer(watch, 4, *read_reply(OLD))


def test_a_fence_behind_half_a_write_owes_nothing() -> None:
    watch = opened(Model())
    item = WriteItem(object_bytes=2, length=1, checksum=1)
    half = Write(namespace=NAMESPACE, keys=(KEY,), items=(item,))
    watch.sent(frame(half, 1, is_final=False, payload=b"x"))
    ask(watch, 2, READ)
    ask(watch, 3, Fence())
    ask(watch, 4, READ)
    assert watch.open_requests == ["READ 2"]
    rest = Write(
        namespace=NAMESPACE, keys=(KEY,), items=(WriteItem(object_bytes=2, offset=1, length=1, checksum=1),)
    )
    ask(watch, 1, rest, b"y")
    assert watch.open_requests == ["WRITE 1", "READ 2", "FENCE 3", "READ 4"]


def test_what_was_deleted_is_a_miss_for_everybody() -> None:
    model = Model()
    one, other = opened(model), opened(model)
    stored(one, 1, OLD)
    ask(one, 2, DELETE)
    answer(one, 2, StatusReply(statuses=bytes([OK])))
    ask(other, 1, EXIST)
    with pytest.raises(Finding, match="EXIST 1 says OK, and there can be nothing"):
        answer(other, 1, ExistReply(statuses=bytes([OK])))


def test_what_was_refused_is_never_there() -> None:
    watch = opened(Model())
    ask(watch, 1, *write(OLD))
    answer(watch, 1, StatusReply(status=ErrorCode.OVERLOADED, retry_after_ms=5))
    ask(watch, 2, READ)
    with pytest.raises(Finding, match="bytes that were refused"):
        answer(watch, 2, *read_reply(OLD))


def test_wrong_bytes_say_whose_they_are() -> None:
    watch = opened(Model())
    ask(watch, 1, READ)
    with pytest.raises(Finding, match="wrong bytes, nobody's"):
        answer(watch, 1, *read_reply(NEW))


def test_a_write_that_lies_is_corrupt_and_one_that_does_not_is_not() -> None:
    watch = opened(Model())
    ask(watch, 1, *write(OLD, checksum=1))
    with pytest.raises(Finding, match="OK for an object whose bytes do not match"):
        answer(watch, 1, StatusReply(statuses=bytes([OK])))
    watch = opened(Model())
    ask(watch, 1, *write(OLD))
    with pytest.raises(Finding, match="CORRUPT for an object whose bytes match"):
        answer(watch, 1, StatusReply(statuses=bytes([ErrorCode.CORRUPT])))


def leased(model: Model, lease_ms: int = 60_000) -> Watch:
    watch = opened(model)
    stored(watch, 1, OLD)
    ask(watch, 2, Exist(namespace=NAMESPACE, keys=(KEY,), lease_ms=lease_ms))
    answer(watch, 2, ExistReply(statuses=bytes([OK]), lease_id=7, lease_ms=lease_ms))
    return watch


def test_a_miss_under_a_lease_is_wrong() -> None:
    watch = leased(Model())
    ask(watch, 3, READ)
    with pytest.raises(Finding, match="a miss under a lease"):
        answer(watch, 3, *read_reply(None))


@pytest.mark.parametrize("how", ["release", "end", "delete", "time", "before"])
def test_a_lease_that_has_ended_promises_nothing(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    other = opened(model)
    if how == "before":
        ask(other, 1, READ)
    watch = leased(model)
    assert watch.lease_ids == [7]
    if how == "release":
        watch.releasing([7])
        ask(watch, 3, Release(lease_ids=(7,)))
    elif how == "end":
        watch.ended()
    elif how == "delete":
        ask(watch, 3, DELETE)
    elif how == "time":
        monkeypatch.setattr(time, "monotonic", lambda: math.inf)
    if how != "before":
        ask(other, 1, READ)
    answer(other, 1, *read_reply(None))
    assert other.is_answered


def test_a_lease_that_nobody_asked_for_is_wrong() -> None:
    watch = opened(Model())
    ask(watch, 1, EXIST)
    with pytest.raises(Finding, match="a lease of 5 ms, when at most 0"):
        answer(watch, 1, ExistReply(statuses=bytes([MISS]), lease_id=1, lease_ms=5))


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (StatusReply(statuses=bytes([OK, OK])), "an answer that the spec forbids"),
        (StatusReply(), "leaves items unanswered"),
        (StatusReply(statuses=bytes([ErrorCode.GATEWAY_FAULT])), "GATEWAY_FAULT, which has no place"),
        (StatusReply(statuses=bytes([ErrorCode.OVERLOADED])), "OVERLOADED, which has no place"),
    ],
)
def test_an_answer_that_must_not_be(message: Message, problem: str) -> None:
    watch = opened(Model())
    ask(watch, 1, DELETE)
    with pytest.raises(Finding, match=problem):
        answer(watch, 1, message)


def test_a_second_answer_and_another_nonce_are_wrong() -> None:
    watch = opened(Model())
    ask(watch, 1, Ping(nonce=5))
    with pytest.raises(Finding, match="nonce 6 instead of 5"):
        answer(watch, 1, Pong(nonce=6))
    watch = opened(Model())
    ask(watch, 1, Ping(nonce=5))
    answer(watch, 1, Pong(nonce=5))
    with pytest.raises(Finding, match="which is not open"):
        answer(watch, 1, Pong(nonce=5))


def test_nothing_comes_behind_error() -> None:
    watch = opened(Model())
    last = frame(ErrorMessage(code=ErrorCode.MALFORMED, text=""), 0)
    with pytest.raises(Finding, match="behind ERROR"):
        watch.received(last + last)
    watch = opened(Model())
    watch.received(last)
    with pytest.raises(Finding, match="speaks on after its ERROR"):
        watch.received(b"x")


@pytest.mark.parametrize(
    ("raw", "problem"),
    [
        (b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n", "no frame"),
        (frame(Ping(), 0), "does not send PING"),
        (frame(Welcome(boot_id=bytes(16)), 0, reply_to=Opcode.HELLO), "a WELCOME that nobody asked for"),
        (frame(Credit(requests=0, inflight_bytes=1), 0), "a notice that the spec forbids"),
        (frame(Goodbye(), 5), "GOODBYE from the gateway with id 5"),
    ],
    ids=["another protocol", "request", "welcome", "credit", "goodbye"],
)
def test_bytes_that_no_gateway_sends(raw: bytes, problem: str) -> None:
    with pytest.raises(Finding, match=problem):
        opened(Model()).received(raw)


def test_a_welcome_keeps_to_what_was_offered() -> None:
    watch = Watch(Model())
    watch.sent(frame(Hello(features=Feature.CREDITS), 0))
    with pytest.raises(Finding, match="features that HELLO had not"):
        watch.received(
            frame(
                Welcome(boot_id=bytes(16), features=Feature.LEASES, limits=LIMITS), 0, reply_to=Opcode.HELLO
            )
        )


def test_violations_are_certain_unless_the_gateway_may_know_better() -> None:
    watch = opened(Model())
    watch.sent(frame(Hello(), 0))
    assert watch.violation is not None
    assert watch.is_certain
    assert "ERROR (UNEXPECTED_MESSAGE" in watch.expected
    # The window: our answers may be on their way.
    watch = opened(Model())
    for number in range(1, 6):
        ask(watch, number, Ping())
    assert watch.violation is not None
    assert not watch.is_certain
    # The magic: a gateway may wait for the whole header.
    watch = opened(Model())
    watch.sent(b"GET")
    assert watch.violation is not None
    assert not watch.is_certain


def test_requests_behind_hello_wait_for_the_welcome_to_be_judged() -> None:
    watch = Watch(Model())
    watch.sent(frame(Hello(), 0) + frame(Ping(nonce=3), 1))
    assert watch.is_early
    assert watch.is_answered
    watch.received(frame(Welcome(boot_id=bytes(16), limits=LIMITS), 0, reply_to=Opcode.HELLO))
    assert watch.open_requests == ["PING 1"]
