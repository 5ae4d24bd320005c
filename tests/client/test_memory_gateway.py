"""The gateway in memory keeps the rules for leases, seen from the wire (spec sections 5.3, 5.6, 5.12)."""

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from adp_client.protocol.constants import ErrorCode, Feature
from adp_client.protocol.messages import Delete, Exist, Fence, Hello, Limits, Read, Release
from adp_client.testing import MemoryGateway
from adp_client.transport.endpoints import parse_endpoint
from client.support import ENDPOINT
from gateway.peer import NAMESPACE, Peer
from gateway.waiting import on_a_jumping_clock, until

pytestmark = pytest.mark.anyio

OK, NOT_FOUND, STALE = ErrorCode.OK, ErrorCode.NOT_FOUND, ErrorCode.STALE_EPOCH
HELLO = Hello(features=Feature.LEASES)


async def connect(gateway: MemoryGateway, hello: Hello = HELLO) -> Peer:
    peer = Peer(await gateway.dial(parse_endpoint(ENDPOINT)), hello)
    await peer.open()
    return peer


def stocked(**settings) -> MemoryGateway:
    gateway = MemoryGateway(**settings)
    for key in (b"a", b"b"):
        gateway.put(NAMESPACE, key, b"object " + key)
    return gateway


def exist(*keys: bytes, lease_ms: int = 0) -> Exist:
    return Exist(namespace=NAMESPACE, keys=keys, lease_ms=lease_ms)


def delete(*keys: bytes) -> Delete:
    return Delete(namespace=NAMESPACE, keys=keys)


async def lease(peer: Peer, *keys: bytes, lease_ms: int = 60_000) -> int:
    (frame,) = (await peer.call(exist(*keys, lease_ms=lease_ms))).frames
    assert frame.lease_id
    return frame.lease_id


async def test_a_delete_waits_for_the_lease_and_nobody_else_notices() -> None:
    async with stocked() as gateway:
        holder, other = await connect(gateway), await connect(gateway)
        first = await lease(holder, b"a", b"c")
        asked = await other.ask(delete(b"a", b"b", b"a"))
        assert await other.exist(b"a", b"b") == [OK, NOT_FOUND]
        answer = await holder.call(Read(namespace=NAMESPACE, keys=(b"a",), capacities=(99,)))
        assert answer.payloads() == [b"object a"]
        (late,) = (await other.call(exist(b"a", lease_ms=5))).frames
        assert (late.statuses, late.lease_id, late.lease_ms) == (bytes([NOT_FOUND]), 0, 0)
        assert asked not in other.done
        assert (await other.call(Release(lease_ids=(first,)))).statuses == [STALE]
        assert (await holder.call(Release(lease_ids=(first, first)))).statuses == [OK, STALE]
        assert (await other.answer(asked)).statuses == [OK, OK, NOT_FOUND]
        assert gateway.objects == {}
        assert len(gateway.leases) == 0


async def test_a_release_passes_the_fence_that_waits_for_it() -> None:
    async with stocked() as gateway:
        peer = await connect(gateway)
        first = await lease(peer, b"a")
        deleting = await peer.ask(delete(b"a"))
        fence = await peer.ask(Fence())
        looked_up = await peer.ask(exist(b"a"))
        released = await peer.ask(Release(lease_ids=(first,)))
        assert (await peer.answer(released)).statuses == [OK]
        assert (await peer.answer(deleting)).statuses == [OK]
        await peer.answer(fence)
        assert (await peer.answer(looked_up)).statuses == [NOT_FOUND]


async def test_released_in_the_same_breath() -> None:
    async with stocked() as gateway:
        peer = await connect(gateway)
        first = await lease(peer, b"a")
        _, deleting = peer.connection.request(delete(b"a"))
        released, releasing = peer.connection.request(Release(lease_ids=(first,)))
        await peer.transport.send([deleting, releasing])
        assert (await peer.answer(released)).statuses == [OK]
        assert (await peer.answer(released - 1)).statuses == [OK]


@pytest.mark.parametrize("who_leaves", ["holder", "deleter"])
async def test_who_leaves_holds_nothing_and_deletes_nothing(who_leaves: str) -> None:
    async with stocked() as gateway:
        holder, deleter = await connect(gateway), await connect(gateway)
        await lease(holder, b"a")
        asked = await deleter.ask(delete(b"a"))
        await wait_all_tasks_blocked()
        if who_leaves == "holder":
            await holder.transport.aclose()
            assert (await deleter.answer(asked)).statuses == [OK]
            return
        await deleter.transport.aclose()
        await until(lambda: not gateway.leases.is_claimed((NAMESPACE, b"a")))
        assert await lease(holder, b"a")
        await holder.transport.aclose()
        await until(lambda: not len(gateway.leases))
        assert len(gateway.objects) == 2


@on_a_jumping_clock
async def test_a_lease_expires() -> None:
    async with stocked(limits=Limits(max_lease_ms=3000)) as gateway:
        holder, other = await connect(gateway), await connect(gateway)
        begun = anyio.current_time()
        await lease(holder, b"a", lease_ms=1 << 31)
        await lease(holder, b"b", lease_ms=1000)
        assert (await other.call(delete(b"a", b"b"))).statuses == [OK, OK]
        assert 3.0 <= anyio.current_time() - begun < 3.1
        assert len(gateway.leases) == 0


async def test_without_the_feature_there_are_none() -> None:
    async with stocked(features=Feature.NONE) as gateway:
        peer = await connect(gateway)
        assert peer.connection.features == Feature.NONE
        assert await peer.exist(b"a") == [OK]
