"""A version is void on the device before any later version of its key is, whenever the process is killed.

Otherwise a delete that was acknowledged, or a newer version, would be forgotten by a restart: each of these
looks at what a kill would leave.
"""

import threading

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from adp_gateway.device.memory import Command, Kind, MemoryDevice
from adp_gateway.errors import DeviceFault
from adp_gateway.store.base import Status
from adp_gateway.store.segments import SegmentStore
from crash.history import History, Name
from gateway.objects import KIB, NAMESPACE, after_kill, config, get, item, key, payload, put

pytestmark = pytest.mark.anyio

OK, MISS, FAULT = Status.OK, Status.NOT_FOUND, Status.GATEWAY_FAULT


@pytest.fixture
def device():
    with MemoryDevice(max_command_bytes=16 * KIB) as device:
        yield device


class Refusing:
    """A device that refuses commands of a kind on files whose name ends so, until it is told to stop."""

    def __init__(self, kind: Kind, suffix: str) -> None:
        self.kind, self.suffix = kind, suffix
        self.is_on = True

    def __call__(self, command: Command) -> None:
        if self.is_on and command.kind is self.kind and command.name.endswith(self.suffix):
            raise DeviceFault("input/output error")


async def found_after_kill(device: MemoryDevice, name: bytes) -> bytes | Status:
    with after_kill(device) as killed:
        async with SegmentStore.open(config("unused"), device=killed) as store:
            return await get(store, name)


async def test_a_delete_waits_for_the_files_that_hold_an_evicted_version(device):
    """The key was evicted, but its segment cannot be removed; it is written anew and deleted."""
    async with SegmentStore.open(config("unused"), device=device) as store:
        await put(store, key(1), payload("v1", 100_000))
        device.before = refusing = Refusing(Kind.REMOVE, ".log")
        for n in range(100, 140):
            if store.exist(NAMESPACE, [key(1)]) == bytes([MISS]):
                break
            await put(store, key(n), payload(n, 100_000))
        assert await put(store, key(1), b"v2") == OK
        assert await found_after_kill(device, key(1)) == b"v2"
        assert await store.delete_many(NAMESPACE, [key(1)]) == bytes([FAULT])
        assert await get(store, key(1)) == MISS
        refusing.is_on = False
        assert await store.delete_many(NAMESPACE, [key(1)]) == bytes([MISS])
        assert await found_after_kill(device, key(1)) == MISS


async def test_an_object_that_could_not_be_read_does_not_come_back_over_a_later_one(device):
    """The device has recovered at the restart. What was lost meanwhile comes back only if nobody cared."""
    async with SegmentStore.open(config("unused"), device=device) as store:
        for n in range(5):
            await put(store, key(n), payload(("v1", n), 5000))
        device.before = Refusing(Kind.READ, ".data")
        assert [await get(store, key(n)) for n in range(4)] == [FAULT] * 4
        device.before = None
        assert await put(store, key(0), b"v2") == OK
        assert await put(store, key(1), b"v2") == OK
        assert await store.delete_many(NAMESPACE, [key(1), key(2)]) == bytes([OK, MISS])
        found = [await found_after_kill(device, key(n)) for n in range(5)]
    assert found == [b"v2", MISS, MISS, payload(("v1", 3), 5000), payload(("v1", 4), 5000)]


async def test_a_kill_that_was_refused_holds_up_those_of_later_versions(device):
    """Version 1 cannot be voided: so neither is version 2, and the delete says that it is not recorded."""
    async with SegmentStore.open(config("unused"), device=device) as store:
        await put(store, key(1), payload("v1", 100_000))
        await put(store, key(2), payload(2, 200_000))  # in a segment of its own
        device.before = refusing = Refusing(Kind.WRITE, "1.log")
        assert await put(store, key(1), b"v2") == OK
        assert await store.delete_many(NAMESPACE, [key(1)]) == bytes([FAULT])
        assert await found_after_kill(device, key(1)) == b"v2"
        refusing.is_on = False
        assert await store.delete_many(NAMESPACE, [key(2)]) == bytes([OK])
        assert await found_after_kill(device, key(1)) == MISS


async def test_what_recovery_finds_superseded_is_void_before_anybody_can_read(device):
    """Killed between the commit of version 2 and the kill of version 1; then version 2 is deleted."""
    settings = config("unused")
    async with SegmentStore.open(settings, device=device) as store:
        await put(store, key(1), payload("v1", 100_000))
        await put(store, key(2), payload(2, 200_000))
        device.before = Refusing(Kind.WRITE, "1.log")
        await put(store, key(1), b"v2")
        killed = after_kill(device)
        device.before = None
    with killed:
        async with SegmentStore.open(settings, device=killed) as store:
            assert store.recovery.superseded_commits == 1
            start = len(killed.commands)
            assert await store.delete_many(NAMESPACE, [key(1)]) == bytes([OK])
            end = len(killed.commands)
        for count in range(start, end + 1):
            with killed.after_power_cut(count, lambda command: command.length or 1) as again:
                async with SegmentStore.open(settings, device=again) as store:
                    assert await get(store, key(1)) in ((b"v2", MISS) if count < end else (MISS,))


async def test_sequences_go_on_behind_those_of_void_versions(device):
    """Else a version whose kill is damaged would win over all that is written until they catch up."""
    async with SegmentStore.open(config("unused"), device=device) as store:
        for n in range(9):
            await put(store, key(1), b"version %d" % n)
        await store.delete_many(NAMESPACE, [key(1)])
    log = device.open("seg-00000001.log")
    kill_at = log.size() - 192
    log.close()
    async with SegmentStore.open(config("unused"), device=device) as store:
        await put(store, key(1), b"after the restart")
    log = device.open("seg-00000001.log")
    log.write(memoryview(b"damaged beyond repair"), kill_at + 100)
    log.close()
    async with SegmentStore.open(config("unused"), device=device) as store:
        assert store.recovery.damaged_records == 1
        assert await get(store, key(1)) == b"after the restart"


async def test_a_copy_of_a_version_that_was_replaced_meanwhile_is_not_committed(device):
    """While a survivor is copied it is overwritten and deleted, and both are recorded before the copy is."""
    name: Name = (NAMESPACE, key(1))
    settings = config("unused", capacity_bytes=1024 * KIB)
    history = History(lambda: len(device.commands))
    async with SegmentStore.open(settings, device=device) as store:
        step, data = history.write(name, 50_000)
        await put(store, key(1), data)
        history.acknowledge(step)
        await put(store, key(2), payload(2, 1000))
        is_copying, go = threading.Event(), threading.Event()

        def pause(command: Command) -> None:
            """In the middle of the copy, which reads from one data file and writes to another."""
            is_copy = command.kind is Kind.WRITE and command.data == data[: len(command.data)]
            if is_copy and len(command.data) == 16 * KIB:
                is_copying.set()
                go.wait(10)

        device.before = pause
        async with anyio.create_task_group() as tasks:

            async def fill() -> None:
                for n in range(100, 120):
                    await get(store, key(1))  # so that it survives
                    await put(store, key(n), payload(n, 100_000))

            tasks.start_soon(fill)
            await anyio.to_thread.run_sync(is_copying.wait, 10)
            assert is_copying.is_set()
            overwriting, _ = history.write(name, 7)
            assert await put(store, key(1), b"newer v") == OK
            history.acknowledge(overwriting)
            deleting = history.delete(name)
            tasks.start_soon(store.delete_many, NAMESPACE, [key(1)])
            await wait_all_tasks_blocked()
            assert store.exist(NAMESPACE, [key(1)]) == bytes([MISS])
            assert await store.put_many(NAMESPACE, [item(key(2), b"again")]) == bytes([OK])
            since = len(device.commands)
            go.set()
        assert deleting.acknowledged is None
        device.before = None
        total = len(device.commands)
    for count in range(since, total + 1):
        with device.after_power_cut(count, lambda command: command.length or 1) as killed:
            async with SegmentStore.open(settings, device=killed) as store:
                assert await get(store, key(1)) in (MISS, b"newer v"), count
