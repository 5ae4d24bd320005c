"""Where the next bytes go: a scratch buffer for headers and bodies, the owner's memory for payloads.

The owner asks `views()`, receives into them (one `recvmsg_into` can fill them all) and says how much came. A
payload therefore lands where it is wanted; only what arrived together with its header is moved once.
"""

from collections.abc import Sequence

SCRATCH_BYTES = 65536
DISCARD_BYTES = 1 << 20
MAX_VIEWS = 512  # below every system's IOV_MAX


class ReceiveBuffer:
    """Scratch and targets of one connection."""

    def __init__(self) -> None:
        self._scratch = bytearray(SCRATCH_BYTES)
        self._start = 0
        self._end = 0
        self._targets: list[memoryview] = []
        self._next_target = 0
        self.left_bytes = 0  # of the targets
        self._discard: memoryview | None = None

    @property
    def is_empty(self) -> bool:
        """No received byte is waiting to be parsed, and no target is waiting for bytes."""
        return self._start == self._end and self.is_filled

    @property
    def is_filled(self) -> bool:
        """Every target that was set has all its bytes."""
        return self._next_target == len(self._targets)

    def views(self) -> list[memoryview]:
        """Memory for the next bytes, in order, at most MAX_VIEWS pieces."""
        if not self.is_filled:
            return self._targets[self._next_target : self._next_target + MAX_VIEWS]
        return [memoryview(self._scratch)[self._end :]]

    def received(self, count: int) -> None:
        """`count` bytes were put into `views()`."""
        if self.is_filled:
            self._end += count
            return
        self.left_bytes -= count
        while count:
            target = self._targets[self._next_target]
            if count < len(target):
                self._targets[self._next_target] = target[count:]
                return
            count -= len(target)
            self._next_target += 1

    @property
    def unparsed(self) -> memoryview:
        """What is in the scratch buffer."""
        return memoryview(self._scratch)[self._start : self._end]

    def peek(self, count: int) -> memoryview | None:
        """The next `count` bytes; None if they are not in yet, and then `views()` has room for them."""
        have = self._end - self._start
        if have >= count:
            return memoryview(self._scratch)[self._start : self._start + count]
        if self._start + count > len(self._scratch) or self._end == len(self._scratch):
            # Views of the old scratch may still be alive somewhere, so never resize it: start a new one.
            fresh = bytearray(max(SCRATCH_BYTES, count))
            fresh[:have] = memoryview(self._scratch)[self._start : self._end]
            self._scratch, self._start, self._end = fresh, 0, have
        return None

    def consume(self, count: int) -> None:
        """The next `count` bytes have been parsed."""
        self._start += count
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._scratch) > SCRATCH_BYTES:
                self._scratch = bytearray(SCRATCH_BYTES)

    def aim(self, targets: Sequence[memoryview | int]) -> None:
        """The next bytes go into `targets`; an int means that many bytes are thrown away."""
        views: list[memoryview] = []
        for target in targets:
            if not isinstance(target, int):
                if len(target):
                    views.append(target)
                continue
            if self._discard is None:
                self._discard = memoryview(bytearray(DISCARD_BYTES))
            whole, rest = divmod(target, DISCARD_BYTES)
            views.extend([self._discard] * whole)
            if rest:
                views.append(self._discard[:rest])
        self._targets, self._next_target = views, 0
        self.left_bytes = sum(map(len, views))
        while self._start < self._end and not self.is_filled:
            target = self._targets[self._next_target]
            count = min(len(target), self._end - self._start)
            target[:count] = memoryview(self._scratch)[self._start : self._start + count]
            self.received(count)
            self.consume(count)

    def drop_unparsed(self) -> None:
        """Nobody will parse what is in the scratch buffer."""
        self.consume(self._end - self._start)

    def drop_targets(self) -> None:
        """Forget the targets (they are filled, or the connection is over): no view of them is kept."""
        self._targets, self._next_target = [], 0
        self.left_bytes = 0
