"""The admin port: what it answers, to whom, and that nobody who comes in keeps it busy."""

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
import pytest

from adp_client.transport import TCPEndpoint
from adp_gateway import admin
from adp_gateway.admin import MOST_CONNECTIONS, MOST_HEAD_BYTES, Admin, Pages
from adp_gateway.health import Condition, Health
from adp_gateway.listeners import close_all, open_listeners
from adp_gateway.metrics import GatewayCollector, Source, make_registry

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def served(
    health: Health | None = None, *, deadline_seconds: float = 5.0
) -> AsyncIterator[TCPEndpoint]:
    health = health or Health(Condition.READY)
    registry = make_registry(GatewayCollector(Source(health=health, version="1", durability="relaxed")))
    listeners = await open_listeners([TCPEndpoint(host="127.0.0.1", port=0)])
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(
                Admin(Pages(health, registry), deadline_seconds=deadline_seconds).serve, listeners
            )
            endpoint = listeners[0].endpoint
            assert isinstance(endpoint, TCPEndpoint)
            yield endpoint
            tasks.cancel_scope.cancel()
    finally:
        close_all(listeners)


async def exchange(endpoint: TCPEndpoint, sent: bytes) -> bytes:
    """All that comes back for these bytes until the other side closes."""
    with anyio.fail_after(10):
        async with await anyio.connect_tcp(endpoint.host, endpoint.port) as stream:
            await stream.send(sent)
            return b"".join([piece async for piece in stream])


async def get(
    endpoint: TCPEndpoint, path: str, *, method: str = "GET", more: str = ""
) -> tuple[int, str, bytes]:
    """Status, head and body."""
    raw = await exchange(endpoint, f"{method} {path} HTTP/1.1\r\nHost: x\r\n{more}\r\n".encode())
    head, _, body = raw.partition(b"\r\n\r\n")
    return int(head.split()[1]), head.decode().lower(), body


async def test_health_in_every_condition() -> None:
    health = Health()
    async with served(health) as endpoint:
        status, _, body = await get(endpoint, "/healthz")
        assert (status, json.loads(body)) == (
            503,
            {"status": "starting", "reason": "the store is being opened"},
        )
        health.stage = Condition.READY
        status, head, body = await get(endpoint, "/healthz")
        assert (status, json.loads(body)) == (200, {"status": "ready"})
        assert "content-type: application/json" in head
        trouble = ["no new segment: Input/output error"]
        health.trouble = lambda: trouble[0] if trouble else None
        status, _, body = await get(endpoint, "/healthz")
        assert (status, json.loads(body)) == (503, {"status": "failing", "reason": trouble[0]})
        trouble.clear()
        assert (await get(endpoint, "/healthz"))[0] == 200
        health.stage = Condition.DRAINING
        status, _, body = await get(endpoint, "/healthz")
        assert (status, json.loads(body)["status"]) == (503, "draining")
        assert (await get(endpoint, "/livez"))[0] == 200, "whoever drains is alive"


async def test_metrics_in_both_formats() -> None:
    async with served() as endpoint:
        status, head, body = await get(endpoint, "/metrics?x=1")
        assert status == 200
        assert "content-type: text/plain; version=0.0.4" in head
        assert b"adp_gateway_ready 1.0\n" in body
        accept = "Accept: application/openmetrics-text; version=1.0.0\r\n"
        status, head, body = await get(endpoint, "/metrics", more=accept)
        assert "content-type: application/openmetrics-text" in head
        assert body.endswith(b"# EOF\n")
        assert f"content-length: {len(body)}" in head


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("HEAD", "/metrics", 200),
        ("GET", "/", 404),
        ("GET", "/../../etc/passwd", 404),
        ("GET", "/debug", 404),
        ("POST", "/healthz", 405),
        ("DELETE", "/metrics", 405),
        ("PUT", "/shutdown", 404),
    ],
)
async def test_b54_it_only_tells(method: str, path: str, expected: int) -> None:
    async with served() as endpoint:
        status, head, body = await get(endpoint, path, method=method)
        assert status == expected
        assert (expected == 405) == ("allow: get, head" in head)
        assert (method == "HEAD") == (not body)


@pytest.mark.parametrize(
    "sent",
    [
        b"\x80\x04\x95pickle.",
        b"ADP/\x01\x01" + bytes(60),
        b"GET /metrics\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\n\r\n",  # no Host
        b"GET /" + b"x" * 2 * MOST_HEAD_BYTES,
        b"GET /metrics HTTP/1.1\r\n" + b"A: b\r\n" * MOST_HEAD_BYTES,
    ],
)
async def test_b54_what_is_no_request_is_told_so_and_cut(sent: bytes) -> None:
    async with served(deadline_seconds=0.2) as endpoint:
        raw = await exchange(endpoint, sent)
        # What has no line in it may still become a request, until the time for it is over.
        assert raw.split()[1] in (b"400", b"431") if b"\n" in sent or len(sent) > 100 else raw == b""
        assert (await get(endpoint, "/livez"))[0] == 200


async def test_a_client_that_says_nothing_is_cut_and_others_are_served() -> None:
    async with served(deadline_seconds=0.2) as endpoint:
        silent = [socket.create_connection((endpoint.host, endpoint.port)) for _ in range(MOST_CONNECTIONS)]
        try:
            for sock in silent:
                sock.setblocking(False)
                with anyio.fail_after(10):
                    await anyio.wait_readable(sock)
                assert sock.recv(1) == b""
        finally:
            for sock in silent:
                sock.close()
        assert (await get(endpoint, "/healthz"))[0] == 200


async def test_one_connection_too_many_is_closed() -> None:
    async with served() as endpoint:
        held = [socket.create_connection((endpoint.host, endpoint.port)) for _ in range(MOST_CONNECTIONS)]
        try:
            assert await exchange(endpoint, b"") == b""
        finally:
            for sock in held:
                sock.close()
        status = 0
        while status != 200:  # until those that have gone are noticed
            with_room = await exchange(endpoint, b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n")
            status = int(with_room.split()[1]) if with_room else 0


async def test_a_bug_in_a_page_ends_that_connection_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with served() as endpoint:
        with monkeypatch.context() as patch:
            patch.setattr(Pages, "_healthz", lambda _: 1 // 0)
            for _ in range(3):
                assert await exchange(endpoint, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n") == b""
        assert (await get(endpoint, "/healthz"))[0] == 200
    failed = [record for record in caplog.records if record.name == admin.__name__]
    assert len(failed) == 1, "once in ten seconds"
    assert failed[0].exc_info is not None
