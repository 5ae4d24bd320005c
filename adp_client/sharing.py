"""READ and WRITE whose objects lie in shared regions, and the registration of regions with a gateway.

A call decides anew in each epoch: READ_REGION or WRITE_REGION where the gateway knows all of its regions, the
ordinary READ or WRITE of the same memory where it does not. Regions are registered when they are first used.

What a READ_REGION has been asked to write to is the gateway's until it has answered, or until its end of the
connection is closed, which it does last of all; `epoch` waits for the one or the other.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import anyio
import anyio.to_thread
import xxhash
from typing_extensions import Buffer

from .batches import cut, group_by_width, max_batch_bytes, max_batch_items
from .operations import INLINE_HASH_BYTES, Operation, ReadOperation, WriteOperation
from .pending import Frame, Pending
from .protocol.constants import ErrorCode, Opcode
from .protocol.errors import RequestTimeout
from .protocol.messages import (
    Limits,
    ReadRegion,
    ReadRegionReply,
    RegionClose,
    RegionOpen,
    RegionSource,
    RegionTarget,
    Reply,
    WriteRegion,
)
from .regions import RegionSlice, SharedRegion

_TARGET_ROW_BYTES = 16
_SOURCE_ROW_BYTES = 24


def read_operation(
    namespace: bytes,
    keys: tuple[bytes, ...],
    buffers: Sequence[Buffer | RegionSlice],
    *,
    is_verified: bool,
) -> ReadOperation:
    """A READ into `buffers`; through their regions if all of them are slices."""
    if RegionSlice not in set(map(type, buffers)):
        return ReadOperation(namespace, keys, buffers, is_verified=is_verified)  # type: ignore[arg-type]
    slices = [buffer for buffer in buffers if isinstance(buffer, RegionSlice)]
    if len(slices) == len(buffers):
        return RegionRead(namespace, keys, slices, is_verified=is_verified)
    return ReadOperation(namespace, keys, [as_memory(buffer) for buffer in buffers], is_verified=is_verified)


def write_operation(
    namespace: bytes,
    keys: tuple[bytes, ...],
    payloads: Sequence[Buffer | RegionSlice | Sequence[Buffer | RegionSlice]],
) -> WriteOperation:
    """A WRITE of `payloads`; through their regions if each of them is one slice."""
    slices = [payload for payload in payloads if isinstance(payload, RegionSlice)]
    if slices and len(slices) == len(payloads):
        return RegionWrite(namespace, keys, slices)
    pieces: list[Buffer | Sequence[Buffer]] = []
    for payload in payloads:
        if isinstance(payload, (list, tuple)):
            pieces.append([as_memory(piece) for piece in payload])
        else:
            pieces.append(as_memory(payload))  # type: ignore[arg-type]
    return WriteOperation(namespace, keys, pieces)


def as_memory(buffer: Buffer | RegionSlice) -> Buffer:
    """The buffer itself, or the memory of a slice. Raises LocalProtocolError if that must not be used."""
    if not isinstance(buffer, RegionSlice):
        return buffer
    buffer.region.check_usable()
    return buffer.memory


class _Landed(NamedTuple):
    """An object that the gateway says is in place."""

    item: int
    length: int
    checksum: int


class RegionOperation(Protocol):
    """What both verbs on regions have: their regions, and the numbers that these have in the epoch asked."""

    regions: tuple[SharedRegion, ...]
    numbers: Mapping[SharedRegion, int] | None


class RegionRead(ReadOperation):
    """READ into slices of regions. `numbers` are what the epoch asked calls these; None: not shared there."""

    def __init__(
        self, namespace: bytes, keys: tuple[bytes, ...], slices: Sequence[RegionSlice], *, is_verified: bool
    ) -> None:
        memory = [as_memory(each) for each in slices]
        super().__init__(namespace, keys, memory, is_verified=is_verified)
        self.slices = slices
        self.regions = tuple(dict.fromkeys(each.region for each in slices))
        self.numbers: Mapping[SharedRegion, int] | None = None
        self._landed: list[_Landed] = []  # in place, and not looked at yet

    @property
    def hazard(self) -> str:
        """See Operation."""
        return _hazard(self.regions)

    def requests(self, limits: Limits) -> Iterator[Pending]:
        """See Operation."""
        numbers = self.numbers
        if numbers is None:
            yield from super().requests(limits)
            return
        largest = min(limits.max_object_bytes, limits.max_inflight_bytes)
        sizes = [min(each.length, largest) for each in self.slices]
        for group in group_by_width(self.keys, self.unsettled()):
            if not group:
                continue
            most = max_batch_items(limits, self._width(group, limits), _TARGET_ROW_BYTES)
            for items in cut(group, sizes.__getitem__, max_items=most, max_bytes=max_batch_bytes(limits)):
                targets = tuple(
                    RegionTarget(region=numbers[each.region], offset=each.offset, capacity=sizes[item])
                    for item, each in zip(items, self._slices_of(items), strict=True)
                )
                message = ReadRegion(namespace=self.namespace, keys=self._keys_of(items), targets=targets)
                yield Pending(
                    operation=self,
                    items=items,
                    frames=[Frame(message)],
                    cost_bytes=sum(target.capacity for target in targets),
                    written_regions=self.regions,
                )

    def _slices_of(self, items: Sequence[int]) -> list[RegionSlice]:
        return [self.slices[item] for item in items]

    def take(self, pending: Pending, reply: Reply) -> None:
        """See Operation."""
        assert isinstance(reply, ReadRegionReply)
        rows = reply.items
        columns = zip(rows.indices, rows.statuses, rows.lengths, rows.checksums, strict=True)
        for index, status, length, checksum in columns:
            item = pending.items[index]
            if status:
                self.statuses[item] = status
            else:
                self._landed.append(_Landed(item, length, checksum))
        self.notify()

    async def examine(self) -> None:
        """See Operation. Cancellation: waits until no thread looks at the memory."""
        landed, self._landed = self._landed, []
        if sum(each.length for each in landed) < INLINE_HASH_BYTES:
            self._settle_landed(landed)
        else:
            await anyio.to_thread.run_sync(self._settle_landed, landed)

    def _settle_landed(self, landed: Iterable[_Landed]) -> None:
        for item, length, checksum in landed:
            if self._is_verified and xxhash.xxh3_64_intdigest(self.views[item][:length]) != checksum:
                self.statuses[item] = ErrorCode.CORRUPT
                self.damaged.append(item)
            else:
                self.statuses[item] = ErrorCode.OK
                self.lengths[item] = length


class RegionWrite(WriteOperation):
    """WRITE from slices of regions. `numbers` are what the epoch asked calls these; None: not shared there.

    A gateway that reads on after the call was given up does no harm: what it stores is what it has hashed.
    """

    def __init__(self, namespace: bytes, keys: tuple[bytes, ...], slices: Sequence[RegionSlice]) -> None:
        super().__init__(namespace, keys, [as_memory(each) for each in slices])
        self.slices = slices
        self.regions = tuple(dict.fromkeys(each.region for each in slices))
        self.numbers: Mapping[SharedRegion, int] | None = None

    @property
    def hazard(self) -> str:
        """See Operation."""
        return _hazard(self.regions)

    def batches(self, limits: Limits) -> Iterator[Sequence[int]]:
        """See WriteOperation. The frame limit says nothing about bytes that are in no frame."""
        if self.numbers is None:
            yield from super().batches(limits)
            return
        for group in group_by_width(self.keys, self.unsettled()):
            if group:
                most = max_batch_items(limits, self._width(group, limits), _SOURCE_ROW_BYTES)
                yield from cut(
                    group, self.sizes.__getitem__, max_items=most, max_bytes=max_batch_bytes(limits)
                )

    def request(self, items: Sequence[int], limits: Limits) -> Pending:
        """See WriteOperation."""
        numbers = self.numbers
        if numbers is None:
            return super().request(items, limits)
        sources = tuple(self._source(item, numbers) for item in items)
        message = WriteRegion(namespace=self.namespace, keys=self._keys_of(items), sources=sources)
        cost_bytes = sum(source.length for source in sources)
        return Pending(operation=self, items=items, frames=[Frame(message)], cost_bytes=cost_bytes)

    def _source(self, item: int, numbers: Mapping[SharedRegion, int]) -> RegionSource:
        each, checksum = self.slices[item], self.checksums[item]
        assert checksum is not None
        return RegionSource(
            region=numbers[each.region], offset=each.offset, length=each.length, checksum=checksum
        )


def _hazard(regions: Iterable[SharedRegion]) -> str:
    if any(region.is_retired for region in regions):
        return "; its region is retired, since the gateway may still be writing to it"
    return ""


class _Registration(Operation):
    """REGION_OPEN, and what it has led to."""

    verb = Opcode.REGION_OPEN

    def __init__(self, region: SharedRegion, number: int, forget: Callable[[int], None]) -> None:
        super().__init__(b"", (), count=1)
        self.number = number
        self.is_closing = False
        self.settled = anyio.Event()
        self._forget = forget
        self._descriptor = os.dup(region.fileno())  # the region may be closed before it has been sent
        self._size_bytes = region.size_bytes

    @property
    def is_open(self) -> bool:
        """Whether the gateway has the region."""
        return self.statuses[0] == ErrorCode.OK

    def requests(self, limits: Limits) -> Iterator[Pending]:
        """See Operation."""
        message = RegionOpen(region=self.number, region_bytes=self._size_bytes)
        yield Pending(operation=self, items=range(1), frames=[Frame(message, descriptor=self._descriptor)])

    def take(self, pending: Pending, reply: Reply) -> None:
        """See Operation."""
        self.statuses[0] = ErrorCode.OK

    def notify(self) -> None:
        """See Operation. It has been answered, or never will be."""
        if not self.settled.is_set():
            os.close(self._descriptor)
            self.settled.set()
            if self.is_closing:
                self.close()

    def close(self) -> None:
        """Have the gateway forget the region, as soon as it has it."""
        self.is_closing = True
        if self.is_open:
            self._forget(self.number)


class _Farewell(Operation):
    """REGION_CLOSE. Nobody waits for the answer."""

    verb = Opcode.REGION_CLOSE

    def __init__(self, number: int) -> None:
        super().__init__(b"", (), count=1)
        self._number = number

    def requests(self, limits: Limits) -> Iterator[Pending]:
        """See Operation."""
        yield Pending(operation=self, items=range(1), frames=[Frame(RegionClose(region=self._number))])

    def take(self, pending: Pending, reply: Reply) -> None:
        """See Operation."""


class Registrations:
    """The regions that one epoch's gateway has been told of. `ask` sends a request, and always settles it."""

    def __init__(self, limits: Limits, ask: Callable[[Pending], None]) -> None:
        self._limits = limits
        self._ask = ask
        self._registered: dict[SharedRegion, _Registration] = {}
        self._count = 0
        self._is_over = False

    async def numbers(
        self, regions: Collection[SharedRegion], deadline: float
    ) -> Mapping[SharedRegion, int] | None:
        """What the gateway calls `regions`; None if it does not take all of them. Raises RequestTimeout."""
        if self._is_over or any(region.is_closed for region in regions):
            return None
        asked = {region: self._registration(region) for region in regions}
        for registration in asked.values():
            with anyio.CancelScope(deadline=deadline) as scope:
                await registration.settled.wait()
            if scope.cancelled_caught:
                raise RequestTimeout("no answer to REGION_OPEN in time")
        if all(registration.is_open and not region.is_closed for region, registration in asked.items()):
            return {region: registration.number for region, registration in asked.items()}
        return None

    def _registration(self, region: SharedRegion) -> _Registration:
        registration = self._registered.get(region)
        if registration is None:
            self._count += 1
            registration = self._registered[region] = _Registration(region, self._count, self._say_close)
            region.on_close.add(self._forget)
            for pending in registration.requests(self._limits):
                self._ask(pending)
        return registration

    def _forget(self, region: SharedRegion) -> None:
        """The region is being closed."""
        region.on_close.discard(self._forget)
        self._registered.pop(region).close()

    def _say_close(self, number: int) -> None:
        for pending in _Farewell(number).requests(self._limits):
            self._ask(pending)

    def end(self) -> None:
        """The epoch is over."""
        self._is_over = True
        for region in self._registered:
            region.on_close.discard(self._forget)
        self._registered.clear()
