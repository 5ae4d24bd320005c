"""The series of a gateway: named and documented, never negative, never going back, and as clients saw it."""

import re
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from adp_client.protocol.constants import ErrorCode
from adp_client.protocol.messages import Exist, ExistReply
from adp_gateway.counters import Counters
from adp_gateway.health import Condition, Health
from adp_gateway.meter import Meter
from adp_gateway.metrics import (
    BUILD_INFO,
    FAMILIES,
    MOST_ACCOUNTS,
    OTHERS,
    PREFIX,
    READY,
    START_TIME,
    UPTIME,
    GatewayCollector,
    Source,
    exposition,
    make_registry,
)
from adp_gateway.store.base import AccountStats
from adp_gateway.store.memory import MemoryStore
from gateway.house import House, house
from gateway.peer import NAMESPACE, content, key_of
from policy.checkout import ROOT

PAGE = (ROOT / "docs" / "reference" / "metrics.md").read_text()


def collector(home: House | None = None, **changes: Any) -> GatewayCollector:
    source = Source(health=Health(Condition.READY), version="1", durability="relaxed", started=0.0)
    return GatewayCollector(attrs.evolve(source, shared=home and home.shared, **changes))


async def series(collector: GatewayCollector) -> dict[str, float]:
    """Every sample of one scrape, by its name and labels."""
    raw, _ = await exposition(make_registry(collector), "application/openmetrics-text; version=1.0.0")
    text = raw.decode()
    return {
        sample.name + str(sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)  # strict: it refuses what Prometheus would
        for sample in family.samples
    }


def value(found: dict[str, float], name: str, **labels: str) -> float:
    return found[PREFIX + name + str(sorted(labels.items()))]


def test_names_are_what_prometheus_asks_for() -> None:
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names)
    for family in FAMILIES:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", family.name)
        assert not family.name.endswith("_total")
        assert family.help.endswith(".")
        assert not re.search(r"_(ms|kib|mib|percent)\b", family.name), "base units only"


def test_the_reference_lists_every_metric_with_its_kind_labels_and_help() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| (\w+) \| (.*?) \| (.*?) \|$", PAGE, flags=re.MULTILINE)
    documented = {name: (kind, labels, text) for name, kind, labels, text in rows}
    assert len(documented) == len(rows)
    expected = {
        family.exported_name: (
            family.kind,
            ", ".join(f"`{label}`" for label in family.labels),
            family.help,
        )
        for family in FAMILIES
    }
    for name, text in (READY, START_TIME, UPTIME):
        expected[name] = ("gauge", "", text)
    expected[BUILD_INFO[0]] = ("gauge", "`version`, `durability`", BUILD_INFO[1])
    assert documented == expected


@pytest.mark.anyio
async def test_a_scrape_says_what_clients_saw() -> None:
    store = MemoryStore()
    async with house(store) as home:
        peer = await home.connect()
        objects = {key_of(n): content(1000, seed=n) for n in range(4)}
        await peer.write(objects)
        await peer.exist(*objects, key_of(8), key_of(9))
        store.damage(NAMESPACE, key_of(1))
        await peer.read(*objects, key_of(9))
        found = await series(collector(home, recovery_seconds=0.25))
    assert value(found, "requests_total", verb="write", status="ok") == 1
    assert value(found, "items_total", verb="write", status="ok") == 4
    assert value(found, "hits_total", verb="exist") == 4
    assert value(found, "misses_total", verb="exist", reason="not_found") == 2
    assert value(found, "hits_total", verb="read") == 3
    assert value(found, "misses_total", verb="read", reason="not_found") == 1
    assert value(found, "misses_total", verb="read", reason="corrupt") == 1
    assert value(found, "corrupt_objects_total") == 1
    assert value(found, "received_bytes_total") == 4000
    assert value(found, "sent_bytes_total") == 3000
    assert value(found, "objects") == 3
    assert value(found, "connections") == 1
    assert value(found, "recovery_seconds") == 0.25
    assert value(found, "ready") == 1
    assert value(found, "request_duration_seconds_count", verb="read") == 1
    assert value(found, "build_info", version="1", durability="relaxed") == 1


@pytest.mark.anyio
async def test_every_family_is_there_from_the_first_scrape() -> None:
    """A counter that appears with its first event hides that event from `increase()`."""
    async with house() as home:
        before = await series(collector(home))
        peer = await home.connect()
        await peer.exist(key_of(1))
        await peer.read(key_of(1))
        assert (await series(collector(home))).keys() == before.keys()
    for family in FAMILIES:
        if not family.name.startswith(("tenant_", "device_errors")):
            assert any(name.startswith(PREFIX + family.name) for name in before), family.name


@pytest.mark.anyio
async def test_before_the_store_is_open_there_is_little_to_say() -> None:
    starting = GatewayCollector(Source(health=Health(), version="1", durability="durable", started=0.0))
    found = await series(starting)
    assert value(found, "ready") == 0
    assert not any(name.startswith(PREFIX + "objects") for name in found)


@pytest.mark.anyio
async def test_the_system_s_numbers_of_the_process_have_the_prefix_too() -> None:
    async with house() as home:
        found = await series(collector(home))
    assert value(found, "process_resident_memory_bytes") > 0
    assert all(name.startswith(PREFIX) for name in found)


class Crowd(MemoryStore):
    """A store with more tenants than a dashboard has lines."""

    def stats(self):
        accounts = tuple(
            AccountStats(name=f"t{n}", objects=1, used_bytes=10, quota_bytes=n or None, evicted_objects=2)
            for n in range(MOST_ACCOUNTS + 50)
        )
        return attrs.evolve(super().stats(), accounts=accounts)


@pytest.mark.anyio
async def test_tenants_beyond_a_number_share_a_series() -> None:
    async with house(Crowd()) as home:
        found = await series(collector(home))
    names = [name for name in found if name.startswith(PREFIX + "tenant_objects")]
    assert len(names) == MOST_ACCOUNTS + 1
    assert value(found, "tenant_objects", tenant=OTHERS) == 50
    assert value(found, "tenant_evicted_objects_total", tenant=OTHERS) == 100
    assert value(found, "tenant_quota_bytes", tenant="t1") == 1


steps = st.lists(
    st.tuples(
        st.integers(0, 3), st.sampled_from(["ask", "part", "answer", "refuse", "gone"]), st.binary(max_size=4)
    ),
    max_size=40,
)


@given(steps)
def test_b52_no_history_makes_a_number_negative_or_go_back(history: list[tuple[int, str, bytes]]) -> None:
    """Hits and misses are what was asked and answered, whichever way requests end."""
    counters = Counters()
    meters = {n: Meter(counters.verbs) for n in range(4)}
    is_open = dict.fromkeys(meters, False)
    verb = counters.verbs[Exist]
    asked = hits = 0
    for who, what, raw in history:
        statuses = bytes(byte % 3 for byte in raw)
        before = attrs.asdict(verb)
        if what == "ask" and not is_open[who]:
            meters[who].begin(1, Exist(namespace=NAMESPACE, keys=(key_of(1),)))
            is_open[who] = True
        elif what == "gone":
            meters[who].leave()
            is_open[who] = False
        elif is_open[who] and what != "ask":
            code = ErrorCode.OVERLOADED if what == "refuse" else ErrorCode.OK
            sent = b"" if what == "refuse" else statuses
            meters[who].reply(
                1, ExistReply(status=code, statuses=sent), what != "part", 4 if what == "refuse" else 0
            )
            is_open[who] = what == "part"
            asked += len(sent) or (4 if what == "refuse" else 0)
            hits += sent.count(0)
        for name in ("taken", "abandoned", "latency_seconds"):
            assert getattr(verb, name) >= before[name]
        for name in ("answered", "items", "latencies"):
            assert all(now >= then for now, then in zip(getattr(verb, name), before[name], strict=True))
        assert 0 <= verb.in_flight == sum(is_open.values())
        assert verb.items[0] == hits <= sum(verb.items) == asked
        assert sum(verb.latencies) == sum(verb.answered)


@pytest.mark.anyio
async def test_the_older_format_is_understood_too() -> None:
    async with house() as home:
        raw, content_type = await exposition(make_registry(collector(home)), "*/*")
    text = raw.decode()
    assert content_type.startswith("text/plain")
    assert "# EOF" not in text
    assert f"# TYPE {PREFIX}requests_total counter" in text
    assert f"# TYPE {PREFIX}request_duration_seconds histogram" in text
    assert not [line for line in text.splitlines() if re.search(r" -\d", line)]
