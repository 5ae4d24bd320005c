"""What `ObjectStore` promises about accounts and quotas, asked of every store."""

from contextlib import AsyncExitStack

import anyio
import pytest
from anyio.lowlevel import checkpoint

from adp_gateway.device.memory import MemoryDevice
from adp_gateway.store.base import ObjectStore, PutItem, Status
from adp_gateway.store.memory import MemoryStore
from adp_gateway.store.segments import SegmentStore
from gateway.objects import KIB, MIB, config, get, item, key, payload, put
from gateway.tenancy import ACCOUNTS, FREE, MINE, QUOTA, THEIRS, TIGHT, account

pytestmark = pytest.mark.anyio

LARGEST = 200 * KIB


@pytest.fixture(params=["memory", "files", "durable", "device"])
async def store(request, tmp_path, anyio_backend):
    if request.param == "memory":
        yield MemoryStore(capacity_bytes=4 * MIB, max_object_bytes=LARGEST, accounts=ACCOUNTS)
        return
    async with AsyncExitStack() as stack:
        device = None
        if request.param == "device":
            device = stack.enter_context(MemoryDevice(max_command_bytes=16 * KIB))
        durability = "durable" if request.param == "durable" else "relaxed"
        settings = config(tmp_path / "kv", max_object_bytes=LARGEST, durability=durability, accounts=ACCOUNTS)
        yield await stack.enter_async_context(SegmentStore.open(settings, device=device))


async def test_two_accounts_are_counted_apart(store: ObjectStore):
    await put(store, key(1), bytes(5000), MINE)
    await put(store, key(1), b"theirs", THEIRS)
    await put(store, key(1), b"nobody's", bytes(32))
    assert (account(store, "mine").objects, account(store, "mine").used_bytes) == (1, 2 * 4096 + 384)
    assert (account(store, "theirs").objects, account(store, "theirs").used_bytes) == (1, 4096 + 384)
    assert await store.delete_many(MINE, [key(1)]) == bytes([Status.OK])
    assert (account(store, "mine").objects, account(store, "mine").used_bytes) == (0, 0)
    assert await get(store, key(1), THEIRS) == b"theirs"
    assert await get(store, key(1), MINE) == Status.NOT_FOUND


async def test_who_floods_loses_only_their_own(store: ObjectStore):
    """Three times the store. The neighbour reads nothing and lies everywhere in between."""
    theirs = range(0, 72, 4)
    for n in range(250):
        if n in theirs:
            assert await put(store, key(n), payload(("theirs", n), 50_000), THEIRS) == Status.OK
        assert await put(store, key(n), payload(n, 50_000 - n), MINE) == Status.OK
        assert account(store, "mine").used_bytes <= QUOTA
        assert store.stats().used_bytes <= store.stats().capacity_bytes
    for n in theirs:
        assert await get(store, key(n), THEIRS) == payload(("theirs", n), 50_000)
    assert account(store, "theirs").evicted_objects == 0
    found = [n for n in range(250) if not store.exist(MINE, [key(n)])[0]]
    assert found == list(range(250 - len(found), 250)), "the newest are there, and nothing else"
    assert account(store, "mine").used_bytes > QUOTA - 60_000
    assert account(store, "mine").evicted_objects == 250 - len(found)


async def test_many_tiny_objects_reach_the_quota_too(store: ObjectStore):
    for start in range(0, 400, 50):
        statuses = await store.put_many(MINE, [item(key(n), b"") for n in range(start, start + 50)])
        assert statuses == bytes(50)
        assert account(store, "mine").used_bytes <= QUOTA
    assert account(store, "mine").objects == QUOTA // (4096 + 384)


async def test_one_vector_larger_than_the_quota(store: ObjectStore):
    """Each item is stored; the first have made room for the last by then."""
    items = [item(key(n), payload(n, 100_000)) for n in range(30)]
    assert await store.put_many(MINE, items) == bytes(30)
    assert account(store, "mine").used_bytes <= QUOTA
    assert await get(store, key(29), MINE) == payload(29, 100_000)
    assert await get(store, key(0), MINE) == Status.NOT_FOUND


async def test_a_key_twice_in_a_vector_counts_once(store: ObjectStore):
    items = [item(key(1), bytes(LARGEST)), item(key(1), b"last")] * 4
    assert await store.put_many(MINE, items) == bytes(8)
    assert (account(store, "mine").objects, account(store, "mine").used_bytes) == (1, 4096 + 384)
    assert account(store, "mine").evicted_objects == 0


async def test_overwriting_at_the_limit_evicts_nothing(store: ObjectStore):
    count = QUOTA // (4096 + 384)
    for _ in range(3):
        statuses = await store.put_many(MINE, [item(key(n), b"x") for n in range(count)])
        assert statuses == bytes(count)
    assert account(store, "mine").evicted_objects == 0
    assert account(store, "mine").objects == count
    assert await put(store, key(count), b"x", MINE) == Status.OK
    assert account(store, "mine").evicted_objects == 1


async def test_larger_than_the_whole_quota(store: ObjectStore):
    assert await put(store, key(1), b"before", TIGHT) == Status.OK
    assert await put(store, key(1), bytes(64 * KIB), TIGHT) == Status.TOO_LARGE
    assert await get(store, key(1), TIGHT) == b"before"
    assert account(store, "tight").evicted_objects == 0
    assert await put(store, key(1), bytes(64 * KIB), FREE) == Status.OK
    most = 64 * KIB - 4096  # with its records, that is
    assert await put(store, key(2), bytes(most), TIGHT) == Status.OK
    assert account(store, "tight").evicted_objects == 1


async def test_what_is_leased_stays_and_then_there_is_no_room(store: ObjectStore):
    leases = []
    n = 0
    while (status := await put(store, key(n), payload(n, 60_000), MINE)) == Status.OK:
        leases += store.open_read(MINE, [key(n)])
        n += 1
    assert status == Status.CAPACITY_EXHAUSTED
    before = account(store, "mine")
    assert await put(store, key(n), payload(n, 60_000), MINE) == Status.CAPACITY_EXHAUSTED
    assert account(store, "mine") == before
    assert store.exist(MINE, [key(m) for m in range(n)]) == bytes(n)
    assert await put(store, key(n), payload(n, 60_000), THEIRS) == Status.OK
    leases.pop(0).release()
    assert await put(store, key(n), payload(n, 60_000), MINE) == Status.OK
    assert store.exist(MINE, [key(0), key(1)]) == bytes([Status.NOT_FOUND, Status.OK])
    for lease in leases:
        lease.release()


async def test_what_has_been_read_goes_later(store: ObjectStore):
    n = 0
    while not account(store, "mine").evicted_objects:
        assert await put(store, key(n), payload(n, 60_000), MINE) == Status.OK
        assert await get(store, key(0), MINE) == payload(0, 60_000)
        n += 1
    assert await get(store, key(0), MINE) == payload(0, 60_000)
    assert await get(store, key(1), MINE) == Status.NOT_FOUND


async def test_four_writers_never_overshoot_together(store: ObjectStore):
    most = 0

    async def write(writer: int) -> None:
        nonlocal most
        for turn in range(12):
            items = [item(key(writer * 1000 + turn * 10 + n), payload(n, 20_000 * n)) for n in range(4)]
            assert await store.put_many(MINE, items) == bytes(4)
            most = max(most, account(store, "mine").used_bytes)

    async with anyio.create_task_group() as tasks:
        for writer in range(4):
            tasks.start_soon(write, writer)
        for _ in range(100):
            await checkpoint()
            most = max(most, account(store, "mine").used_bytes)
    assert QUOTA // 2 < most <= QUOTA


async def test_puts_that_fail_or_are_cancelled_leave_no_trace(store: ObjectStore):
    for n in range(30):
        bad = PutItem(key=key(n), checksum=1, data=memoryview(bytes(150_000)))
        assert await store.put_many(MINE, [bad]) == bytes([Status.CORRUPT])
        with anyio.CancelScope() as scope:

            async def cancel_after(checkpoints: int, scope: anyio.CancelScope = scope) -> None:
                for _ in range(checkpoints):
                    await checkpoint()
                scope.cancel()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(cancel_after, n % 10)
                await store.put_many(MINE, [item(key(n), bytes(150_000))])
        assert account(store, "mine").used_bytes <= QUOTA
    await store.delete_many(MINE, [key(n) for n in range(30)])
    assert account(store, "mine").used_bytes == 0
    count = QUOTA // (4096 + 384)
    before = account(store, "mine").evicted_objects
    assert await store.put_many(MINE, [item(key(n), b"") for n in range(count)]) == bytes(count)
    assert account(store, "mine").evicted_objects == before
    assert account(store, "mine").objects == count


async def test_what_is_held_is_never_the_quotas_victim(store: ObjectStore):
    """An account at its quota with everything held: refused, until the hold ends; overwriting goes on."""
    size = 100_000
    count = QUOTA // (102_400 + 384)
    names = [key(n) for n in range(count)]
    assert await store.put_many(MINE, [item(name, payload(0, size)) for name in names]) == bytes(count)
    statuses, hold = store.hold(MINE, names)
    assert statuses == bytes(count)
    assert await put(store, key(1000), bytes(size), MINE) == Status.CAPACITY_EXHAUSTED
    assert await put(store, key(0), payload(1, size), MINE) == Status.OK
    assert store.exist(MINE, names) == bytes(count)
    assert await put(store, key(1000), bytes(size), THEIRS) == Status.OK
    hold.release()
    assert await put(store, key(1000), bytes(size), MINE) == Status.OK
    assert account(store, "mine").evicted_objects == 1
