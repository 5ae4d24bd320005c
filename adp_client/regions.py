"""Memory that a client shares with a gateway on the same host, so that objects need not cross the socket.

    with SharedRegion.create(64 << 20) as region:
        buffers = [region.slice(at * PAGE, PAGE) for at in range(64)]
        await client.read(namespace, keys, buffers)

Slices go wherever buffers go. Over a Unix socket, a gateway that can moves the bytes between its files and a
region; anywhere else slices are ordinary memory. Whether they were shared shows in nothing but the time it
takes.
"""

import fcntl
import mmap
import os
from collections.abc import Callable
from typing import Self

import attrs

from .protocol.errors import LocalProtocolError

_NAME = "adp-region"


class SharedRegion:
    """Anonymous memory of this process that a gateway can be given a handle of.

    Nothing is left behind when the process ends, however it ends. A region may be used with several clients,
    all in one thread; close it when no verb uses it.
    """

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        """Takes ownership of `descriptor`; see `create` and `from_descriptor`."""
        self._descriptor = descriptor
        mapping = mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED)
        self._memory: memoryview | None = memoryview(mapping)
        self._is_retired = False
        #: Told when the region closes: connections where it is registered.
        self.on_close: set[Callable[[SharedRegion], None]] = set()
        self.size_bytes = size_bytes

    @classmethod
    def create(cls, size_bytes: int) -> Self:
        """A new region. Its pages take memory when they are first used.

        Nobody can change its size, so no other process can make this one fail by cutting it off. Raises
        OSError if the system has no memory files, ValueError for a size below 1.
        """
        if size_bytes < 1:
            raise ValueError(f"a region of {size_bytes} bytes")
        descriptor = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, size_bytes)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            return cls(descriptor, size_bytes)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def from_descriptor(cls, descriptor: int, size_bytes: int) -> Self:
        """The first `size_bytes` of a memory file that somebody else made, by a descriptor to read and write.

        The descriptor stays the caller's. Who else has one must not cut the file off: whoever then touches
        `memory` is ended by the system (SIGBUS). Raises OSError or ValueError if it cannot be mapped.
        """
        own = os.dup(descriptor)
        try:
            return cls(own, size_bytes)
        except BaseException:
            os.close(own)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def memory(self) -> memoryview:
        """All of it. Raises LocalProtocolError once the region is closed."""
        if self._memory is None:
            raise LocalProtocolError("the region is closed")
        return self._memory

    @property
    def is_closed(self) -> bool:
        """Whether `close` has been called."""
        return self._descriptor < 0

    @property
    def is_retired(self) -> bool:
        """Whether a gateway may still be writing here: a READ was given up, and the gateway has not let go of
        the connection within `Timeouts.release_seconds`. The bytes may change at any time from now on, and no
        verb takes them any more. Close the region, and make another."""
        return self._is_retired

    def slice(self, offset: int, length: int) -> "RegionSlice":
        """Bytes `[offset, offset + length)`, for a verb. Raises LocalProtocolError outside of the region."""
        return RegionSlice(self, offset, length)

    def fileno(self) -> int:
        """The descriptor; -1 once closed."""
        return self._descriptor

    def retire(self) -> None:
        """A gateway may be writing here for ever; see `is_retired`."""
        self._is_retired = True

    def check_usable(self) -> None:
        """Raise LocalProtocolError if no verb may use the region any more."""
        if self._is_retired:
            raise LocalProtocolError("the region is retired: a gateway may still be writing to it")
        if self.is_closed:
            raise LocalProtocolError("the region is closed")

    def close(self) -> None:
        """Give the memory back, as soon as nobody holds a view of it, and have gateways forget the region.
        Idempotent."""
        if self.is_closed:
            return
        os.close(self._descriptor)
        self._descriptor = -1
        for tell in tuple(self.on_close):
            tell(self)
        memory, self._memory = self._memory, None
        assert memory is not None
        memory.release()  # what was sliced off it keeps the mapping alive, which goes with the last of these


@attrs.frozen
class RegionSlice:
    """Bytes `[offset, offset + length)` of a region: a buffer for `Client.read` and `Client.write`."""

    region: SharedRegion
    offset: int
    length: int

    def __attrs_post_init__(self) -> None:
        self.region.check_usable()
        for name, value in (("offset", self.offset), ("length", self.length)):
            if not hasattr(value, "__index__"):
                raise LocalProtocolError(
                    f"the {name} of a slice is a whole number of bytes, not {type(value).__name__}: {value!r}"
                )
        if self.offset < 0 or self.length < 0 or self.offset + self.length > self.region.size_bytes:
            raise LocalProtocolError(
                f"{self.length} bytes at {self.offset} of a region of {self.region.size_bytes}"
            )

    @property
    def memory(self) -> memoryview:
        """The bytes as ordinary memory."""
        return self.region.memory[self.offset : self.offset + self.length]
