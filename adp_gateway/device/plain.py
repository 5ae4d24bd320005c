"""An ordinary file, through the page cache."""

import errno
import os
from collections.abc import Sequence
from pathlib import Path

from adp_gateway.errors import DeviceFault

from .base import ALIGNMENT_BYTES, check_extents, translated
from .pagecache import is_cached

_FILLING = memoryview(bytes(ALIGNMENT_BYTES))


class PlainFile:
    """A `DeviceFile` on a descriptor. Raises OSError when it cannot be opened."""

    def __init__(self, path: Path, flags: int, max_command_bytes: int, *, has_extents: bool) -> None:
        self._has_extents = has_extents
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

    def _check_length(self, length: int) -> None:
        if length > self._max_command_bytes:
            raise ValueError(f"a command of {length} bytes, above {self._max_command_bytes}")

    def read_into(self, target: memoryview, offset: int, *, is_kept: bool = False) -> int:
        """One `preadv`, repeated only if the kernel stops short of both the end of file and of `target`."""
        wanted = target.nbytes
        self._check_length(wanted)
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

    def is_cached(self, offset: int, length: int) -> bool:
        """Whether all of it is in the page cache."""
        return is_cached(self._fd, offset, length)

    def write(self, data: memoryview, offset: int) -> None:
        """One `pwrite`, repeated after a short one."""
        if self._has_extents:
            raise ValueError(f"{self._name} is a file of extents")
        self._check_length(data.nbytes)
        try:
            self._write_from(data, offset)
        except OSError as error:
            raise translated(error, f"write {self._name}") from error

    def _write_from(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < data.nbytes:
            count = os.pwrite(self._fd, data[done:], offset + done)
            if not count:
                raise DeviceFault(f"write {self._name}: the device takes no more bytes")
            done += count

    def write_extents(self, extents: Sequence[memoryview], offset: int) -> None:
        """One `pwrite`, or one `pwritev` with what fills the units between them."""
        if not self._has_extents:
            raise ValueError(f"{self._name} is no file of extents")
        check_extents(extents, offset, self._max_command_bytes)
        try:
            if len(extents) == 1:
                self._write_from(extents[0], offset)
                return
            views = _filled(extents)
            total = sum(view.nbytes for view in views)
            done = os.pwritev(self._fd, views, offset)
            if done < total:
                self._write_from(memoryview(b"".join(views))[done:], offset + done)
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


def _filled(extents: Sequence[memoryview]) -> list[memoryview]:
    views: list[memoryview] = []
    for extent in extents:
        views.append(extent)
        if rest := extent.nbytes % ALIGNMENT_BYTES:
            views.append(_FILLING[rest:])
    return views
