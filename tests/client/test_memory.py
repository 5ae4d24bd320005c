"""Whose memory it is: nobody keeps a view of a caller's buffer once the verb is over, however it ended.

A `bytearray` with a view of it cannot be resized, so resizing is the test. The garbage collector is off: a
view in a cycle would be there until some later time.
"""

import gc
import socket
from collections.abc import Iterator
from typing import Any

import anyio
import pytest

from adp_client import Client, Timeouts
from adp_client.errors import ADPError, LinkLost, LocalProtocolError
from adp_client.protocol.constants import Feature
from adp_client.protocol.messages import Limits, Read, Write
from adp_client.testing import Faults, FaultyTransport, MemoryGateway
from adp_client.transport import SocketTransport
from client.support import NAMESPACE, Gate, cancel_at, connected, pattern

pytestmark = pytest.mark.anyio
SIZE = 700_000  # work for a thread
KEYS = [b"key-0", b"key-1"]
PAGES = [(pattern(at, 7000) * 100)[:SIZE] for at in range(2)]


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def on_memory() -> MemoryGateway:
    return MemoryGateway(capacity_bytes=300_000, chunk_bytes=100_000)


def on_sockets() -> MemoryGateway:
    gateway = MemoryGateway()

    def pair() -> tuple[SocketTransport, SocketTransport]:
        one, other = socket.socketpair()
        return SocketTransport(one), SocketTransport(other)

    gateway.make_pair = pair
    return gateway


def on_a_wrapped_wire() -> MemoryGateway:
    gateway = on_memory()
    gateway.wrap = lambda inner: FaultyTransport(inner, Faults())
    return gateway


def where_the_client_cuts() -> MemoryGateway:
    gateway = on_memory()
    gateway.features = Feature.CREDITS
    gateway.limits = Limits(max_command_bytes=100_000)
    return gateway


@pytest.fixture(params=[on_memory, on_sockets, on_a_wrapped_wire])
def gateway(request: pytest.FixtureRequest) -> MemoryGateway:
    gateway = request.param()
    for key, page in zip(KEYS, PAGES, strict=True):
        gateway.put(NAMESPACE, key, page)
    return gateway


def memory_for(verb: str) -> list[bytearray]:
    return [bytearray(page) if verb == "write" else bytearray(SIZE) for page in PAGES]


def assert_free(memory: list[bytearray]) -> None:
    for buffer in memory:
        buffer.append(1)  # BufferError while anybody has a view of it


@pytest.mark.parametrize("limits", [Limits(), Limits(max_payload_bytes=200_000)], ids=["whole", "frames"])
async def test_memory_can_be_resized_as_soon_as_a_verb_has_returned(gateway, limits):
    gateway.limits = limits
    async with connected(gateway) as (client, _):
        for _ in range(20):
            for verb in ("write", "read"):
                memory = memory_for(verb)
                assert (await getattr(client, verb)(NAMESPACE, KEYS, memory)).is_all_ok
                assert_free(memory)


@pytest.mark.parametrize("verb", ["read", "write"])
async def test_memory_can_be_resized_while_the_cancellation_is_still_on_its_way(gateway, verb):
    """A traceback keeps the local variables of every frame that the exception went through."""
    async with connected(gateway) as (client, _):
        at, was_cancelled = 0, True
        while was_cancelled:
            at += 1
            memory = memory_for(verb)

            async def call(memory: list[bytearray] = memory) -> None:
                try:
                    await getattr(client, verb)(NAMESPACE, KEYS, memory)
                except anyio.get_cancelled_exc_class():
                    assert_free(memory)
                    raise

            was_cancelled, _ = await cancel_at(call(), at)
            assert_free(memory)
        assert at > 2


async def kept_error(client: Client, verb: str, memory: list[bytearray]) -> Exception:
    with pytest.raises(ADPError) as caught:
        await getattr(client, verb)(NAMESPACE, KEYS, memory)
    assert_free(memory)
    return caught.value


@pytest.mark.parametrize("verb", ["read", "write"])
async def test_memory_can_be_resized_while_the_error_is_kept(gateway, verb):
    """Cut in the middle of the payload, twice, so that the verb fails."""
    times: list[Any] = []

    def wrap(inner) -> FaultyTransport:
        times.append(inner)
        faults = Faults(cut_received_at=400_000) if verb == "read" else Faults(cut_sent_at=400_000)
        return FaultyTransport(inner, faults)

    gateway.wrap = wrap
    async with connected(gateway) as (client, _):
        memory = memory_for(verb)
        error = await kept_error(client, verb, memory)
        assert isinstance(error, LinkLost)
        assert client._link is not None
        assert_free(memory)  # the link keeps the reason until it is up again
    assert len(times) >= 2


async def test_memory_can_be_resized_after_a_frame_that_did_not_end(gateway):
    """The cancelled READ gives up waiting for the rest of its frame; the connection is cut."""
    async with connected(gateway, timeouts=Timeouts(release_seconds=0.05)) as (client, _):
        gate = Gate(gateway)
        memory = memory_for("read")
        async with anyio.create_task_group() as tasks:

            async def call() -> None:
                try:
                    await client.read(NAMESPACE, KEYS, memory)
                except anyio.get_cancelled_exc_class():
                    assert_free(memory)
                    raise

            tasks.start_soon(call)
            await gate.reached.wait()
            while not any(memory[0][:1000]):
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        gate.open.set()
        assert_free(memory)
        assert (await client.read(NAMESPACE, KEYS, memory_for("read"))).is_all_ok
        assert len(gateway.sessions) == 2


@pytest.mark.parametrize("verb", ["read", "write"])
async def test_memory_is_free_also_where_the_client_cuts_the_objects(verb):
    async with connected(where_the_client_cuts()) as (client, gateway):
        assert (await client.write(NAMESPACE, KEYS, PAGES)).is_all_ok
        assert len(gateway.objects) > 2 * SIZE / 100_000
        at, was_cancelled = 0, True
        while was_cancelled:
            at += 1
            memory = memory_for(verb)

            async def call(memory: list[bytearray] = memory) -> None:
                try:
                    assert (await getattr(client, verb)(NAMESPACE, KEYS, memory)).is_all_ok
                    if verb == "read":
                        assert memory == PAGES
                except anyio.get_cancelled_exc_class():
                    assert_free(memory)
                    raise

            was_cancelled, _ = await cancel_at(call(), at)
            assert_free(memory)
        assert at > 4


async def test_memory_of_a_call_that_was_refused_is_free_too():
    memory = bytearray(10)
    async with connected() as (client, _):
        with pytest.raises(LocalProtocolError) as caught:
            await client.read(NAMESPACE, KEYS, [memory, memory])
        memory.append(1)
        assert "overlap" in str(caught.value)


async def test_an_answer_that_comes_before_the_memory_is_let_go_is_waited_for():
    """All of a WRITE has arrived and is answered, and the task that sent it does not come back."""
    gateway = MemoryGateway(capacity_bytes=1000)
    answered = anyio.Event()

    class Early:
        """The client's end: the first frame with a payload arrives, but is never done."""

        def __init__(self, inner) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        async def send(self, parts) -> None:
            await self._inner.send(parts)
            if len(parts) > 1 and not answered.is_set():
                answered.set()
                await anyio.sleep_forever()

    gateway.wrap = Early
    async with connected(gateway, timeouts=Timeouts(release_seconds=0.05)) as (client, _):
        memory = bytearray(5000)
        assert (await client.write(NAMESPACE, [b"k"], [memory])).is_all_ok
        memory.append(1)
        assert (await client.read(NAMESPACE, [b"k"], [bytearray(5000)])).is_all_ok
        assert len(gateway.sessions) == 2


async def test_requests_hold_no_memory_after_they_have_been_sent(gateway):
    """A cancelled WRITE whose answer is still to come: the request waits, the memory does not."""
    go = anyio.Event()

    async def script(session, request) -> bool:
        if isinstance(request.message, (Read, Write)):
            await go.wait()
        return False

    async with connected(gateway) as (client, _):
        gateway.script = script
        memory = memory_for("write")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.write, NAMESPACE, KEYS, memory)
            while not gateway.sessions[0].requests:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        assert client._link.epoch.open_count == 1
        assert_free(memory)
        go.set()
        await client.fence()
