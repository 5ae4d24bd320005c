"""Leases at the gateway (W6; spec sections 5.3, 5.6 and 5.12)."""

import socket
from collections.abc import Sequence

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from adp_client.protocol.constants import ErrorCode, Feature
from adp_client.protocol.messages import (
    Check,
    Delete,
    Exist,
    ExistReply,
    Fence,
    Hello,
    Limits,
    Read,
    Release,
    StatusReply,
)
from adp_client.transport import SocketTransport
from adp_gateway import leasing
from adp_gateway.admission import Admission
from adp_gateway.config import GatewayConfig, StoreConfig
from adp_gateway.errors import CorruptRecord
from adp_gateway.server import limits_of
from adp_gateway.session import Session
from adp_gateway.store.base import Hold
from adp_gateway.store.memory import MemoryStore

from .house import House, house
from .objects import put
from .peer import NAMESPACE, Peer, content, key_of
from .waiting import jump, on_a_jumping_clock, on_a_still_clock, until

pytestmark = pytest.mark.anyio

OK, NOT_FOUND, CORRUPT, STALE = ErrorCode.OK, ErrorCode.NOT_FOUND, ErrorCode.CORRUPT, ErrorCode.STALE_EPOCH
HELLO = Hello(features=Feature.LEASES)
KIB, MIB = 1 << 10, 1 << 20


async def connect(home: House) -> Peer:
    return await home.connect(HELLO)


async def look_up(peer: Peer, *keys: bytes, lease_ms: int = 5000) -> ExistReply:
    (frame,) = (await peer.call(Exist(namespace=NAMESPACE, keys=keys, lease_ms=lease_ms))).frames
    assert isinstance(frame, ExistReply)
    return frame


async def lease(peer: Peer, *keys: bytes, lease_ms: int = 5000) -> int:
    frame = await look_up(peer, *keys, lease_ms=lease_ms)
    assert frame.lease_id
    assert frame.lease_ms == lease_ms
    return frame.lease_id


def delete(*keys: bytes) -> Delete:
    return Delete(namespace=NAMESPACE, keys=keys)


async def release(peer: Peer, *lease_ids: int) -> list[int]:
    return (await peer.call(Release(lease_ids=lease_ids))).statuses


async def test_a_delete_from_anybody_waits_and_a_read_under_the_lease_gets_it() -> None:
    async with house() as home:
        holder, other = await connect(home), await connect(home)
        data = content(100_000)
        await holder.write({key_of(1): data, key_of(2): b"two"})
        frame = await look_up(holder, key_of(1), key_of(3))
        assert (frame.statuses, frame.lease_ms) == (bytes([OK, NOT_FOUND]), 5000)
        theirs = await other.ask(delete(key_of(1), key_of(2)))
        await until(lambda: home.shared.counters.verbs[Delete].taken)
        own = await holder.ask(delete(key_of(1)))
        assert await other.read(key_of(1), key_of(2)) == [data, None]
        assert await holder.read(key_of(1)) == [data]
        assert await other.exist(key_of(1)) == [OK], "there for everybody"
        assert home.store.stats().held_items == home.shared.counters.leased_items == 1
        late = await look_up(other, key_of(1))
        assert (late.statuses, late.lease_id, late.lease_ms) == (bytes([NOT_FOUND]), 0, 0)
        assert not {theirs, own} & (other.done | holder.done)
        assert await release(other, frame.lease_id) == [STALE]
        assert await release(holder, frame.lease_id, frame.lease_id, 99) == [OK, STALE, STALE]
        assert (await other.answer(theirs)).statuses == [OK, OK]
        assert (await holder.answer(own)).statuses == [NOT_FOUND]
        assert await holder.read(key_of(1)) == [None]
        counters = home.shared.counters
        assert (counters.leases_granted, counters.leases_released, counters.leases_expired) == (1, 1, 0)


async def test_without_the_feature_nobody_asks_for_leases() -> None:
    async with house() as home:
        peer = await home.connect(Hello())
        await peer.write({key_of(1): b"one"})
        assert (await look_up(peer, key_of(1), lease_ms=0)).lease_id == 0
        peer.connection.features |= Feature.LEASES  # this side pretends
        await peer.ask(Exist(namespace=NAMESPACE, keys=(key_of(1),), lease_ms=5))
        assert (await peer.closed())[-1].code is ErrorCode.UNEXPECTED_MESSAGE
        assert home.shared.counters.leases_granted == 0


async def test_nothing_found_is_nothing_leased() -> None:
    async with house() as home:
        peer = await connect(home)
        frame = await look_up(peer, key_of(1))
        assert (frame.statuses, frame.lease_id) == (bytes([NOT_FOUND]), 0)
        assert home.shared.lease_admission.used_bytes == 0


async def test_every_frame_of_the_answer_names_the_lease() -> None:
    async with house() as home:
        peer = await home.connect(Hello(features=Feature.LEASES, max_body_bytes=4096))
        await peer.write({key_of(n): b"" for n in range(0, 9000, 1000)})
        keys = tuple(map(key_of, range(9000)))
        answer = await peer.call(Exist(namespace=NAMESPACE, keys=keys, lease_ms=5000))
        assert len(answer.frames) == 3
        assert {(frame.lease_id, frame.lease_ms) for frame in answer.frames} == {(1, 5000)}
        assert [n for n, status in enumerate(answer.statuses) if status == OK] == list(range(0, 9000, 1000))
        assert home.store.stats().held_items == 9


async def test_a_release_passes_the_fence_that_waits_for_it() -> None:
    async with house() as home:
        peer = await connect(home)
        await peer.write({key_of(1): b"one"})
        first = await lease(peer, key_of(1))
        deleting = await peer.ask(delete(key_of(1)))
        fence = await peer.ask(Fence())
        behind = await peer.ask(Exist(namespace=NAMESPACE, keys=(key_of(1),), lease_ms=5000))
        assert await release(peer, first) == [OK]
        assert (await peer.answer(deleting)).statuses == [OK]
        assert (await peer.answer(fence)).status is OK
        assert (await peer.answer(behind)).statuses == [NOT_FOUND]


# ---------------------------------------------------------------- how they end


@on_a_still_clock
async def test_a_lease_ends_with_its_time_counted_from_the_answer() -> None:
    async with house() as home:
        holder, other = await connect(home), await connect(home)
        await holder.write({key_of(1): b"one", key_of(2): b"two"})
        jump(10)
        await lease(holder, key_of(1), lease_ms=3000)
        short = await lease(holder, key_of(2), lease_ms=1000)
        asked = [await other.ask(delete(key_of(n))) for n in (1, 2)]
        await wait_all_tasks_blocked()
        jump(0.999)
        await wait_all_tasks_blocked()
        assert home.shared.counters.leases_expired == 0
        jump(0.002)
        assert (await other.answer(asked[1])).statuses == [OK]
        assert await release(holder, short) == [STALE]
        assert home.shared.counters.leased_items == 1
        jump(2)
        assert (await other.answer(asked[0])).statuses == [OK]
        assert home.shared.counters.leases_expired == 2


@on_a_jumping_clock
async def test_the_longest_lease_is_the_gateways_to_say() -> None:
    async with house(limits=Limits(max_lease_ms=2000)) as home:
        peer = await connect(home)
        await peer.write({key_of(1): b"one"})
        frame = await look_up(peer, key_of(1), lease_ms=(1 << 32) - 1)
        assert frame.lease_ms == 2000
        begun = anyio.current_time()
        assert (await peer.call(delete(key_of(1)))).statuses == [OK]
        assert 2 <= anyio.current_time() - begun < 2.1


def test_a_delete_outlasts_no_usual_patience(tmp_path) -> None:
    config = GatewayConfig(store=StoreConfig(directory=tmp_path), listen=(object(),))
    assert limits_of(config, MemoryStore()).max_lease_ms == 20_000


@pytest.mark.parametrize("how", ["dies", "breaks the protocol", "leaves"])
async def test_a_lease_ends_with_its_connection(how: str) -> None:
    async with house() as home:
        holder, other = await connect(home), await connect(home)
        await holder.write({key_of(1): b"one"})
        await lease(holder, key_of(1))
        asked = await other.ask(delete(key_of(1)))
        await wait_all_tasks_blocked()
        if how == "dies":
            await holder.transport.aclose()
        elif how == "leaves":
            await holder.leave()
        else:
            await holder.transport.send([b"what?"])
        assert (await other.answer(asked)).statuses == [OK]


async def test_a_delete_that_waits_for_its_own_connection_s_lease_is_not_taken_when_that_ends() -> None:
    async with house() as home:
        peer, other = await connect(home), await connect(home)
        await peer.write({key_of(1): b"one"})
        await lease(peer, key_of(1))
        await peer.ask(delete(key_of(1)))
        await wait_all_tasks_blocked()
        await peer.transport.aclose()
        await until(lambda: home.store.stats().held_items == 0)
        assert await other.read(key_of(1)) == [b"one"]
        assert await lease(other, key_of(1))


async def test_a_session_that_is_cut_takes_its_leases_along() -> None:
    async with house() as home:
        peer, other = await connect(home), await connect(home)
        await peer.write({key_of(1): b"one"})
        async with anyio.create_task_group() as tasks:
            ours, theirs = socket.socketpair()
            session = Session(SocketTransport(theirs), home.shared, peer="to be cut")
            tasks.start_soon(session.run)
            holder = Peer(SocketTransport(ours), HELLO)
            await holder.open()
            await lease(holder, key_of(1))
            asked = await other.ask(delete(key_of(1)))
            await until(lambda: home.shared.counters.verbs[Delete].taken)
            await holder.ask(delete(key_of(1)))
            await until(lambda: home.shared.counters.verbs[Delete].taken == 2)
            tasks.cancel_scope.cancel()
        await holder.transport.aclose()
        assert (await other.answer(asked)).statuses == [OK]


async def test_draining_waits_for_no_lease() -> None:
    async with house() as home:
        peer = await connect(home)
        await peer.write({key_of(1): b"one"})
        await lease(peer, key_of(1))
        home.sessions[0].drain()
        while not peer.notices:
            await peer.event()
        assert home.store.stats().held_items == 1
        await peer.leave()
        await until(lambda: home.store.stats().held_items == 0)
        assert home.shared.counters.leases_expired == 0


async def test_what_is_damaged_goes_in_spite_of_leases() -> None:
    async with house() as home:
        peer = await connect(home)
        await peer.write({key_of(1): b"one"})
        first = await lease(peer, key_of(1))
        home.store.damage(NAMESPACE, key_of(1))
        assert (await peer.call(Check(namespace=NAMESPACE, keys=(key_of(1),)))).statuses == [CORRUPT]
        assert await peer.read(key_of(1)) == [None]
        asked = await peer.ask(delete(key_of(1)))
        assert await release(peer, first) == [OK]
        assert (await peer.answer(asked)).statuses == [NOT_FOUND]


class BrokenStore(MemoryStore):
    def hold(self, namespace: bytes, keys: Sequence[bytes]) -> tuple[bytes, Hold]:
        raise CorruptRecord("cannot be held")


async def test_a_store_that_fails_has_granted_nothing() -> None:
    async with house(BrokenStore()) as home:
        peer = await connect(home)
        await peer.write({key_of(1): b"one"})
        frame = await look_up(peer, key_of(1))
        assert (frame.status, frame.lease_id) == (CORRUPT, 0)
        assert home.shared.lease_admission.used_bytes == 0
        assert await peer.exist(key_of(1)) == [OK]


# ---------------------------------------------------------------- how many


async def test_above_its_number_a_connection_gets_answers_without_leases(monkeypatch) -> None:
    monkeypatch.setattr(leasing, "MAX_LEASES", 3)
    async with house() as home:
        peer, other = await connect(home), await connect(home)
        await peer.write({key_of(1): b"one"})
        granted = [await lease(peer, key_of(1)) for _ in range(3)]
        frame = await look_up(peer, key_of(1))
        assert (frame.statuses, frame.lease_id, frame.lease_ms) == (bytes([OK]), 0, 0)
        assert await lease(other, key_of(1))
        assert await release(peer, *granted[:1]) == [OK]
        assert await lease(peer, key_of(1))


async def test_one_connection_gets_half_of_the_memory_for_leases_and_all_together_the_whole() -> None:
    async with house(lease_admission=Admission(100_000)) as home:
        peers = [await connect(home) for _ in range(3)]
        keys = tuple(map(key_of, range(100)))
        await peers[0].write(dict.fromkeys(keys, b""))
        ids = [[(await look_up(peer, *keys)).lease_id for _ in range(3)] for peer in peers]
        assert [[bool(each) for each in row] for row in ids] == [
            [True, True, False],
            [True, True, False],
            [False, False, False],
        ]
        assert home.shared.lease_admission.used_bytes <= 100_000
        await peers[0].transport.aclose()
        await until(lambda: home.shared.counters.leased_items == 200)
        assert await lease(peers[2], *keys)


async def test_leases_that_come_and_go_leave_nothing_behind() -> None:
    async with house() as home:
        peer = await connect(home)
        await peer.write({key_of(1): b"one"})
        for _ in range(300):
            assert await release(peer, await lease(peer, key_of(1))) == [OK]
        assert len(home.sessions[0]._leases._deadlines) <= 66


# ---------------------------------------------------------------- faults from the field


@on_a_still_clock
@pytest.mark.timeout(120)
async def test_b45_looked_up_ten_thousand_times_and_never_fetched() -> None:
    """They are held while their leases run, and not a moment longer: then the store can be filled."""
    store = MemoryStore(capacity_bytes=4 * MIB)
    async with house(store, limits=Limits(max_lease_ms=1000)) as home:
        aborted, killed, writer = [await connect(home) for _ in range(3)]
        for n in range(20):
            await put(store, key_of(n), content(100_000, seed=n))
        question = Exist(namespace=NAMESPACE, keys=tuple(map(key_of, range(15, 25))), lease_ms=60_000)
        leases = 0
        for peer in [aborted] * 45 + [killed] * 5:
            for request_id in [await peer.ask(question) for _ in range(200)]:
                (frame,) = (await peer.answer(request_id)).frames
                leases += frame.lease_id > 0
        counters = home.shared.counters
        assert counters.leases_granted == leases == leasing.MAX_LEASES + 1000
        assert store.stats().held_items == counters.leased_items == 5 * leases
        refused = await writer.write({key_of(100): content(4 * MIB - 400_000)})
        assert refused == [ErrorCode.CAPACITY_EXHAUSTED]
        assert store.stats().evicted_objects == 0
        await killed.transport.aclose()
        left = len(home.sessions[0]._leases._leases)
        await until(lambda: counters.leased_items == 5 * left)
        jump(1.1)
        await until(lambda: store.stats().held_items == 0)
        for n in range(100, 200):
            assert await writer.write({key_of(n): content(100_000, seed=n)}) == [OK]
        assert store.stats().evicted_objects == 20 + 100 - 41
        assert (counters.leases_expired, counters.leases_released) == (left, 0)


async def test_b40_a_slow_reader_under_a_lease_gets_the_old_bytes_or_an_error() -> None:
    """Delete, release, fill, write again: the delete waits for the lease, then for the read."""
    store = MemoryStore(capacity_bytes=4 * MIB)
    old, new = content(MIB, seed=1), content(MIB, seed=2)
    async with house(store, max_queued_bytes=MIB) as home:
        reader, other = await connect(home), await connect(home)
        await reader.write({key_of(n): old for n in range(2)})
        first = await lease(reader, key_of(0), key_of(1))
        deleting = await other.ask(delete(key_of(1)))
        assert await other.read(key_of(1)) == [old]
        reading = await reader.ask(
            Read(namespace=NAMESPACE, keys=(key_of(0), key_of(1)), capacities=(MIB,) * 2)
        )
        await until(lambda: store.stats().leases)
        releasing = await reader.ask(Release(lease_ids=(first,)))
        await until(lambda: store.stats().held_items == 0)
        for n in range(10, 20):
            await put(store, key_of(n), content(MIB, seed=n))
        await put(store, key_of(1), new)
        await wait_all_tasks_blocked()
        assert deleting not in other.done
        assert (await reader.answer(releasing)).frames == [StatusReply(statuses=bytes([OK]))]
        assert (await reader.answer(reading)).payloads() == [old, old]
        assert (await other.answer(deleting)).statuses == [OK]
        assert await other.read(key_of(1)) == [new]
