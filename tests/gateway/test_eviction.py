"""Two queues, marks and ghosts: the policy by itself, what the store makes of it, both in a small store."""

from itertools import pairwise

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adp_gateway.device.memory import MemoryDevice
from adp_gateway.store.base import Status
from adp_gateway.store.catalog import Catalog
from adp_gateway.store.eviction import (
    KEPT_SHARE,
    MOST_KEPT,
    Ghosts,
    Queue,
    TwoQueues,
    ghost_slots,
)
from adp_gateway.store.files import create_files
from adp_gateway.store.index import Entry
from adp_gateway.store.quotas import Account
from adp_gateway.store.reclaim import choose_victim
from adp_gateway.store.segment import Layout
from adp_gateway.store.segments import SegmentStore
from gateway.objects import KIB, MIB, NAMESPACE, OTHER_NAMESPACE, config, get, key, payload, put

MISS = Status.NOT_FOUND


@attrs.define(eq=False)
class Piece:
    """A segment as the policy sees it."""

    charge_bytes: int = 100
    queue: Queue = Queue.PROBATION
    turn: int = 0


def policy() -> TwoQueues:
    return TwoQueues(Ghosts(64, seed=7))


def test_probation_pays_while_it_is_above_its_share_and_the_main_queue_below():
    queues = policy()
    pieces = [Piece() for _ in range(10)]
    assert queues.order(pieces) == pieces, "the oldest first"
    for piece in pieces[:5]:
        queues.keep(piece)
    assert queues.order(pieces) == [*pieces[5:], *pieces[:5]]
    queues.keep(pieces[5])
    assert queues.order(pieces) == [*pieces[:6], *pieces[6:]], "four of ten: not above the share"
    queues.keep(pieces[0])
    assert queues.order(pieces) == [*pieces[1:6], pieces[0], *pieces[6:]]
    pieces[0].charge_bytes = 10  # shares are of bytes
    assert queues.order(pieces)[:4] == pieces[6:]


@given(st.lists(st.tuples(st.integers(1, 100), st.booleans()), max_size=20))
def test_an_order_has_each_once_and_each_queue_by_turn(rows):
    queues = policy()
    pieces = [Piece(charge) for charge, _ in rows]
    for piece, (_, is_kept) in zip(pieces, rows, strict=True):
        if is_kept:
            queues.keep(piece)
    order = queues.order(pieces)
    assert sorted(map(id, order)) == sorted(map(id, pieces))
    for queue in Queue:
        own = [piece for piece in order if piece.queue is queue]
        assert all(
            (one.turn, pieces.index(one)) < (other.turn, pieces.index(other)) for one, other in pairwise(own)
        )


def test_what_is_kept_has_its_share_marked():
    queues, piece = policy(), Piece(1000)
    assert not queues.is_kept(piece, int(1000 * KEPT_SHARE) - 1)
    assert queues.is_kept(piece, int(1000 * KEPT_SHARE))


def test_a_ghost_is_taken_once():
    queues = policy()
    queues.evicted(NAMESPACE, [key(1), key(2)])
    assert queues.returned(NAMESPACE, [key(2), key(3), key(2)]) == [True, False, False]
    assert queues.returned(OTHER_NAMESPACE, [key(1)]) == [False]
    assert queues.returned(NAMESPACE, [key(1)]) == [True]


def test_ghosts_take_the_same_memory_however_many_there_are():
    ghosts = Ghosts(1000, seed=1)
    before = ghosts.memory_bytes
    ghosts.add(NAMESPACE, (key(n) for n in range(10_000)))
    assert ghosts.memory_bytes == before == 4000
    late = sum(ghosts.take(NAMESPACE, key(n)) for n in range(9_500, 10_000))
    early = sum(ghosts.take(NAMESPACE, key(n)) for n in range(5_000))
    assert late > 350
    assert early < 50
    assert sum(ghosts.take(NAMESPACE, key(n)) for n in range(10_000, 60_000)) == 0, "nobody else's"


def test_ghosts_of_another_seed_are_others():
    """Whoever does not know the seed cannot make keys that pass for one another."""
    one, other = Ghosts(1 << 16, seed=1), Ghosts(1 << 16, seed=2)
    one.add(NAMESPACE, [key(1)])
    other._fingerprints = one._fingerprints
    assert not other.take(NAMESPACE, key(1))
    assert one.take(NAMESPACE, key(1))


@given(st.integers(0, 2**60))
def test_ghosts_are_bounded(capacity_bytes):
    assert 1024 <= ghost_slots(capacity_bytes) <= 4 << 20
    assert ghost_slots(64 << 30) == 1 << 19


# What the store makes of it


@pytest.fixture
def catalog():
    """Twenty segments of four objects; the last one is active."""
    with MemoryDevice() as device:
        catalog = Catalog()
        for n in range(1, 21):
            segment = create_files(device, n, Layout(256 * KIB), False)
            catalog.seal()
            catalog.active = catalog.segments[n] = segment
            for each in range(4):
                offset = segment.allocate(61_440)
                entry = Entry(n, offset, 61_440, 0, catalog.take_sequence())
                catalog.commit(NAMESPACE, key(10 * n + each), entry)
        yield catalog
        for segment in (*catalog.segments.values(), *catalog.doomed):
            segment.data.close()
            segment.journal.close()


def read(catalog: Catalog, segment_id: int, *each: int) -> None:
    catalog.index.use(NAMESPACE, [key(10 * segment_id + n) for n in each])


def test_what_has_been_read_is_kept_where_it_is(catalog):
    read(catalog, 1, 0, 1)
    read(catalog, 2, 0)
    assert choose_victim(catalog) is catalog.segments[2], "a quarter of it: moved, not kept"
    first = catalog.segments[1]
    assert (first.queue, first.turn) == (Queue.MAIN, 1)
    assert catalog.marked_bytes(first) == 0
    assert choose_victim(catalog) is catalog.segments[2], "asking again changes nothing"


def test_a_search_keeps_no_more_than_so_many(catalog):
    for n in range(1, 20):
        catalog.keep(catalog.segments[n])
        read(catalog, n, 0, 1, 2, 3)
    assert choose_victim(catalog) is catalog.segments[MOST_KEPT + 1]
    marked = [n for n, segment in catalog.segments.items() if catalog.marked_bytes(segment)]
    assert marked == list(range(MOST_KEPT + 1, 20))


def test_once_probation_is_small_the_main_queue_pays(catalog):
    for n in range(1, 14):
        read(catalog, n, 0, 1, 2, 3)
    assert choose_victim(catalog) is catalog.segments[1], "twelve kept, without a mark: its turn again"
    main = [n for n, segment in catalog.segments.items() if segment.queue is Queue.MAIN]
    assert main == list(range(1, 13))
    read(catalog, 1, 0, 1, 2, 3)
    assert choose_victim(catalog) is catalog.segments[2]


def test_evicted_by_whatever_reason_an_object_is_remembered(catalog):
    catalog.doom(catalog.segments[1])
    catalog.evict((NAMESPACE, key(20)))
    catalog.drop(NAMESPACE, key(30))
    names = [key(10), key(13), key(20), key(30), key(40)]
    assert catalog.policy.returned(NAMESPACE, names) == [True, True, True, False, False]


# In a store

pytestmark = pytest.mark.anyio


@pytest.fixture
def device():
    with MemoryDevice(max_command_bytes=16 * KIB) as device:
        yield device


async def fill(store: SegmentStore, numbers: range, length: int = 80_000) -> None:
    for n in numbers:
        assert await put(store, key(n), payload(n, length)) == Status.OK


def present(store: SegmentStore, numbers: range) -> int:
    return store.exist(NAMESPACE, [key(n) for n in numbers]).count(Status.OK)


async def test_a_scan_of_four_times_the_capacity_leaves_what_agents_read(device):
    async with SegmentStore.open(config("unused"), device=device) as store:
        await fill(store, range(18))
        for n in range(18):
            assert await get(store, key(n)) == payload(n, 80_000)
        await fill(store, range(100, 300))
        assert present(store, range(18)) >= 15
        assert store.stats().moved_bytes < 200 * 80_000 // 10
    async with SegmentStore.open(config("unused"), device=device) as store:
        kept = [n for n in range(18) if present(store, range(n, n + 1))]
        for n in kept:
            assert await get(store, key(n)) == payload(n, 80_000)
        await fill(store, range(300, 400))
        assert present(store, range(18)) == len(kept), "nor does another, after a restart"


async def test_what_comes_back_after_it_was_evicted_stays(device):
    """Agents that come back later than probation lasts: their second visit is the last one that misses."""
    async with SegmentStore.open(config("unused"), device=device) as store:
        await fill(store, range(9))
        await fill(store, range(100, 145))
        assert present(store, range(9)) == 0
        await fill(store, range(9))
        await fill(store, range(145, 190))
        assert present(store, range(9)) >= 6


async def test_a_quota_s_evictions_are_remembered_too(device):
    accounts = (Account(name="a", prefix=NAMESPACE[:8], quota_bytes=10 * 81_920 + 4096),)
    async with SegmentStore.open(config("unused", accounts=accounts), device=device) as store:
        await fill(store, range(10))
        await fill(store, range(10, 12))
        assert present(store, range(2)) == 0
        await fill(store, range(2))
        assert [entry.is_used for entry in store._catalog.index.get_many(NAMESPACE, [key(0), key(11)])] == [
            True,
            False,
        ]


async def test_a_read_while_an_object_is_moved_counts_for_its_copy(device):
    async with SegmentStore.open(config("unused"), device=device) as store:
        await fill(store, range(30))
        assert await get(store, key(0)) == payload(0, 80_000)

        def read_again(command) -> None:
            if command.kind.value == "read" and command.name.endswith("1.data"):
                store._catalog.index.use(NAMESPACE, [key(0)])

        device.before = read_again
        await fill(store, range(30, 60))
        device.before = None
        entry = store._catalog.index.get(NAMESPACE, key(0))
        assert entry.segment_id != 1
        assert entry.is_used


async def test_small_stores_evict_too(device):
    """Four segments, of which three fit: probation is all there is."""
    settings = config("unused", capacity_bytes=MIB, segment_bytes=256 * KIB)
    async with SegmentStore.open(settings, device=device) as store:
        for n in range(60):
            assert await put(store, key(n), payload(n, 100_000)) == Status.OK
            assert await get(store, key(n)) == payload(n, 100_000)
            assert device.used_bytes() <= store.stats().used_bytes <= MIB
        assert await get(store, key(0)) == MISS
