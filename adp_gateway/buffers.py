"""Memory for objects on their way in: one arena of fixed size, shared by all connections and reused.

A connection that asks for more than there is waits, and only that connection: it stops reading, and its
client feels it as back-pressure. Who waits longest is served first; who already holds a part of an object
goes before, because finishing it is what frees memory. Nobody must wait for ever (two could wait for each
other, and all for a client that has gone silent), so `take` can be given up on at any time, and the session
does so soon. Each time that somebody has to wait, all who may be holding memory are told (`on_shortage`).

Pages of the arena are touched when they are first used and stay warm: low addresses are taken first.
"""

import bisect
import mmap
from collections import deque
from collections.abc import Callable, Sequence

import anyio
import anyio.lowlevel
import attrs

ALIGN_BYTES = 4096  # what direct I/O asks for
SMALL_BYTES = 16384  # objects below this are packed closer
SMALL_ALIGN_BYTES = 64


def lay_out(lengths: Sequence[int]) -> tuple[list[int], int]:
    """Where each object of a block starts, and the size of the block."""
    starts = []
    at = 0
    for length in lengths:
        align = ALIGN_BYTES if length >= SMALL_BYTES else SMALL_ALIGN_BYTES
        at = -(-at // align) * align
        starts.append(at)
        at += length
    return starts, -(-at // ALIGN_BYTES) * ALIGN_BYTES


@attrs.define(eq=False)
class Block:
    """`length` bytes of an arena, until `release`."""

    _arena: "Arena"
    start: int
    length: int

    def view(self, offset: int, length: int) -> memoryview:
        """Bytes `[offset, offset + length)` of the block."""
        assert 0 <= offset <= offset + length <= self.length
        return self._arena.memory[self.start + offset : self.start + offset + length]

    def split(self, length: int) -> "Block":
        """Keep the first `length` bytes, and return the rest as a block of its own."""
        assert 0 <= length <= self.length
        rest = Block(self._arena, self.start + length, self.length - length)
        self.length = length
        return rest

    def release(self) -> None:
        """Give the memory back; idempotent. Nobody may use a view of it any more."""
        if self.length:
            length, self.length = self.length, 0
            self._arena._give_back(self.start, length)


@attrs.define(eq=False)
class _Waiter:
    length: int
    granted: anyio.Event = attrs.field(factory=anyio.Event)
    block: Block | None = None


class Arena:
    """`size_bytes` of memory. First fit, lowest address first; waiters in order."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = -(-size_bytes // ALIGN_BYTES) * ALIGN_BYTES
        mapping = mmap.mmap(-1, self.size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(mapping)
        self.used_bytes = 0
        self._free = [(0, self.size_bytes)]  # (start, end), sorted, never touching each other
        self._waiting: deque[_Waiter] = deque()
        #: Called, in no order, when somebody begins to wait. They neither wait nor give memory back at once.
        self.on_shortage: set[Callable[[], None]] = set()

    @property
    def waiting(self) -> int:
        """How many are waiting for memory."""
        return len(self._waiting)

    def nothing(self) -> Block:
        """A block of no bytes."""
        return Block(self, 0, 0)

    def take_nowait(self, length: int) -> Block | None:
        """`length` bytes if they are free and nobody is waiting."""
        return None if self._waiting else self._carve(length)

    async def take(self, length: int, *, is_urgent: bool = False) -> Block:
        """`length` bytes in one piece, aligned; waits for them. `is_urgent` goes before all that wait.

        Cancellation: nothing has been taken. Raises ValueError for more than the arena has.
        """
        if length > self.size_bytes:
            raise ValueError(f"{length} bytes from an arena of {self.size_bytes}")
        await anyio.lowlevel.checkpoint_if_cancelled()
        block = self._carve(length) if is_urgent else self.take_nowait(length)
        if block is not None:
            await anyio.lowlevel.cancel_shielded_checkpoint()
            return block
        waiter = _Waiter(length)
        if is_urgent:
            self._waiting.appendleft(waiter)
        else:
            self._waiting.append(waiter)
        try:
            for tell in tuple(self.on_shortage):
                tell()
            await waiter.granted.wait()
        except BaseException:
            # The grant may have come in the very moment of the cancellation.
            if waiter.block is not None:
                waiter.block.release()
            else:
                self._waiting.remove(waiter)
                self._grant()
            raise
        assert waiter.block is not None
        return waiter.block

    def _carve(self, length: int) -> Block | None:
        room = -(-length // ALIGN_BYTES) * ALIGN_BYTES
        for at, (start, end) in enumerate(self._free):
            if end - start >= room:
                if end - start == room:
                    del self._free[at]
                else:
                    self._free[at] = (start + room, end)
                self.used_bytes += room
                return Block(self, start, room)
        return None

    def _give_back(self, start: int, length: int) -> None:
        self.used_bytes -= length
        end = start + length
        at = bisect.bisect(self._free, (start, end))
        if at < len(self._free) and self._free[at][0] == end:
            end = self._free.pop(at)[1]
        if at and self._free[at - 1][1] == start:
            at -= 1
            start = self._free.pop(at)[0]
        self._free.insert(at, (start, end))
        self._grant()

    def _grant(self) -> None:
        while self._waiting:
            block = self._carve(self._waiting[0].length)
            if block is None:
                return
            waiter = self._waiting.popleft()
            waiter.block = block
            waiter.granted.set()
