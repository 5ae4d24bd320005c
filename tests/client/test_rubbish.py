"""B36, seen from the client: whatever a gateway sends, it is a connection error, and memory stays flat."""

import os
import random
import tracemalloc
import zlib

import anyio
import pytest

from adp_client import Client
from adp_client.errors import LinkError
from adp_client.protocol.codec import encode_body
from adp_client.protocol.connection import Connection
from adp_client.protocol.constants import Flag, Opcode, Role
from adp_client.protocol.errors import RemoteProtocolError
from adp_client.protocol.events import Opened, PayloadExpected
from adp_client.protocol.frames import FrameHeader, encode_header
from adp_client.protocol.messages import (
    Credit,
    Exist,
    ExistReply,
    Goodbye,
    Hello,
    Limits,
    Read,
    ReadItem,
    ReadReply,
    StatusReply,
    Welcome,
)
from adp_client.testing import MemoryGateway
from client.support import NAMESPACE, connected, leftovers

SEEDS = 10_000
LIMITS = Limits(max_payload_bytes=1000)
RIGHT = [
    encode_body(message)
    for message in (
        ExistReply(statuses=b"\0\1"),
        ReadReply(items=(ReadItem(index=0, object_bytes=9, length=9, checksum=1),)),
        StatusReply(statuses=b"\0"),
        Credit(requests=1, inflight_bytes=1),
        Goodbye(text="bye"),
    )
]


def rubbish(chooser: random.Random) -> bytes:
    """Random bytes, or frames that are right but for some of their parts (with the checksums made right)."""
    if chooser.random() < 0.2:
        return chooser.randbytes(chooser.randrange(200))
    said = b""
    for _ in range(chooser.randrange(1, 4)):
        body = bytearray(chooser.choice(RIGHT))
        for _ in range(chooser.randrange(3)):
            body[chooser.randrange(len(body))] = chooser.randrange(256)
        if chooser.random() < 0.2:
            body = body[: chooser.randrange(len(body) + 1)]
        header = FrameHeader(
            opcode=chooser.choice(list(Opcode)),
            flags=Flag(chooser.randrange(4)),
            request_id=chooser.choice([0, 1, 2, 3, chooser.randrange(2**64)]),
            body_bytes=chooser.choice([len(body)] * 8 + [0, 1, 0xFFFFFFFF]),
            payload_bytes=chooser.choice([0] * 4 + [9, 9, 1, 0xFFFFFFFF]),
            body_crc=zlib.crc32(body),
        )
        said += encode_header(header) + bytes(body) + chooser.randbytes(chooser.choice([0, 9, 9, 40]))
    return said


def listening() -> Connection:
    """A client's core with a lookup and a read under way."""
    client, gateway = Connection(Role.CLIENT), Connection(Role.GATEWAY)
    for source, target in ((client.hello(Hello()), gateway), (None, client)):
        raw = source or gateway.accept(Welcome(boot_id=bytes(16), limits=LIMITS))
        target.receive_buffers()[0][: len(raw)] = raw
        target.bytes_received(len(raw))
        event = target.next_event()
    assert isinstance(event, Opened)
    client.request(Exist(namespace=NAMESPACE, keys=(b"a", b"b")))
    client.request(Read(namespace=NAMESPACE, keys=(b"a",), capacities=(20,)))
    return client


def hear(client: Connection, raw: bytes, chooser: random.Random) -> str:
    """Feed `raw` in pieces; how it ended. Anything but a violation or an event is a bug and comes out."""
    rest = memoryview(raw)
    try:
        while rest:
            view = client.receive_buffers()[0]
            count = min(len(view), len(rest), chooser.choice([1, 7, 1000]))
            view[:count] = rest[:count]
            rest = rest[count:]
            client.bytes_received(count)
            while (event := client.next_event()) is not None:
                if isinstance(event, PayloadExpected):
                    assert sum(event.lengths) <= 20, "more than the memory that was offered"
                    client.accept_payload([None] * len(event.lengths))
    except RemoteProtocolError:
        return "violation"
    return "waiting"


@pytest.mark.timeout(120)
def test_b36_ten_thousand_kinds_of_rubbish_are_violations_or_nothing_yet():
    outcomes = {"violation": 0, "waiting": 0}
    for seed in range(SEEDS):
        chooser = random.Random(seed)
        outcomes[hear(listening(), rubbish(chooser), chooser)] += 1
    assert outcomes["violation"] > SEEDS // 2


@pytest.mark.timeout(60)
def test_b36_a_length_that_is_only_announced_is_not_allocated():
    tracemalloc.start()
    try:
        for seed in range(1000):
            chooser = random.Random(seed)
            hear(listening(), rubbish(chooser), chooser)
            if seed == 200:
                before, _ = tracemalloc.get_traced_memory()
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 1 << 20
    assert peak < 16 << 20


@pytest.mark.anyio
@pytest.mark.timeout(600 if os.environ.get("ADP_TORTURE") else 60)
async def test_b36_a_client_survives_rubbish_and_another_client_does_not_notice():
    """Each connection says something else that is wrong; the other client's gateway is a healthy one."""
    count = SEEDS if os.environ.get("ADP_TORTURE") else 300
    chooser = random.Random(36)
    gateway = MemoryGateway(limits=LIMITS)

    async def script(session, request) -> bool:
        await session.transport.send([rubbish(chooser)])
        session.transport.abort()
        return True

    async def use(client: Client) -> None:
        try:
            assert len((await client.exist(NAMESPACE, [b"a", b"b"])).statuses) == 2
        except LinkError:
            return

    async with connected(gateway) as (client, _), connected() as (healthy, other):
        gateway.script = script
        before = len(anyio.get_running_tasks())
        for _ in range(count):
            await use(client)
            assert (await healthy.exist(NAMESPACE, [b"k"])).statuses == b"\1"
            gateway.sessions.clear()
            gateway.ended.clear()
        gateway.script = None
        assert (await client.exist(NAMESPACE, [b"a"])).statuses == b"\1"
        assert leftovers(client) == []
        assert healthy.stats().connections_lost == 0
        assert len(other.sessions) == 1
        while len(anyio.get_running_tasks()) > before:
            await anyio.lowlevel.checkpoint()
