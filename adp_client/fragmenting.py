"""The verbs at a gateway that does not cut objects: their steps, each one vector for all items of the call.

    WRITE    every fragment; then, for the objects of which all fragments are stored, the manifests
    READ     the keys, straight into the caller's memory; then the fragments of what turned out to be
             manifests, straight into slices of the same memory
    EXIST    READ with room for a manifest (TOO_LARGE: a larger object is there); then EXIST of the fragments;
             with a lease, EXIST of the keys before all that, so that the manifests stay
    DELETE   the manifests as EXIST does; then DELETE of the keys, which is when the objects are gone; then of
             the fragments
    CHECK    the keys; then of the fragments of what is whole and a manifest

A step that fails, or a caller that leaves in between, leaves the old object or none. What it had stored by
then are fragments that nobody names: they grow cold and are evicted. The fragments of a version that was
replaced are left to the same end, for somebody may still be reading them.

At a gateway with FRAGMENTS every verb is one step, as if this module did not exist, but for objects that are
or look like manifests (section 5.13): a store may have been filled through another gateway.

A refusal of a whole request is raised if it comes in the first step, and is the status of its items after it.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

import anyio
import anyio.to_thread
import attrs
from typing_extensions import Buffer

from .batches import cut
from .fragments import (
    MANIFEST_BYTES,
    MAX_FRAGMENTS,
    Manifest,
    UnsoundManifest,
    Way,
    checksum_of,
    cut_pieces,
    digest_of,
)
from .leases import Lease
from .operations import (
    INLINE_HASH_BYTES,
    GatewayChanged,
    LeasedExistOperation,
    ReadOperation,
    Rerouted,
    SimpleOperation,
    VectorOperation,
    WriteOperation,
    take_lease,
    writable_view,
)
from .ordering import Call
from .protocol.constants import ErrorCode
from .protocol.errors import LinkError, RequestError, RequestTimeout
from .protocol.messages import Check, Delete, Exist
from .regions import RegionSlice
from .sharing import as_memory, read_operation, write_operation

_NOBODY = Way(cuts_itself=True, fragment_bytes=0, takes_fragments=False, boot_id=b"")  # for no keys at all

Perform = Callable[[SimpleOperation | WriteOperation, Call], Awaitable[None]]
FindWay = Callable[[Call], Awaitable[Way]]
NoteDamage = Callable[[bytes, Sequence[bytes]], None]


@attrs.frozen
class _Round:
    """Objects that are asked for together: their items, and all their fragments in one vector."""

    items: list[int]
    ends: list[int]  # ends[i]: where the fragments of items[i] end in `keys`
    keys: tuple[bytes, ...]

    def runs(self, values: bytes) -> Iterator[tuple[int, bytes]]:
        """Each item, with what was found for its fragments."""
        begin = 0
        for item, end in zip(self.items, self.ends, strict=True):
            yield item, values[begin:end]
            begin = end


@attrs.frozen
class _Found:
    """What stands under the keys of a call, as far as a manifest can tell."""

    statuses: bytearray
    manifests: dict[int, Manifest]


class Fragmenting:
    """The steps; `perform` drives one operation to its end, `find_way` waits for a gateway, `hashing` bounds
    the threads that hash."""

    def __init__(
        self,
        *,
        perform: Perform,
        find_way: FindWay,
        note_damage: NoteDamage,
        hashing: anyio.CapacityLimiter,
    ) -> None:
        self._perform = perform
        self._find_way = find_way
        self._note_damage = note_damage
        self._hashing = hashing

    # ------------------------------------------------------------ EXIST

    async def exist(self, namespace: bytes, keys: tuple[bytes, ...], call: Call) -> bytes:
        """Which objects are there, with all their fragments."""
        while True:
            way = await self._way_for(keys, call)
            try:
                if not way.cuts_itself:
                    return await self._exist_cut(namespace, keys, call, way)
                operation = VectorOperation(Exist, namespace, keys)
                operation.way = way  # what one boot had says nothing about the next
                await self._perform(operation, call)
                return bytes(operation.statuses)
            except GatewayChanged:
                continue

    async def _exist_cut(self, namespace: bytes, keys: tuple[bytes, ...], call: Call, way: Way) -> bytes:
        found = await self._look(namespace, keys, call, way, is_bound=True)
        statuses = found.statuses
        for each in _rounds(keys, found.manifests):
            asked = VectorOperation(Exist, namespace, each.keys)
            asked.way = way
            await self._perform_later_step(asked, call)
            for item, run in each.runs(bytes(asked.statuses)):
                statuses[item] = _worst(run)
        return bytes(statuses).replace(bytes([ErrorCode.CORRUPT]), bytes([ErrorCode.NOT_FOUND]))

    async def exist_leased(
        self, namespace: bytes, keys: tuple[bytes, ...], lease_seconds: float, call: Call
    ) -> tuple[bytes, Lease | None]:
        """As `exist`, with a lease on what is there, if one can be had."""
        while True:
            way = await self._way_for(keys, call)
            asked: list[LeasedExistOperation] = []
            try:
                statuses = await self._exist_leased(namespace, keys, lease_seconds, call, way, asked)
                if ErrorCode.OK not in statuses:
                    return statuses, None
                # If the connection was lost between two steps, the leases of the first are gone.
                if len({operation.epoch for operation in asked}) == 1:
                    return statuses, take_lease(asked)
            except GatewayChanged:
                continue
            finally:
                for operation in asked:
                    operation.give_back()

    async def _exist_leased(
        self,
        namespace: bytes,
        keys: tuple[bytes, ...],
        lease_seconds: float,
        call: Call,
        way: Way,
        asked: list[LeasedExistOperation],
    ) -> bytes:
        """The steps: lease the keys, see which are manifests, lease their fragments. `asked`: who asked."""

        def ask(vector: tuple[bytes, ...]) -> LeasedExistOperation:
            operation = LeasedExistOperation(namespace, vector, lease_seconds)
            operation.way = way
            asked.append(operation)
            return operation

        first = ask(keys)
        await self._perform(first, call)
        statuses = bytearray(first.statuses)
        whole = [item for item, status in enumerate(statuses) if status == ErrorCode.OK]
        if way.cuts_itself or not whole:
            return bytes(statuses)
        found = await self._look(namespace, tuple(keys[item] for item in whole), call, way, is_bound=True)
        for at, item in enumerate(whole):
            statuses[item] = found.statuses[at]
        for each in _rounds(keys, {whole[at]: manifest for at, manifest in found.manifests.items()}):
            fragments = ask(each.keys)
            await self._perform_later_step(fragments, call)
            for item, run in each.runs(bytes(fragments.statuses)):
                statuses[item] = _worst(run)
        return bytes(statuses).replace(bytes([ErrorCode.CORRUPT]), bytes([ErrorCode.NOT_FOUND]))

    async def _look(
        self, namespace: bytes, keys: tuple[bytes, ...], call: Call, way: Way, *, is_bound: bool = False
    ) -> _Found:
        """OK for whatever is there; and the manifests among it."""
        memory = memoryview(bytearray(MANIFEST_BYTES * len(keys)))
        places = [memory[at : at + MANIFEST_BYTES] for at in range(0, len(memory), MANIFEST_BYTES)]
        operation = ReadOperation(namespace, keys, places)
        operation.way = way if is_bound else None
        await self._perform(operation, call)
        self._note(operation)
        statuses = operation.statuses.replace(bytes([ErrorCode.TOO_LARGE]), bytes([ErrorCode.OK]))
        return _Found(statuses, _manifests(operation, places, statuses, way))

    # ------------------------------------------------------------ READ

    async def read(
        self,
        namespace: bytes,
        keys: tuple[bytes, ...],
        memory: Sequence[Buffer | RegionSlice],
        call: Call,
        *,
        is_verified: bool,
    ) -> tuple[bytes, tuple[int, ...]]:
        """Statuses and lengths. Nothing here depends on who cut: fragments name their contents."""
        operation = read_operation(namespace, keys, memory, is_verified=is_verified)
        try:
            way = await self._way_for(keys, call)
            await self._perform(operation, call)
        finally:
            operation.let_go()
        self._note(operation)
        statuses, lengths = operation.statuses, operation.lengths
        if MANIFEST_BYTES in lengths:
            buffers = [as_memory(buffer) for buffer in memory]
            manifests = _manifests(operation, buffers, statuses, way)
            for item, manifest in list(manifests.items()):
                if manifest.object_bytes > memoryview(buffers[item]).nbytes:
                    statuses[item] = ErrorCode.TOO_LARGE
                    del manifests[item]
            for each in _rounds(keys, manifests):
                await self._read_round(
                    namespace, each, manifests, buffers, call, statuses, lengths, is_verified=is_verified
                )
        return bytes(statuses), tuple(lengths)

    async def _read_round(
        self,
        namespace: bytes,
        each: _Round,
        manifests: Mapping[int, Manifest],
        buffers: Sequence[Buffer],
        call: Call,
        statuses: bytearray,
        lengths: list[int],
        *,
        is_verified: bool,
    ) -> None:
        call.hold()
        asked = ReadOperation(
            namespace,
            each.keys,
            [place for item in each.items for place in manifests[item].cut(writable_view(buffers[item]))],
            is_verified=is_verified,
        )
        await self._perform_later_step(asked, call)
        self._note(asked)
        begin = 0
        for item, run in each.runs(bytes(asked.statuses)):
            end, manifest = begin + len(run), manifests[item]
            status = _worst(run.replace(bytes([ErrorCode.TOO_LARGE]), bytes([ErrorCode.CORRUPT])))
            if status is ErrorCode.OK and (
                asked.lengths[begin:end] != manifest.sizes()
                or digest_of(asked.checksums[begin:end]) != manifest.digest
            ):
                status = ErrorCode.CORRUPT
            statuses[item] = status
            if status is ErrorCode.OK:
                lengths[item] = manifest.object_bytes
            begin = end

    # ------------------------------------------------------------ WRITE

    async def write(
        self,
        namespace: bytes,
        keys: tuple[bytes, ...],
        payloads: Sequence[Buffer | RegionSlice | Sequence[Buffer | RegionSlice]],
        call: Call,
    ) -> bytes:
        """Store each object, whole or not at all."""
        while True:
            operation = write_operation(namespace, keys, payloads)
            try:
                way = await self._way_for(keys, call)
                cutting = [
                    item
                    for item in (range(len(keys)) if _may_need_cutting(operation.sizes, way) else ())
                    if way.needs_cutting(operation.pieces[item], operation.sizes[item])
                ]
                if cutting:
                    return await self._write(operation, cutting, call, way)
                operation.way = way.for_any_boot()
                await self._perform(operation, call)
                return bytes(operation.statuses)
            except GatewayChanged:
                continue
            finally:
                operation.let_go()

    async def _write(self, whole: WriteOperation, cutting: Sequence[int], call: Call, way: Way) -> bytes:
        call.hold()
        statuses = bytearray(len(whole.keys))
        counts = dict.fromkeys(range(len(whole.keys)), 1)  # requests' items for each object
        for item in cutting:
            if way.can_cut(whole.sizes[item]):
                counts[item] = -(-whole.sizes[item] // way.fragment_bytes)
            else:
                statuses[item] = ErrorCode.TOO_LARGE
                del counts[item]
        pieced = frozenset(cutting)
        first = True
        for items in cut(list(counts), counts.__getitem__, max_items=len(counts), max_bytes=MAX_FRAGMENTS):
            await self._write_round(whole, items, pieced, call, way, statuses, is_first=first)
            first = False
        return bytes(statuses)

    async def _write_round(
        self,
        whole: WriteOperation,
        items: Sequence[int],
        pieced: frozenset[int],
        call: Call,
        way: Way,
        statuses: bytearray,
        *,
        is_first: bool,
    ) -> None:
        namespace = whole.namespace
        fragments = {
            item: cut_pieces(whole.pieces[item], way.fragment_bytes) for item in items if item in pieced
        }
        # The names of fragments are made of their contents: all of an object is hashed before any of it goes.
        if sum(whole.sizes[item] for item in fragments) < INLINE_HASH_BYTES:
            sums = _checksums_of(fragments)
        else:
            try:
                sums = await anyio.to_thread.run_sync(_checksums_of, fragments, limiter=self._hashing)
            except BaseException:
                fragments.clear()
                raise
        keys: list[bytes] = []
        payloads: list[Sequence[Buffer]] = []
        checksums: list[int | None] = []
        ends: list[int] = []
        manifests: dict[int, Manifest] = {}
        for item in items:
            if item not in pieced:
                keys.append(whole.keys[item])
                payloads.append(whole.pieces[item])
                checksums.append(None)
            else:
                manifest = manifests[item] = Manifest(
                    object_bytes=whole.sizes[item],
                    fragment_bytes=min(whole.sizes[item], way.fragment_bytes),
                    digest=digest_of(sums[item]),
                )
                keys.extend(manifest.keys(whole.keys[item]))
                payloads.extend(fragments[item])
                checksums.extend(sums[item])
            ends.append(len(keys))
        stored = WriteOperation(namespace, tuple(keys), payloads)
        stored.checksums = checksums
        stored.way = way
        try:
            await (self._perform if is_first else self._perform_later_step)(stored, call)
        finally:
            fragments.clear()  # an error's traceback keeps what is named here
            payloads.clear()
        for item, run in _Round(list(items), ends, ()).runs(bytes(stored.statuses)):
            statuses[item] = _worst(run)
        complete = [item for item in manifests if statuses[item] == ErrorCode.OK]
        if not complete:
            return
        shown = WriteOperation(
            namespace,
            tuple(whole.keys[item] for item in complete),
            [manifests[item].encode() for item in complete],
        )
        shown.way = way
        await self._perform_later_step(shown, call)
        for item, status in zip(complete, shown.statuses, strict=True):
            statuses[item] = status

    # ------------------------------------------------------------ DELETE, CHECK

    async def delete(self, namespace: bytes, keys: tuple[bytes, ...], call: Call) -> bytes:
        """Remove objects. Once the keys are gone, nothing that goes wrong with the fragments matters."""
        way = await self._way_for(keys, call)
        manifests = {} if way.cuts_itself else (await self._look(namespace, keys, call, way)).manifests
        operation = VectorOperation(Delete, namespace, keys)
        await self._perform(operation, call)
        try:
            for each in _rounds(keys, manifests):
                await self._perform(VectorOperation(Delete, namespace, each.keys), call)
        except (LinkError, RequestError, RequestTimeout, Rerouted):
            pass  # they are cold from now on
        return bytes(operation.statuses)

    async def check(self, namespace: bytes, keys: tuple[bytes, ...], call: Call) -> bytes:
        """Verify objects; the worst that was found of a manifest and its fragments."""
        while True:
            way = await self._way_for(keys, call)
            operation = VectorOperation(Check, namespace, keys)
            operation.way = way.for_any_boot()
            try:
                await self._perform(operation, call)
                if not way.cuts_itself:
                    await self._check_fragments(operation, call, way)
                return bytes(operation.statuses)
            except GatewayChanged:
                continue

    async def _check_fragments(self, operation: VectorOperation, call: Call, way: Way) -> None:
        namespace, keys, statuses = operation.namespace, operation.keys, operation.statuses
        whole = [item for item, status in enumerate(statuses) if status == ErrorCode.OK]
        found = await self._look(namespace, tuple(keys[item] for item in whole), call, way)
        for at, item in enumerate(whole):
            statuses[item] = found.statuses[at]
        manifests = {whole[at]: manifest for at, manifest in found.manifests.items()}
        for each in _rounds(keys, manifests):
            asked = VectorOperation(Check, namespace, each.keys)
            await self._perform_later_step(asked, call)
            for item, run in each.runs(bytes(asked.statuses)):
                statuses[item] = _worst(run)

    # ------------------------------------------------------------ common

    async def _way_for(self, keys: tuple[bytes, ...], call: Call) -> Way:
        return await self._find_way(call) if keys else _NOBODY

    async def _perform_later_step(self, operation: SimpleOperation | WriteOperation, call: Call) -> None:
        try:
            await self._perform(operation, call)
        except RequestError as exc:
            operation.statuses[:] = bytes([exc.code]) * len(operation.statuses)

    def _note(self, operation: ReadOperation) -> None:
        if operation.damaged:
            self._note_damage(operation.namespace, [operation.keys[item] for item in operation.damaged])


def _checksums_of(fragments: Mapping[int, Sequence[Sequence[memoryview]]]) -> dict[int, list[int]]:
    return {item: [checksum_of(pieces) for pieces in parts] for item, parts in fragments.items()}


def _may_need_cutting(sizes: Sequence[int], way: Way) -> bool:
    if MANIFEST_BYTES in sizes:
        return True
    return not way.cuts_itself and max(sizes, default=0) > way.fragment_bytes


def _manifests(
    operation: ReadOperation, memory: Sequence[Buffer], statuses: bytearray, way: Way
) -> dict[int, Manifest]:
    """Which items of a READ into `memory` are manifests. The length of each is 0 from here on; one that
    nobody can read gets another status than OK and is not returned."""
    found: dict[int, Manifest] = {}
    for item, length in enumerate(operation.lengths):
        if length != MANIFEST_BYTES:
            continue
        try:
            manifest = Manifest.decode(bytes(memoryview(memory[item]).cast("B")[:MANIFEST_BYTES]))
        except UnsoundManifest:
            statuses[item] = ErrorCode.CORRUPT
        else:
            if manifest is None:
                continue
            if way.takes_fragments:
                found[item] = manifest
            else:
                statuses[item] = ErrorCode.NOT_FOUND  # no fragment fits this gateway
        operation.lengths[item] = 0
    return found


def _rounds(keys: Sequence[bytes], manifests: Mapping[int, Manifest]) -> Iterator[_Round]:
    """All fragments of `manifests`, in vectors that are not much longer than one object may ask for."""
    sizes = {item: manifest.count for item, manifest in manifests.items()}
    for items in cut(list(sizes), sizes.__getitem__, max_items=len(sizes), max_bytes=MAX_FRAGMENTS):
        names: list[bytes] = []
        ends = []
        for item in items:
            names.extend(manifests[item].keys(keys[item]))
            ends.append(len(names))
        yield _Round(list(items), ends, tuple(names))


def _worst(run: bytes) -> ErrorCode:
    """What an object is whose fragments are this. Damage is told before absence, and both before trouble:
    trouble may pass."""
    if not any(run):
        return ErrorCode.OK
    for code in (ErrorCode.CORRUPT, ErrorCode.NOT_FOUND):
        if code in run:
            return code
    return ErrorCode(next(status for status in run if status))
