"""Memory where objects wait between the network and the engine.

A region is one anonymous memory file cut into uniform slots. Another process of this host maps it by name
(`/proc/<pid>/fd/<n>`), so nothing is left behind in a file system when its owner is killed; the inode number
in the name makes sure that a recycled process id or descriptor is never taken for the region that was meant.
"""

import mmap
import os
from typing import Self

import attrs

from .errors import StagingUnreachable

SLOT_ALIGNMENT_BYTES = 4096


@attrs.frozen(kw_only=True)
class RegionName:
    """How a process finds a region: picklable, a few bytes."""

    path: str
    inode: int
    slots: int
    slot_bytes: int


class Region:
    """A mapped region: `slots` slots of `slot_bytes` each.

    Pages are only allocated when first written, so a generous region costs nothing until it is used.
    """

    def __init__(self, descriptor: int, name: RegionName) -> None:
        self.name = name
        self._descriptor = descriptor
        self._map = mmap.mmap(descriptor, name.slots * name.slot_bytes)
        self._view = memoryview(self._map)

    @classmethod
    def create(cls, *, slots: int, slot_bytes: int, label: str = "adp-staging") -> Self:
        """A new region of this process. `slot_bytes` must be a multiple of 4096.

        Raises OSError when the system has no memory files or the size is out of bounds.
        """
        if slots < 1 or slot_bytes < 1 or slot_bytes % SLOT_ALIGNMENT_BYTES:
            raise ValueError(f"no region of {slots} slots of {slot_bytes} bytes")
        descriptor = os.memfd_create(label, os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, slots * slot_bytes)
            name = RegionName(
                path=f"/proc/{os.getpid()}/fd/{descriptor}",
                inode=os.fstat(descriptor).st_ino,
                slots=slots,
                slot_bytes=slot_bytes,
            )
            return cls(descriptor, name)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def attach(cls, name: RegionName) -> Self:
        """Map another process's region. Raises StagingUnreachable if it is gone or is not the one named."""
        try:
            descriptor = os.open(name.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise StagingUnreachable(f"cannot open {name.path}: {error.strerror}") from error
        try:
            status = os.fstat(descriptor)
            if status.st_ino != name.inode or status.st_size != name.slots * name.slot_bytes:
                raise StagingUnreachable(f"{name.path} is another region by now")
            return cls(descriptor, name)
        except BaseException:
            os.close(descriptor)
            raise

    def slot(self, index: int, length: int | None = None) -> memoryview:
        """The first `length` bytes (all, if None) of slot `index`, writable, without a copy."""
        if not 0 <= index < self.name.slots:
            raise IndexError(f"slot {index} of {self.name.slots}")
        size = self.name.slot_bytes if length is None else length
        if not 0 <= size <= self.name.slot_bytes:
            raise IndexError(f"{size} bytes of a slot of {self.name.slot_bytes}")
        start = index * self.name.slot_bytes
        return self._view[start : start + size]

    @property
    def memory(self) -> memoryview:
        """All slots, one after the other."""
        return self._view

    def close(self) -> None:
        """Give the memory back as soon as nobody holds a view of it. Idempotent."""
        if self._descriptor < 0:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        # Views handed out keep the map alive; it is unmapped with the last of them.
        try:
            self._view.release()
            self._map.close()
        except BufferError:
            pass


def slot_bytes_for(object_bytes: int) -> int:
    """The slot size (bytes) for objects of up to `object_bytes`."""
    return -(-max(object_bytes, 1) // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


class SlotPool:
    """Which slots are free. Not thread safe: it belongs to one owner, or its owner locks."""

    def __init__(self, slots: int) -> None:
        # Last in, first out: a slot that was used before has its memory already.
        self._free = list(range(slots - 1, -1, -1))
        self.slots = slots

    @property
    def free(self) -> int:
        """How many slots are free."""
        return len(self._free)

    def take(self, count: int, *, keep: int = 0) -> tuple[int, ...] | None:
        """`count` free slots, or None (and nothing taken) if that would leave fewer than `keep` free."""
        if count > len(self._free) - keep:
            return None
        return tuple(self._free.pop() for _ in range(count))

    def give_back(self, slots: tuple[int, ...]) -> None:
        """Return slots that `take` handed out."""
        self._free.extend(slots)
