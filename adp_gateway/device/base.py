"""The device contract: a flat set of named files, read and written in commands of bounded size.

Everything here blocks, so it runs in I/O threads; nothing here knows what the bytes mean. Operating system
errors end at this layer: callers see `DeviceFull` and `DeviceFault` only.

A device promises what POSIX does. A write may be lost or torn by a power cut until `sync` of that file has
returned; a created, or removed, name may be undone by one until `sync_names` has. A killed process loses
nothing that a call has returned for.
"""

import errno
from typing import Protocol

from adp_gateway.errors import DeviceFault, DeviceFull, StorageError

#: Extents start at multiples of this, so that direct I/O and block devices will take them.
ALIGNMENT_BYTES = 4096


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

    def read_into(self, target: memoryview, offset: int) -> int:
        """One read command. Returns the bytes read, fewer than asked for only at the end of the file.

        Raises:
            ValueError: `target` is longer than the device's `max_command_bytes`.
            DeviceFault: the device failed.
        """
        ...

    def write(self, data: memoryview, offset: int) -> None:
        """One write command, complete when it returns.

        Raises:
            ValueError: `data` is longer than the device's `max_command_bytes`.
            DeviceFull, DeviceFault: the device failed; any part of `data` may have been written.
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

    def lock(self) -> None:
        """Become the only user until `close`.

        Raises:
            StoreLocked: somebody else is.
        """
        ...

    def names(self) -> list[str]:
        """Every file, sorted."""
        ...

    def strangers(self) -> list[str]:
        """What else is there that is no file of a device, and tells that the place is somebody's; sorted."""
        ...

    def open(self, name: str) -> DeviceFile:
        """Open an existing file for reading and writing."""
        ...

    def create(self, name: str) -> DeviceFile:
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


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def translated(error: OSError, doing: str) -> StorageError:
    """The storage error for an operating system error; the caller chains it (`raise ... from error`)."""
    kind = DeviceFull if error.errno in _FULL else DeviceFault
    return kind(f"{doing}: {error.strerror or error}")
