"""The device contract: a flat set of named files, read and written in commands of bounded size.

Everything here blocks, so it runs in I/O threads; nothing here knows what the bytes mean. Operating system
errors end at this layer: callers see `DeviceFull` and `DeviceFault` only.

Files are of two kinds. A log is written anywhere, in any length. A file of extents is written from multiples
of `ALIGNMENT_BYTES` on, and a write may fill up its last unit with anything: so the device may go around the
page cache (`is_direct`), which takes whole aligned units only. Which it does changes speed and memory, never
bytes: both ways see what either has written, and may be mixed.

A device promises what POSIX does. A write may be lost or torn by a power cut until `sync` of that file has
returned; a created, or removed, name may be undone by one until `sync_names` has. A killed process loses
nothing that a call has returned for.
"""

import errno
from collections.abc import Sequence
from typing import Protocol

from adp_gateway.errors import DeviceFault, DeviceFull, MemoryGone, StorageError

#: Extents start at multiples of this, so that direct I/O and block devices will take them.
ALIGNMENT_BYTES = 4096
#: In one command. With what fills the units between them they stay below the system's IOV_MAX of 1024.
MAX_EXTENTS = 256


class DeviceFile(Protocol):
    """One open file. Positions are explicit: threads may share it."""

    @property
    def name(self) -> str:
        """Its name on the device."""
        ...

    def fileno(self) -> int:
        """A descriptor for `os.sendfile`; valid until `close`."""
        ...

    def size(self) -> int:
        """Length in bytes."""
        ...

    def read_into(self, target: memoryview, offset: int, *, is_kept: bool = False) -> int:
        """One read command. Returns the bytes read, fewer than asked for only at the end of the file.

        `is_kept`: somebody reads the same bytes next, by `fileno`: they are to be in the page cache.
        Otherwise a direct device leaves there what it finds there and brings nothing in. Nothing but system
        calls touches `target`.

        Raises:
            ValueError: `target` is longer than the device's `max_command_bytes`.
            DeviceFault: the device failed.
            MemoryGone: `target` is memory that somebody has taken away.
        """
        ...

    def is_cached(self, offset: int, length: int) -> bool:
        """Whether a read of this would not need the device. Answers at once; False if not known."""
        ...

    def write(self, data: memoryview, offset: int) -> None:
        """One write command, complete when it returns. Not for a file of extents.

        Raises:
            ValueError: `data` is longer than the device's `max_command_bytes`.
            DeviceFull, DeviceFault: the device failed; any part of `data` may have been written.
        """
        ...

    def write_extents(self, extents: Sequence[memoryview], offset: int) -> None:
        """One write command for a file of extents: each goes to the first whole unit behind the one before.

        Raises:
            ValueError: `offset` is not a multiple of `ALIGNMENT_BYTES`, there are more than `MAX_EXTENTS`, or
                they take more than the device's `max_command_bytes`.
            DeviceFull, DeviceFault: the device failed; any part of them may have been written.
        """
        ...

    def allocate(self, length: int) -> None:
        """Make the file at least `length` long and reserve room for it, so that writes below cannot run out.

        Raises:
            DeviceFull, DeviceFault: the device failed; the file may have grown.
        """
        ...

    def truncate(self, length: int) -> None:
        """Cut the file to `length` and give the room behind back."""
        ...

    def sync(self) -> None:
        """Return when every write that has returned before is on the medium (contents and length)."""
        ...

    def close(self) -> None:
        """Give the descriptor back; idempotent. Every later command is a `DeviceFault`."""
        ...


class Device(Protocol):
    """A flat set of named files."""

    @property
    def max_command_bytes(self) -> int:
        """The longest read or write command; a multiple of `ALIGNMENT_BYTES`."""
        ...

    @property
    def is_direct(self) -> bool:
        """Whether extents go around the page cache; known once the device is locked."""
        ...

    def lock(self) -> None:
        """Become the only user until `close`.

        Raises:
            StoreLocked: somebody else is.
            DeviceFault: the place cannot be used, or not in the way that was asked for.
        """
        ...

    def names(self) -> list[str]:
        """Every file, sorted."""
        ...

    def strangers(self) -> list[str]:
        """What else is there that is no file of a device, and tells that the place is somebody's; sorted."""
        ...

    def open(self, name: str, *, has_extents: bool = False) -> DeviceFile:
        """Open an existing file for reading and writing."""
        ...

    def create(self, name: str, *, has_extents: bool = False) -> DeviceFile:
        """Make a new, empty file. It is a `DeviceFault` if there is one of that name."""
        ...

    def remove(self, name: str) -> None:
        """Remove a name; the room comes back when the last descriptor is closed. Harmless if absent."""
        ...

    def sync_names(self) -> None:
        """Return when every create and remove that has returned before is on the medium."""
        ...

    def free_bytes(self) -> int:
        """Room that is left, for everybody."""
        ...

    def close(self) -> None:
        """Give the lock back. Files are closed by those who opened them."""
        ...


def padded_bytes(length: int) -> int:
    """`length` rounded up to whole units of `ALIGNMENT_BYTES`."""
    return -(-length // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def check_extents(extents: Sequence[memoryview], offset: int, max_command_bytes: int) -> None:
    """Raise the ValueError of `DeviceFile.write_extents`."""
    if offset % ALIGNMENT_BYTES:
        raise ValueError(f"extents at {offset}, which is no multiple of {ALIGNMENT_BYTES}")
    total = sum(padded_bytes(extent.nbytes) for extent in extents)
    if total > max_command_bytes or len(extents) > MAX_EXTENTS:
        raise ValueError(f"a command of {len(extents)} extents and {total} bytes, above {max_command_bytes}")


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def translated(error: OSError, doing: str) -> StorageError:
    """The storage error for an operating system error; the caller chains it (`raise ... from error`)."""
    if error.errno == errno.EFAULT:
        return MemoryGone(f"{doing}: the memory is gone")
    kind = DeviceFull if error.errno in _FULL else DeviceFault
    return kind(f"{doing}: {error.strerror or error}")
