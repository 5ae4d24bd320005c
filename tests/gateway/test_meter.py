"""What is counted of requests, and that it adds up."""

import itertools

import pytest

from adp_client.protocol.constants import ErrorCode, Feature
from adp_client.protocol.messages import (
    Delete,
    Exist,
    ExistReply,
    Hello,
    Ping,
    Pong,
    Read,
    ReadItem,
    ReadReply,
    read_items,
)
from adp_gateway.meter import FASTEST_EXPONENT, Meter, new_verbs
from adp_gateway.metrics import BUCKET_EXPONENTS, buckets_of
from adp_gateway.store.memory import MemoryStore
from gateway.house import SMALL, house
from gateway.peer import NAMESPACE, content, key_of
from gateway.waiting import until

OK, NOT_FOUND, CORRUPT = ErrorCode.OK, ErrorCode.NOT_FOUND, ErrorCode.CORRUPT
EXIST = Exist(namespace=NAMESPACE, keys=(key_of(1),))
READ = Read(namespace=NAMESPACE, keys=(key_of(1),), capacities=(1,))


def test_items_are_counted_by_status_in_any_number_of_replies() -> None:
    verbs = new_verbs()
    meter = Meter(verbs)
    meter.begin(7, EXIST)
    assert verbs[Exist].in_flight == 1
    meter.reply(7, ExistReply(statuses=bytes([OK, OK, NOT_FOUND])), False)
    meter.reply(7, ExistReply(first=3, statuses=bytes([OK, CORRUPT])), True)
    assert [verbs[Exist].items[code] for code in (OK, NOT_FOUND, CORRUPT)] == [3, 1, 1]
    assert (verbs[Exist].taken, verbs[Exist].answered[OK], verbs[Exist].in_flight) == (1, 1, 0)


def test_an_object_in_several_frames_counts_once_with_its_end() -> None:
    verbs = new_verbs()
    meter = Meter(verbs)
    meter.begin(1, READ)
    whole = ReadItem(index=0, object_bytes=5, length=5)
    missing = ReadItem(index=2, status=NOT_FOUND)
    parts = [ReadItem(index=1, object_bytes=10, offset=offset, length=4) for offset in (0, 4)]
    last = ReadItem(index=1, object_bytes=10, offset=8, length=2)
    counts = []
    for items in ([missing, whole, parts[0]], [parts[1]], [last, whole]):
        meter.reply(1, ReadReply(items=read_items(items)), items[0] is last)
        counts.append(verbs[Read].items[OK])
    assert counts == [1, 1, 3]
    assert verbs[Read].items[NOT_FOUND] == 1


def test_a_refusal_speaks_for_all_items() -> None:
    verbs = new_verbs()
    meter = Meter(verbs)
    meter.begin(1, READ)
    meter.reply(1, ReadReply(status=ErrorCode.OVERLOADED, retry_after_ms=1), True, 64)
    assert verbs[Read].answered[ErrorCode.OVERLOADED] == 1
    assert verbs[Read].items[ErrorCode.OVERLOADED] == 64


@pytest.mark.parametrize("seconds", [0.0, 1e-7, 60e-6, 62e-6, 0.2499, 0.25, 3.0, 17.0, 86400.0])
def test_a_latency_is_below_every_bound_above_it_and_no_other(seconds: float) -> None:
    verbs = new_verbs()
    ticks = itertools.chain([0.0, seconds])
    meter = Meter(verbs, clock=lambda: next(ticks))
    meter.begin(1, Ping())
    meter.reply(1, Pong(), True)
    *bounds, (infinity, total) = buckets_of(verbs[Ping])
    assert (infinity, total) == ("+Inf", 1)
    assert verbs[Ping].latency_seconds == seconds
    for bound, count in bounds:
        assert count == (seconds + 1e-9 < float(bound))
    assert len(bounds) == len(BUCKET_EXPONENTS)
    assert BUCKET_EXPONENTS[0] > FASTEST_EXPONENT


def test_what_a_dead_connection_had_asked_is_abandoned_once() -> None:
    verbs = new_verbs()
    meter = Meter(verbs)
    for number in range(3):
        meter.begin(number, READ)
    meter.reply(1, ReadReply(), True)
    meter.leave()
    meter.leave()
    assert (verbs[Read].taken, verbs[Read].answered[OK], verbs[Read].abandoned) == (3, 1, 2)
    assert verbs[Read].in_flight == 0


@pytest.mark.anyio
async def test_a_session_counts_what_its_client_sees() -> None:
    store = MemoryStore()
    async with house(store) as home:
        verbs = home.shared.counters.verbs
        peer = await home.connect()
        objects = {
            key_of(n): content(size, seed=n) for n, size in enumerate([0, 100, 3 * SMALL.max_payload_bytes])
        }
        assert await peer.write(objects) == [OK] * 3
        assert await peer.exist(*objects, key_of(9)) == [OK] * 3 + [NOT_FOUND]
        assert await peer.read(*objects, key_of(9)) == [*objects.values(), None]
        store.damage(NAMESPACE, key_of(1))
        assert await peer.read(key_of(1)) == [None]
        answer = await peer.call(Delete(namespace=NAMESPACE, keys=tuple(objects)))
        assert answer.statuses == [OK, NOT_FOUND, OK]
        names = {kind.__name__: verb for kind, verb in verbs.items() if verb.taken}
        assert {name: verb.taken for name, verb in names.items()} == {
            "Write": 1,
            "Exist": 1,
            "Read": 2,
            "Delete": 1,
        }
        assert {name: verb.items[OK] for name, verb in names.items()} == {
            "Write": 3,
            "Exist": 3,
            "Read": 3,
            "Delete": 2,
        }
        assert [verbs[Read].items[code] for code in (NOT_FOUND, CORRUPT)] == [1, 1]
        assert all(verb.in_flight == 0 and sum(verb.latencies) == verb.taken for verb in verbs.values())


@pytest.mark.anyio
async def test_what_is_shed_is_counted_by_item() -> None:
    async with house(request_bytes=1) as home:
        home.shared.admission.admit(1)  # the house is not empty
        peer = await home.connect()
        asked = await peer.ask(Read(namespace=NAMESPACE, keys=(key_of(1),) * 5, capacities=(9,) * 5))
        assert (await peer.answer(asked)).status is ErrorCode.OVERLOADED
        asked = await peer.ask_write({key_of(n): b"x" for n in range(3)})
        assert (await peer.answer(asked)).status is ErrorCode.OVERLOADED
        names = {kind.__name__: verb for kind, verb in home.shared.counters.verbs.items()}
        for name, items in (("Read", 5), ("Write", 3)):
            assert names[name].answered[ErrorCode.OVERLOADED] == 1
            assert names[name].items[ErrorCode.OVERLOADED] == items
        home.shared.admission.leave(1)


@pytest.mark.anyio
async def test_what_is_open_when_a_client_goes_is_abandoned() -> None:
    async with house() as home:
        verbs = home.shared.counters.verbs
        keeper = await home.connect(Hello(features=Feature.LEASES))
        waiter = await home.connect()
        await keeper.write({key_of(1): b"held"})
        await keeper.call(Exist(namespace=NAMESPACE, keys=(key_of(1),), lease_ms=20_000))
        await waiter.ask(Delete(namespace=NAMESPACE, keys=(key_of(1),)))
        await until(lambda: verbs[Delete].taken == 1)
        assert verbs[Delete].in_flight == 1
        await waiter.transport.aclose()
        await until(lambda: verbs[Delete].abandoned == 1)
        assert verbs[Delete].in_flight == 0
