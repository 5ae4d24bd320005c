"""What only the segment store has: files, restarts, reclaiming, a lock."""

import os
import socket
import threading
from pathlib import Path

import anyio
import anyio.to_thread
import pytest
from anyio import wait_all_tasks_blocked

from adp_gateway.device.memory import Command, Kind, MemoryDevice
from adp_gateway.errors import DeviceFault, NotAStore, StoreLocked, UnsupportedFormat
from adp_gateway.fsck import check
from adp_gateway.store.base import PutItem, Status
from adp_gateway.store.format import SUPERBLOCK_NAME
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
from gateway.test_format import newer_superblock

pytestmark = pytest.mark.anyio

MISS = Status.NOT_FOUND


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_everything_is_there_after_a_restart_and_nothing_has_grown(tmp_path):
    objects = {key(n): payload(n, 1 + 997 * n) for n in range(60)}
    async with SegmentStore.open(config(tmp_path)) as store:
        await put_all(store, objects)
        before = store.stats()
    for _ in range(3):
        async with SegmentStore.open(config(tmp_path)) as store:
            assert store.recovery.objects == 60
            assert [await get(store, name) for name in objects] == list(objects.values())
            after = store.stats()
            assert (after.object_bytes, after.segments) == (before.object_bytes, before.segments)
            assert after.used_bytes <= before.used_bytes


async def test_a_restart_goes_on_in_the_same_segment(tmp_path):
    for n in range(5):
        async with SegmentStore.open(config(tmp_path)) as store:
            await put(store, key(n), payload(n, 10_000))
            assert store.stats().segments == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "lock",
        "seg-00000001.data",
        "seg-00000001.log",
        "superblock",
    ]


async def test_deletes_and_overwrites_survive_a_restart(tmp_path):
    async with SegmentStore.open(config(tmp_path)) as store:
        await put_all(store, {key(n): payload(n, 20_000) for n in range(30)})
        await put_all(store, {key(n): payload(("new", n), 20_000) for n in range(10)})
        await store.delete_many(NAMESPACE, [key(n) for n in range(0, 30, 3)])
    async with SegmentStore.open(config(tmp_path)) as store:
        assert store.recovery.superseded_commits == 0, "overwritten commits had been killed"
        for n in range(30):
            expected = payload(("new", n) if n < 10 else n, 20_000) if n % 3 else MISS
            assert await get(store, key(n)) == expected


async def test_a_deleted_object_stays_deleted_when_its_newer_segment_goes_first(tmp_path):
    """The old version's segment is leased and outlives the segment of the new version and of its delete."""
    async with SegmentStore.open(config(tmp_path)) as store:
        await put(store, key(1), payload("old", 100_000))
        await put(store, key(2), payload("pin", 1000))
        (pin,) = store.open_read(NAMESPACE, [key(2)])
        n = 100
        while store.stats().segments < 2:
            await put(store, key(n), payload(n, 100_000))
            n += 1
        await put(store, key(1), payload("new", 100_000))
        await store.delete_many(NAMESPACE, [key(1)])
        while store.stats().evicted_objects < 20:
            await put(store, key(n), payload(n, 100_000))
            n += 1
        assert (tmp_path / "seg-00000001.data").exists()
        assert not (tmp_path / "seg-00000002.data").exists()
        pin.release()
    async with SegmentStore.open(config(tmp_path)) as store:
        assert await get(store, key(1)) == MISS
        assert await get(store, key(2)) == payload("pin", 1000)


async def test_an_object_that_is_read_gets_a_second_chance_and_keeps_it_over_a_restart(tmp_path):
    hot = payload("hot", 30_000)
    async with SegmentStore.open(config(tmp_path)) as store:
        await put(store, key(0), hot)
        for n in range(1, 100):
            await put(store, key(n), payload(n, 100_000))
            assert await get(store, key(0)) == hot
        assert store.stats().evicted_objects > 30
        assert not (tmp_path / "seg-00000001.data").exists(), "it has moved"
    async with SegmentStore.open(config(tmp_path)) as store:
        assert await get(store, key(0)) == hot


async def test_reads_of_everything_do_not_stop_the_writes(tmp_path):
    """If all objects have earned a second chance, some have to go all the same."""
    async with SegmentStore.open(config(tmp_path)) as store:
        for n in range(120):
            assert await put(store, key(n), payload(n, 60_000)) == Status.OK
            for lease in store.open_read(NAMESPACE, [key(m) for m in range(n + 1)]):
                if lease is not None:
                    lease.release()
        assert await get(store, key(119)) == payload(119, 60_000)
        assert disk_bytes(tmp_path) <= 4 * MIB


async def test_small_objects_end_a_segment_by_their_number(tmp_path):
    """The journal's share runs out before the data's; what is not used of the data file is given back."""
    objects = {key(n): payload(n, 10) for n in range(100)}
    async with SegmentStore.open(config(tmp_path)) as store:
        await put_all(store, objects)
        assert store.stats().segments == 5
        assert [await get(store, name) for name in objects] == list(objects.values())
        assert (tmp_path / "seg-00000001.data").stat().st_size == 20 * 4096
        assert disk_bytes(tmp_path) <= store.stats().used_bytes


async def test_small_neighbours_go_in_one_command_and_fail_one_by_one():
    """Eight objects of a unit or less side by side: one write; where the device refuses it, one each."""
    with MemoryDevice(max_command_bytes=16 * KIB) as device:
        async with SegmentStore.open(config("unused"), device=device) as store:
            items = [item(key(n), payload(n, length)) for n, length in enumerate([4096, 1, 100, 4095])]
            bad = PutItem(key=key(9), checksum=1, data=memoryview(b"something else"))
            device.commands.clear()
            assert await store.put_many(NAMESPACE, items) == bytes(4)
            assert await store.put_many(NAMESPACE, [*items[:2], bad, *items[2:]]) == bytes(
                [0, 0, Status.CORRUPT, 0, 0]
            )
            assert [
                c.length for c in device.commands if c.name.endswith(".data") and c.kind is Kind.WRITE
            ] == [
                3 * 4096 + 4095,
                4096 + 1,
                4096 + 4095,
            ]

            def refuse(command: Command) -> None:
                if command.kind is Kind.WRITE and command.data.startswith(payload(1, 1)):
                    raise DeviceFault("a bad unit")
                if command.kind is Kind.WRITE and command.length > 8192:
                    raise DeviceFault("a bad unit")

            device.before = refuse
            assert await store.put_many(NAMESPACE, items) == bytes([0, Status.GATEWAY_FAULT, 0, 0])
            device.before = None
            assert [await get(store, each.key) for each in items] == [bytes(each.data) for each in items]


async def test_no_command_is_longer_than_the_device_takes():
    limit = 16 * KIB
    with MemoryDevice(max_command_bytes=limit) as device:
        for _ in range(2):
            async with SegmentStore.open(config("unused"), device=device) as store:
                for n in range(40):
                    data = payload(n, 5000 * n % 230_000)
                    assert await put(store, key(n), data) == Status.OK
                    assert await get(store, key(n)) == data
                await put_all(store, {key(n): b"x" for n in range(100, 300)})
                assert await store.check_many(NAMESPACE, [key(39)]) == bytes([Status.OK])
        lengths = dict.fromkeys(Kind, 0)
        for command in device.commands:
            lengths[command.kind] = max(lengths[command.kind], command.length)
        assert lengths[Kind.READ] == limit
        assert lengths[Kind.WRITE] == limit
        assert any(command.kind is Kind.WRITE and command.length % 4096 for command in device.commands)


async def test_one_directory_one_gateway(tmp_path):
    async with SegmentStore.open(config(tmp_path)):
        with pytest.raises(StoreLocked):
            async with SegmentStore.open(config(tmp_path)):
                pass
    async with SegmentStore.open(config(tmp_path)):
        pass


async def test_a_newer_format_is_refused_untouched(tmp_path):
    (tmp_path / SUPERBLOCK_NAME).write_bytes(newer_superblock())
    (tmp_path / "seg-00000001.log").write_bytes(b"of the future")
    with pytest.raises(UnsupportedFormat):
        async with SegmentStore.open(config(tmp_path)):
            pass
    assert (tmp_path / "seg-00000001.log").read_bytes() == b"of the future"


@pytest.mark.parametrize("raw", [b"", b"ADPSTORE", bytes(4096), b"garbage" * 100])
async def test_a_damaged_superblock_is_written_again(tmp_path, raw):
    async with SegmentStore.open(config(tmp_path)) as store:
        await put(store, key(1), b"object")
    (tmp_path / SUPERBLOCK_NAME).write_bytes(raw)
    async with SegmentStore.open(config(tmp_path)) as store:
        assert store.recovery.is_superblock_new
        assert await get(store, key(1)) == b"object"
    async with SegmentStore.open(config(tmp_path)) as store:
        assert not store.recovery.is_superblock_new


def strange_file(directory: Path) -> None:
    (directory / "thesis.txt").write_text("do not touch")


def strange_superblock(directory: Path) -> None:
    (directory / SUPERBLOCK_NAME).write_bytes(b"of another program")


def strange_directory(directory: Path) -> None:
    (directory / "home").mkdir()


def strange_journal(directory: Path) -> None:
    (directory / SUPERBLOCK_NAME).touch()
    (directory / "seg-00000001.log").write_bytes(b"another program's log" * 100)


@pytest.mark.parametrize("make", [strange_file, strange_superblock, strange_directory, strange_journal])
async def test_somebody_else_s_directory_is_refused_untouched(tmp_path, make):
    make(tmp_path)
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(NotAStore, match="not empty"):
        async with SegmentStore.open(config(tmp_path)):
            pass
    with pytest.raises(NotAStore):
        check(tmp_path)
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.iterdir()} == before


async def test_what_is_as_good_as_an_empty_directory(tmp_path):
    """A new file system's, a socket that a dead gateway left, and a start that was killed at once."""
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "lock").touch()
    (tmp_path / SUPERBLOCK_NAME).touch()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "s"))
        async with SegmentStore.open(config(tmp_path)) as store:
            assert await put(store, key(1), b"object") == Status.OK


async def test_what_opening_found_is_one_line_that_people_can_read(tmp_path, caplog):
    caplog.set_level("INFO")
    async with SegmentStore.open(config(tmp_path, max_object_bytes=MIB)) as store:
        await put(store, key(1), b"object")
        assert f"the largest object is {store.max_object_bytes} bytes, not {MIB}: a segment" in caplog.text
    with (tmp_path / "seg-00000001.log").open("ab") as log:
        log.write(b"torn")
    caplog.clear()
    async with SegmentStore.open(config(tmp_path, max_object_bytes=100_000)):
        pass
    io, line = caplog.messages
    assert "I/O in" in io
    assert line == "store opened: 1 objects in 1 segments, 4 bytes of torn journals cut off"


async def test_lines_about_damaged_objects_name_them(tmp_path, caplog):
    async with SegmentStore.open(config(tmp_path)) as store:
        await put(store, key(1), payload(1, 5000))
        with (tmp_path / "seg-00000001.data").open("r+b") as file:
            file.write(b"damage")
        assert await get(store, key(1)) == Status.CORRUPT
    name = f"{NAMESPACE.hex()[:24]}/{key(1).hex()[:32]}"
    assert f"dropped a corrupt object: {name}, 5000 bytes" in caplog.text


async def test_a_smaller_capacity_takes_effect_at_the_next_start(tmp_path):
    async with SegmentStore.open(config(tmp_path)) as store:
        await put_all(store, {key(n): payload(n, 100_000) for n in range(25)})
    async with SegmentStore.open(config(tmp_path, capacity_bytes=MIB)) as store:
        assert disk_bytes(tmp_path) <= MIB
        assert store.stats().used_bytes <= MIB
        assert await get(store, key(24)) == payload(24, 100_000)
        for n in range(100, 120):
            assert await put(store, key(n), payload(n, 100_000)) == Status.OK
            assert disk_bytes(tmp_path) <= MIB


async def test_another_segment_size_takes_effect_at_the_next_start(tmp_path):
    async with SegmentStore.open(config(tmp_path)) as store:
        await put(store, key(1), payload(1, 100_000))
    async with SegmentStore.open(config(tmp_path, segment_bytes=MIB)) as store:
        assert await put(store, key(2), payload(2, 900_000)) == Status.OK
        assert await get(store, key(1)) == payload(1, 100_000)


async def test_without_a_capacity_most_of_the_free_room_is_taken():
    with MemoryDevice(capacity_bytes=100 * MIB, max_command_bytes=16 * KIB) as device:
        settings = config("unused", capacity_bytes=None, segment_bytes=None)
        async with SegmentStore.open(settings, device=device) as store:
            assert 79 * MIB < store.stats().capacity_bytes <= 81 * MIB
            assert store.max_object_bytes > 16 * MIB
            await put(store, key(1), payload(1, 16 * MIB))
        async with SegmentStore.open(settings, device=device) as store:
            assert 79 * MIB < store.stats().capacity_bytes <= 81 * MIB


async def test_b47_no_descriptor_is_left_behind(tmp_path):
    before = open_descriptors()
    for _ in range(3):
        async with SegmentStore.open(config(tmp_path)) as store:
            for n in range(60):
                await put(store, key(n), payload(n, 100_000))
            (lease,) = store.open_read(NAMESPACE, [key(59)])
            fd = lease.extents[0].fd
            lease.release()
    # The first run leaves worker threads' own descriptors, if the backend has any; never one per segment.
    assert open_descriptors() - before <= 4
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


async def test_unreadable_segments_are_left_alone_and_counted(tmp_path):
    async with SegmentStore.open(config(tmp_path)) as store:
        await put_all(store, {key(n): payload(n, 100_000) for n in range(6)})
    log = tmp_path / "seg-00000002.log"
    size = disk_bytes(tmp_path)
    log.rename(tmp_path / "elsewhere")
    log.mkdir()
    async with SegmentStore.open(config(tmp_path)) as store:
        # A directory is not a file: the data file stands alone, as after a removal that was cut short.
        assert store.recovery.removed_files == 1
        assert store.stats().used_bytes < size + 300 * KIB
        found = [await get(store, key(n)) for n in range(6)]
    assert found.count(MISS) == 2
    assert all(data in (payload(n, 100_000), MISS) for n, data in enumerate(found))


async def test_put_rejects_names_that_do_not_fit(tmp_path):
    async with SegmentStore.open(config(tmp_path)) as store:
        for namespace, name in ((bytes(31), b"k"), (NAMESPACE, b""), (NAMESPACE, bytes(129))):
            with pytest.raises(ValueError, match="a namespace has 32 bytes"):
                await store.put_many(namespace, [item(name, b"x")])
        assert store.stats().objects == 0


async def test_leases_of_a_closed_store_lead_nowhere(tmp_path: Path):
    async with SegmentStore.open(config(tmp_path)) as store:
        await put(store, key(1), b"object")
        (lease,) = store.open_read(NAMESPACE, [key(1)])
    assert lease.extents[0].fd == -1
    lease.release()
    with pytest.raises(ValueError, match="released"):
        _ = lease.extents
    assert await put(store, key(2), b"x") == Status.GATEWAY_FAULT


@pytest.mark.parametrize("meanwhile", ["delete", "overwrite", "read", "hold", "cancel"])
async def test_a_key_that_changes_while_its_object_is_moved(meanwhile):
    """The copy for the second chance is held on the device; what happens then must win over the copy."""
    copying, go = threading.Event(), threading.Event()
    old, new = payload("old", 30_000), payload("new", 20_000)
    with MemoryDevice(max_command_bytes=16 * KIB) as device:

        def hold(command: Command) -> None:
            if command.kind is Kind.READ and command.name.endswith("1.data") and not copying.is_set():
                copying.set()
                go.wait(10)

        async with SegmentStore.open(config("unused"), device=device) as store:
            await put(store, key(0), old)
            assert await get(store, key(0)) == old  # it is used now
            fill = 0
            while store.stats().segments < 15:
                fill += 1
                await put(store, key(fill), payload(fill, 100_000))
            device.before = hold
            deleted: list[bytes] = []

            async def delete() -> None:
                deleted.append(await store.delete_many(NAMESPACE, [key(0)]))

            async def fill_up() -> None:
                for n in range(fill + 1, fill + 30):
                    if not copying.is_set():
                        await put(store, key(n), payload(n, 100_000))

            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(fill_up)
                    assert await anyio.to_thread.run_sync(copying.wait, 10), "nothing is moved"
                    if meanwhile == "delete":
                        tasks.start_soon(delete)
                        await wait_all_tasks_blocked()
                        assert deleted == [], "it waits for the copy as for any reader"
                        assert store.exist(NAMESPACE, [key(0)]) == bytes([MISS])
                    elif meanwhile == "overwrite":
                        assert await put(store, key(0), new) == Status.OK
                    elif meanwhile == "read":
                        (lease,) = store.open_read(NAMESPACE, [key(0)])
                    elif meanwhile == "hold":
                        # Neither was to be moved because of a hold, and one was to be evicted.
                        statuses, kept = store.hold(NAMESPACE, [key(0), key(1)])
                        assert statuses == bytes(2)
                    else:
                        tasks.cancel_scope.cancel()
                    go.set()
            finally:
                go.set()
            expected = {"delete": MISS, "overwrite": new}.get(meanwhile, old)
            assert await get(store, key(0)) == expected
            if meanwhile == "read":
                assert await store.verify([lease]) == bytes(1)
                assert lease_bytes(lease) == old
                lease.release()
            if meanwhile == "hold":
                for n in range(500, 540):
                    assert await put(store, key(n), payload(n, 200_000)) == Status.OK
                assert await get(store, key(1)) == payload(1, 100_000)
                assert await get(store, key(0)) == old
                kept.release()
            with after_kill(device) as killed:
                async with SegmentStore.open(config("unused"), device=killed) as reopened:
                    assert await get(reopened, key(0)) == expected
            for n in range(1000, 1040):
                assert await put(store, key(n), payload(n, 200_000)) == Status.OK
                assert device.used_bytes() <= store.stats().used_bytes <= 4 * MIB
            assert store.stats().leases == 0
