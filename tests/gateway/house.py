"""Sessions on socket pairs: a gateway without a port."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc
import attrs

from adp_client.protocol.messages import Hello, Limits
from adp_client.transport import SocketTransport
from adp_gateway.admission import Admission
from adp_gateway.buffers import Arena
from adp_gateway.credits import Credits
from adp_gateway.session import Session
from adp_gateway.shared import Shared
from adp_gateway.store.memory import MemoryStore

from .peer import Peer

BOOT_ID = b"boot" * 4
SMALL = Limits(max_payload_bytes=1 << 20, max_object_bytes=8 << 20)


@attrs.define
class House:
    """A store, and a task group in which its sessions run."""

    store: Any
    shared: Shared
    tasks: anyio.abc.TaskGroup
    sessions: list[Session] = attrs.field(factory=list)
    ended: list[anyio.Event] = attrs.field(factory=list)
    transports: list[SocketTransport] = attrs.field(factory=list)

    def dial(self, *, buffer_bytes: int | None = None) -> SocketTransport:
        """A transport whose other end has a session."""
        ours, theirs = socket.socketpair()
        if buffer_bytes is not None:
            for sock in (ours, theirs):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        transport = SocketTransport(ours)
        self.transports.append(transport)
        session = Session(SocketTransport(theirs), self.shared, peer=f"peer {len(self.sessions)}")
        self.sessions.append(session)
        over = anyio.Event()
        self.ended.append(over)
        self.tasks.start_soon(self._run, session, over)
        return transport

    async def _run(self, session: Session, over: anyio.Event) -> None:
        try:
            await session.run()
        finally:
            over.set()

    async def connect(self, hello: Hello | None = None, **options: Any) -> Peer:
        peer = Peer(self.dial(**options), hello)
        await peer.open()
        return peer

    async def all_over(self) -> None:
        for over in self.ended:
            await over.wait()


@asynccontextmanager
async def house(
    store: Any = None,
    *,
    limits: Limits = SMALL,
    arena_bytes: int = 32 << 20,
    request_bytes: int = 1 << 30,
    inflight_bytes: int = 1 << 40,
    **shared: Any,
) -> AsyncIterator[House]:
    """Within: sessions on demand. After: every session has ended, nothing is leased, no memory is out."""
    store = store if store is not None else MemoryStore()
    arena = Arena(arena_bytes)
    admission = Admission(request_bytes)
    async with anyio.create_task_group() as tasks:
        home = House(
            store,
            Shared(
                store=store,
                arena=arena,
                admission=admission,
                credits=Credits(inflight_bytes=inflight_bytes, requests=1 << 20, limits=limits),
                limits=limits,
                boot_id=BOOT_ID,
                agent="house",
                **shared,
            ),
            tasks,
        )
        try:
            yield home
        finally:
            for transport in home.transports:
                await transport.aclose()
            with anyio.CancelScope(shield=True), anyio.fail_after(10):
                await home.all_over()
            tasks.cancel_scope.cancel()
    assert store.stats().leases == 0
    assert arena.used_bytes == 0
    assert arena.waiting == 0
    assert admission.used_bytes == 0
    assert home.shared.lease_admission.used_bytes == 0
    assert home.shared.counters.leased_items == store.stats().held_items == 0
    assert home.shared.counters.sessions == 0
    assert home.shared.credits.connections == 0
