"""The client over real sockets with objects large enough for the worker threads."""

import socket

import anyio
import pytest

from adp_client import Client, ClientConfig, ErrorCode
from adp_client.errors import ConnectFailed
from adp_client.protocol.messages import Limits
from adp_client.testing import MemoryGateway
from adp_client.transport import SocketTransport, TLSTransport
from certificates import contexts
from client.support import NAMESPACE, QUICK, cancel_at, connected, leftovers, pattern

pytestmark = pytest.mark.anyio
PAGE, COUNT = 700_000, 5
KEYS = [b"page-%d" % at for at in range(COUNT)]
PAGES = [(pattern(at, 7000) * 100)[:PAGE] for at in range(COUNT)]
MARK = b"\xa5"


def unix_pair():
    one, other = socket.socketpair()
    return SocketTransport(one), SocketTransport(other)


def tls_pair():
    one, other = socket.socketpair()
    for_server, for_client = contexts()
    server = TLSTransport(one, for_server)
    client = TLSTransport(other, for_client, server_name="localhost")
    while not (client.cipher.shake_hands() & server.cipher.shake_hands()):
        for left, right in ((client, server), (server, client)):
            if raw := left.cipher.take():
                right.cipher.feed(raw)
    return client, server


def gateway_on_sockets(make_pair=unix_pair, **settings) -> MemoryGateway:
    gateway = MemoryGateway(**settings)
    gateway.make_pair = make_pair
    for key, page in zip(KEYS, PAGES, strict=True):
        gateway.put(NAMESPACE, key, page)
    return gateway


@pytest.mark.parametrize("make_pair", [unix_pair, tls_pair])
@pytest.mark.parametrize("frame_bytes", [1_000_000, 16 << 20])
async def test_pages_there_and_back(make_pair, frame_bytes):
    limits = Limits(max_payload_bytes=1_500_000)
    async with connected(gateway_on_sockets(make_pair, limits=limits, frame_bytes=frame_bytes)) as (
        client,
        gateway,
    ):
        memory = bytearray(COUNT * PAGE)
        slots = [memoryview(memory)[at * PAGE : (at + 1) * PAGE] for at in range(COUNT)]
        assert (await client.read(NAMESPACE, KEYS, slots)).is_all_ok
        assert memory == b"".join(PAGES)
        copies = [key + b"'" for key in KEYS]
        assert (await client.write(NAMESPACE, copies, [[slot[:3], slot[3:]] for slot in slots])).is_all_ok
        big = b"".join(PAGES)
        assert (await client.write(NAMESPACE, [b"big"], [big])).is_all_ok
        assert [gateway.objects[NAMESPACE, key].data for key in copies] == PAGES
        assert gateway.objects[NAMESPACE, b"big"].data == big
        again = bytearray(len(big))
        assert (await client.read(NAMESPACE, [b"big"], [again])).is_all_ok
        assert again == big
        assert client.stats().bytes_read == 2 * len(big)


async def test_one_rotten_page_among_good_ones():
    async with connected(gateway_on_sockets()) as (client, gateway):
        gateway.put(NAMESPACE, KEYS[2], PAGES[2], checksum=1)
        slots = [bytearray(PAGE) for _ in KEYS]
        read = await client.read(NAMESPACE, KEYS, slots)
        assert read.statuses == bytes([0, 0, ErrorCode.CORRUPT, 0, 0])
        assert [slot == page for slot, page in zip(slots, PAGES, strict=True)].count(True) >= 4
        while (NAMESPACE, KEYS[2]) in gateway.objects or leftovers(client):
            await client.ping()


@pytest.mark.parametrize("make_pair", [unix_pair, tls_pair])
@pytest.mark.parametrize("verb", ["read", "write"])
async def test_b24_cancelled_at_every_checkpoint_with_threads_in_the_memory(make_pair, verb):
    """The caller's memory is its own as soon as the cancelled call has raised, threads or not."""
    async with connected(gateway_on_sockets(make_pair, frame_bytes=2_000_000)) as (client, gateway):
        at, was_cancelled = 0, True
        while was_cancelled:
            at += 1
            memory = [bytearray(page) if verb == "write" else bytearray(PAGE) for page in PAGES]
            was_cancelled, _ = await cancel_at(getattr(client, verb)(NAMESPACE, KEYS, memory), at)
            for buffer in memory:
                buffer[:] = MARK * PAGE
            again = [bytearray(PAGE) for _ in KEYS]
            assert (await client.read(NAMESPACE, KEYS, again)).is_all_ok
            assert again == PAGES
            assert all(buffer == MARK * PAGE for buffer in memory)
            assert leftovers(client) == []
        assert at > 2
        assert gateway.violations == []


async def test_the_real_dialer_finds_nobody_and_says_so(tmp_path):
    config = ClientConfig(endpoint=f"unix://{tmp_path}/nobody.sock", backoff=QUICK)
    async with Client(config) as client:
        with anyio.CancelScope() as scope:
            while client.stats().connects_failed < 3:
                await anyio.lowlevel.checkpoint()
            scope.cancel()
            await client.exist(NAMESPACE, [b"k"])
        assert scope.cancelled_caught


async def test_a_port_that_speaks_something_else(tmp_path):
    path = str(tmp_path / "http.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        listener.setblocking(False)

        async def speak() -> None:
            while True:
                await anyio.wait_readable(listener)
                transport = SocketTransport(listener.accept()[0])
                await transport.send([b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"])
                await transport.aclose()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(speak)
            async with Client(ClientConfig(endpoint=f"unix://{path}", backoff=QUICK)) as client:
                while not client.stats().connects_failed:
                    await anyio.lowlevel.checkpoint()
                assert client._link is not None
                failure = client._link._failed()
                assert isinstance(failure, ConnectFailed)
                assert "not an ADP frame" in str(failure)
            tasks.cancel_scope.cancel()


@pytest.mark.parametrize("make_pair", [unix_pair, tls_pair])
async def test_memory_is_the_callers_again_when_a_read_returns(make_pair):
    """Not only untouched: nothing keeps a view of it, so it can be resized, or a map of it closed."""
    async with connected(gateway_on_sockets(make_pair)) as (client, _):
        for _ in range(20):
            memory = bytearray(PAGE)
            assert (await client.read(NAMESPACE, KEYS[:1], [memory])).is_all_ok
            memory.append(1)
            assert len(memory) == PAGE + 1
