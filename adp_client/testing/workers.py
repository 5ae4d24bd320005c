"""A gateway of several workers in one process: memory gateways that tell of each other in WELCOME.

    async with MemoryWorkers(3) as gateway:
        async with Client(config, dial=gateway.dial) as client: ...

The endpoint that the client knows is answered by any worker that is not down, in turn; the next ports are the
workers' own. Take one down, cut or restart it through `workers[k]`; `come_back` is another gateway at the
same endpoint.
"""

import itertools
from collections.abc import Callable
from typing import Any

import anyio
import anyio.abc
import anyio.lowlevel

from adp_client.placing import workers_of
from adp_client.protocol.workers import Place, WorkerMap, encode_worker_map
from adp_client.transport.base import Transport
from adp_client.transport.endpoints import Endpoint, TCPEndpoint

from .gateway import MemoryGateway
from .life import Served
from .regions import StoredObject


class MemoryWorkers(Served):
    """See the module. `settings` are those of MemoryGateway, for each worker."""

    def __init__(
        self,
        count: int,
        *,
        port: int = 7171,
        gateway_id: bytes = b"workers-in-memry",
        make: Callable[..., MemoryGateway] = MemoryGateway,
        **settings: Any,
    ) -> None:
        self.port = port
        self.gateway_id = gateway_id
        self._boots = itertools.count(1)
        self._make = make
        self._settings = settings
        self._tasks: anyio.abc.TaskGroup | None = None
        self._turns = itertools.count()
        self.dials = 0
        self.workers: list[MemoryGateway] = []
        self.past: list[MemoryGateway] = []
        self._hire(count)

    def _hire(self, count: int) -> None:
        places = tuple(Place(port=self.port + 1 + worker) for worker in range(count))
        for worker in range(count):
            boot_id = next(self._boots).to_bytes(16, "big")
            gateway = self._make(boot_id=boot_id, **self._settings)
            if count > 1:
                told = WorkerMap(gateway_id=self.gateway_id, places=places, worker=worker)
                gateway.extensions = (encode_worker_map(told),)
            if self._tasks is not None:
                gateway.serve_in(self._tasks)
            self.workers.append(gateway)

    def serve_in(self, tasks: anyio.abc.TaskGroup) -> None:
        """See Served."""
        self._tasks = tasks
        for worker in self.workers:
            worker.serve_in(tasks)

    async def dial(self, endpoint: Endpoint) -> Transport:
        """A Dialer for `Client`: the worker at that port, or at `port` itself any that is not down."""
        assert isinstance(endpoint, TCPEndpoint)
        self.dials += 1
        worker = endpoint.port - self.port - 1
        if worker == -1:
            alive = [each for each in self.workers if not each.is_down]
            if alive:
                return await alive[next(self._turns) % len(alive)].dial(endpoint)
        elif worker in range(len(self.workers)) and len(self.workers) > 1:
            return await self.workers[worker].dial(endpoint)
        await anyio.lowlevel.checkpoint()
        raise ConnectionRefusedError(f"{endpoint} is down")

    def keeper(self, key: bytes) -> MemoryGateway:
        """The worker that keeps `key`."""
        return self.workers[workers_of([key], len(self.workers))[0]]

    def put(self, namespace: bytes, key: bytes, data: bytes, *, checksum: int | None = None) -> None:
        """Store an object without a client, where it belongs."""
        self.keeper(key).put(namespace, key, data, checksum=checksum)

    @property
    def objects(self) -> dict[tuple[bytes, bytes], StoredObject]:
        """What all of them keep together; a copy."""
        return {name: stored for worker in self.workers for name, stored in worker.objects.items()}

    def cut(self) -> None:
        """Break every connection."""
        for worker in self.workers:
            worker.cut()

    def restart(self) -> None:
        """Break every connection; every worker comes back as another boot, with what it keeps."""
        for worker in self.workers:
            worker.restart(next(self._boots).to_bytes(16, "big"))

    def come_back(self, count: int, *, gateway_id: bytes) -> None:
        """Break every connection, and be another gateway, of `count` workers or one, that keeps nothing."""
        for worker in self.workers:
            worker.is_down = True
            worker.cut()
        self.past += self.workers
        self.workers, self.gateway_id = [], gateway_id
        self._hire(count)
