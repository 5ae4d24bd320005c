"""One suite for every Transport: what passes on the fake is what the real one does."""

import socket
import ssl
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import anyio
import anyio.lowlevel
import pytest
from anyio import wait_all_tasks_blocked
from anyio.lowlevel import checkpoint

from adp_client.testing import Faults, FaultyTransport, memory_pair
from adp_client.transport import (
    FileRange,
    SocketTransport,
    TCPEndpoint,
    TLSTransport,
    Transport,
    UnixEndpoint,
    connect,
)
from adp_client.transport.sockets import BULK_BYTES, dial, is_self_connected
from certificates import contexts

pytestmark = pytest.mark.anyio
BULK = 3 << 20  # more than any socket buffer, and above the threshold for a worker thread

Pair: TypeAlias = tuple[Transport, Transport]


async def unix_pair() -> Pair:
    one, other = socket.socketpair()
    return SocketTransport(one), SocketTransport(other)


async def tcp_pair() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = await connect(TCPEndpoint(host="127.0.0.1", port=listener.getsockname()[1]))
        return dialled, SocketTransport(listener.accept()[0])


async def tls_over(one: socket.socket, other: socket.socket, version: ssl.TLSVersion) -> Pair:
    for_server, for_client = contexts(version)
    server = TLSTransport(one, for_server)
    client = TLSTransport(other, for_client, server_name="localhost")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(server.handshake)
        tasks.start_soon(client.handshake)
    return server, client


async def tls_unix_pair() -> Pair:
    return await tls_over(*socket.socketpair(), ssl.TLSVersion.TLSv1_3)


async def tls_1_2_tcp_pair() -> Pair:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dialled = await dial(TCPEndpoint(host="127.0.0.1", port=listener.getsockname()[1]))
        return await tls_over(dialled, listener.accept()[0], ssl.TLSVersion.TLSv1_2)


async def memory() -> Pair:
    return memory_pair(capacity_bytes=100_000)


async def memory_in_small_chunks() -> Pair:
    return memory_pair(capacity_bytes=5000, chunk_bytes=999)


async def faultless_faulty() -> Pair:
    one, other = memory_pair(capacity_bytes=100_000)
    return FaultyTransport(one, Faults()), FaultyTransport(other, Faults())


@pytest.fixture(
    params=[
        *(unix_pair, tcp_pair, tls_unix_pair, tls_1_2_tcp_pair),
        *(memory, memory_in_small_chunks, faultless_faulty),
    ]
)
def make_pair(request: pytest.FixtureRequest) -> Callable[[], Awaitable[Pair]]:
    return request.param


@asynccontextmanager
async def opened(make_pair: Callable[[], Awaitable[Pair]]) -> AsyncGenerator[Pair]:
    one, other = await make_pair()
    try:
        yield one, other
    finally:
        await one.aclose()
        await other.aclose()


def scattered(sizes: list[int]) -> list[memoryview]:
    return [memoryview(bytearray(size)) for size in sizes]


def pattern(count: int) -> bytes:
    return (bytes(range(251)) * (count // 251 + 1))[:count]


@pytest.mark.parametrize("count", [1, 1000, BULK])
async def test_all_bytes_of_all_parts_arrive_in_order(make_pair, count):
    data = pattern(count)
    views = scattered([count // 3, 0, count - 2 * (count // 3), count // 3])
    async with opened(make_pair) as (one, other), anyio.create_task_group() as tasks:
        tasks.start_soon(
            one.send, [data[:1], memoryview(data)[1 : count // 2 + 1], b"", data[count // 2 + 1 :]]
        )
        await other.receive_exactly(views)
    assert b"".join(views) == data


async def test_a_thousand_small_pieces_both_ways(make_pair):
    data = pattern(1500 * 11)
    parts = [data[at : at + 11] for at in range(0, len(data), 11)]
    views = scattered([11] * 1500)
    async with opened(make_pair) as (one, other), anyio.create_task_group() as tasks:
        tasks.start_soon(one.send, parts)
        await other.receive_exactly(views)
    assert b"".join(views) == data


async def test_much_in_both_directions_at_the_same_time(make_pair):
    """Each end has a thread that sends and one that receives."""
    data = pattern(BULK)
    there, back = scattered([len(data)]), scattered([len(data)])
    async with opened(make_pair) as (one, other), anyio.create_task_group() as tasks:
        for transport, views in ((one, back), (other, there)):
            tasks.start_soon(transport.send, [data])
            tasks.start_soon(transport.receive_exactly, views)
    assert there[0] == data
    assert back[0] == data


@pytest.mark.parametrize("count", [5000, BULK])
async def test_ranges_of_files_are_sent_between_pieces_of_memory(make_pair, count):
    data = pattern(count)
    with tempfile.TemporaryFile() as file:
        file.write(b"before" + data + b"behind")
        file.flush()
        views = scattered([2, count, 3, 1000])
        async with opened(make_pair) as (one, other), anyio.create_task_group() as tasks:

            async def send() -> None:
                await one.send([b"ab", FileRange(file.fileno(), 6, count), b"xyz"])
                await one.send_file(file.fileno(), 6, 1000)

            tasks.start_soon(send)
            await other.receive_exactly(views)
    assert [bytes(view) for view in views] == [b"ab", data, b"xyz", data[:1000]]


async def test_a_file_that_is_too_short_is_an_error_not_a_hang(make_pair):
    with tempfile.TemporaryFile() as file:
        file.write(b"short")
        file.flush()
        async with opened(make_pair) as (one, _other):
            with pytest.raises(OSError, match="shorter"):
                await one.send_file(file.fileno(), 0, 6)


async def test_progress_counts_every_byte_once_and_before_the_call_returns(make_pair):
    told: list[int] = []
    async with opened(make_pair) as (one, other), anyio.create_task_group() as tasks:
        tasks.start_soon(one.send, [pattern(BULK)])
        await other.receive_exactly(scattered([BULK // 2, BULK - BULK // 2]), told.append)
        assert sum(told) == BULK
        assert min(told) > 0


async def test_receive_some_gives_what_is_there(make_pair):
    async with opened(make_pair) as (one, other):
        await one.send([b"hello"])
        views = scattered([2, 100])
        assert await other.receive_some(views) == 5
        assert bytes(views[0]) + bytes(views[1][:3]) == b"hello"


async def test_receive_some_waits_and_is_woken(make_pair):
    async with opened(make_pair) as (one, other), anyio.create_task_group() as tasks:
        view = memoryview(bytearray(10))

        async def receive() -> None:
            assert await other.receive_some([view]) == 3

        tasks.start_soon(receive)
        await wait_all_tasks_blocked()
        await one.send([b"abc"])


async def test_the_end_is_zero_bytes_and_exactly_says_early(make_pair):
    async with opened(make_pair) as (one, other):
        await one.send([b"abc"])
        await one.aclose()
        with pytest.raises(EOFError):
            await other.receive_exactly(scattered([4]))
    async with opened(make_pair) as (one, other):
        await one.aclose()
        assert await other.receive_some(scattered([4])) == 0


async def test_sending_to_a_closed_end_is_an_os_error(make_pair):
    async with opened(make_pair) as (one, other):
        await other.aclose()
        with pytest.raises(OSError, match=r".*"):  # TCP learns of it from the answer to the first bytes
            await send_for_ever(one)


@pytest.mark.parametrize("count", [10, BULK])
async def test_abort_wakes_both_directions(make_pair, count):
    ended = []
    async with opened(make_pair) as (one, _other), anyio.create_task_group() as tasks:

        async def receive() -> None:
            with pytest.raises((OSError, EOFError)):
                await one.receive_exactly(scattered([count]))
            ended.append("receive")

        async def send() -> None:
            with pytest.raises(OSError, match=r".*"):
                await send_for_ever(one)
            ended.append("send")

        tasks.start_soon(receive)
        tasks.start_soon(send)
        await wait_all_tasks_blocked()
        one.abort()
        one.abort()
    assert sorted(ended) == ["receive", "send"]


async def test_close_while_somebody_is_inside(make_pair):
    async with opened(make_pair) as (one, _other), anyio.create_task_group() as tasks:

        async def receive() -> None:
            with pytest.raises((OSError, EOFError)):
                await one.receive_exactly(scattered([BULK]))

        tasks.start_soon(receive)
        await wait_all_tasks_blocked()
        await one.aclose()
        await one.aclose()


async def test_after_close_every_call_is_an_os_error_or_the_end(make_pair):
    async with opened(make_pair) as (one, _other):
        await one.aclose()
        with pytest.raises(OSError, match=r".*"):
            await one.send([b"x"])
        with pytest.raises((OSError, EOFError)):
            await one.receive_exactly(scattered([1]))


async def test_cancelled_before_a_byte_leaves_the_stream_usable(make_pair):
    async with opened(make_pair) as (one, other):
        for _ in range(3):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(other.receive_exactly, scattered([BULK]))
                await wait_all_tasks_blocked()
                tasks.cancel_scope.cancel()
        view = memoryview(bytearray(5))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one.send, [b"still"])
            await other.receive_exactly([view])
        assert bytes(view) == b"still"


@pytest.mark.parametrize("first", [100, BULK // 2])
async def test_cancelled_in_the_middle_of_receiving_aborts_and_touches_nothing_more(make_pair, first):
    async with opened(make_pair) as (one, other):
        view = memoryview(bytearray(BULK))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other.receive_exactly, [view])
            await one.send([pattern(first)])
            await wait_until(lambda: any(view[first - 1 : first]))
            tasks.cancel_scope.cancel()
        before = bytes(view)
        with pytest.raises(OSError, match=r".*"):
            await send_for_ever(one)
        assert bytes(view) == before
        with pytest.raises((OSError, EOFError)):
            await other.receive_exactly(scattered([1]))


async def test_b28_cancelled_in_the_middle_of_sending_ends_the_stream(make_pair):
    """Half a frame must not be followed by anything."""
    async with opened(make_pair) as (one, other):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(one.send, [pattern(64 * BULK)])
            await other.receive_exactly(scattered([1]))
            tasks.cancel_scope.cancel()
        with pytest.raises(OSError, match=r".*"):
            await one.send([b"a new frame"])
        with pytest.raises((OSError, EOFError)):
            await other.receive_exactly(scattered([65 * BULK]))


async def test_b30_two_tasks_in_one_direction_are_told_so(make_pair):
    """Their bytes would interleave."""
    async with opened(make_pair) as (one, other):
        if isinstance(one, FaultyTransport):
            pytest.skip("guards are its inner transport's")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other.receive_exactly, scattered([1]))
            await wait_all_tasks_blocked()
            with pytest.raises(anyio.BusyResourceError):
                await other.receive_some(scattered([1]))
            tasks.cancel_scope.cancel()


async def send_for_ever(transport: Transport) -> None:
    data = b"\xff" * BULK
    while True:
        await transport.send([data])


async def wait_until(condition: Callable[[], bool]) -> None:
    """Let other tasks (and threads) run until `condition`; the test's own time limit ends a hang."""
    while not condition():
        await checkpoint()


async def test_dialling_nothing_is_an_os_error_and_leaves_no_socket(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(OSError, match=r".*"):
        await connect(TCPEndpoint(host="127.0.0.1", port=port))
    with pytest.raises(OSError, match=r".*"):
        await connect(UnixEndpoint(path=str(tmp_path / "nobody.sock")))


async def test_dialling_a_unix_socket(tmp_path):
    path = str(tmp_path / "gateway.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        one = await connect(UnixEndpoint(path=path))
        other = SocketTransport(listener.accept()[0])
        await one.send([b"hi"])
        view = memoryview(bytearray(2))
        await other.receive_exactly([view])
        assert bytes(view) == b"hi"
        await one.aclose()
        await other.aclose()


async def test_a_shared_limiter_is_free_again_when_transfers_end_or_are_cancelled():
    limiter = anyio.CapacityLimiter(2)
    one, other = (SocketTransport(sock, limiter=limiter) for sock in socket.socketpair())
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.send, [pattern(BULK)])
        await other.receive_exactly(scattered([BULK]))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one.send, [pattern(64 * BULK)])
        await other.receive_exactly(scattered([BULK]))
        tasks.cancel_scope.cancel()
    await wait_until(lambda: limiter.borrowed_tokens == 0)
    await one.aclose()
    await other.aclose()


def test_a_socket_that_reached_itself_is_recognised():
    with socket.socket() as lonely:
        lonely.bind(("127.0.0.1", 0))
        lonely.connect(lonely.getsockname())
        assert is_self_connected(lonely)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as dialled,
    ):
        assert not is_self_connected(dialled)
    left, right = socket.socketpair()
    with left, right:
        assert not is_self_connected(left)


@pytest.mark.anyio
@pytest.mark.parametrize("make", [unix_pair, tls_unix_pair])
async def test_memory_can_be_resized_as_soon_as_a_transfer_is_over(make):
    """An idle worker thread keeps its last job; the job must not keep the caller's memory."""
    sender, receiver = await make()
    for _ in range(30):
        outgoing, incoming = bytearray(2 * BULK_BYTES), bytearray(2 * BULK_BYTES)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(sender.send, [memoryview(outgoing)])
            await receiver.receive_exactly([memoryview(incoming)])
        for memory in (outgoing, incoming):
            memory.append(1)  # BufferError while anybody has a view of it
            assert len(memory) == 2 * BULK_BYTES + 1
    await sender.aclose()
    await receiver.aclose()
