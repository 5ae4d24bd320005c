"""Shared regions between the real client and the real gateway process."""

import contextlib
import functools
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
import xxhash

from adp_client import BackoffConfig, Client, ClientConfig, ErrorCode, RegionSlice, SharedRegion, Timeouts
from adp_client.errors import RequestTimeout
from adp_client.protocol.constants import Feature
from adp_client.protocol.messages import (
    Hello,
    ReadRegion,
    RegionClose,
    RegionOpen,
    RegionSource,
    RegionTarget,
    WriteRegion,
)
from descriptors import of_clients, shared_mappings
from gateway.peer import NAMESPACE, Peer, content, key_of
from gateway.waiting import until

from .process import gateway, running

pytestmark = pytest.mark.anyio

SHARING = Hello(features=Feature.REGIONS | Feature.END_TO_END)
OK, NOT_FOUND, CORRUPT = ErrorCode.OK, ErrorCode.NOT_FOUND, ErrorCode.CORRUPT
REFUSED, TOO_LARGE = ErrorCode.REFUSED, ErrorCode.TOO_LARGE
QUICK = BackoffConfig(initial_seconds=0.01, cap_seconds=0.05)
KIB, MIB = 1 << 10, 1 << 20


def keys(count: int) -> list[bytes]:
    return [key_of(number) for number in range(count)]


@pytest.mark.parametrize("verifies", [True, False], ids=["client verifies", "gateway verifies"])
async def test_pages_of_all_sizes(tmp_path: Path, verifies: bool) -> None:
    sizes = [256 * KIB] * 64 + [MIB, 0, 1, 300_000, 864 * KIB]
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    config = ClientConfig(endpoint=f"unix://{tmp_path}/s", verify_payloads=verifies)
    async with gateway(tmp_path / "data", listen=(config.endpoint,)), Client(config) as client:
        with SharedRegion.create(sum(sizes)) as region:
            slices = [region.slice(start, size) for start, size in zip(starts, sizes, strict=True)]
            wanted = content(sum(sizes), 5)
            region.memory[:] = wanted
            assert (await client.write(NAMESPACE, keys(len(sizes)), slices)).is_all_ok
            region.memory[:] = bytes(sum(sizes))
            result = await client.read(NAMESPACE, keys(len(sizes)), slices)
            assert result.is_all_ok
            assert result.lengths == tuple(sizes)
            assert bytes(region.memory) == wanted
            found = await client.read(NAMESPACE, [b"absent", key_of(0)], [slices[1], slices[66]])
            assert list(found.statuses) == [NOT_FOUND, TOO_LARGE]
            # The same objects as over the socket.
            memory = [bytearray(size) for size in sizes]
            assert (await client.read(NAMESPACE, keys(len(sizes)), memory)).is_all_ok
            assert b"".join(memory) == wanted


async def test_b43_damage_on_the_device_is_never_taken_for_an_object(tmp_path: Path) -> None:
    data, config = tmp_path / "data", ClientConfig(endpoint=f"unix://{tmp_path}/s")
    async with gateway(data, listen=(config.endpoint,)), Client(config) as client:
        with SharedRegion.create(4 * 300_000) as region:
            slices = [region.slice(at * 300_000, 300_000) for at in range(4)]
            region.memory[:] = content(4 * 300_000, 9)
            assert (await client.write(NAMESPACE, keys(4), slices)).is_all_ok
            (segment,) = data.glob("seg-*.data")
            raw = bytearray(segment.read_bytes())
            raw[raw.index(bytes(slices[2].memory)) + 4711] ^= 0x10
            segment.write_bytes(raw)
            assert list((await client.read(NAMESPACE, keys(4), slices)).statuses) == [OK, OK, CORRUPT, OK]
            await client.check(NAMESPACE, keys(4))
            assert list((await client.exist(NAMESPACE, keys(4))).statuses) == [OK, OK, NOT_FOUND, OK]


async def test_regions_are_offered_where_descriptors_travel(tmp_path: Path) -> None:
    listen = ("tcp://127.0.0.1:0", f"unix://{tmp_path}/s")
    async with gateway(tmp_path / "data", listen=listen) as served:
        for which, has_regions in ((0, False), (1, True)):
            peer = await served.dial(which, SHARING)
            assert (Feature.REGIONS in peer.connection.features) is has_regions
        async with Client(ClientConfig(endpoint=served.endpoints[0])) as client:
            with SharedRegion.create(100) as region:
                region.memory[:5] = b"hello"
                assert (await client.write(NAMESPACE, keys(1), [region.slice(0, 5)])).is_all_ok
                assert (await client.read(NAMESPACE, keys(1), [region.slice(50, 9)])).lengths == (5,)
                assert bytes(region.memory[50:55]) == b"hello"


# ------------------------------------------------------------ peers that do what they should not


@contextmanager
def memory_file(size: int) -> Iterator[int]:
    fd = os.memfd_create("region")
    os.ftruncate(fd, size)
    try:
        yield fd
    finally:
        os.close(fd)


async def open_region(peer: Peer, number: int, size: int, fd: int) -> ErrorCode:
    request_id, raw = peer.connection.request(RegionOpen(region=number, region_bytes=size))
    await peer.transport.send_with_descriptor(raw, fd)  # type: ignore[attr-defined]
    return (await peer.answer(request_id)).status


def reading(count: int, size: int) -> ReadRegion:
    targets = tuple(RegionTarget(region=1, offset=at * size, capacity=size) for at in range(count))
    return ReadRegion(namespace=NAMESPACE, keys=tuple(keys(count)), targets=targets)


def writing(count: int, size: int) -> WriteRegion:
    zeros = xxhash.xxh3_64_intdigest(bytes(size))
    sources = tuple(
        RegionSource(region=1, offset=at * size, length=size, checksum=zeros) for at in range(count)
    )
    return WriteRegion(namespace=bytes(32), keys=tuple(keys(count)), sources=sources)


async def outcomes(peer: Peer, message: ReadRegion | WriteRegion) -> set[int]:
    answer = await peer.call(message)
    if isinstance(message, WriteRegion):
        return set(answer.statuses)
    return {row.status for frame in answer.frames for row in frame.items}  # type: ignore[union-attr]


@pytest.mark.parametrize("hello", [SHARING, Hello(features=Feature.REGIONS)], ids=["end to end", "plain"])
async def test_a_peer_that_cuts_its_file_off_kills_nobody(tmp_path: Path, hello: Hello) -> None:
    """Before, between and during transfers. One look at the mapping would be a SIGBUS for the process."""
    size, count = 256 * KIB, 32
    async with gateway(tmp_path / "data", listen=(f"unix://{tmp_path}/s",)) as served:
        good, bad = await served.dial(0, hello), await served.dial(0, hello)
        pages = {key_of(at): content(size, at) for at in range(count)}
        assert set(await good.write(pages)) == {OK}
        with memory_file(count * size) as fd, memory_file(count * size) as healthy:
            assert await open_region(bad, 1, count * size, fd) is OK
            assert await open_region(good, 1, count * size, healthy) is OK
            os.ftruncate(fd, 0)
            assert await outcomes(bad, reading(count, size)) == {REFUSED}
            assert await outcomes(bad, writing(count, size)) == {REFUSED}
            seen: set[int] = set()
            for turn in range(20):
                os.ftruncate(fd, count * size)
                asked = [await bad.ask(reading(count, size)), await bad.ask(writing(count, size))]
                for left in range(count - 1, -1, -1 - turn % 7):
                    os.ftruncate(fd, left * size)
                for request_id in asked:
                    answer = await bad.answer(request_id)
                    for frame in answer.frames:
                        rows = getattr(frame, "items", None)
                        seen |= set(frame.statuses) if rows is None else {row.status for row in rows}
                assert await outcomes(good, reading(count, size)) == {OK}
            assert REFUSED in seen
            assert seen <= {OK, REFUSED, CORRUPT}
            assert os.pread(healthy, count * size, 0) == b"".join(pages.values())
        assert await good.read(key_of(3)) == [content(size, 3)]
        assert served.process.poll() is None


async def test_descriptors_come_back_whatever_peers_do(tmp_path: Path) -> None:
    """B55: 200 regions one after the other, 50 connections that break the rules, a client that is killed."""
    shm = shared_files()
    async with gateway(tmp_path / "data", listen=(f"unix://{tmp_path}/s",)) as served:
        pid = served.process.pid
        peer = await served.dial(0, SHARING)
        await peer.write({key_of(0): b"object"})
        before = of_clients(pid)
        for number in range(200):
            with memory_file(8192) as fd:
                assert await open_region(peer, 1, 4096 + number, fd) is OK
                assert await outcomes(peer, reading(1, 6)) == {OK}
                assert (await peer.call(RegionClose(region=1))).status is OK
        assert (of_clients(pid), shared_mappings(pid)) == (before, 0)
        with memory_file(4096) as fd:
            for number in range(50):
                bad = await served.dial(0, SHARING)
                raw = bad.connection.request(RegionOpen(region=1, region_bytes=4096))[1]
                rights = struct.pack("3i", fd, fd, fd)[: 4 * (number % 4)]
                sock: socket.socket = bad.transport.raw_socket  # type: ignore[attr-defined]
                sock.sendmsg([raw], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if rights else [])
                if number % 4 == 1:
                    assert (await bad.answer(1)).status is OK
                    sock.sendall(b"nonsense" * 4)
                await bad.closed()
                await bad.transport.aclose()
        await until(lambda: of_clients(pid) == before)
        assert shared_mappings(pid) == 0
        killed = other_client(served.endpoints[0])
        assert killed.stdout is not None
        assert killed.stdout.readline() == "reading\n"
        assert shared_mappings(pid) > 0
        killed.kill()
        killed.communicate()
        await until(lambda: of_clients(pid) == before)
        assert shared_mappings(pid) == 0
        assert await peer.exist(key_of(0)) == [OK]
    assert shared_files() == shm


def shared_files() -> list[Path]:
    return sorted(Path("/dev/shm").iterdir())


def other_client(endpoint: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", _CLIENT, endpoint], stdout=subprocess.PIPE, text=True)


_CLIENT = """
import sys, anyio
from adp_client import Client, ClientConfig, SharedRegion
async def main():
    async with Client(ClientConfig(endpoint=sys.argv[1])) as client:
        region = SharedRegion.create(64 << 20)
        slices = [region.slice(at << 20, 1 << 20) for at in range(64)]
        names = [b"%016d" % at for at in range(64)]
        await client.write(bytes(32), names, slices)
        await client.read(bytes(32), names, slices)
        print("reading", flush=True)
        while True:
            await client.read(bytes(32), names, slices)
anyio.run(main)
"""


async def test_more_regions_than_a_gateway_takes(tmp_path: Path) -> None:
    """The first ones are shared, the others are memory like any other; closed ones make room."""
    config = ClientConfig(endpoint=f"unix://{tmp_path}/s")
    async with gateway(tmp_path / "data", listen=(config.endpoint,)) as served, Client(config) as client:
        await client.ping()
        before = of_clients(served.process.pid)
        regions = [SharedRegion.create(100) for _ in range(400)]
        try:
            for number, region in enumerate(regions):
                region.memory[:9] = b"page %4d" % number
            for start in range(0, 400, 100):
                names = [key_of(start + at) for at in range(100)]
                sources = [region.slice(0, 9) for region in regions[start : start + 100]]
                assert (await client.write(NAMESPACE, names, sources)).is_all_ok
            for number, region in enumerate(regions):
                result = await client.read(NAMESPACE, [key_of(number)], [region.slice(50, 9)])
                assert result.is_all_ok
                assert bytes(region.memory[50:59]) == b"page %4d" % number
            assert shared_mappings(served.process.pid) == 64
            for region in regions[:64]:
                region.close()
            await client.fence()
            await until(lambda: shared_mappings(served.process.pid) == 0)
        finally:
            for region in regions:
                region.close()
        await until(lambda: of_clients(served.process.pid) == before)
        for number in range(100):
            with SharedRegion.create(100) as region:
                region.memory[:9] = b"page %4d" % number
                assert (await client.write(NAMESPACE, [b"last"], [region.slice(0, 9)])).is_all_ok
        await client.fence()
        await until(lambda: of_clients(served.process.pid) == before)


def has_come(part: RegionSlice) -> bool:
    return any(part.memory[:1])


# ------------------------------------------------------------ gateways that go, or stay and say nothing


@pytest.mark.timeout(90)  # seven processes
async def test_b42_a_gateway_killed_in_the_middle_of_transfers(tmp_path: Path) -> None:
    """What comes back is whole or not OK, and the region is not lost: a dead process is closed."""
    count = 32
    listen = (f"unix://{tmp_path}/s",)
    config = ClientConfig(endpoint=listen[0], backoff=QUICK)
    options = ("--capacity", "256MiB", "--max-object", "8MiB")
    with SharedRegion.create(count * MIB) as region:
        slices = [region.slice(at * MIB, MIB) for at in range(count)]
        wanted = [bytes([at + 1]) * MIB for at in range(count)]
        async with Client(config) as client:
            with running(tmp_path / "data", *options, listen=listen):
                for at, each in enumerate(slices):
                    each.memory[:] = wanted[at]
                assert (await client.write(NAMESPACE, keys(count), slices)).is_all_ok
            for turn in range(3):
                with running(tmp_path / "data", *options, listen=listen) as served:
                    assert (await client.read(NAMESPACE, keys(count), slices)).is_all_ok
                    region.memory[:] = bytes(count * MIB)
                    with contextlib.ExitStack() as next_one:  # stays until both reads are over
                        async with anyio.create_task_group() as tasks:
                            tasks.start_soon(client.read, NAMESPACE, keys(count), slices)
                            await until(functools.partial(has_come, slices[turn * 9]))
                            served.process.kill()
                            served.process.wait()
                            next_one.enter_context(running(tmp_path / "data", *options, listen=listen))
                            result = await client.read(NAMESPACE, keys(count), slices)
                            assert result.is_all_ok
                assert not region.is_retired
                assert [each.memory == page for each, page in zip(slices, wanted, strict=True)] == [
                    True
                ] * count


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["deadline", "cancelled"])
async def test_a_stopped_gateway_costs_the_region_and_no_more_time_than_was_said(
    tmp_path: Path, is_cancelled: bool
) -> None:
    timeouts = Timeouts(request_seconds=0.5 if not is_cancelled else 60, release_seconds=0.3)
    config = ClientConfig(endpoint=f"unix://{tmp_path}/s", timeouts=timeouts, backoff=QUICK)
    async with gateway(tmp_path / "data", listen=(config.endpoint,)) as served, Client(config) as client:
        with SharedRegion.create(16 * MIB) as region:
            slices = [region.slice(at * MIB, MIB) for at in range(16)]
            assert (await client.write(NAMESPACE, keys(16), slices)).is_all_ok
            assert (await client.read(NAMESPACE, keys(16), slices)).is_all_ok
            served.process.send_signal(signal.SIGSTOP)
            try:
                begun = time.monotonic()
                if is_cancelled:
                    with anyio.move_on_after(0.2) as scope:
                        await client.read(NAMESPACE, keys(16), slices)
                    assert scope.cancelled_caught
                else:
                    with pytest.raises(RequestTimeout, match="retired"):
                        await client.read(NAMESPACE, keys(16), slices)
                assert 0.7 < time.monotonic() - begun < 10
                assert region.is_retired
            finally:
                served.process.send_signal(signal.SIGCONT)
        with SharedRegion.create(16 * MIB) as region:
            slices = [region.slice(at * MIB, MIB) for at in range(16)]
            with anyio.fail_after(10):
                while True:
                    try:
                        assert (await client.read(NAMESPACE, keys(16), slices)).is_all_ok
                        break
                    except RequestTimeout:
                        region.check_usable()
            assert not region.is_retired
