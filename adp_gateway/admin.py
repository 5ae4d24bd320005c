"""The admin port: `/healthz`, `/livez` and `/metrics` over HTTP/1.1, on the event loop that serves the data.

It only tells: GET and HEAD, nothing to change, nothing that runs anybody's input (docs/adr/0019). One request
a connection, `MOST_CONNECTIONS` at a time, `DEADLINE_SECONDS` for each from accept to close, and a head of at
most `MOST_HEAD_BYTES`: so whatever comes in here, the data does not notice.
"""

import http
import json
import logging
import socket
from collections.abc import Iterable, Mapping
from typing import Final

import anyio
import anyio.abc
import anyio.lowlevel
import attrs
import h11
from prometheus_client import CollectorRegistry

from .health import Condition, Health
from .listeners import Listener, accept, peer_name
from .logs import Complaints
from .metrics import exposition

log = logging.getLogger(__name__)

MOST_CONNECTIONS: Final = 16
MOST_HEAD_BYTES: Final = 8192
DEADLINE_SECONDS: Final = 5.0
_RECEIVE_BYTES = 4096
_TEXT = "text/plain; charset=utf-8"


@attrs.frozen
class Page:
    """An answer."""

    status: int
    body: bytes
    content_type: str = _TEXT
    headers: tuple[tuple[str, str], ...] = ()


@attrs.frozen
class Pages:
    """What there is to see."""

    health: Health
    registry: CollectorRegistry

    async def find(self, method: bytes, target: bytes, headers: Mapping[bytes, bytes]) -> Page:
        """The answer to a request."""
        path = target.partition(b"?")[0]
        if path not in (b"/healthz", b"/livez", b"/metrics"):
            return Page(404, b"there are /healthz, /livez and /metrics\n")
        if method not in (b"GET", b"HEAD"):
            return Page(405, b"GET or HEAD\n", headers=(("allow", "GET, HEAD"),))
        if path == b"/metrics":
            return Page(200, *await exposition(self.registry, headers.get(b"accept", b"").decode("latin-1")))
        return self._healthz() if path == b"/healthz" else Page(200, b"alive\n")

    def _healthz(self) -> Page:
        condition, reason = self.health.condition
        body = {"status": condition.value, **({"reason": reason} if reason else {})}
        status = 200 if condition is Condition.READY else 503
        return Page(status, json.dumps(body).encode() + b"\n", "application/json")


class Admin:
    """Serves `pages` on listeners that somebody else has opened and will close."""

    def __init__(self, pages: Pages, *, deadline_seconds: float = DEADLINE_SECONDS) -> None:
        self._pages = pages
        self._deadline_seconds = deadline_seconds
        self._connections = 0
        self._complaints = Complaints()

    async def serve(self, listeners: Iterable[Listener]) -> None:
        """Until it is cancelled; connections are closed then. Raises nothing but bugs."""
        async with anyio.create_task_group() as tasks:
            for listener in listeners:
                tasks.start_soon(self._accept, listener, tasks)

    async def _accept(self, listener: Listener, tasks: anyio.abc.TaskGroup) -> None:
        while True:
            sock, address = await accept(listener, self._cannot_accept)
            if self._connections >= MOST_CONNECTIONS:
                sock.close()  # whoever asks so often can ask again
            else:
                self._connections += 1
                tasks.start_soon(self._serve_one, sock, peer_name(listener, address))
            await anyio.lowlevel.checkpoint()

    def _cannot_accept(self, listener: Listener, error: OSError) -> None:
        self._complain(logging.ERROR, str(listener.endpoint), "cannot accept", error.strerror or str(error))

    def _complain(
        self, level: int, peer: str, matter: str, reason: str = "", bug: BaseException | None = None
    ) -> None:
        self._complaints.tell(log, level, peer, matter, reason, now=anyio.current_time(), bug=bug)

    async def _serve_one(self, sock: socket.socket, peer: str) -> None:
        try:
            with sock:
                sock.setblocking(False)
                with anyio.move_on_after(self._deadline_seconds):
                    await self._exchange(sock)
        except OSError as exc:
            log.debug("%s: %s", peer, exc)
        except Exception as exc:
            self._complain(logging.ERROR, peer, "the admin port failed", bug=exc)
        finally:
            self._connections -= 1

    async def _exchange(self, sock: socket.socket) -> None:
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=MOST_HEAD_BYTES)
        is_head = False
        try:
            while (event := connection.next_event()) is h11.NEED_DATA:
                connection.receive_data(await _receive(sock))
            if not isinstance(event, h11.Request):
                return  # gone without a word
            is_head = event.method == b"HEAD"
            page = await self._pages.find(event.method, event.target, dict(event.headers))
        except h11.RemoteProtocolError as exc:
            page = Page(exc.error_status_hint, b"this is not a request\n")
        await _send(sock, _response(connection, page, is_head=is_head))
        # Closing with unread bytes would reset the connection, and the answer might be lost with it.
        sock.shutdown(socket.SHUT_WR)
        while await _receive(sock):
            pass


def _response(connection: h11.Connection, page: Page, *, is_head: bool) -> bytes:
    head = h11.Response(
        status_code=page.status,
        reason=http.HTTPStatus(page.status).phrase,
        headers=[
            ("content-type", page.content_type),
            ("content-length", str(len(page.body))),
            ("cache-control", "no-store"),
            ("connection", "close"),
            *page.headers,
        ],
    )
    sent = connection.send(head) or b""
    if not is_head:
        sent += connection.send(h11.Data(data=page.body)) or b""
    return sent + (connection.send(h11.EndOfMessage()) or b"")


async def _receive(sock: socket.socket) -> bytes:
    while True:
        await anyio.lowlevel.checkpoint()
        try:
            return sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            await anyio.wait_readable(sock)


async def _send(sock: socket.socket, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[sock.send(view) :]
        except BlockingIOError:
            await anyio.wait_writable(sock)
