"""A device that is full, fails, lies or hangs; slow readers. Typed answers, and the store goes on."""

import errno
import os
import threading

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from adp_gateway.device.file import FileDevice
from adp_gateway.device.memory import Command, Kind, MemoryDevice
from adp_gateway.errors import DeviceFault, DeviceFull
from adp_gateway.store.base import Status
from adp_gateway.store.segments import SegmentStore
from gateway.objects import (
    KIB,
    MIB,
    NAMESPACE,
    after_kill,
    config,
    disk_bytes,
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
DATA, LOG = "seg-00000001.data", "seg-00000001.log"


class Failing:
    """Makes commands of a kind, on files whose name ends so, fail with an error, while it is switched on."""

    def __init__(self, kind: Kind, suffix: str, error: Exception) -> None:
        self.kind, self.suffix, self.error = kind, suffix, error
        self.is_on = True
        self.failures = 0

    def __call__(self, command: Command) -> None:
        if self.is_on and command.kind is self.kind and command.name.endswith(self.suffix):
            self.failures += 1
            raise self.error


@pytest.fixture
def device():
    with MemoryDevice(max_command_bytes=16 * KIB) as device:
        yield device


FULL = (DeviceFull("no space left on device"), Status.CAPACITY_EXHAUSTED)
FAULT = (DeviceFault("input/output error"), Status.GATEWAY_FAULT)


@pytest.mark.parametrize("durability", ["relaxed", "durable"])
@pytest.mark.parametrize(("error", "expected"), [FULL, FAULT], ids=["ENOSPC", "EIO"])
@pytest.mark.parametrize(
    ("kind", "suffix"),
    [
        (Kind.WRITE, ".data"),
        (Kind.WRITE, ".log"),
        (Kind.SYNC, ".data"),
        (Kind.SYNC, ".log"),
        (Kind.ALLOCATE, ".data"),
        (Kind.CREATE, ".log"),
    ],
    ids=lambda value: getattr(value, "value", value),
)
async def test_a_put_that_the_device_refuses(device, kind, suffix, error, expected, durability):
    """The key keeps its old value, reads go on, and puts work again as soon as the device does."""
    settings = config("unused", durability=durability)
    async with SegmentStore.open(settings, device=device) as store:
        await put(store, key(1), payload("old", 100_000))
        device.before = failing = Failing(kind, suffix, error)
        big = payload("new", 200_000)  # needs a new segment
        small = payload("small", 100)  # does not
        statuses = {await put(store, key(1), big), await put(store, key(1), small)}
        if failing.failures:
            assert expected in statuses
            assert statuses <= {expected, Status.OK}
        else:
            assert (kind, durability) == (Kind.SYNC, "relaxed")
        value = await get(store, key(1))
        assert value in ({payload("old", 100_000), small} if failing.failures else {small})
        failing.is_on = False
        assert await put(store, key(1), big) == Status.OK
        assert await get(store, key(1)) == big
        assert await put(store, key(2), small) == Status.OK
        assert await store.delete_many(NAMESPACE, [key(2)]) == bytes(1)
        device.before = None
        with after_kill(device) as killed:
            async with SegmentStore.open(settings, device=killed) as reopened:
                assert [await get(reopened, key(1)), await get(reopened, key(2))] == [big, MISS]
    assert device.used_bytes() <= 4 * MIB


async def test_a_put_that_was_refused_does_not_come_back(device):
    """The journal sync failed, so its record may be there. It has to be void, also after a restart."""
    settings = config("unused", durability="durable")
    async with SegmentStore.open(settings, device=device) as store:
        await put(store, key(1), b"before")
        device.before = failing = Failing(Kind.SYNC, ".log", FAULT[0])
        assert await put(store, key(2), b"refused") == Status.GATEWAY_FAULT
        failing.is_on = False
        assert await put(store, key(3), b"after") == Status.OK
    async with SegmentStore.open(settings, device=device) as store:
        assert [await get(store, key(n)) for n in (1, 2, 3)] == [b"before", MISS, b"after"]


async def test_a_torn_journal_append_is_cut_before_anything_else_is_written(device):
    """The first of two records got there before the device failed; neither may ever count."""
    async with SegmentStore.open(config("unused"), device=device) as store:
        await put(store, key(1), b"one")
        log = device.open(LOG)

        def tear(command: Command) -> None:
            if command.kind is Kind.WRITE and command.name == LOG:
                device.before = Failing(Kind.TRUNCATE, ".log", FAULT[0])
                log.write(memoryview(command.data)[:192], command.position)
                raise FAULT[0]

        device.before = tear
        statuses = await store.put_many(NAMESPACE, [item(key(2), b"two"), item(key(3), b"three")])
        assert statuses == bytes([Status.GATEWAY_FAULT] * 2)
        device.before = None
        assert await store.delete_many(NAMESPACE, [key(1)]) == bytes([Status.OK])
        log.close()
    async with SegmentStore.open(config("unused"), device=device) as store:
        assert store.exist(NAMESPACE, [key(1), key(2), key(3)]) == bytes([MISS] * 3)


async def test_a_delete_that_cannot_be_recorded_says_so_and_is_recorded_later(device):
    async with SegmentStore.open(config("unused"), device=device) as store:
        await put_all(store, {key(1): b"one", key(2): b"two"})
        device.before = failing = Failing(Kind.WRITE, ".log", FAULT[0])
        statuses = await store.delete_many(NAMESPACE, [key(1), key(3)])
        assert statuses == bytes([Status.GATEWAY_FAULT, MISS])
        assert await get(store, key(1)) == MISS
        failing.is_on = False
        assert await store.delete_many(NAMESPACE, [key(2)]) == bytes([Status.OK])
    async with SegmentStore.open(config("unused"), device=device) as store:
        assert store.exist(NAMESPACE, [key(1), key(2)]) == bytes([MISS] * 2)


async def test_no_segment_goes_while_an_older_version_is_not_killed(device):
    """Version 1 cannot be voided. Version 2's segment must not go: a restart would bring version 1 back."""
    async with SegmentStore.open(config("unused"), device=device) as store:
        await put_all(store, {key(1): payload("v1", 100_000), key(2): b"pinned"})
        (pin,) = store.open_read(NAMESPACE, [key(2)])
        await put(store, key(3), payload(3, 200_000))
        device.before = failing = Failing(Kind.WRITE, LOG, FAULT[0])
        assert await put(store, key(1), payload("v2", 20_000)) == Status.OK
        status = Status.OK
        for n in range(100, 160):
            status = await put(store, key(n), payload(n, 200_000))
            if status != Status.OK:
                break
        assert status == Status.CAPACITY_EXHAUSTED
        assert failing.failures
        with after_kill(device) as killed:
            async with SegmentStore.open(config("unused"), device=killed) as reopened:
                assert await get(reopened, key(1)) == payload("v2", 20_000)
        failing.is_on = False
        assert await put(store, key(200), payload(200, 200_000)) == Status.OK
        pin.release()


async def test_segments_that_cannot_be_removed_still_count(device):
    async with SegmentStore.open(config("unused"), device=device) as store:
        device.before = failing = Failing(Kind.REMOVE, ".data", FAULT[0])
        statuses = [await put(store, key(n), payload(n, 200_000)) for n in range(30)]
        assert set(statuses) == {Status.OK, Status.CAPACITY_EXHAUSTED}
        assert device.used_bytes() <= store.stats().used_bytes <= 4 * MIB
        failing.is_on = False
        assert await put(store, key(99), payload(99, 200_000)) == Status.OK
        assert device.used_bytes() <= store.stats().used_bytes <= 4 * MIB


async def test_what_cannot_be_read_is_told_once_and_then_a_miss_that_can_be_written_again(device):
    async with SegmentStore.open(config("unused"), device=device) as store:
        await put_all(store, {key(n): payload(n, 50_000) for n in range(3)})
        device.before = failing = Failing(Kind.READ, ".data", FAULT[0])
        assert await get(store, key(0)) == Status.GATEWAY_FAULT
        assert await get(store, key(0)) == MISS
        assert await store.check_many(NAMESPACE, [key(1)]) == bytes([Status.GATEWAY_FAULT])
        leases = store.open_read(NAMESPACE, [key(2)])
        buffers = [memoryview(bytearray(50_000))]
        assert await store.read_into(leases, buffers) == bytes([Status.GATEWAY_FAULT])
        leases[0].release()
        failing.is_on = False
        assert store.stats().faulted_objects == 3
        assert await put(store, key(0), payload("again", 50_000)) == Status.OK
        assert await get(store, key(0)) == payload("again", 50_000)
    async with SegmentStore.open(config("unused"), device=device) as store:
        assert await get(store, key(0)) == payload("again", 50_000)
        assert await get(store, key(1)) == payload(1, 50_000), "the fault has passed"


async def test_a_segment_whose_journal_cannot_be_read_is_dropped_for_good(device):
    """It takes no room, and no better day brings back what was deleted meanwhile."""
    async with SegmentStore.open(config("unused"), device=device) as store:
        for n in range(6):
            await put(store, key(n), payload(n, 200_000))
    device.before = Failing(Kind.READ, "2.log", FAULT[0])
    async with SegmentStore.open(config("unused"), device=device) as store:
        assert store.recovery.unreadable_segments == 1
        assert store.exist(NAMESPACE, [key(n) for n in range(6)]) == bytes([0, MISS, 0, 0, 0, 0])
        assert device.used_bytes() <= store.stats().used_bytes <= 6 * 256 * KIB
        assert await store.delete_many(NAMESPACE, [key(1)]) == bytes([MISS])
        device.before = None
    async with SegmentStore.open(config("unused"), device=device) as store:
        assert store.exist(NAMESPACE, [key(n) for n in range(6)]) == bytes([0, MISS, 0, 0, 0, 0])


async def test_an_unreadable_segment_that_cannot_be_removed_counts(device):
    async with SegmentStore.open(config("unused"), device=device) as store:
        for n in range(2):
            await put(store, key(n), payload(n, 200_000))
    refused = Failing(Kind.READ, "1.log", FAULT[0]), Failing(Kind.REMOVE, "1.data", FAULT[0])

    def before(command: Command) -> None:
        for each in refused:
            each(command)

    device.before = before
    async with SegmentStore.open(config("unused"), device=device) as store:
        assert store.exist(NAMESPACE, [key(0), key(1)]) == bytes([MISS, 0])
        assert device.used_bytes() <= store.stats().used_bytes
        device.before = None
    async with SegmentStore.open(config("unused"), device=device) as store:
        assert store.recovery.removed_files == 1
        assert store.exist(NAMESPACE, [key(0), key(1)]) == bytes([MISS, 0])


async def test_too_few_descriptors_cost_no_object(device):
    """That is not the device's fault: the start fails, and the next one finds everything."""
    async with SegmentStore.open(config("unused"), device=device) as store:
        for n in range(6):
            await put(store, key(n), payload(n, 200_000))

    def refuse(command: Command) -> None:
        if command.kind is Kind.READ and command.name.startswith("seg"):
            cause = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            raise DeviceFault("open: Too many open files") from cause

    device.before = refuse
    with pytest.raises(DeviceFault, match="Too many open files"):
        async with SegmentStore.open(config("unused"), device=device):
            pass
    device.before = None
    async with SegmentStore.open(config("unused"), device=device) as store:
        assert store.exist(NAMESPACE, [key(n) for n in range(6)]) == bytes(6)


async def test_flush_says_when_the_device_refuses(device):
    async with SegmentStore.open(config("unused"), device=device) as store:
        await put(store, key(1), b"object")
        device.before = failing = Failing(Kind.SYNC, ".data", FAULT[0])
        with pytest.raises(DeviceFault):
            await store.flush()
        with pytest.raises(DeviceFault):
            await store.flush()
        failing.is_on = False
        await store.flush()


async def test_short_writes_are_finished(tmp_path, monkeypatch):
    real = os.pwrite
    monkeypatch.setattr(
        os, "pwrite", lambda fd, data, offset: real(fd, data[: max(1, len(data) // 2)], offset)
    )
    async with SegmentStore.open(config(tmp_path)) as store:
        assert await put(store, key(1), payload(1, 100_000)) == Status.OK
        assert await get(store, key(1)) == payload(1, 100_000)
    async with SegmentStore.open(config(tmp_path)) as store:
        assert await get(store, key(1)) == payload(1, 100_000)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.ENOSPC, Status.CAPACITY_EXHAUSTED),
        (errno.EDQUOT, Status.CAPACITY_EXHAUSTED),
        (errno.EIO, Status.GATEWAY_FAULT),
    ],
)
async def test_operating_system_errors_become_statuses(tmp_path, monkeypatch, code, expected):
    async with SegmentStore.open(config(tmp_path)) as store:
        await put(store, key(1), b"before")

        def refuse(*_):
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", refuse)
            assert await put(store, key(2), b"refused") == expected
            assert await get(store, key(1)) == b"before"
        assert await put(store, key(2), b"taken") == Status.OK


def test_a_device_that_is_really_full(tmp_path):
    (tmp_path / "full").symlink_to("/dev/full")
    device = FileDevice(tmp_path, max_command_bytes=4096)
    file = device.open("full")
    with pytest.raises(DeviceFull, match="write full: No space left on device"):
        file.write(memoryview(b"x"), 0)
    file.close()
    with pytest.raises(DeviceFault, match="Bad file descriptor"):
        file.write(memoryview(b"x"), 0)


def flip(path, position: int, mask: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ mask]))


def swap(path, first: int, second: int, length: int) -> None:
    with path.open("r+b") as file:
        file.seek(first)
        one = file.read(length)
        file.seek(second)
        two = file.read(length)
        file.seek(first)
        file.write(two)
        file.seek(second)
        file.write(one)


class Reopenable:
    """A store that a test can close and open again."""

    def __init__(self, settings) -> None:
        self._settings = settings

    async def __aenter__(self):
        await self.open()
        return self

    async def __aexit__(self, *_):
        await self.close()

    async def open(self) -> SegmentStore:
        self._manager = SegmentStore.open(self._settings)
        self.store = await self._manager.__aenter__()
        return self.store

    async def close(self) -> None:
        manager, self._manager = self._manager, None
        if manager is not None:
            await manager.__aexit__(None, None, None)


@pytest.mark.parametrize("verb", ["verify", "read_into", "check_many", "after a restart"])
async def test_b43_damage_of_the_same_size_is_never_served(tmp_path, verb):
    """A flipped bit, two pages swapped, two fragments of one page swapped: corrupt once, then a miss."""
    size, step = 56 * KIB, 56 * KIB
    settings = config(tmp_path, segment_bytes=2 * MIB, capacity_bytes=8 * MIB)
    objects = {key(n): payload(n, size) for n in range(20)}
    async with Reopenable(settings) as opened:
        store = opened.store
        await put_all(store, objects)
        if verb == "after a restart":
            await opened.close()
        data = tmp_path / DATA
        flip(data, 3 * step + 20_000)
        swap(data, 5 * step, 6 * step, size)
        swap(data, 8 * step, 8 * step + 16 * KIB, 16 * KIB)
        if verb == "after a restart":
            store = await opened.open()
        bad = {3, 5, 6, 8}
        expected = bytes([Status.CORRUPT if n in bad else Status.OK for n in range(20)])
        names = list(objects)
        if verb == "check_many":
            assert await store.check_many(NAMESPACE, names) == expected
        else:
            leases = store.open_read(NAMESPACE, names)
            if verb == "read_into":
                buffers = [bytearray(size) for _ in names]
                assert await store.read_into(leases, [memoryview(buffer) for buffer in buffers]) == expected
            else:
                assert await store.verify(leases) == expected
                assert await store.verify(leases) == expected, "whoever still has a lease is told as well"
            for lease in leases:
                lease.release()
        assert store.stats().corrupt_objects == 4, "each once"
        assert store.exist(NAMESPACE, names) == bytes([n in bad for n in range(20)])
        for n, name in enumerate(names):
            assert await get(store, name) == (MISS if n in bad else objects[name])
        assert await put(store, key(3), objects[key(3)]) == Status.OK
        assert await get(store, key(3)) == objects[key(3)]
        # Dropped for good: a restart does not bring them back.
        await opened.close()
        store = await opened.open()
        assert store.exist(NAMESPACE, names) == bytes([n in bad - {3} for n in range(20)])


async def test_b43_a_shortened_data_file_is_a_miss(tmp_path):
    async with SegmentStore.open(config(tmp_path)) as store:
        await put_all(store, {key(n): payload(n, 20_000) for n in range(3)})
        os.truncate(tmp_path / DATA, 2 * 20_480 + 19_999)
        assert await get(store, key(2)) == Status.CORRUPT
        os.truncate(tmp_path / DATA, 20_480 + 1)
    async with SegmentStore.open(config(tmp_path)) as store:
        assert store.recovery.missing_payloads == 1
        assert [await get(store, key(n)) for n in range(3)] == [payload(0, 20_000), MISS, MISS]


async def test_b43_a_read_that_hangs_does_not_hold_up_the_others(device):
    async with SegmentStore.open(config("unused"), device=device) as store:
        await put_all(store, {key(n): payload(n, 5000) for n in range(4)})
        stuck, go = threading.Event(), threading.Event()

        def hang(command: Command) -> None:
            if command.kind is Kind.READ and not stuck.is_set():
                stuck.set()
                go.wait(10)

        device.before = hang
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(get, store, key(0))
                await anyio.to_thread.run_sync(stuck.wait, 10)
                assert await get(store, key(1)) == payload(1, 5000)
                assert await put(store, key(5), b"written meanwhile") == Status.OK
                go.set()
        finally:
            go.set()


class Hanging:
    """Makes reads of data hang, all or those at one place, until the test lets them go."""

    def __init__(self, device: MemoryDevice, offset: int | None = None) -> None:
        self.stuck = threading.Semaphore(0)
        self._go = threading.Event()
        self._offset = offset
        self._device = device

    def __enter__(self):
        self._device.before = self
        return self

    def __exit__(self, *_):
        self.let_go()

    def __call__(self, command: Command) -> None:
        if command.kind is Kind.READ and self._offset in (None, command.position) and not self._go.is_set():
            self.stuck.release()
            assert self._go.wait(10)

    async def wait_stuck(self) -> None:
        assert await anyio.to_thread.run_sync(self.stuck.acquire, True, 10)

    def let_go(self) -> None:
        self._go.set()


def impatient(**changes):
    return config("unused", io_seconds=0.5, **changes)


async def came_back(store: SegmentStore) -> None:
    """Every thread that somebody has given up is back."""
    await until(lambda: store.stats() and not store._reads.late)


async def test_b43_a_hung_read_fails_at_its_limit_and_other_reads_go_on(device):
    """What hangs is dropped; what stands behind it in the batch, and was not tried, is not."""
    async with SegmentStore.open(impatient(), device=device) as store:
        await put_all(store, {key(n): payload(n, 5000) for n in range(4)})
        with Hanging(device, offset=2 * 4096) as hanging:
            statuses = await store.check_many(NAMESPACE, [key(n) for n in range(4)])
            assert statuses == bytes([Status.OK] + 3 * [Status.GATEWAY_FAULT])
            assert store.exist(NAMESPACE, [key(n) for n in range(4)]) == bytes([0, MISS, 0, 0])
            assert store.stats().faulted_objects == 1
            for n in (0, 2, 3):
                assert await get(store, key(n)) == payload(n, 5000)
            assert await put(store, key(1), b"again") == Status.OK
            assert await get(store, key(1)) == b"again"
            hanging.let_go()
        await came_back(store)
        assert await store.check_many(NAMESPACE, [key(n) for n in range(4)]) == bytes(4)


async def test_b43_what_a_hung_read_uses_stays_until_it_is_back(device):
    """Its segment is not evicted, however full the store gets; its leases do not hold up a delete."""
    async with SegmentStore.open(impatient(), device=device) as store:
        await put_all(store, {key(0): payload(0, 5000), key(1): payload(1, 100_000)})
        with Hanging(device, offset=0) as hanging:
            assert await get(store, key(0)) == Status.GATEWAY_FAULT
            assert await store.delete_many(NAMESPACE, [key(0), key(1)]) == bytes([MISS, Status.OK])
            for n in range(40):
                assert await put(store, key(2 + n % 20), payload(n, 200_000)) == Status.OK
            assert {DATA, LOG} <= set(device.names())
            hanging.let_go()
        await came_back(store)
        for n in range(40):
            assert await put(store, key(2 + n % 20), payload(n, 200_000)) == Status.OK
        assert not {DATA, LOG} & set(device.names())


async def test_b43_when_every_thread_is_stuck_reads_fail_at_once_and_nothing_is_dropped(device, caplog):
    async with SegmentStore.open(impatient(), device=device) as store:
        await put_all(store, {key(n): payload(n, 5000) for n in range(6)})
        with Hanging(device) as hanging:
            async with anyio.create_task_group() as tasks:
                for n in range(2):  # as many as there are threads
                    tasks.start_soon(get, store, key(n))
            buffer = memoryview(bytearray(5000))
            leases = store.open_read(NAMESPACE, [key(4)])
            for _ in range(2):
                assert await get(store, key(3)) == Status.GATEWAY_FAULT
                assert await store.read_into(leases, [buffer]) == bytes([Status.GATEWAY_FAULT])
            leases[0].release()
            assert device.commands[-1].kind is not Kind.READ, "these have not even tried"
            assert await put(store, key(9), b"writes have threads of their own") == Status.OK
            assert store.exist(NAMESPACE, [key(n) for n in range(6)]) == bytes([MISS, MISS, 0, 0, 0, 0])
            hanging.let_go()
        await came_back(store)
        assert [await get(store, key(n)) for n in range(2, 6)] == [payload(n, 5000) for n in range(2, 6)]
    lines = [record.message for record in caplog.records if record.name.endswith(".threads")]
    assert lines == [
        "the device has not answered any of 2 reads for 0.5 s: reads fail until it does",
        "the device answers reads again",
    ]


async def test_b43_memory_of_the_caller_is_not_given_up_and_waiting_for_a_thread_ends(device):
    """A region must not be written to once its client has been answered: such a read waits for the device."""
    async with SegmentStore.open(impatient(io_threads=1), device=device) as store:
        await put_all(store, {key(n): payload(n, 5000) for n in range(2)})
        leases = store.open_read(NAMESPACE, [key(0)])
        buffer = bytearray(5000)
        statuses: list[bytes] = []

        async def read() -> None:
            statuses.append(await store.read_into(leases, [memoryview(buffer)], is_verified=False))

        with Hanging(device) as hanging:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read)
                await hanging.wait_stuck()
                for _ in range(
                    2
                ):  # the first waits for the thread, the second is refused: it is stuck by now
                    assert await get(store, key(1)) == Status.GATEWAY_FAULT
                assert statuses == []
                hanging.let_go()
        assert statuses == [bytes(1)]
        assert buffer == payload(0, 5000)
        leases[0].release()
        assert await get(store, key(1)) == payload(1, 5000), "it was never tried, so it is not dropped"


async def test_b43_who_leaves_a_hung_read_waits_for_it_no_longer_than_its_limit(device):
    async with SegmentStore.open(impatient(), device=device) as store:
        await put(store, key(0), payload(0, 5000))
        leases = store.open_read(NAMESPACE, [key(0)])
        with Hanging(device) as hanging:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(store.verify, leases)
                await hanging.wait_stuck()
                tasks.cancel_scope.cancel()
            leases[0].release()
            hanging.let_go()
        await came_back(store)
        assert store.stats().leases == 0


async def test_b43_a_store_closes_while_a_read_hangs(device, caplog):
    """The file that it reads stays open: its descriptor must not become another file's."""
    with Hanging(device) as hanging:
        async with SegmentStore.open(impatient(), device=device) as store:
            await put(store, key(0), payload(0, 5000))
            leases = store.open_read(NAMESPACE, [key(0)])
            data = leases[0].segment.data
            leases[0].release()
            assert await get(store, key(0)) == Status.GATEWAY_FAULT
        assert data.fileno() >= 0
        assert "the store closes with 1 reads that the device has not answered" in caplog.text
        hanging.let_go()
    data.close()


async def test_w11_writes_that_hang_do_not_hold_up_the_reads(device):
    """Every write thread is stuck; reads have threads of their own."""
    async with SegmentStore.open(config("unused"), device=device) as store:
        await put(store, key(0), payload(0, 50_000))
        go = threading.Event()

        def hang(command: Command) -> None:
            if command.kind is Kind.WRITE:
                go.wait(10)

        device.before = hang
        try:
            async with anyio.create_task_group() as tasks:
                for n in range(1, 9):
                    tasks.start_soon(put, store, key(n), payload(n, 1000))
                await wait_all_tasks_blocked()
                assert await get(store, key(0)) == payload(0, 50_000)
                assert store.exist(NAMESPACE, [key(n) for n in range(9)]) == bytes([0] + [MISS] * 8)
                go.set()
        finally:
            go.set()
        assert store.exist(NAMESPACE, [key(n) for n in range(9)]) == bytes(9)


@pytest.mark.parametrize("batch", [1, 3])
async def test_b40_a_slow_reader_gets_all_the_old_bytes(tmp_path, batch):
    """B40: deleted at a tenth, overwritten, the device filled; single and batch reads behave alike."""
    settings = config(tmp_path, segment_bytes=2 * MIB, capacity_bytes=8 * MIB)
    old = {key(n): payload(n, MIB) for n in range(batch)}
    async with SegmentStore.open(settings) as store:
        await put_all(store, old)
        leases = store.open_read(NAMESPACE, list(old))
        assert await store.verify(leases) == bytes(batch)
        position = MIB // 10
        received = [bytearray(lease_bytes(lease)[:position]) for lease in leases]
        deleted = anyio.Event()

        async def delete() -> None:
            assert await store.delete_many(NAMESPACE, list(old)) == bytes(batch)
            deleted.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(delete)
            await wait_all_tasks_blocked()
            await put(store, key(0), payload("new", MIB))
            for n in range(100, 120):
                await put(store, key(n), payload(n, MIB))
                assert disk_bytes(tmp_path) <= 8 * MIB
            assert not deleted.is_set()
            for lease, bytes_so_far in zip(leases, received, strict=True):
                (extent,) = lease.extents
                while len(bytes_so_far) < lease.length:
                    done = len(bytes_so_far)
                    bytes_so_far += os.pread(extent.fd, 50 * KIB, extent.offset + done)[: lease.length - done]
            assert received == list(old.values())
            # One reader goes without a word: it must not hold the delete for ever either.
            for lease in leases:
                assert not deleted.is_set()
                lease.release()
            await deleted.wait()
        assert store.stats().leases == 0


async def test_b44_the_capacity_is_never_exceeded(tmp_path):
    """B44: three times the limit in mixed sizes, overwrites, deletes, a crash and a restart half way."""
    limit, segment = 4 * MIB, 256 * KIB
    most = 248 * KIB
    sizes = [1, segment - 1, most - 1, most, most + 1, 4 * segment, 5000, 100_000, 0, 30_000]
    directory = tmp_path / "kv"
    for run in range(2):
        async with SegmentStore.open(config(directory)) as store:
            assert store.max_object_bytes == most
            written = n = 0
            while written < 7 * MIB:
                n += 1
                size = sizes[n * 7 % len(sizes)]
                name = key(n if n % 5 else n // 2)
                status = await put(store, name, payload((run, n), size))
                assert status == (Status.OK if size <= most else Status.TOO_LARGE)
                written += size if status == Status.OK else 0
                if n % 6 == 0:
                    await store.delete_many(NAMESPACE, [key(n - 2)])
                assert disk_bytes(directory) <= limit
                assert store.stats().used_bytes <= limit
            assert await get(store, name) != Status.CORRUPT
            assert store.stats().evicted_objects > 10
            if run == 0:
                # Crash: the next run finds the files as they are now, not as a clean close leaves them.
                crashed = tmp_path / "crashed"
                crashed.mkdir()
                for path in directory.iterdir():
                    (crashed / path.name).write_bytes(path.read_bytes())
        directory = tmp_path / "crashed"
