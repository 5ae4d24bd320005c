"""The scheduler's half: answers lookups from the catalogue, and fills it through a bridge.

Nothing here waits. Within a scheduling step lookups only read and mark the catalogue; when the step ends, one
EXIST for all new chunks and the reads of all wanted ones leave together. What came back is applied before the
next lookup.
"""

import logging
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)

from adp_engines.bridge import Bridge, Outcome
from adp_engines.catalogue import Answer, Catalogue, Entry, Limits
from adp_engines.gateway import GatewayClient
from adp_engines.namespace import diverged
from adp_engines.staging import Region, SlotPool, slot_bytes_for
from adp_engines.vllm import _compat

from .spec import EVENTS_METRIC, LoadSource, StoreTarget

if TYPE_CHECKING:
    from .spec import ADPOffloadingSpec

# vLLM shows what its own loggers say, and "one clear line" must be seen.
logger = logging.getLogger("vllm.adp")

_RESULTS = {
    Answer.MISS: LookupResult.MISS,
    Answer.HIT: LookupResult.HIT,
    Answer.COMING: LookupResult.HIT_PENDING,
    Answer.ASK_AGAIN: LookupResult.RETRY,
}
#: A link that is back this soon was never away: requests wait for it instead of recomputing.
_RECONNECT_GRACE_SECONDS = 0.25
#: Reads of one step are cut into this many chunks, so that the first can be used while the last travel.
_CHUNKS_A_READ = 64
_CLOSE_SECONDS = 2.0
_SHARD = struct.Struct(">I")


@attrs.frozen(kw_only=True)
class WorkerLayout:
    """What a worker tells about its cache when the engine starts. `object_bytes` has one size a group."""

    rank: int
    digest: str
    object_bytes: tuple[int, ...]


@attrs.frozen(kw_only=True)
class _Asked:
    entries: list[Entry]


@attrs.frozen(kw_only=True)
class _Fetched:
    entries: list[Entry]


@attrs.frozen(kw_only=True)
class _Greeted:
    pass


class ADPOffloadingManager(OffloadingManager):
    """See the module. Called by vLLM from the scheduler's thread only."""

    def __init__(self, spec: "ADPOffloadingSpec") -> None:
        self._spec = spec
        self._settings = spec.settings
        self._identity = spec.identity()
        self._namespace: bytes | None = None
        self._object_bytes: list[tuple[int, ...]] | None = None
        self._arrived: deque[Outcome] = deque()
        self._excluded: set[str] = set()
        self._pins: dict[int, list[Entry]] = {}
        self._tickets = 0
        self._under_way = 0
        self._greeted = threading.Event()
        self._worker_counters: Counter[str] = Counter()
        self._told_counters: Counter[str] = Counter()
        self._bridge: Bridge | None = None
        self._last_connected = 0.0
        self._is_told_away = False
        self._region: Region | None = None
        self._catalogue: Catalogue | None = None
        #: Set by a connector that reports by ticket when all ranks are done with a load; else by its keys.
        self.is_ticketed = False
        #: Groups of which a hit needs a few chunks at its end, not all from the start.
        self.trailing_groups: frozenset[int] = frozenset()

    def open(self, layouts: Sequence[WorkerLayout] = ()) -> None:
        """Start: make the staging region and the bridge. `layouts` are the workers', in rank order.

        Belongs to the engine's start and is the one call here that waits: up to `lookup_seconds` for the
        gateway's first word, so that the first request already finds it, and whoever starts an engine without
        one reads so.
        """
        spec, settings = self._spec, self._settings
        if layouts:
            self._identity = attrs.evolve(self._identity, layouts=tuple(layout.digest for layout in layouts))
            shards = layouts[:1] if spec.replicated_layout else layouts
            self._object_bytes = [layout.object_bytes for layout in shards]
            largest = max(max(sizes) for sizes in self._object_bytes)
        else:
            largest = spec.config.worker_kv_bytes_per_block * spec.config.cache.blocks_per_chunk
        slot_bytes = slot_bytes_for(largest)
        slots = settings.staging_bytes // slot_bytes
        if slots < spec.shards:
            logger.warning(
                "adp: staging_bytes %d hold no chunk of %d x %d bytes: nothing can be restored",
                settings.staging_bytes,
                spec.shards,
                slot_bytes,
            )
        self._region = Region.create(slots=max(slots, 1), slot_bytes=slot_bytes)
        self._catalogue = Catalogue(
            pool=SlotPool(slots),
            slots_per_chunk=spec.shards,
            limits=Limits(
                lookup_seconds=settings.lookup_seconds,
                load_seconds=settings.load_seconds,
                absent_seconds=settings.absent_seconds,
            ),
            reserve_slots=slots // 4 if self.trailing_groups else 0,
            reserve_for=frozenset(_SHARD.pack(group) for group in self.trailing_groups),
        )
        # Until the first dial has had its time, the gateway counts as there.
        self._last_connected = time.monotonic() + settings.lookup_seconds
        self._bridge = Bridge(self._spec.connect, self._deliver, name="adp-scheduler")
        self._bridge.submit(_ping, tag=_Greeted(), timeout_seconds=settings.lookup_seconds)
        self._greeted.wait(settings.lookup_seconds)

    def exclude(self, request_id: str) -> None:
        """Neither load nor store anything for this request."""
        self._excluded.add(request_id)

    def release(self, ticket: int) -> None:
        """Every rank is done with the load that carried `ticket`. Unknown tickets are ignored."""
        entries = self._pins.pop(ticket, None)
        if entries is not None:
            self._opened().unpin(entries)

    def distrust(self, keys: Collection[bytes]) -> None:
        """A load of `keys` failed after all."""
        self._opened().distrust(keys, time.monotonic())

    # -- what vLLM calls

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Default policy: what is newly computed is offloaded."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what was remembered about the request."""
        self._excluded.discard(req_context.req_id)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """What is known about one chunk right now."""
        catalogue = self._opened()
        if self._arrived:
            self._apply_arrived()
        if req_context.req_id in self._excluded:
            return LookupResult.MISS
        now = time.monotonic()
        return _RESULTS[catalogue.ask(key, now, is_reachable=self._is_reachable(now))]

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadSource:
        """Pin the staged bytes of `keys`. What was never verified is never loaded: such a load fails as a
        whole."""
        wanted = tuple(keys)
        entries = self._opened().pin(wanted)
        self._tickets += 1
        if entries is None:
            logger.warning("adp: the engine wants chunks that no lookup verified; it will compute them")
            return LoadSource(self._tickets, None, wanted, ())
        self._pins[self._tickets] = entries
        assert self._region is not None
        return LoadSource(self._tickets, self._region.name, wanted, tuple(entry.slots for entry in entries))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """All ranks are done with a load of `keys`."""
        if self.is_ticketed:
            return
        wanted = set(keys)
        for ticket, entries in self._pins.items():
            if {entry.key for entry in entries} == wanted:
                self.release(ticket)
                return

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput:
        """Choose what of `keys` to store. Nothing while the gateway is away; never what it said it holds."""
        catalogue = self._opened()
        if self._arrived:
            self._apply_arrived()
        now = time.monotonic()
        chosen: list[OffloadKey] = []
        if req_context.req_id in self._excluded:
            pass
        elif not self._is_reachable(now):
            catalogue.counters.stores_disconnected += len(keys)
        else:
            chosen = [key for key in keys if not catalogue.is_known_stored(key, now)]
            catalogue.counters.stores_known += len(keys) - len(chosen)
        return PrepareStoreOutput(
            keys_to_store=chosen, store_spec=StoreTarget(self.namespace, tuple(chosen)), evicted_keys=[]
        )

    def complete_store(
        self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True
    ) -> None:
        """All ranks are done storing `keys`, well or badly: only the gateway's next answer says which."""
        self._opened().stored(keys)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Send the step's questions and reads."""
        catalogue = self._opened()
        if self._arrived:
            self._apply_arrived()
        now = time.monotonic()
        self._tell_reachability(now)
        if questions := catalogue.take_questions():
            self._ask(questions)
        if fetches := catalogue.take_fetches():
            for start in range(0, len(fetches), _CHUNKS_A_READ):
                self._fetch(fetches[start : start + _CHUNKS_A_READ])
        catalogue.end_step(now)

    def reset_cache(self) -> None:
        """Forget everything, and meet none of it again.

        The engine resets when its weights changed. What they are now is not what was on disk, so stores and
        lookups move to a namespace of their own until the engine is restarted (docs/adr/0023). Pinned slots
        stay pinned until every rank is done with them.
        """
        self._opened().reset()
        self._namespace = diverged(self.namespace)

    def shutdown(self) -> None:
        """Stop within two seconds."""
        if self._bridge is not None:
            self._bridge.close(_CLOSE_SECONDS)
        if self._region is not None:
            self._region.close()

    @property
    def is_waiting(self) -> bool:
        """Whether answers of the gateway are still to come."""
        return self._under_way > 0

    @property
    def namespace(self) -> bytes:
        """The fingerprint of this engine. Complete only once the engine has seeded its block hashes."""
        if self._namespace is None:
            hashing = {**self._identity.hashing, "seed": _compat.block_hash_seed_digest()}
            self._namespace = attrs.evolve(self._identity, hashing=hashing).fingerprint()
            logger.info("adp: namespace %s", self._namespace.hex())
        return self._namespace

    @property
    def counters(self) -> dict[str, int]:
        """Counts since start, by event; those of the workers as far as they have been told."""
        return {**attrs.asdict(self._opened().counters), **self._worker_counters}

    def count_workers(self, increases: Mapping[str, int]) -> None:
        """Workers counted so many more of these events."""
        self._worker_counters.update(increases)

    def get_stats(self) -> OffloadingConnectorStats | None:
        """What was counted since the last call, for vLLM's metrics."""
        counters = Counter(self.counters)
        increases = counters - self._told_counters
        if not increases:
            return None
        self._told_counters = counters
        stats = OffloadingConnectorStats()
        for event, increase in increases.items():
            stats.increase_counter(EVENTS_METRIC, increase, (event,))
        return stats

    # -- the way to the gateway and back

    def _opened(self) -> Catalogue:
        assert self._catalogue is not None, "lookups before the engine has started"
        return self._catalogue

    def _ask(self, entries: list[Entry]) -> None:
        namespace, shards = self.namespace, self._spec.shards
        keys = [entry.key + _SHARD.pack(shard) for entry in entries for shard in range(shards)]

        async def exist(client: GatewayClient) -> list[bool]:
            statuses = (await client.exist(namespace, keys)).statuses
            return [not any(statuses[i : i + shards]) for i in range(0, len(statuses), shards)]

        self._submit(exist, _Asked(entries=entries), self._settings.lookup_seconds)

    def _fetch(self, entries: list[Entry]) -> None:
        assert self._region is not None
        namespace, shards = self.namespace, self._spec.shards
        keys: list[bytes] = []
        buffers: list[memoryview] = []
        for entry in entries:
            for shard in range(shards):
                keys.append(entry.key + _SHARD.pack(shard))
                buffers.append(self._region.slot(entry.slots[shard], self._expected_bytes(entry.key, shard)))

        async def read(client: GatewayClient) -> list[bool]:
            answer = await client.read(namespace, keys, buffers)
            # Without the workers' word on the sizes a buffer is a whole slot, and any object that fits is
            # taken.
            whole = [
                status == 0 and (self._object_bytes is None or length == len(buffer))
                for status, length, buffer in zip(answer.statuses, answer.lengths, buffers, strict=True)
            ]
            return [all(whole[i : i + shards]) for i in range(0, len(whole), shards)]

        self._submit(read, _Fetched(entries=entries), self._settings.load_seconds)

    def _expected_bytes(self, key: bytes, shard: int) -> int | None:
        if self._object_bytes is None:
            return None
        group: int
        (group,) = _SHARD.unpack(key[-_SHARD.size :])
        return self._object_bytes[shard][group]

    def _submit(self, run: Any, tag: Any, timeout_seconds: float) -> None:
        assert self._bridge is not None
        self._under_way += 1
        self._bridge.submit(run, tag=tag, timeout_seconds=timeout_seconds)

    def _deliver(self, outcome: Outcome) -> None:
        if isinstance(outcome.tag, _Greeted):
            if outcome.error is None:
                logger.info("adp: connected to the gateway at %s", self._settings.endpoint)
            else:
                self._tell_away()
            self._greeted.set()
        else:
            self._arrived.append(outcome)

    def _apply_arrived(self) -> None:
        catalogue = self._opened()
        now = time.monotonic()
        while self._arrived:
            outcome = self._arrived.popleft()
            self._under_way -= 1
            match outcome.tag:
                case _Asked(entries=entries):
                    if outcome.error is None:
                        catalogue.answered(entries, outcome.value, now)
                    else:
                        catalogue.lookup_failed(entries, now)
                case _Fetched(entries=entries):
                    verified = outcome.value if outcome.error is None else [False] * len(entries)
                    catalogue.fetched(entries, verified, now)

    def _is_reachable(self, now: float) -> bool:
        assert self._bridge is not None
        if self._bridge.is_connected:
            self._last_connected = max(self._last_connected, now)
            return True
        return now < self._last_connected + _RECONNECT_GRACE_SECONDS

    def _tell_reachability(self, now: float) -> None:
        is_reachable = self._is_reachable(now)
        if not is_reachable:
            self._tell_away()
        elif self._is_told_away:
            assert self._bridge is not None
            if self._bridge.is_connected:
                self._is_told_away = False
                logger.info("adp: the gateway at %s is there", self._settings.endpoint)

    def _tell_away(self) -> None:
        if not self._is_told_away:
            self._is_told_away = True
            logger.warning(
                "adp: no gateway at %s; the engine goes on without it and uses it when it appears",
                self._settings.endpoint,
            )


async def _ping(client: GatewayClient) -> None:
    await client.ping()
