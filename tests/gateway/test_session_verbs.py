"""What each verb does, seen from the wire."""

import pytest

from adp_client.protocol.constants import ErrorCode, Feature
from adp_client.protocol.messages import (
    Check,
    Delete,
    Exist,
    Fence,
    Goodbye,
    Hello,
    Limits,
    Ping,
    Pong,
    Read,
    ReadReply,
    StatusReply,
    Write,
    WriteItem,
)
from adp_gateway.config import MIB
from adp_gateway.replies import MIN_PAYLOAD_BYTES

from .house import BOOT_ID, house
from .peer import NAMESPACE, Closed, Peer, content, key_of

pytestmark = pytest.mark.anyio

OK, NOT_FOUND, CORRUPT = ErrorCode.OK, ErrorCode.NOT_FOUND, ErrorCode.CORRUPT
LIMIT = 64 << 10
NARROW = Limits(max_payload_bytes=LIMIT, max_object_bytes=1 << 20)


async def test_handshake_tells_the_limits_and_only_what_is_implemented() -> None:
    async with house(limits=NARROW) as home:
        peer = await home.connect(Hello(features=~0 & 0xF))
        assert peer.connection.limits == NARROW
        assert peer.connection.features == (
            Feature.LEASES | Feature.REGIONS | Feature.FRAGMENTS | Feature.CREDITS
        )
        peer = await home.connect(Hello())
        assert not peer.connection.features


async def test_boot_id() -> None:
    async with house() as home:
        welcome = await Peer(home.dial()).open()
        assert welcome.boot_id == BOOT_ID


async def test_write_exist_read_delete() -> None:
    async with house() as home:
        peer = await home.connect()
        one, two, three = map(key_of, range(3))
        assert await peer.write({one: b"first", two: content(300_000)}) == [OK, OK]
        assert await peer.exist(one, two, three) == [OK, OK, NOT_FOUND]
        assert await peer.read(three, two, one) == [None, content(300_000), b"first"]
        assert await peer.write({one: b"second"}) == [OK]
        assert await peer.read(one) == [b"second"]
        answer = await peer.call(Delete(namespace=NAMESPACE, keys=(one, three)))
        assert answer.statuses == [OK, NOT_FOUND]
        assert await peer.exist(one, two) == [NOT_FOUND, OK]
        assert await peer.read(one) == [None]


async def test_namespaces_do_not_mix() -> None:
    async with house() as home:
        peer = await home.connect()
        await peer.write({key_of(1): b"mine"})
        other = await peer.call(Exist(namespace=bytes(32), keys=(key_of(1),)))
        assert other.statuses == [NOT_FOUND]


@pytest.mark.parametrize("size", [0, 1, LIMIT - 1, LIMIT, LIMIT + 1, int(3.4 * LIMIT)])
async def test_sizes_around_the_payload_limit(size: int) -> None:
    """In both directions: WRITE frames are as full as can be, READ frames as the client allows."""
    async with house(limits=NARROW) as home:
        peer = await home.connect(Hello(max_payload_bytes=LIMIT))
        objects = {key_of(n): content(size, seed=n) for n in range(3)}
        assert await peer.write(objects) == [OK] * 3
        assert await peer.read(*objects) == list(objects.values())
        assert await peer.read(key_of(9), *objects, key_of(8)) == [None, *objects.values(), None]


async def test_tiny_frames() -> None:
    """A client may receive very little at a time: every kind of reply is cut to its limits."""
    async with house() as home:
        writer = await home.connect()
        objects = {key_of(n): content(5000 + n, seed=n) for n in range(40)}
        assert await writer.write(objects) == [OK] * 40
        peer = await home.connect(Hello(max_body_bytes=64, max_payload_bytes=MIN_PAYLOAD_BYTES))
        assert await peer.exist(*objects, key_of(99)) == [OK] * 40 + [NOT_FOUND]
        assert await peer.read(*objects) == list(objects.values())
        answer = await peer.call(Check(namespace=NAMESPACE, keys=tuple(objects)))
        assert answer.statuses == [OK] * 40
        assert len(answer.frames) == 1
        answer = await peer.call(Delete(namespace=NAMESPACE, keys=tuple(objects) * 2))
        assert answer.statuses == [OK] * 40 + [NOT_FOUND] * 40
        assert len(answer.frames) == 2


async def test_crumbs_are_refused() -> None:
    """Each frame has its price: an object in frames of a byte would be a million of them."""
    async with house() as home:
        for hello in (Hello(max_payload_bytes=1), Hello(max_payload_bytes=1023), Hello(max_body_bytes=63)):
            peer = Peer(home.dial(), hello)
            with pytest.raises(Closed):
                await peer.open()
            assert [notice.code for notice in peer.notices] == [ErrorCode.LIMIT_EXCEEDED]


async def test_many_small_frames_keep_nobody_waiting() -> None:
    """They are made as they are sent, and others have their turn in between."""
    async with house(max_queued_bytes=8 * MIB) as home:
        writer = await home.connect()
        await writer.write({key_of(1): content(MIB)})
        peer = await home.connect(Hello(max_payload_bytes=MIN_PAYLOAD_BYTES))
        await peer.ask(Read(namespace=NAMESPACE, keys=(key_of(1),), capacities=(MIB,)))
        await writer.call(Ping())
        assert home.shared.counters.sent_bytes < MIB // 2
        assert await peer.read(key_of(1)) == [content(MIB)]


async def test_no_payload_at_all() -> None:
    async with house() as home:
        peer = await home.connect(Hello(max_payload_bytes=0))
        await peer.write({key_of(1): b"x", key_of(2): b""})
        answer = await peer.call(Read(namespace=NAMESPACE, keys=(key_of(1), key_of(2)), capacities=(9, 9)))
        assert answer.statuses == [ErrorCode.TOO_LARGE, OK]


async def test_too_large_for_the_reader() -> None:
    async with house() as home:
        peer = await home.connect()
        await peer.write({key_of(1): content(5000), key_of(2): content(10)})
        answer = await peer.call(
            Read(namespace=NAMESPACE, keys=(key_of(1), key_of(2)), capacities=(4999, 10))
        )
        reply = answer.frames[0]
        assert isinstance(reply, ReadReply)
        assert reply.items[0].status is ErrorCode.TOO_LARGE
        assert reply.items[0].object_bytes == 5000
        assert answer.payloads() == [None, content(10)]


async def test_one_large_batch() -> None:
    async with house() as home:
        peer = await home.connect()
        objects = {key_of(n): content(n % 1500, seed=n) for n in range(3000)}
        assert await peer.write(objects) == [OK] * 3000
        assert await peer.read(*objects) == list(objects.values())


async def test_a_key_may_stand_twice() -> None:
    async with house() as home:
        peer = await home.connect()
        await peer.write({key_of(1): b"twin"})
        assert await peer.read(key_of(1), key_of(1)) == [b"twin", b"twin"]


async def test_ten_thousand_keys_in_one_exist() -> None:
    async with house() as home:
        peer = await home.connect()
        await peer.write({key_of(n): b"" for n in range(0, 10_000, 2)})
        statuses = await peer.exist(*map(key_of, range(10_000)))
        assert statuses == [OK, NOT_FOUND] * 5000


async def test_a_damaged_object_is_a_status_without_bytes() -> None:
    async with house() as home:
        peer = await home.connect()
        await peer.write({key_of(n): content(2000, seed=n) for n in range(3)})
        home.store.damage(NAMESPACE, key_of(1))
        answer = await peer.call(
            Read(namespace=NAMESPACE, keys=tuple(map(key_of, range(3))), capacities=(2000,) * 3)
        )
        assert answer.payloads() == [content(2000), None, content(2000, seed=2)]
        assert answer.statuses == [OK, CORRUPT, OK]
        assert await peer.exist(key_of(1)) == [NOT_FOUND]


async def test_check() -> None:
    async with house() as home:
        peer = await home.connect()
        await peer.write({key_of(n): content(2000, seed=n) for n in range(2)})
        home.store.damage(NAMESPACE, key_of(1))
        answer = await peer.call(Check(namespace=NAMESPACE, keys=tuple(map(key_of, range(3)))))
        assert answer.statuses == [OK, CORRUPT, NOT_FOUND]


async def test_a_write_that_lies_about_its_checksum() -> None:
    async with house() as home:
        peer = await home.connect()
        items = (WriteItem(object_bytes=3, length=3, checksum=1),)
        answer = await peer.call(Write(namespace=NAMESPACE, keys=(key_of(1),), items=items), [b"abc"])
        assert answer.statuses == [CORRUPT]
        assert await peer.exist(key_of(1)) == [NOT_FOUND]


async def test_ping_and_goodbye() -> None:
    async with house() as home:
        peer = await home.connect()
        assert (await peer.call(Ping(nonce=7))).frames == [Pong(nonce=7)]
        await peer.leave()
        with pytest.raises(Closed):
            await peer.event()


async def test_goodbye_waits_for_what_was_asked() -> None:
    async with house() as home:
        peer = await home.connect()
        objects = {key_of(n): content(700_000, seed=n) for n in range(8)}
        await peer.write(objects)
        read = await peer.ask(
            Read(namespace=NAMESPACE, keys=tuple(objects), capacities=(700_000,) * len(objects))
        )
        goodbye = await peer.ask(Goodbye())
        assert (await peer.answer(read)).payloads() == list(objects.values())
        await peer.answer(goodbye)
        assert await peer.closed() == []


async def test_write_then_read_behind_a_fence() -> None:
    async with house() as home:
        peer = await home.connect()
        old, new = content(400_000), content(400_000, seed=1)
        await peer.write({key_of(1): old})
        write = await peer.ask_write({key_of(1): new})
        fence = await peer.ask(Fence())
        exist = await peer.ask(Exist(namespace=NAMESPACE, keys=(key_of(1),)))
        ping = await peer.ask(Ping(nonce=1))
        read = await peer.ask(Read(namespace=NAMESPACE, keys=(key_of(1),), capacities=(400_000,)))
        assert (await peer.answer(read)).payloads() == [new]
        assert (await peer.answer(fence)).frames == [StatusReply()]
        assert (await peer.answer(write)).statuses == [OK]
        assert (await peer.answer(exist)).statuses == [OK]
        await peer.answer(ping)
