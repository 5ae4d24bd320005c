"""A device in RAM that remembers every command, so that a power cut can be played at each of them.

Files are memory files, so `fileno` works with `os.sendfile` as it does on the real device.
"""

import enum
import os
import threading
from collections.abc import Callable, Mapping, Sequence

import attrs

from adp_gateway.errors import DeviceFault, DeviceFull, StoreLocked

from .base import check_extents, padded_bytes, translated


class Kind(enum.Enum):
    """What a recorded command did."""

    CREATE = "create"
    REMOVE = "remove"
    SYNC_NAMES = "sync names"
    WRITE = "write"
    ALLOCATE = "allocate"
    TRUNCATE = "truncate"
    SYNC = "sync"
    READ = "read"


@attrs.frozen
class Command:
    """One command as it was executed. `position` is an offset, or a length for ALLOCATE and TRUNCATE."""

    kind: Kind
    name: str = ""
    position: int = 0
    data: bytes = b""
    length: int = 0


#: What stands in the rest of a unit.
FILLING = b"\xee"

#: Decides how much of an unsynced command a power cut leaves: bytes of a WRITE, zero or not for the others.
Survivor = Callable[[Command], int]


class MemoryDeviceFile:
    """A `DeviceFile` on a memory file of its device."""

    def __init__(self, device: "MemoryDevice", name: str, fd: int, *, has_extents: bool) -> None:
        self._device = device
        self._has_extents = has_extents
        self._name = name
        self._fd = os.dup(fd)

    @property
    def name(self) -> str:
        """Its name on the device."""
        return self._name

    def fileno(self) -> int:
        """The descriptor; -1 once closed."""
        return self._fd

    def size(self) -> int:
        """Length in bytes."""
        return os.fstat(self._open_fd()).st_size

    def read_into(self, target: memoryview, offset: int, *, is_kept: bool = False) -> int:
        """One read command."""
        self._device.execute(Command(Kind.READ, self._name, offset, length=target.nbytes))
        done = 0
        try:
            while more := os.preadv(self._open_fd(), (target[done:],), offset + done):
                done += more
        except OSError as error:
            raise translated(error, f"read {self._name}") from error
        return done

    def is_cached(self, offset: int, length: int) -> bool:
        """It has no cache: every read is a command."""
        return False

    def write(self, data: memoryview, offset: int) -> None:
        """One write command."""
        if self._has_extents:
            raise ValueError(f"{self._name} is a file of extents")
        self._write(bytes(data), offset)

    def write_extents(self, extents: Sequence[memoryview], offset: int) -> None:
        """One write command. A direct device fills up the last unit: nobody may count on what is there."""
        if not self._has_extents:
            raise ValueError(f"{self._name} is no file of extents")
        check_extents(extents, offset, self._device.max_command_bytes)
        data = bytearray()
        for extent in extents:
            data = data.ljust(padded_bytes(len(data)), FILLING)
            data += extent
        if self._device.is_direct:
            data = data.ljust(padded_bytes(len(data)), FILLING)
        self._write(bytes(data), offset)

    def _write(self, data: bytes, offset: int) -> None:
        self._device.execute(Command(Kind.WRITE, self._name, offset, data, len(data)))
        os.pwrite(self._open_fd(), data, offset)

    def allocate(self, length: int) -> None:
        """Make the file at least `length` long."""
        self._device.execute(Command(Kind.ALLOCATE, self._name, length))
        if self.size() < length:
            os.ftruncate(self._open_fd(), length)

    def truncate(self, length: int) -> None:
        """Set the length."""
        self._device.execute(Command(Kind.TRUNCATE, self._name, length))
        os.ftruncate(self._open_fd(), length)

    def sync(self) -> None:
        """From here on a power cut keeps what was written before."""
        self._device.execute(Command(Kind.SYNC, self._name))

    def close(self) -> None:
        """Close this handle; idempotent. The file stays on the device."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _open_fd(self) -> int:
        if self._fd < 0:
            raise DeviceFault(f"{self._name} is closed")
        return self._fd


class MemoryDevice:
    """A `Device` in RAM. Use as a context manager, or call `discard`, to free the memory files.

    `before` is called with each command, in the thread that issues it, before anything happens; what it
    raises is the device's answer. So tests make a device fail.
    """

    def __init__(
        self,
        *,
        max_command_bytes: int = 262144,
        capacity_bytes: int = 1 << 30,
        before: Callable[[Command], None] | None = None,
        is_direct: bool = False,
    ) -> None:
        self._max_command_bytes = max_command_bytes
        self._capacity_bytes = capacity_bytes
        self._is_direct = is_direct
        self._files: dict[str, int] = {}
        self._origin: dict[str, bytes] = {}  # what was there before the first command
        self._is_locked = False
        self._guard = threading.RLock()
        self.before = before
        self.commands: list[Command] = []

    @classmethod
    def holding(
        cls,
        files: Mapping[str, bytes],
        *,
        max_command_bytes: int = 262144,
        capacity_bytes: int = 1 << 30,
        is_direct: bool = False,
    ) -> "MemoryDevice":
        """A device on which these files have been for ever: no power cut takes them away."""
        device = cls(max_command_bytes=max_command_bytes, capacity_bytes=capacity_bytes, is_direct=is_direct)
        for name, contents in files.items():
            fd = device._files[name] = os.memfd_create(name)
            os.pwrite(fd, contents, 0)
            device._origin[name] = bytes(contents)
        return device

    @property
    def origin(self) -> Mapping[str, bytes]:
        """What was there before the first of `commands`."""
        return self._origin

    def contents(self) -> dict[str, bytes]:
        """Every file as it is now."""
        with self._guard:
            return {name: os.pread(fd, os.fstat(fd).st_size, 0) for name, fd in self._files.items()}

    def __enter__(self) -> "MemoryDevice":
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    def discard(self) -> None:
        """Free every file."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    @property
    def max_command_bytes(self) -> int:
        """The longest command."""
        return self._max_command_bytes

    @property
    def is_direct(self) -> bool:
        """Whether it keeps to whole units, as a device around the page cache does."""
        return self._is_direct

    def lock(self) -> None:
        """Become the only user until `close`."""
        if self._is_locked:
            raise StoreLocked("this memory device is in use")
        self._is_locked = True

    def names(self) -> list[str]:
        """Every file, sorted."""
        with self._guard:
            return sorted(self._files)

    def strangers(self) -> list[str]:
        """Nobody else can be here."""
        return []

    def open(self, name: str, *, has_extents: bool = False) -> MemoryDeviceFile:
        """Open an existing file."""
        with self._guard:
            if name not in self._files:
                raise DeviceFault(f"open {name}: no such file")
            return MemoryDeviceFile(self, name, self._files[name], has_extents=has_extents)

    def create(self, name: str, *, has_extents: bool = False) -> MemoryDeviceFile:
        """Make a new, empty file."""
        self.execute(Command(Kind.CREATE, name))
        with self._guard:
            if name in self._files:
                raise DeviceFault(f"open {name}: it exists")
            self._files[name] = os.memfd_create(name)
            return MemoryDeviceFile(self, name, self._files[name], has_extents=has_extents)

    def remove(self, name: str) -> None:
        """Remove a name, if there."""
        self.execute(Command(Kind.REMOVE, name))
        with self._guard:
            fd = self._files.pop(name, None)
            if fd is not None:
                os.close(fd)

    def sync_names(self) -> None:
        """From here on a power cut keeps the names as they are."""
        self.execute(Command(Kind.SYNC_NAMES))

    def free_bytes(self) -> int:
        """Capacity less the lengths of all files."""
        return self._capacity_bytes - self.used_bytes()

    def used_bytes(self) -> int:
        """The lengths of all files together."""
        with self._guard:
            return sum(os.fstat(fd).st_size for fd in self._files.values())

    def close(self) -> None:
        """Give the lock back."""
        self._is_locked = False

    def execute(self, command: Command) -> None:
        """Record a command that is about to happen, unless `before` objects.

        Raises:
            ValueError: it is longer than `max_command_bytes`.
            DeviceFull: it would exceed the capacity.
        """
        if command.length > self._max_command_bytes:
            raise ValueError(f"a command of {command.length} bytes, above {self._max_command_bytes}")
        if self.before is not None:
            self.before(command)
        with self._guard:
            if command.kind is Kind.ALLOCATE and command.position > self.free_bytes():
                raise DeviceFull(f"allocate {command.name}: no room for {command.position} bytes")
            self.commands.append(command)

    def after_power_cut(self, count: int, survivor: Survivor) -> "MemoryDevice":
        """The device as it may look when the power goes after the first `count` recorded commands.

        What was synced is there. Any other command is there as far as `survivor` says, in the order of issue.
        A file whose creation did not survive is not there, whatever was written to it.
        """
        commands = self.commands[:count]
        names_synced = max((i for i, c in enumerate(commands) if c.kind is Kind.SYNC_NAMES), default=-1)
        synced = {command.name: i for i, command in enumerate(commands) if command.kind is Kind.SYNC}
        files = {name: bytearray(contents) for name, contents in self._origin.items()}
        for i, command in enumerate(commands):
            of_names = command.kind in (Kind.CREATE, Kind.REMOVE)
            is_safe = i < (names_synced if of_names else synced.get(command.name, -1))
            kept = command.length or 1 if is_safe else survivor(command)
            if not kept:
                continue
            if command.kind is Kind.CREATE:
                files[command.name] = bytearray()
            elif command.kind is Kind.REMOVE:
                files.pop(command.name, None)
            elif command.name in files:
                apply(command, files[command.name], kept)
        return MemoryDevice.holding(
            {name: bytes(contents) for name, contents in files.items()},
            max_command_bytes=self._max_command_bytes,
            capacity_bytes=self._capacity_bytes,
            is_direct=self._is_direct,
        )


def apply(command: Command, contents: bytearray, kept: int) -> None:
    """Do to `contents` what a WRITE (its first `kept` bytes), ALLOCATE or TRUNCATE does to a file."""
    if command.kind is Kind.TRUNCATE:
        del contents[command.position :]
    if command.kind in (Kind.TRUNCATE, Kind.ALLOCATE):
        contents.extend(bytes(max(0, command.position - len(contents))))
    elif command.kind is Kind.WRITE:
        data = command.data[:kept]
        contents.extend(bytes(max(0, command.position + len(data) - len(contents))))
        contents[command.position : command.position + len(data)] = data
