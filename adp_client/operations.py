"""A verb's call: its items, what is known about each, and the requests that ask for the rest.

An operation outlives connections. Whatever is not settled yet is cut into requests for the gateway that is
there now: by `requests(limits)`, or for a WRITE batch by batch, because each has to be hashed before it goes.
Replies are taken as they come, in parts and in any order. The task that made the call drives it (`client`);
the reader only notes results and wakes that task.
"""

import abc
import contextlib
import ctypes
import math
from collections.abc import Iterable, Iterator, Sequence
from operator import add, le
from typing import TYPE_CHECKING

import anyio
import xxhash
from typing_extensions import Buffer

from .batches import cut, group_by_width, max_batch_bytes, max_batch_items
from .fragments import Way
from .landing import Landing
from .leases import Grant, Lease
from .pending import Frame, Pending
from .protocol.constants import ErrorCode, Feature, Opcode
from .protocol.errors import LocalProtocolError
from .protocol.messages import (
    Check,
    Delete,
    Exist,
    ExistReply,
    Fence,
    Limits,
    Ping,
    Read,
    ReadItems,
    Reply,
    StatusReply,
    Write,
    WriteItem,
)

if TYPE_CHECKING:
    from .epoch import Epoch

UNSETTLED = 255
INLINE_HASH_BYTES = 64 << 10  # less than this is hashed on the loop: a thread hop costs more
_READ_ROW_BYTES = 4
_WRITE_ROW_BYTES = 24
_EMPTY = xxhash.xxh3_64_intdigest(b"")


class GatewayChanged(Exception):
    """The gateway that is there now is not the one that an operation was planned for. Never seen by users."""


class Rerouted(Exception):
    """The gateway's workers are not those that a call was cut for: cut it anew. Never seen by users."""


class Operation:
    """Common to all verbs. `statuses` holds an ErrorCode for each item, or UNSETTLED.

    `way`, if there is one, is how objects are stored at the gateway that the operation was planned for.
    """

    verb: Opcode
    way: Way | None = None

    def __init__(self, namespace: bytes, keys: tuple[bytes, ...], *, count: int | None = None) -> None:
        self.namespace = namespace
        self.keys = keys
        self.statuses = bytearray([UNSETTLED]) * (len(keys) if count is None else count)
        self.pending_count = 0
        self.is_abandoned = False
        self._changed = anyio.Event()

    def notify(self) -> None:
        """Wake the task that drives this operation."""
        self._changed.set()

    async def changed(self) -> None:
        """Wait for the next `notify`. Told once for any number of them."""
        await self._changed.wait()
        self._changed = anyio.Event()

    def unsettled(self) -> Sequence[int]:
        """Items about which nothing is known yet."""
        count = len(self.statuses)
        if self.statuses.count(UNSETTLED) == count:
            return range(count)
        return [item for item in range(count) if self.statuses[item] == UNSETTLED]

    def begin(self, epoch: "Epoch") -> None:
        """What is not settled will be asked in this epoch."""

    def take(self, pending: Pending, reply: Reply) -> None:
        """Note what one frame of a reply says."""
        if isinstance(reply, (StatusReply, ExistReply)):
            items, first = pending.items, reply.first
            if isinstance(items, range):
                start = items.start + first
                self.statuses[start : start + len(reply.statuses)] = reply.statuses
            else:
                for position, status in enumerate(reply.statuses, first):
                    self.statuses[items[position]] = status

    async def examine(self) -> None:
        """Look at what has come, where nobody has done so yet."""

    @property
    def hazard(self) -> str:
        """Why nothing of this may be asked again, as the end of a sentence; empty if it may."""
        return ""

    def let_go(self) -> None:
        """The verb is over: keep no view of the caller's memory."""

    def refuse(self, pending: Pending) -> None:
        """The gateway said no to the whole of `pending`."""
        for item in pending.items:
            self.statuses[item] = pending.code

    def _batches(self, limits: Limits) -> Iterator[tuple[Sequence[int], tuple[bytes, ...]]]:
        """For verbs without payload: runs of items and their keys."""
        for group in group_by_width(self.keys, self.unsettled()):
            if not group:
                continue
            most = max_batch_items(limits, self._width(group, limits), 0)
            for start in range(0, len(group), most):
                items = group[start : start + most]
                yield items, self._keys_of(items)

    def _keys_of(self, items: Sequence[int]) -> tuple[bytes, ...]:
        if isinstance(items, range):
            return self.keys[items.start : items.stop]
        return tuple(self.keys[item] for item in items)

    def _width(self, group: Sequence[int], limits: Limits) -> int:
        width = len(self.keys[group[0]])
        if width > limits.max_key_bytes:
            raise LocalProtocolError(f"a key of {width} bytes; the gateway takes {limits.max_key_bytes}")
        return width


class SimpleOperation(Operation, abc.ABC):
    """Any but a WRITE: its requests can all be made at once."""

    @abc.abstractmethod
    def requests(self, limits: Limits) -> Iterator[Pending]:
        """Requests for the unsettled items, within `limits`."""


class VectorOperation(SimpleOperation):
    """EXIST, DELETE or CHECK: keys in, statuses out."""

    def __init__(
        self, message: type[Exist | Delete | Check], namespace: bytes, keys: tuple[bytes, ...]
    ) -> None:
        super().__init__(namespace, keys)
        self.verb = {Exist: Opcode.EXIST, Delete: Opcode.DELETE, Check: Opcode.CHECK}[message]
        self._message = message

    def requests(self, limits: Limits) -> Iterator[Pending]:
        """See SimpleOperation."""
        for items, keys in self._batches(limits):
            message = self._message(namespace=self.namespace, keys=keys)
            yield Pending(operation=self, items=items, frames=[Frame(message)])


class LeasedExistOperation(VectorOperation):
    """EXIST with a lease. It keeps what it was granted until `take_lease`; `give_back` returns the rest.

    A lease ends with its connection: on another one, everything is asked again.
    """

    def __init__(self, namespace: bytes, keys: tuple[bytes, ...], lease_seconds: float) -> None:
        super().__init__(Exist, namespace, keys)
        self._lease_seconds = lease_seconds
        self.epoch: Epoch | None = None
        self._granted: list[Pending] = []

    def begin(self, epoch: "Epoch") -> None:
        """See Operation."""
        self.give_back()
        self.epoch = epoch
        self.statuses[:] = bytes([UNSETTLED]) * len(self.statuses)

    def requests(self, limits: Limits) -> Iterator[Pending]:
        """See Operation."""
        assert self.epoch is not None
        lease_ms = 0
        if Feature.LEASES in self.epoch.features:
            lease_ms = min(math.ceil(self._lease_seconds * 1000), limits.max_lease_ms)
        for items, keys in self._batches(limits):
            message = Exist(namespace=self.namespace, keys=keys, lease_ms=lease_ms)
            pending = Pending(operation=self, items=items, frames=[Frame(message)])
            self._granted.append(pending)
            yield pending

    @property
    def granted(self) -> list[Pending]:
        """The requests that were granted a lease."""
        return [pending for pending in self._granted if pending.lease_ids]

    @property
    def has_gap(self) -> bool:
        """Whether something is OK and not leased."""
        return any(
            self.statuses[item] == ErrorCode.OK
            for pending in self._granted
            if not pending.lease_ids
            for item in pending.items
        )

    def keep(self) -> None:
        """Somebody else has what was granted."""
        self._granted = []

    def give_back(self) -> None:
        """Release what was granted and not kept. What is still to be answered, the epoch gives back."""
        granted, self._granted = self.granted, []
        for pending in granted:
            if pending.outcome is not None and self.epoch is not None:
                self.epoch.release(pending.lease_ids)
                pending.lease_ids = set()


def take_lease(operations: Sequence[LeasedExistOperation]) -> Lease | None:
    """One lease on everything that is OK in any of them, which is the caller's from now on; None if there is
    none. All have run in one epoch."""
    granted = [pending for operation in operations for pending in operation.granted]
    epoch = operations[0].epoch
    if epoch is None or not granted or any(operation.has_gap for operation in operations):
        return None
    for operation in operations:
        operation.keep()
    return Lease(
        granted_seconds=min(pending.lease_ms for pending in granted) / 1000,
        expires_at=min(pending.sent_at + pending.lease_ms / 1000 for pending in granted),
        grants=(
            Grant(epoch, tuple(lease_id for pending in granted for lease_id in sorted(pending.lease_ids))),
        ),
    )


class ControlOperation(SimpleOperation):
    """FENCE or PING: one request, no items; its one status is OK once it has been answered."""

    def __init__(self, message: Fence | Ping) -> None:
        super().__init__(b"", (), count=1)
        self.verb = Opcode.FENCE if isinstance(message, Fence) else Opcode.PING
        self._message = message

    def requests(self, limits: Limits) -> Iterator[Pending]:
        """See SimpleOperation."""
        yield Pending(operation=self, items=range(1), frames=[Frame(self._message)])

    def take(self, pending: Pending, reply: Reply) -> None:
        """See Operation."""
        self.statuses[0] = ErrorCode.OK


class ReadOperation(SimpleOperation):
    """READ into the caller's memory. Objects whose checksum does not match are CORRUPT and `damaged`."""

    verb = Opcode.READ

    def __init__(
        self,
        namespace: bytes,
        keys: tuple[bytes, ...],
        buffers: Sequence[Buffer],
        *,
        is_verified: bool = True,
    ) -> None:
        super().__init__(namespace, keys)
        self.views = writable_views(buffers)
        try:
            check_apart(self.views)
        except LocalProtocolError:
            self.let_go()
            raise
        self.lengths = [0] * len(keys)
        self.checksums = [0] * len(keys)
        self.damaged: list[int] = []
        self._is_verified = is_verified
        self._hashers: dict[int, xxhash.xxh3_64] = {}  # of objects that are not whole yet

    def requests(self, limits: Limits) -> Iterator[Pending]:
        """See SimpleOperation. Memory beyond the largest object would only fill the window: not offered."""
        largest = min(limits.max_object_bytes, limits.max_inflight_bytes)
        sizes = list(map(len, self.views))
        if max(sizes, default=0) > largest:
            sizes = [min(size, largest) for size in sizes]
        for group in group_by_width(self.keys, self.unsettled()):
            if not group:
                continue
            most = max_batch_items(limits, self._width(group, limits), _READ_ROW_BYTES)
            for items in cut(group, sizes.__getitem__, max_items=most, max_bytes=max_batch_bytes(limits)):
                capacities = tuple(map(sizes.__getitem__, items))
                message = Read(namespace=self.namespace, keys=self._keys_of(items), capacities=capacities)
                yield Pending(
                    operation=self, items=items, frames=[Frame(message)], cost_bytes=sum(capacities)
                )

    def let_go(self) -> None:
        """See Operation."""
        self.views.clear()

    def landing(self, pending: Pending, rows: ReadItems) -> tuple[list[memoryview], Landing]:
        """Memory for each of `rows`, and what follows their bytes into it."""
        items = pending.items
        if rows.is_whole and rows.is_run and isinstance(items, range):
            first = items.start + rows.indices[0]
            targets = self.views[first : first + len(rows)]
            if list(map(len, targets)) != list(rows.lengths):
                targets = [view[:length] for view, length in zip(targets, rows.lengths, strict=True)]
        else:
            targets = [
                self.views[items[index]][offset : offset + length]
                for index, offset, length in zip(rows.indices, rows.offsets, rows.lengths, strict=True)
            ]
        filled = targets if all(rows.lengths) else [target for target in targets if len(target)]
        return targets, Landing(rows, items, filled, self._hashers, is_verified=self._is_verified)

    def landed(self, pending: Pending, landing: Landing) -> None:
        """The first `landing.count` of the rows with bytes are in place; perhaps no more of them will be."""
        rows, items = landing.rows, pending.items
        if rows.is_whole and rows.is_run and isinstance(items, range) and landing.count == len(rows):
            first = items.start + rows.indices[0]
            self.statuses[first : first + len(rows)] = bytes(len(rows))
            self.lengths[first : first + len(rows)] = rows.object_bytes
            self.checksums[first : first + len(rows)] = rows.checksums
        else:
            for row in landing.positions[: landing.count]:
                if rows.offsets[row] + rows.lengths[row] == rows.object_bytes[row]:
                    item = items[rows.indices[row]]
                    self.settle(item, ErrorCode.OK, rows.object_bytes[row])
                    self.checksums[item] = rows.checksums[row]
        for row in landing.damaged:
            item = items[rows.indices[row]]
            self.settle(item, ErrorCode.CORRUPT)
            self.damaged.append(item)

    def note(self, pending: Pending, rows: ReadItems) -> None:
        """The rows without bytes: misses, failures, and objects that are empty."""
        if all(rows.lengths):
            return
        for row in rows:
            if not row.length:
                is_damaged = self._is_verified and row.status is ErrorCode.OK and row.checksum != _EMPTY
                item = pending.items[row.index]
                self.settle(item, ErrorCode.CORRUPT if is_damaged else row.status)
                if is_damaged:
                    self.damaged.append(item)

    def settle(self, item: int, status: ErrorCode, length: int = 0) -> None:
        """The outcome of one item."""
        self.statuses[item] = status
        self.lengths[item] = length


class WriteOperation(Operation):
    """WRITE from the caller's memory; each object is one buffer or a list of them."""

    verb = Opcode.WRITE

    def __init__(
        self, namespace: bytes, keys: tuple[bytes, ...], payloads: Sequence[Buffer | Sequence[Buffer]]
    ) -> None:
        super().__init__(namespace, keys)
        self.pieces = [readable_views(payload) for payload in payloads]
        self.sizes = [sum(map(len, pieces)) for pieces in self.pieces]
        self.checksums: list[int | None] = [None] * len(keys)

    def let_go(self) -> None:
        """See Operation."""
        self.pieces.clear()

    def refuse_oversized(self, limits: Limits) -> None:
        """Objects that this gateway cannot hold are TOO_LARGE without asking."""
        largest = min(limits.max_object_bytes, limits.max_inflight_bytes)
        for item, size in enumerate(self.sizes):
            if size > largest and self.statuses[item] == UNSETTLED:
                self.statuses[item] = ErrorCode.TOO_LARGE

    def batches(self, limits: Limits) -> Iterator[Sequence[int]]:
        """Runs of items for one request each. An object above the frame limit gets its own request, whose
        frames all belong to it; every other request is one frame, so a cancelled call never leaves a
        request half said."""
        for group in group_by_width(self.keys, self.unsettled()):
            if not group:
                continue
            most = max_batch_items(limits, self._width(group, limits), _WRITE_ROW_BYTES)
            most_bytes = min(limits.max_payload_bytes, max_batch_bytes(limits))
            yield from cut(group, self.sizes.__getitem__, max_items=most, max_bytes=most_bytes)

    def unhashed_bytes(self, items: Iterable[int]) -> int:
        """How much `hash` would have to do."""
        return sum(self.sizes[item] for item in items if self.checksums[item] is None)

    def hash(self, items: Iterable[int]) -> None:
        """Make the checksums of `items`. Runs in any thread."""
        for item in items:
            if self.checksums[item] is None:
                digest = xxhash.xxh3_64()
                for piece in self.pieces[item]:
                    digest.update(piece)
                self.checksums[item] = digest.intdigest()

    def request(self, items: Sequence[int], limits: Limits) -> Pending:
        """The request for `items`, whose checksums are there."""
        total = sum(self.sizes[item] for item in items)
        if total <= limits.max_payload_bytes:
            frames = [self._frame(items)]
        else:
            frames = list(self._frames_of_one(items[0], limits.max_payload_bytes))
        return Pending(operation=self, items=items, frames=frames, cost_bytes=total)

    def _frame(self, items: Sequence[int]) -> Frame:
        rows = tuple(self._row(item, 0, self.sizes[item]) for item in items)
        message = Write(namespace=self.namespace, keys=self._keys_of(items), items=rows)
        return Frame(message, [piece for item in items for piece in self.pieces[item]])

    def _frames_of_one(self, item: int, max_payload_bytes: int) -> Iterator[Frame]:
        keys, size = (self.keys[item],), self.sizes[item]
        for offset in range(0, size, max_payload_bytes):
            length = min(max_payload_bytes, size - offset)
            message = Write(namespace=self.namespace, keys=keys, items=(self._row(item, offset, length),))
            yield Frame(message, slice_views(self.pieces[item], offset, length))

    def _row(self, item: int, offset: int, length: int) -> WriteItem:
        checksum = self.checksums[item]
        assert checksum is not None
        return WriteItem(object_bytes=self.sizes[item], offset=offset, length=length, checksum=checksum)


def writable_views(buffers: Sequence[Buffer]) -> list[memoryview]:
    """Each of `buffers` as bytes to fill. Raises LocalProtocolError if one cannot be."""
    with contextlib.suppress(TypeError, ValueError):
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        if not any(view.readonly for view in views):
            return views
        views.clear()  # the traceback of what is raised below keeps this frame
    return [writable_view(buffer) for buffer in buffers]  # one after the other: one will say what is wrong


def writable_view(buffer: Buffer) -> memoryview:
    """`buffer` as bytes to fill. Raises LocalProtocolError if it cannot be."""
    view = _view(buffer, "read into")
    if view.readonly:
        raise LocalProtocolError("memory to read into must be writable")
    return view


def readable_views(payload: Buffer | Sequence[Buffer]) -> list[memoryview]:
    """The pieces of one object as bytes, empty ones left out."""
    pieces: Sequence[Buffer] = payload if isinstance(payload, (list, tuple)) else [payload]  # type: ignore[list-item]
    views = [_view(piece, "write from") for piece in pieces]
    return [view for view in views if view.nbytes]


def _view(buffer: Buffer, use: str) -> memoryview:
    """`buffer` as bytes, whatever it was made of. Raises LocalProtocolError if that is not possible."""
    try:
        view = memoryview(buffer)
        if not view.c_contiguous:
            raise LocalProtocolError(f"memory to {use} must be contiguous")
        return view.cast("B")
    except (TypeError, ValueError) as exc:  # not a buffer; a released one; a format that Python cannot cast
        raise LocalProtocolError(f"cannot {use} {type(buffer).__name__}: {exc}") from None


def check_apart(views: Sequence[memoryview]) -> None:
    """Raise LocalProtocolError if two of `views`, all writable, share a byte: two objects would land there
    and both be called whole."""
    begins, lengths = _extents([view for view in views if view])
    if not all(map(le, map(add, begins, lengths), begins[1:])):
        raise LocalProtocolError("two buffers of one READ overlap")


def _extents(views: Sequence[memoryview]) -> tuple[list[int], list[int]]:
    """Addresses, ascending, and how many bytes there are at each. A function, so that no frame of an error
    has a view."""
    addresses = map(ctypes.addressof, map(ctypes.c_char.from_buffer, views))
    extents = sorted(zip(addresses, map(len, views), strict=True))
    return [begin for begin, _ in extents], [length for _, length in extents]


def slice_views(views: Sequence[memoryview], offset: int, length: int) -> list[memoryview]:
    """Bytes `[offset, offset + length)` of `views` laid end to end."""
    found = []
    for view in views:
        if offset >= len(view):
            offset -= len(view)
            continue
        piece = view[offset : offset + length]
        found.append(piece)
        length -= len(piece)
        offset = 0
        if not length:
            break
    return found
