"""What `ObjectStore` promises, asked of every store: memory, files in every mode, the RAM device in two."""

import mmap
import os
import threading
from contextlib import AsyncExitStack, contextmanager

import anyio
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint

from adp_client.protocol import ErrorCode
from adp_gateway.device.memory import MemoryDevice
from adp_gateway.store.base import Extent, Hold, ObjectStore, PutItem, Status
from adp_gateway.store.memory import MemoryStore
from adp_gateway.store.segments import SegmentStore
from client.support import cancel_at
from gateway.objects import (
    KIB,
    MIB,
    NAMESPACE,
    OTHER_NAMESPACE,
    config,
    get,
    item,
    key,
    lease_bytes,
    payload,
    put,
    put_all,
)
from gateway.waiting import until

pytestmark = pytest.mark.anyio

MISS = Status.NOT_FOUND
LARGEST = 200 * KIB
SIZES = [0, 1, 4095, 4096, 4097, 16 * KIB, 16 * KIB + 1, 100_000, LARGEST]


@pytest.fixture(params=["memory", "files", "buffered", "durable", "device", "direct device"])
async def store(request, tmp_path, anyio_backend):
    if request.param == "memory":
        yield MemoryStore(capacity_bytes=4 * MIB, max_object_bytes=LARGEST)
        return
    async with AsyncExitStack() as stack:
        device = None
        if request.param in ("device", "direct device"):
            is_direct = request.param == "direct device"
            device = stack.enter_context(MemoryDevice(max_command_bytes=16 * KIB, is_direct=is_direct))
        durability = "durable" if request.param == "durable" else "relaxed"
        io = "buffered" if request.param == "buffered" else "auto"  # "files": direct where tests have a disk
        settings = config(tmp_path / "kv", max_object_bytes=LARGEST, durability=durability, io=io)
        yield await stack.enter_async_context(SegmentStore.open(settings, device=device))


def test_status_bytes_are_the_protocol_s():
    assert all(ErrorCode[status.name] == status for status in Status)


@pytest.mark.parametrize("length", SIZES)
async def test_what_was_put_comes_back(store: ObjectStore, length):
    data = payload("object", length)
    assert store.exist(NAMESPACE, [key(1)]) == bytes([MISS])
    assert await put(store, key(1), data) == Status.OK
    assert store.exist(NAMESPACE, [key(1)]) == bytes([Status.OK])
    assert await get(store, key(1)) == data
    buffer = bytearray(length + 3)
    leases = store.open_read(NAMESPACE, [key(1)])
    assert await store.read_into(leases, [memoryview(buffer)]) == bytes([Status.OK])
    assert buffer == data + bytes(3)
    assert leases[0].length == length
    assert leases[0].checksum == item(key(1), data).checksum
    leases[0].release()
    assert await store.check_many(NAMESPACE, [key(1), key(2)]) == bytes([Status.OK, MISS])
    assert store.stats().leases == 0


async def test_vectors_answer_in_order(store: ObjectStore):
    await put_all(store, {key(n): payload(n, 5000) for n in (1, 3, 5)})
    keys = [key(n) for n in range(7)]
    here = [1, 0, 1, 0, 1, 0, 1]
    assert store.exist(NAMESPACE, keys) == bytes(here)
    leases = store.open_read(NAMESPACE, keys)
    assert [lease is None for lease in leases] == [bool(n) for n in here]
    assert await store.verify([lease for lease in leases if lease]) == bytes(3)
    for lease in leases:
        if lease:
            lease.release()
    assert await store.check_many(NAMESPACE, keys) == bytes(here)
    assert await store.delete_many(NAMESPACE, keys) == bytes(here)
    assert store.exist(NAMESPACE, keys) == bytes([MISS] * 7)


async def test_empty_vectors(store: ObjectStore):
    assert store.exist(NAMESPACE, []) == b""
    assert store.open_read(NAMESPACE, []) == []
    assert await store.verify([]) == b""
    assert await store.read_into([], []) == b""
    assert await store.put_many(NAMESPACE, []) == b""
    assert await store.delete_many(NAMESPACE, []) == b""
    assert await store.check_many(NAMESPACE, []) == b""


async def test_namespaces_do_not_mix(store: ObjectStore):
    await put(store, key(1), b"here")
    assert await get(store, key(1), OTHER_NAMESPACE) == MISS
    await put(store, key(1), b"there", OTHER_NAMESPACE)
    assert await store.delete_many(NAMESPACE, [key(1)]) == bytes([Status.OK])
    assert await get(store, key(1), OTHER_NAMESPACE) == b"there"


async def test_damaged_on_the_way_in_is_refused(store: ObjectStore):
    await put(store, key(1), b"before")
    bad = PutItem(key=key(1), checksum=item(key(1), b"after").checksum ^ 1, data=memoryview(b"after"))
    good = item(key(2), b"good")
    assert await store.put_many(NAMESPACE, [bad, good]) == bytes([Status.CORRUPT, Status.OK])
    assert await get(store, key(1)) == b"before"
    assert await get(store, key(2)) == b"good"


async def test_too_large_is_refused_and_nothing_is_lost(store: ObjectStore):
    await put(store, key(1), b"before")
    items = [item(key(1), bytes(LARGEST + 1)), item(key(2), bytes(LARGEST)), item(key(3), bytes(8 * MIB))]
    statuses = await store.put_many(NAMESPACE, items)
    assert statuses == bytes([Status.TOO_LARGE, Status.OK, Status.TOO_LARGE])
    assert await get(store, key(1)) == b"before"
    assert store.max_object_bytes == LARGEST
    assert store.stats().evicted_objects == 0


async def test_short_buffer_is_told(store: ObjectStore):
    await put_all(store, {key(1): payload(1, 100), key(2): payload(2, 100)})
    leases = store.open_read(NAMESPACE, [key(1), key(2)])
    buffers = [bytearray(99), bytearray(100)]
    statuses = await store.read_into(leases, [memoryview(buffer) for buffer in buffers])
    assert statuses == bytes([Status.TOO_LARGE, Status.OK])
    assert buffers == [bytes(99), payload(2, 100)]
    for lease in leases:
        lease.release()


async def test_overwrite_replaces_but_not_under_a_reader(store: ObjectStore):
    old, new = payload("old", 50_000), payload("new", 60_000)
    await put(store, key(1), old)
    (reader,) = store.open_read(NAMESPACE, [key(1)])
    await put(store, key(1), new)
    assert await get(store, key(1)) == new
    assert await store.verify([reader]) == bytes([Status.OK])
    assert lease_bytes(reader) == old
    reader.release()
    assert store.stats().objects == 1
    assert store.stats().object_bytes == len(new)


async def test_one_vector_with_a_key_twice_keeps_the_last(store: ObjectStore):
    statuses = await store.put_many(NAMESPACE, [item(key(1), b"first"), item(key(1), b"last")])
    assert statuses == bytes(2)
    assert await get(store, key(1)) == b"last"
    assert store.stats().objects == 1


async def test_delete_waits_for_readers_and_new_readers_miss(store: ObjectStore):
    data = payload(1, 50_000)
    await put(store, key(1), data)
    first, second = store.open_read(NAMESPACE, [key(1), key(1)])
    deleted = anyio.Event()

    async def delete():
        assert await store.delete_many(NAMESPACE, [key(1)]) == bytes([Status.OK])
        deleted.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(delete)
        await wait_all_tasks_blocked()
        assert not deleted.is_set()
        assert await get(store, key(1)) == MISS
        # The key may be written again meanwhile; its new readers do not hold up the delete.
        await put(store, key(1), b"again")
        (later,) = store.open_read(NAMESPACE, [key(1)])
        first.release()
        first.release()
        await wait_all_tasks_blocked()
        assert not deleted.is_set()
        assert await store.verify([second]) == bytes([Status.OK])
        assert lease_bytes(second) == data
        second.release()
        await deleted.wait()
    assert lease_bytes(later) == b"again"
    later.release()


async def test_a_second_delete_waits_for_the_same_readers(store: ObjectStore):
    await put(store, key(1), b"object")
    (reader,) = store.open_read(NAMESPACE, [key(1)])
    done: list[bytes] = []

    async def delete():
        done.append(await store.delete_many(NAMESPACE, [key(1)]))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(delete)
        tasks.start_soon(delete)
        await wait_all_tasks_blocked()
        assert done == []
        reader.release()
    assert sorted(done) == [bytes([Status.OK]), bytes([Status.NOT_FOUND])]


async def test_a_deleter_who_leaves_holds_nothing(store: ObjectStore):
    await put(store, key(1), b"object")
    (reader,) = store.open_read(NAMESPACE, [key(1)])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(store.delete_many, NAMESPACE, [key(1)])
        await wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert store.exist(NAMESPACE, [key(1)]) == bytes([MISS])
    assert lease_bytes(reader) == b"object"
    reader.release()
    assert store.stats().leases == 0


async def test_eviction_takes_the_cold_and_spares_the_leased(store: ObjectStore):
    """Four times the capacity goes in. One object is leased all the time, one is read all the time."""
    await put_all(store, {key(0): payload(0, 100_000), key(1): payload(1, 100_000)})
    (pinned,) = store.open_read(NAMESPACE, [key(0)])
    for n in range(2, 162):
        assert await put(store, key(n), payload(n, 100_000)) == Status.OK
        assert await get(store, key(1)) == payload(1, 100_000)
        assert store.stats().used_bytes <= store.stats().capacity_bytes
    assert await get(store, key(0)) == payload(0, 100_000)
    assert await get(store, key(161)) == payload(161, 100_000)
    assert await get(store, key(2)) == MISS
    assert store.stats().evicted_objects > 100
    assert await store.verify([pinned]) == bytes([Status.OK])
    pinned.release()


async def test_all_leased_means_full_and_release_means_room(store: ObjectStore):
    leases = []
    status = Status.OK
    n = 0
    while status == Status.OK:
        n += 1
        status = await put(store, key(n), payload(n, 100_000))
        leases += [lease for lease in store.open_read(NAMESPACE, [key(n)]) if lease]
    assert status == Status.CAPACITY_EXHAUSTED
    assert len(leases) == n - 1 > 20
    assert await store.verify(leases) == bytes(n - 1)
    for lease in leases:
        lease.release()
    assert await put(store, key(n), payload(n, 100_000)) == Status.OK


async def test_cancelled_puts_are_whole_or_absent(store: ObjectStore):
    """Cancel a put at each of its first checkpoints; whatever comes out, the store stays sound."""
    outcomes = set()
    for n in range(12):
        data = payload(n, 40_000)
        with anyio.CancelScope() as scope:

            async def cancel_after(checkpoints: int, scope: anyio.CancelScope = scope) -> None:
                for _ in range(checkpoints):
                    await checkpoint()
                scope.cancel()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(cancel_after, n)
                await store.put_many(NAMESPACE, [item(key(n), data)])
        found = await get(store, key(n))
        assert found in (data, MISS)
        outcomes.add(found == data)
        assert await put(store, key(n), data) == Status.OK
        assert await get(store, key(n)) == data
    assert True in outcomes
    assert store.stats().objects == 12
    assert store.stats().object_bytes == 12 * 40_000
    # Nothing is left counted as in flight: everything can be evicted.
    for n in range(100, 200):
        assert await put(store, key(n), payload(n, 100_000)) == Status.OK


async def test_cancelled_before_it_began(store: ObjectStore):
    await put(store, key(1), b"before")
    before = store.stats()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await store.put_many(NAMESPACE, [item(key(1), b"after")])
    assert scope.cancelled_caught
    assert await get(store, key(1)) == b"before"
    leases = store.open_read(NAMESPACE, [key(1)])
    for verb in (store.verify, lambda leases: store.read_into(leases, [memoryview(bytearray(9))])):
        with anyio.CancelScope() as scope:
            scope.cancel()
            await verify_nothing(verb, leases)
        assert scope.cancelled_caught
    leases[0].release()
    with anyio.CancelScope() as scope:
        scope.cancel()
        await store.check_many(NAMESPACE, [key(1)])
    assert scope.cancelled_caught
    assert store.stats() == before


async def verify_nothing(verb, leases) -> None:
    await verb(leases)
    raise AssertionError("not cancelled")


async def test_writers_of_one_key_leave_one_whole_object(store: ObjectStore):
    versions = [payload(n, 30_000 + 1000 * n) for n in range(16)]
    async with anyio.create_task_group() as tasks:
        for data in versions:
            tasks.start_soon(put, store, key(1), data)
    assert await get(store, key(1)) in versions
    assert store.stats().objects == 1


async def test_flush_returns(store: ObjectStore):
    await put(store, key(1), b"object")
    await store.flush()
    assert await get(store, key(1)) == b"object"


async def test_ten_thousand_keys(store: ObjectStore):
    await put_all(store, {key(n): b"" for n in range(0, 300, 3)})
    keys = [key(n) for n in range(10_000)]
    answers = store.exist(NAMESPACE, keys)
    assert len(answers) == 10_000
    assert [n for n, status in enumerate(answers) if status == Status.OK] == list(range(0, 300, 3))


# Memory and files of other processes, who do with them what they like


@contextmanager
def foreign_memory(size: int):
    """A file that somebody else may cut off, and a mapping of it that only system calls may touch."""
    fd = os.memfd_create("foreign")
    os.ftruncate(fd, size)
    mapping = mmap.mmap(fd, size)
    view = memoryview(mapping)
    try:
        yield fd, view
    finally:
        view.release()
        mapping.close()
        os.close(fd)


@pytest.mark.parametrize("length", SIZES)
async def test_read_into_memory_that_is_not_looked_at(store: ObjectStore, length):
    data = payload("object", length)
    await put(store, key(1), data)
    with foreign_memory(1 << 20) as (fd, memory):
        leases = store.open_read(NAMESPACE, [key(1), key(1)])
        buffers = [memory[8192 : 8192 + length], memory[: max(0, length - 1)]]
        statuses = await store.read_into(leases, buffers, is_verified=False)
        assert statuses == bytes([Status.OK, Status.TOO_LARGE if length else Status.OK])
        assert os.pread(fd, length, 8192) == data
        for each in (*leases, *buffers):
            each.release()
    assert store.stats().leases == 0


@pytest.mark.parametrize("left", [0, 4096, 40_960])
async def test_memory_that_was_cut_off_is_refused_and_the_object_stays(store: ObjectStore, left):
    objects = {key(n): payload(n, 20_000) for n in range(4)}
    await put_all(store, objects)
    with foreign_memory(4 * 20_480) as (fd, memory):
        leases = store.open_read(NAMESPACE, list(objects))
        buffers = [memory[n * 20_480 : n * 20_480 + 20_000] for n in range(4)]
        os.ftruncate(fd, left)
        whole = left // 20_480
        statuses = await store.read_into(leases, buffers, is_verified=False)
        assert statuses == bytes(whole) + bytes([Status.REFUSED]) * (4 - whole)
        for each in (*leases, *buffers):
            each.release()
    assert await store.check_many(NAMESPACE, list(objects)) == bytes(4)
    assert store.stats().faulted_objects == store.stats().corrupt_objects == 0


def extent_item(name: bytes, fd: int, offset: int, data: bytes, length: int | None = None) -> PutItem:
    length = len(data) if length is None else length
    return PutItem(key=name, checksum=item(name, data).checksum, data=Extent(fd, offset, length))


@pytest.mark.parametrize("length", SIZES)
async def test_put_from_a_file(store: ObjectStore, length):
    data = payload("object", length)
    with foreign_memory(1 << 20) as (fd, _):
        os.pwrite(fd, data, 12_345)
        assert await store.put_many(NAMESPACE, [extent_item(key(1), fd, 12_345, data)]) == bytes(1)
        os.pwrite(fd, bytes(length), 12_345)
    assert await get(store, key(1)) == data


async def test_put_from_a_file_that_holds_something_else_or_too_little(store: ObjectStore):
    await put(store, key(1), b"before")
    large, small = payload("large", 100_000), payload("small", 1000)
    with foreign_memory(1 << 20) as (fd, _):
        os.pwrite(fd, large, 0)
        os.pwrite(fd, small, 200_000)
        os.ftruncate(fd, 201_000)
        items = [
            extent_item(key(1), fd, 1, large),  # not the bytes that were promised
            extent_item(key(2), fd, 0, large),
            extent_item(key(3), fd, 200_500, small),  # half of it is not there
            extent_item(key(4), fd, 150_000, large),
            extent_item(key(5), fd, 1 << 62, small),
            extent_item(key(6), fd, 200_000, small),
            extent_item(key(7), fd, 0, small, LARGEST + 1),
        ]
        statuses = await store.put_many(NAMESPACE, items)
    refused, corrupt = Status.REFUSED, Status.CORRUPT
    assert list(statuses) == [corrupt, 0, refused, refused, refused, 0, Status.TOO_LARGE]
    assert await get(store, key(1)) == b"before"
    assert await get(store, key(2)) == large
    assert await get(store, key(6)) == small
    assert store.stats().objects == 3


async def test_what_is_stored_is_what_was_hashed(store: ObjectStore):
    """Somebody writes to the file all the time: whatever is stored is one of the versions, or nothing is."""
    versions = [bytes([n]) * 150_000 for n in range(2)]
    outcomes = set()
    with foreign_memory(150_000) as (fd, _):
        is_over = threading.Event()

        def scribble() -> None:
            while not is_over.is_set():
                for version in versions:
                    os.pwrite(fd, version, 0)

        writer = threading.Thread(target=scribble)
        writer.start()
        try:
            for n in range(60):
                (status,) = await store.put_many(NAMESPACE, [extent_item(key(n), fd, 0, versions[n % 2])])
                assert status in (Status.OK, Status.CORRUPT)
                found = await get(store, key(n))
                assert found == (versions[n % 2] if status == Status.OK else MISS)
                outcomes.add(status)
        finally:
            is_over.set()
            writer.join()
    assert outcomes


# ---------------------------------------------------------------- holds


async def start_delete(tasks, store, keys) -> list[bytes]:
    """A delete in a task of its own that has got as far as it can; its answer, when it comes, in the list."""
    answers: list[bytes] = []

    async def delete() -> None:
        answers.append(await store.delete_many(NAMESPACE, keys))

    tasks.start_soon(delete)
    await wait_all_tasks_blocked()
    return answers


async def test_a_delete_waits_for_the_holds_it_met_and_nobody_else_notices(store: ObjectStore):
    await put_all(store, {key(n): payload(n, 5000) for n in range(3)})
    statuses, first = store.hold(NAMESPACE, [key(0), key(9), key(1)])
    assert statuses == bytes([Status.OK, MISS, Status.OK])
    _, second = store.hold(NAMESPACE, [key(0)])
    assert (first.items, second.items, store.stats().held_items) == (2, 1, 3)
    async with anyio.create_task_group() as tasks:
        answers = await start_delete(tasks, store, [key(0), key(2), key(9), key(0)])
        assert store.exist(NAMESPACE, [key(0), key(2)]) == bytes([Status.OK, MISS])
        assert await get(store, key(0)) == payload(0, 5000)
        # While it waits nobody else gets a hold, or it might wait for ever.
        statuses, third = store.hold(NAMESPACE, [key(0), key(1)])
        assert statuses == bytes([MISS, Status.OK])
        assert third.items == 1
        assert store.hold(OTHER_NAMESPACE, [key(0)])[0] == bytes([MISS])
        first.release()
        first.release()
        await wait_all_tasks_blocked()
        assert answers == []
        second.release()
        assert store.exist(NAMESPACE, [key(0)]) == bytes([MISS]), "taken when the last hold ends"
    assert answers == [bytes([Status.OK, Status.OK, MISS, MISS])]
    assert store.stats().held_items == 1
    third.release()
    assert store.stats().held_items == 0
    assert store.hold(NAMESPACE, [])[0] == b""


async def test_then_the_delete_waits_for_readers_too(store: ObjectStore):
    await put(store, key(1), payload(1, 5000))
    _, hold = store.hold(NAMESPACE, [key(1)])
    (early,) = store.open_read(NAMESPACE, [key(1)])
    async with anyio.create_task_group() as tasks:
        answers = await start_delete(tasks, store, [key(1)])
        (late,) = store.open_read(NAMESPACE, [key(1)])
        hold.release()
        await put(store, key(1), b"again")
        (later,) = store.open_read(NAMESPACE, [key(1)])
        early.release()
        await wait_all_tasks_blocked()
        assert answers == []
        assert lease_bytes(late) == payload(1, 5000)
        late.release()
    assert answers == [bytes([Status.OK])]
    assert lease_bytes(later) == b"again"
    later.release()


async def test_two_deletes_of_what_is_held(store: ObjectStore):
    await put_all(store, {key(1): b"one", key(2): b"two"})
    _, first = store.hold(NAMESPACE, [key(1)])
    _, second = store.hold(NAMESPACE, [key(2)])
    async with anyio.create_task_group() as tasks:
        both = await start_delete(tasks, store, [key(1), key(2)])
        one = await start_delete(tasks, store, [key(1)])
        first.release()
        await until(lambda: one)
        assert (both, one) == ([], [bytes([MISS])])
        assert store.exist(NAMESPACE, [key(1), key(2)]) == bytes([MISS, Status.OK])
        second.release()
    assert both == [bytes(2)]


async def test_a_deleter_who_leaves_before_the_hold_ends_deletes_nothing(store: ObjectStore):
    await put(store, key(1), b"object")
    _, hold = store.hold(NAMESPACE, [key(1)])
    async with anyio.create_task_group() as tasks:
        await start_delete(tasks, store, [key(1)])
        tasks.cancel_scope.cancel()
    _, again = store.hold(NAMESPACE, [key(1)])
    assert again.items == 1
    hold.release()
    again.release()
    assert await get(store, key(1)) == b"object"
    assert store.stats().held_items == 0


async def test_what_is_held_can_be_overwritten(store: ObjectStore):
    await put(store, key(1), b"old")
    _, hold = store.hold(NAMESPACE, [key(1)])
    async with anyio.create_task_group() as tasks:
        answers = await start_delete(tasks, store, [key(1)])
        await put(store, key(1), b"new")
        assert await get(store, key(1)) == b"new"
        hold.release()
    assert answers == [bytes([Status.OK])]
    assert await get(store, key(1)) == MISS


async def test_eviction_spares_the_held(store: ObjectStore):
    """Four times the capacity goes in. What is held stays, though nobody reads it, and is the same after."""
    keys = [key(n) for n in range(10)]
    await put_all(store, {name: payload(n, 100_000) for n, name in enumerate(keys)})
    statuses, hold = store.hold(NAMESPACE, keys)
    assert statuses == bytes(10)
    for n in range(10, 170):
        assert await put(store, key(n), payload(n, 100_000)) == Status.OK
        assert store.exist(NAMESPACE, keys) == bytes(10)
        assert store.stats().used_bytes <= store.stats().capacity_bytes
    for n, name in enumerate(keys):
        assert await get(store, name) == payload(n, 100_000)
    hold.release()
    for n in range(170, 250):
        assert await put(store, key(n), payload(n, 100_000)) == Status.OK
        assert await get(store, key(n)) == payload(n, 100_000)
    assert store.stats().evicted_objects > 100
    assert MISS in store.exist(NAMESPACE, keys), "they were read once, what came after them too"


async def test_all_held_means_full_and_release_means_room(store: ObjectStore):
    holds = []
    status = Status.OK
    n = 0
    while status == Status.OK:
        n += 1
        status = await put(store, key(n), payload(n, 100_000))
        holds.append(store.hold(NAMESPACE, [key(n)])[1])
    assert status == Status.CAPACITY_EXHAUSTED
    assert n > 20
    assert store.exist(NAMESPACE, [key(i) for i in range(1, n)]) == bytes(n - 1)
    assert await put(store, key(n), payload(n, 100_000)) == Status.CAPACITY_EXHAUSTED
    # One in two stays held: every segment may have one, and there is room all the same.
    for hold in holds[::2]:
        hold.release()
    left = [key(i + 1) for i in range(1, n - 1, 2)]
    for more in range(n, n + 60):
        assert await put(store, key(more), payload(more, 100_000)) == Status.OK
        assert store.exist(NAMESPACE, left) == bytes(len(left))
    for hold in holds:
        hold.release()
    assert store.stats().held_items == 0


async def test_ten_thousand_keys_are_held_and_only_counted_when_somebody_asks(store: ObjectStore):
    await put_all(store, {key(n): b"" for n in range(0, 300, 3)})
    keys = tuple(key(n) for n in range(10_000))
    statuses, hold = store.hold(NAMESPACE, keys)
    assert statuses == store.exist(NAMESPACE, keys)
    assert hold.items == store.stats().held_items == 100
    async with anyio.create_task_group() as tasks:
        answers = await start_delete(tasks, store, [key(3), key(4)])
        assert answers == []
        hold.release()
    assert answers == [bytes([Status.OK, MISS])]


async def test_a_delete_cancelled_at_any_moment_is_taken_or_not_and_holds_nothing(store: ObjectStore):
    outcomes = []
    at, was_cancelled = 0, True
    while was_cancelled:
        at += 1
        await put(store, key(1), b"object")
        _, hold = store.hold(NAMESPACE, [key(1)])
        async with anyio.create_task_group() as tasks:

            async def let_go(hold: Hold = hold) -> None:
                await wait_all_tasks_blocked()
                hold.release()

            tasks.start_soon(let_go)
            was_cancelled, _ = await cancel_at(store.delete_many(NAMESPACE, [key(1)]), at)
            if was_cancelled:
                tasks.cancel_scope.cancel()
        outcomes.append(store.exist(NAMESPACE, [key(1)])[0])
        hold.release()
        statuses, again = store.hold(NAMESPACE, [key(1)])
        assert statuses == bytes(outcomes[-1:]), "nobody waits any more"
        again.release()
        assert store.stats().held_items == store.stats().leases == 0
    assert outcomes[0] == Status.OK, "it was held when its deleter left"
    assert outcomes[-1] == MISS
