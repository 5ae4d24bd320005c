"""The capacity holds whatever happens, and a device that refuses is never the end of a store."""

import os

import pytest

from adp_gateway.device.memory import Command, Kind, MemoryDevice
from adp_gateway.errors import DeviceFault, DeviceFull, StorageError
from adp_gateway.store.base import Status
from adp_gateway.store.eviction import Queue
from adp_gateway.store.segments import SegmentStore
from gateway.objects import KIB, MIB, NAMESPACE, after_kill, config, get, item, key, payload, put

pytestmark = pytest.mark.anyio

MISS = Status.NOT_FOUND
LIMIT = 16 * KIB  # of a device command: L of the recipes
SMALL = {"segment_bytes": 64 * KIB, "capacity_bytes": 448 * KIB}


class Watched:
    """Looks at a device before each command: nothing on it, at no moment, is above the capacity."""

    def __init__(self, device: MemoryDevice, capacity_bytes: int) -> None:
        self.device, self.capacity_bytes = device, capacity_bytes
        self.most_bytes = 0

    def __call__(self, _command: Command) -> None:
        used = self.device.used_bytes()
        self.most_bytes = max(self.most_bytes, used)
        assert used <= self.capacity_bytes


async def test_b44_the_capacity_holds_at_every_device_command():
    """B44: three times the limit in mixed sizes around what a command takes and a segment holds, overwrites,
    deletes, reads, a lease and a hold; a crash and a restart half way."""
    settings = config("unused", max_command_bytes=LIMIT)
    capacity = settings.capacity_bytes
    largest = 248 * KIB
    sizes = [
        1,
        LIMIT - 1,
        LIMIT,
        LIMIT + 1,
        4 * LIMIT,
        largest - 1,
        largest,
        largest + 1,
        2 * capacity,
        0,
        90_000,
    ]
    model: dict[bytes, bytes] = {}
    device = MemoryDevice(max_command_bytes=LIMIT)
    devices = [device]
    for run in range(2):
        device.before = watched = Watched(device, capacity)
        async with SegmentStore.open(settings, device=device) as store:
            assert store.max_object_bytes == largest
            written = n = 0
            (lease,), hold, held, leased = [None], None, b"", b""
            while written < 7 * MIB:
                n += 1
                size = sizes[n * 7 % len(sizes)]
                name = key(n if n % 5 else n // 2)
                data = payload((run, n), size)
                status = await put(store, name, data)
                assert status == (Status.OK if size <= largest else Status.TOO_LARGE)
                if status == Status.OK:
                    model[name] = data
                    written += size
                if n % 6 == 0:
                    await store.delete_many(NAMESPACE, [key(n - 2)])
                    model.pop(key(n - 2), None)
                if n % 4 == 0:
                    name = key(n - 1)
                    assert await get(store, name) in (MISS, model.get(name))
                if n == 20:
                    leased = name
                    (lease,) = store.open_read(NAMESPACE, [name])
                    held = key(19)
                    _, hold = store.hold(NAMESPACE, [held])
                if n > 20:
                    assert store.exist(NAMESPACE, [held]) == bytes([Status.OK]), "held, so not evicted"
                assert device.used_bytes() <= store.stats().used_bytes <= capacity
            assert await store.verify([lease]) == bytes([Status.OK]), "read, so not evicted"
            assert lease.length == len(model[leased])
            assert store.stats().evicted_objects > 10
            for name, data in model.items():
                assert await get(store, name) in (data, MISS)
            lease.release()
            hold.release()
            assert watched.most_bytes > capacity * 3 // 4
            device.before = None
            if run == 0:
                devices.append(after_kill(device))
        device = devices[-1]
    for device in devices:
        device.discard()


async def test_b44_the_oldest_unused_go_first():
    with MemoryDevice(max_command_bytes=LIMIT) as device:
        async with SegmentStore.open(config("unused"), device=device) as store:
            for n in range(60):
                assert await put(store, key(n), payload(n, 100_000)) == Status.OK
            here = [n for n in range(60) if store.exist(NAMESPACE, [key(n)]) == bytes([Status.OK])]
            assert here == list(range(here[0], 60))
            assert len(here) >= 26


async def test_b45_ten_thousand_lookups_that_never_load_protect_nothing():
    """B45: neither EXIST nor a hold that has ended counts as use; afterwards all of it can be evicted."""
    with MemoryDevice(max_command_bytes=LIMIT) as device:
        async with SegmentStore.open(config("unused"), device=device) as store:
            names = [key(n) for n in range(16)]
            for n, name in enumerate(names):
                assert await put(store, name, payload(n, 120_000)) == Status.OK
            for _ in range(5_000):
                assert store.exist(NAMESPACE, names) == bytes(16)
                _, hold = store.hold(NAMESPACE, names)
                hold.release()
            assert store.stats().held_items == 0
            assert store.stats().leases == 0
            for n in range(100, 140):
                assert await put(store, key(n), payload(n, 120_000)) == Status.OK
                assert device.used_bytes() <= 4 * MIB
            assert store.exist(NAMESPACE, names) == bytes([MISS] * 16)
            assert store.stats().moved_objects == 0
            assert await store.check_many(NAMESPACE, [key(139)]) == bytes([Status.OK])


# A device that refuses, at every command


class Refusing:
    """Refuses `count` commands, but no reads, from the `first` on. `is_torn`: half of a write gets there."""

    def __init__(
        self, device: MemoryDevice, first: int, count: int, error: StorageError, *, is_torn: bool = False
    ) -> None:
        self.device, self.error, self.is_torn = device, error, is_torn
        self.refused = range(first, first + count)
        self.seen = 0
        self.hits: list[Command] = []

    def __call__(self, command: Command) -> None:
        if command.kind is Kind.READ:
            return
        self.seen += 1
        if self.seen - 1 not in self.refused:
            return
        self.hits.append(command)
        if self.is_torn and command.kind is Kind.WRITE:
            os.pwrite(self.device._files[command.name], command.data[: command.length // 2], command.position)
        raise self.error


async def busy(store: SegmentStore, model: dict[bytes, bytes]) -> set[int]:
    """Puts that roll segments and move survivors; the statuses that came back."""
    seen: set[int] = set()
    for n in range(36):
        data = payload(n, 15_000 + n)
        (status,) = await store.put_many(NAMESPACE, [item(key(n % 30), data)])
        seen.add(status)
        if status == Status.OK:
            model[key(n % 30)] = data
        for hot in (6, 7, 11):
            found = await get(store, key(hot))
            assert found in (MISS, model.get(key(hot)))
        if n % 7 == 6:
            (status,) = await store.delete_many(NAMESPACE, [key(n - 3)])
            seen.add(status)
            model.pop(key(n - 3), None)
    return seen


async def moments(durability: str) -> list[int]:
    """One command in the middle, and the last, of each kind on each kind of file, by number."""
    found: dict[tuple[Kind, str], list[int]] = {}
    with MemoryDevice(max_command_bytes=LIMIT) as device:
        async with SegmentStore.open(
            config("unused", durability=durability, **SMALL), device=device
        ) as store:
            before = len(device.commands)
            await busy(store, {})
            assert store.stats().moved_objects > 0, "survivors are written again"
            assert any(s.queue is Queue.MAIN for s in store._catalog.segments.values()), "segments are kept"
            commands = [each for each in device.commands[before:] if each.kind is not Kind.READ]
    for number, command in enumerate(commands):
        found.setdefault((command.kind, command.name[-4:]), []).append(number)
    assert {kind for kind, _ in found} >= {Kind.WRITE, Kind.ALLOCATE, Kind.CREATE, Kind.REMOVE, Kind.TRUNCATE}
    assert any(kind is Kind.SYNC for kind, _ in found) == (durability == "durable")
    return sorted({own[at] for own in found.values() for at in (len(own) // 2, -1)})


FULL, BROKEN = DeviceFull("no space left on device"), DeviceFault("input/output error")


@pytest.mark.parametrize("durability", ["relaxed", "durable"])
@pytest.mark.parametrize(
    ("error", "count", "is_torn", "expected"),
    [
        (FULL, 1, False, Status.CAPACITY_EXHAUSTED),
        (BROKEN, 1, True, Status.GATEWAY_FAULT),
        (FULL, 12, True, Status.CAPACITY_EXHAUSTED),
    ],
    ids=["full once", "a write torn by EIO", "full for a while"],
)
async def test_a_device_that_refuses_at_any_command(error, count, is_torn, expected, durability):
    """In a put, a relocation, a new segment, a removal, a journal append, a sync: the answers are typed,
    nothing is ever wrong, and once the device takes commands again so does the store, without a restart."""
    settings = config("unused", durability=durability, **SMALL)
    for first in await moments(durability):
        model: dict[bytes, bytes] = {}
        with MemoryDevice(max_command_bytes=LIMIT) as device:
            async with SegmentStore.open(settings, device=device) as store:
                device.before = refusing = Refusing(device, first, count, error, is_torn=is_torn)
                # A delete that cannot be recorded is a fault, whatever the reason.
                assert await busy(store, model) <= {Status.OK, MISS, expected, Status.GATEWAY_FAULT}
                assert refusing.hits
                device.before = Watched(device, settings.capacity_bytes)
                for n in range(6):
                    data = payload(("after", n), 50_000)
                    assert await put(store, key(n), data) == Status.OK, (first, refusing.hits)
                    assert await get(store, key(n)) == data
                    model[key(n)] = data
                for name in map(key, range(30)):
                    assert await get(store, name) in (MISS, model.get(name)), first
                present = {name for name in model if store.exist(NAMESPACE, [name]) == bytes([Status.OK])}
                assert store.stats().corrupt_objects == 0
                device.before = None
                with after_kill(device) as killed:
                    async with SegmentStore.open(settings, device=killed) as reopened:
                        for name in map(key, range(30)):
                            found = await get(reopened, name)
                            assert found in (MISS, model.get(name)), first
                            assert name not in present or found != MISS
