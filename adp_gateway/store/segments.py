"""The store on a device: objects appended to segments, a journal beside each, old ones reclaimed as a whole.

How the parts share the work: `Catalog` knows (on the event-loop thread), `Transfers` and `files` do the
device work (in I/O threads), `recovery` makes the first catalog, `reclaim` plans; here is all the awaiting.

What every path here keeps to, so that a cancellation can arrive at any `await`:

* Space, leases and sequence numbers are taken before the await and given back on every way out.
* Device work is one call in a thread that is not abandoned: once begun it ends, and what follows it up to
  the next await is synchronous. So a put is committed, in the journal and in the catalog, or it never was.
* `Segment.readers` or `.writers` is above zero while a thread uses its files; such a segment is not removed.
"""

import functools
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar, TypeVarTuple, cast

import anyio
import anyio.lowlevel
import anyio.to_thread
import attrs

from adp_gateway.config import StoreConfig
from adp_gateway.device.base import Device
from adp_gateway.errors import DeviceFull, StorageError

from .base import Hold, PutItem, ReadLease, Status, StoreStats
from .deletes import delete_when_free
from .files import append_kills, create_files, remove_files, remove_names, sync_all
from .format import (
    MAX_KEY_BYTES,
    NAMESPACE_BYTES,
    Kind,
    Record,
)
from .index import Entry
from .leases import Cohort, Subject
from .opening import Opened, open_device
from .reader import Read, Reader
from .reclaim import Plan, Survivor, survivors
from .recovery import RecoveryReport
from .segment import Segment, SegmentLease
from .threads import ReadThreads
from .transfer import Copy, Source, Target, Transfers, status_of
from .troubles import Troubles

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_Args = TypeVarTuple("_Args")

#: Survivors are written again in steps of about this size, so that puts are not kept waiting behind them.
_COPY_STEP_BYTES = 8 << 20


class SegmentStore:
    """`ObjectStore` on a device. Made by `open`; used from the event-loop thread that opened it."""

    def __init__(
        self,
        opened: Opened,
        config: StoreConfig,
    ) -> None:
        self._device = opened.device
        self._catalog = opened.catalog
        self._recovery = opened.recovery
        self._capacity_bytes = opened.capacity_bytes
        self._layout = opened.layout
        self._plan = Plan(opened.catalog, opened.layout, opened.capacity_bytes)
        self._max_object_bytes = min(config.max_object_bytes, opened.layout.data_bytes)
        self._is_durable = config.durability == "durable"
        self._transfers = Transfers(config.max_command_bytes)
        self._reads = ReadThreads(config.io_threads, config.io_seconds)
        self._reader = Reader(self._reads, max(1, config.io_threads // 2), self._drop_damaged)
        self._write_threads = anyio.CapacityLimiter(config.io_threads)
        self._rolling = anyio.Lock()  # held by the one task that makes room and opens the next segment
        self._killing = anyio.Lock()  # held by the one task that writes kills
        self._put_ended = anyio.Event()  # the next put under way to end sets it
        self._troubles = Troubles(logger)
        self.recovery_seconds = 0.0  # what opening took, until the store could be used

    @classmethod
    @asynccontextmanager
    async def open(
        cls, config: StoreConfig, *, device: Device | None = None
    ) -> AsyncIterator["SegmentStore"]:
        """Open the store in `config.directory` (or on `device`), recover, and close it on the way out.

        Release every lease before leaving the block: closing takes the descriptors away. Leaving it normally
        makes everything durable.

        Raises:
            StoreLocked: another process has it open.
            UnsupportedFormat: a newer version wrote it.
            StorageError: the directory cannot be used.
        """
        began = time.perf_counter()
        opened = await anyio.to_thread.run_sync(open_device, config, device)
        store = cls(opened, config)
        store.recovery_seconds = time.perf_counter() - began
        logger.info(
            "store opened: %s",
            store.recovery,
            extra={"data": {"event": "store_opened", "seconds": round(store.recovery_seconds, 3)}},
        )
        if store.max_object_bytes < config.max_object_bytes:
            logger.info(
                "the largest object is %d bytes, not %d: a segment of %d bytes holds no more",
                store.max_object_bytes,
                config.max_object_bytes,
                opened.layout.segment_bytes,
            )
        try:
            # Those that recovery found missing, too: what is about to be read must not make way for an older
            # version if the process is killed between two kills.
            await store._write_kills()
            yield store
        finally:
            with anyio.CancelScope(shield=True):  # device work only: as bounded as the device is
                await store._close()

    async def _close(self) -> None:
        await self._write_kills()
        try:
            await self.flush()
        except StorageError as error:
            logger.warning("the store closes with writes that the device did not confirm: %s", error)
        self._reads.reap()
        if self._reads.late:
            logger.error("the store closes with %d reads that the device has not answered", self._reads.late)
        for segment in (*self._catalog.segments.values(), *self._catalog.doomed):
            if not self._reads.late or segment.is_idle:  # a descriptor in use must not become another file's
                segment.data.close()
            segment.journal.close()
        self._device.close()

    @property
    def max_object_bytes(self) -> int:
        """The largest object that a put takes: the configured limit, or a segment's room if that is less."""
        return self._max_object_bytes

    @property
    def recovery(self) -> RecoveryReport:
        """What was found when the store was opened."""
        return self._recovery

    # Reading

    def exist(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        """OK or NOT_FOUND for each key."""
        return self._catalog.index.exist(namespace, keys)

    def hold(self, namespace: bytes, keys: Sequence[bytes]) -> tuple[bytes, Hold]:
        """As `exist`, and hold what is there."""
        catalog = self._catalog
        return catalog.holds.hold(namespace, keys, catalog.index.exist(namespace, keys))

    def open_read(self, namespace: bytes, keys: Sequence[bytes]) -> list[ReadLease | None]:
        """Pin each object that is there."""
        entries = self._catalog.index.use(namespace, keys)
        return [
            None if entry is None else self._lease((namespace, key), entry)
            for key, entry in zip(keys, entries, strict=True)
        ]

    async def verify(self, leases: Sequence[ReadLease]) -> bytes:
        """Read and hash each object in an I/O thread, through the page cache: it is sent from there."""
        return await self._verify(cast(Sequence[SegmentLease], leases), is_kept=True)

    async def _verify(self, leases: Sequence[SegmentLease], *, is_kept: bool) -> bytes:
        verify = functools.partial(self._transfers.verify, is_kept=is_kept)
        return await self._checked(leases, verify, [lease.source for lease in leases], may_give_up=True)

    async def read_into(
        self, leases: Sequence[ReadLease], buffers: Sequence[memoryview], *, is_verified: bool = True
    ) -> bytes:
        """Read each object into the start of its buffer, and verify it there."""
        own = cast(Sequence[SegmentLease], leases)
        fits = [lease.length <= buffer.nbytes for lease, buffer in zip(own, buffers, strict=True)]
        fitting = [lease for lease, fit in zip(own, fits, strict=True) if fit]
        targets = [buffer for buffer, fit in zip(buffers, fits, strict=True) if fit]
        sources = [lease.source for lease in fitting]
        read = self._transfers.read_into if is_verified else self._transfers.read_unseen
        # The caller's memory must not be let go of while it is written to: no giving up.
        results = iter(await self._checked(fitting, read, sources, targets, may_give_up=False))
        return bytes([next(results) if fit else Status.TOO_LARGE for fit in fits])

    async def check_many(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        """Verify by key, without counting as use."""
        leases: list[SegmentLease] = []
        statuses = bytearray([Status.NOT_FOUND]) * len(keys)
        found: list[int] = []
        try:
            for position, entry in enumerate(self._catalog.index.get_many(namespace, keys)):
                if entry is not None:
                    leases.append(self._lease((namespace, keys[position]), entry))
                    found.append(position)
            for position, status in zip(found, await self._verify(leases, is_kept=False), strict=True):
                statuses[position] = status
        finally:
            for lease in leases:
                lease.release()
        return bytes(statuses)

    def _lease(self, subject: Subject, entry: Entry) -> SegmentLease:
        catalog = self._catalog
        segment = catalog.segments[entry.segment_id]
        segment.readers += 1
        return SegmentLease(subject, entry, segment, catalog.ledger, catalog.ledger.enter(subject))

    async def _checked(
        self, leases: Sequence[SegmentLease], read: Read, *args: Sequence[Any], may_give_up: bool
    ) -> bytes:
        """Run `read` in reader threads and drop what it found damaged."""
        statuses = await self._reader.read(leases, read, *args, may_give_up=may_give_up)
        if any(statuses):
            await self._write_kills()
        else:
            self._troubles.worked("read")
        return statuses

    def _drop_damaged(self, leases: Sequence[SegmentLease], statuses: bytes) -> None:
        catalog = self._catalog
        faults = statuses.count(Status.GATEWAY_FAULT)
        if faults:
            self._troubles.failed("read", "the device cannot read", count=faults)
        for lease, status in zip(leases, statuses, strict=True):
            (namespace, key), entry = lease.subject, lease.entry
            if status == Status.CORRUPT:
                # Gone for good, and once only: of several readers the first counts.
                if catalog.drop(namespace, key, only=entry):
                    catalog.tally.corrupt_objects += 1
                    self._troubles.tell("dropped a corrupt object", _told(namespace, key, entry))
            elif status == Status.GATEWAY_FAULT and catalog.lose(namespace, key, only=entry):
                # A miss gets written again, a fault would come back with every read. The bytes may be fine
                # once the device is: the commit stays, for the next start to find.
                catalog.tally.faulted_objects += 1
                self._troubles.tell("dropped an object that cannot be read", _told(namespace, key, entry))

    # Writing

    async def put_many(self, namespace: bytes, items: Sequence[PutItem]) -> bytes:
        """Store each item: payloads first, then one journal append that makes them visible."""
        if len(namespace) != NAMESPACE_BYTES or not all(
            1 <= len(item.key) <= MAX_KEY_BYTES for item in items
        ):
            raise ValueError(f"a namespace has {NAMESPACE_BYTES} bytes, a key 1 to {MAX_KEY_BYTES}")
        statuses = bytearray([Status.GATEWAY_FAULT]) * len(items)
        position = 0
        while position < len(items):
            batch = self._allocate(namespace, items, position, statuses)
            if batch is not None:
                await self._write(batch, items, statuses)
                position = batch.end
                continue
            active, length = self._catalog.active, items[position].length
            if active is not None and active.has_room(length):
                await self._put_ended.wait()  # the quota is spoken for by the account's other puts
                continue
            outcome = await self._roll(length)
            if outcome != Status.OK:
                statuses[position] = outcome
                position += 1
        if not items:
            await anyio.lowlevel.checkpoint()
        return bytes(statuses)

    def _allocate(
        self, namespace: bytes, items: Sequence[PutItem], start: int, statuses: bytearray
    ) -> "_Batch | None":
        """Places in the active segment, and in the quota, for as many items from `start` on as fit.

        None if not one does.
        """
        segment = self._catalog.active
        book = self._catalog.books.of(namespace)
        positions: list[int] = []
        records: list[Record] = []
        end = start
        for item in items[start:]:
            length = item.length
            if length > self._max_object_bytes:
                statuses[end] = Status.TOO_LARGE
            elif segment is None or not segment.has_room(length):
                break
            else:
                admission = Status.OK if book is None else book.admit((namespace, item.key), length)
                if admission is None:
                    break
                if admission != Status.OK:
                    statuses[end] = admission
                    end += 1
                    continue
                offset = segment.allocate(length)
                sequence = self._catalog.take_sequence()
                records.append(
                    Record(Kind.COMMIT, namespace, item.key, offset, length, item.checksum, sequence)
                )
                positions.append(end)
            end += 1
        return _Batch(segment, positions, records, end) if end > start else None

    async def _write(self, batch: "_Batch", items: Sequence[PutItem], statuses: bytearray) -> None:
        """Write and commit a batch; its statuses. Cancelled before it began: the places are given back."""
        segment, records = batch.segment, batch.records
        if segment is None or not records:
            await anyio.lowlevel.checkpoint()
            return
        payloads = [items[position].data for position in batch.positions]
        target = Target(segment.data, segment.journal, self._is_durable)
        segment.writers += 1
        segment.is_dirty = True
        try:
            written = await self._in_writer(self._transfers.write, target, payloads, records)
            self._settle(segment, records, written.statuses, is_suspect=written.is_journal_suspect)
        except anyio.get_cancelled_exc_class():
            _give_back(segment, records)
            raise
        finally:
            segment.writers -= 1
            self._leave_quota(records)
        for position, status in zip(batch.positions, written.statuses, strict=True):
            statuses[position] = status
        if self._catalog.unkilled:  # what this put has replaced is among them
            await self._write_kills()

    def _note_writes(self, statuses: bytes) -> None:
        """Count what the device refused of a batch: no room, or a fault."""
        if faults := statuses.count(Status.GATEWAY_FAULT):
            self._troubles.failed("write", "the device cannot write", count=faults)
        elif full := statuses.count(Status.CAPACITY_EXHAUSTED):
            self._troubles.failed("write", "no room", DeviceFull("the device is full"), count=full)
        elif Status.OK in statuses:
            self._troubles.worked("write")

    def _leave_quota(self, records: list[Record]) -> None:
        for record in records:
            book = self._catalog.books.of(record.namespace)
            if book is not None:
                book.leave((record.namespace, record.key), record.length)
        self._put_ended.set()
        self._put_ended = anyio.Event()

    def _settle(self, segment: Segment, records: list[Record], statuses: bytes, *, is_suspect: bool) -> None:
        """Bring the catalog up to what a write did."""
        catalog = self._catalog
        failed: list[Record] = []
        whole: list[Record] = []
        for record, status in zip(records, statuses, strict=True):
            (whole if status == Status.OK else failed).append(record)
        if whole:
            namespace, keys = whole[0].namespace, [record.key for record in whole]
            entries = [
                _entry(segment, record, uses=int(is_back))
                for record, is_back in zip(whole, catalog.policy.returned(namespace, keys), strict=True)
            ]
            catalog.commit_many(namespace, keys, entries)
            catalog.tally.stored_objects += len(whole)
        self._note_writes(statuses)
        if not is_suspect:
            _give_back(segment, failed)
            return
        # The journal refused, or the device did when it should have made it durable: the commits may be there
        # or not, so they are voided, and nothing more goes where a sync has failed once.
        for record in failed:
            catalog.void(record.namespace, record.key, _entry(segment, record))
        if catalog.active is segment:
            catalog.seal()

    async def delete_many(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        """Delete each key when nothing holds it, wait for its readers, and record it."""
        catalog = self._catalog
        statuses = await delete_when_free(
            namespace,
            keys,
            holds=catalog.holds,
            ledger=catalog.ledger,
            drop=lambda *subject: catalog.drop(*subject) is not None,
        )
        # After the wait: a reclaim that was copying one of the objects has voided its copy by now.
        if not await self._write_kills():
            return statuses.replace(bytes([Status.OK]), bytes([Status.GATEWAY_FAULT]))
        return statuses

    async def _write_kills(self) -> bool:
        """Record every void commit in the journal of its segment, and remove the files of doomed segments, in
        the order that `Catalog` explains. Whether nothing is left to be done.

        What could not be done stays in the catalog, and is tried again by the next call.
        """
        catalog = self._catalog
        async with self._killing:  # also waits for the kills that another task is just writing
            while catalog.overdue:
                overdue = catalog.overdue[0]
                if not await self._append_kills(overdue.kills):
                    return False
                try:
                    await self._in_writer(remove_files, self._device, overdue.segment, self._is_durable)
                except StorageError as error:
                    self._troubles.failed("remove_segment", "a segment cannot be removed", error)
                    return False
                self._troubles.worked("remove_segment")
                catalog.overdue.pop(0)
            return await self._append_kills(catalog.unkilled)

    async def _append_kills(self, kills: dict[int, list[Record]]) -> bool:
        """Write these, and take them out of `kills`; whether all took. More may be added meanwhile."""
        work = [(self._catalog.segments[segment_id], records) for segment_id, records in kills.items()]
        if not work:
            return True
        kills.clear()
        errors: list[StorageError | None] = []
        for segment, _ in work:
            segment.writers += 1
            segment.is_dirty = True
        try:
            errors = await self._in_writer(append_kills, work, self._is_durable)
        finally:
            newer = dict(kills)
            kills.clear()  # what is left goes before what was added
            for at, (segment, records) in enumerate(work):
                segment.writers -= 1
                if not errors or errors[at] is not None:  # none at all: cancelled before it began
                    kills[segment.segment_id] = records + newer.pop(segment.segment_id, [])
            kills.update(newer)
        if error := next(filter(None, errors), None):
            self._troubles.failed("delete", "deletes are not recorded yet", error)
            return False
        self._troubles.worked("delete")
        return True

    async def flush(self) -> None:
        """Sync every segment with unconfirmed writes.

        Raises:
            StorageError: the device refused for at least one; the others have been synced.
        """
        dirty = [segment for segment in self._catalog.segments.values() if segment.is_dirty]
        synced: list[bool] = []
        for segment in dirty:
            segment.is_dirty = False
            segment.writers += 1
        try:
            synced, error = await self._in_writer(sync_all, self._device, dirty)
        finally:
            for segment, is_synced in zip(dirty, synced or [False] * len(dirty), strict=True):
                segment.writers -= 1
                segment.is_dirty |= not is_synced
        if error is not None:
            self._troubles.failed("sync", "the device did not confirm writes", error)
            raise error
        self._troubles.worked("sync")

    async def _in_writer(self, function: Callable[[*_Args], _T], *args: *_Args) -> _T:
        return await anyio.to_thread.run_sync(function, *args, limiter=self._write_threads)

    # Making room

    async def _roll(self, length: int) -> Status:
        """Open a segment with room for `length`. OK: try the active segment again, whoever opened it."""
        async with self._rolling:
            active = self._catalog.active
            if active is not None and active.has_room(length):
                return Status.OK
            if not await self._make_room() or self._plan.needs_reserve(length):
                return Status.CAPACITY_EXHAUSTED
            try:
                segment = await self._create_segment()
            except StorageError as error:
                self._troubles.failed("create_segment", "no new segment", error)
                return status_of(error)
            self._troubles.worked("create_segment")
            self._catalog.seal()
            self._catalog.segments[segment.segment_id] = segment
            self._catalog.active = segment
            await self._trim()
            await self._restore_reserve(segment, length)
            return Status.OK

    async def _make_room(self) -> bool:
        """Evict until one more segment fits; whether it does. Usually it does at once: the reserve."""
        catalog = self._catalog
        self._reads.reap()
        while self._plan.is_full:
            await self._trim()
            if not self._plan.is_full:
                break
            if not catalog.doomed and not catalog.litter:
                victim = self._plan.choose_victim(None)
                if victim is None:
                    return False
                catalog.doom(victim)
            if not await self._remove_litter() or not await self._write_kills():
                return False
        return True

    async def _restore_reserve(self, active: Segment, length: int) -> None:
        """Evict until yet another segment fits, and let what has been read move to the one just opened.

        The reserve is where survivors go: without it there would be no room to write them before their old
        segment is removed. Of what is full of life, survivors take at most half of the new segment, and every
        round gains the other half. What is mostly dead gains that much by itself, and so moves as a whole.
        """
        catalog, plan = self._catalog, self._plan
        start_bytes = active.tail_bytes
        stuck: set[Segment] = set()
        while plan.is_full:
            await self._trim()
            if not plan.is_full:
                return
            before = active.tail_bytes
            moved_bytes = before - start_bytes
            victim = plan.choose_victim(length, moved_bytes=moved_bytes, stuck=stuck)
            if victim is None:
                return
            await self._relocate(victim, active, plan.survivor_bytes(victim, length) - moved_bytes)
            if not victim.is_idle:
                continue  # somebody has begun to read there; it is not a candidate any more
            if plan.has_held_bytes(victim, more_than=0):
                # What came to be held meanwhile goes in the next round; what the device refused, in none.
                if active.tail_bytes == before:
                    stuck.add(victim)
                continue
            catalog.doom(victim)
            if not await self._write_kills():
                return

    async def _relocate(self, victim: Segment, active: Segment, budget_bytes: int) -> None:
        """Write the survivors of `victim` into `active`, a step at a time."""
        step: list[Survivor] = []
        step_bytes = 0
        for survivor in list(survivors(self._catalog, victim, budget_bytes=budget_bytes)):
            step.append(survivor)
            step_bytes += survivor.entry.length
            if step_bytes >= _COPY_STEP_BYTES:
                await self._copy(step, victim, active)
                step, step_bytes = [], 0
        if step:
            await self._copy(step, victim, active)

    async def _copy(self, step: list[Survivor], victim: Segment, active: Segment) -> None:
        catalog = self._catalog
        copies: list[Copy] = []
        cohorts: list[Cohort] = []
        moved: list[Survivor] = []
        slots = active.layout.max_commits
        is_everything = victim.is_mostly_dead
        slots = slots - 1 if is_everything else slots // 2
        for namespace, key, entry in step:
            has_slots = active.commits < slots
            current = catalog.index.get(namespace, key)
            if current is None or current.place != entry.place or not has_slots:
                continue
            if not active.has_room(entry.length):
                break
            offset = active.allocate(entry.length)
            # The sequence stays: the copy is the same version, and loses to any put that came after it.
            record = Record(Kind.COMMIT, namespace, key, offset, *entry[2:5])
            copies.append(Copy(Source(victim.data, *entry[1:4]), record))
            cohorts.append(catalog.ledger.enter((namespace, key)))
            # What moves on its own merit spends its mark; reads that come meanwhile give it a new one.
            moved.append(Survivor(namespace, key, entry._replace(uses=0) if is_everything else entry))
        if not copies:
            return
        records = [copy.record for copy in copies]
        target = Target(active.data, active.journal, self._is_durable)
        victim.readers += 1
        active.writers += 1
        active.is_dirty = True
        try:
            statuses = await self._in_writer(self._transfers.copy, active.data, copies)
            # No kill is written while copies are committed, and none of a later version has been before: or a
            # process that is killed now would leave the copy as the only version of a key that has moved on.
            async with self._killing:
                for position, (namespace, key, entry) in enumerate(moved):
                    current = catalog.index.get(namespace, key)
                    if current is None or current.place != entry.place:
                        statuses[position] = Status.NOT_FOUND
                written = await self._in_writer(self._transfers.commit, target, records, statuses)
                self._settle_copies(
                    moved, records, active, written.statuses, is_suspect=written.is_journal_suspect
                )
        except anyio.get_cancelled_exc_class():
            _give_back(active, records)
            raise
        finally:
            victim.readers -= 1
            active.writers -= 1
            for cohort in cohorts:
                catalog.ledger.leave(cohort)

    def _settle_copies(
        self,
        moved: list[Survivor],
        records: list[Record],
        active: Segment,
        statuses: bytes,
        *,
        is_suspect: bool,
    ) -> None:
        catalog = self._catalog
        self._note_writes(statuses)
        for (namespace, key, entry), record, status in zip(moved, records, statuses, strict=True):
            current = catalog.index.get(namespace, key)
            copied = _entry(active, record)
            if status == Status.CORRUPT:
                if catalog.drop(namespace, key, only=entry):
                    catalog.tally.corrupt_objects += 1
            elif status != Status.OK:
                if is_suspect:
                    catalog.void(namespace, key, copied)
            elif current is None:
                catalog.void(namespace, key, copied)  # deleted while it was copied
            else:
                catalog.commit(namespace, key, copied._replace(uses=max(0, current.uses - entry.uses)))
                catalog.tally.moved_objects += 1
                catalog.tally.moved_bytes += entry.length
        if is_suspect and catalog.active is active:
            catalog.seal()

    async def _trim(self) -> None:
        """Give back what sealed segments did not fill."""
        full_length = [
            segment
            for segment in self._catalog.segments.values()
            if segment.is_sealed and not segment.is_trimmed and not segment.writers
        ]
        for segment in full_length:
            segment.writers += 1
            try:
                await self._in_writer(segment.data.truncate, segment.tail_bytes)
                segment.is_trimmed = True
            except StorageError as error:
                self._troubles.failed("trim_segment", "a segment keeps its full length", error)
            finally:
                segment.writers -= 1

    async def _create_segment(self) -> Segment:
        segment_id = self._catalog.next_segment_id
        self._catalog.next_segment_id += 1
        try:
            return await self._in_writer(
                create_files, self._device, segment_id, self._layout, self._is_durable
            )
        except StorageError:
            # What it left has room of its own, and counts until it is gone.
            self._catalog.litter[segment_id] = self._layout.segment_bytes
            await self._remove_litter()
            raise

    async def _remove_litter(self) -> bool:
        litter = self._catalog.litter
        for segment_id in list(litter):
            try:
                await self._in_writer(remove_names, self._device, segment_id, self._is_durable)
            except StorageError as error:
                self._troubles.failed("remove_segment", "what is left of a segment cannot be removed", error)
                return False
            del litter[segment_id]
        return True

    @property
    def trouble(self) -> str | None:
        """What the device has failed at in the last half minute, and not done since."""
        return self._troubles.failing

    def stats(self) -> StoreStats:
        """Counters and sizes of this moment."""
        catalog = self._catalog
        self._reads.reap()
        return StoreStats(
            capacity_bytes=self._capacity_bytes,
            used_bytes=catalog.used_bytes,
            object_bytes=catalog.object_bytes,
            objects=len(catalog.index),
            segments=len(catalog.segments),
            leases=catalog.ledger.readers,
            held_items=catalog.holds.items,
            device_errors=dict(self._troubles.errors),
            accounts=catalog.books.stats,
            **attrs.asdict(catalog.tally),
        )


@attrs.frozen
class _Batch:
    """Items of a put that go into one segment together. `end`: the first position behind them."""

    segment: Segment | None
    positions: list[int]
    records: list[Record]
    end: int


def _told(namespace: bytes, key: bytes, entry: Entry) -> str:
    """An object in a log line: enough to find it by, in a line that ends."""
    return f"{namespace.hex()[:24]}/{key.hex()[:32]}, {entry.length} bytes"


def _entry(segment: Segment, record: Record, *, uses: int = 0) -> Entry:
    return Entry(segment.segment_id, record.offset, record.length, record.checksum, record.sequence, uses)


def _give_back(segment: Segment, records: Iterable[Record]) -> None:
    for record in reversed(list(records)):
        segment.free(record.offset, record.length)
