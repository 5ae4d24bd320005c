"""A real server on a real socket in this process, so that a test can look at what it holds."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import attrs

from adp_client.transport.endpoints import Endpoint, UnixEndpoint
from adp_gateway.config import GatewayConfig, StoreConfig
from adp_gateway.server import Server
from adp_gateway.store.segments import SegmentStore

MIB = 1 << 20


@attrs.define
class Inside:
    """A server that serves, its store, and where it listens."""

    server: Server
    store: SegmentStore
    endpoint: Endpoint

    @property
    def shared(self) -> Any:
        """What its sessions have in common."""
        return self.server._shared

    def held(self) -> dict[str, int]:
        """What sessions hold of it now."""
        return {
            "sessions": self.server.counters.sessions,
            "leases": self.store.stats().leases,
            "arena bytes": self.shared.arena.used_bytes,
            "waiting": self.shared.arena.waiting,
            "admitted bytes": self.shared.admission.used_bytes,
            "credits": self.shared.credits.connections,
        }

    async def all_left(self) -> None:
        """Wait until the sessions have ended; nothing is held then."""
        while self.server.counters.sessions:
            await anyio.lowlevel.checkpoint()
        assert not any(self.held().values()), self.held()


@asynccontextmanager
async def inside(
    directory: Path, *, capacity_bytes: int = 64 * MIB, max_object_bytes: int = 8 * MIB, **options: Any
) -> AsyncIterator[Inside]:
    """Within: it serves at `directory`/s. After: it has been drained and everything is back."""
    endpoint = UnixEndpoint(path=str(directory / "s"))
    store_config = StoreConfig(
        directory=directory / "kv",
        capacity_bytes=capacity_bytes,
        max_object_bytes=max_object_bytes,
        io_threads=2,
    )
    config = GatewayConfig(store=store_config, listen=(endpoint,), **options)
    async with SegmentStore.open(store_config) as store:
        server = Server(config, store)
        async with anyio.create_task_group() as tasks:
            await tasks.start(server.serve)
            served = Inside(server, store, endpoint)
            yield served
            server.drain()
        assert not any(served.held().values()), served.held()
