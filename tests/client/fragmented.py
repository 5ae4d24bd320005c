"""Gateways that do not cut, what they hold then, and a script that decides whose request is answered next."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import anyio.lowlevel

from adp_client import Client, ClientConfig
from adp_client.fragments import MANIFEST_MAGIC, Manifest
from adp_client.protocol.events import RequestReceived
from adp_client.protocol.messages import Limits
from adp_client.testing import MemoryGateway
from client.support import ENDPOINT, NAMESPACE, PATIENT, QUICK

L = 100
KEY = b"the object"
LOOKALIKE = MANIFEST_MAGIC + bytes(range(48))


def uncutting(
    command_bytes: int = L, *, limits: dict[str, Any] | None = None, **gateway: Any
) -> MemoryGateway:
    """A gateway that leaves the cutting to its clients."""
    told = Limits(**{"max_command_bytes": command_bytes} | (limits or {}))
    return MemoryGateway(fragments=False, limits=told, **gateway)


def manifest_of(gateway: MemoryGateway, key: bytes = KEY) -> Manifest:
    found = Manifest.decode(gateway.objects[NAMESPACE, key].data)
    assert found is not None
    return found


def names_of(gateway: MemoryGateway, key: bytes = KEY) -> list[bytes]:
    """The keys of the fragments of `key`."""
    return manifest_of(gateway, key).keys(key)


def client_of(gateway: MemoryGateway) -> Client:
    """Another client of the same gateway."""
    config = ClientConfig(endpoint=ENDPOINT, timeouts=PATIENT, backoff=QUICK)
    return Client(config, dial=gateway.dial)


async def get(client: Client, key: bytes = KEY, room: int = 100 * L) -> bytes | int:
    """The object, or the status of the READ. EXIST must not say anything else."""
    memory = bytearray(room)
    found = await client.exist(NAMESPACE, [key])
    read = await client.read(NAMESPACE, [key], [memory])
    assert (found.statuses == b"\0") == (read.statuses == b"\0"), (found, read)
    return bytes(memory[: read.lengths[0]]) if read.is_all_ok else read.statuses[0]


class Turns:
    """A script under which each session's next request waits until it is that session's turn."""

    def __init__(self, gateway: MemoryGateway) -> None:
        self.log: list[tuple[int, Any]] = []
        self._gateway = gateway
        self._waiting: dict[int, anyio.Event] = {}
        self._is_over = False
        gateway.script = self

    async def __call__(self, session: Any, request: RequestReceived) -> bool:
        number = self._gateway.sessions.index(session)
        if not self._is_over:
            self._waiting[number] = anyio.Event()
            await self._waiting[number].wait()
        await session.answer(request)
        self.log.append((number, request.message))
        return True

    async def give(self, number: int, is_done: Callable[[], bool]) -> None:
        """Have the next request of session `number` answered, unless `is_done` before there is one."""
        while number not in self._waiting and not is_done():
            await anyio.lowlevel.checkpoint()
        if number in self._waiting:
            answered = len(self.log)
            self._waiting.pop(number).set()
            while len(self.log) == answered:
                await anyio.lowlevel.checkpoint()

    def give_all(self) -> None:
        """Nobody waits from here on."""
        self._is_over = True
        for waiting in self._waiting.values():
            waiting.set()


async def in_turns(
    gateway: MemoryGateway, calls: Sequence[Callable[[Client], Awaitable[Any]]], pattern: Sequence[int]
) -> list[Any]:
    """Each call by a client of its own; their requests are answered in the order of `pattern`."""
    results: list[Any] = [None] * len(calls)
    done = [anyio.Event() for _ in calls]

    async def run(number: int, client: Client) -> None:
        results[number] = await calls[number](client)
        done[number].set()

    first = len(gateway.sessions)
    async with anyio.create_task_group() as tasks:
        clients = [client_of(gateway) for _ in calls]
        for client in clients:
            await client.__aenter__()
            await client.wait_connected()
        turns = Turns(gateway)
        for number, client in enumerate(clients):
            tasks.start_soon(run, number, client)
        for number in pattern:
            await turns.give(first + number, done[number].is_set)
        turns.give_all()
        for event in done:
            await event.wait()
        gateway.script = None
        for client in reversed(clients):
            await client.__aexit__(None, None, None)
    return results
