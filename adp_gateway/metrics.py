"""The numbers of a gateway as Prometheus sees them, computed when it looks.

`FAMILIES` is the whole list, and docs/reference/metrics.md says the same (a test holds the two together).
Nothing here keeps a number of its own: every value is read from the part that has it. Labels are bounded:
verbs, statuses and reasons are enumerations, and of tenants at most `MOST_ACCOUNTS` have series of their own.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeAlias

import anyio.lowlevel
import attrs
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from adp_client.protocol.constants import ErrorCode
from adp_client.protocol.messages import (
    Check,
    Delete,
    Exist,
    Read,
    ReadRegion,
    Write,
    WriteRegion,
)

from .health import Health
from .meter import FASTEST_EXPONENT, NAMES, Verb
from .shared import Shared
from .store.base import AccountStats, StoreStats

PREFIX = "adp_gateway_"
MOST_ACCOUNTS = 200
_END = b"# EOF\n"  # of OpenMetrics
OTHERS = "_others"  # no tenant's name begins so

#: Latency buckets end at these powers of two, in seconds: 61 microseconds to 16 seconds.
BUCKET_EXPONENTS = range(-14, 5, 2)

KEYED = (Exist, Read, ReadRegion, Write, WriteRegion, Delete, Check)
LOOKUPS = (Exist, Read, ReadRegion)
#: Why a client that asked for an object did not get it, in the words of the label.
REASONS = {
    ErrorCode.NOT_FOUND: "not_found",
    ErrorCode.CORRUPT: "corrupt",
    ErrorCode.GATEWAY_FAULT: "device",
    ErrorCode.OVERLOADED: "shed",
    ErrorCode.TOO_LARGE: "too_large",
    ErrorCode.REFUSED: "refused",
    ErrorCode.STALE_EPOCH: "region_gone",
}
STATUSES = [code for code in ErrorCode if not code.ends_connection]
USUAL = (ErrorCode.OK, ErrorCode.OVERLOADED, ErrorCode.GATEWAY_FAULT)  # that a whole request is answered

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]
Samples: TypeAlias = Iterable[tuple[tuple[str, ...], float]]


@attrs.frozen(kw_only=True)
class Source:
    """Where the numbers are. `shared` is None until the store is open."""

    health: Health
    version: str
    durability: str
    started: float = attrs.field(factory=time.time)
    recovery_seconds: float = 0.0
    shared: Shared | None = None


@attrs.frozen
class View:
    """One look at a gateway whose store is open."""

    source: Source
    shared: Shared
    stats: StoreStats

    @property
    def verbs(self) -> Iterator[tuple[str, Verb]]:
        """Every verb with its name."""
        return ((NAMES[kind], verb) for kind, verb in self.shared.counters.verbs.items())

    def verb(self, kind: type) -> Verb:
        """The counts of one."""
        return self.shared.counters.verbs[kind]

    @property
    def accounts(self) -> list[AccountStats]:
        """Those that have series of their own, and one for all others together if there are more."""
        found = list(self.stats.accounts)
        if len(found) <= MOST_ACCOUNTS:
            return found
        rest = found[MOST_ACCOUNTS:]
        others = AccountStats(
            name=OTHERS,
            objects=sum(account.objects for account in rest),
            used_bytes=sum(account.used_bytes for account in rest),
            quota_bytes=None,
            evicted_objects=sum(account.evicted_objects for account in rest),
        )
        return [*found[:MOST_ACCOUNTS], others]


@attrs.frozen
class Family:
    """One metric. The name is without the prefix, and without the `_total` that a counter gets."""

    name: str
    kind: Kind
    help: str
    samples: Callable[[View], Samples] = attrs.field(repr=False)
    labels: tuple[str, ...] = ()

    @property
    def exported_name(self) -> str:
        """As it stands in a query."""
        return PREFIX + self.name + ("_total" if self.kind == "counter" else "")

    def collect(self, view: View) -> Metric:
        """The series of this moment."""
        name = PREFIX + self.name
        if self.kind == "histogram":
            return self._histogram(name, view)
        kind = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = kind(name, self.help, labels=self.labels)
        for labels, value in self.samples(view):
            family.add_metric(labels, value)
        return family

    def _histogram(self, name: str, view: View) -> Metric:
        family = HistogramMetricFamily(name, self.help, labels=self.labels)
        for kind in KEYED:
            verb = view.verb(kind)
            family.add_metric((NAMES[kind],), buckets_of(verb), verb.latency_seconds)
        return family


def buckets_of(verb: Verb) -> list[tuple[str, float]]:
    """How many requests took less than each bound, which is a power of two seconds."""
    below = list(itertools.accumulate(verb.latencies))
    bounds = [(str(2.0**exponent), below[exponent - FASTEST_EXPONENT]) for exponent in BUCKET_EXPONENTS]
    return [*bounds, ("+Inf", below[-1])]


def _one(value: Callable[[View], float]) -> Callable[[View], Samples]:
    return lambda view: [((), value(view))]


def _requests(view: View) -> Samples:
    for name, verb in view.verbs:
        for code in STATUSES:
            if code in USUAL or verb.answered[code]:
                yield (name, code.name.lower()), verb.answered[code]
        yield (name, "abandoned"), verb.abandoned


def _items(view: View) -> Samples:
    for kind in KEYED:
        for code in STATUSES:
            yield (NAMES[kind], code.name.lower()), view.verb(kind).items[code]


def _misses(view: View) -> Samples:
    for kind in LOOKUPS:
        for code, reason in REASONS.items():
            yield (NAMES[kind], reason), view.verb(kind).items[code]


FAMILIES = (
    Family(
        "requests",
        "counter",
        "Requests by verb and by what the whole request was answered. ok: its items have a "
        "status each. overloaded: raise memory limits or add a gateway. abandoned: the client "
        "went away.",
        _requests,
        ("verb", "status"),
    ),
    Family(
        "requests_in_flight",
        "gauge",
        "Requests that have been taken and not answered yet.",
        lambda view: (((name,), verb.in_flight) for name, verb in view.verbs),
        ("verb",),
    ),
    Family(
        "request_duration_seconds",
        "histogram",
        "From when a request was taken until its last answer was queued for sending; waiting for "
        "a client that reads slowly is part of it.",
        lambda view: (),
        ("verb",),
    ),
    Family(
        "items",
        "counter",
        "Objects that were asked for, by verb and by how each went.",
        _items,
        ("verb", "status"),
    ),
    Family(
        "hits",
        "counter",
        "Objects that a lookup or read found.",
        lambda view: (((NAMES[kind],), view.verb(kind).items[0]) for kind in LOOKUPS),
        ("verb",),
    ),
    Family(
        "misses",
        "counter",
        "Objects that a lookup or read did not get, and why. not_found: never stored, deleted or "
        "evicted. corrupt, device: look at the device. shed: too much at once. too_large: more "
        "than the reader has room for. refused, region_gone: the client's shared memory.",
        _misses,
        ("verb", "reason"),
    ),
    Family(
        "received_bytes",
        "counter",
        "Bytes of objects that clients sent.",
        _one(lambda view: view.shared.counters.received_bytes),
    ),
    Family(
        "sent_bytes",
        "counter",
        "Bytes of objects that were sent to clients or put into their shared memory.",
        _one(lambda view: view.shared.counters.sent_bytes),
    ),
    Family(
        "request_faults",
        "counter",
        "Requests that failed for the gateway's own reasons. Each has an error in the log: above "
        "0 is worth a look.",
        _one(lambda view: view.shared.counters.faults),
    ),
    Family(
        "connections", "gauge", "Connections that are open.", _one(lambda view: view.shared.counters.sessions)
    ),
    Family(
        "connections_opened",
        "counter",
        "Connections that were taken.",
        _one(lambda view: view.shared.counters.sessions_opened),
    ),
    Family(
        "connections_turned_away",
        "counter",
        "Connections that were refused for want of room, or while draining. Raise "
        "--max-connections if it grows.",
        _one(lambda view: view.shared.counters.sessions_turned_away),
    ),
    Family(
        "handshakes_failed",
        "counter",
        "TLS handshakes that failed: certificates, or clients that do not speak TLS.",
        _one(lambda view: view.shared.counters.handshakes_failed),
    ),
    Family(
        "violations",
        "counter",
        "Connections that were closed for what the client did, by reason. unauthenticated: a "
        "wrong token. timed_out: a client or a network that stands still.",
        lambda view: (
            ((code.name.lower(),), view.shared.counters.violations[code.name])
            for code in ErrorCode
            if code.ends_connection
        ),
        ("reason",),
    ),
    Family(
        "shed_requests",
        "counter",
        "Requests that were refused at once because too much was under way.",
        _one(lambda view: view.shared.admission.refused),
    ),
    Family(
        "request_memory_bytes",
        "gauge",
        "What requests that are worked on keep in memory, payload apart.",
        _one(lambda view: view.shared.admission.used_bytes),
    ),
    Family(
        "request_memory_limit_bytes",
        "gauge",
        "Above this, requests are shed.",
        _one(lambda view: view.shared.admission.budget_bytes),
    ),
    Family(
        "incoming_memory_bytes",
        "gauge",
        "Memory that objects on their way in take.",
        _one(lambda view: view.shared.arena.used_bytes),
    ),
    Family(
        "incoming_memory_limit_bytes",
        "gauge",
        "All there is of it (--incoming-memory).",
        _one(lambda view: view.shared.arena.size_bytes),
    ),
    Family(
        "incoming_memory_waiters",
        "gauge",
        "Connections that are not read from until memory is free. Above 0 for long: the device "
        "is slower than the clients, or --incoming-memory is too small.",
        _one(lambda view: view.shared.arena.waiting),
    ),
    Family(
        "credit_share_bytes",
        "gauge",
        "What each connection may have in flight now.",
        _one(lambda view: view.shared.credits.share.inflight_bytes),
    ),
    Family(
        "regions",
        "gauge",
        "Regions of shared memory that clients have open.",
        _one(lambda view: view.shared.region_budget.regions),
    ),
    Family(
        "leases_granted",
        "counter",
        "Leases that EXIST has granted.",
        _one(lambda view: view.shared.counters.leases_granted),
    ),
    Family(
        "leases_ended",
        "counter",
        "Leases that ended by RELEASE, or by their time. The others ended with their connection. "
        "Many that expired: clients look up and do not read.",
        lambda view: (
            (("released",), view.shared.counters.leases_released),
            (("expired",), view.shared.counters.leases_expired),
        ),
        ("how",),
    ),
    Family(
        "leased_objects",
        "gauge",
        "Objects under a lease now, once for each lease: they are not evicted.",
        _one(lambda view: view.shared.counters.leased_items),
    ),
    Family("reads_pinned", "gauge", "Objects that are being read now.", _one(lambda view: view.stats.leases)),
    Family(
        "capacity_bytes",
        "gauge",
        "The hard limit for everything on the device (--capacity).",
        _one(lambda view: view.stats.capacity_bytes),
    ),
    Family(
        "used_bytes",
        "gauge",
        "What counts against the capacity: objects, what is dead and not yet given back, "
        "journals and reserves. Near the capacity is where a cache belongs.",
        _one(lambda view: view.stats.used_bytes),
    ),
    Family(
        "object_bytes",
        "gauge",
        "Bytes of all objects that are stored.",
        _one(lambda view: view.stats.object_bytes),
    ),
    Family("objects", "gauge", "Objects that are stored.", _one(lambda view: view.stats.objects)),
    Family("segments", "gauge", "Segments on the device.", _one(lambda view: view.stats.segments)),
    Family(
        "stored_objects",
        "counter",
        "Objects that have been stored.",
        _one(lambda view: view.stats.stored_objects),
    ),
    Family(
        "evicted_objects",
        "counter",
        "Objects that were evicted to make room. Compare its rate with the misses not_found: a "
        "store that is too small evicts what is asked for again.",
        _one(lambda view: view.stats.evicted_objects),
    ),
    Family(
        "evicted_bytes", "counter", "Bytes of evicted objects.", _one(lambda view: view.stats.evicted_bytes)
    ),
    Family(
        "moved_bytes",
        "counter",
        "Bytes that were written a second time, to make room without losing what is read.",
        _one(lambda view: view.stats.moved_bytes),
    ),
    Family(
        "corrupt_objects",
        "counter",
        "Objects that were dropped because their bytes and their checksum disagree. Above 0: "
        "suspect the device or its cabling.",
        _one(lambda view: view.stats.corrupt_objects),
    ),
    Family(
        "unreadable_objects",
        "counter",
        "Objects that were dropped because the device could not read them.",
        _one(lambda view: view.stats.faulted_objects),
    ),
    Family(
        "device_errors",
        "counter",
        "Commands that the device refused, by what was being done. Above 0: the system's log "
        "says more; full devices count too.",
        lambda view: (((name,), count) for name, count in view.stats.device_errors.items()),
        ("operation",),
    ),
    Family(
        "tenant_objects",
        "gauge",
        f"Objects of a tenant. Beyond {MOST_ACCOUNTS} tenants, {OTHERS} has the rest.",
        lambda view: (((account.name,), account.objects) for account in view.accounts),
        ("tenant",),
    ),
    Family(
        "tenant_used_bytes",
        "gauge",
        "What a tenant has, as it counts against its quota.",
        lambda view: (((account.name,), account.used_bytes) for account in view.accounts),
        ("tenant",),
    ),
    Family(
        "tenant_quota_bytes",
        "gauge",
        "The quota of a tenant that has one.",
        lambda view: (
            ((account.name,), account.quota_bytes)
            for account in view.accounts
            if account.quota_bytes is not None
        ),
        ("tenant",),
    ),
    Family(
        "tenant_evicted_objects",
        "counter",
        "Objects of a tenant that were evicted to keep to its quota. Growing with its misses: "
        "the quota is too small.",
        lambda view: (((account.name,), account.evicted_objects) for account in view.accounts),
        ("tenant",),
    ),
    Family(
        "recovery_seconds",
        "gauge",
        "What reopening the store took at the start.",
        _one(lambda view: view.source.recovery_seconds),
    ),
)

#: Those that are there before the store is.
READY = (PREFIX + "ready", "1 if the gateway takes requests: /healthz says the same, with a reason.")
START_TIME = (PREFIX + "start_time_seconds", "When the gateway started, in seconds since 1970.")
UPTIME = (PREFIX + "uptime_seconds", "Since the gateway started.")
BUILD_INFO = (PREFIX + "build_info", "1; the labels say what is running.")


@attrs.define(eq=False)
class GatewayCollector(Collector):
    """Reads everything anew for each scrape. `source` is exchanged for one that has more when there is."""

    source: Source

    def collect(self) -> Iterator[Metric]:
        """All families."""
        source = self.source
        yield GaugeMetricFamily(*READY, value=source.health.is_ready)
        yield GaugeMetricFamily(*START_TIME, value=source.started)
        yield GaugeMetricFamily(*UPTIME, value=max(0.0, time.time() - source.started))
        info = GaugeMetricFamily(*BUILD_INFO, labels=("version", "durability"))
        info.add_metric((source.version, source.durability), 1)
        yield info
        if source.shared is None:
            return
        view = View(source, source.shared, source.shared.store.stats())
        for family in FAMILIES:
            yield family.collect(view)


@attrs.frozen
class _Alone(Collector):
    family: Metric

    def collect(self) -> Iterator[Metric]:
        yield self.family


async def exposition(registry: Collector, accepted: str) -> tuple[bytes, str]:
    """All series as the scraper's Accept header asks for them, and the type of that.

    The numbers are of one moment. Writing them takes milliseconds, so that is done a family at a time: data
    goes first.
    """
    encode, content_type = choose_encoder(accepted)
    parts: list[bytes] = []
    for family in list(registry.collect()):
        parts.append(encode(_Alone(family)).removesuffix(_END))
        await anyio.lowlevel.checkpoint()
    if "openmetrics" in content_type:
        parts.append(_END)
    return b"".join(parts), content_type


def make_registry(collector: GatewayCollector) -> CollectorRegistry:
    """A registry of its own, with what the gateway says and what the system says of its process."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    ProcessCollector(namespace="adp_gateway", registry=registry)
    return registry
