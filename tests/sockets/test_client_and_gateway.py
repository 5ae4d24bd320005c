"""The real client against the real gateway process."""

import os
import signal
from pathlib import Path

import anyio
import pytest

from adp_client import Client, ClientConfig, ErrorCode

from .process import gateway, running

pytestmark = pytest.mark.anyio

NAMESPACE = bytes(range(32))
PAGE_BYTES = 300_000  # more than one device command
OK, NOT_FOUND, CORRUPT = ErrorCode.OK, ErrorCode.NOT_FOUND, ErrorCode.CORRUPT


def keys(count: int) -> list[bytes]:
    return [b"key %36d" % number for number in range(count)]


def page(number: int, size: int = PAGE_BYTES) -> bytes:
    return (number.to_bytes(8, "big") * (size // 8 + 1))[:size]


def damage(data: Path, *, flipped: int, swapped: tuple[int, int], within: int) -> None:
    """Behind the gateway's back: one bit of a page, two pages for each other, two halves of a page."""
    (segment,) = data.glob("seg-*.data")
    with segment.open("r+b") as file:
        raw = bytearray(file.read())
        places = {number: raw.index(page(number)) for number in (flipped, *swapped, within)}
        raw[places[flipped] + 4711] ^= 0x10
        first, second = (places[number] for number in swapped)
        raw[first : first + PAGE_BYTES], raw[second : second + PAGE_BYTES] = (
            page(swapped[1]),
            page(swapped[0]),
        )
        at, half = places[within], PAGE_BYTES // 2
        mixed = raw[at + half : at + PAGE_BYTES] + raw[at : at + half]
        mixed[0] ^= 1  # the halves of a page are alike here
        raw[at : at + PAGE_BYTES] = mixed
        file.seek(0)
        file.write(raw)


@pytest.mark.parametrize("is_end_to_end", [True, False], ids=["client verifies", "gateway verifies"])
async def test_b43_damaged_pages_are_misses_whoever_verifies(tmp_path: Path, is_end_to_end: bool) -> None:
    data = tmp_path / "data"
    async with gateway(data) as served:
        config = ClientConfig(endpoint=served.endpoints[0], verify_payloads=is_end_to_end)
        async with Client(config) as client:
            names = keys(10)
            stored = await client.write(NAMESPACE, names, [page(number) for number in range(10)])
            assert stored.statuses == bytes(10)
            damage(data, flipped=3, swapped=(5, 6), within=8)
            memory = [bytearray(PAGE_BYTES) for _ in names]
            result = await client.read(NAMESPACE, names, memory)
            bad = {3, 5, 6, 8}
            assert list(result.statuses) == [CORRUPT if number in bad else OK for number in range(10)]
            for number in set(range(10)) - bad:
                assert memory[number] == page(number)
            # Whoever found it, the gateway has dropped it, or does so now: it is a miss from here on.
            await client.check(NAMESPACE, names)
            there = await client.exist(NAMESPACE, names)
            assert list(there.statuses) == [NOT_FOUND if number in bad else OK for number in range(10)]
            again = await client.write(NAMESPACE, [names[3]], [page(3)])
            assert again.statuses == b"\0"
            assert (await client.read(NAMESPACE, [names[3]], [memory[3]])).statuses == b"\0"
            assert memory[3] == page(3)
    log = served.log.read_text()
    assert log.count("dropped a corrupt object") == 1


async def test_b43_objects_that_the_device_cannot_deliver_are_misses_all_at_once(tmp_path: Path) -> None:
    """Nobody verified them before they were sent: the connection ends in the first of them, with the others
    queued or not yet read. Asked for again, none of them ends it a second time."""
    data = tmp_path / "data"
    count, size = 40, 128 << 10
    async with gateway(data) as served, Client(ClientConfig(endpoint=served.endpoints[0])) as client:
        pages = [bytes([number]) * size for number in range(count)]
        assert (await client.write(NAMESPACE, keys(count), pages)).is_all_ok
        (segment,) = data.glob("seg-*.data")
        os.truncate(segment, 10 * size)
        memory = [bytearray(size) for _ in range(count)]
        result = await client.read(NAMESPACE, keys(count), memory)
        whole = result.count_ok
        assert 9 <= whole <= 10
        assert result.statuses == bytes(whole) + bytes([NOT_FOUND]) * (count - whole)
        assert memory[:whole] == pages[:whole]
        assert client.stats().replays == 1


async def test_b42_a_killed_gateway_comes_back_under_the_same_client(tmp_path: Path) -> None:
    data, listen = tmp_path / "data", f"unix://{tmp_path}/gateway.sock"
    async with Client(ClientConfig(endpoint=listen)) as client:
        with running(data, listen=(listen,)) as served:
            assert (await client.write(NAMESPACE, keys(5), [page(n) for n in range(5)])).count_ok == 5
            assert client.gateway is not None
            first_boot = client.gateway.boot_id
            served.process.kill()
            served.process.wait()
        with running(data, listen=(listen,)):
            memory = [bytearray(PAGE_BYTES) for _ in range(5)]
            result = await client.read(NAMESPACE, keys(5), memory)
            assert result.statuses == bytes(5)
            assert memory == [page(number) for number in range(5)]
            assert client.gateway.boot_id != first_boot


async def test_a_thousand_pages_with_one_wait(tmp_path: Path) -> None:
    """In scattered memory, over the frame limit many times, with misses and an empty object among them."""
    count, size = 1000, 20_000
    async with (
        gateway(tmp_path / "data", listen=(f"unix://{tmp_path}/s",)) as served,
        Client(ClientConfig(endpoint=served.endpoints[0])) as client,
    ):
        names = keys(count)
        sizes = [0 if number % 100 == 7 else size for number in range(count)]
        there = [number for number in range(count) if number % 10 != 5]
        await client.write(NAMESPACE, [names[n] for n in there], [page(n, sizes[n]) for n in there])
        arena = bytearray(count * (size + 16))
        views = [memoryview(arena)[(count - 1 - n) * (size + 16) :][: sizes[n]] for n in range(count)]
        result = await client.read(NAMESPACE, names, views)
        for number, view in enumerate(views):
            if number in set(there):
                assert result.statuses[number] == OK
                assert view == page(number, sizes[number])
            else:
                assert result.statuses[number] == NOT_FOUND
                assert not any(view)
        assert sum(arena) == sum(sum(view) for view in views)


async def test_objects_around_every_limit(tmp_path: Path) -> None:
    """0, 1, L-1, L, L+1, 3.4 L of the device's command, and above what one frame carries."""
    command = 262_144
    sizes = [0, 1, command - 1, command, command + 1, int(3.4 * command), 17 << 20, 24 << 20]
    options = ("--capacity", "400MiB", "--max-object", "20MiB")
    async with (
        gateway(tmp_path / "data", *options) as served,
        Client(ClientConfig(endpoint=served.endpoints[0])) as client,
    ):
        names = keys(len(sizes))
        stored = await client.write(NAMESPACE, names, [page(n, s) for n, s in enumerate(sizes)])
        assert list(stored.statuses) == [OK] * 7 + [ErrorCode.TOO_LARGE]
        memory = [bytearray(size) for size in sizes]
        result = await client.read(NAMESPACE, names, memory)
        assert list(result.statuses) == [OK] * 7 + [NOT_FOUND]
        assert list(result.lengths[:7]) == sizes[:7]
        assert memory[:7] == [page(n, s) for n, s in enumerate(sizes[:7])]
        small = await client.read(NAMESPACE, [names[4]], [bytearray(command)])
        assert list(small.statuses) == [ErrorCode.TOO_LARGE]


async def test_a_cancelled_read_leaves_the_next_caller_its_own_bytes(tmp_path: Path) -> None:
    """B24 on real sockets: cancelled at many moments, also while the bytes come in."""
    async with (
        gateway(tmp_path / "data", listen=(f"unix://{tmp_path}/s",)) as served,
        Client(ClientConfig(endpoint=served.endpoints[0])) as client,
    ):
        names = keys(40)
        await client.write(NAMESPACE, names, [page(number) for number in range(40)])
        for turn in range(40):
            victim = bytearray(40 * PAGE_BYTES)
            views = [memoryview(victim)[n * PAGE_BYTES :][:PAGE_BYTES] for n in range(40)]
            with anyio.move_on_after(turn * 0.0003):
                await client.read(NAMESPACE, names, views)
            after = bytes(victim)
            mine = bytearray(PAGE_BYTES)
            result = await client.read(NAMESPACE, [names[turn]], [mine])
            assert result.statuses == b"\0"
            assert mine == page(turn)
            assert bytes(victim) == after


async def test_w6_leases_over_sockets_and_over_a_restart(tmp_path: Path) -> None:
    data, names = tmp_path / "data", keys(6)
    async with gateway(data) as served:
        config = ClientConfig(endpoint=served.endpoints[0])
        async with Client(config) as holder, Client(config) as other:
            await holder.write(NAMESPACE, names[:5], [page(number) for number in range(5)])
            found = await holder.exist(NAMESPACE, names, lease_seconds=3600)
            assert found.statuses == bytes(5) + b"\1"
            assert found.lease is not None
            assert found.lease.granted_seconds == 20
            deleted: list[bytes] = []

            async def delete() -> None:
                deleted.append((await other.delete(NAMESPACE, names)).statuses)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(delete)
                late = await holder.exist(NAMESPACE, names, lease_seconds=1)
                while late.lease is not None:  # the DELETE has not come yet
                    await late.lease.release()
                    late = await holder.exist(NAMESPACE, names, lease_seconds=1)
                memory = [bytearray(PAGE_BYTES) for _ in range(5)]
                assert (await holder.read(NAMESPACE, names[:5], memory)).is_all_ok
                assert memory == [page(number) for number in range(5)]
                assert deleted == []
                async with found.lease:
                    assert found.lease.is_live
            assert deleted == [bytes(5) + b"\1"]
            await holder.write(NAMESPACE, names, [page(number) for number in range(6)])
            kept = (await holder.exist(NAMESPACE, names, lease_seconds=20)).lease
            assert kept is not None
            served.stop(signal.SIGKILL)
            await kept.release()
            assert not kept.is_live
    async with gateway(data) as served, Client(ClientConfig(endpoint=served.endpoints[0])) as other:
        assert (await other.exist(NAMESPACE, names)).is_all_ok
        assert (await other.delete(NAMESPACE, names)).is_all_ok, "no lease survives a restart"


@pytest.mark.parametrize("is_end_to_end", [True, False], ids=["client verifies", "gateway verifies"])
async def test_b18_a_damaged_page_is_said_to_be_there_once_also_under_a_lease(
    tmp_path: Path, is_end_to_end: bool
) -> None:
    data, names = tmp_path / "data", keys(10)
    async with gateway(data) as served:
        config = ClientConfig(endpoint=served.endpoints[0], verify_payloads=is_end_to_end)
        async with Client(config) as client:
            await client.write(NAMESPACE, names, [page(number) for number in range(10)])
            damage(data, flipped=3, swapped=(5, 6), within=8)
            found = await client.exist(NAMESPACE, names, lease_seconds=20)
            assert (found.is_all_ok, found.lease is None) == (True, False)
            assert (await client.read(NAMESPACE, [names[3]], [bytearray(PAGE_BYTES)])).statuses == bytes(
                [CORRUPT]
            )
            with anyio.fail_after(10):
                while (await client.exist(NAMESPACE, [names[3]], lease_seconds=20)).is_all_ok:
                    pass
            assert (await client.read(NAMESPACE, [names[3]], [bytearray(PAGE_BYTES)])).statuses == bytes(
                [NOT_FOUND]
            )
            assert (await client.write(NAMESPACE, [names[3]], [page(3)])).is_all_ok
            assert (await client.read(NAMESPACE, [names[3]], [bytearray(PAGE_BYTES)])).is_all_ok
