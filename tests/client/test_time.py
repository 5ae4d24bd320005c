"""Deadlines, silence and backoff on a virtual clock: hours pass in milliseconds (trio's MockClock)."""

import itertools
import random

import anyio
import attrs
import pytest
from trio.testing import MockClock

from adp_client import BackoffConfig, Client, ClientConfig, Timeouts
from adp_client.epoch import LAST_WORDS_SECONDS
from adp_client.errors import ConnectFailed, LinkClosed, LinkLost, RequestTimeout
from adp_client.operations import VectorOperation
from adp_client.pending import Outcome
from adp_client.protocol.messages import Delete, Exist, ExistReply, Goodbye, Limits, Ping, Read, Write
from adp_client.testing import Faults, FaultyTransport, MemoryGateway
from client.support import ENDPOINT, NAMESPACE, Gate, connected, leftovers, pattern

pytestmark = pytest.mark.anyio
TIMES = Timeouts(
    exist_seconds=2, request_seconds=30, idle_ping_seconds=10, release_seconds=3, goodbye_seconds=1
)


@pytest.fixture
def anyio_backend():
    return ("trio", {"clock": MockClock(autojump_threshold=0)})


def silence(*kinds: type, times: int = 1_000_000):
    """A script that never answers the first `times` requests of these kinds."""
    left = itertools.repeat(None, times)

    async def script(session, request) -> bool:
        return isinstance(request.message, kinds) and next(left, 0) is None

    return script


async def test_w4_exist_deadline_reopens_and_replays_the_others():
    async with connected(timeouts=TIMES) as (client, gateway):
        gateway.put(NAMESPACE, b"k", b"value")
        held = anyio.Event()

        async def script(session, request) -> bool:
            if session is gateway.sessions[0]:
                await held.wait()  # the first connection answers nothing, ever
            return False

        gateway.script = script
        outcomes: dict[str, object] = {}

        async def note(name, call) -> None:
            begun = anyio.current_time()
            try:
                outcomes[name] = await call
            except Exception as exc:
                outcomes[name] = exc
            outcomes[name + " took"] = anyio.current_time() - begun

        async with anyio.create_task_group() as tasks:
            buffer = bytearray(5)
            tasks.start_soon(note, "read", client.read(NAMESPACE, [b"k"], [buffer]))
            tasks.start_soon(note, "write", client.write(NAMESPACE, [b"w"], [b"written"]))
            tasks.start_soon(note, "delete", client.delete(NAMESPACE, [b"k"]))
            tasks.start_soon(note, "fence", client.fence())
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(note, "exist", client.exist(NAMESPACE, [b"k"]))
        assert isinstance(outcomes["exist"], RequestTimeout)
        assert outcomes["exist took"] == pytest.approx(2, abs=0.01)
        assert outcomes["read"].is_all_ok
        assert bytes(buffer) == b"value"
        assert outcomes["write"].is_all_ok
        for verb in ("delete", "fence"):
            assert isinstance(outcomes[verb], LinkLost)
            assert (outcomes[verb].epoch, outcomes[verb].maybe_applied) == (1, True)
        assert (NAMESPACE, b"k") in gateway.objects
        assert (await client.exist(NAMESPACE, [b"k"])).is_all_ok
        assert len(gateway.sessions) == 2
        assert client.stats().replays == 2
        assert client.stats().timeouts == 1


async def test_a_request_is_replayed_once_and_then_lost():
    async def script(session, request) -> bool:
        session.transport.abort()
        return True

    async with connected(timeouts=TIMES) as (client, gateway):
        gateway.script = script
        for verb, *memory in ((client.exist,), (client.read, [bytearray(1)]), (client.write, [b"v"])):
            sent = client.stats().requests
            with pytest.raises(LinkLost) as caught:
                await verb(NAMESPACE, [b"k"], *memory)
            assert caught.value.maybe_applied
            assert client.stats().requests == sent + 2
        for verb, *arguments in ((client.delete, NAMESPACE, [b"k"]), (client.fence,), (client.ping,)):
            sent = client.stats().requests
            with pytest.raises(LinkLost) as caught:
                await verb(*arguments)
            assert caught.value.maybe_applied
            assert client.stats().requests == sent + 1
        gateway.script = None
        assert (await client.exist(NAMESPACE, [b"k"])).count_ok == 0


async def test_only_what_is_unsettled_is_replayed():
    limits = Limits(max_items=2, max_requests=1)
    async with connected(MemoryGateway(limits=limits), timeouts=TIMES) as (client, gateway):
        keys = [bytes([at]) for at in range(6)]
        asked: list[bytes] = []

        async def script(session, request) -> bool:
            if isinstance(request.message, Exist):
                asked.extend(request.message.keys)
                if len(asked) == 4:
                    session.transport.abort()
                    return True
            return False

        gateway.script = script
        assert (await client.exist(NAMESPACE, keys)).statuses == b"\1" * 6
        assert asked == [*keys[:4], *keys[2:]]


async def test_not_answered_at_all_is_a_timeout_of_the_verb():
    async with connected(timeouts=TIMES) as (client, gateway):
        gateway.script = silence(Read, Write, Delete, times=3)
        for verb, *memory in (
            (client.read, [bytearray(1)]),
            (client.write, [b"v"]),
            (client.delete,),
        ):
            begun = anyio.current_time()
            with pytest.raises(RequestTimeout):
                await verb(NAMESPACE, [b"k"], *memory)
            assert anyio.current_time() - begun == pytest.approx(30, abs=0.1)
        assert leftovers(client) == []


@pytest.mark.parametrize("is_behind_a_fence", [False, True])
async def test_an_exist_that_waits_for_room_until_its_deadline_does_not_cost_the_connection(
    is_behind_a_fence,
):
    async with connected(MemoryGateway(limits=Limits(max_requests=1)), timeouts=TIMES) as (client, gateway):
        go = anyio.Event()

        async def script(session, request) -> bool:
            if isinstance(request.message, Read):
                await go.wait()
            return False

        gateway.script = script
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.read, NAMESPACE, [b"k"], [bytearray(1)])
            await anyio.wait_all_tasks_blocked()
            if is_behind_a_fence:
                tasks.start_soon(client.fence)
                await anyio.wait_all_tasks_blocked()
            with pytest.raises(RequestTimeout):
                await client.exist(NAMESPACE, [b"k"])
            go.set()
        assert len(gateway.sessions) == 1


@pytest.mark.parametrize("verb", ["write", "delete", "check", "fence", "ping"])
async def test_a_verb_is_bounded_from_its_call_and_one_that_was_not_sent_does_not_cost_the_connection(verb):
    """The window is full of reads, of which none is late."""
    arguments = {"write": (NAMESPACE, [b"k"], [b"v"]), "fence": (), "ping": ()}
    async with connected(MemoryGateway(limits=Limits(max_requests=1)), timeouts=TIMES) as (client, gateway):
        gateway.put(NAMESPACE, b"k", b"v")
        reads: list[bool] = []

        async def script(session, request) -> bool:
            if isinstance(request.message, Read):
                await anyio.sleep(4)
            return False

        async def read() -> None:
            reads.append((await client.read(NAMESPACE, [b"k"], [bytearray(1)])).is_all_ok)

        gateway.script = script
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            tasks.start_soon(read)  # sent after 4 seconds, answered after 8
            await anyio.sleep(3)
            begun = anyio.current_time()
            short = attrs.evolve(TIMES, request_seconds=2)
            client.config = attrs.evolve(client.config, timeouts=short)
            with pytest.raises(RequestTimeout):
                await getattr(client, verb)(*arguments.get(verb, (NAMESPACE, [b"k"])))
            assert anyio.current_time() - begun == pytest.approx(2, abs=0.01)
            assert leftovers(client) == ["open: READ"]
        assert reads == [True, True]
        assert (NAMESPACE, b"k") in gateway.objects
        assert len(gateway.sessions) == 1


async def test_a_request_whose_time_is_over_when_its_turn_comes_is_not_sent():
    async with connected(timeouts=TIMES) as (client, gateway):
        epoch = client._link.epoch
        operation = VectorOperation(Delete, NAMESPACE, (b"k",))
        (pending,) = operation.requests(epoch.limits)
        pending.deadline = anyio.current_time()
        epoch.submit(pending)
        await operation.changed()
        assert pending.outcome is Outcome.EXPIRED
        assert not pending.was_sent
        await client.ping()
        assert len(gateway.sessions) == 1


async def test_b31_a_silent_peer_is_left_at_once_and_nothing_is_drained():
    """Idle or busy: within two heartbeats there is a new connection, and the old reader is gone."""
    faults = [Faults(), Faults()]
    gateway = MemoryGateway()
    redialled = anyio.Event()

    def wrap(inner):
        if len(faults) == 1:
            redialled.set()
        return FaultyTransport(inner, faults.pop(0))

    gateway.wrap = wrap
    first = faults[0]
    async with connected(gateway, timeouts=TIMES) as (client, _):
        await client.ping()
        await anyio.wait_all_tasks_blocked()
        first.stall_received_at = 0  # from the next receive on; one is waiting already
        await client.ping()
        with anyio.fail_after(2 * TIMES.idle_ping_seconds + 0.1):
            await redialled.wait()
        assert client.stats().connections_lost == 1
        assert (await client.exist(NAMESPACE, [b"k"])).count_ok == 0
        assert len(gateway.sessions) == 2


async def test_an_idle_connection_is_kept_alive_by_pings():
    async with connected(timeouts=TIMES) as (client, gateway):
        await anyio.sleep(3600)
        assert len(gateway.sessions) == 1
        assert client.stats().connections_lost == 0
        pings = [r for r in gateway.sessions[0].requests if isinstance(r.message, Ping)]
        assert 300 <= len(pings) <= 360


async def test_a_frame_that_does_not_end_costs_the_connection_after_release_seconds():
    async with connected(MemoryGateway(frame_bytes=30_000), timeouts=TIMES) as (client, gateway):
        gateway.put(NAMESPACE, b"k", pattern(1, 20_000))
        gate = Gate(gateway)
        buffer = bytearray(20_000)
        begun = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.read, NAMESPACE, [b"k"], [buffer])
            await gate.reached.wait()
            await anyio.wait_all_tasks_blocked()
            tasks.cancel_scope.cancel()
        assert anyio.current_time() - begun == pytest.approx(TIMES.release_seconds, abs=0.1)
        buffer[:] = b"\xa5" * 20_000
        gate.open.set()
        again = bytearray(20_000)
        assert (await client.read(NAMESPACE, [b"k"], [again])).is_all_ok
        assert bytes(again) == pattern(1, 20_000)
        assert bytes(buffer) == b"\xa5" * 20_000
        assert len(gateway.sessions) == 2


async def test_b28_a_write_that_is_stuck_in_the_socket_costs_the_connection_not_the_next_write():
    async with connected(MemoryGateway(capacity_bytes=1000), timeouts=TIMES) as (client, gateway):
        stuck = anyio.Event()

        async def script(session, request) -> bool:
            await stuck.wait()
            return False

        gateway.script = script
        memory = bytearray(pattern(1, 8000))
        async with anyio.create_task_group() as tasks:
            # While its answer is held back, the gateway reads nothing.
            tasks.start_soon(client.read, NAMESPACE, [b"k"], [bytearray(1)])
            await anyio.wait_all_tasks_blocked()
            async with anyio.create_task_group() as doomed:
                doomed.start_soon(client.write, NAMESPACE, [b"torn"], [memory])
                await anyio.wait_all_tasks_blocked()
                doomed.cancel_scope.cancel()
            memory[:] = bytes(8000)
            gateway.script = None
            assert (await client.write(NAMESPACE, [b"whole"], [pattern(2, 8000)])).is_all_ok
        assert gateway.objects[NAMESPACE, b"whole"].data == pattern(2, 8000)
        assert (NAMESPACE, b"torn") not in gateway.objects
        assert len(gateway.sessions) == 2


async def test_complaining_to_a_gateway_that_does_not_read_is_bounded():
    """It breaks the protocol while a WRITE is stuck on its way to it: nobody waits for long."""
    async with connected(MemoryGateway(capacity_bytes=1000), timeouts=TIMES) as (client, gateway):

        async def script(session, request) -> bool:
            if session is not gateway.sessions[0]:
                return False
            await anyio.wait_all_tasks_blocked()  # the WRITE has filled the pipe
            await session.transport.send([bytes(64)])
            await anyio.sleep_forever()
            return True

        gateway.script = script
        begun = anyio.current_time()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.exist, NAMESPACE, [b"k"])
            await anyio.wait_all_tasks_blocked()
            assert (await client.write(NAMESPACE, [b"w"], [bytes(8000)])).is_all_ok
        assert anyio.current_time() - begun < LAST_WORDS_SECONDS + 0.1
        assert len(gateway.sessions) == 2


async def test_while_nobody_answers_a_verb_waits_its_own_time():
    gateway = MemoryGateway()
    gateway.is_down = True
    config = ClientConfig(endpoint=ENDPOINT, timeouts=TIMES)
    async with gateway, Client(config, dial=gateway.dial) as client:
        for seconds, verb, *arguments in (
            (2, client.exist, NAMESPACE, [b"k"]),
            (30, client.read, NAMESPACE, [b"k"], [bytearray(1)]),
            (30, client.ping),
        ):
            begun = anyio.current_time()
            with pytest.raises(ConnectFailed, match="is down") as caught:
                await verb(*arguments)
            assert anyio.current_time() - begun == pytest.approx(seconds, abs=0.01)
            assert caught.value.endpoint == ENDPOINT
            assert isinstance(caught.value.__cause__, ConnectionRefusedError)
        assert not client.is_connected
        gateway.is_down = False
        assert (await client.write(NAMESPACE, [b"k"], [b"v"])).is_all_ok
        assert client.is_connected


async def test_a_handshake_that_is_not_answered_has_its_deadline():
    async def never(endpoint):
        await anyio.sleep_forever()

    config = ClientConfig(endpoint=ENDPOINT, timeouts=TIMES)
    async with Client(config, dial=never) as client:
        await anyio.sleep(60)
        assert client.stats().connects_failed >= 5
        with pytest.raises(ConnectFailed, match="in time"):
            await client.exist(NAMESPACE, [b"k"])


async def test_b37_backoff_grows_is_capped_and_starts_over_only_after_an_exchange():
    gateway = MemoryGateway()
    dialled: list[float] = []

    async def dial(endpoint):
        dialled.append(anyio.current_time())
        return await gateway.dial(endpoint)

    backoff = BackoffConfig(initial_seconds=1, factor=2, cap_seconds=8, jitter=0)
    config = ClientConfig(endpoint=ENDPOINT, timeouts=TIMES, backoff=backoff)

    async def cut_after_handshake(client: Client) -> None:
        await client.wait_connected()
        gateway.cut()
        await anyio.wait_all_tasks_blocked()

    async with gateway, Client(config, dial=dial) as client:
        for _ in range(6):  # accepts, and dies: a bare connect resets nothing
            await cut_after_handshake(client)
        gaps = [round(b - a) for a, b in itertools.pairwise(dialled)]
        assert gaps == [1, 2, 4, 8, 8]
        await client.ping()
        await cut_after_handshake(client)
        await client.wait_connected()
        assert round(dialled[-1] - dialled[-2]) == 1
        assert len(dialled) == len(gateway.sessions), "one dial at a time"


async def test_b37_a_fleet_does_not_come_back_in_step():
    gateway = MemoryGateway()
    attempts: list[float] = []

    async def dial(endpoint):
        attempts.append(anyio.current_time())
        return await gateway.dial(endpoint)

    async def live(number: int) -> None:
        config = ClientConfig(endpoint=ENDPOINT, timeouts=Timeouts(exist_seconds=60))
        async with Client(config, dial=dial, source=random.Random(number)) as client:
            await client.ping()
            await started.wait()
            await client.exist(NAMESPACE, [b"k"])
            await client.exist(NAMESPACE, [b"k"])

    started = anyio.Event()
    async with gateway, anyio.create_task_group() as tasks:
        for number in range(64):
            tasks.start_soon(live, number)
        await anyio.wait_all_tasks_blocked()
        gateway.is_down = True
        gateway.cut()
        attempts.clear()
        begun = anyio.current_time()
        await anyio.sleep(20)
        gateway.is_down = False
        started.set()
    slices: dict[int, int] = {}
    for at in attempts:
        slices[int((at - begun) * 10)] = slices.get(int((at - begun) * 10), 0) + 1
    assert max(slices.values()) <= len(attempts) / 4
    late = [slices.get(at, 0) for at in range(100, 200)]
    assert max(late) <= 64 / 8


async def test_closing_waits_for_goodbye_no_longer_than_it_may():
    async with MemoryGateway() as gateway:
        gateway.script = silence(object)
        config = ClientConfig(endpoint=ENDPOINT, timeouts=TIMES)
        async with Client(config, dial=gateway.dial) as client:
            await client.wait_connected()
            begun = anyio.current_time()
        assert anyio.current_time() - begun == pytest.approx(TIMES.goodbye_seconds, abs=0.01)


async def test_closing_while_a_ping_fills_the_window_waits_for_it():
    async with connected(MemoryGateway(limits=Limits(max_requests=1)), timeouts=TIMES) as (_, gateway):

        async def script(session, request) -> bool:
            await anyio.sleep(0.5)
            return False

        gateway.script = script
        await anyio.sleep(TIMES.idle_ping_seconds + 0.1)
        begun = anyio.current_time()
    assert anyio.current_time() - begun < TIMES.goodbye_seconds + 0.01
    kinds = [type(request.message) for request in gateway.sessions[0].requests]
    assert kinds == [Ping, Goodbye]


async def test_closing_fails_what_others_are_waiting_for():
    outcomes: list[Exception] = []

    async def call(client: Client) -> None:
        try:
            await client.read(NAMESPACE, [b"k"], [bytearray(1)])
        except Exception as exc:
            outcomes.append(exc)

    async with MemoryGateway() as gateway, anyio.create_task_group() as tasks:
        gateway.script = silence(Read)
        config = ClientConfig(endpoint=ENDPOINT, timeouts=TIMES)
        async with Client(config, dial=gateway.dial) as client:
            tasks.start_soon(call, client)
            await anyio.wait_all_tasks_blocked()
    assert [type(exc) for exc in outcomes] == [LinkClosed]


async def test_b32_late_answers_of_an_old_connection_reach_nobody():
    """The answer to an expired EXIST arrives after all, on a connection that nobody reads any more."""
    async with connected(timeouts=TIMES) as (client, gateway):
        late: list = []

        async def script(session, request) -> bool:
            late.append((session, request))
            return len(late) == 1

        gateway.script = script
        with pytest.raises(RequestTimeout):
            await client.exist(NAMESPACE, [b"first"])
        session, request = late[0]
        with pytest.raises(BrokenPipeError):
            await session.send_reply(request.request_id, ExistReply(statuses=b"\0"))
        assert (await client.exist(NAMESPACE, [b"second"])).statuses == b"\1"
