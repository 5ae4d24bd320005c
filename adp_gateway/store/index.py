"""Where each object is. Disposable: recovery rebuilds it from the journals.

Two dictionaries deep, namespace and then key, with 29 packed bytes per object instead of a Python object
with fields (docs/adr/0011 has the numbers), and nothing for the garbage collector to walk. Callers see
`Entry` only, so a denser table can take this one's place.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from .base import Status
from .format import UNIT_BYTES

_ENTRY = struct.Struct("<IIIQQB")  # segment, unit, length, checksum, sequence, used
_USED, _UNUSED = b"\1", b"\0"
_STATUS_OF_PRESENCE = bytes([Status.NOT_FOUND, Status.OK]).ljust(256, b"\0")


class Entry(NamedTuple):
    """One version of an object. `is_used`: it has been read since it was written to this place."""

    segment_id: int
    offset: int
    length: int
    checksum: int
    sequence: int
    is_used: bool = False

    @property
    def place(self) -> tuple[int, int]:
        """What tells this version from every other: no two objects ever share it while both exist."""
        return (self.segment_id, self.offset)


class Index:
    """namespace -> key -> Entry."""

    def __init__(self) -> None:
        self._spaces: dict[bytes, dict[bytes, bytes]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def exist(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        """OK or NOT_FOUND for each key; no Python code runs per key."""
        space = self._spaces.get(namespace)
        if space is None:
            return bytes([Status.NOT_FOUND]) * len(keys)
        return bytes(map(space.__contains__, keys)).translate(_STATUS_OF_PRESENCE)

    def get(self, namespace: bytes, key: bytes) -> Entry | None:
        """The current version."""
        space = self._spaces.get(namespace)
        packed = None if space is None else space.get(key)
        return None if packed is None else _unpacked(packed)

    def use(self, namespace: bytes, keys: Iterable[bytes]) -> Iterator[Entry | None]:
        """As `get` for each key, and remembers that the objects have been read."""
        space = self._spaces.get(namespace, {})
        for key in keys:
            packed = space.get(key)
            if packed is None:
                yield None
                continue
            if not packed[-1]:
                space[key] = packed[:-1] + _USED
            yield _unpacked(packed)

    def cool(self, namespace: bytes, key: bytes) -> None:
        """Forget that an object, which is there, has been read."""
        space = self._spaces[namespace]
        space[key] = space[key][:-1] + _UNUSED

    def put(self, namespace: bytes, key: bytes, entry: Entry) -> None:
        """Make `entry` the current version."""
        segment_id, offset, length, checksum, sequence, is_used = entry
        space = self._spaces.setdefault(namespace, {})
        before = len(space)
        space[key] = _ENTRY.pack(segment_id, offset // UNIT_BYTES, length, checksum, sequence, is_used)
        self._length += len(space) - before

    def pop(self, namespace: bytes, key: bytes) -> Entry | None:
        """Forget the object; what it was."""
        space = self._spaces.get(namespace)
        packed = None if space is None else space.pop(key, None)
        if space is None or packed is None:
            return None
        self._length -= 1
        if not space:
            del self._spaces[namespace]
        return _unpacked(packed)


def _unpacked(packed: bytes) -> Entry:
    segment_id, unit, length, checksum, sequence, is_used = _ENTRY.unpack(packed)
    return Entry(segment_id, unit * UNIT_BYTES, length, checksum, sequence, bool(is_used))
