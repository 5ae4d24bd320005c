"""Where each object is. Disposable: recovery rebuilds it from the journals.

One table for each length of keys (in practice one), with about 100 bytes an object and nothing for the
garbage collector to walk; namespaces are numbers there. docs/adr/0015 has the numbers, and what else was
measured. Callers see `Entry`, or whole columns of them where there are many.
"""

import secrets
from collections.abc import Iterator, Sequence
from itertools import compress
from typing import NamedTuple, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt

from .base import Status
from .table import ENTRY, MAX_USES, MULTIPLIERS, Entries, Rows, Table

assert (Status.OK, Status.NOT_FOUND) == (0, 1)  # so that "is it absent?" is the status

#: With fewer keys in a call, numpy's cost for each operation is more than Python's for each key.
FEW = 12


class Entry(NamedTuple):
    """One version of an object. `uses`: reads since it was written to this place, or since the turn of its
    segment last came, counted from 0 to 3."""

    segment_id: int
    offset: int
    length: int
    checksum: int
    sequence: int
    uses: int = 0

    @property
    def place(self) -> tuple[int, int]:
        """What tells this version from every other: no two objects ever share it while both exist."""
        return (self.segment_id, self.offset)

    @property
    def is_used(self) -> bool:
        """Whether it has been read since."""
        return self.uses > 0


assert Entry._fields == ENTRY.names


@attrs.frozen
class Group:
    """Current objects of one namespace in one segment, by offset. Only good until the index changes.

    `entries` has the fields of `Entry` as columns.
    """

    namespace: bytes
    entries: Entries
    _table: Table
    _rows: Rows

    @property
    def keys(self) -> list[bytes]:
        """Their keys; made anew each time."""
        return self._table.keys(self._rows)

    def entry(self, position: int) -> Entry:
        """One of them."""
        return Entry._make(self.entries.item(position))


#: The bytes of keys of one length, one after the other.
KeyMatrix: TypeAlias = npt.NDArray[np.uint8]


class Index:
    """(namespace, key) -> Entry. `secret`: numbers for the hash; drawn if None, as it must be where keys come
    from somebody else."""

    def __init__(self, secret: Sequence[int] | None = None) -> None:
        self._multipliers = secret or [secrets.randbits(64) for _ in range(MULTIPLIERS)]
        self._tables: dict[int, Table] = {}  # by length of keys
        self._ids: dict[bytes, int] = {}  # of namespaces
        self._namespaces: list[bytes] = [b""]  # by number
        self._counts: list[int] = [0]  # of objects, by number
        self._idle_ids: list[int] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    # Looking

    def exist(self, namespace: bytes, keys: Sequence[bytes]) -> bytes:
        """OK or NOT_FOUND for each key; no Python code runs per key."""
        namespace_id = self._ids.get(namespace)
        if namespace_id is None:
            return bytes([Status.NOT_FOUND]) * len(keys)
        if len(keys) < FEW:
            return bytes([not self._find_one(namespace_id, key)[1] for key in keys])
        is_absent = np.ones(len(keys), dtype=np.bool_)
        for _, rows, positions in self._find(namespace_id, keys):
            is_absent[positions] = rows == 0
        return is_absent.tobytes()

    def get(self, namespace: bytes, key: bytes) -> Entry | None:
        """The current version."""
        namespace_id = self._ids.get(namespace)
        if namespace_id is None:
            return None
        table, row = self._find_one(namespace_id, key)
        return None if table is None or not row else Entry._make(table.entry_of(row))

    def get_many(self, namespace: bytes, keys: Sequence[bytes]) -> list[Entry | None]:
        """The current version of each key."""
        return self._get_many(namespace, keys, is_use=False)

    def use(self, namespace: bytes, keys: Sequence[bytes]) -> list[Entry | None]:
        """As `get_many`, and counts a use of each object that is there. The entries are from before that."""
        return self._get_many(namespace, keys, is_use=True)

    def segment(self, segment_id: int) -> Iterator[Group]:
        """Every current object of a segment. Nothing may change before the iteration ends."""
        for table in self._tables.values():
            rows = table.members(segment_id)
            if not rows.size:
                continue
            namespace_ids = table.namespace_ids(rows)
            for namespace_id in _distinct(namespace_ids):
                own = rows[namespace_ids == namespace_id]
                yield Group(self._namespaces[namespace_id], table.entries(own), table, own)

    def tickets(self, namespace: bytes, keys: Sequence[bytes]) -> list[int]:
        """A number for the row of each object, which are all there; a row may be another's later."""
        namespace_id = self._ids[namespace]
        if len(keys) < FEW:
            return [len(key) << 32 | self._tables[len(key)].find_one(namespace_id, key) for key in keys]
        tickets = np.zeros(len(keys), dtype=np.uint64)
        for table, rows, positions in self._find(namespace_id, keys):
            tickets[positions] = rows | np.uint64(table.key_bytes << 32)
        found: list[int] = tickets.tolist()
        return found

    def named(self, tickets: Sequence[int], sequences: Sequence[int]) -> list[tuple[bytes, bytes] | None]:
        """Namespace and key of the object in each row; None if the version there is not that one any more."""
        numbers = np.array(tickets, dtype=np.uint64)
        rows = (numbers & np.uint64(0xFFFFFFFF)).astype(np.uint32)
        sizes = numbers >> np.uint64(32)
        wanted = np.array(sequences, dtype=np.uint64)
        found: list[tuple[bytes, bytes] | None] = [None] * len(rows)
        for size in set(sizes.tolist()):
            table = self._tables[size]
            positions = np.flatnonzero(sizes == size)
            positions = positions[table.has_versions(rows[positions], wanted[positions])]
            there = rows[positions]
            names = zip(table.namespace_ids(there).tolist(), table.keys(there), strict=True)
            for position, (namespace_id, key) in zip(positions.tolist(), names, strict=True):
                found[position] = (self._namespaces[namespace_id], key)
        return found

    # Changing

    def set_uses(self, namespace: bytes, key: bytes, uses: int) -> None:
        """Say how often an object, which is there, has been read: 0 to 3."""
        table, row = self._find_one(self._ids[namespace], key)
        if table is None or not row:
            raise KeyError(key)
        table.set_uses(row, uses)

    def cool_segment(self, segment_id: int) -> None:
        """Forget that the objects of a segment have been read."""
        for table in self._tables.values():
            table.set_uses(table.members(segment_id), 0)

    def put(self, namespace: bytes, key: bytes, entry: Entry) -> None:
        """Make `entry` the current version."""
        namespace_id = self._id(namespace)
        if self._table(len(key)).put_one(namespace_id, key, entry):
            self._add(namespace_id, 1)

    def put_new(self, namespace: bytes, keys: Sequence[bytes] | KeyMatrix, entries: Entries) -> list[int]:
        """Put what is not there yet; the positions of all others, which are left as they are.

        Keys of one length. Of those that are there twice in `keys`, and a few that only may be, none is put.
        """
        namespace_id = self._id(namespace)
        if isinstance(keys, np.ndarray):
            table = self._table(keys.shape[1])
            packed = table.pack_matrix(namespace_id, keys)
        else:
            table = self._table(len(keys[0]))
            packed = table.pack(namespace_id, keys)
        tags = table.hash(packed)
        is_left = table.find(packed, tags) != 0
        order = np.argsort(tags, kind="stable")
        ordered = tags[order]
        is_repeated = ordered[1:] == ordered[:-1]
        if is_repeated.any():
            is_left[order[1:][is_repeated]] = True
            is_left[order[:-1][is_repeated]] = True
        left: list[int] = np.flatnonzero(is_left).tolist()
        if left:
            packed, tags, entries = packed[~is_left], tags[~is_left], entries[~is_left]
        table.insert(packed, tags, entries)
        self._add(namespace_id, len(packed))
        return left

    def pop(self, namespace: bytes, key: bytes, *, only: Entry | None = None) -> Entry | None:
        """Forget the object; what it was. With `only`: if that is the version."""
        namespace_id = self._ids.get(namespace)
        if namespace_id is None:
            return None
        table, row = self._find_one(namespace_id, key)
        if table is None or not row:
            return None
        entry = Entry._make(table.entry_of(row))
        if only is not None and entry.place != only.place:
            return None
        table.remove_one(row)
        self._add(namespace_id, -1)
        return entry

    def pop_segment(self, segment_id: int) -> None:
        """Forget every object of a segment that is no more."""
        for table in self._tables.values():
            rows = table.members(segment_id)
            if rows.size:
                namespace_ids = table.namespace_ids(rows)
                table.remove(rows)
                for namespace_id in _distinct(namespace_ids):
                    self._add(namespace_id, -int(np.count_nonzero(namespace_ids == namespace_id)))
            table.forget_members(segment_id)

    # Inside

    def _get_many(self, namespace: bytes, keys: Sequence[bytes], *, is_use: bool) -> list[Entry | None]:
        found: list[Entry | None] = [None] * len(keys)
        namespace_id = self._ids.get(namespace)
        if namespace_id is None:
            return found
        if len(keys) < FEW:
            for position, key in enumerate(keys):
                table, row = self._find_one(namespace_id, key)
                if table is not None and row:
                    entry = found[position] = Entry._make(table.entry_of(row))
                    if is_use and entry.uses < MAX_USES:
                        table.set_uses(row, entry.uses + 1)
            return found
        for table, rows, positions in self._find(namespace_id, keys):
            there = np.flatnonzero(rows)
            own = rows[there]
            entries = map(Entry._make, table.entries(own).tolist())
            for position, entry in zip(positions[there].tolist(), entries, strict=True):
                found[position] = entry
            if is_use:
                table.use(own)
        return found

    def _find(
        self, namespace_id: int, keys: Sequence[bytes]
    ) -> Iterator[tuple[Table, Rows, npt.NDArray[np.int64]]]:
        """For each length: its table, the rows of its keys, and their positions among `keys`.

        Nothing for lengths of which there is no table.
        """
        sizes = set(map(len, keys))
        if len(sizes) == 1:
            table = self._tables.get(sizes.pop())
            if table is not None:
                packed = table.pack(namespace_id, keys)
                yield table, table.find(packed, table.hash(packed)), np.arange(len(keys))
            return
        lengths = np.fromiter(map(len, keys), np.int64, len(keys))
        for size in sizes & self._tables.keys():
            is_own = lengths == size
            table = self._tables[size]
            packed = table.pack(namespace_id, list(compress(keys, is_own.tolist())))
            yield table, table.find(packed, table.hash(packed)), np.flatnonzero(is_own)

    def _find_one(self, namespace_id: int, key: bytes) -> tuple[Table | None, int]:
        table = self._tables.get(len(key))
        return (None, 0) if table is None else (table, table.find_one(namespace_id, key))

    def _table(self, key_bytes: int) -> Table:
        table = self._tables.get(key_bytes)
        if table is None:
            table = self._tables[key_bytes] = Table(key_bytes, self._multipliers)
        return table

    def _id(self, namespace: bytes) -> int:
        """The number of a namespace, drawn if it has none."""
        namespace_id = self._ids.get(namespace)
        if namespace_id is None:
            if self._idle_ids:
                namespace_id = self._idle_ids.pop()
                self._namespaces[namespace_id] = namespace
            else:
                namespace_id = len(self._namespaces)
                self._namespaces.append(namespace)
                self._counts.append(0)
            self._ids[namespace] = namespace_id
        return namespace_id

    def _add(self, namespace_id: int, count: int) -> None:
        """Count objects of a namespace; it loses its number with its last."""
        self._length += count
        self._counts[namespace_id] += count
        if not self._counts[namespace_id]:
            del self._ids[self._namespaces[namespace_id]]
            self._namespaces[namespace_id] = b""
            self._idle_ids.append(namespace_id)


def _distinct(numbers: npt.NDArray[np.uint32]) -> list[int]:
    if (numbers == numbers[0]).all():
        return [int(numbers[0])]
    distinct: list[int] = np.unique(numbers).tolist()
    return distinct
