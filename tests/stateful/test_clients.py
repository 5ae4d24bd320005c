"""Many clients against a dict, through cancellations and restarts, on the tests' gateway and on the real one.

What holds: an object is whole or absent; what was acknowledged, and neither deleted nor evicted, is there;
who wrote reads what was written, and who deleted reads nothing. When calls on one key overlapped, or a call
was cancelled or lost, what is there is what one of them would leave.
"""

import os
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import anyio
import pytest
from anyio.from_thread import start_blocking_portal
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from adp_client import Client, ClientConfig
from adp_client.errors import LinkError
from adp_client.protocol.messages import Limits
from adp_client.testing import MemoryGateway, MemoryWorkers
from client.real import RealGateway
from client.support import ENDPOINT, NAMESPACE, PATIENT, QUICK, cancel_at, leftovers, leftovers_of
from gateway.objects import payload

CLIENTS = 3
SIZES = [0, 1, 100, 5000, 20_000]
LIMITS = Limits(max_payload_bytes=8192, max_object_bytes=32 << 10, max_inflight_bytes=64 << 10)
KEYS = [b"a", b"b", b"cc", b"dd", b"eee"]
keys = st.sampled_from(KEYS)
clients = st.integers(0, CLIENTS - 1)
ABSENT = None
Content = bytes | None


class ClientsMachine(RuleBasedStateMachine):
    """`self.maybe[key]` is the set of what may be there now."""

    backend = "asyncio"
    can_be_killed = False

    def make_gateway(self) -> Any:
        return MemoryGateway(limits=LIMITS, frame_bytes=3000)

    @initialize()
    def begin(self) -> None:
        self.stack = ExitStack()
        self.portal = self.stack.enter_context(start_blocking_portal(self.backend))
        self.gateway = self.stack.enter_context(
            self.portal.wrap_async_context_manager(self.portal.call(self.make_gateway))
        )
        config = ClientConfig(endpoint=ENDPOINT, timeouts=PATIENT, backoff=QUICK)
        self.clients = [
            self.stack.enter_context(
                self.portal.wrap_async_context_manager(
                    self.portal.call(lambda: Client(config, dial=self.gateway.dial))
                )
            )
            for _ in range(CLIENTS)
        ]
        self.maybe: dict[bytes, set[Content]] = {key: {ABSENT} for key in KEYS}
        self.puts = 0
        self.boots = 1

    def fresh(self, size: int) -> bytes:
        self.puts += 1
        return payload(self.puts, size)

    @rule(who=clients, names=st.lists(keys, min_size=1, max_size=3, unique=True), size=st.sampled_from(SIZES))
    def write(self, who: int, names: list[bytes], size: int) -> None:
        contents = [self.fresh(size) for _ in names]
        result = self.portal.call(self.clients[who].write, NAMESPACE, names, contents)
        assert result.is_all_ok
        for name, content in zip(names, contents, strict=True):
            self.maybe[name] = {content}

    @rule(who=clients, names=st.lists(keys, min_size=1, max_size=5))
    def read(self, who: int, names: list[bytes]) -> None:
        buffers = [bytearray(max(SIZES)) for _ in names]
        result = self.portal.call(self.clients[who].read, NAMESPACE, names, buffers)
        for name, status, length, buffer in zip(names, result.statuses, result.lengths, buffers, strict=True):
            found = ABSENT if status else bytes(buffer[:length])
            assert status in (0, 1)
            assert found in self.maybe[name], f"{name!r}"
            self.maybe[name] = {found}

    @rule(who=clients, names=st.lists(keys, min_size=1, max_size=5))
    def exist(self, who: int, names: list[bytes]) -> None:
        result = self.portal.call(self.clients[who].exist, NAMESPACE, names)
        for name, status in zip(names, result.statuses, strict=True):
            there = {content for content in self.maybe[name] if (content is ABSENT) == bool(status)}
            assert there, f"{name!r}: {status}"
            self.maybe[name] = there

    @rule(who=clients, names=st.lists(keys, min_size=1, max_size=3, unique=True))
    def delete(self, who: int, names: list[bytes]) -> None:
        result = self.portal.call(self.clients[who].delete, NAMESPACE, names)
        for name, status in zip(names, result.statuses, strict=True):
            assert status == 1 or self.maybe[name] != {ABSENT}
            assert status == 0 or ABSENT in self.maybe[name]
            self.maybe[name] = {ABSENT}

    @rule(who=clients)
    def fence_and_ping(self, who: int) -> None:
        self.portal.call(self.clients[who].fence)
        self.portal.call(self.clients[who].ping)

    @rule(who=clients, name=keys, size=st.sampled_from(SIZES), at=st.integers(1, 5))
    def cancelled_write(self, who: int, name: bytes, size: int, at: int) -> None:
        """It may have been stored or not, and may be stored until its connection has been asked again."""
        content = self.fresh(size)
        memory = bytearray(content)

        async def call() -> bool:
            was_cancelled, _ = await cancel_at(self.clients[who].write(NAMESPACE, [name], [memory]), at)
            memory[:] = bytes(size)
            memory.append(0)
            await self.clients[who].fence()
            return was_cancelled

        self.maybe[name] = {content} | (self.maybe[name] if self.portal.call(call) else set())

    @rule(who=clients, name=keys, at=st.integers(1, 4))
    def cancelled_read(self, who: int, name: bytes, at: int) -> None:
        async def call() -> None:
            memory = bytearray(max(SIZES))
            await cancel_at(self.clients[who].read(NAMESPACE, [name], [memory]), at)
            memory[:] = b"\xa5" * len(memory)
            await self.clients[who].fence()
            assert memory == b"\xa5" * len(memory)

        self.portal.call(call)

    @rule(who=clients, name=keys, at=st.integers(1, 4))
    def cancelled_delete(self, who: int, name: bytes, at: int) -> None:
        async def call() -> bool:
            was_cancelled, _ = await cancel_at(self.clients[who].delete(NAMESPACE, [name]), at)
            await self.clients[who].fence()
            return was_cancelled

        self.maybe[name] = {ABSENT} | (self.maybe[name] if self.portal.call(call) else set())

    @rule(name=keys, sizes=st.lists(st.sampled_from(SIZES), min_size=CLIENTS, max_size=CLIENTS))
    def write_at_the_same_time(self, name: bytes, sizes: list[int]) -> None:
        contents = [self.fresh(size) for size in sizes]
        self.portal.call(
            self.together,
            [
                lambda client=client, content=content: client.write(NAMESPACE, [name], [content])
                for client, content in zip(self.clients, contents, strict=True)
            ],
        )
        self.maybe[name] = set(contents)

    async def together(self, calls: list[Callable[[], Awaitable[Any]]]) -> None:
        async with anyio.create_task_group() as tasks:
            for call in calls:
                tasks.start_soon(call)

    @rule(is_killed=st.booleans())
    def restart(self, is_killed: bool) -> None:
        """Another boot id. Nothing that was acknowledged is gone, and no client needs to be told."""
        self.boots += 1
        self.portal.call(self.come_back, is_killed)

    async def come_back(self, is_killed: bool) -> None:
        self.gateway.restart(self.boots.to_bytes(16, "big"))

    @rule(who=clients, name=keys, is_killed=st.booleans(), verb=st.sampled_from(["write", "read", "delete"]))
    def restart_under_a_call(self, who: int, name: bytes, is_killed: bool, verb: str) -> None:
        self.boots += 1
        content = self.fresh(20_000)
        memory = bytearray(max(SIZES))
        client = self.clients[who]

        async def call() -> str:
            try:
                if verb == "write":
                    return str((await client.write(NAMESPACE, [name], [content])).statuses[0])
                if verb == "read":
                    return str((await client.read(NAMESPACE, [name], [memory])).statuses[0])
                return str((await client.delete(NAMESPACE, [name])).statuses[0])
            except LinkError:
                return "lost"

        async def both() -> str:
            said: list[str] = []

            async def note() -> None:
                said.append(await call())

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(note)
                for _ in range(self.puts % 7):
                    await anyio.lowlevel.checkpoint()
                await self.come_back(is_killed)
            return said[0]

        said = self.portal.call(both)
        if verb == "read" and said != "lost":
            found = [content for content in self.maybe[name] if content is not ABSENT]
            assert said == "1" or any(memory[: len(content)] == content for content in found)
            assert said == "0" or ABSENT in self.maybe[name]
        elif verb == "write":
            self.maybe[name] = {content} | (self.maybe[name] if said != "0" else set())
        elif verb == "delete":
            self.maybe[name] = {ABSENT} | (self.maybe[name] if said == "lost" else set())

    @invariant()
    def nothing_is_left(self) -> None:
        if hasattr(self, "clients"):
            assert [leftovers(client) for client in self.clients] == [[]] * CLIENTS

    @precondition(lambda self: self.boots > 1)
    @rule(who=clients)
    def the_boot_is_known(self, who: int) -> None:
        async def boot() -> bytes:
            await self.clients[who].ping()
            info = self.clients[who].gateway
            assert info is not None
            return info.boot_id

        assert self.portal.call(boot) == self.boots.to_bytes(16, "big")

    def teardown(self) -> None:
        if hasattr(self, "stack"):
            self.stack.close()


class RealMachine(ClientsMachine):
    """The real sessions and the real store, which is opened again at each restart."""

    def make_gateway(self) -> RealGateway:
        return RealGateway(limits=LIMITS)

    async def come_back(self, is_killed: bool) -> None:
        await self.gateway.restart(is_killed=is_killed)


class WorkersMachine(ClientsMachine):
    """A gateway of three workers, between which every call over several keys is shared."""

    def make_gateway(self) -> MemoryWorkers:
        return MemoryWorkers(3, limits=LIMITS, frame_bytes=3000)

    async def come_back(self, is_killed: bool) -> None:
        self.gateway.restart()

    @invariant()
    def nothing_is_left(self) -> None:
        if hasattr(self, "clients"):
            links = [lane.link for client in self.clients for lane in client._router.lanes]
            assert [leftovers_of(link) for link in links] == [[]] * len(links)

    @precondition(lambda self: self.boots > 1)
    @rule(who=clients)
    def the_boot_is_known(self, who: int) -> None:
        async def boots() -> list[bytes]:
            await self.clients[who].ping()
            await self.clients[who].wait_connected()
            return [lane.link.gateway.boot_id for lane in self.clients[who]._router.lanes]

        assert self.portal.call(boots) == [worker.boot_id for worker in self.gateway.workers]


class TrioWorkersMachine(WorkersMachine):
    backend = "trio"


class TrioClientsMachine(ClientsMachine):
    backend = "trio"


class TrioRealMachine(RealMachine):
    backend = "trio"


SETTINGS = settings(
    max_examples=200 if os.environ.get("ADP_TORTURE") else 15, stateful_step_count=30, deadline=None
)


@pytest.mark.timeout(240)
class TestClientsOnAsyncio(ClientsMachine.TestCase):
    settings = SETTINGS


@pytest.mark.timeout(240)
class TestClientsOnTrio(TrioClientsMachine.TestCase):
    settings = SETTINGS


@pytest.mark.timeout(240)
class TestWorkersOnAsyncio(WorkersMachine.TestCase):
    settings = SETTINGS


@pytest.mark.timeout(240)
class TestWorkersOnTrio(TrioWorkersMachine.TestCase):
    settings = SETTINGS


@pytest.mark.timeout(240)
class TestRealGatewayOnAsyncio(RealMachine.TestCase):
    settings = SETTINGS


@pytest.mark.timeout(240)
class TestRealGatewayOnTrio(TrioRealMachine.TestCase):
    settings = SETTINGS
