"""The Transport contract inside one process: two ends, with a chosen capacity and chunking.

It honours the same promises as a socket, so a test that passes here says something about the real thing (one
conformance suite runs on both). `chunk_bytes=1` makes every receive a single byte.
"""

import os
from collections import deque
from collections.abc import MutableSequence, Sequence

import anyio
import anyio.lowlevel

from .base import FileRange, Half, Part, Progress


class _Pipe:
    """One direction."""

    def __init__(self, capacity_bytes: int, chunk_bytes: int) -> None:
        self.held = bytearray()
        self.capacity_bytes = capacity_bytes
        self.chunk_bytes = chunk_bytes
        self.is_ended = False
        self.is_deaf = False  # nobody will receive any more
        self.received_bytes = 0
        self.descriptors: deque[tuple[int, int]] = deque()  # with which byte of the stream, and itself
        self._changed = anyio.Event()

    def tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def changed(self) -> None:
        await self._changed.wait()

    def end(self) -> None:
        self.is_ended = True
        self.tell()

    def take_descriptors(self) -> list[int]:
        """Those that came with what has been received."""
        taken: list[int] = []
        while self.descriptors and (self.is_deaf or self.descriptors[0][0] < self.received_bytes):
            taken.append(self.descriptors.popleft()[1])
        return taken

    def stop_listening(self) -> None:
        self.is_deaf = True
        for descriptor in self.take_descriptors():
            os.close(descriptor)


class MemoryTransport:
    """One end. See Transport for what the methods promise."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._receiving = anyio.ResourceGuard("receiving from")
        self._sending = anyio.ResourceGuard("sending to")
        self._is_aborted = False
        self._aborts: tuple[Half, ...] = (Half.RECEIVING, Half.SENDING)

    async def receive_some(self, buffers: Sequence[memoryview]) -> int:
        """See Transport."""
        with self._receiving:
            await anyio.lowlevel.checkpoint()
            return await self._receive([view.cast("B") for view in buffers if view.nbytes])

    async def _receive(
        self, views: list[memoryview], descriptors: MutableSequence[int | None] | None = None
    ) -> int:
        count = await self._receive_bytes(views)
        taken = self._incoming.take_descriptors()
        if descriptors is not None:
            descriptors.extend(taken)
            return count
        for descriptor in taken:
            os.close(descriptor)
        return count

    async def _receive_bytes(self, views: list[memoryview]) -> int:
        pipe = self._incoming
        while not pipe.held:
            self._raise_if_aborted()
            if pipe.is_ended:
                return 0
            await pipe.changed()
        self._raise_if_aborted()
        total, limit = 0, min(len(pipe.held), pipe.chunk_bytes)
        if len(pipe.descriptors) > 1:  # as with a socket: those of two messages do not come together
            limit = min(limit, pipe.descriptors[1][0] - pipe.received_bytes)
        for view in views:
            count = min(len(view), limit - total)
            view[:count] = pipe.held[total : total + count]
            total += count
            if total == limit:
                break
        del pipe.held[:total]
        pipe.received_bytes += total
        pipe.tell()
        return total

    async def receive_exactly(self, buffers: Sequence[memoryview], progress: Progress | None = None) -> None:
        """See Transport."""
        with self._receiving:
            await anyio.lowlevel.checkpoint()
            has_moved = False
            try:
                for view in [view.cast("B") for view in buffers if view.nbytes]:
                    at = 0
                    while at < len(view):
                        count = await self._receive([view[at:]])
                        if not count:
                            raise EOFError("the stream ended early")
                        has_moved = True
                        at += count
                        if progress is not None:
                            progress(count)
            except BaseException:
                if has_moved:
                    self.abort()
                raise

    async def send(self, parts: Sequence[Part]) -> None:
        """See Transport."""
        with self._sending:
            await anyio.lowlevel.checkpoint()
            pipe, has_moved = self._outgoing, False
            try:
                for part in parts:
                    view = _bytes_of(part)
                    while len(view):
                        self._raise_if_aborted()
                        if pipe.is_ended:
                            raise BrokenPipeError("the other end is closed")
                        room = pipe.capacity_bytes - len(pipe.held)
                        if room <= 0:
                            await pipe.changed()
                            continue
                        pipe.held += view[:room]
                        has_moved = True
                        pipe.tell()
                        view = view[room:]
            except BaseException:
                if has_moved:
                    self.abort()
                raise

    async def send_file(self, fd: int, offset: int, length: int) -> None:
        """See Transport."""
        await self.send([FileRange(fd, offset, length)])

    @property
    def carries_descriptors(self) -> bool:
        """See LocalTransport."""
        return True

    async def send_with_descriptor(self, data: bytes, descriptor: int) -> None:
        """See LocalTransport."""
        await anyio.lowlevel.checkpoint_if_cancelled()
        pipe = self._outgoing
        if not pipe.is_deaf:
            pipe.descriptors.append((pipe.received_bytes + len(pipe.held), os.dup(descriptor)))
        await self.send([data])

    async def receive_with_descriptors(
        self, buffers: Sequence[memoryview], descriptors: MutableSequence[int | None]
    ) -> int:
        """See LocalTransport."""
        with self._receiving:
            await anyio.lowlevel.checkpoint()
            return await self._receive([view.cast("B") for view in buffers if view.nbytes], descriptors)

    def abort_only(self, half: Half) -> None:
        """See LocalTransport."""
        self._aborts = (half,)

    async def wait_peer_closed(self) -> None:
        """See LocalTransport."""
        pipe = self._incoming
        await anyio.lowlevel.checkpoint()
        while not pipe.is_ended:
            pipe.received_bytes += len(pipe.held)
            pipe.held.clear()
            pipe.tell()
            await pipe.changed()

    def abort(self) -> None:
        """See Transport."""
        self._is_aborted = True
        for half, pipe in ((Half.RECEIVING, self._incoming), (Half.SENDING, self._outgoing)):
            if half in self._aborts:
                pipe.end()
            pipe.tell()

    async def aclose(self) -> None:
        """See Transport."""
        self._aborts = (Half.RECEIVING, Half.SENDING)
        self.abort()
        self._incoming.stop_listening()
        await anyio.lowlevel.checkpoint()

    def _raise_if_aborted(self) -> None:
        if self._is_aborted:
            raise ConnectionAbortedError("aborted by this side")


def _bytes_of(part: Part) -> memoryview:
    if not isinstance(part, FileRange):
        return memoryview(part).cast("B")
    data = os.pread(part.fd, part.length, part.offset)
    if len(data) < part.length:
        raise OSError("the file is shorter than the range to send")
    return memoryview(data)


def memory_pair(
    *, capacity_bytes: int = 1 << 20, chunk_bytes: int = 1 << 20
) -> tuple[MemoryTransport, MemoryTransport]:
    """Two connected ends. At most `capacity_bytes` are in flight each way, `chunk_bytes` per receive."""
    one, other = _Pipe(capacity_bytes, chunk_bytes), _Pipe(capacity_bytes, chunk_bytes)
    return MemoryTransport(one, other), MemoryTransport(other, one)
