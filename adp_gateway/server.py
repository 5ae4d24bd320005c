"""The gateway process: listeners, sessions, and a way to end.

serve      one task group: a task for each listener, a task for each session, and their end
drain      stop listening, ask the clients to leave, wait for them, cut what is left
"""

import itertools
import logging
import os
import socket
import ssl
from collections.abc import Sequence

import anyio
import anyio.abc
import anyio.lowlevel
import attrs

from adp_client.protocol.connection import Connection
from adp_client.protocol.constants import BOOT_ID_BYTES, MAGIC, ErrorCode, Role
from adp_client.protocol.messages import Extension, Limits
from adp_client.transport import SocketTransport, TLSEndpoint, TLSTransport, UnixEndpoint

from .admission import Admission
from .buffers import Arena
from .config import GatewayConfig
from .counters import Counters
from .credits import Credits
from .leasing import MAX_LEASE_MS
from .listeners import Listener, accept, close_all, open_listeners, peer_name
from .logs import shown
from .session import Session
from .shared import Patience, Shared
from .store.base import ObjectStore
from .tenants import Door

log = logging.getLogger(__name__)

AGENT = "adp-gateway/0.1.0"
SEND_BUFFER_BYTES = 4 << 20  # the system may give less (net.core.wmem_max)
INFLIGHT_REQUESTS = 16384  # of all connections together: 64 of them with a full window each
LAST_READ_BYTES = 64 << 10
LEASE_SHARE = 4  # leases may keep as much as this part of `request_bytes`, beside it


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
            door=Door(token=config.token, tenants=config.tenants),
            patience=patience or Patience(),
            max_queued_bytes=config.queued_bytes,
            counters=self.counters,
            lease_admission=Admission(config.request_bytes // LEASE_SHARE),
        )
        self._sessions: set[Session] = set()
        self._shaking_hands = 0  # connections that TLS may make sessions of
        self._numbers = itertools.count(1)  # of connections that have no address of their own
        self._last_left = anyio.Event()
        self._draining = anyio.Event()

    def drain(self) -> None:
        """Begin to end: `serve` returns when every client has left, or the grace time is over."""
        self._draining.set()

    @property
    def shared(self) -> Shared:
        """What its sessions have in common: for who wants to see how it is doing."""
        return self._shared

    async def serve(
        self,
        listeners: Sequence[Listener] | None = None,
        *,
        task_status: anyio.abc.TaskStatus[Sequence[Listener]] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        """Serve until `drain` on `listeners`, which are closed then, or on those of the configuration.

        Started when clients can connect. Raises OSError if an endpoint cannot be had. Cancelled: every
        connection is cut at once.
        """
        if listeners is None:
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
            sock, address = await accept(listener, self._cannot_accept)
            peer = peer_name(listener, address)
            if isinstance(listener.endpoint, UnixEndpoint):
                peer += f"#{next(self._numbers)}"
            tls = self._config.tls if isinstance(listener.endpoint, TLSEndpoint) else None
            tasks.start_soon(self._serve_one, sock, peer, tls, listener.extensions)
            await anyio.lowlevel.checkpoint()  # a flood of connections must not keep the others waiting

    def _cannot_accept(self, listener: Listener, error: OSError) -> None:
        self._complain(logging.ERROR, str(listener.endpoint), "cannot accept", error.strerror or str(error))

    async def _serve_one(
        self,
        sock: socket.socket,
        peer: str,
        tls: ssl.SSLContext | None,
        extensions: tuple[Extension, ...],
    ) -> None:
        """One connection, as its own task: nothing that happens in it reaches another."""
        if len(self._sessions) + self._shaking_hands >= self._config.max_sessions or self._draining.is_set():
            self._turn_away(sock, peer, is_secret=tls is not None)
            return
        if sock.family == socket.AF_UNIX:
            # Room for the next frame's pages while the client is between two; TCP sizes its own.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        transport = SocketTransport(sock, limiter=self._limiter) if tls is None else None
        if tls is not None:
            self._shaking_hands += 1
            try:
                transport = await self._shake_hands(sock, peer, tls)
            finally:
                self._shaking_hands -= 1
        if transport is None:
            return
        session = Session(transport, self._shared, peer=peer, extensions=extensions)
        self._sessions.add(session)
        try:
            await session.run()
        except Exception as exc:
            self._complain(logging.ERROR, peer, "the session failed", bug=exc)
        finally:
            self._sessions.discard(session)
            if not self._sessions:
                self._last_left.set()

    async def _shake_hands(
        self, sock: socket.socket, peer: str, context: ssl.SSLContext
    ) -> TLSTransport | None:
        """None: it did not come to TLS, and the socket is closed."""
        transport = TLSTransport(sock, context, limiter=self._limiter)
        try:
            with anyio.fail_after(self._shared.patience.hello_seconds):
                await anyio.wait_readable(sock)
                if sock.recv(len(MAGIC), socket.MSG_PEEK | socket.MSG_DONTWAIT) == MAGIC:
                    text = "this endpoint speaks TLS: dial it as tls://"
                    sock.recv(LAST_READ_BYTES, socket.MSG_DONTWAIT)  # unread, it would reset the connection
                    sock.send(Connection(Role.GATEWAY).error(ErrorCode.BAD_MAGIC, text), socket.MSG_DONTWAIT)
                    raise ConnectionAbortedError("the client does not speak TLS")
                await transport.handshake()
            if not self._draining.is_set():
                return transport
        except OSError as exc:
            self.counters.handshakes_failed += 1
            reason = shown(str(exc)) or "the client was silent for too long"
            self._complain(logging.INFO, peer, "no TLS", reason)
            transport.abort()
        except Exception as exc:
            self._complain(logging.ERROR, peer, "the handshake failed", bug=exc)
            transport.abort()
        except BaseException:
            sock.close()  # nobody else is inside
            raise
        await transport.aclose()
        return None

    def _turn_away(self, sock: socket.socket, peer: str, *, is_secret: bool) -> None:
        self.counters.sessions_turned_away += 1
        self._complain(logging.WARNING, peer, "turned away")
        if self._draining.is_set():
            last = Connection(Role.GATEWAY).error(ErrorCode.SHUTTING_DOWN, "this gateway is going away")
        else:
            last = Connection(Role.GATEWAY).error(ErrorCode.LIMIT_EXCEEDED, "too many connections")
        with sock:
            if is_secret:
                return  # to say it in TLS would cost what there is too little of
            sock.setblocking(False)
            try:
                sock.send(last)
            except OSError as exc:
                log.debug("%s: %s", peer, exc)

    def _complain(
        self, level: int, peer: str, matter: str, reason: str = "", *, bug: Exception | None = None
    ) -> None:
        """A line that a peer can cause, as often as it likes."""
        self._shared.complaints.tell(log, level, peer, matter, reason, now=anyio.current_time(), bug=bug)

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
        max_lease_ms=MAX_LEASE_MS,
    )
