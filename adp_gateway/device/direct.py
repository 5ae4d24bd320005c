"""Around the page cache: O_DIRECT, which moves whole aligned units between the device and memory.

Extents are laid out for it, lengths and other people's memory are not. Payload goes straight from and to the
caller's memory wherever the system takes that; it is asked rather than second-guessed, because what it takes
differs by device and version: EINVAL is its answer to memory that will not do, given before anything moves.
What it does not take goes through a bounce buffer (writes) or through the page cache (reads: nothing but a
system call may touch a client's region). docs/adr/0017 has the measurements, and the kernel's rule by which
both ways see the same bytes.
"""

import errno
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from adp_gateway.errors import DeviceFault

from .base import ALIGNMENT_BYTES, check_extents, padded_bytes, translated
from .plain import PlainFile


class Bounce(threading.local):
    """One command's length of aligned memory for each thread that asks for it."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._view: memoryview | None = None

    @property
    def view(self) -> memoryview:
        """The calling thread's. Its pages take memory when they are first used."""
        if self._view is None:
            self._view = aligned_memory(self._length)
        return self._view


def aligned_memory(length: int) -> memoryview:
    """Memory of this process's own whose address direct I/O takes."""
    return memoryview(mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


class DirectFile(PlainFile):
    """A file of extents with a second descriptor, for O_DIRECT. Raises OSError when it cannot be opened."""

    def __init__(self, path: Path, flags: int, max_command_bytes: int, bounce: Bounce) -> None:
        super().__init__(path, flags, max_command_bytes, has_extents=True)
        self._bounce = bounce
        try:
            self._direct_fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
        except BaseException:
            super().close()
            raise

    def read_into(self, target: memoryview, offset: int, *, is_kept: bool = False) -> int:
        """From the page cache if all of it is there, or else around it; parts of units through it."""
        whole = target.nbytes - target.nbytes % ALIGNMENT_BYTES
        done = 0
        self._check_length(target.nbytes)
        if whole and not is_kept and not self.is_cached(offset, target.nbytes):
            done = self._read_around(target[:whole], offset)
        if done == target.nbytes:
            return done
        return done + super().read_into(target[done:], offset + done)

    def _read_around(self, target: memoryview, offset: int) -> int:
        done = 0
        try:
            while done < target.nbytes:
                count = os.preadv(self._direct_fd, (target[done:],), offset + done)
                if not count:
                    break
                done += count
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise translated(error, f"read {self.name}") from error
            # The memory is not aligned, or the last unit of the file is not a whole one.
        return done

    def write_extents(self, extents: Sequence[memoryview], offset: int) -> None:
        """One `pwritev` out of the caller's memory, or a copy of it."""
        check_extents(extents, offset, self._max_command_bytes)
        try:
            if not self._write_straight(extents, offset):
                self._write_copy(extents, offset)
        except OSError as error:
            raise translated(error, f"write {self.name}") from error

    def _write_straight(self, extents: Sequence[memoryview], offset: int) -> bool:
        """Whether everything has been written so. The last extent's part of a unit is copied, no more."""
        *others, last = extents
        if any(extent.nbytes % ALIGNMENT_BYTES for extent in others):
            return False
        rest = last.nbytes % ALIGNMENT_BYTES
        views = list(extents)
        if rest:
            page = self._bounce.view[:ALIGNMENT_BYTES]
            page[:rest] = last[-rest:]
            page[rest:] = bytes(ALIGNMENT_BYTES - rest)
            views[-1:] = [last[:-rest], page]
        try:
            return os.pwritev(self._direct_fd, views, offset) == sum(view.nbytes for view in views)
        except OSError as error:
            if error.errno == errno.EINVAL:
                return False
            raise

    def _write_copy(self, extents: Sequence[memoryview], offset: int) -> None:
        bounce = self._bounce.view
        end = 0
        for extent in extents:
            start, end = end, end + padded_bytes(extent.nbytes)
            bounce[start : start + extent.nbytes] = extent
            bounce[start + extent.nbytes : end] = bytes(end - start - extent.nbytes)
        done = 0
        while done < end:
            count = os.pwrite(self._direct_fd, bounce[done:end], offset + done)
            if count < ALIGNMENT_BYTES:
                raise DeviceFault(f"write {self.name}: the device takes no more bytes")
            done += count - count % ALIGNMENT_BYTES  # a unit that was cut short is written again, whole

    def close(self) -> None:
        """Close both descriptors; idempotent."""
        fd, self._direct_fd = self._direct_fd, -1
        if fd >= 0:
            os.close(fd)
        super().close()


def why_not_direct(path: Path) -> str | None:
    """Try it on the file at `path`, which may be overwritten and is empty afterwards. None: it works."""
    if not hasattr(os, "O_DIRECT"):
        return "this system has none"
    block = aligned_memory(2 * ALIGNMENT_BYTES)
    written, read = block[:ALIGNMENT_BYTES], block[ALIGNMENT_BYTES:]
    written[:] = os.urandom(ALIGNMENT_BYTES)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError as error:
        return error.strerror
    try:
        os.pwrite(fd, written, 0)
        os.preadv(fd, (read,), 0)
        return None if read == written else "what was written did not come back"
    except OSError as error:
        # A full disk says nothing about it: the file could be opened so.
        return None if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror
    finally:
        os.ftruncate(fd, 0)
        os.close(fd)
