"""Cancelled at every moment: not only where the caller waits, but around each thing that the wire does.

`test_cancellation` cancels a call at each of its own suspensions. The caller of a READ suspends two or three
times, while its reader does so for every piece that comes in; what is in flight then is different each time.
"""

import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from adp_client import Client, ClientConfig
from adp_client.errors import LinkClosed
from adp_client.protocol.messages import Limits
from adp_client.testing import Faults, FaultyTransport, MemoryGateway
from adp_client.transport import SocketTransport, Transport
from client.real import RealGateway
from client.support import ENDPOINT, NAMESPACE, PATIENT, QUICK, cancel_at, connected, leftovers, pattern
from client.verbs import COUNT, KEYS, MARK, SIZE, VERBS, Call, read, stored

pytestmark = pytest.mark.anyio


class Moments:
    """Counts what a transport does; `has_come` is set when the count reaches `wanted`."""

    def __init__(self) -> None:
        self.start(0)

    def start(self, wanted: int) -> None:
        self.wanted, self.count, self.has_come = wanted, 0, anyio.Event()

    def next(self) -> None:
        self.count += 1
        if self.count == self.wanted:
            self.has_come.set()


class Counted(FaultyTransport):
    """Tells `moments` before and after each piece that moves."""

    def __init__(self, inner: Transport, faults: Faults, moments: Moments) -> None:
        super().__init__(inner, faults)
        self._moments = moments

    async def receive_some(self, buffers: Sequence[memoryview]) -> int:
        self._moments.next()
        count = await super().receive_some(buffers)
        self._moments.next()
        return count

    async def send(self, parts: Sequence[Any]) -> None:
        self._moments.next()
        await super().send(parts)
        self._moments.next()


def socket_pair() -> tuple[Transport, Transport]:
    one, other = socket.socketpair()
    return SocketTransport(one), SocketTransport(other)


async def run(call: Call, client: Client, scope: anyio.CancelScope) -> None:
    assert call.is_right(await call.run(client))
    scope.cancel()  # the one who waits for a moment that does not come


async def at_every_moment(
    client: Client,
    make: Callable[[], Call],
    moments: Moments,
    be_slow: Callable[[bool], None] = lambda is_slow: None,
) -> int:
    """Cancel `make()` at the first moment, the second, and so on until it has ended before."""
    wanted = 0
    while True:
        wanted += 1
        call = make()
        be_slow(True)
        async with anyio.create_task_group() as tasks:
            moments.start(wanted)
            tasks.start_soon(run, call, client, tasks.cancel_scope)
            await moments.has_come.wait()
            tasks.cancel_scope.cancel()
        has_come = moments.has_come.is_set()
        moments.start(0)
        be_slow(False)
        for memory in call.memory:
            memory[:] = bytes([MARK]) * len(memory)
            memory.append(MARK)  # nobody has a view of it
        follower = VERBS[wanted % len(VERBS)]()
        assert follower.is_right(await follower.run(client))
        reader = read()
        assert reader.is_right(await reader.run(client))
        await client.fence()
        assert all(memory == bytes([MARK]) * len(memory) for memory in call.memory)
        assert leftovers(client) == []
        if not has_come:
            return wanted


@pytest.mark.parametrize("make", VERBS)
@pytest.mark.parametrize("wire", ["memory", "sockets"])
async def test_b24_cancelled_at_every_moment_of_the_wire(make, wire):
    moments = Moments()
    gateway = stored(frame_bytes=4000, limits=Limits(max_payload_bytes=7000))
    if wire == "sockets":
        gateway.make_pair = socket_pair
    gateway.wrap = lambda inner: Counted(inner, Faults(), moments)
    async with connected(gateway) as (client, _):
        count = await at_every_moment(client, make, moments)
        assert count > 4
        assert gateway.violations == []
        assert len(gateway.sessions) == 1
        core = client._link.epoch._connection
        assert (core.in_flight, core._window.requests, core._window.inflight_bytes) == (0, 0, 0)


@pytest.mark.timeout(60)
async def test_b24_cancelled_between_any_two_bytes_of_an_answer():
    """Three objects of a few bytes in two frames, over a wire that brings one byte at a time."""
    moments, faults = Moments(), Faults()
    gateway = stored()
    small = {b"k-%d" % at: pattern(at, 15 + at) for at in range(3)}
    for key, data in small.items():
        gateway.put(NAMESPACE, key, data)

    def make() -> Call:
        memory = [bytearray(20) for _ in small]
        return Call(
            lambda c: c.read(NAMESPACE, list(small), memory),
            lambda r: [bytes(m[:n]) for m, n in zip(memory, r.lengths, strict=True)] == list(small.values()),
            memory,
        )

    def be_slow(is_slow: bool) -> None:
        faults.dribble = is_slow
        gateway.frame_bytes = 30 if is_slow else 1 << 20

    gateway.wrap = lambda inner: Counted(inner, faults, moments)
    async with connected(gateway) as (client, _):
        assert await at_every_moment(client, make, moments, be_slow) > 200
        assert gateway.violations == []
        assert len(gateway.sessions) == 1


@pytest.mark.parametrize("make", VERBS)
@pytest.mark.parametrize("pair", ["memory", "sockets"])
async def test_b24_cancelled_anywhere_on_the_real_gateway(make, pair):
    """At the caller's own suspensions; afterwards the gateway holds nothing for anybody."""
    options = {} if pair == "memory" else {"make_pair": socket_pair}
    async with RealGateway(**options) as gateway:
        config = ClientConfig(endpoint=ENDPOINT, timeouts=PATIENT, backoff=QUICK)
        async with Client(config, dial=gateway.dial) as client:
            assert (await client.write(NAMESPACE, KEYS, [pattern(at, SIZE) for at in range(COUNT)])).is_all_ok
            at, was_cancelled = 0, True
            while was_cancelled:
                at += 1
                call = make()
                was_cancelled, _ = await cancel_at(call.run(client), at)
                for memory in call.memory:
                    memory[:] = bytes([MARK]) * len(memory)
                reader = read()
                assert reader.is_right(await reader.run(client))
                await client.fence()
                assert all(memory == bytes([MARK]) * len(memory) for memory in call.memory)
                assert leftovers(client) == []
            assert at > 2
            assert gateway.dials == 1
        await gateway.all_left()


@pytest.mark.parametrize("is_up", [True, False])
async def test_waiting_for_the_connection_can_be_cancelled_at_any_checkpoint(is_up):
    async with MemoryGateway() as gateway:
        config = ClientConfig(endpoint=ENDPOINT, backoff=QUICK)
        async with Client(config, dial=gateway.dial) as client:
            for at in range(1, 6):
                gateway.is_down = not is_up
                gateway.cut()
                with anyio.CancelScope() as scope:
                    await cancel_at(client.wait_connected(), at)
                assert not scope.cancelled_caught
                gateway.is_down = False
                assert (await client.wait_connected()).agent == "memory-gateway"
                assert (await client.exist(NAMESPACE, KEYS)).count_ok == 0


@pytest.mark.parametrize("wire", ["memory", "sockets"])
async def test_b47_entering_using_and_leaving_can_be_cancelled_at_any_checkpoint(wire):
    """Whatever is cancelled when: every session ends, no descriptor or task stays, a new client works."""
    gateway = stored()
    if wire == "sockets":
        gateway.make_pair = socket_pair
    config = ClientConfig(endpoint=ENDPOINT, timeouts=PATIENT, backoff=QUICK)

    async def life() -> None:
        async with Client(config, dial=gateway.dial) as client:
            await client.wait_connected()
            for make in VERBS:
                call = make()
                assert call.is_right(await call.run(client))

    async with gateway:
        await life()
        await all_ended(gateway)
        tasks, descriptors = len(anyio.get_running_tasks()), count_descriptors()
        at, was_cancelled = 0, True
        while was_cancelled:
            at += 1
            was_cancelled, _ = await cancel_at(life(), at)
            await all_ended(gateway)
            while len(anyio.get_running_tasks()) > tasks:  # a task that stays fails by the time limit
                await anyio.lowlevel.checkpoint()
            assert count_descriptors() == descriptors
        assert at > 10
        assert gateway.violations == []
        await life()


async def all_ended(gateway: MemoryGateway) -> None:
    while len(gateway.ended) < len(gateway.sessions):
        await anyio.lowlevel.checkpoint()


def count_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@pytest.mark.parametrize("at", range(1, 8))
async def test_leaving_in_the_middle_of_anothers_call(at):
    """A WRITE of another task fills the wire when the client is left; it may be cancelled as well."""
    gateway = stored(capacity_bytes=1000, limits=Limits(max_payload_bytes=7000))
    config = ClientConfig(endpoint=ENDPOINT, timeouts=PATIENT, backoff=QUICK)
    memory = bytearray(pattern(1, 20_000))
    started = anyio.Event()

    async def write(client: Client) -> None:
        started.set()
        try:
            await cancel_at(client.write(NAMESPACE, [b"torn"], [memory]), at)
        except LinkClosed:
            memory.append(0)  # while the error is still there
        memory[:] = bytes(20_000)

    async with gateway:
        async with anyio.create_task_group() as others, Client(config, dial=gateway.dial) as client:
            await client.wait_connected()
            others.start_soon(write, client)
            await started.wait()
        await all_ended(gateway)
        assert memory == bytes(20_000)
        torn = gateway.objects.get((NAMESPACE, b"torn"))
        assert torn is None or torn.data == pattern(1, 20_000)
        assert gateway.violations == []


async def test_a_call_on_a_closed_client_keeps_no_memory():
    async with connected() as (client, _):
        pass
    memory = bytearray(10)
    for verb in (client.write, client.read):
        with pytest.raises(LinkClosed) as caught:
            await verb(NAMESPACE, [b"k"], [memory])
        memory.append(0)
        assert "closed" in str(caught.value)
