"""TLS between the real client and the real server: who is let in, who is not, and what each is told."""

import logging
import os
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
import pytest

from adp_client import BackoffConfig, Client, ClientConfig, Timeouts, TLSConfig
from adp_client.errors import ConnectFailed, LinkLost
from adp_client.protocol.constants import ErrorCode
from adp_client.protocol.messages import ErrorMessage, Goodbye, Hello
from adp_client.transport import Endpoint, TCPEndpoint, TLSEndpoint, connect
from adp_client.transport.trust import TLSFailure, server_context
from adp_gateway.config import GatewayConfig, StoreConfig
from adp_gateway.server import Server
from adp_gateway.shared import Patience
from adp_gateway.store.memory import MemoryStore
from certificates import Authority, Files
from gateway.peer import Peer, key_of
from gateway.waiting import jump, on_a_still_clock, until

from .process import gateway, running

pytestmark = pytest.mark.anyio

NAMESPACE = bytes(range(32))
QUICK = BackoffConfig(initial_seconds=0.001, cap_seconds=0.01)
MIB = 1 << 20


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def context(files: Files, clients: Authority | None = None) -> ssl.SSLContext:
    return server_context(
        certificate_file=files.certificate,
        key_file=files.key,
        client_ca_file=None if clients is None else clients.file,
    )


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None, **options: Any) -> AsyncIterator[tuple[Server, Endpoint]]:
    """Within: a server on a port of the loopback. After: it has been drained."""
    kind = TCPEndpoint if tls is None else TLSEndpoint
    config = GatewayConfig(
        store=StoreConfig(directory="/nonexistent"),
        listen=(kind(host="127.0.0.1", port=0),),
        tls=tls,
        **options,
    )
    server = Server(config, MemoryStore(), patience=Patience(farewell_seconds=0.05))
    async with anyio.create_task_group() as tasks:
        (listener,) = await tasks.start(server.serve)
        yield server, listener.endpoint
        server.drain()
    assert server.counters.sessions == 0


def configured(endpoint: Endpoint | str, tls: TLSConfig | None, **options: Any) -> ClientConfig:
    return ClientConfig(endpoint=str(endpoint), tls=tls, backoff=QUICK, **options)


async def refusal(endpoint: Endpoint | str, tls: TLSConfig | None) -> str:
    """Why a client cannot use `endpoint`; it is told at once, not when its time is up."""
    async with Client(configured(endpoint, tls)) as client:
        with pytest.raises(ConnectFailed) as caught:
            await client.exist(NAMESPACE, [b"k"])
        while client.stats().connects_failed < 3:  # it keeps trying
            await anyio.lowlevel.checkpoint()
        assert not client.is_connected
    assert str(endpoint) in str(caught.value)
    return caught.value.reason


# ------------------------------------------------------------------------------------- who is let in, who not


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=lambda it: it.name)
async def test_a_gateway_that_can_be_trusted(authority: Authority, version: ssl.TLSVersion) -> None:
    served = context(authority.issue("127.0.0.1"))
    served.maximum_version = version
    async with serving(served, token=b"sesame") as (server, endpoint):
        config = configured(endpoint, TLSConfig(ca_file=authority.file), token="sesame")
        async with Client(config) as client:
            assert (await client.write(NAMESPACE, [b"k"], [b"page"])).count_ok == 1
            memory = bytearray(4)
            assert (await client.read(NAMESPACE, [b"k"], [memory])).is_all_ok
            assert memory == b"page"
        await until(lambda: server.counters.sessions == 0)
        assert server.counters.handshakes_failed == 0
        assert not server.counters.violations


async def test_an_authority_nobody_knows(authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path)
    async with serving(context(stranger.issue("127.0.0.1"))) as (server, endpoint):
        reason = await refusal(endpoint, TLSConfig(ca_file=authority.file))
        assert "signed by no authority that is trusted here" in reason
        assert "not accepted" in await refusal(endpoint, None)  # the system's authorities
        await until(lambda: server.counters.handshakes_failed >= 6)


async def test_the_certificate_of_another_host(authority: Authority) -> None:
    async with serving(context(authority.issue("gateway.example"))) as (_, endpoint):
        reason = await refusal(endpoint, TLSConfig(ca_file=authority.file))
        assert "not accepted: IP address mismatch" in reason
        named = TLSConfig(ca_file=authority.file, server_name="other.example")
        assert "Hostname mismatch" in await refusal(endpoint, named)
        named = TLSConfig(ca_file=authority.file, server_name="gateway.example")
        async with Client(configured(endpoint, named)) as client:
            assert (await client.exist(NAMESPACE, [b"k"])).count_ok == 0


async def test_a_certificate_that_has_expired(authority: Authority) -> None:
    yesterday = datetime.now(UTC) - timedelta(days=1)
    old = authority.issue("127.0.0.1", not_before=yesterday - timedelta(days=1), not_after=yesterday)
    async with serving(context(old)) as (_, endpoint):
        assert "has expired" in await refusal(endpoint, TLSConfig(ca_file=authority.file))


async def test_clients_must_show_who_they_are(authority: Authority, tmp_path: Path) -> None:
    clients, strangers = Authority(tmp_path), Authority(tmp_path)
    served = context(authority.issue("127.0.0.1"), clients)
    mine, other = clients.issue("engine-1"), strangers.issue("engine-1")
    async with serving(served) as (server, endpoint):
        assert "asks for a certificate, and got none" in await refusal(
            endpoint, TLSConfig(ca_file=authority.file)
        )
        unknown = TLSConfig(ca_file=authority.file, certificate_file=other.certificate, key_file=other.key)
        assert "does not know the authority" in await refusal(endpoint, unknown)
        assert server.counters.sessions_opened == 0
        known = TLSConfig(ca_file=authority.file, certificate_file=mine.certificate, key_file=mine.key)
        async with Client(configured(endpoint, known)) as client:
            assert (await client.exist(NAMESPACE, [b"k"])).count_ok == 0


async def test_files_that_appear_later_mend_it(
    authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once; certificates are read anew for each attempt, so a renewed one needs no restart."""
    file = tmp_path / "ca.pem"
    async with (
        serving(context(authority.issue("127.0.0.1"))) as (_, endpoint),
        Client(configured(endpoint, TLSConfig(ca_file=str(file)))) as client,
    ):
        with pytest.raises(ConnectFailed, match=r"'ca_file': cannot read .*ca.pem': No such file"):
            await client.exist(NAMESPACE, [b"k"])
        while client.stats().connects_failed < 3:
            await anyio.lowlevel.checkpoint()
        shutil.copy(authority.file, tmp_path / "new.pem")
        os.replace(tmp_path / "new.pem", file)  # noqa: PTH105
        while not client.is_connected:
            await anyio.lowlevel.checkpoint()
        assert (await client.exist(NAMESPACE, [b"k"])).count_ok == 0
    assert len([line for line in caplog.messages if "cannot use" in line]) == 1


# -------------------------------------------------------------------------- one side speaks something else


async def test_b53_a_plain_client_at_a_port_that_speaks_tls(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "adp_gateway")
    async with serving(context(authority.issue("127.0.0.1"))) as (server, endpoint):
        assert isinstance(endpoint, TLSEndpoint)
        plain = TCPEndpoint(host=endpoint.host, port=endpoint.port)
        assert "this endpoint speaks TLS: dial it as tls://" in await refusal(plain, None)
        assert server.counters.sessions_opened == 0
    assert server.counters.handshakes_failed >= 3
    (told,) = [line for line in caplog.messages if "no TLS" in line]
    assert "does not speak TLS" in told


async def test_b53_a_tls_client_at_a_plain_port(authority: Authority) -> None:
    async with serving(None) as (server, endpoint):
        assert isinstance(endpoint, TCPEndpoint)
        secret = TLSEndpoint(host=endpoint.host, port=endpoint.port)
        reason = await refusal(secret, TLSConfig(ca_file=authority.file))
        assert reason == "the other end does not speak TLS"
        assert server.counters.violations.keys() == {"BAD_MAGIC"}


@pytest.mark.parametrize(
    "noise", [b"GET / HTTP/1.1\r\n\r\n", bytes(100), b"\x16\x03\x01\xff\xff" + b"\xff" * 70_000, b"ADP"]
)
async def test_noise_at_a_port_that_speaks_tls(authority: Authority, noise: bytes) -> None:
    async with serving(context(authority.issue("127.0.0.1"))) as (server, endpoint):
        assert isinstance(endpoint, TLSEndpoint)
        async with await anyio.connect_tcp(endpoint.host, endpoint.port) as stream:
            await stream.send(noise)
            await stream.send_eof()
            await until(lambda: server.counters.handshakes_failed == 1)
        async with Client(configured(endpoint, TLSConfig(ca_file=authority.file))) as client:
            assert (await client.exist(NAMESPACE, [b"k"])).count_ok == 0


async def test_a_port_that_never_answers(authority: Authority) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = TLSEndpoint(host="127.0.0.1", port=silent.getsockname()[1])
        config = configured(
            endpoint, TLSConfig(ca_file=authority.file), timeouts=Timeouts(connect_seconds=0.02)
        )
        async with Client(config) as client:
            while client.stats().connects_failed < 2:
                await anyio.lowlevel.checkpoint()
            assert client._link is not None
            assert "no answer to the handshake in time" in str(client._link._failed())


# ------------------------------------------------------------------------- what handshakes do to the others


async def silent_peer(endpoint: Endpoint) -> anyio.abc.SocketStream:
    assert isinstance(endpoint, TLSEndpoint)
    return await anyio.connect_tcp(endpoint.host, endpoint.port)


@on_a_still_clock
async def test_a_silent_peer_holds_up_nobody_and_is_cut(
    authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "adp_gateway")
    async with (
        serving(context(authority.issue("127.0.0.1"))) as (server, endpoint),
        await silent_peer(endpoint) as silent,
    ):
        peer = Peer(await connect(endpoint, tls=TLSConfig(ca_file=authority.file)))
        await peer.open()
        assert await peer.exist(key_of(1)) == [ErrorCode.NOT_FOUND]
        assert server.counters.handshakes_failed == 0
        jump(Patience().hello_seconds)
        with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
            await silent.receive()
        assert server.counters.handshakes_failed == 1
        assert await peer.exist(key_of(1)) == [ErrorCode.NOT_FOUND]
        await peer.leave()
        await peer.transport.aclose()
    assert "the client was silent for too long" in caplog.text


async def test_handshakes_count_as_connections(authority: Authority) -> None:
    async with serving(context(authority.issue("127.0.0.1")), max_sessions=1) as (server, endpoint):
        async with await silent_peer(endpoint):
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(OSError, match=r"closed the connection|reset"):
                await connect(endpoint, tls=TLSConfig(ca_file=authority.file))
            assert server.counters.sessions_turned_away == 1
        await until(lambda: server.counters.handshakes_failed == 1)
        peer = Peer(await connect(endpoint, tls=TLSConfig(ca_file=authority.file)))
        await peer.open()
        await peer.leave()
        await peer.transport.aclose()


async def test_draining_waits_for_no_handshake_and_says_goodbye_in_tls(authority: Authority) -> None:
    async with serving(context(authority.issue("127.0.0.1")), grace_seconds=1000) as (server, endpoint):
        silent = await silent_peer(endpoint)
        peer = Peer(await connect(endpoint, tls=TLSConfig(ca_file=authority.file)))
        await peer.open()
        server.drain()
        assert await peer.closed() == [Goodbye(code=ErrorCode.SHUTTING_DOWN)]
        await peer.transport.aclose()
    await silent.aclose()


async def test_a_bug_in_a_handshake_ends_that_connection_only(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def buggy(*_: object, **__: object) -> None:
        raise RuntimeError("a bug")

    served = context(authority.issue("127.0.0.1"))
    async with serving(served) as (_, endpoint):
        with monkeypatch.context() as patch:
            patch.setattr("adp_gateway.server.TLSTransport.handshake", buggy)
            async with await silent_peer(endpoint) as stream:
                await stream.send(b"\x16")
                with pytest.raises((anyio.EndOfStream, anyio.BrokenResourceError)):
                    await stream.receive()
        async with Client(configured(endpoint, TLSConfig(ca_file=authority.file))) as client:
            assert (await client.exist(NAMESPACE, [b"k"])).count_ok == 0
    assert "a bug" in caplog.text


async def test_a_violation_inside_tls_is_answered_inside_tls(authority: Authority) -> None:
    async with serving(context(authority.issue("127.0.0.1"))) as (server, endpoint):
        peer = Peer(await connect(endpoint, tls=TLSConfig(ca_file=authority.file)))
        await peer.transport.send([b"GET / HTTP/1.1\r\n\r\n"])
        peer.connection.hello(Hello())
        (notice,) = await peer.closed()
        assert isinstance(notice, ErrorMessage)
        assert notice.code is ErrorCode.BAD_MAGIC
        await until(lambda: server.counters.sessions == 0)


# ------------------------------------------------------------------------------- bytes, many and interrupted


def page(number: int) -> bytes:
    return ((number + 1).to_bytes(8, "big") * (MIB // 8 + 1))[:MIB]


NAMES = [b"page %d" % number for number in range(64)]


def options(authority: Authority) -> tuple[str, ...]:
    files = authority.issue("127.0.0.1")
    return (
        *("--tls-certificate", files.certificate, "--tls-key", files.key),
        *("--capacity", "256MiB"),
    )


async def test_sixty_four_large_pages_there_and_back(authority: Authority, tmp_path: Path) -> None:
    async with (
        gateway(tmp_path / "kv", *options(authority), listen=("tls://127.0.0.1:0",)) as served,
        Client(configured(served.endpoints[0], TLSConfig(ca_file=authority.file))) as client,
    ):
        assert served.endpoints[0].startswith("tls://127.0.0.1:")
        pages = [page(number) for number in range(64)]
        assert (await client.write(NAMESPACE, NAMES, pages)).is_all_ok
        memory = bytearray(64 * MIB)
        views = [memoryview(memory)[at * MIB : (at + 1) * MIB] for at in range(64)]
        assert (await client.read(NAMESPACE, NAMES, views)).is_all_ok
        assert memory == b"".join(pages)
        assert client.stats().connects == 1
        assert served.stop()[0] == 0


async def test_b42_a_gateway_killed_while_pages_come_in(authority: Authority, tmp_path: Path) -> None:
    data, extra = tmp_path / "kv", options(authority)
    memory = bytearray(64 * MIB)
    views = [memoryview(memory)[at * MIB : (at + 1) * MIB] for at in range(64)]
    with running(data, *extra, listen=("tls://127.0.0.1:0",)) as served:
        endpoint = served.endpoints[0]
        async with Client(configured(endpoint, TLSConfig(ca_file=authority.file))) as client:
            assert (await client.write(NAMESPACE, NAMES, [page(number) for number in range(64)])).is_all_ok

            async def kill() -> None:
                while not views[0][-1]:  # the first page is in, as its last byte says
                    await anyio.lowlevel.checkpoint()
                served.process.kill()

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(kill)
                tasks.start_soon(serve_again, served, data, extra, endpoint, tasks.cancel_scope)
                assert (await client.read(NAMESPACE, NAMES, views)).is_all_ok
                await client.wait_connected()
                tasks.cancel_scope.cancel()
            assert client.stats().boots_seen == 2
    assert memory == b"".join(page(number) for number in range(64))


async def serve_again(served, data: Path, extra: tuple[str, ...], endpoint: str, scope: object) -> None:
    while served.process.poll() is None:
        await anyio.lowlevel.checkpoint()
    with running(data, *extra, listen=(endpoint,)):
        await anyio.sleep_forever()


class Cutter:
    """In the middle: passes on what either side says, and after `limit` bytes for the client, a FIN.

    It knows no key, so this is what somebody on the way could do; without TLS it would pass for an end.
    """

    def __init__(self, endpoint: TLSEndpoint, limit: int) -> None:
        self.target = endpoint
        self.limit = limit
        self.cuts = 0

    async def pass_on(self, client: anyio.abc.SocketStream) -> None:
        async with (
            client,
            await anyio.connect_tcp(self.target.host, self.target.port) as server,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(self._up, client, server)
            left = self.limit
            async for data in server:
                await client.send(data[:left])
                left -= len(data)
                if left <= 0:
                    break
            self.cuts += 1
            await client.send_eof()
            tasks.cancel_scope.cancel()

    async def _up(self, client: anyio.abc.SocketStream, server: anyio.abc.SocketStream) -> None:
        async for data in client:
            await server.send(data)


@asynccontextmanager
async def cutting(endpoint: Endpoint, limit: int) -> AsyncIterator[tuple[Cutter, TLSEndpoint]]:
    assert isinstance(endpoint, TLSEndpoint)
    cutter = Cutter(endpoint, limit)
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)
    async with listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, cutter.pass_on)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        yield cutter, TLSEndpoint(host="127.0.0.1", port=port)
        tasks.cancel_scope.cancel()


async def test_an_end_that_somebody_forged_is_a_lost_link_not_a_short_object(authority: Authority) -> None:
    served = context(authority.issue("127.0.0.1"))
    trust = TLSConfig(ca_file=authority.file)
    async with serving(served) as (_, endpoint), cutting(endpoint, 300_000) as (cutter, between):
        async with Client(configured(endpoint, trust)) as direct:
            assert (await direct.write(NAMESPACE, [b"k"], [page(1)])).is_all_ok
        async with Client(configured(between, trust)) as client:
            memory = bytearray(MIB)
            with pytest.raises(LinkLost, match="it ended without TLS saying so"):
                await client.read(NAMESPACE, [b"k"], [memory])
            assert cutter.cuts == 2  # a READ is sent again once
            assert memory != page(1)


@pytest.mark.parametrize("limit", [0, 1, 100])
async def test_a_handshake_that_is_cut(authority: Authority, limit: int) -> None:
    served = context(authority.issue("127.0.0.1"))
    async with serving(served) as (_, endpoint), cutting(endpoint, limit) as (_, between):
        with pytest.raises(TLSFailure, match="closed the connection instead") as caught:
            await connect(between, tls=TLSConfig(ca_file=authority.file))
        assert not caught.value.is_lasting
