"""A directory of ordinary files: logs through the page cache, extents around it where that is taken."""

import contextlib
import errno
import fcntl
import logging
import os
import stat
from pathlib import Path
from typing import Literal

from adp_gateway.errors import DeviceFault, StoreLocked

from .base import translated
from .direct import Bounce, DirectFile, why_not_direct
from .plain import PlainFile

logger = logging.getLogger(__name__)

LOCK_NAME = "lock"
LOST_AND_FOUND = "lost+found"  # a fresh file system has it, and is as good as an empty directory


class FileDevice:
    """A `Device` in one directory. The constructor makes the directory (mode 0700) if it is not there.

    `io`: "direct" moves extents around the page cache, "buffered" through it, "auto" is the first where the
    file system takes it.
    """

    def __init__(
        self,
        directory: Path,
        *,
        max_command_bytes: int,
        io: Literal["auto", "direct", "buffered"] = "auto",
    ) -> None:
        self._directory = directory
        self._io = io
        self._is_direct = False
        self._bounce = Bounce(max_command_bytes)
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

    @property
    def is_direct(self) -> bool:
        """Whether extents go around the page cache."""
        return self._is_direct

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
        try:
            self._choose_io()
        except BaseException:
            self.close()
            raise

    def _choose_io(self) -> None:
        """Ask the file system, by a try: what it says of itself is not always so. The lock's file is ours."""
        if self._io == "buffered":
            logger.info("buffered I/O in %s, as configured", self._directory)
            return
        reason = why_not_direct(self._directory / LOCK_NAME)
        self._is_direct = reason is None
        if reason is None:
            logger.info("direct I/O in %s", self._directory)
        elif self._io == "auto":
            logger.info("buffered I/O in %s: direct I/O is not taken (%s)", self._directory, reason)
        else:
            raise DeviceFault(f"direct I/O is not taken in {self._directory}: {reason}")

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

    def open(self, name: str, *, has_extents: bool = False) -> PlainFile:
        """Open an existing file."""
        return self._opened(name, 0, has_extents)

    def create(self, name: str, *, has_extents: bool = False) -> PlainFile:
        """Make a new file."""
        return self._opened(name, os.O_CREAT | os.O_EXCL, has_extents)

    def _opened(self, name: str, flags: int, has_extents: bool) -> PlainFile:
        path = self._directory / name
        try:
            if has_extents and self._is_direct:
                return DirectFile(path, flags, self._max_command_bytes, self._bounce)
            return PlainFile(path, flags, self._max_command_bytes, has_extents=has_extents)
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
