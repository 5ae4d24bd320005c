"""A client of a gateway with several workers: one call over many of them, and what each can do to it."""

import itertools
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from adp_client import BackoffConfig, Client, ClientConfig, ErrorCode, SharedRegion, Timeouts
from adp_client.errors import (
    ConnectFailed,
    LinkClosed,
    LinkLost,
    LocalProtocolError,
    Overloaded,
)
from adp_client.link import FIRST_GRACE_SECONDS, GRACE_SECONDS
from adp_client.placing import workers_of
from adp_client.protocol.constants import Feature
from adp_client.protocol.events import HelloReceived
from adp_client.protocol.messages import Delete, Exist, ExistReply, Fence, Limits, Read, StatusReply, Write
from adp_client.testing import MemoryWorkers, Session
from client.support import ENDPOINT, NAMESPACE, PATIENT, QUICK, Interrupted, cancel_at, leftovers_of, pattern
from client.verbs import ABSENT, COUNT, KEYS, SIZE, VERBS, Call, delete
from gateway.waiting import on_a_jumping_clock, until

pytestmark = pytest.mark.anyio

WORKERS = 3
MANY = [b"many-%03d" % at for at in range(60)]
OK, NOT_FOUND, FAULT = ErrorCode.OK, ErrorCode.NOT_FOUND, ErrorCode.GATEWAY_FAULT


def leftovers(client: Client) -> list[str]:
    return [held for lane in client._router.lanes for held in leftovers_of(lane.link)]


@asynccontextmanager
async def connected(
    gateway: MemoryWorkers | None = None,
    *,
    timeouts: Timeouts = PATIENT,
    backoff: BackoffConfig = QUICK,
    **config: Any,
) -> AsyncGenerator[tuple[Client, MemoryWorkers]]:
    async with gateway or MemoryWorkers(WORKERS) as gateway:
        settings = ClientConfig(endpoint=ENDPOINT, timeouts=timeouts, backoff=backoff, **config)
        async with Client(settings, dial=gateway.dial) as client:
            await client.wait_connected()
            yield client, gateway
            assert leftovers(client) == []
        assert [v for worker in (*gateway.workers, *gateway.past) for v in worker.violations] == []


def stored(count: int = WORKERS, **settings: Any) -> MemoryWorkers:
    gateway = MemoryWorkers(count, **settings)
    for at, key in enumerate(KEYS):
        gateway.put(NAMESPACE, key, pattern(at, SIZE))
    return gateway


def of_worker(worker: int, keys: list[bytes] = MANY, count: int = WORKERS) -> list[bytes]:
    return [key for key, place in zip(keys, workers_of(keys, count), strict=True) if place == worker]


def expected(keys: list[bytes], worker: int, there: ErrorCode, here: ErrorCode) -> bytes:
    """Statuses that differ for what `worker` keeps."""
    return bytes(here if place == worker else there for place in workers_of(keys, WORKERS))


def exist_leased() -> Call:
    return Call(
        lambda c: c.exist(NAMESPACE, KEYS, lease_seconds=60), lambda r: r.is_all_ok and r.lease.is_live, []
    )


async def take_down(client: Client, gateway: MemoryWorkers, worker: int) -> None:
    """As if it had been killed, and nobody had started it again; and the client knows."""
    gateway.workers[worker].is_down = True
    gateway.workers[worker].cut()
    link = client._router.lanes[worker].link
    await until(lambda: link.epoch is None and link._has_failed)  # not on a virtual clock


# ---------------------------------------------------------------- what all verbs do


@pytest.mark.parametrize("make", VERBS)
async def test_every_verb_over_all_workers(make):
    async with connected(stored()) as (client, _):
        assert client.gateway.workers == WORKERS
        call = make()
        assert call.is_right(await call.run(client))


async def test_an_object_is_at_the_worker_that_the_spec_names():
    async with connected() as (client, gateway):
        assert (await client.write(NAMESPACE, MANY, [b"%d" % at for at in range(60)])).is_all_ok
        for worker in range(WORKERS):
            kept = {key for _, key in gateway.workers[worker].objects}
            assert kept == set(of_worker(worker))
            assert kept


@pytest.mark.parametrize("size", [1, 2, 7, 60])
async def test_answers_are_in_the_order_of_the_keys(size):
    keys = MANY[:size]
    async with connected() as (client, _):
        some = keys[::2]
        assert (await client.write(NAMESPACE, some, [key * 3 for key in some])).is_all_ok
        there = bytes(at % 2 for at in range(size))
        assert (await client.exist(NAMESPACE, keys)).statuses == there
        assert (await client.check(NAMESPACE, keys)).statuses == there
        memory = [bytearray(100) for _ in keys]
        result = await client.read(NAMESPACE, keys, memory)
        assert result.statuses == there
        assert result.lengths == tuple(0 if at % 2 else 24 for at in range(size))
        for at in range(0, size, 2):
            assert bytes(memory[at][:24]) == keys[at] * 3
        assert (await client.delete(NAMESPACE, [*keys, *keys[:1]])).statuses == there + b"\1"


async def test_no_keys_and_one_key_many_times():
    async with connected(stored()) as (client, _):
        assert (await client.exist(NAMESPACE, [])).statuses == b""
        assert (await client.read(NAMESPACE, [], [])).statuses == b""
        assert (await client.write(NAMESPACE, [], [])).statuses == b""
        assert (await client.delete(NAMESPACE, [])).statuses == b""
        assert (await client.exist(NAMESPACE, KEYS[:1] * 50)).statuses == bytes(50)


@pytest.mark.parametrize("port", [7171, 7172, 7174])
async def test_any_worker_can_be_the_one_that_is_dialled_first(port):
    async with stored() as gateway:
        config = ClientConfig(endpoint=f"tcp://gateway.test:{port}", timeouts=PATIENT, backoff=QUICK)
        async with Client(config, dial=gateway.dial) as client:
            assert (await client.exist(NAMESPACE, KEYS)).is_all_ok
            await client.wait_connected()
            assert [len(worker.sessions) for worker in gateway.workers] == [1] * WORKERS  # one each


async def test_calls_that_come_before_the_first_handshake_are_cut_too():
    async with stored() as gateway:
        config = ClientConfig(endpoint=ENDPOINT, timeouts=PATIENT, backoff=QUICK)
        async with Client(config, dial=gateway.dial) as client, anyio.create_task_group() as tasks:
            for make in VERBS:

                async def run(call=None):
                    assert call.is_right(await call.run(client))

                tasks.start_soon(lambda make=make: run(make()))
        assert [v for worker in gateway.workers for v in worker.violations] == []


async def test_wrong_arguments_ask_nobody_anything():
    async with connected() as (client, gateway):
        memory = bytearray(100)
        with pytest.raises(LocalProtocolError, match="overlap"):
            await client.read(
                NAMESPACE, MANY[:9], [memoryview(memory)[at * 10 : at * 10 + 11] for at in range(9)]
            )
        with pytest.raises(LocalProtocolError, match="writable"):
            await client.read(NAMESPACE, MANY[:9], [bytearray(1)] * 0 + [bytes(1)] * 9)
        with pytest.raises(LocalProtocolError, match="cannot write from"):
            await client.write(NAMESPACE, MANY[:9], [b"x"] * 8 + [3])
        memory.append(0)
        assert [worker.sessions[-1].requests for worker in gateway.workers] == [[]] * WORKERS


async def test_a_client_that_is_left_leaves_every_worker():
    config = ClientConfig(endpoint=ENDPOINT, timeouts=PATIENT, backoff=QUICK)
    async with stored() as gateway:
        async with Client(config, dial=gateway.dial) as client:
            await client.wait_connected()
        with pytest.raises(LinkClosed):
            await client.exist(NAMESPACE, KEYS)
        assert [len(worker.ended) for worker in gateway.workers] == [1] * WORKERS


# ---------------------------------------------------------------- fragments, regions, leases


async def test_fragments_stay_with_their_object():
    limits = Limits(max_command_bytes=1000)
    async with connected(MemoryWorkers(WORKERS, fragments=False, limits=limits)) as (client, gateway):
        keys = MANY[:12]
        data = [pattern(at, 5000) for at in range(12)]
        assert (await client.write(NAMESPACE, keys, data)).is_all_ok
        for worker in range(WORKERS):
            mine = of_worker(worker, keys)
            assert len(gateway.workers[worker].objects) == len(mine) * 6  # a manifest and five fragments
        memory = [bytearray(5000) for _ in keys]
        assert (await client.read(NAMESPACE, keys, memory)).is_all_ok
        assert [bytes(each) for each in memory] == data
        assert (await client.exist(NAMESPACE, keys, lease_seconds=5)).lease is not None
        await take_down(client, gateway, 1)
        assert (await client.exist(NAMESPACE, keys)).statuses == expected(keys, 1, OK, NOT_FOUND)


async def test_a_region_is_shared_with_every_worker_that_uses_it():
    async with connected(stored()) as (client, gateway):
        with SharedRegion.create(COUNT * SIZE) as region:
            slices = [region.slice(at * SIZE, SIZE) for at in range(COUNT)]
            assert (await client.read(NAMESPACE, KEYS, slices)).is_all_ok
            assert bytes(region.memory) == b"".join(pattern(at, SIZE) for at in range(COUNT))
            assert (await client.write(NAMESPACE, ABSENT, slices)).is_all_ok
        await client.fence()
        for worker in {*workers_of(KEYS, WORKERS)}:
            names = [type(each.message).__name__ for each in gateway.workers[worker].sessions[-1].requests]
            assert names.count("RegionOpen") == 1
            assert "ReadRegion" in names


async def test_one_lease_covers_all_workers_and_ends_with_any():
    async with connected(stored()) as (client, gateway):
        result = await client.exist(NAMESPACE, KEYS, lease_seconds=9)
        assert result.lease is not None
        assert result.lease.is_live
        assert result.lease.granted_seconds == 9
        places = set(workers_of(KEYS, WORKERS))
        assert [len(worker.leases._leases) > 0 for worker in gateway.workers] == [
            worker in places for worker in range(WORKERS)
        ]
        await result.lease.release()
        assert not result.lease.is_live
        assert [len(worker.leases._leases) for worker in gateway.workers] == [0] * WORKERS
        async with (await client.exist(NAMESPACE, KEYS, lease_seconds=9)).lease as lease:
            await take_down(client, gateway, min(places))
            assert not lease.is_live
        assert [len(worker.leases._leases) for worker in gateway.workers] == [0] * WORKERS


async def test_a_lease_that_one_worker_does_not_grant_is_no_lease():
    """What the others have granted goes back."""
    gateway = stored()
    gateway.workers[1].features &= ~Feature.LEASES
    assert 1 in workers_of(KEYS, WORKERS)
    async with connected(gateway) as (client, _):
        result = await client.exist(NAMESPACE, KEYS, lease_seconds=9)
        assert result.is_all_ok
        assert result.lease is None
        await client.fence()
        assert [len(worker.leases._leases) for worker in gateway.workers] == [0] * WORKERS
        rest = [key for key in KEYS if key not in of_worker(1, KEYS)]
        assert (await client.exist(NAMESPACE, rest, lease_seconds=9)).lease is not None


# ---------------------------------------------------------------- a worker that is gone


async def test_what_a_dead_worker_keeps_is_a_miss_at_once_and_the_others_go_on():
    async with connected(stored()) as (client, gateway):
        await client.write(NAMESPACE, MANY, [b"x"] * 60)
        await take_down(client, gateway, 1)
        with anyio.fail_after(20):  # PATIENT gives a call a minute
            assert (await client.exist(NAMESPACE, MANY)).statuses == expected(MANY, 1, OK, NOT_FOUND)
            memory = [bytearray(1) for _ in MANY]
            result = await client.read(NAMESPACE, MANY, memory)
            assert result.statuses == expected(MANY, 1, OK, NOT_FOUND)
            assert (await client.check(NAMESPACE, MANY)).statuses == expected(MANY, 1, OK, NOT_FOUND)
            assert (await client.write(NAMESPACE, MANY, [b"y"] * 60)).statuses == expected(MANY, 1, OK, FAULT)
            alone = of_worker(1)
            assert (
                await client.exist(NAMESPACE, alone)
            ).count_ok == 0  # not an error, though all of it is gone
            leased = await client.exist(NAMESPACE, MANY, lease_seconds=5)
            assert leased.statuses == expected(MANY, 1, OK, NOT_FOUND)
            assert leased.lease is not None
            assert leased.lease.is_live
            await leased.lease.release()
            await client.fence()
            await client.ping()
            await client.wait_connected()
        gateway.workers[1].is_down = False
        await until(lambda: client._router.lanes[1].is_open)
        assert (await client.exist(NAMESPACE, MANY)).is_all_ok
        memory = [bytearray(1) for _ in MANY]
        await client.read(NAMESPACE, MANY, memory)
        assert b"".join(memory) == bytes(
            ord("x") if worker == 1 else ord("y") for worker in workers_of(MANY, WORKERS)
        )


@on_a_jumping_clock
async def test_a_worker_that_was_just_lost_is_given_a_moment():
    """A connection that breaks is made anew, and nobody sees a miss; one that takes longer is a miss."""
    backoff = BackoffConfig(initial_seconds=GRACE_SECONDS / 2, cap_seconds=GRACE_SECONDS * 4, jitter=0)
    async with connected(stored(), backoff=backoff) as (client, gateway):
        gateway.workers[1].cut()
        begun = anyio.current_time()
        assert (await client.exist(NAMESPACE, KEYS)).is_all_ok
        assert anyio.current_time() - begun == GRACE_SECONDS / 2
        gateway.workers[1].session_type = Silent
        gateway.workers[1].cut()
        begun = anyio.current_time()
        assert (await client.exist(NAMESPACE, KEYS)).statuses == expected(KEYS, 1, OK, NOT_FOUND)
        assert anyio.current_time() - begun == GRACE_SECONDS
        assert (await client.exist(NAMESPACE, KEYS)).statuses == expected(KEYS, 1, OK, NOT_FOUND)
        assert anyio.current_time() - begun == GRACE_SECONDS


@on_a_jumping_clock
async def test_a_worker_that_is_not_there_when_a_client_comes_is_waited_for_once():
    async with stored() as gateway:
        gateway.workers[1].session_type = Silent
        config = ClientConfig(endpoint="tcp://gateway.test:7172", timeouts=PATIENT, backoff=QUICK)
        async with Client(config, dial=gateway.dial) as client:
            begun = anyio.current_time()
            for _ in range(2):
                assert (await client.exist(NAMESPACE, KEYS)).statuses == expected(KEYS, 1, OK, NOT_FOUND)
                assert anyio.current_time() - begun == FIRST_GRACE_SECONDS
            await client.wait_connected()
            assert anyio.current_time() - begun == PATIENT.connect_seconds


class Silent(Session):
    """Takes the connection, and does not say WELCOME."""

    async def greet(self, event: HelloReceived) -> None:
        await anyio.sleep_forever()


async def never(session, request) -> bool:
    return True


@on_a_jumping_clock
async def test_a_worker_that_does_not_answer_costs_its_own_part_only():
    timeouts = Timeouts(exist_seconds=2, request_seconds=5)
    async with connected(stored(), timeouts=timeouts) as (client, gateway):
        gateway.workers[1].script = never
        begun = anyio.current_time()
        assert (await client.exist(NAMESPACE, KEYS)).statuses == expected(KEYS, 1, OK, NOT_FOUND)
        assert anyio.current_time() - begun == 2
        result = await client.write(NAMESPACE, KEYS, [b"x"] * COUNT)
        assert result.statuses == expected(KEYS, 1, OK, FAULT)


@on_a_jumping_clock
async def test_without_any_worker_a_call_waits_for_the_gateway():
    timeouts = Timeouts(exist_seconds=2, request_seconds=5)
    backoff = BackoffConfig(initial_seconds=0.5, cap_seconds=0.5, jitter=0)
    async with connected(stored(), timeouts=timeouts, backoff=backoff) as (client, gateway):
        for worker in range(WORKERS):
            gateway.workers[worker].is_down = True
        gateway.cut()
        begun = anyio.current_time()
        with pytest.raises(ConnectFailed):
            await client.exist(NAMESPACE, KEYS)
        assert anyio.current_time() - begun == 2
        with pytest.raises(ConnectFailed):
            await client.fence()
        with pytest.raises(ConnectFailed):
            await client.wait_connected()

        async def come_back() -> None:
            await anyio.sleep(1)
            for worker in gateway.workers:
                worker.is_down = False

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(come_back)
            assert (await client.exist(NAMESPACE, KEYS)).is_all_ok


async def test_a_delete_that_was_sent_to_a_worker_that_died_may_have_been_done():
    async with connected(stored()) as (client, gateway):

        async def dies(session, request) -> bool:
            if isinstance(request.message, Delete):
                session.transport.abort()
            return isinstance(request.message, Delete)

        gateway.workers[1].script = dies
        with pytest.raises(LinkLost) as caught:
            await client.delete(NAMESPACE, KEYS)
        assert caught.value.maybe_applied
        gateway.workers[1].script = None
        await client.wait_connected()
        assert (await client.exist(NAMESPACE, KEYS)).statuses == expected(KEYS, 1, NOT_FOUND, OK)


@on_a_jumping_clock
async def test_a_delete_waits_for_its_worker_and_is_never_called_done():
    timeouts = Timeouts(exist_seconds=2, request_seconds=5)
    backoff = BackoffConfig(initial_seconds=0.5, cap_seconds=0.5, jitter=0)
    async with connected(stored(), timeouts=timeouts, backoff=backoff) as (client, gateway):
        gateway.workers[1].is_down = True
        gateway.workers[1].cut()
        await anyio.sleep(1)
        mine = of_worker(1, KEYS)
        begun = anyio.current_time()
        with pytest.raises(ConnectFailed):
            await client.delete(NAMESPACE, mine)
        assert anyio.current_time() - begun == 5
        with pytest.raises(LinkLost) as caught:
            await client.delete(NAMESPACE, KEYS)
        assert caught.value.maybe_applied  # the others' part

        async def come_back() -> None:
            await anyio.sleep(1)
            gateway.workers[1].is_down = False

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(come_back)
            assert (await client.delete(NAMESPACE, mine)).is_all_ok


async def refuse(session, request) -> bool:
    if not isinstance(request.message, (Exist, Write, Read, Delete)):
        return False
    kind = ExistReply if isinstance(request.message, Exist) else StatusReply
    reply = kind(status=ErrorCode.OVERLOADED, retry_after_ms=7)
    await session.transport.send([session.connection.reply(request.request_id, reply)])
    session._unanswered.discard(request.request_id)
    return True


@pytest.mark.parametrize("verb", ["exist", "write", "delete"])
async def test_a_part_that_is_refused_is_refused_and_all_of_it_raises(verb):
    async def ask(client: Client) -> Any:
        if verb == "write":
            return await client.write(NAMESPACE, KEYS, [b"x"] * COUNT)
        return await getattr(client, verb)(NAMESPACE, KEYS)

    async with connected(stored()) as (client, gateway):
        gateway.workers[1].script = refuse
        assert (await ask(client)).statuses == expected(KEYS, 1, OK, ErrorCode.OVERLOADED)
        for worker in gateway.workers:
            worker.script = refuse
        with pytest.raises(Overloaded) as caught:
            await ask(client)
        assert caught.value.retry_after_ms == 7 if hasattr(caught.value, "retry_after_ms") else True


# ---------------------------------------------------------------- order


async def test_a_fence_holds_across_workers():
    """A WRITE that one worker does not finish holds up what is asked of another after the FENCE."""
    async with connected(stored()) as (client, gateway):
        slow, quick = of_worker(1)[0], of_worker(2)[0]
        release, asked, seen = anyio.Event(), anyio.Event(), []

        async def hold(session, request) -> bool:
            if isinstance(request.message, Write):
                asked.set()
                await release.wait()
            return False

        async def note(session, request) -> bool:
            seen.append(type(request.message))
            return False

        gateway.workers[1].script = hold
        gateway.workers[2].script = note
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.write, NAMESPACE, [slow], [b"slow"])
            await asked.wait()
            tasks.start_soon(client.fence)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(client.write, NAMESPACE, [quick], [b"quick"])
            await anyio.wait_all_tasks_blocked()
            assert Write not in seen
            release.set()
        assert seen == [Fence, Write]


async def test_a_fence_waits_for_what_was_given_up():
    """A cancelled WRITE may still be under way at its worker; the FENCE of that connection waits for it."""
    async with connected(stored()) as (client, gateway):
        slow, quick = of_worker(1)[0], of_worker(2)[0]
        release, asked = anyio.Event(), anyio.Event()

        async def hold(session, request) -> bool:
            if isinstance(request.message, Write):
                asked.set()
                await release.wait()
            return False

        gateway.workers[1].script = hold
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.write, NAMESPACE, [slow], [b"slow"])
            await asked.wait()
            tasks.cancel_scope.cancel()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.fence)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(client.write, NAMESPACE, [quick], [b"quick"])
            await anyio.wait_all_tasks_blocked()
            assert (NAMESPACE, quick) not in gateway.objects
            release.set()
        assert {(NAMESPACE, slow), (NAMESPACE, quick)} <= set(gateway.objects)


# ---------------------------------------------------------------- another map


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 4), (1, 3), (3, 1), (3, 3)])
async def test_w7_another_gateway_is_adopted_and_nothing_is_remembered(before, after):
    async with connected(stored(before)) as (client, gateway):
        result = await client.exist(NAMESPACE, KEYS, lease_seconds=9)
        gateway.come_back(after, gateway_id=b"the-second-one!!")
        assert (await client.exist(NAMESPACE, KEYS)).count_ok == 0
        assert not result.lease.is_live
        assert (await client.write(NAMESPACE, MANY, [b"x"] * 60)).is_all_ok
        assert client.gateway.workers == after
        await client.wait_connected()
        for worker in range(after):
            kept = {key for _, key in gateway.workers[worker].objects}
            assert kept == set(of_worker(worker, count=after))
        await result.lease.release()
        await client.fence()


@pytest.mark.parametrize("make", VERBS)
async def test_w7_a_call_under_way_moves_to_the_other_gateway(make):
    """Cancelled or not, whatever it was: nothing hangs, nothing goes to a worker that does not keep it."""
    for moment in itertools.count():
        async with connected(stored()) as (client, gateway):
            said: list[object] = []

            async def run(client=client, said=said) -> None:
                try:
                    said.append(await make().run(client))
                except LinkLost as exc:
                    said.append(exc)

            with anyio.fail_after(20):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(run)
                    for _ in range(moment):
                        await anyio.lowlevel.checkpoint()
                    was_over = bool(said)
                    gateway.come_back(2, gateway_id=b"the-second-one!!")
                assert (await client.write(NAMESPACE, MANY, [b"x"] * 60)).is_all_ok
            for worker in range(2):
                for _, key in gateway.workers[worker].objects:
                    assert workers_of([key], 2)[0] == worker
            if was_over:
                assert moment > 2
                return


async def test_a_worker_at_anothers_place_is_not_asked():
    async with connected(stored()) as (client, gateway):
        (one, other) = gateway.workers[1:]
        gateway.workers[1:] = [other, one]
        gateway.cut()
        assert (await client.exist(NAMESPACE, KEYS)).statuses == expected(KEYS, 0, NOT_FOUND, OK)
        gateway.workers[1:] = [one, other]
        await until(lambda: all(lane.is_open for lane in client._router.lanes))
        assert (await client.exist(NAMESPACE, KEYS)).is_all_ok


async def test_places_that_cannot_be_dialled_refuse_the_handshake():
    async with stored() as gateway:

        async def dial(endpoint):
            return await gateway.workers[0].dial(endpoint)

        config = ClientConfig(
            endpoint="unix:///run/kv.sock", timeouts=Timeouts(request_seconds=0.2), backoff=QUICK
        )
        async with Client(config, dial=dial) as client:
            with pytest.raises(ConnectFailed, match="a worker at port 7172"):
                await client.wait_connected()
        assert gateway.workers[0].sessions[0].notices[0].code is ErrorCode.MALFORMED


# ---------------------------------------------------------------- cancellation


@pytest.mark.parametrize("make", VERBS)
@pytest.mark.parametrize("is_one_down", [False, True])
async def test_b24_cancelled_at_every_suspension(make, is_one_down):
    gateway = stored(frame_bytes=4000, limits=Limits(max_payload_bytes=7000))
    if is_one_down and make is delete:
        pytest.skip("a DELETE waits for its worker")
    async with connected(gateway) as (client, _):
        if is_one_down:
            await take_down(client, gateway, 1)
        for at in itertools.count(1):
            call = make()
            was_cancelled, _ = await cancel_at(call.run(client), at)
            for memory in call.memory:
                memory[:] = b"\xa5" * len(memory)
                memory.append(0xA5)
            assert (await client.exist(NAMESPACE, KEYS)).statuses == (
                expected(KEYS, 1, OK, NOT_FOUND) if is_one_down else bytes(COUNT)
            )
            await client.fence()
            assert all(memory == b"\xa5" * len(memory) for memory in call.memory)
            assert leftovers(client) == []
            assert not client._order.held
            if not was_cancelled:
                break
        assert at > 1


async def test_b24_a_leased_exist_that_is_cancelled_leaves_no_lease():
    async with connected(stored()) as (client, gateway):
        for at in itertools.count(1):
            with anyio.CancelScope() as scope:
                driven = Interrupted(client.exist(NAMESPACE, KEYS, lease_seconds=60), scope, at)
                result = await driven
                await result.lease.release()
            await client.fence()
            await client.ping()
            assert [len(worker.leases._leases) for worker in gateway.workers] == [0] * WORKERS
            if not scope.cancelled_caught:
                break
        assert at > 1


@pytest.mark.parametrize("make", [*VERBS, exist_leased])
async def test_b24_cancelled_after_any_number_of_turns(make):
    """The parts of a call are tasks of their own, which do not suspend where their caller does."""
    gateway = stored(frame_bytes=4000, limits=Limits(max_payload_bytes=7000))
    async with connected(gateway) as (client, _):
        for turns in itertools.count():
            call, said = make(), []

            async def run(call=call, said=said) -> None:
                said.append(call.is_right(await call.run(client)))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(run)
                for _ in range(turns):
                    await anyio.lowlevel.checkpoint()
                was_over = bool(said)
                tasks.cancel_scope.cancel()
            for memory in call.memory:
                memory[:] = b"\xa5" * len(memory)
                memory.append(0xA5)
            assert all(said)
            await client.fence()
            await client.ping()
            assert all(memory == b"\xa5" * len(memory) for memory in call.memory)
            assert leftovers(client) == []
            assert not client._order.held
            if not said:
                assert [len(worker.leases._leases) for worker in gateway.workers] == [0] * WORKERS
            if was_over:
                break
        assert turns > 3


async def test_b47_entering_using_and_leaving_can_be_cancelled_at_any_checkpoint():
    config = ClientConfig(endpoint=ENDPOINT, timeouts=PATIENT, backoff=QUICK)
    async with stored() as gateway:

        async def life() -> None:
            async with Client(config, dial=gateway.dial) as client:
                await client.wait_connected()
                for make in VERBS:
                    call = make()
                    assert call.is_right(await call.run(client))

        async def all_ended() -> None:
            while any(len(worker.ended) < len(worker.sessions) for worker in gateway.workers):
                await anyio.lowlevel.checkpoint()

        await life()
        await all_ended()
        tasks = len(anyio.get_running_tasks())
        for at in itertools.count(1):
            was_cancelled, _ = await cancel_at(life(), at)
            await all_ended()
            while len(anyio.get_running_tasks()) > tasks:
                await anyio.lowlevel.checkpoint()
            if not was_cancelled:
                break
        assert at > 10
        assert [v for worker in gateway.workers for v in worker.violations] == []
