"""What a LocalTransport promises, asked of the fake and of the real one."""

import os
import socket
import struct
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TypeAlias

import anyio
import pytest
from anyio import wait_all_tasks_blocked

from adp_client.testing import Faults, FaultyTransport, memory_pair
from adp_client.transport import Half, LocalTransport, SocketTransport, TCPEndpoint, connect, local_transport
from descriptors import descriptors

pytestmark = pytest.mark.anyio
Pair: TypeAlias = tuple[LocalTransport, LocalTransport]


def unix_pair() -> Pair:
    one, other = socket.socketpair()
    return SocketTransport(one), SocketTransport(other)


def faultless_faulty() -> Pair:
    one, other = memory_pair()
    return FaultyTransport(one, Faults()), FaultyTransport(other, Faults())


@pytest.fixture(params=[unix_pair, memory_pair, faultless_faulty])
def make_pair(request: pytest.FixtureRequest):
    return request.param


@asynccontextmanager
async def opened(make_pair) -> AsyncGenerator[Pair]:
    """After: no descriptor is left open."""
    before = descriptors()
    one, other = make_pair()
    try:
        yield one, other
    finally:
        await one.aclose()
        await other.aclose()
    assert descriptors() == before


@asynccontextmanager
async def memory_file(content: bytes) -> AsyncGenerator[int]:
    fd = os.memfd_create("sent")
    os.write(fd, content)
    try:
        yield fd
    finally:
        os.close(fd)


def take(received: deque[int | None]) -> list[bytes]:
    """What is in the files; closes them."""
    found = []
    while received:
        fd = received.popleft()
        assert fd is not None
        assert not os.get_inheritable(fd)
        found.append(os.pread(fd, 100, 0))
        os.close(fd)
    return found


async def test_a_descriptor_comes_along(make_pair):
    received: deque[int | None] = deque()
    view = memoryview(bytearray(100))
    async with opened(make_pair) as (one, other), memory_file(b"content") as fd:
        assert one.carries_descriptors
        await one.send([b"before"])
        await one.send_with_descriptor(b"with", fd)
        await one.send([b"after"])
        count = 0
        while count < 15:
            count += await other.receive_with_descriptors([view[count:]], received)
            if received:
                assert count >= 10
        assert bytes(view[:15]) == b"beforewithafter"
        assert take(received) == [b"content"]


async def test_two_messages_are_not_mixed_up(make_pair):
    received: deque[int | None] = deque()
    view = memoryview(bytearray(100))
    async with opened(make_pair) as (one, other), memory_file(b"1") as first, memory_file(b"2") as second:
        await one.send_with_descriptor(b"one", first)
        await one.send_with_descriptor(b"two", second)
        assert await other.receive_with_descriptors([view], received) == 3
        assert take(received) == [b"1"]
        assert await other.receive_with_descriptors([view], received) == 3
        assert take(received) == [b"2"]


async def test_who_does_not_ask_gets_none_and_keeps_none(make_pair):
    async with opened(make_pair) as (one, other), memory_file(b"content") as fd:
        await one.send_with_descriptor(b"with", fd)
        assert await other.receive_some([memoryview(bytearray(9))]) == 4
        await one.send_with_descriptor(b"with", fd)
        await other.receive_exactly([memoryview(bytearray(4))])


async def test_never_received(make_pair):
    async with opened(make_pair) as (one, _other), memory_file(b"content") as fd:
        for _ in range(3):
            await one.send_with_descriptor(b"with", fd)


async def test_waiting_and_cancelled(make_pair):
    received: deque[int | None] = deque()
    view = memoryview(bytearray(9))
    async with opened(make_pair) as (one, other), memory_file(b"content") as fd:
        for _ in range(2):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(other.receive_with_descriptors, [view], received)
                await wait_all_tasks_blocked()
                tasks.cancel_scope.cancel()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(other.receive_with_descriptors, [view], received)
            await wait_all_tasks_blocked()
            await one.send_with_descriptor(b"with", fd)
        assert take(received) == [b"content"]


async def test_abort_of_the_sending_half_and_the_end_that_proves_something(make_pair):
    """The one who gave away memory says that it leaves, and sees when the other has closed, not before."""
    async with opened(make_pair) as (one, other), anyio.create_task_group() as tasks:
        one.abort_only(Half.SENDING)
        other.abort_only(Half.RECEIVING)
        seen = anyio.Event()

        async def wait() -> None:
            await one.wait_peer_closed()
            seen.set()

        await other.send([b"what nobody reads any more"])
        one.abort()
        assert await other.receive_some([memoryview(bytearray(9))]) == 0
        tasks.start_soon(wait)
        await wait_all_tasks_blocked()
        other.abort()
        await wait_all_tasks_blocked()
        assert not seen.is_set()
        with pytest.raises(OSError, match=r".*"):
            await one.send([b"more"])
        await other.aclose()
        await seen.wait()


async def test_the_end_of_one_that_has_not_read_everything(make_pair):
    async with opened(make_pair) as (one, other):
        one.abort_only(Half.SENDING)
        await one.send([b"never read"])
        one.abort()
        await other.aclose()
        await one.wait_peer_closed()


async def test_more_than_anybody_needs_are_closed_and_told():
    received: deque[int | None] = deque()
    one, other = socket.socketpair()
    transport = SocketTransport(other)
    before = descriptors()
    async with memory_file(b"content") as fd:
        rights = struct.pack("40i", *([fd] * 40))
        one.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
        assert await transport.receive_with_descriptors([memoryview(bytearray(9))], received) == 1
        assert received.pop() is None
        assert len(received) == 16
        assert take(received) == [b"content"] * 16
    assert descriptors() == before
    await transport.aclose()
    one.close()


async def test_tcp_carries_none():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        transport = await connect(TCPEndpoint(host="127.0.0.1", port=listener.getsockname()[1]))
        assert local_transport(transport) is None
        await transport.aclose()
