"""The gateway process: listeners, sessions, and a way to end.

serve      one task group: a task for each listener, a task for each session, and their end
drain      stop listening, ask the clients to leave, wait for them, cut what is left
"""

import errno
import logging
import os
import socket
from collections.abc import Sequence

import anyio
import anyio.abc
import anyio.lowlevel
import attrs

from adp_client.protocol.connection import Connection
from adp_client.protocol.constants import BOOT_ID_BYTES, ErrorCode, Role
from adp_client.protocol.messages import Limits
from adp_client.transport import SocketTransport, TCPEndpoint

from .admission import Admission
from .buffers import Arena
from .config import GatewayConfig
from .counters import Counters
from .credits import Credits
from .listeners import Listener, close_all, open_listeners
from .session import Session
from .shared import Patience, Shared
from .store.base import ObjectStore

log = logging.getLogger(__name__)

AGENT = "adp-gateway/0.1.0"
SEND_BUFFER_BYTES = 4 << 20  # the system may give less (net.core.wmem_max)
INFLIGHT_REQUESTS = 16384  # of all connections together: 64 of them with a full window each
ACCEPT_PAUSE_SECONDS = 0.1  # after accept() failed for want of descriptors: somebody has to close one first


class Server:
    """Serves one store on some endpoints."""

    def __init__(
        self, config: GatewayConfig, store: ObjectStore, *, patience: Patience | None = None
    ) -> None:
        self._config = config
        self._limiter = anyio.CapacityLimiter(config.transfer_threads)
        self.counters = Counters()
        self.boot_id = os.urandom(BOOT_ID_BYTES)
        limits = limits_of(config, store)
        # The largest frame, with an object that goes on in the next, must fit, or it would wait for ever.
        least = limits.max_payload_bytes + limits.max_object_bytes + limits.max_items * 64
        self._shared = Shared(
            store=store,
            arena=Arena(max(config.incoming_bytes, least)),
            admission=Admission(config.request_bytes),
            credits=Credits(inflight_bytes=config.inflight_bytes, requests=INFLIGHT_REQUESTS, limits=limits),
            limits=limits,
            boot_id=self.boot_id,
            agent=AGENT,
            token=config.token,
            patience=patience or Patience(),
            max_queued_bytes=config.queued_bytes,
            counters=self.counters,
        )
        self._sessions: set[Session] = set()
        self._last_left = anyio.Event()
        self._draining = anyio.Event()

    def drain(self) -> None:
        """Begin to end: `serve` returns when every client has left, or the grace time is over."""
        self._draining.set()

    async def serve(
        self, *, task_status: anyio.abc.TaskStatus[Sequence[Listener]] = anyio.TASK_STATUS_IGNORED
    ) -> None:
        """Listen and serve until `drain`. Started when the listeners are open.

        Raises OSError if an endpoint cannot be had. Cancelled: every connection is cut at once.
        """
        listeners = await open_listeners(self._config.listen)
        try:
            async with anyio.create_task_group() as tasks:
                async with anyio.create_task_group() as accepting:
                    for listener in listeners:
                        accepting.start_soon(self._accept, listener, tasks)
                    task_status.started(listeners)
                    await self._draining.wait()
                    accepting.cancel_scope.cancel()
                close_all(listeners)
                await self._say_goodbye()
                tasks.cancel_scope.cancel()
        finally:
            close_all(listeners)

    async def _accept(self, listener: Listener, tasks: anyio.abc.TaskGroup) -> None:
        while True:
            try:
                sock, address = listener.sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                await anyio.wait_readable(listener.sock)
                continue
            except OSError as exc:
                if exc.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                log.error("cannot accept on %s: %s", listener.endpoint, exc.strerror)
                await anyio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            if isinstance(listener.endpoint, TCPEndpoint):
                peer = f"tcp://{address[0]}:{address[1]}"
            else:
                peer = f"{listener.endpoint}#{sock.fileno()}"
            tasks.start_soon(self._serve_one, sock, peer)
            await anyio.lowlevel.checkpoint()  # a flood of connections must not keep the others waiting

    async def _serve_one(self, sock: socket.socket, peer: str) -> None:
        """One connection, as its own task: nothing that happens in it reaches another."""
        if len(self._sessions) >= self._config.max_sessions or self._draining.is_set():
            await self._turn_away(sock, peer)
            return
        if sock.family == socket.AF_UNIX:
            # Room for the next frame's pages while the client is between two; TCP sizes its own.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        session = Session(SocketTransport(sock, limiter=self._limiter), self._shared, peer=peer)
        self._sessions.add(session)
        try:
            await session.run()
        except Exception:
            log.exception("%s: the session failed", peer)
        finally:
            self._sessions.discard(session)
            if not self._sessions:
                self._last_left.set()

    async def _turn_away(self, sock: socket.socket, peer: str) -> None:
        self.counters.sessions_turned_away += 1
        log.warning("%s: turned away", peer)
        if self._draining.is_set():
            last = Connection(Role.GATEWAY).error(ErrorCode.SHUTTING_DOWN, "this gateway is going away")
        else:
            last = Connection(Role.GATEWAY).error(ErrorCode.LIMIT_EXCEEDED, "too many connections")
        with sock:
            sock.setblocking(False)
            try:
                sock.send(last)
            except OSError as exc:
                log.debug("%s: %s", peer, exc)

    async def _say_goodbye(self) -> None:
        log.info("draining: %d connections", len(self._sessions))
        for session in tuple(self._sessions):
            session.drain()
        with anyio.move_on_after(self._config.grace_seconds):
            while self._sessions:
                self._last_left = anyio.Event()
                await self._last_left.wait()
        if self._sessions:
            log.warning("cutting %d connections: the grace time is over", len(self._sessions))


def limits_of(config: GatewayConfig, store: ObjectStore) -> Limits:
    """What the handshake tells."""
    return attrs.evolve(
        Limits(),
        max_object_bytes=store.max_object_bytes,
        max_command_bytes=config.store.max_command_bytes,
    )
