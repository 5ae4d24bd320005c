"""Listeners and sessions together, in this process and on both event loops."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from adp_client.protocol.constants import ErrorCode
from adp_client.protocol.messages import ErrorMessage, Goodbye, Hello
from adp_client.transport import UnixEndpoint, connect
from adp_gateway.config import GatewayConfig, StoreConfig
from adp_gateway.server import Server
from adp_gateway.session import Session
from adp_gateway.shared import Patience
from adp_gateway.store.memory import MemoryStore

from .peer import Closed, Peer, key_of
from .waiting import until

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def serving(tmp_path: Path, **options: Any) -> AsyncIterator[tuple[Server, UnixEndpoint]]:
    """Within: a server. After: it has been drained."""
    endpoint = UnixEndpoint(path=str(tmp_path / "s"))
    config = GatewayConfig(store=StoreConfig(directory=tmp_path), listen=(endpoint,), **options)
    server = Server(config, MemoryStore(), patience=Patience(farewell_seconds=0.05))
    async with anyio.create_task_group() as tasks:
        await tasks.start(server.serve)
        yield server, endpoint
        server.drain()
    assert server.counters.sessions == 0
    with pytest.raises(FileNotFoundError):
        await connect(endpoint)


async def dial(endpoint: UnixEndpoint) -> Peer:
    peer = Peer(await connect(endpoint))
    await peer.open()
    return peer


async def test_serve_and_drain(tmp_path: Path) -> None:
    async with serving(tmp_path) as (server, endpoint):
        peers = [await dial(endpoint) for _ in range(3)]
        await peers[0].write({key_of(1): b"shared"})
        assert [await peer.read(key_of(1)) for peer in peers] == [[b"shared"]] * 3
        await peers[0].leave()
        await until(lambda: server.counters.sessions == 2)
    for peer in peers[1:]:
        assert await peer.closed() == [Goodbye(code=ErrorCode.SHUTTING_DOWN)]
    for peer in peers:
        await peer.transport.aclose()


async def test_one_too_many_is_told_so(tmp_path: Path) -> None:
    async with serving(tmp_path, max_sessions=1) as (server, endpoint):
        first = await dial(endpoint)
        second = Peer(await connect(endpoint))
        second.connection.hello(Hello())
        (notice,) = await second.closed()
        assert isinstance(notice, ErrorMessage)
        assert notice.code is ErrorCode.LIMIT_EXCEEDED
        assert server.counters.sessions_turned_away == 1
        await first.leave()
        await until(lambda: server.counters.sessions == 0)
        third = await dial(endpoint)
        assert await third.exist(key_of(1)) == [ErrorCode.NOT_FOUND]
        for peer in (first, second, third):
            await peer.transport.aclose()


async def test_a_bug_in_a_session_ends_that_session_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as (_, endpoint):
        good = await dial(endpoint)

        def greet(*_: object) -> None:
            raise RuntimeError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(Session, "_greet", greet)
            bad = Peer(await connect(endpoint))
            with pytest.raises(Closed):
                await bad.open()
        assert await good.exist(key_of(1)) == [ErrorCode.NOT_FOUND]
        for peer in (good, bad):
            await peer.transport.aclose()
    assert "a bug" in caplog.text


async def test_cancelled_while_clients_are_connected(tmp_path: Path) -> None:
    endpoint = UnixEndpoint(path=str(tmp_path / "s"))
    config = GatewayConfig(store=StoreConfig(directory=tmp_path), listen=(endpoint,))
    server = Server(config, MemoryStore())
    async with anyio.create_task_group() as tasks:
        await tasks.start(server.serve)
        peer = await dial(endpoint)
        tasks.cancel_scope.cancel()
    assert server.counters.sessions == 0
    assert await peer.closed() == []
    await peer.transport.aclose()


async def test_accept_survives_a_want_of_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failures = [*(OSError(24, "Too many open files") for _ in range(3)), ConnectionAbortedError()]
    accept = socket.socket.accept

    def flaky(self: socket.socket) -> Any:
        accepted = accept(self)
        if failures:
            accepted[0].close()
            raise failures.pop(0)
        return accepted

    async with serving(tmp_path) as (_, endpoint):
        with monkeypatch.context() as patch:
            patch.setattr(socket.socket, "accept", flaky)
            for left in range(3, -1, -1):
                lost = await connect(endpoint)
                await until(lambda left=left: len(failures) <= left)
                await lost.aclose()
            peer = await dial(endpoint)
            assert await peer.exist(key_of(1)) == [ErrorCode.NOT_FOUND]
            await peer.transport.aclose()
    told = [message for message in caplog.messages if "cannot accept" in message]
    assert told == [f"{endpoint}: cannot accept: Too many open files"]


async def test_b54_no_client_fills_the_log_by_being_turned_away(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A hundred times the wrong token from one place: one line."""
    async with serving(tmp_path, token=b"secret") as (server, endpoint):
        for _ in range(100):
            peer = Peer(await connect(endpoint), Hello(token=b"wrong"))
            await peer.transport.send([peer.connection.hello(peer.hello)])
            (notice,) = await peer.closed()
            assert isinstance(notice, ErrorMessage)
            assert notice.code is ErrorCode.UNAUTHENTICATED
        await until(lambda: server.counters.sessions == 0)
        assert server.counters.violations["UNAUTHENTICATED"] == 100
    assert caplog.text.count("UNAUTHENTICATED") == 1


async def test_every_unix_peer_has_a_number_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also when the system gives the second connection the descriptor of the first."""
    async with serving(tmp_path) as (server, endpoint):
        for code in (ErrorCode.MALFORMED, ErrorCode.BAD_CHECKSUM):
            peer = await dial(endpoint)
            with caplog.at_level("INFO"):
                await peer.transport.send([peer.connection.error(code, "why")])
                await until(lambda: server.counters.sessions == 0)
            await peer.transport.aclose()
    assert [word for word in caplog.text.split() if word.startswith("unix:")] == [
        f"{endpoint}#1:",
        f"{endpoint}#2:",
    ]


@pytest.mark.parametrize("is_greeted", [False, True])
async def test_no_client_fills_the_log_by_saying_why_it_leaves(
    is_greeted: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Before and after HELLO, and without a token: one line, and no more of the text than 200 characters."""
    caplog.set_level("INFO")
    text = "two\nlines" + "x" * 1900
    async with serving(tmp_path) as (server, endpoint):
        for _ in range(20):
            peer = Peer(await connect(endpoint))
            if is_greeted:
                await peer.open()
            await peer.transport.send([peer.connection.error(ErrorCode.MALFORMED, text)])
            await peer.closed()
            await peer.transport.aclose()
        await until(lambda: server.counters.sessions_opened == 20 and server.counters.sessions == 0)
    assert [line for line in caplog.messages if line.startswith("unix:")] == [
        f"{endpoint}#1: the client ended the connection: MALFORMED: two\\nlines{'x' * 191}..."
    ]
