"""A transport that breaks as it is told to, at an exact byte."""

from collections.abc import Awaitable, Callable, MutableSequence, Sequence

import anyio
import attrs

from adp_client.transport.base import FileRange, Half, Part, Progress, Transport, local_transport


@attrs.define(kw_only=True)
class Faults:
    """What goes wrong, counted in bytes from the connection's beginning. None: nothing of the kind.

    May be changed while the transport is in use.
    """

    cut_received_at: int | None = None  # this many bytes come in, then the stream ends
    cut_sent_at: int | None = None  # this many bytes go out, then the stream breaks
    stall_received_at: int | None = None  # this many bytes come in, then nothing, not even an end
    flip_received_at: int | None = None  # this byte comes in with one bit changed
    dribble: bool = False  # one byte at a time comes in


class FaultyTransport:
    """`inner`, with `faults`. Counts what passed: `received_bytes`, `sent_bytes`."""

    def __init__(self, inner: Transport, faults: Faults) -> None:
        self._inner = inner
        self.faults = faults
        self.received_bytes = 0
        self.sent_bytes = 0
        self._aborted = anyio.Event()

    async def receive_some(self, buffers: Sequence[memoryview]) -> int:
        """See Transport."""
        return await self._receive(buffers, self._inner.receive_some)

    async def _receive(
        self, buffers: Sequence[memoryview], receive: Callable[[Sequence[memoryview]], Awaitable[int]]
    ) -> int:
        room = 1 if self.faults.dribble else sum(view.nbytes for view in buffers)
        for cut in (self.faults.cut_received_at, self.faults.stall_received_at):
            if cut is not None:
                room = min(room, cut - self.received_bytes)
        if room <= 0:
            if self.faults.stall_received_at is not None:
                await self._aborted.wait()
            self.abort()
            return 0
        count = await receive(_prefix(buffers, room))
        flip = self.faults.flip_received_at
        if flip is not None and self.received_bytes <= flip < self.received_bytes + count:
            _flip(buffers, flip - self.received_bytes)
        self.received_bytes += count
        return count

    async def receive_exactly(self, buffers: Sequence[memoryview], progress: Progress | None = None) -> None:
        """See Transport."""
        views = [view.cast("B") for view in buffers if view.nbytes]
        has_moved = False
        try:
            while views:
                count = await self.receive_some(views)
                if not count:
                    raise EOFError("the stream ended early")
                has_moved = True
                views = _suffix(views, count)
                if progress is not None:
                    progress(count)
        except BaseException:
            if has_moved:
                self.abort()
            raise

    async def send(self, parts: Sequence[Part]) -> None:
        """See Transport."""
        cut = self.faults.cut_sent_at
        total = sum(
            part.length if isinstance(part, FileRange) else len(memoryview(part).cast("B")) for part in parts
        )
        if cut is None or self.sent_bytes + total <= cut:
            self.sent_bytes += total
            await self._inner.send(parts)
            return
        views = [memoryview(part).cast("B") for part in parts if not isinstance(part, FileRange)]
        await self._inner.send(_prefix(views, max(0, cut - self.sent_bytes)))
        self.sent_bytes = cut
        self.abort()
        raise BrokenPipeError("cut while sending")

    async def send_file(self, fd: int, offset: int, length: int) -> None:
        """See Transport."""
        await self.send([FileRange(fd, offset, length)])

    @property
    def carries_descriptors(self) -> bool:
        """See LocalTransport."""
        return local_transport(self._inner) is not None

    async def send_with_descriptor(self, data: bytes, descriptor: int) -> None:
        """See LocalTransport. Cut in the middle, the descriptor has gone nowhere."""
        inner, cut = local_transport(self._inner), self.faults.cut_sent_at
        assert inner is not None
        if cut is not None and self.sent_bytes + len(data) > cut:
            await self.send([data])
        await inner.send_with_descriptor(data, descriptor)
        self.sent_bytes += len(data)

    async def receive_with_descriptors(
        self, buffers: Sequence[memoryview], descriptors: MutableSequence[int | None]
    ) -> int:
        """See LocalTransport."""
        inner = local_transport(self._inner)
        assert inner is not None
        return await self._receive(buffers, lambda views: inner.receive_with_descriptors(views, descriptors))

    def abort_only(self, half: Half) -> None:
        """See LocalTransport."""
        inner = local_transport(self._inner)
        assert inner is not None
        inner.abort_only(half)

    async def wait_peer_closed(self) -> None:
        """See LocalTransport. A stalled stream says nothing, not even its end."""
        inner = local_transport(self._inner)
        assert inner is not None
        if self.faults.stall_received_at is not None:
            await anyio.sleep_forever()
        await inner.wait_peer_closed()

    def abort(self) -> None:
        """See Transport."""
        self._aborted.set()
        self._inner.abort()

    async def aclose(self) -> None:
        """See Transport."""
        self.abort()
        await self._inner.aclose()


def _prefix(views: Sequence[memoryview], count: int) -> list[memoryview]:
    found = []
    for view in views:
        flat = view.cast("B")[:count]
        if len(flat):
            found.append(flat)
        count -= len(flat)
    return found


def _suffix(views: Sequence[memoryview], count: int) -> list[memoryview]:
    found = []
    for view in views:
        rest = view[count:]
        count = max(0, count - len(view))
        if len(rest):
            found.append(rest)
    return found


def _flip(views: Sequence[memoryview], at: int) -> None:
    for view in views:
        if at < view.nbytes:
            view.cast("B")[at] ^= 1
            return
        at -= view.nbytes
