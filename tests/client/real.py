"""The real gateway in this process: its own sessions over its own store, without a port or a disk."""

import itertools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import anyio
import anyio.abc
import anyio.lowlevel
import attrs

from adp_client.protocol.messages import Limits
from adp_client.transport import Transport, UnixEndpoint
from adp_client.transport.endpoints import Endpoint
from adp_client.transport.memory import memory_pair
from adp_gateway.buffers import Arena
from adp_gateway.config import GatewayConfig
from adp_gateway.device.memory import MemoryDevice
from adp_gateway.server import Server
from adp_gateway.session import Session
from adp_gateway.store.segments import SegmentStore
from gateway.objects import after_kill, config

Pair = tuple[Transport, Transport]


class RealGateway:
    """Dial it like a MemoryGateway. `restart` ends every connection and opens the store again.

    Whenever it ends, all that its sessions had is back: leases, memory, sessions.
    """

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        make_pair: Callable[[], Pair] = memory_pair,
        arena_bytes: int = 128 << 20,
        **store: Any,
    ) -> None:
        self._config = config("unused", **store)
        self._limits = limits
        self._arena_bytes = arena_bytes
        self._boots = itertools.count(1)
        self._stack = ExitStack()
        self.device = self._stack.enter_context(
            MemoryDevice(max_command_bytes=self._config.max_command_bytes)
        )
        self.make_pair = make_pair
        self.wrap: Callable[[Transport], Transport] = lambda transport: transport
        self.dials = 0
        self.is_down = True
        self._is_up = anyio.Event()
        self.sessions = 0

    async def __aenter__(self) -> Self:
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        await self._tasks.start(self._boot)
        return self

    async def __aexit__(self, *exc_info: object) -> bool | None:
        with anyio.CancelScope(shield=True):
            await self._stop()
        self._tasks.cancel_scope.cancel()
        try:
            return await self._tasks.__aexit__(*exc_info)  # type: ignore[arg-type]
        finally:
            self._stack.close()

    async def restart(self, *, is_killed: bool = False) -> None:
        """Come back as another boot; killed: with what the device has at this moment."""
        image = self._stack.enter_context(after_kill(self.device)) if is_killed else self.device
        await self._stop()
        self.device = image
        await self._tasks.start(self._boot)

    async def _stop(self) -> None:
        if not self.is_down:
            self.is_down, self._is_up = True, anyio.Event()
            self._sessions.cancel_scope.cancel()
            await self._is_over.wait()

    async def _boot(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        self._is_over = anyio.Event()
        try:
            async with SegmentStore.open(self._config, device=self.device) as self.store:
                listen = (UnixEndpoint(path="/never/opened"),)
                made = Server(GatewayConfig(store=self._config, listen=listen), self.store)._shared
                self.shared = attrs.evolve(
                    made,
                    arena=Arena(self._arena_bytes),
                    limits=self._limits or made.limits,
                    boot_id=next(self._boots).to_bytes(16, "big"),
                )
                async with anyio.create_task_group() as self._sessions:
                    self.is_down = False
                    self._is_up.set()
                    task_status.started()
                    await anyio.sleep_forever()
                self.assert_nothing_is_held()
        finally:
            self._is_over.set()

    def assert_nothing_is_held(self) -> None:
        """No session, and nothing of one."""
        assert self.store.stats().leases == 0
        assert self.shared.arena.used_bytes == self.shared.arena.waiting == 0
        assert self.shared.admission.used_bytes == 0
        assert self.shared.credits.connections == 0
        assert self.shared.counters.sessions == 0

    async def all_left(self) -> None:
        """Wait until every session has ended."""
        while self.shared.counters.sessions:
            await anyio.lowlevel.checkpoint()

    async def dial(self, endpoint: Endpoint) -> Transport:
        """A Dialer for `Client`."""
        self.dials += 1
        await anyio.lowlevel.checkpoint()
        if self.is_down:
            # Refused, but not before that is about to change: a client that backs off for a microsecond would
            # dial ten thousand times, and take the interpreter from the threads that open the store.
            await self._is_up.wait()
            raise ConnectionRefusedError(f"{endpoint} is down")
        ours, theirs = self.make_pair()
        session = Session(theirs, self.shared, peer=f"peer {self.dials}")
        self._sessions.start_soon(session.run)
        return self.wrap(ours)
