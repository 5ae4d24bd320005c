"""Shared regions, seen from the client: used where they can be, safe to use again when a verb is over."""

import gc
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from adp_client import Client, ClientConfig, ErrorCode, RegionSlice, SharedRegion, Timeouts
from adp_client.errors import LinkClosed, LinkLost, LocalProtocolError, RequestTimeout
from adp_client.protocol.constants import Feature
from adp_client.protocol.messages import (
    Check,
    Exist,
    Limits,
    Read,
    ReadRegion,
    RegionClose,
    RegionOpen,
    StatusReply,
    Write,
    WriteRegion,
)
from adp_client.testing import MemoryGateway
from adp_client.testing.faults import Faults, FaultyTransport
from client.support import ENDPOINT, NAMESPACE, cancel_at, connected, leftovers, pattern
from descriptors import descriptors, shared_mappings
from gateway.waiting import on_a_jumping_clock, until

pytestmark = pytest.mark.anyio

COUNT, SIZE = 6, 30_000
KEYS = [b"key-%d" % at for at in range(COUNT)]
MARK = 0xA5
OK, NOT_FOUND, CORRUPT = ErrorCode.OK, ErrorCode.NOT_FOUND, ErrorCode.CORRUPT


PAGES = [pattern(at, SIZE) for at in range(COUNT)]


def stored(**settings: Any) -> MemoryGateway:
    gateway = MemoryGateway(**settings)
    for key, page in zip(KEYS, PAGES, strict=True):
        gateway.put(NAMESPACE, key, page)
    return gateway


@asynccontextmanager
async def sharing(
    gateway: MemoryGateway | None = None, **settings: Any
) -> AsyncGenerator[tuple[Client, MemoryGateway, SharedRegion]]:
    """After: nothing is open or mapped that was not before."""
    before = descriptors(), shared_mappings()
    with SharedRegion.create(COUNT * SIZE) as region:
        async with connected(gateway or stored(), **settings) as (client, gateway):
            yield client, gateway, region
            held = gateway
    await until(lambda: not any(session.regions.regions for session in held.sessions))
    gc.collect()  # tracebacks of cancelled calls
    assert (descriptors(), shared_mappings()) == before


def slices(region: SharedRegion, count: int = COUNT) -> list[RegionSlice]:
    return [region.slice(at * SIZE, SIZE) for at in range(count)]


def asked(gateway: MemoryGateway) -> list[type]:
    return [type(event.message) for session in gateway.sessions for event in session.requests]


# ------------------------------------------------------------ a region


def test_a_region_is_memory_with_bounds():
    before = descriptors(), shared_mappings()
    with SharedRegion.create(10_000) as region:
        assert len(region.memory) == 10_000
        region.memory[100:105] = b"hello"
        part = region.slice(100, 5)
        assert bytes(part.memory) == b"hello"
        assert part == region.slice(100, 5)
        assert region.slice(10_000, 0).length == 0
        for offset, length in ((-1, 1), (0, -1), (0, 10_001), (10_000, 1), (10_001, 0), (1 << 64, 0)):
            with pytest.raises(LocalProtocolError):
                region.slice(offset, length)
        with pytest.raises(PermissionError):
            os.ftruncate(region.fileno(), 0)
        with SharedRegion.from_descriptor(region.fileno(), 5000) as other:
            assert bytes(other.memory[100:105]) == b"hello"
        assert not region.is_closed
    assert region.is_closed
    region.close()
    with pytest.raises(LocalProtocolError, match="closed"):
        region.slice(0, 1)
    assert (descriptors(), shared_mappings()) == before


@pytest.mark.parametrize(
    ("offset", "length", "words"),
    [
        (0.5, 10, "the offset of a slice is a whole number of bytes, not float: 0.5"),
        (0, "10", "the length of a slice is a whole number of bytes, not str: '10'"),
        (None, 1, "the offset of a slice is a whole number of bytes, not NoneType: None"),
    ],
)
def test_a_slice_is_of_whole_bytes(offset, length, words):
    with SharedRegion.create(4096) as region, pytest.raises(LocalProtocolError) as caught:
        region.slice(offset, length)
    assert str(caught.value) == words


def test_what_cannot_be_a_region():
    before = descriptors()
    for size in (0, -1):
        with pytest.raises(ValueError, match=str(size)):
            SharedRegion.create(size)
    with pytest.raises(OSError, match=r".*"):
        SharedRegion.create(1 << 62)
    fd = os.memfd_create("short")
    with pytest.raises(ValueError, match="size"):
        SharedRegion.from_descriptor(fd, 1)
    os.close(fd)
    assert descriptors() == before


def test_views_keep_the_memory_of_a_closed_region():
    before = shared_mappings()
    region = SharedRegion.create(4096)
    view = region.memory[:5]
    region.close()
    view[:] = b"still"
    assert bytes(view) == b"still"
    view.release()
    del region, view
    assert shared_mappings() == before


# ------------------------------------------------------------ verbs


@pytest.mark.parametrize(
    "settings", [{}, {"chunk_bytes": 50, "capacity_bytes": 70}, {"limits": Limits(max_items=4)}]
)
async def test_reads_and_writes_go_through_the_region(settings):
    async with sharing(stored(**settings)) as (client, gateway, region):
        result = await client.read(NAMESPACE, [*KEYS[:-1], b"key-x"], slices(region))
        assert list(result.statuses) == [OK] * (COUNT - 1) + [NOT_FOUND]
        assert result.lengths == (SIZE,) * (COUNT - 1) + (0,)
        for at in range(COUNT - 1):
            assert region.memory[at * SIZE : (at + 1) * SIZE] == PAGES[at]
        written = await client.write(NAMESPACE, [b"new-%d" % at for at in range(COUNT)], slices(region))
        assert written.is_all_ok
        for at in range(COUNT - 1):
            assert gateway.objects[NAMESPACE, b"new-%d" % at].data == PAGES[at]
        kinds = asked(gateway)
        assert set(kinds) == {RegionOpen, ReadRegion, WriteRegion}
        assert kinds.count(RegionOpen) == 1
        assert client.stats().bytes_read == (COUNT - 1) * SIZE
        assert client.stats().bytes_written == COUNT * SIZE


async def test_keys_of_several_widths_and_several_regions():
    async with sharing() as (client, gateway, region):
        gateway.put(NAMESPACE, b"wide-key", b"wide")
        with SharedRegion.create(100) as other:
            buffers = [region.slice(0, SIZE), other.slice(3, 50), region.slice(SIZE, SIZE)]
            result = await client.read(NAMESPACE, [KEYS[0], b"wide-key", KEYS[1]], buffers)
            assert result.is_all_ok
            assert result.lengths == (SIZE, 4, SIZE)
            assert bytes(other.memory[:9]) == b"\0\0\0wide\0\0"
            assert region.memory[: 2 * SIZE] == PAGES[0] + PAGES[1]
        await client.fence()
        assert asked(gateway).count(RegionClose) == 1
        (session,) = gateway.sessions
        assert len(session.regions.regions) == 1


async def test_too_large_and_empty_objects():
    async with sharing() as (client, gateway, region):
        gateway.put(NAMESPACE, b"key-e", b"")
        buffers = [region.slice(0, SIZE - 1), region.slice(SIZE, 0)]
        result = await client.read(NAMESPACE, [KEYS[0], b"key-e"], buffers)
        assert list(result.statuses) == [ErrorCode.TOO_LARGE, OK]
        written = await client.write(NAMESPACE, [b"key-f"], [region.slice(5, 0)])
        assert written.is_all_ok
        assert gateway.objects[NAMESPACE, b"key-f"].data == b""


@pytest.mark.parametrize("missing", [Feature.REGIONS, Feature.FRAGMENTS])
async def test_a_gateway_that_cannot_gets_ordinary_memory(missing):
    gateway = stored()
    gateway.features &= ~missing
    async with sharing(gateway) as (client, gateway, region):
        assert (await client.read(NAMESPACE, KEYS, slices(region))).is_all_ok
        assert region.memory[SIZE : 2 * SIZE] == PAGES[1]
        assert (await client.write(NAMESPACE, [b"new"], [region.slice(0, SIZE)])).is_all_ok
        assert asked(gateway) == [Read, Write]


async def test_mixed_buffers_are_ordinary_memory():
    async with sharing() as (client, gateway, region):
        memory = bytearray(SIZE)
        assert (await client.read(NAMESPACE, KEYS[:2], [memory, region.slice(0, SIZE)])).is_all_ok
        assert (memory, region.memory[:SIZE]) == (PAGES[0], PAGES[1])
        payloads = [region.slice(0, 10), [region.slice(0, 5), b"abc"], b"xyz"]
        assert (await client.write(NAMESPACE, [b"n-1", b"n-2", b"n-3"], payloads)).is_all_ok
        assert gateway.objects[NAMESPACE, b"n-2"].data == PAGES[1][:5] + b"abc"
        assert asked(gateway) == [Read, Write]
        assert (await client.read(NAMESPACE, [], [])).statuses == b""


async def test_a_gateway_that_refuses_the_region_is_not_asked_again():
    async def script(session, request) -> bool:
        if isinstance(request.message, RegionOpen):
            os.close(session.regions.received.popleft())
            await session.send_reply(request.request_id, StatusReply(status=ErrorCode.REFUSED))
            return True
        return False

    async with sharing() as (client, gateway, region):
        gateway.script = script
        for _ in range(3):
            assert (await client.read(NAMESPACE, KEYS, slices(region))).is_all_ok
        assert region.memory[SIZE : 2 * SIZE] == PAGES[1]
        assert asked(gateway) == [RegionOpen, Read, Read, Read]


async def test_damage_is_found_in_the_region_and_told():
    async with sharing() as (client, gateway, region):
        gateway.put(NAMESPACE, KEYS[2], PAGES[2], checksum=1)
        result = await client.read(NAMESPACE, KEYS, slices(region))
        assert list(result.statuses) == [OK, OK, CORRUPT, OK, OK, OK]
        assert result.lengths[2] == 0
        await until(lambda: Check in asked(gateway) and not leftovers(client))
        assert client.stats().objects_corrupt == 1


async def test_a_write_whose_bytes_change_meanwhile_stores_nothing():
    async with sharing() as (client, gateway, region):

        async def script(session, request) -> bool:
            if isinstance(request.message, WriteRegion):
                region.memory[:5] = b"other"
            return False

        gateway.script = script
        result = await client.write(NAMESPACE, [b"new-0", b"new-1"], slices(region, 2))
        assert list(result.statuses) == [CORRUPT, OK]
        assert (NAMESPACE, b"new-0") not in gateway.objects


async def test_many_calls_at_once_register_once():
    async with sharing() as (client, gateway, region):

        async def read(at: int) -> None:
            result = await client.read(NAMESPACE, [KEYS[at]], [region.slice(at * SIZE, SIZE)])
            assert result.is_all_ok

        async with anyio.create_task_group() as tasks:
            for at in range(COUNT):
                tasks.start_soon(read, at)
        assert bytes(region.memory) == b"".join(PAGES)
        assert asked(gateway).count(RegionOpen) == 1


# ------------------------------------------------------------ reconnecting


async def test_regions_are_registered_again_after_a_reconnect():
    async with sharing() as (client, gateway, region):
        for at in range(3):
            assert (await client.read(NAMESPACE, KEYS, slices(region))).is_all_ok
            gateway.restart(bytes([at + 1]) * 16)
            await until(lambda at=at: len(gateway.sessions) == at + 2)
        assert (await client.write(NAMESPACE, KEYS, slices(region))).is_all_ok
        assert asked(gateway).count(RegionOpen) == 4
        assert Read not in asked(gateway)


@pytest.mark.parametrize("verb", [ReadRegion, WriteRegion])
async def test_a_call_under_way_is_replayed(verb):
    async with sharing() as (client, gateway, region):

        async def script(session, request) -> bool:
            if isinstance(request.message, verb) and session is gateway.sessions[0]:
                session.transport.abort()
                return True
            return False

        gateway.script = script
        region.memory[:] = b"".join(PAGES)
        if verb is ReadRegion:
            region.memory[:] = bytes(COUNT * SIZE)
            assert (await client.read(NAMESPACE, KEYS, slices(region))).is_all_ok
        else:
            assert (await client.write(NAMESPACE, KEYS, slices(region))).is_all_ok
        assert bytes(region.memory) == b"".join(PAGES)
        assert client.stats().replays == 1
        assert not region.is_retired


async def test_a_connection_cut_after_every_byte_that_the_client_sends():
    """Also between the frame of a region and the next, and in the middle of either."""
    before = descriptors()
    with SharedRegion.create(COUNT * SIZE) as region:
        total = 0
        for cut in [None, *range(60, 600, 7)]:
            gateway, faults = stored(), Faults(cut_sent_at=cut)
            transports: list[FaultyTransport] = []

            def wrap(inner, faults=faults, transports=transports):
                transports.append(FaultyTransport(inner, faults if not transports else Faults()))
                return transports[-1]

            gateway.wrap = wrap
            async with connected(gateway) as (client, gateway):
                region.memory[:] = bytes(COUNT * SIZE)
                assert (await client.read(NAMESPACE, KEYS, slices(region))).is_all_ok
                assert region.memory[SIZE : 2 * SIZE] == PAGES[1]
                total = total or transports[0].sent_bytes
            if cut is None:
                assert 300 < total < 600
            else:
                assert (len(gateway.sessions) > 1) == (cut < total)
    assert not region.is_retired
    await until(lambda: descriptors() == before)


# ------------------------------------------------------------ whose memory it is


@pytest.mark.parametrize("verb", ["read", "write"])
async def test_b24_cancelled_at_every_checkpoint(verb):
    async with sharing() as (client, gateway, region):
        at, was_cancelled = 0, True
        while was_cancelled:
            at += 1
            call = getattr(client, verb)(NAMESPACE, KEYS, slices(region))
            was_cancelled, _ = await cancel_at(call, at)
            region.memory[:] = bytes([MARK]) * (COUNT * SIZE)
            for number, key in enumerate(KEYS):
                gateway.put(NAMESPACE, key, PAGES[number])
            await client.fence()
            assert bytes(region.memory) == bytes([MARK]) * (COUNT * SIZE)
            assert leftovers(client) == []
            result = await client.read(NAMESPACE, KEYS, slices(region))
            assert result.is_all_ok
            assert bytes(region.memory) == b"".join(PAGES)
        assert at > 3
        assert gateway.violations == []
        assert len(gateway.sessions) == 1, "no cancellation may cost the connection"


async def test_a_cancelled_read_waits_for_its_answer_and_the_connection_stays():
    go = anyio.Event()
    reached = anyio.Event()

    async def script(session, request) -> bool:
        if isinstance(request.message, ReadRegion) and not reached.is_set():
            reached.set()
            await go.wait()
        return False

    async with sharing() as (client, gateway, region):
        gateway.script = script
        is_over = anyio.Event()

        async def read() -> None:
            try:
                await client.read(NAMESPACE, KEYS, slices(region))
            finally:
                is_over.set()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await reached.wait()
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.wait_all_tasks_blocked()
                assert not is_over.is_set()
                go.set()
                await is_over.wait()
        assert client.stats().replies_abandoned == 1
        assert len(gateway.sessions) == 1
        assert (await client.read(NAMESPACE, KEYS, slices(region))).is_all_ok


class Silent:
    """A gateway that does not answer, and with `is_dead` does not even notice that its client leaves."""

    def __init__(self, gateway: MemoryGateway, *, is_dead: bool, verb: type = ReadRegion) -> None:
        self.reached = anyio.Event()
        self.revived = anyio.Event()
        self._is_dead = is_dead
        self._verb = verb
        gateway.script = self

    async def __call__(self, session, request) -> bool:
        if not isinstance(request.message, self._verb) or self.revived.is_set():
            return False
        self.reached.set()
        if self._is_dead:
            await self.revived.wait()
        return True


PATIENCE = Timeouts(exist_seconds=50, request_seconds=30, release_seconds=2, idle_ping_seconds=1000)


@on_a_jumping_clock
async def test_no_answer_in_time_ends_the_connection_and_its_end_frees_the_region():
    async with sharing(timeouts=PATIENCE) as (client, gateway, region):
        silent = Silent(gateway, is_dead=False)
        begun = anyio.current_time()
        with pytest.raises(RequestTimeout) as failure:
            await client.read(NAMESPACE, KEYS[:2], slices(region, 2))
        assert anyio.current_time() == pytest.approx(begun + 30, abs=0.1)
        assert "retired" not in str(failure.value)
        del failure  # its traceback has the memory
        assert not region.is_retired
        silent.revived.set()
        assert (await client.read(NAMESPACE, KEYS[:2], slices(region, 2))).is_all_ok
        assert len(gateway.sessions) == 2


@on_a_jumping_clock
async def test_a_gateway_that_does_not_let_go_costs_the_region_and_nothing_else():
    async with sharing(timeouts=PATIENCE) as (client, gateway, region):
        silent = Silent(gateway, is_dead=True)
        parts = slices(region, 2)
        begun = anyio.current_time()
        with pytest.raises(RequestTimeout, match="retired"):
            await client.read(NAMESPACE, KEYS[:2], parts)
        assert anyio.current_time() == pytest.approx(begun + 32, abs=0.1)
        assert region.is_retired
        for call in (client.read, client.write):
            with pytest.raises(LocalProtocolError, match="retired"):
                await call(NAMESPACE, KEYS[:2], parts)
        with pytest.raises(LocalProtocolError, match="retired"):
            region.slice(0, 1)
        silent.revived.set()
        with SharedRegion.create(SIZE) as other:
            assert (await client.read(NAMESPACE, KEYS[:1], [other.slice(0, SIZE)])).is_all_ok
        await client.fence()


@on_a_jumping_clock
async def test_cancelled_and_no_answer_and_no_end():
    async with sharing(timeouts=PATIENCE) as (client, gateway, region):
        silent = Silent(gateway, is_dead=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.read, NAMESPACE, KEYS[:2], slices(region, 2))
            await silent.reached.wait()
            begun = anyio.current_time()
            tasks.cancel_scope.cancel()
        assert anyio.current_time() == pytest.approx(begun + 4, abs=0.1)
        assert region.is_retired
        silent.revived.set()
        assert (await client.exist(NAMESPACE, KEYS)).is_all_ok


@on_a_jumping_clock
async def test_lost_with_a_region_retired_is_not_replayed():
    """Another call ends the connection; the one that reads into the region learns why it is not repeated."""
    async with sharing(timeouts=PATIENCE) as (client, gateway, region):
        silent = Silent(gateway, is_dead=True)
        told: list[tuple[str, float]] = []

        async def read() -> None:
            with pytest.raises(LinkLost, match="retired"):
                await client.read(NAMESPACE, KEYS[:2], slices(region, 2))
            told.append(("read", anyio.current_time()))

        async def exist() -> None:
            with pytest.raises(LinkLost), anyio.fail_after(20):
                await client.fence()
            told.append(("fence", anyio.current_time()))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            await silent.reached.wait()
            tasks.start_soon(exist)
            await anyio.wait_all_tasks_blocked()
            begun = anyio.current_time()
            client._link.epoch.end("for the test")
        assert told == [("fence", begun), ("read", pytest.approx(begun + 2, abs=0.1))]
        silent.revived.set()


@on_a_jumping_clock
async def test_a_dead_gateway_holds_no_write_up():
    """What it still reads from the region hurts nobody."""
    async with sharing(timeouts=PATIENCE) as (client, gateway, region):
        silent = Silent(gateway, is_dead=True, verb=WriteRegion)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.write, NAMESPACE, KEYS[:2], slices(region, 2))
            await silent.reached.wait()
            begun = anyio.current_time()
            tasks.cancel_scope.cancel()
        assert anyio.current_time() == begun
        assert not region.is_retired
        silent.revived.set()
        assert (await client.read(NAMESPACE, KEYS[:2], slices(region, 2))).is_all_ok


@on_a_jumping_clock
async def test_closing_the_client_with_a_read_under_way():
    """It waits for the gateway to let go, as long as for a cancelled read."""
    config = ClientConfig(endpoint=ENDPOINT, timeouts=PATIENCE)

    async def read() -> None:
        with pytest.raises(LinkClosed):
            await client.read(NAMESPACE, KEYS[:2], slices(region, 2))

    with SharedRegion.create(COUNT * SIZE) as region:
        async with stored() as gateway, anyio.create_task_group() as tasks:
            silent = Silent(gateway, is_dead=True)
            async with Client(config, dial=gateway.dial) as client:
                tasks.start_soon(read)
                await silent.reached.wait()
                begun = anyio.current_time()
            assert anyio.current_time() == pytest.approx(begun + 3, abs=0.1)
            assert region.is_retired
            silent.revived.set()


async def test_no_answer_to_the_registration(anyio_backend):
    async with sharing(timeouts=Timeouts(request_seconds=0.2)) as (client, gateway, region):
        silent = Silent(gateway, is_dead=False, verb=RegionOpen)
        with pytest.raises(RequestTimeout):
            await client.read(NAMESPACE, KEYS, slices(region))
        silent.revived.set()
        assert not region.is_retired
        await until(lambda: not leftovers(client))


async def test_closed_while_it_is_being_registered():
    go = anyio.Event()
    reached = anyio.Event()

    async def script(session, request) -> bool:
        if isinstance(request.message, RegionOpen):
            reached.set()
            await go.wait()
        return False

    async with sharing() as (client, gateway, _):
        gateway.script = script
        with SharedRegion.create(SIZE) as other:

            async def read() -> None:
                assert (await client.read(NAMESPACE, KEYS[:1], [part])).is_all_ok

            part = other.slice(0, SIZE)
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(read)
                await reached.wait()
                other.close()
                go.set()
        await client.fence()
        assert RegionClose in asked(gateway)
        assert gateway.sessions[0].regions.regions == {}


async def test_exist_is_told_at_once_when_a_read_holds_the_end_up():
    """W4: lookups do not wait for a gateway to let go of somebody's region."""
    async with sharing() as (client, gateway, region):
        silent = Silent(gateway, is_dead=True)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.read, NAMESPACE, KEYS, slices(region))
            await silent.reached.wait()
            epoch = client._link.epoch
            operation_ended = anyio.Event()

            async def ping() -> None:
                with pytest.raises(LinkLost):
                    await client.ping()
                operation_ended.set()

            tasks.start_soon(ping)
            await anyio.wait_all_tasks_blocked()
            epoch.end("for the test")
            await operation_ended.wait()
            assert epoch.open_count == 1
            silent.revived.set()
        assert not region.is_retired
        assert Exist not in asked(gateway)
