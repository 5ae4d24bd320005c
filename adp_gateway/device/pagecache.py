"""What the page cache holds of a file, asked without reading anything: `cachestat(2)`, Linux 6.5 and later.

The one other question that the system answers, a read that must not wait (`RWF_NOWAIT`), starts to read what
it does not find, and so brings into the cache what was to stay out of it (docs/adr/0017).
"""

import ctypes
import mmap
import platform
import sys

_CACHESTAT = 451  # the same on every architecture but Alpha


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Found(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


# PyDLL keeps the interpreter's lock: the call takes a microsecond, getting the lock back may take longer.
_libc = (
    ctypes.PyDLL(None, use_errno=True) if sys.platform == "linux" and platform.machine() != "alpha" else None
)


def is_cached(fd: int, offset: int, length: int) -> bool:
    """Whether all of these bytes are in the page cache. False where the system does not say."""
    if _libc is None or not length:
        return False
    found = _Found()
    wanted = _Range(offset, length)
    if _libc.syscall(_CACHESTAT, fd, ctypes.byref(wanted), ctypes.byref(found), 0):
        return False
    pages = (offset + length - 1) // mmap.PAGESIZE - offset // mmap.PAGESIZE + 1
    return int(found.cached) == pages
