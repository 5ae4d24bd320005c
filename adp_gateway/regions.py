"""Memory that clients share with the gateway (spec section 5.14): what is mapped, and who is inside.

A region is a file of its client, who can cut it off at any moment. A process that then looks at its mapping
dies of SIGBUS; a system call that is given the mapping answers EFAULT. So nothing of the gateway ever looks:
objects go in by `preadv` from the store's files into the mapping, and come out by `preadv` from the region's
file into memory of the gateway, where they are hashed and written from.

A client may reuse its memory as soon as its connection is over, so whoever owns a `Regions` calls `leave`
when no transfer is under way any more, and closes the socket only then.
"""

import contextlib
import fcntl
import mmap
import os
import resource
import stat
import sys
from collections import deque
from collections.abc import Iterable

import anyio
import anyio.to_thread
import attrs

from adp_client.protocol.constants import ErrorCode

MAX_REGIONS = 64  # of a connection; each takes two descriptors
MAX_REGION_BYTES = 1 << 40  # of a connection, all its regions together: address space, not memory

_DESCRIPTORS_PER_REGION = 2  # the file's, and the one that a mapping keeps


class RegionRefused(Exception):
    """There will be no such region. `code` is what the client is told, the text is for the log."""

    def __init__(self, text: str, code: ErrorCode = ErrorCode.REFUSED) -> None:
        super().__init__(text)
        self.code = code


def _half_of_the_descriptors() -> int:
    """As many regions as that is."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit // 2 // _DESCRIPTORS_PER_REGION


def is_within(offset: int, length: int, size_bytes: int) -> bool:
    """Whether `[offset, offset + length)` lies in `[0, size_bytes)`. Not modulo anything."""
    return offset + length <= size_bytes


@attrs.define
class RegionBudget:
    """How many regions all connections together may have: half of the process's descriptors, at most."""

    max_regions: int = attrs.field(factory=_half_of_the_descriptors)
    regions: int = attrs.field(default=0, init=False)


@attrs.define(eq=False)
class Region:
    """One region. `users` are requests that move its bytes now."""

    fd: int
    size_bytes: int
    _mapping: mmap.mmap
    _memory: memoryview
    users: int = 0
    is_closing: bool = False
    idle: anyio.Event = attrs.field(factory=anyio.Event)

    def target(self, offset: int, length: int) -> memoryview:
        """Memory for system calls. Release it before the region is left."""
        return self._memory[offset : offset + length]

    def enter(self) -> None:
        """One more request uses it."""
        self.users += 1

    def leave(self) -> None:
        """A request is done with it."""
        self.users -= 1
        if not self.users:
            self.idle.set()
            self.idle = anyio.Event()

    async def wait_idle(self) -> None:
        """Return when no request uses it."""
        while self.users:
            await self.idle.wait()

    def unmap(self) -> None:
        """Give everything back. Takes a while for a large one: call it in a thread."""
        self._memory.release()
        self._mapping.close()
        os.close(self.fd)


class Regions:
    """The regions of one connection, and descriptors that are to become some."""

    def __init__(self, budget: RegionBudget) -> None:
        self._budget = budget
        self._regions: dict[int, Region] = {}
        #: As they came in; each REGION_OPEN takes one. None: there was one, and the system could not give it.
        self.received: deque[int | None] = deque()
        self._kept: dict[int, int | None] = {}

    def keep(self, request_id: int) -> None:
        """A REGION_OPEN has come: the descriptor that came with it is that request's."""
        self._kept[request_id] = self.received.popleft()

    def get(self, number: int) -> Region | None:
        """The region of that number, if transfers may begin there."""
        region = self._regions.get(number)
        return None if region is None or region.is_closing else region

    def open(self, request_id: int, number: int, size_bytes: int) -> None:
        """Make region `number` of the descriptor kept for the request. Raises RegionRefused."""
        fd = self._kept.pop(request_id)
        if fd is None:
            raise RegionRefused("no descriptor left", ErrorCode.GATEWAY_FAULT)
        try:
            self._check(number, size_bytes, fd)
            self._regions[number] = _map(fd, size_bytes)
        except BaseException:
            os.close(fd)
            raise
        self._budget.regions += 1

    def _check(self, number: int, size_bytes: int, fd: int) -> None:
        if number in self._regions:
            raise RegionRefused(f"region {number} is there already")
        if not size_bytes:
            raise RegionRefused("a region of no bytes")
        if len(self._regions) >= MAX_REGIONS or self._budget.regions >= self._budget.max_regions:
            raise RegionRefused("too many regions")
        if size_bytes + sum(region.size_bytes for region in self._regions.values()) > MAX_REGION_BYTES:
            raise RegionRefused(f"more than {MAX_REGION_BYTES} bytes in regions")
        try:
            status = os.fstat(fd)
            mode = fcntl.fcntl(fd, fcntl.F_GETFL)
            fcntl.fcntl(fd, fcntl.F_GET_SEALS)  # which only files in memory have
        except OSError as exc:
            raise RegionRefused(f"not a file in memory: {exc.strerror}") from None
        if not stat.S_ISREG(status.st_mode) or mode & os.O_ACCMODE != os.O_RDWR:
            raise RegionRefused("not a file to read and write")
        if status.st_size < size_bytes:
            raise RegionRefused(f"{size_bytes} bytes of a file of {status.st_size}")

    async def close(self, number: int) -> ErrorCode:
        """Forget a region when nothing uses it; STALE_EPOCH if there is none."""
        region = self.get(number)
        if region is None:
            return ErrorCode.STALE_EPOCH
        region.is_closing = True
        await region.wait_idle()
        del self._regions[number]
        await self._unmap([region])
        return ErrorCode.OK

    async def leave(self) -> None:
        """The connection is over, and no transfer is under way: everything goes. Shielded."""
        for descriptor in (*self.received, *self._kept.values()):
            if descriptor is not None:
                os.close(descriptor)
        self.received.clear()
        self._kept.clear()
        regions = list(self._regions.values())
        self._regions.clear()
        await self._unmap(regions)

    async def _unmap(self, regions: Iterable[Region]) -> None:
        regions = list(regions)
        if not regions:
            return

        def unmap() -> None:
            for region in regions:
                region.unmap()

        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(unmap)
        self._budget.regions -= len(regions)


def _map(fd: int, size_bytes: int) -> Region:
    """Raises RegionRefused where it cannot be mapped: sealed against writing, for instance, or no room."""
    try:
        mapping = mmap.mmap(fd, size_bytes, flags=mmap.MAP_SHARED)
    except (OSError, ValueError, OverflowError) as exc:  # ValueError: shorter, by now, than it was
        raise RegionRefused(f"cannot be mapped: {exc}") from None
    if hasattr(mmap, "MADV_DONTFORK"):
        with contextlib.suppress(OSError):
            mapping.madvise(mmap.MADV_DONTFORK)  # a child would keep the memory of somebody else alive
    return Region(fd, size_bytes, mapping, memoryview(mapping))
