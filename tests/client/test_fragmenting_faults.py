"""W1 against a gateway that does not cut, when things end in the middle: whole or absent, and never mixed."""

import itertools
from typing import Any

import anyio
import pytest
from trio.testing import MockClock

from adp_client import Client, ErrorCode
from adp_client.errors import LinkLost, RequestTimeout
from adp_client.ordering import Order
from adp_client.protocol.constants import Feature
from adp_client.protocol.messages import Delete, Limits, Write
from adp_client.testing import Faults, FaultyTransport, MemoryGateway
from client.fragmented import KEY, LOOKALIKE, L, Turns, client_of, get, uncutting
from client.support import NAMESPACE, cancel_at, connected, leftovers, pattern

pytestmark = pytest.mark.anyio

NOT_FOUND = ErrorCode.NOT_FOUND
OLD, NEW = pattern(1, 3 * L), pattern(2, 4 * L - 1)
#: A connection for each point of a conversation, in asyncio's debug mode.
every_point = pytest.mark.timeout(180)


async def store(client: Client, data: bytes, key: bytes = KEY) -> None:
    assert (await client.write(NAMESPACE, [key], [data])).is_all_ok


@pytest.mark.parametrize("old", [None, b"small", OLD], ids=["new", "over small", "over large"])
@pytest.mark.parametrize("is_stored", [True, False], ids=["stored", "not stored"])
async def test_a_writer_that_dies_after_k_of_n_fragments_leaves_the_old_object_or_none(old, is_stored):
    """k runs over the fragments; the last request is the manifest, and what was stored of it counts."""
    for last in range(5):
        await die_at(last, is_stored=is_stored, old=old)


async def die_at(last: int, *, is_stored: bool, old: bytes | None) -> None:
    """The writer's request number `last` is its last, stored or not."""
    writes = itertools.count()

    async def script(session, request) -> bool:
        if not isinstance(request.message, Write) or next(writes) < last:
            return False
        if is_stored:
            session._store(request.request_id, request.message.namespace)
        gateway.is_down = True
        session.transport.abort()
        tasks.cancel_scope.cancel()
        return True

    async with connected(uncutting(limits={"max_items": 1})) as (client, gateway):
        if old is not None:
            await store(client, old)
        async with client_of(gateway) as doomed, anyio.create_task_group() as tasks:
            await doomed.wait_connected()
            gateway.script = script
            tasks.start_soon(doomed.write, NAMESPACE, [KEY], [NEW])
        gateway.script = None
        gateway.is_down = False
        is_whole = last == 4 and is_stored
        assert await get(client) == (NEW if is_whole else NOT_FOUND if old is None else old)
        await store(client, NEW)
        assert await get(client) == NEW


async def conversation(client: Client) -> list[Any]:
    memory = [bytearray(4 * L), bytearray(L)]
    written = await client.write(NAMESPACE, [b"a", b"b"], [NEW, b"small"])
    read = await client.read(NAMESPACE, [b"a", b"b"], memory)
    found = await client.exist(NAMESPACE, [b"a", b"b", b"c"])
    checked = await client.check(NAMESPACE, [b"a", b"c"])
    return [
        written.statuses,
        read.statuses,
        read.lengths,
        bytes(memory[0][: len(NEW)]) == NEW,
        bytes(memory[1][:5]) == b"small",
        found.statuses,
        checked.statuses,
    ]


RIGHT = [bytes(2), bytes(2), (len(NEW), 5), True, True, b"\0\0\1", b"\0\1"]


async def through(faults: Faults) -> tuple[list[Any], FaultyTransport]:
    """The conversation, of which the first connection has these faults."""
    gateway = uncutting()
    made: list[FaultyTransport] = []

    def wrap(inner):
        made.append(FaultyTransport(inner, Faults() if made else faults))
        return made[-1]

    gateway.wrap = wrap
    async with connected(gateway) as (client, _):
        result = await conversation(client)
        while leftovers(client):
            await client.ping()
        return result, made[0]


@every_point
async def test_cut_anywhere_and_replayed():
    result, whole = await through(Faults())
    assert result == RIGHT
    for cut in range(0, whole.sent_bytes, 29):
        assert ((await through(Faults(cut_sent_at=cut)))[0], cut) == (RIGHT, cut)
    for cut in range(0, whole.received_bytes, 29):
        assert ((await through(Faults(cut_received_at=cut)))[0], cut) == (RIGHT, cut)


@every_point
async def test_a_flipped_bit_anywhere_is_never_a_wrong_byte():
    _, whole = await through(Faults())
    for flip in range(0, whole.received_bytes, 13):
        (written, read, lengths, big, small, _, _), _ = await through(Faults(flip_received_at=flip))
        assert written == bytes(2)
        assert (read[0] == 0) == (lengths[0] == len(NEW))
        assert read[0] or big
        assert read[1] or small


VERBS = {
    "write": lambda c, memory: c.write(NAMESPACE, [KEY], [NEW]),
    "read": lambda c, memory: c.read(NAMESPACE, [KEY], [memory]),
    "exist": lambda c, memory: c.exist(NAMESPACE, [KEY]),
    "check": lambda c, memory: c.check(NAMESPACE, [KEY]),
    "delete": lambda c, memory: c.delete(NAMESPACE, [KEY]),
}


@pytest.mark.parametrize("verb", VERBS)
async def test_cancelled_at_every_checkpoint_it_is_whole_or_absent_and_the_next_verb_right(verb):
    async with connected(uncutting(limits={"max_items": 2})) as (client, gateway):
        at, was_cancelled = 0, True
        while was_cancelled:
            at += 1
            await store(client, OLD)
            memory = bytearray(4 * L)
            was_cancelled, _ = await cancel_at(VERBS[verb](client, memory), at)
            memory[:] = b"\xa5" * len(memory)
            await client.fence()
            found = await get(client)
            assert found in {"write": (OLD, NEW), "delete": (OLD, NOT_FOUND)}.get(verb, (OLD,))
            assert await get(client) == found
            assert memory == b"\xa5" * len(memory)
            memory.extend(b"nobody keeps a view of it")
            assert leftovers(client) == []
        assert at > 4, "both steps were cancelled"
        assert gateway.violations == []
        assert len(gateway.sessions) == 1


# ------------------------------------------------------------ another gateway in the middle


def begins_to_cut(gateway: MemoryGateway) -> None:
    gateway.features |= Feature.FRAGMENTS


def ceases_to_cut(gateway: MemoryGateway) -> None:
    gateway.features &= ~Feature.FRAGMENTS


def takes_less(gateway: MemoryGateway) -> None:
    gateway.limits = Limits(max_command_bytes=L - 30, max_items=2)


def takes_more(gateway: MemoryGateway) -> None:
    gateway.limits = Limits(max_command_bytes=5 * L)


def comes_back_empty(gateway: MemoryGateway) -> None:
    gateway.objects.clear()
    gateway.boot_id = b"2" * 16


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("cuts_itself", [False, True], ids=["client cuts", "gateway cuts"])
@pytest.mark.parametrize("change", [begins_to_cut, ceases_to_cut, takes_less, takes_more, comes_back_empty])
async def test_a_verb_that_meets_another_gateway_in_the_middle_is_still_right(change, cuts_itself, verb):
    """The connection breaks at the n-th request, before or after its effect, and the next is to another."""
    points, is_hit = itertools.count(), True
    while is_hit:
        point, is_done = divmod(next(points), 2)
        gateway = MemoryGateway(fragments=cuts_itself, limits=Limits(max_command_bytes=L, max_items=2))
        async with connected(gateway) as (client, _):
            await store(client, OLD)
            await meet_another(client, gateway, verb, change, point=point, is_done=bool(is_done))
            is_hit = len(gateway.sessions) > 1
            assert gateway.violations == []


async def meet_another(client, gateway, verb, change, *, point: int, is_done: bool) -> None:
    requests = itertools.count()

    async def script(session, request) -> bool:
        if next(requests) != point or session is not gateway.sessions[0]:
            return False
        if is_done and isinstance(request.message, (Write, Delete)):
            session._reply_to(request)
        change(gateway)
        session.transport.abort()
        return True

    gateway.script = script
    memory = bytearray(4 * L)
    result = None
    try:
        result = await VERBS[verb](client, memory)
    except LinkLost:
        assert verb == "delete"
    gateway.script = None
    is_emptied = len(gateway.sessions) > 1 and change is comes_back_empty
    found = await get(client)
    if result is None:
        assert found in (NOT_FOUND, OLD)
    elif verb == "write":
        assert result.is_all_ok
        assert found == NEW
    elif verb == "delete":
        assert found == NOT_FOUND
    else:
        assert result.statuses in (b"\0", bytes([NOT_FOUND]))
        assert found == (NOT_FOUND if is_emptied else OLD)
        assert result.is_all_ok or is_emptied
        if verb == "read" and result.is_all_ok:
            assert bytes(memory[: result.lengths[0]]) == OLD


@pytest.mark.parametrize("cuts_itself", [False, True], ids=["client cuts", "gateway cuts"])
async def test_w7_exist_believes_one_boot_only(cuts_itself):
    """Two requests for two keys; between them the gateway comes back empty."""
    limits = Limits(max_items=1, max_requests=1)
    async with connected(MemoryGateway(fragments=cuts_itself, limits=limits)) as (client, gateway):
        await client.write(NAMESPACE, [b"a", b"b"], [b"1", bytes(L)])
        requests = itertools.count()

        async def script(session, request) -> bool:
            if next(requests) != 1:
                return False
            comes_back_empty(gateway)
            session.transport.abort()
            return True

        gateway.script = script
        assert (await client.exist(NAMESPACE, [b"a", b"b"])).statuses == bytes([NOT_FOUND, NOT_FOUND])


async def test_one_replay_for_a_call_however_many_steps_it_has():
    """A request that ends every connection does not go on for ever."""

    async def script(session, request) -> bool:
        if isinstance(request.message, Write):
            gateway.boot_id = bytes([len(gateway.sessions)] * 16)
            session.transport.abort()
            return True
        return False

    async with connected(uncutting()) as (client, gateway):
        gateway.script = script
        with pytest.raises(LinkLost):
            await client.write(NAMESPACE, [KEY], [NEW])
        assert len(gateway.sessions) == 2


async def test_once_the_key_is_gone_nothing_that_happens_to_the_fragments_matters():
    deletes = itertools.count()

    async def script(session, request) -> bool:
        if isinstance(request.message, Delete) and next(deletes) == 1:
            session.transport.abort()
            return True
        return False

    async with connected(uncutting()) as (client, gateway):
        await store(client, OLD)
        gateway.script = script
        assert (await client.delete(NAMESPACE, [KEY])).is_all_ok
        assert await get(client) == NOT_FOUND
        assert len(gateway.objects) == 3, "they are left to eviction"
        await store(client, OLD)
        assert await get(client) == OLD


async def test_a_call_made_before_there_is_a_connection_is_before_the_fence():
    gateway = uncutting()
    gateway.is_down = True
    order: list[str] = []

    async def script(session, request) -> bool:
        order.append(type(request.message).__name__)
        return False

    async with gateway, client_of(gateway) as client:
        gateway.script = script
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.write, NAMESPACE, [KEY], [NEW])
            while not client._order.held:
                await anyio.lowlevel.checkpoint()
            tasks.start_soon(client.fence)
            await anyio.lowlevel.checkpoint()
            gateway.is_down = False
        assert order == ["Write", "Write", "Fence"]


async def test_a_lookalike_is_before_the_fence_at_a_gateway_that_cuts():
    async with connected() as (client, gateway):
        turns = Turns(gateway)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(client.write, NAMESPACE, [KEY], [LOOKALIKE])
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(client.fence)
            await anyio.wait_all_tasks_blocked()
            turns.give_all()
        assert [type(message).__name__ for _, message in turns.log] == ["Write", "Write", "Fence"]


async def test_reading_by_the_gateways_own_checks():
    async with connected(uncutting(), verify_payloads=False) as (client, gateway):
        await store(client, OLD)
        assert await get(client) == OLD
        assert gateway.sessions[0].connection.features == (Feature.CREDITS | Feature.LEASES | Feature.REGIONS)


class TestTime:
    """On a virtual clock."""

    @pytest.fixture
    def anyio_backend(self):
        return ("trio", {"clock": MockClock(autojump_threshold=0)})

    @pytest.mark.parametrize("verb", VERBS)
    async def test_one_deadline_for_all_steps(self, verb):
        """Each answer takes most of the time of the call."""
        async with connected(uncutting()) as (client, gateway):
            await store(client, OLD)
            seconds = 60.0 if verb == "exist" else 30.0

            async def script(session, request) -> bool:
                await anyio.sleep(0.7 * seconds)
                return False

            gateway.script = script
            begun = anyio.current_time()
            with pytest.raises(RequestTimeout):
                await VERBS[verb](client, bytearray(4 * L))
            assert anyio.current_time() - begun == pytest.approx(seconds)
            gateway.script = None

    async def test_nobody_waits_for_ever_behind_a_fence(self):
        order = Order()
        first = await order.begin(100)
        first.hold()
        async with anyio.create_task_group() as tasks:
            fences: list[type] = []

            async def fence(seconds) -> None:
                try:
                    async with order.fence(anyio.current_time() + seconds):
                        fences.append(Order)
                except RequestTimeout as exc:
                    fences.append(type(exc))

            tasks.start_soon(fence, 5)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(RequestTimeout):
                await order.begin(anyio.current_time() + 3)
            tasks.start_soon(fence, 1)
            await anyio.wait_all_tasks_blocked()
            later = await order.begin(anyio.current_time() + 60)
            assert fences == [RequestTimeout, RequestTimeout], "not before the last fence is over"
            tasks.start_soon(fence, 5)
            await anyio.wait_all_tasks_blocked()
            first.__exit__()
            later.__exit__()
        assert fences == [RequestTimeout, RequestTimeout, Order]
        assert order.held == set()
