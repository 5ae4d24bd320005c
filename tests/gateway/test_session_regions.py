"""Shared regions, over socket pairs: what READ_REGION and WRITE_REGION do, and what no peer can do."""

import os
import socket
import struct
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import anyio
import attrs
import pytest
import xxhash

from adp_client.protocol.constants import ErrorCode, Feature
from adp_client.protocol.messages import (
    Delete,
    Fence,
    Hello,
    Ping,
    Read,
    ReadItem,
    ReadRegion,
    RegionClose,
    RegionOpen,
    RegionSource,
    RegionTarget,
    Request,
    WriteRegion,
)
from adp_client.transport import Half
from adp_gateway.device.memory import Command, Kind, MemoryDevice
from adp_gateway.shared import Patience
from adp_gateway.store.memory import MemoryStore
from adp_gateway.store.segments import SegmentStore
from descriptors import descriptors, shared_mappings
from gateway.objects import KIB, MIB, config

from .house import House, house
from .peer import NAMESPACE, Answer, Peer, content, key_of
from .waiting import until

pytestmark = pytest.mark.anyio

OK, NOT_FOUND, CORRUPT = ErrorCode.OK, ErrorCode.NOT_FOUND, ErrorCode.CORRUPT
STALE, REFUSED, TOO_LARGE = ErrorCode.STALE_EPOCH, ErrorCode.REFUSED, ErrorCode.TOO_LARGE
SHARING = Hello(features=Feature.REGIONS | Feature.END_TO_END)
TRUSTING = Hello(features=Feature.REGIONS)  # has the gateway verify
QUICK = Patience(farewell_seconds=0.05)


@asynccontextmanager
async def sharing(tmp_path, kind: str = "memory") -> AsyncIterator[House]:
    """After: nothing is open that was not open before, and nothing is mapped."""
    before = descriptors()
    if kind == "memory":
        async with house(MemoryStore(), patience=QUICK) as home:
            yield home
    else:
        settings = config(tmp_path / "kv", capacity_bytes=64 * MIB, segment_bytes=8 * MIB)
        async with SegmentStore.open(settings) as store, house(store, patience=QUICK) as home:
            yield home
    assert descriptors() == before
    assert shared_mappings() == 0


stores = pytest.mark.parametrize("kind", ["memory", "files"])


@contextmanager
def memory_file(size: int) -> Iterator[int]:
    fd = os.memfd_create("region")
    os.ftruncate(fd, size)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def zero_file() -> Iterator[int]:
    fd = os.open("/dev/zero", os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)


async def open_region(peer: Peer, number: int, size: int, fd: int) -> ErrorCode:
    request_id, raw = peer.connection.request(RegionOpen(region=number, region_bytes=size))
    await peer.transport.send_with_descriptor(raw, fd)  # type: ignore[attr-defined]
    return (await peer.answer(request_id)).status


def reading(*targets: tuple[int, int, int], keys: list[bytes] | None = None) -> ReadRegion:
    """Key 0 to (region, offset, capacity), key 1 to the next, and so on."""
    return ReadRegion(
        namespace=NAMESPACE,
        keys=tuple(keys or map(key_of, range(len(targets)))),
        targets=tuple(RegionTarget(region=r, offset=o, capacity=c) for r, o, c in targets),
    )


def writing(*sources: tuple[int, int, bytes]) -> WriteRegion:
    return WriteRegion(
        namespace=NAMESPACE,
        keys=tuple(map(key_of, range(len(sources)))),
        sources=tuple(
            RegionSource(region=r, offset=o, length=len(data), checksum=xxhash.xxh3_64_intdigest(data))
            for r, o, data in sources
        ),
    )


def rows(answer: Answer) -> list[ReadItem]:
    found = {row.index: row for frame in answer.frames for row in frame.items}  # type: ignore[union-attr]
    return [found[index] for index in sorted(found)]


async def statuses(peer: Peer, message: Request) -> list[int]:
    answer = await peer.call(message)
    return [row.status for row in rows(answer)] if isinstance(message, ReadRegion) else answer.statuses


@stores
@pytest.mark.parametrize("hello", [SHARING, TRUSTING], ids=["client verifies", "gateway verifies"])
async def test_objects_go_out_and_come_back_without_crossing_the_socket(tmp_path, kind, hello) -> None:
    sizes = [0, 1, 4095, 4096, 4097, 100_000, 1 << 20, 256 << 10]
    objects = [content(size, seed) for seed, size in enumerate(sizes)]
    starts = [sum(sizes[:at]) + at for at in range(len(sizes))]
    room = sum(sizes) + 100
    async with sharing(tmp_path, kind) as home:
        peer = await home.connect(hello)
        with memory_file(room) as fd, memory_file(room) as other:
            assert await open_region(peer, 1, room, fd) is OK
            assert await open_region(peer, 0xFFFFFFFF, room, other) is OK
            for start, data in zip(starts, objects, strict=True):
                os.pwrite(fd, data, start)
            written = await peer.call(writing(*((1, s, d) for s, d in zip(starts, objects, strict=True))))
            assert written.statuses == [OK] * len(sizes)
            os.pwrite(other, b"\xee" * room, 0)
            targets = [(0xFFFFFFFF, s, n) for s, n in zip(starts, sizes, strict=True)]
            targets += [(0xFFFFFFFF, room - 5, 5), (0xFFFFFFFF, 0, 0)]
            keys = [*map(key_of, range(len(sizes))), key_of(99), key_of(1)]
            found = rows(await peer.call(reading(*targets, keys=keys)))
            assert [row.status for row in found] == [OK] * len(sizes) + [NOT_FOUND, TOO_LARGE]
            for row, start, data in zip(found, starts, objects, strict=False):
                assert row.length == row.object_bytes == len(data)
                assert row.checksum == xxhash.xxh3_64_intdigest(data)
                assert os.pread(other, len(data), start) == data
                assert os.pread(other, 1, start + len(data)) == b"\xee", "not a byte more"
            assert found[-1].object_bytes == 1
            assert await peer.read(key_of(5)) == [objects[5]], "the same objects as ever"
        assert home.shared.region_budget.regions == 2
    assert home.shared.region_budget.regions == 0


async def test_bounds_are_those_of_numbers_not_of_machine_words(tmp_path) -> None:
    end = 1 << 64
    async with sharing(tmp_path) as home:
        peer = await home.connect(SHARING)
        await peer.write({key_of(n): b"object" for n in range(9)})
        with memory_file(4096) as fd:
            assert await open_region(peer, 1, 4000, fd) is OK
            places = [(0, 6), (3994, 6), (3995, 6), (4000, 0), (4001, 0), (end - 1, 1), (end - 6, 6)]
            places += [(end - 1, 1 << 27), (1 << 63, 6)]
            found = await statuses(peer, reading(*((1, offset, size) for offset, size in places)))
            assert found == [OK, OK, REFUSED, TOO_LARGE] + [REFUSED] * 5
            big = RegionSource(region=1, offset=end - 3, length=6, checksum=0)
            message = WriteRegion(namespace=NAMESPACE, keys=(b"k", b"l"), sources=(big, big))
            assert await statuses(peer, message) == [REFUSED, REFUSED]
            assert await statuses(peer, reading((2, 0, 6), (1, 0, 6))) == [STALE, OK]
            assert await statuses(peer, writing((0, 0, b"x"), (1, 4000, b""))) == [STALE, OK]
            os.ftruncate(fd, 8192)
            assert await statuses(peer, reading((1, 4000, 6))) == [REFUSED], "as large as it was said to be"


async def test_overlapping_targets_hurt_only_themselves(tmp_path) -> None:
    async with sharing(tmp_path) as home:
        peer = await home.connect(SHARING)
        await peer.write({key_of(n): content(5000, n) for n in range(3)})
        with memory_file(20_000) as fd:
            assert await open_region(peer, 1, 20_000, fd) is OK
            found = await statuses(peer, reading((1, 0, 5000), (1, 100, 5000), (1, 10_000, 5000)))
            assert found == [OK] * 3
            assert os.pread(fd, 5000, 10_000) == content(5000, 2)


@stores
async def test_damage(tmp_path, kind) -> None:
    """With END_TO_END the client is told what the bytes should be; without, it never gets wrong ones."""
    async with sharing(tmp_path, kind) as home:
        trusting, sharing_ = await home.connect(TRUSTING), await home.connect(SHARING)
        await sharing_.write({key_of(n): content(50_000, n) for n in range(3)})
        if kind == "memory":
            home.store.damage(NAMESPACE, key_of(1))
        else:
            (segment,) = (tmp_path / "kv").glob("seg-*.data")
            raw = bytearray(segment.read_bytes())
            raw[raw.index(content(50_000, 1)) + 777] ^= 1
            segment.write_bytes(raw)
        message = reading(*((1, n * 50_000, 50_000) for n in range(3)))
        with memory_file(150_000) as fd:
            assert await open_region(sharing_, 1, 150_000, fd) is OK
            found = rows(await sharing_.call(message))
            assert [row.status for row in found] == [OK] * 3
            assert xxhash.xxh3_64_intdigest(os.pread(fd, 50_000, 50_000)) != found[1].checksum
        with memory_file(150_000) as fd:
            assert await open_region(trusting, 1, 150_000, fd) is OK
            assert await statuses(trusting, message) == [OK, CORRUPT, OK]
            assert os.pread(fd, 50_000, 50_000) == bytes(50_000)
            assert os.pread(fd, 50_000, 0) == content(50_000, 0)
        assert await trusting.exist(key_of(1)) == [NOT_FOUND]


@stores
@pytest.mark.parametrize("hello", [SHARING, TRUSTING], ids=["client verifies", "gateway verifies"])
async def test_a_file_that_has_become_shorter_is_refused_item_by_item(tmp_path, kind, hello) -> None:
    """Had anything here looked at the mapping, this process would be gone (SIGBUS)."""
    async with sharing(tmp_path, kind) as home:
        peer, other = await home.connect(hello), await home.connect(hello)
        await peer.write({key_of(n): content(40_960, n) for n in range(4)})
        message = reading(*((1, n * 40_960, 40_960) for n in range(4)))
        with memory_file(4 * 40_960) as fd:
            assert await open_region(peer, 1, 4 * 40_960, fd) is OK
            assert await open_region(other, 1, 4 * 40_960, fd) is OK
            for left, outcome in ((81_920, [OK, OK, REFUSED, REFUSED]), (0, [REFUSED] * 4)):
                os.ftruncate(fd, left)
                assert await statuses(peer, message) == outcome
                assert await statuses(other, message) == outcome
                put = writing(*((1, n * 40_960, b"x" * 40_960) for n in range(4)))
                assert await statuses(peer, put) == [
                    CORRUPT if each is OK else REFUSED for each in outcome
                ], "what is there is not what was promised"
            os.ftruncate(fd, 4 * 40_960)
            assert await statuses(peer, message) == [OK] * 4, "no object is the worse for it"
            assert os.pread(fd, 40_960, 3 * 40_960) == content(40_960, 3)
        assert home.store.stats().corrupt_objects == home.store.stats().faulted_objects == 0


@stores
async def test_a_file_that_changes_its_length_all_the_time(tmp_path, kind) -> None:
    async with sharing(tmp_path, kind) as home:
        peer = await home.connect(SHARING)
        data = content(200_000, 1)
        await peer.write({key_of(0): data})
        with memory_file(400_000) as fd:
            assert await open_region(peer, 1, 400_000, fd) is OK
            is_over = threading.Event()

            def flicker() -> None:
                while not is_over.is_set():
                    os.ftruncate(fd, 0)
                    os.ftruncate(fd, 400_000)

            thread = threading.Thread(target=flicker)
            thread.start()
            try:
                for _ in range(50):
                    assert set(await statuses(peer, reading((1, 100_000, 200_000)))) <= {OK, REFUSED}
                    put = WriteRegion(
                        namespace=NAMESPACE,
                        keys=(b"written",),
                        sources=(RegionSource(region=1, offset=0, length=200_000, checksum=7),),
                    )
                    assert set(await statuses(peer, put)) <= {CORRUPT, REFUSED}
            finally:
                is_over.set()
                thread.join()
        assert await peer.read(key_of(0)) == [data]
        assert await peer.exist(b"written") == [NOT_FOUND]


async def test_regions_are_one_connection_s_own(tmp_path) -> None:
    async with sharing(tmp_path) as home:
        one, other = await home.connect(SHARING), await home.connect(SHARING)
        await one.write({key_of(0): b"object"})
        with memory_file(4096) as fd:
            assert await open_region(one, 1, 4096, fd) is OK
            assert await statuses(other, reading((1, 0, 6))) == [STALE]
            await one.leave()
            again = await home.connect(SHARING)
            assert await statuses(again, reading((1, 0, 6))) == [STALE]
            assert await open_region(again, 1, 4096, fd) is OK
            assert await statuses(again, reading((1, 0, 6))) == [OK]


async def test_a_refused_region_costs_nothing_and_the_connection_goes_on(tmp_path) -> None:
    async with sharing(tmp_path) as home:
        peer = await home.connect(SHARING)
        before = descriptors()
        with memory_file(4096) as fd, zero_file() as zeros:
            for size, source in ((0, fd), (4097, fd), ((1 << 64) - 1, fd), (4096, zeros)):
                assert await open_region(peer, 1, size, source) is REFUSED
            assert (await peer.call(RegionClose(region=1))).status is STALE
            assert await open_region(peer, 1, 4096, fd) is OK
            assert await open_region(peer, 1, 4096, fd) is REFUSED
            assert (await peer.call(RegionClose(region=1))).status is OK
            assert await statuses(peer, reading((1, 0, 6))) == [STALE]
        assert descriptors() == before


async def test_200_regions_one_after_the_other(tmp_path) -> None:
    async with sharing(tmp_path) as home:
        peer = await home.connect(SHARING)
        await peer.write({key_of(0): b"object"})
        before = descriptors()
        for number in range(200):
            with memory_file(4096) as fd:
                assert await open_region(peer, number, 4096, fd) is OK
                assert await statuses(peer, reading((number, 0, 6))) == [OK]
                assert (await peer.call(RegionClose(region=number))).status is OK
        assert descriptors() == before


async def test_violations_with_descriptors_end_only_their_own_connection(tmp_path) -> None:
    """B30's kind: 50 connections, and every descriptor is closed."""
    async with sharing(tmp_path) as home:
        good = await home.connect(SHARING)
        before = descriptors()
        with memory_file(4096) as fd:
            for number in range(50):
                peer = await home.connect(SHARING)
                sock: socket.socket = peer.transport.raw_socket  # type: ignore[attr-defined]
                _, opening = peer.connection.request(RegionOpen(region=1, region_bytes=4096))
                _, ping = peer.connection.request(Ping())
                kind = number % 5
                if kind == 0:
                    sock.sendall(opening)  # without any
                elif kind == 1:
                    send(sock, opening, fd, fd)
                elif kind == 2:
                    send(sock, ping, fd)  # a frame that takes none
                    send(sock, opening, fd)
                elif kind == 3:
                    send(sock, opening, *([fd] * 100))
                else:
                    sock.sendall(ping[:5])
                    for at in range(5, len(ping)):  # one with every other byte of a frame
                        send(sock, ping[at : at + 1], fd)
                    sock.sendall(opening)
                assert (await peer.closed())[-1].code is ErrorCode.UNEXPECTED_MESSAGE  # type: ignore[attr-defined]
                await peer.transport.aclose()
            assert await open_region(good, 1, 4096, fd) is OK
            assert (await good.call(RegionClose(region=1))).status is OK
        await until(lambda: home.shared.counters.sessions == 1)
        await until(lambda: descriptors() == before)


def send(sock: socket.socket, data: bytes, *fds: int) -> None:
    rights = struct.pack(f"{len(fds)}i", *fds)
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])


async def test_descriptors_before_the_handshake_and_without_the_feature(tmp_path) -> None:
    async with sharing(tmp_path) as home:
        before = descriptors()
        with memory_file(4096) as fd:
            peer = Peer(home.dial(), Hello())
            sock: socket.socket = peer.transport.raw_socket  # type: ignore[attr-defined]
            send(sock, peer.connection.hello(peer.hello), fd)
            await peer.event()
            send(sock, peer.connection.request(Ping())[1], fd)
            await peer.answer(1)
            peer.connection.features |= Feature.REGIONS  # this side pretends
            send(sock, peer.connection.request(RegionOpen(region=1, region_bytes=4096))[1], fd)
            assert (await peer.closed())[-1].code is ErrorCode.UNEXPECTED_MESSAGE  # type: ignore[attr-defined]
            await peer.transport.aclose()
        await until(lambda: home.shared.counters.sessions == 0)
        await until(lambda: descriptors() == before)


async def test_a_fence_holds_regions_up_too(tmp_path) -> None:
    async with sharing(tmp_path) as home:
        peer = await home.connect(SHARING)
        await peer.write({key_of(0): b"object"})
        (lease,) = home.store.open_read(NAMESPACE, [key_of(0)])
        with memory_file(4096) as fd:
            delete = await peer.ask(Delete(namespace=NAMESPACE, keys=(key_of(0),)))
            fence = await peer.ask(Fence())
            request_id, raw = peer.connection.request(RegionOpen(region=1, region_bytes=4096))
            await peer.transport.send_with_descriptor(raw, fd)  # type: ignore[attr-defined]
            await until(lambda: home.sessions[0]._regions._kept)
            assert home.shared.region_budget.regions == 0
            lease.release()
            for each in (delete, fence, request_id):
                await peer.answer(each)
            assert home.shared.region_budget.regions == 1


async def test_many_items_in_small_frames(tmp_path) -> None:
    async with sharing(tmp_path) as home:
        hello = Hello(features=SHARING.features, max_body_bytes=64)
        peer, writer = await home.connect(hello), await home.connect(SHARING)
        await writer.write({key_of(n): b"object" for n in range(0, 300, 3)})
        with memory_file(4096) as fd:
            assert await open_region(peer, 1, 4096, fd) is OK
            answer = await peer.call(reading(*((1, n * 6, 6) for n in range(300))))
            assert len(answer.frames) == 300
            assert [row.status for row in rows(answer)] == [OK, NOT_FOUND, NOT_FOUND] * 100


async def test_more_than_the_window(tmp_path) -> None:
    async with sharing(tmp_path) as home:
        peer = await home.connect(SHARING)
        peer.connection._window.resize(9, 1 << 62)
        await peer.ask(reading(*((1, 0, 0xFFFFFFFF) for _ in range(5))))
        assert (await peer.closed())[-1].code is ErrorCode.LIMIT_EXCEEDED  # type: ignore[attr-defined]


class Stopped:
    """A device whose next read waits until it is let go; the thread that reads waits with it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go = threading.Event()
        self.is_armed = False

    def __call__(self, command: Command) -> None:
        if self.is_armed and command.kind is Kind.READ:
            self.reached.set()
            assert self.go.wait(10)


@asynccontextmanager
async def stopped(tmp_path, patience: Patience = QUICK) -> AsyncIterator[tuple[House, Stopped]]:
    gate = Stopped()
    with MemoryDevice(max_command_bytes=16 * KIB, before=gate) as device:
        settings = config(tmp_path / "kv", capacity_bytes=64 * MIB, segment_bytes=8 * MIB)
        async with SegmentStore.open(settings, device=device) as store:
            try:
                async with house(store, patience=patience) as home:
                    yield home, gate
            finally:
                gate.go.set()


@pytest.mark.parametrize("ending", ["leaves", "breaks the protocol", "is cut", "does not read"])
async def test_no_end_is_seen_before_the_last_byte_has_been_moved(tmp_path, ending) -> None:
    """A client may use its memory again when it sees the gateway close: so that comes last, always."""
    patience = attrs.evolve(QUICK, send_seconds=0.1) if ending == "does not read" else QUICK
    async with stopped(tmp_path, patience) as (home, gate):
        peer = await home.connect(SHARING)
        session = home.sessions[0]
        peer.transport.abort_only(Half.SENDING)  # type: ignore[attr-defined]
        data = content(100_000, 3)
        await peer.write({key_of(n): content(100_000, 3) for n in range(20)})
        with memory_file(100_000) as fd:
            assert await open_region(peer, 1, 100_000, fd) is OK
            if ending == "does not read":
                # Frames that fill the socket: the writer gives up in the middle of one.
                message = Read(
                    namespace=NAMESPACE,
                    keys=tuple(map(key_of, range(20))),
                    capacities=(100_000,) * 20,
                )
                await peer.ask(message)
            gate.is_armed = True
            await peer.ask(reading((1, 0, 100_000)))
            await until(gate.reached.is_set)
            if ending == "breaks the protocol":
                await peer.transport.send([b"nonsense" * 10])
            elif ending == "is cut":
                session._over.cancel()
            elif ending == "does not read":
                await until(lambda: session._over.cancel_called)
            peer.transport.abort()
            closed = anyio.Event()

            async def wait() -> None:
                await peer.transport.wait_peer_closed()  # type: ignore[attr-defined]
                closed.set()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                await until(lambda: session._answers.is_over or session._over.cancel_called)
                for _ in range(50):
                    await anyio.wait_all_tasks_blocked()
                assert not closed.is_set()
                assert os.pread(fd, 100_000, 0) != data
                gate.go.set()
                await closed.wait()
                assert os.pread(fd, 100_000, 0) == data
                os.pwrite(fd, bytes(100_000), 0)
            await home.all_over()
            assert os.pread(fd, 100_000, 0) == bytes(100_000)


async def test_close_is_answered_when_nothing_uses_the_region(tmp_path) -> None:
    async with stopped(tmp_path) as (home, gate):
        peer = await home.connect(SHARING)
        await peer.write({key_of(0): content(100_000)})
        with memory_file(100_000) as fd:
            assert await open_region(peer, 1, 100_000, fd) is OK
            gate.is_armed = True
            read = await peer.ask(reading((1, 0, 100_000)))
            await until(gate.reached.is_set)
            close = await peer.ask(RegionClose(region=1))
            assert await statuses(peer, reading((1, 0, 100_000))) == [STALE]
            await peer.call(Ping())
            assert close not in peer.done
            gate.go.set()
            assert (await peer.answer(close)).status is OK
            assert [row.status for row in rows(await peer.answer(read))] == [OK]


async def test_a_delete_waits_for_a_read_into_a_region(tmp_path) -> None:
    async with stopped(tmp_path) as (home, gate):
        peer, other = await home.connect(SHARING), await home.connect(SHARING)
        await peer.write({key_of(0): content(100_000)})
        with memory_file(100_000) as fd:
            assert await open_region(peer, 1, 100_000, fd) is OK
            gate.is_armed = True
            read = await peer.ask(reading((1, 0, 100_000)))
            await until(gate.reached.is_set)
            delete = await other.ask(Delete(namespace=NAMESPACE, keys=(key_of(0),)))
            await other.call(Ping())
            assert delete not in other.done
            gate.go.set()
            assert (await other.answer(delete)).statuses == [OK]
            assert [row.status for row in rows(await peer.answer(read))] == [OK]
            assert os.pread(fd, 100_000, 0) == content(100_000)


async def test_refused_regions_do_not_fill_the_log(tmp_path, caplog) -> None:
    caplog.set_level("INFO")
    async with sharing(tmp_path) as home:
        peer = await home.connect(SHARING)
        with memory_file(10) as fd:
            for number in range(20):
                assert await open_region(peer, number, 11, fd) is REFUSED
    assert [line for line in caplog.messages if "region" in line] == [
        "peer 0: region refused: 0: 11 bytes of a file of 10"
    ]
