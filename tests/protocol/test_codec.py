"""Bodies: every message both ways, and nothing that is not one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adp_client.protocol import ErrorCode, Opcode
from adp_client.protocol.codec import decode_body, encode_body
from adp_client.protocol.constants import HEADER_BYTES, Flag
from adp_client.protocol.errors import LocalProtocolError
from adp_client.protocol.frames import decode_header
from adp_client.protocol.messages import (
    ErrorMessage,
    Exist,
    ExistReply,
    Goodbye,
    Hello,
    Read,
    Release,
    StatusReply,
    Welcome,
    Write,
    WriteItem,
)
from spec.vectors import Vector

NAMESPACE = bytes(range(32))


def test_a_body_is_exactly_its_fields(vector: Vector) -> None:
    """Cut anywhere or made longer by a byte, a body is refused, never misread."""
    header = decode_header(memoryview(vector.frame)[:HEADER_BYTES])
    body = vector.frame[HEADER_BYTES:]
    is_reply = Flag.REPLY in header.flags
    for cut in range(len(body)):
        with pytest.raises(LocalProtocolError):
            decode_body(header.opcode, is_reply, memoryview(body[:cut]))
    with pytest.raises(LocalProtocolError):
        decode_body(header.opcode, is_reply, memoryview(body + b"\0"))


@given(
    opcode=st.sampled_from(Opcode),
    is_reply=st.booleans(),
    body=st.binary(max_size=200),
)
def test_any_bytes_decode_or_are_refused(opcode: Opcode, is_reply: bool, body: bytes) -> None:
    try:
        message = decode_body(opcode, is_reply, memoryview(body))
    except LocalProtocolError:
        return
    assert decode_body(opcode, is_reply, memoryview(encode_body(message))) == message


@pytest.mark.parametrize(
    "message",
    [
        Exist(namespace=NAMESPACE[:-1], keys=(b"k",)),
        Exist(namespace=NAMESPACE, keys=()),
        Exist(namespace=NAMESPACE, keys=(b"",)),
        Exist(namespace=NAMESPACE, keys=(b"k" * 129,)),
        Exist(namespace=NAMESPACE, keys=(b"kk", b"k", b"kkk")),
        Exist(namespace=NAMESPACE, keys=(b"kk", b"k")),
        Exist(namespace=NAMESPACE, keys=(b"k",), lease_ms=1 << 32),
        Read(namespace=NAMESPACE, keys=(b"k",), capacities=()),
        Read(namespace=NAMESPACE, keys=(b"k",), capacities=(-1,)),
        Write(namespace=NAMESPACE, keys=(b"k",), items=()),
        Write(
            namespace=NAMESPACE,
            keys=(b"k",),
            items=(WriteItem(object_bytes=1, length=1, checksum=1 << 64),),
        ),
        Welcome(boot_id=b"short"),
        Hello(token=b"t" * 65536),
        Hello(agent="a" * 1025),
        Release(lease_ids=()),
        ErrorMessage(code=ErrorCode.MALFORMED, text="ü" * 600),
        StatusReply(status=ErrorCode.MALFORMED),
        StatusReply(status=ErrorCode.REFUSED, statuses=b"\0"),
        ExistReply(status=ErrorCode.REFUSED, first=1),
    ],
    ids=repr,
)
def test_what_cannot_be_said_is_refused_before_it_is_sent(message: Exist) -> None:
    with pytest.raises(LocalProtocolError):
        encode_body(message)


@pytest.mark.parametrize(
    ("opcode", "is_reply", "body", "words"),
    [
        (Opcode.HELLO, False, b"\2\0\1\0" + bytes(24), "versions 2 to 1"),
        (Opcode.HELLO, False, b"\1\0\1\0" + bytes(18) + b"\1\0" + bytes(4) + b"\xff", "not UTF-8"),
        (Opcode.HELLO, False, b"\1\0\1\0" + bytes(20) + b"\1\0\0\0", "extensions of 1"),
        (Opcode.HELLO, True, bytes(2) + b"\1\0" + bytes(76), "reserved"),
        (Opcode.GOODBYE, False, b"\x09\0" + bytes(6), "not an error code"),
        (Opcode.GOODBYE, False, bytes(4) + b"\1\4\0\0" + b"a" * 1025, "text of 1025"),
        (Opcode.ERROR, False, bytes(8), "OK does not end"),
        (Opcode.ERROR, True, bytes(8), "no reply"),
        (Opcode.CREDIT, True, bytes(16), "no reply"),
        (Opcode.DELETE, True, b"\x09" + bytes(15), "not a status"),
        (Opcode.DELETE, True, b"\x40" + bytes(15), "not a status"),
        (Opcode.DELETE, True, bytes(12) + b"\1\0\0\0\x09", "unknown status"),
        (Opcode.DELETE, True, b"\6" + bytes(7) + b"\1\0\0\0" + bytes(4), "has no items"),
        (Opcode.READ, True, bytes(8) + b"\1\0\0\0" + bytes(4), "reserved"),
        (Opcode.RELEASE, False, bytes(8), "without items"),
    ],
)
def test_what_a_peer_may_not_say(opcode: Opcode, is_reply: bool, body: bytes, words: str) -> None:
    with pytest.raises(LocalProtocolError, match=words):
        decode_body(opcode, is_reply, memoryview(body))


def test_unknown_features_are_ignored() -> None:
    body = bytearray(encode_body(Hello()))
    body[8:16] = b"\xff" * 8
    message = decode_body(Opcode.HELLO, False, memoryview(body))
    assert isinstance(message, Hello)
    assert message.features.value == 0b11111


def test_goodbye_may_carry_any_code() -> None:
    for code in ErrorCode:
        message = Goodbye(code=code)
        assert decode_body(Opcode.GOODBYE, False, memoryview(encode_body(message))) == message
