"""The Transport contract inside one process: two ends, with a chosen capacity and chunking.

It honours the same promises as a socket, so a test that passes here says something about the real thing (one
conformance suite runs on both). `chunk_bytes=1` makes every receive a single byte.
"""

import os
from collections.abc import Sequence

import anyio
import anyio.lowlevel

from .base import FileRange, Part, Progress


class _Pipe:
    """One direction."""

    def __init__(self, capacity_bytes: int, chunk_bytes: int) -> None:
        self.held = bytearray()
        self.capacity_bytes = capacity_bytes
        self.chunk_bytes = chunk_bytes
        self.is_ended = False
        self._changed = anyio.Event()

    def tell(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def changed(self) -> None:
        await self._changed.wait()

    def end(self) -> None:
        self.is_ended = True
        self.tell()


class MemoryTransport:
    """One end. See Transport for what the methods promise."""

    def __init__(self, incoming: _Pipe, outgoing: _Pipe) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._receiving = anyio.ResourceGuard("receiving from")
        self._sending = anyio.ResourceGuard("sending to")
        self._is_aborted = False

    async def receive_some(self, buffers: Sequence[memoryview]) -> int:
        """See Transport."""
        with self._receiving:
            await anyio.lowlevel.checkpoint()
            return await self._receive([view.cast("B") for view in buffers if view.nbytes])

    async def _receive(self, views: list[memoryview]) -> int:
        pipe = self._incoming
        while not pipe.held:
            self._raise_if_aborted()
            if pipe.is_ended:
                return 0
            await pipe.changed()
        self._raise_if_aborted()
        total, limit = 0, min(len(pipe.held), pipe.chunk_bytes)
        for view in views:
            count = min(len(view), limit - total)
            view[:count] = pipe.held[total : total + count]
            total += count
            if total == limit:
                break
        del pipe.held[:total]
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

    def abort(self) -> None:
        """See Transport."""
        self._is_aborted = True
        self._incoming.end()
        self._outgoing.end()

    async def aclose(self) -> None:
        """See Transport."""
        self.abort()
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
