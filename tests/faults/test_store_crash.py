"""Crashes: a cut at every byte, a power cut at every device command, a process that is really killed."""

import random
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import anyio
import pytest

from adp_gateway.device.memory import Command, Kind, MemoryDevice
from adp_gateway.fsck import check_device
from adp_gateway.store.base import Status
from adp_gateway.store.format import RECORD_BYTES
from adp_gateway.store.segments import SegmentStore
from faults.put_until_killed import contents
from gateway.objects import (
    KIB,
    MIB,
    NAMESPACE,
    after_kill,
    change,
    config,
    disk_bytes,
    get,
    item,
    key,
    payload,
    put,
    put_all,
)

pytestmark = pytest.mark.anyio

MISS = Status.NOT_FOUND
A, B, C, D = (payload(name, 9000) for name in "ABCD")
DATA, LOG = "seg-00000001.data", "seg-00000001.log"


@pytest.fixture
def devices():
    """Frees every device that a test pushes here."""
    with ExitStack() as stack:
        yield stack


def new_device(devices: ExitStack, **settings) -> MemoryDevice:
    return devices.enter_context(MemoryDevice(max_command_bytes=16 * KIB, **settings))


async def stored_pair(devices: ExitStack) -> MemoryDevice:
    device = new_device(devices)
    async with SegmentStore.open(config("unused"), device=device) as store:
        await put(store, key(1), A)
        await put(store, key(2), B)
    return device


@pytest.mark.parametrize("killed_while_it_recovers", [False, True])
async def test_b42_a_torn_tail_hides_nothing_that_comes_after(devices, killed_while_it_recovers):
    """B42(a): the journal is cut at every byte of its last record; what is put then survives a kill."""
    original = await stored_pair(devices)
    whole = 3 * RECORD_BYTES
    for length in [*range(2 * RECORD_BYTES, whole), whole + 1]:
        with ExitStack() as images:
            torn = images.enter_context(after_kill(original))
            log = torn.open(LOG)
            if length > whole:
                log.write(memoryview(b"!"), whole)
            else:
                log.truncate(length)
            log.close()
            if killed_while_it_recovers:
                async with SegmentStore.open(config("unused"), device=torn):
                    torn = images.enter_context(after_kill(torn))
            async with SegmentStore.open(config("unused"), device=torn) as store:
                await put(store, key(3), C)
                await put(store, key(4), D)
                killed = images.enter_context(after_kill(torn))
            async with SegmentStore.open(config("unused"), device=killed) as store:
                assert store.recovery.cut_bytes == store.recovery.damaged_records == 0
                found = [await get(store, key(n)) for n in range(1, 5)]
            assert found == [A, B if length > whole else MISS, C, D], length


def overwrite(device: MemoryDevice, name: str, position: int, change) -> None:
    file = device.open(name)
    view = bytearray(1)
    file.read_into(memoryview(view), position)
    (byte,) = view
    file.write(memoryview(bytes([change(byte)])), position)
    file.close()


@pytest.mark.parametrize("position", range(0, RECORD_BYTES, 24))
async def test_b42_damage_in_the_middle_costs_one_object(devices, position):
    device = await stored_pair(devices)
    for at in (position, (position + 91) % RECORD_BYTES):
        change(device, LOG, RECORD_BYTES + at, 0x40)
    async with SegmentStore.open(config("unused"), device=device) as store:
        assert store.recovery.damaged_records == 1
        assert [await get(store, key(1)), await get(store, key(2))] == [MISS, B]
        await put(store, key(1), C)
        killed = devices.enter_context(after_kill(device))
    async with SegmentStore.open(config("unused"), device=killed) as store:
        assert store.recovery.damaged_records == 0, "it is told once"
        assert [await get(store, key(1)), await get(store, key(2))] == [C, B]
    assert check_device(killed).is_clean


@pytest.mark.parametrize("slot", [0, 1, 2, 3])
async def test_b42_a_flipped_bit_in_a_journal_costs_nothing(devices, slot):
    """In the header, a commit, another commit, or the kill of the first, which must not come back."""
    names = [b"key %2d " % n + b"\xa5" * 36 for n in range(4)]
    original = new_device(devices)
    async with SegmentStore.open(config("unused"), device=original) as store:
        await put(store, names[1], A)
        await put(store, names[2], B)
        await store.delete_many(NAMESPACE, [names[1]])
    for position in range(0, RECORD_BYTES, 5):
        with after_kill(original) as device:
            change(device, LOG, slot * RECORD_BYTES + position, 1 << position % 8)
            assert not check_device(device).is_clean
            async with SegmentStore.open(config("unused"), device=device) as store:
                assert store.recovery.repaired_records == 1
                assert store.recovery.damaged_records == store.recovery.cut_bytes == 0
                assert [await get(store, names[1]), await get(store, names[2])] == [MISS, B]
                await put(store, names[3], C)
            assert check_device(device).is_clean
            assert device.names() == [DATA, LOG, "superblock"], "the segment goes on"


async def test_b42_a_thousand_pages_are_a_thousand_hits(tmp_path):
    """B42(b)."""
    settings = config(tmp_path, capacity_bytes=16 * MIB, segment_bytes=MIB)
    async with SegmentStore.open(settings) as store:
        await put_all(store, {key(n): payload(n, 4000) for n in range(1000)})
        used = disk_bytes(tmp_path)
        objects = store.stats().object_bytes
    async with SegmentStore.open(settings) as store:
        assert store.exist(NAMESPACE, [key(n) for n in range(1000)]) == bytes(1000)
        assert await store.check_many(NAMESPACE, [key(n) for n in range(1000)]) == bytes(1000)
        assert store.stats().object_bytes == objects == 4_000_000
        assert disk_bytes(tmp_path) == used


async def test_b42_parallel_puts_then_killed(devices):
    """B42(c): 64 puts at once, killed now and then: acknowledged means exact, the rest exact or absent."""
    device = new_device(devices)
    acknowledged: dict[int, int] = {}
    async with SegmentStore.open(config("unused"), device=device) as store:

        async def put_one(n: int) -> None:
            assert await put(store, key(n), payload(n, 1000 * n)) == Status.OK
            acknowledged[n] = len(device.commands)

        async with anyio.create_task_group() as tasks:
            for n in range(64):
                tasks.start_soon(put_one, n)
    for count in range(0, len(device.commands), 23):
        killed = device.after_power_cut(count, lambda command: command.length or 1)
        with killed:
            async with SegmentStore.open(config("unused"), device=killed) as store:
                for n in range(64):
                    found = await get(store, key(n))
                    assert found == payload(n, 1000 * n) or found == MISS
                    assert acknowledged[n] > count or found != MISS
                stats = store.stats()
                assert stats.used_bytes <= stats.capacity_bytes
                assert killed.used_bytes() <= stats.used_bytes


# What a power cut may leave of commands that were not synced: nothing, everything, any part of any of them.


def nothing(_command: Command) -> int:
    return 0


def everything(command: Command) -> int:
    return command.length or 1


def anything(seed: int):
    draw = random.Random(seed)

    def survivor(command: Command) -> int:
        if command.kind is not Kind.WRITE:
            return draw.randrange(2)
        return draw.choice([0, draw.randrange(command.length + 1), command.length])

    return survivor


class History:
    """What was asked of a store, and when (in device commands) it was asked and acknowledged."""

    def __init__(self, device: MemoryDevice) -> None:
        self.device = device
        self.steps: list[tuple[bytes, bytes | Status, int, int]] = []

    async def put(self, store: SegmentStore, name: bytes, data: bytes) -> None:
        asked = len(self.device.commands)
        assert await put(store, name, data) == Status.OK
        self.steps.append((name, data, asked, len(self.device.commands)))

    async def delete(self, store: SegmentStore, name: bytes) -> None:
        asked = len(self.device.commands)
        await store.delete_many(NAMESPACE, [name])
        self.steps.append((name, MISS, asked, len(self.device.commands)))

    def allowed(self, name: bytes, count: int) -> set[bytes | Status]:
        """Values the key may have after a power cut at `count`: the last acknowledged, or one under way."""
        values: set[bytes | Status] = {MISS}
        for step, value, asked, acknowledged in self.steps:
            if step == name and acknowledged <= count:
                values = {value}
            elif step == name and asked <= count:
                values.add(value)
        return values


DURABLE = {"durability": "durable", "segment_bytes": 64 * KIB, "capacity_bytes": 256 * KIB}


async def check_power_cuts(history: History, *, may_evict: bool) -> None:
    names = {step[0] for step in history.steps}
    total = len(history.device.commands)
    for count in range(total + 1):
        for survivor in (nothing, everything, anything(count), anything(-count)):
            with history.device.after_power_cut(count, survivor) as image:
                async with SegmentStore.open(config("unused", **DURABLE), device=image) as store:
                    for name in names:
                        allowed = history.allowed(name, count) | ({MISS} if may_evict else set())
                        assert await get(store, name) in allowed, (count, survivor)
                    assert store.stats().corrupt_objects == 0
                    stats = store.stats()
                    assert image.used_bytes() <= stats.used_bytes <= stats.capacity_bytes
                    assert await put(store, b"next", b"object") == Status.OK


@pytest.mark.parametrize("is_direct", [False, True])
async def test_power_cut_at_every_command_loses_nothing_acknowledged(devices, is_direct):
    """Durable mode: fragments, an overwrite, deletes and a full segment; cut after each command."""
    device = new_device(devices, is_direct=is_direct)
    history = History(device)
    async with SegmentStore.open(config("unused", **DURABLE), device=device) as store:
        await history.put(store, key(1), payload(1, 40_000))
        await history.put(store, key(2), payload(2, 10))
        await history.put(store, key(1), payload("1 again", 20_000))
        await history.delete(store, key(2))
        await history.put(store, key(3), payload(3, 17_000))
        await history.put(store, key(2), payload("2 again", 5000))
        await history.delete(store, key(1))
    await check_power_cuts(history, may_evict=False)


@pytest.mark.parametrize("is_direct", [False, True])
async def test_power_cut_while_segments_are_reclaimed(devices, is_direct):
    """As before, with eviction and second chances going on: a key may be gone, but never be wrong or old."""
    device = new_device(devices, is_direct=is_direct)
    history = History(device)
    async with SegmentStore.open(config("unused", **DURABLE), device=device) as store:
        await history.put(store, key(0), payload(0, 5000))
        await history.put(store, key(1), payload(1, 5000))
        await history.put(store, key(9), payload(9, 5000))
        for n in range(8):
            assert await get(store, key(0)) != Status.CORRUPT
            await history.put(store, key(2 + n % 3), payload(("round", n), 30_000))
            if n == 2:
                await history.delete(store, key(1))
            if n == 5:
                await history.put(store, key(0), payload("0 again", 5000))
            if store.exist(NAMESPACE, [key(9)]) == bytes([MISS]):
                # Its segment has just been removed, and must not come back: the delete says nothing about it.
                await history.put(store, key(9), payload("9 again", 10))
                await history.delete(store, key(9))
        assert store.stats().evicted_objects + store.stats().segments > 3
    await check_power_cuts(history, may_evict=True)


def acknowledged_until_killed(command: list[str], lines: int) -> list[tuple[str, int]]:
    """Run the process, kill it after so many lines; everything it said."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        said = [process.stdout.readline() for _ in range(lines)]
        process.kill()
        said += process.stdout.readlines()
    return [(verb, int(n)) for verb, n in map(str.split, said)]


@pytest.mark.timeout(60)
async def test_kill_9_leaves_whole_objects_and_all_that_was_acknowledged(tmp_path):
    script = Path(__file__).with_name("put_until_killed.py")
    directory = tmp_path / "kv"
    first = 0
    for lines in (1, 30, 61):
        said: dict[str, set[int]] = {"put": set(), "deleting": set(), "delete": set()}
        command = [sys.executable, str(script), str(directory), str(first)]
        for verb, n in acknowledged_until_killed(command, lines):
            said[verb].add(n)
        present, gone = said["put"], said["delete"]
        async with SegmentStore.open(config(directory)) as store:
            assert disk_bytes(directory) <= 4 * MIB
            for n in sorted(present - said["deleting"])[-20:]:
                assert await get(store, key(n)) == contents(n)
            for n in gone:
                assert await get(store, key(n)) == MISS
            # One past the last acknowledged may be there, or not, but not in part.
            for n in range(max(present) + 1, max(present) + 5):
                assert await get(store, key(n)) in (contents(n), MISS)
            assert store.stats().corrupt_objects == 0
        first = 4 * (max(present) // 4 + 2)


async def test_b38_a_writer_that_dies_leaves_the_key_free_and_the_space_usable(devices):
    """B38(a): killed after any fragment of four, the key was never there and can be written."""
    device = new_device(devices)
    async with SegmentStore.open(config("unused"), device=device) as store:
        start = len(device.commands)
        await put(store, key(1), payload(1, 60_000))
        end = len(device.commands)
    cuts = 0
    for count in range(start, end):
        with device.after_power_cut(count, everything) as killed:
            async with SegmentStore.open(config("unused"), device=killed) as store:
                assert store.exist(NAMESPACE, [key(1)]) == bytes([MISS])
                assert store.stats().object_bytes == 0
                for n in range(60):
                    assert await put(store, key(1), payload(n, 200_000)) == Status.OK
                assert await get(store, key(1)) == payload(59, 200_000)
                cuts += 1
    assert cuts >= 5


async def test_b38_two_writers_of_one_key_interleave(devices):
    """B38(b): both at once; both get an answer and one value stays, also after a kill."""
    small, large = payload("small", 40_000), payload("large", 90_000)
    device = new_device(devices)
    async with SegmentStore.open(config("unused"), device=device) as store:
        statuses = {}

        async def write(data: bytes) -> None:
            statuses[len(data)] = await store.put_many(NAMESPACE, [item(key(1), data)])

        for first, second in ((small, large), (large, small)):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(write, first)
                tasks.start_soon(write, second)
            assert statuses == {40_000: bytes(1), 90_000: bytes(1)}
            found = await get(store, key(1))
            assert found in (small, large)
            assert store.stats().objects == 1
            with after_kill(device) as killed:
                async with SegmentStore.open(config("unused"), device=killed) as reopened:
                    assert await get(reopened, key(1)) == found
