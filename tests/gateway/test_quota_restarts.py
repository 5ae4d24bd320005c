"""Quotas through restarts, kills, damage and a device that fails."""

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from adp_gateway.device.memory import Command, Kind, MemoryDevice
from adp_gateway.errors import DeviceFault
from adp_gateway.fsck import check_device
from adp_gateway.store.base import Status
from adp_gateway.store.quotas import Account
from adp_gateway.store.segments import SegmentStore
from gateway.objects import KIB, MIB, after_kill, config, get, item, key, payload, put
from gateway.tenancy import ACCOUNTS, MINE, QUOTA, THEIRS, account
from gateway.waiting import until

pytestmark = pytest.mark.anyio


async def test_b44_the_configured_quota_is_enforced_through_crash_and_restart():
    """10 MiB allowed, 30 MiB and more put, in sizes around everything; killed half way."""
    quota = 10 * MIB
    accounts = (
        Account(name="mine", prefix=MINE[:8], quota_bytes=quota),
        Account(name="theirs", prefix=THEIRS[:8]),
    )
    sizes = [1, 4096, 250_000, 250_001, 1_000_000, 0, 12_345]
    settings = config(
        "unused",
        capacity_bytes=40 * MIB,
        segment_bytes=MIB + 256 * KIB,
        accounts=accounts,
        max_object_bytes=MIB,
    )
    draw = random.Random(44)
    model: dict[bytes, bytes] = {}

    async def work(store: SegmentStore, numbers: range) -> None:
        for n in numbers:
            name = key(draw.randrange(n + 1) if n % 5 == 0 else n)
            data = payload(n, sizes[n % len(sizes)])
            assert await put(store, name, data, MINE) == Status.OK
            model[name] = data
            assert account(store, "mine").used_bytes <= quota
            if n % 11 == 0:
                gone = key(draw.randrange(n + 1))
                await store.delete_many(MINE, [gone])
                model.pop(gone, None)

    async def judge(store: SegmentStore) -> None:
        assert account(store, "mine").used_bytes <= quota
        for name, data in list(model.items()):
            found = await get(store, name, MINE)
            if found == Status.NOT_FOUND:
                del model[name]
            else:
                assert found == data
        assert account(store, "mine").objects == len(model)
        for n in range(10):
            assert await get(store, key(n), THEIRS) == payload(("theirs", n), 500_000)

    with MemoryDevice(max_command_bytes=16 * KIB) as device:
        async with SegmentStore.open(settings, device=device) as store:
            for n in range(10):
                await put(store, key(n), payload(("theirs", n), 500_000), THEIRS)
            await work(store, range(80))
            await judge(store)
            before = account(store, "mine")
            with after_kill(device) as image:
                async with SegmentStore.open(settings, device=image) as again:
                    await judge(again)
                    after = account(again, "mine")
                    assert (after.objects, after.used_bytes) == (before.objects, before.used_bytes)
                    await work(again, range(80, 160))
                    await judge(again)
                assert check_device(image).is_clean
                assert image.used_bytes() <= 40 * MIB


async def test_what_was_evicted_is_gone_after_a_kill_too():
    settings = config("unused", accounts=ACCOUNTS)
    with MemoryDevice(max_command_bytes=16 * KIB) as device:
        async with SegmentStore.open(settings, device=device) as store:
            for n in range(20):
                await put(store, key(n), payload(n, 100_000), MINE)
            there = store.exist(MINE, [key(n) for n in range(20)])
            assert Status.NOT_FOUND in there
            with after_kill(device) as image:
                no_limit = config("unused")
                async with SegmentStore.open(no_limit, device=image) as again:
                    assert again.exist(MINE, [key(n) for n in range(20)]) == there


async def test_a_kill_between_a_put_and_the_record_of_what_it_evicted():
    """At every command: what the next start finds is within the quota, whatever of it was recorded."""
    settings = config("unused", accounts=ACCOUNTS, durability="durable")
    with MemoryDevice(max_command_bytes=16 * KIB) as device:
        async with SegmentStore.open(settings, device=device) as store:
            for n in range(9):
                await put(store, key(n), payload(n, 100_000), MINE)
            first = len(device.commands)
            assert await put(store, key(9), payload(9, 200_000), MINE) == Status.OK
            last = len(device.commands)
        over = 0
        for count in range(first, last + 1):
            with device.after_power_cut(count, lambda command: command.length or 1) as image:
                async with SegmentStore.open(config("unused"), device=image) as unlimited:
                    names = [key(n) for n in range(10)]
                    over += unlimited.exist(MINE, names).count(Status.OK) > 8
            with device.after_power_cut(count, lambda command: command.length or 1) as image:
                async with SegmentStore.open(settings, device=image) as again:
                    assert account(again, "mine").used_bytes <= QUOTA
                    assert await get(again, key(8), MINE) == payload(8, 100_000)
        assert over, "there is such a moment"


@pytest.mark.parametrize("kind", [None, "killed"])
async def test_a_quota_that_was_lowered_takes_effect_at_the_start_and_for_good(kind):
    def lowered(quota_bytes: int | None):
        return config("unused", accounts=(Account(name="mine", prefix=MINE[:8], quota_bytes=quota_bytes),))

    with MemoryDevice(max_command_bytes=16 * KIB) as device:
        async with SegmentStore.open(lowered(None), device=device) as store:
            for n in range(10):
                await put(store, key(n), payload(n, 100_000), MINE)
        async with SegmentStore.open(lowered(400_000), device=device) as store:
            assert account(store, "mine").used_bytes <= 400_000
            there = store.exist(MINE, [key(n) for n in range(10)])
            assert there == bytes([Status.NOT_FOUND] * 7 + [Status.OK] * 3)
            image = after_kill(device)
        with image:
            async with SegmentStore.open(lowered(None), device=image if kind else device) as store:
                assert store.exist(MINE, [key(n) for n in range(10)]) == there


async def test_a_tenant_that_is_gone_keeps_its_objects_until_they_are_evicted():
    with MemoryDevice(max_command_bytes=16 * KIB) as device:
        async with SegmentStore.open(config("unused", accounts=ACCOUNTS), device=device) as store:
            await put(store, key(1), b"mine", MINE)
        async with SegmentStore.open(config("unused", accounts=ACCOUNTS[1:]), device=device) as store:
            assert [each.name for each in store.stats().accounts] == ["theirs", "free", "tight"]
            assert store.stats().objects == 1
        async with SegmentStore.open(config("unused", accounts=ACCOUNTS), device=device) as store:
            assert account(store, "mine").objects == 1
            assert await get(store, key(1), MINE) == b"mine"


async def test_a_device_that_fails_gives_the_quota_back():
    broken = False

    def before(command: Command) -> None:
        if broken and command.kind is Kind.WRITE:
            raise DeviceFault("no")

    with MemoryDevice(max_command_bytes=16 * KIB, before=before) as device:
        async with SegmentStore.open(config("unused", accounts=ACCOUNTS), device=device) as store:
            for name in ("data", "journal"):
                broken = True
                for n in range(20):
                    assert await put(store, key(n), bytes(200_000), MINE) == Status.GATEWAY_FAULT, name
                broken = False
                assert account(store, "mine").used_bytes == 0
            items = [item(key(n), b"") for n in range(QUOTA // (4096 + 384))]
            assert await store.put_many(MINE, items) == bytes(len(items))
            assert account(store, "mine").evicted_objects == 0


ROOMY = config("unused", capacity_bytes=16 * MIB, segment_bytes=2 * MIB, accounts=ACCOUNTS)


@contextmanager
def opened_in_the_end(gate: threading.Event) -> Iterator[None]:
    """However a test ends, no thread is left waiting."""
    try:
        yield
    finally:
        gate.set()


async def test_a_put_waits_for_its_account_s_others_and_holds_up_nobody_else():
    """The first put has all of the quota and is stuck in the device: the second cannot know yet."""
    gate = threading.Event()
    stuck: list[Command] = []

    def before(command: Command) -> None:
        if command.kind is Kind.WRITE and command.data.startswith(b"stuck") and not gate.is_set():
            stuck.append(command)
            assert gate.wait(30)

    statuses: dict[str, bytes] = {}
    with MemoryDevice(max_command_bytes=16 * KIB, before=before) as device:
        async with SegmentStore.open(ROOMY, device=device) as store:

            async def write(name: str, first: int, start: bytes) -> None:
                items = [item(key(n), start + bytes(200_000)) for n in range(first, first + 5)]
                statuses[name] = await store.put_many(MINE, items)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(write, "first", 0, b"stuck")
                with opened_in_the_end(gate):
                    await until(lambda: bool(stuck))
                    tasks.start_soon(write, "second", 10, b"")
                    with anyio.CancelScope() as scope:
                        async with anyio.create_task_group() as others:
                            others.start_soon(write, "cancelled", 20, b"")
                            await wait_all_tasks_blocked()
                            scope.cancel()
                    assert await put(store, key(9), bytes(200_000), THEIRS) == Status.OK
                    assert statuses == {}
            assert statuses == {"first": bytes(5), "second": bytes(5)}
            assert store.exist(MINE, [key(14)]) == bytes([Status.OK])
            assert account(store, "mine").used_bytes <= QUOTA


async def test_who_waited_in_vain_is_told_that_there_is_no_room():
    """Everything is being read, also the object that the other put replaces."""
    gate = threading.Event()
    stuck: list[Command] = []

    def before(command: Command) -> None:
        if command.kind is Kind.WRITE and command.data.startswith(b"stuck") and not gate.is_set():
            stuck.append(command)
            assert gate.wait(30)

    statuses: list[Status] = []
    with MemoryDevice(max_command_bytes=16 * KIB, before=before) as device:
        async with SegmentStore.open(ROOMY, device=device) as store:

            async def write(name: bytes, start: bytes) -> None:
                statuses.append(await put(store, name, start + bytes(200_000), MINE))

            for n in range(5):
                await write(key(n), b"")
            leases = store.open_read(MINE, [key(n) for n in range(5)])
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(write, key(0), b"stuck")
                with opened_in_the_end(gate):
                    await until(lambda: bool(stuck))
                    tasks.start_soon(write, key(10), b"")
                    await wait_all_tasks_blocked()
                    assert len(statuses) == 5
            assert sorted(statuses[5:]) == [Status.OK, Status.CAPACITY_EXHAUSTED]
            for lease in leases:
                assert lease is not None
                lease.release()
            assert await put(store, key(10), bytes(200_000), MINE) == Status.OK
