"""A caller that leaves at any moment harms nobody (B24, B25, B26, B28; ARCHITECTURE C1 to C5).

Every verb is cancelled at its first checkpoint, its second, and so on until it no longer notices. After each
cancellation the caller's memory is filled with a mark that must stay, and the next verb on the same client
must get its own right answer.
"""

import anyio
import pytest

from adp_client import Client, ClientConfig
from adp_client.protocol.messages import Limits
from adp_client.testing import MemoryGateway
from client.support import ENDPOINT, NAMESPACE, QUICK, Gate, cancel_at, connected, leftovers
from client.verbs import KEYS, MARK, SIZE, VERBS, read, stored

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("make", VERBS)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunk_bytes": 500, "capacity_bytes": 700, "frame_bytes": 4000},
        {"limits": Limits(max_requests=2, max_payload_bytes=7000, max_items=4), "frame_bytes": 1000},
    ],
    ids=["plain", "slow wire", "small window"],
)
async def test_b24_cancelled_at_every_checkpoint_and_the_next_verbs_get_their_own_answers(make, settings):
    async with connected(stored(**settings)) as (client, gateway):
        at, was_cancelled = 0, True
        while was_cancelled:
            at += 1
            call = make()
            was_cancelled, _ = await cancel_at(call.run(client), at)
            for memory in call.memory:
                memory[:] = bytes([MARK]) * len(memory)
            follower = VERBS[at % len(VERBS)]()
            assert follower.is_right(await follower.run(client))
            reader = read()
            assert reader.is_right(await reader.run(client))
            await client.fence()  # whatever was under way for the cancelled call has been answered by now
            assert all(memory == bytes([MARK]) * len(memory) for memory in call.memory)
            assert leftovers(client) == []
        assert at > 2
        again = make()
        assert again.is_right(await again.run(client))
        assert gateway.violations == []
        assert len(gateway.sessions) == 1, "no cancellation may cost the connection"


@pytest.mark.parametrize("make", VERBS)
async def test_cancelled_while_waiting_for_the_gateway(make):
    """The answer comes after its caller has left: it is drained and counted, and the window is free again."""
    go = anyio.Event()

    async def script(session, request) -> bool:
        await go.wait()
        return False

    limits = Limits(max_requests=1, max_payload_bytes=7000)
    async with connected(stored(limits=limits)) as (client, gateway):
        gateway.script = script
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(make().run, client)
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        assert leftovers(client) == []
        go.set()
        reader = read()
        assert reader.is_right(await reader.run(client))
        assert client.stats().replies_abandoned == 1
        assert len(gateway.sessions) == 1


@pytest.mark.parametrize("make", VERBS)
async def test_b26_cancelled_in_the_queue_costs_nothing(make):
    """A request that never got room leaves no trace on the wire."""
    go = anyio.Event()

    async def script(session, request) -> bool:
        await go.wait()
        return False

    async with connected(stored(limits=Limits(max_requests=1, max_payload_bytes=30_000))) as (
        client,
        gateway,
    ):
        gateway.script = script
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.exist, NAMESPACE, KEYS)
            await anyio.wait_all_tasks_blocked()
            async with anyio.create_task_group() as doomed:
                doomed.start_soon(make().run, client)
                await anyio.wait_all_tasks_blocked()
                doomed.cancel_scope.cancel()
            go.set()
        assert leftovers(client) == []
        assert client.stats().requests == 1
        assert len(gateway.sessions[0].requests) == 1


async def test_cancelled_before_there_is_a_connection():
    gateway = MemoryGateway()
    gateway.is_down = True
    config = ClientConfig(endpoint=ENDPOINT, backoff=QUICK)
    async with gateway, Client(config, dial=gateway.dial) as client:
        for make in VERBS:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(make().run, client)
                await client_is_waiting(gateway)
                tasks.cancel_scope.cancel()
        gateway.is_down = False
        assert (await client.exist(NAMESPACE, KEYS)).count_ok == 0


async def client_is_waiting(gateway: MemoryGateway) -> None:
    dials = gateway.dials
    while gateway.dials < dials + 2:
        await anyio.lowlevel.checkpoint()


async def test_b25_a_storm_of_cancellations_leaves_the_window_as_it_was():
    limits = Limits(
        max_requests=4, max_inflight_bytes=30_000, max_payload_bytes=7000, max_object_bytes=20_000
    )
    async with connected(stored(limits=limits, capacity_bytes=4000, frame_bytes=2000)) as (client, gateway):

        async def one(number: int) -> None:
            call = VERBS[number % len(VERBS)]()
            await cancel_at(call.run(client), number % 23 + 1)

        async with anyio.create_task_group() as tasks:
            for number in range(200):
                tasks.start_soon(one, number)
        await client.fence()
        assert leftovers(client) == []
        core = client._link.epoch._connection
        assert (core.in_flight, core._window.requests, core._window.inflight_bytes) == (0, 0, 0)
        reader = read()
        assert reader.is_right(await reader.run(client))
        assert gateway.violations == []


async def test_a_frame_that_is_landing_is_finished_before_the_cancelled_read_raises():
    """The gateway stops in the middle of a frame and goes on: the caller waits for that frame, not longer."""
    async with connected(stored(frame_bytes=10 * SIZE)) as (client, gateway):
        gate = Gate(gateway)
        call = read()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call.run, client)
            await gate.reached.wait()
            await anyio.wait_all_tasks_blocked()
            assert any(any(memory) for memory in call.memory)
            tasks.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await anyio.wait_all_tasks_blocked()
                assert leftovers(client) == ["somebody's memory"]
                gate.open.set()
        for memory in call.memory:
            memory[:] = bytes([MARK]) * SIZE
        reader = read()
        assert reader.is_right(await reader.run(client))
        assert all(memory == bytes([MARK]) * SIZE for memory in call.memory)
        assert len(gateway.sessions) == 1
