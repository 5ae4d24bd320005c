"""A worker's transfers: pages out to the gateway, and objects from the scheduler's staging into pages.

One thread copies. Loads go first, because a request waits for them and they need nothing but memory. Stores
are cut to the staging slots that are free: objects are copied out, written by the bridge, and their slots
come back when the gateway has answered. The engine's thread only ever enqueues, collects results, or waits
for copies, never for the network: a store that somebody waits for and that finds no free slot is given up.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs

from .bridge import Bridge, Outcome
from .errors import StagingUnreachable
from .gateway import ClientFactory, GatewayClient
from .geometry import Geometry, Moves, plan_load, plan_store
from .jobs import Done, JobLedger
from .staging import Region, RegionName, SlotPool

logger = logging.getLogger(__name__)

#: Objects in one WRITE, at most: slots come back WRITE by WRITE.
_OBJECTS_A_WRITE = 64
_CLOSE_SECONDS = 2.0


class PageCopies(Protocol):
    """Device copies of one rank. `store` and `load` return when the bytes have arrived."""

    def mark(self) -> object:
        """The point in the engine's work that copies submitted now must come after. Engine's thread; never
        waits."""
        ...

    def store(self, mark: object, moves: Moves, region: Region, slots: Sequence[int]) -> None:
        """Copy `moves.blocks` out of the cache; object `o` of the job goes to `slots[o]`."""
        ...

    def load(self, mark: object, moves: Moves, region: Region, slots: Sequence[int]) -> None:
        """Copy `moves.blocks` into the cache from `slots[o]` of object `o`."""
        ...


@attrs.frozen(kw_only=True)
class Pages:
    """The engine's side of a job: blocks by group, as the engine lists them (see geometry.plan_load)."""

    group_sizes: tuple[int, ...]
    first_indices: tuple[int, ...]
    block_ids: tuple[int, ...]


@attrs.define(eq=False)
class _Store:
    job_id: int
    mark: object
    pages: Pages
    namespace: bytes
    keys: tuple[bytes, ...]
    key_groups: tuple[int, ...]
    deadline: float
    #: What is still to be copied, and how many objects of it are on their way.
    moves: deque[Moves] = attrs.field(factory=deque)
    is_planned: bool = False
    under_way: int = 0
    stored_bytes: int = 0


@attrs.frozen(eq=False)
class _Load:
    job_id: int
    mark: object
    pages: Pages
    region: RegionName | None
    slots: tuple[int, ...]
    key_groups: tuple[int, ...]


@attrs.frozen(kw_only=True)
class _Written:
    store: _Store
    slots: tuple[int, ...]
    object_bytes: int


@attrs.define(kw_only=True)
class TransferCounters:
    """Monotonic counts of a worker, in objects."""

    objects_stored: int = 0
    objects_loaded: int = 0
    stores_refused: int = 0
    stores_failed: int = 0
    stores_shed: int = 0
    stores_disconnected: int = 0
    stores_partial: int = 0
    stores_revoked: int = 0
    loads_failed: int = 0


class Transfers:
    """The transfers of one worker. `submit_store` and `submit_load` return at once, whatever their size."""

    def __init__(
        self,
        *,
        geometry: Geometry,
        copies: PageCopies,
        region: Region,
        connect: ClientFactory,
        store_seconds: float,
        name: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters = TransferCounters()
        self._geometry = geometry
        self._copies = copies
        self._region = region
        self._pool = SlotPool(region.name.slots)
        self._store_seconds = store_seconds
        self._clock = clock
        self._ledger = JobLedger(clock)
        # One condition for the ledger, the queues and the pool: whoever changes any of them wakes the copier.
        self._changed = self._ledger.changed
        self._loads: deque[_Load] = deque()
        self._stores: deque[_Store] = deque()
        self._attached: Region | None = None
        self._is_closing = False
        self._bridge = Bridge(connect, self._written, name=f"{name}-bridge")
        self._copier = threading.Thread(target=self._run, name=f"{name}-copier", daemon=True)
        self._copier.start()

    def submit_store(
        self,
        job_id: int,
        pages: Pages,
        namespace: bytes,
        keys: tuple[bytes, ...],
        key_groups: tuple[int, ...],
    ) -> None:
        """Store `keys` (whole keys, with the shard). The engine must not reuse the pages before the job is
        settled."""
        store = _Store(
            job_id,
            self._copies.mark(),
            pages,
            namespace,
            keys,
            key_groups,
            self._clock() + self._store_seconds,
        )
        self._ledger.accept(job_id, is_load=False)
        with self._changed:
            self._stores.append(store)
            self._changed.notify_all()

    def submit_load(
        self,
        job_id: int,
        pages: Pages,
        region: RegionName | None,
        slots: tuple[int, ...],
        key_groups: tuple[int, ...],
    ) -> None:
        """Copy objects out of `slots` of `region` into the pages; `region` None is a load that must fail."""
        load = _Load(job_id, self._copies.mark(), pages, region, slots, key_groups)
        self._ledger.accept(job_id, is_load=True)
        with self._changed:
            self._loads.append(load)
            self._changed.notify_all()

    def take_done(self) -> list[Done]:
        """Jobs that ended since the last call, each exactly once."""
        return self._ledger.take_done()

    def wait_settled(self, job_ids: set[int], timeout_seconds: float) -> tuple[int, ...]:
        """Wait for copies only; returns the jobs that still touch the engine's pages after `timeout_seconds`.

        What is copied for those from now on is thrown away.
        """
        return self._ledger.wait_settled(job_ids, timeout_seconds)

    def close(self, *, drain_seconds: float = 0.0) -> None:
        """End both threads. Objects already copied out get `drain_seconds` to reach the gateway."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._copier.join(_CLOSE_SECONDS)
        self._bridge.close(_CLOSE_SECONDS + drain_seconds, drain_seconds=drain_seconds)
        self._region.close()
        if self._attached is not None:
            self._attached.close()

    # -- the copier's thread

    def _run(self) -> None:
        while True:
            with self._changed:
                work = self._next()
                while work is None:
                    if self._is_closing:
                        return
                    self._changed.wait(self._patience())
                    work = self._next()
            try:
                work()
            except Exception:
                logger.exception("a transfer ended with a bug of ours; the engine goes on without it")

    def _next(self) -> Callable[[], None] | None:
        """What to do now, with the condition held; None when there is nothing or no slot for it."""
        if self._loads:
            load = self._loads.popleft()
            return lambda: self._load(load)
        if not self._stores:
            return None
        store = self._stores[0]
        if not store.is_planned:
            return lambda: self._plan(store)
        if not store.moves:
            self._stores.popleft()
            return lambda: self._settle(store)
        if not self._bridge.is_connected:
            return lambda: self._give_up(store, "stores_disconnected")
        if self._pool.free:
            return lambda: self._store_some(store)
        if self._ledger.is_urgent(store.job_id) or self._clock() >= store.deadline:
            return lambda: self._give_up(store, "stores_shed")
        # Urgent stores further back must not wait behind one that may still hope for a slot.
        for behind in self._stores:
            if self._ledger.is_urgent(behind.job_id):
                return lambda: self._give_up(behind, "stores_shed")
        return None

    def _patience(self) -> float | None:
        return max(0.0, self._stores[0].deadline - self._clock()) if self._stores else None

    def _load(self, load: _Load) -> None:
        moved_bytes = 0
        is_failed = True
        try:
            moves = plan_load(
                self._geometry.blocks_per_chunk,
                load.pages.group_sizes,
                load.pages.first_indices,
                load.pages.block_ids,
                load.key_groups,
            )
            if load.region is not None and moves is not None:
                region = self._attach(load.region)
                for part in moves:
                    self._copies.load(load.mark, part, region, load.slots)
                moved_bytes = sum(self._geometry.groups[group].object_bytes for group in load.key_groups)
                is_failed = False
        except StagingUnreachable as error:
            logger.warning("adp: %s", error)
        finally:
            if is_failed:
                self.counters.loads_failed += len(load.key_groups)
            else:
                self.counters.objects_loaded += len(load.key_groups)
            self._ledger.settle(load.job_id)
            self._ledger.finish(load.job_id, moved_bytes=moved_bytes, is_failed=is_failed)

    def _attach(self, name: RegionName) -> Region:
        if self._attached is None or self._attached.name != name:
            if self._attached is not None:
                self._attached.close()
                self._attached = None
            self._attached = Region.attach(name)
        return self._attached

    def _plan(self, store: _Store) -> None:
        moves, partial = plan_store(
            self._geometry.blocks_per_chunk, store.pages.group_sizes, store.pages.block_ids, store.key_groups
        )
        self.counters.stores_partial += len(partial)
        store.moves.extend(moves)
        store.is_planned = True

    def _store_some(self, store: _Store) -> None:
        """Copy as many objects of the job's next group as there are slots for, and send them off."""
        per_chunk = self._geometry.blocks_per_chunk
        moves = store.moves[0]
        with self._changed:
            count = min(self._pool.free, len(moves.blocks) // per_chunk, _OBJECTS_A_WRITE)
            slots = self._pool.take(count)
        assert slots is not None
        cut = count * per_chunk
        objects = moves.objects[:cut:per_chunk]
        part = Moves(
            group=moves.group,
            blocks=moves.blocks[:cut],
            objects=tuple(i // per_chunk for i in range(cut)),
            places=moves.places[:cut],
        )
        try:
            self._copies.store(store.mark, part, self._region, slots)
        except BaseException:
            with self._changed:
                self._pool.give_back(slots)
            self._give_up(store, "stores_failed")
            raise
        if self._ledger.is_revoked(store.job_id):
            with self._changed:
                self._pool.give_back(slots)
            self._give_up(store, "stores_revoked")
            return
        if cut == len(moves.blocks):
            store.moves.popleft()
        else:
            store.moves[0] = Moves(
                group=moves.group,
                blocks=moves.blocks[cut:],
                objects=moves.objects[cut:],
                places=moves.places[cut:],
            )
        object_bytes = self._geometry.groups[moves.group].object_bytes
        keys = [store.keys[index] for index in objects]
        payloads = [self._region.slot(slot, object_bytes) for slot in slots]
        with self._changed:
            store.under_way += 1
        if not store.moves:
            self._ledger.settle(store.job_id)

        async def write(client: GatewayClient) -> bytes:
            return (await client.write(store.namespace, keys, payloads)).statuses

        self._bridge.submit(
            write,
            tag=_Written(store=store, slots=slots, object_bytes=object_bytes),
            timeout_seconds=max(0.001, store.deadline - self._clock()),
        )

    def _give_up(self, store: _Store, counter: str) -> None:
        """Do not store the rest of this job."""
        rest = len(store.keys)
        if store.is_planned:
            rest = sum(len(moves.blocks) for moves in store.moves) // self._geometry.blocks_per_chunk
        setattr(self.counters, counter, getattr(self.counters, counter) + rest)
        store.moves.clear()
        store.is_planned = True
        with self._changed:
            self._stores.remove(store)
        self._settle(store)

    def _settle(self, store: _Store) -> None:
        """Nothing of this job is left to copy."""
        self._ledger.settle(store.job_id)
        with self._changed:
            is_over = not store.under_way
        if is_over:
            self._ledger.finish(store.job_id, moved_bytes=store.stored_bytes)

    # -- the bridge's thread

    def _written(self, outcome: Outcome) -> None:
        tag: _Written = outcome.tag
        store = tag.store
        statuses: Sequence[int] = outcome.value if outcome.error is None else ()
        stored = sum(status == 0 for status in statuses)
        with self._changed:
            self.counters.objects_stored += stored
            self.counters.stores_refused += len(statuses) - stored
            if outcome.error is not None:
                self.counters.stores_failed += len(tag.slots)
            store.stored_bytes += stored * tag.object_bytes
            store.under_way -= 1
            self._pool.give_back(tag.slots)
            is_over = (
                not store.under_way and store.is_planned and not store.moves and store not in self._stores
            )
            self._changed.notify_all()
        if is_over:
            self._ledger.finish(store.job_id, moved_bytes=store.stored_bytes)
