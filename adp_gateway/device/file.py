"""A directory of ordinary files, through the page cache."""

import contextlib
import errno
import fcntl
import os
import stat
from pathlib import Path

from adp_gateway.errors import DeviceFault, StoreLocked

from .base import translated

LOCK_NAME = "lock"
LOST_AND_FOUND = "lost+found"  # a fresh file system has it, and is as good as an empty directory


class FileDeviceFile:
    """A `DeviceFile` on a descriptor."""

    def __init__(self, path: Path, flags: int, max_command_bytes: int) -> None:
        self._fd = os.open(path, flags | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._name = path.name
        self._max_command_bytes = max_command_bytes

    @property
    def name(self) -> str:
        """Its name in the directory."""
        return self._name

    def fileno(self) -> int:
        """The descriptor; -1 once closed, which no system call accepts."""
        return self._fd

    def size(self) -> int:
        """Length in bytes."""
        try:
            return os.fstat(self._fd).st_size
        except OSError as error:
            raise translated(error, f"stat {self._name}") from error

    def read_into(self, target: memoryview, offset: int) -> int:
        """One `preadv`, repeated only if the kernel stops short of both the end of file and of `target`."""
        wanted = target.nbytes
        if wanted > self._max_command_bytes:
            raise ValueError(f"a command of {wanted} bytes, above {self._max_command_bytes}")
        try:
            done = os.preadv(self._fd, (target,), offset)
            while 0 < done < wanted:
                more = os.preadv(self._fd, (target[done:],), offset + done)
                if not more:
                    break
                done += more
        except OSError as error:
            raise translated(error, f"read {self._name}") from error
        return done

    def write(self, data: memoryview, offset: int) -> None:
        """One `pwrite`, repeated after a short one."""
        if data.nbytes > self._max_command_bytes:
            raise ValueError(f"a command of {data.nbytes} bytes, above {self._max_command_bytes}")
        try:
            done = os.pwrite(self._fd, data, offset)
            while done < data.nbytes:
                more = os.pwrite(self._fd, data[done:], offset + done)
                if not more:
                    raise DeviceFault(f"write {self._name}: the device takes no more bytes")
                done += more
        except OSError as error:
            raise translated(error, f"write {self._name}") from error

    def allocate(self, length: int) -> None:
        """`posix_fallocate`; where the file system cannot reserve, only the length is set."""
        try:
            os.posix_fallocate(self._fd, 0, length)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise translated(error, f"allocate {self._name}") from error
            if self.size() < length:
                self.truncate(length)

    def truncate(self, length: int) -> None:
        """`ftruncate`."""
        try:
            os.ftruncate(self._fd, length)
        except OSError as error:
            raise translated(error, f"truncate {self._name}") from error

    def sync(self) -> None:
        """`fdatasync`: the contents, and as much metadata as reading them back needs."""
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise translated(error, f"sync {self._name}") from error

    def close(self) -> None:
        """Close the descriptor; idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class FileDevice:
    """A `Device` in one directory. The constructor makes the directory (mode 0700) if it is not there."""

    def __init__(self, directory: Path, *, max_command_bytes: int) -> None:
        self._directory = directory
        self._max_command_bytes = max_command_bytes
        self._lock_fd = -1
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise translated(error, f"create {directory}") from error

    @property
    def max_command_bytes(self) -> int:
        """The longest command."""
        return self._max_command_bytes

    def lock(self) -> None:
        """`flock` on a file of its own: the kernel gives it back however this process ends."""
        try:
            fd = os.open(self._directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise translated(error, f"lock {self._directory}") from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(fd)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise StoreLocked(f"{self._directory} is in use by another gateway") from None
            raise translated(error, f"lock {self._directory}") from error
        self._lock_fd = fd

    def names(self) -> list[str]:
        """Every regular file of the directory but the lock, sorted."""
        return [entry.name for entry in self._entries() if entry.is_file() and entry.name != LOCK_NAME]

    def strangers(self) -> list[str]:
        """Directories and the like. Sockets are for a gateway to listen on."""
        return [
            entry.name
            for entry in self._entries()
            if not entry.is_file() and entry.name != LOST_AND_FOUND and not _is_socket(entry)
        ]

    def _entries(self) -> "list[os.DirEntry[str]]":
        try:
            with os.scandir(self._directory) as entries:
                return sorted(entries, key=lambda entry: entry.name)
        except OSError as error:
            raise translated(error, f"list {self._directory}") from error

    def open(self, name: str) -> FileDeviceFile:
        """Open an existing file."""
        return self._opened(name, 0)

    def create(self, name: str) -> FileDeviceFile:
        """Make a new file."""
        return self._opened(name, os.O_CREAT | os.O_EXCL)

    def _opened(self, name: str, flags: int) -> FileDeviceFile:
        try:
            return FileDeviceFile(self._directory / name, flags, self._max_command_bytes)
        except OSError as error:
            raise translated(error, f"open {name}") from error

    def remove(self, name: str) -> None:
        """Unlink, if there."""
        try:
            with contextlib.suppress(FileNotFoundError):
                (self._directory / name).unlink()
        except OSError as error:
            raise translated(error, f"remove {name}") from error

    def sync_names(self) -> None:
        """`fsync` of the directory."""
        try:
            fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            raise translated(error, f"sync {self._directory}") from error

    def free_bytes(self) -> int:
        """What the file system lets an ordinary user still take."""
        try:
            status = os.statvfs(self._directory)
        except OSError as error:
            raise translated(error, f"stat {self._directory}") from error
        return status.f_bavail * status.f_frsize

    def close(self) -> None:
        """Give the lock back; idempotent."""
        fd, self._lock_fd = self._lock_fd, -1
        if fd >= 0:
            os.close(fd)


def _is_socket(entry: "os.DirEntry[str]") -> bool:
    try:
        return stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode)
    except OSError:  # gone meanwhile
        return True
