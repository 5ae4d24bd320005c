"""A hash table of objects whose keys have one length, in columns instead of Python objects.

Row by row: the key (behind the number of its namespace), the entry, and a link. A link is one number: the
row's tag, which is its 32-bit hash, above the next row of its chain. Buckets hold the first row of each
chain; row 0 is nobody's and ends every chain. The number of buckets follows the number of rows a few at a
time (linear hashing), and columns grow in place, so no put ever waits for the whole table to be moved.

Lookups compare whole keys, always; the tag only saves looking at most of the wrong ones. The hash is
multilinear over 32-bit words with secret 64-bit multipliers (strongly universal, upper half of the sum): who
does not know them cannot choose keys that share a chain.

Everything is there twice: once for many keys at a time, without Python code per key, and once for a single
key, where numpy's cost per call would count.
"""

import struct
from array import array
from collections.abc import Callable, Sequence
from operator import mul
from typing import Final, TypeAlias, cast

import numpy as np
import numpy.typing as npt

Rows: TypeAlias = npt.NDArray[np.uint32]
Words: TypeAlias = npt.NDArray[np.uint32]  # a row of them for each key

#: Field by field what `index.Entry` is, so that a row becomes one without naming the fields.
ENTRY: Final = np.dtype(
    [
        ("segment_id", "<u4"),
        ("offset", "<u8"),
        ("length", "<u4"),
        ("checksum", "<u8"),
        ("sequence", "<u8"),
        ("uses", "u1"),
    ]
)
Entries: TypeAlias = npt.NDArray[np.void]  # of dtype ENTRY

#: Multipliers for keys of every length, and the summand. Words are the namespace and up to 128 bytes.
MULTIPLIERS: Final = 34

#: Where counting uses ends.
MAX_USES: Final = 3

_FEW = 12  # keys for which Python is quicker than numpy
_NOWHERE = 0xFFFFFFFF  # the segment of a row that is not taken
_LOW, _HIGH = np.uint64(0xFFFFFFFF), np.uint64(32)
_FIRST_ROWS, _MAX_MORE_ROWS = 64, 65536
_FIRST_BUCKETS, _MORE_BUCKETS = 64, 1024


class Table:
    """All keys of `key_bytes`, of every namespace. `multipliers`: `MULTIPLIERS` secret numbers."""

    def __init__(self, key_bytes: int, multipliers: Sequence[int]) -> None:
        self.key_bytes = key_bytes
        self._key_words = -(-key_bytes // 4)
        words = 1 + self._key_words
        self._summand = multipliers[0]
        self._multipliers = list(multipliers[1 : 1 + words])
        self._multiplier_column = np.array(self._multipliers, dtype=np.uint64)
        padding = 4 * self._key_words - key_bytes
        self._pack: Callable[[int, bytes], bytes] = struct.Struct(f"<I{key_bytes}s{padding}x").pack
        self._unpack: Callable[[bytes], tuple[int, ...]] = struct.Struct(f"<{words}I").unpack
        self._keys: Words = np.zeros((_FIRST_ROWS, words), dtype="<u4")
        self._entries: Entries = np.zeros(_FIRST_ROWS, dtype=ENTRY)
        self._links: npt.NDArray[np.uint64] = np.zeros(_FIRST_ROWS, dtype=np.uint64)
        self._heads: Rows = np.zeros(_FIRST_BUCKETS, dtype=np.uint32)
        self._buckets = _FIRST_BUCKETS  # in use
        self._top = 1  # the first row that was never taken
        self._free = array("I")  # rows below that are not taken
        self._members: dict[int, array[int]] = {}  # by segment: every row ever put there
        self._entries["segment_id"][0] = _NOWHERE

    def __len__(self) -> int:
        return self._top - 1 - len(self._free)

    # Many at a time

    def pack(self, namespace_id: int, keys: Sequence[bytes]) -> Words:
        """The keys, each of the table's length, as `find` and `insert` take them."""
        return self.pack_matrix(namespace_id, np.frombuffer(b"".join(keys), np.uint8))

    def pack_matrix(self, namespace_id: int, keys: npt.NDArray[np.uint8]) -> Words:
        """As `pack`, from the bytes of all keys, one after the other."""
        size, words = self.key_bytes, 1 + self._key_words
        packed = np.empty((keys.size // size, words), dtype="<u4")
        packed[:, -1] = 0
        packed[:, 0] = namespace_id
        packed.view(np.uint8)[:, 4 : 4 + size] = keys.reshape(-1, size)
        return packed

    def hash(self, packed: Words) -> npt.NDArray[np.uint64]:
        """The tag of each key."""
        sums = packed @ self._multiplier_column
        sums += np.uint64(self._summand)
        sums >>= _HIGH
        return sums

    def find(self, packed: Words, tags: npt.NDArray[np.uint64]) -> Rows:
        """The row of each key; 0 where there is none."""
        rows = self._heads.take(self._buckets_of(tags))
        links = self._links.take(rows)
        left = np.flatnonzero((links >> _HIGH) != tags)  # positions that look further along their chain
        links = links[left]
        while left.size > _FEW:
            following = (links & _LOW).astype(np.uint32)
            rows[left] = following
            goes_on = following != 0
            left, following = left[goes_on], following[goes_on]
            links = self._links.take(following)
            differs = (links >> _HIGH) != tags[left]
            left, links = left[differs], links[differs]
        for at, link in zip(left.tolist(), links.tolist(), strict=True):
            rows[at] = self._following(link, tags.item(at))
        found = np.flatnonzero(rows)
        same = self._keys.take(rows[found], axis=0) == packed[found]
        if not same.all():
            for at in found[~same.all(axis=1)].tolist():  # another key with this tag came first
                rows[at] = self._walk(packed[at].tobytes(), int(tags[at]))
        return rows

    def insert(self, packed: Words, tags: npt.NDArray[np.uint64], entries: Entries) -> None:
        """Add keys that are not there, and of which no two are the same."""
        rows = self._take_rows(len(packed))
        self._keys[rows] = packed
        self._entries[rows] = entries
        self._link(rows, tags)
        segment_ids = entries["segment_id"]
        first = int(segment_ids[0]) if len(packed) else 0
        if (segment_ids == first).all():
            self._members.setdefault(first, array("I")).frombytes(rows.tobytes())
        else:
            for row, segment_id in zip(rows.tolist(), segment_ids.tolist(), strict=True):
                self._members.setdefault(segment_id, array("I")).append(row)
        self._spread()

    def remove(self, rows: Rows) -> None:
        """Take out rows, none of them twice."""
        buckets = np.unique(self._buckets_of(self._links.take(rows) >> _HIGH))
        chained = self._chained(buckets)
        self._entries["segment_id"][rows] = _NOWHERE
        stays = self._entries["segment_id"][chained] != _NOWHERE
        self._heads[buckets] = 0
        self._link(chained[stays], self._links.take(chained[stays]) >> _HIGH)
        self._free.frombytes(rows.astype(np.uint32).tobytes())

    def members(self, segment_id: int) -> Rows:
        """The rows of a segment, in the order of their offsets."""
        known = self._members.get(segment_id)
        if known is None:
            return np.empty(0, dtype=np.uint32)
        rows = np.unique(np.array(known, dtype=np.uint32))
        is_current = self._entries["segment_id"][rows] == segment_id
        current: Rows = rows[is_current]
        order = np.argsort(self._entries["offset"][current], kind="stable")
        return current[order]

    def forget_members(self, segment_id: int) -> None:
        """The segment is no more; nor is any row of it."""
        self._members.pop(segment_id, None)

    def entries(self, rows: Rows) -> Entries:
        """A copy of what the rows hold."""
        return self._entries.take(rows)

    def keys(self, rows: Rows) -> list[bytes]:
        """The keys of the rows."""
        size = self.key_bytes
        joined = self._keys.take(rows, axis=0).view(np.uint8)[:, 4 : 4 + size].tobytes()
        return [joined[start : start + size] for start in range(0, len(joined), size)]

    def namespace_ids(self, rows: Rows) -> npt.NDArray[np.uint32]:
        """The numbers of the rows' namespaces."""
        namespace_ids: npt.NDArray[np.uint32] = self._keys[rows, 0]
        return namespace_ids

    def has_versions(self, rows: Rows, sequences: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Whether each row is taken, by the version with that sequence."""
        entries = self._entries.take(rows)
        is_there: npt.NDArray[np.bool_] = entries["sequence"] == sequences
        is_there &= entries["segment_id"] != _NOWHERE
        return is_there

    def use(self, rows: Rows) -> None:
        """Count a use of each row, up to `MAX_USES`. A row that is named twice is counted once."""
        uses = self._entries["uses"]
        uses[rows] = np.minimum(uses[rows] + 1, MAX_USES)

    # One at a time

    def find_one(self, namespace_id: int, key: bytes) -> int:
        """The row of a key; 0 if there is none."""
        packed = self._pack(namespace_id, key)
        return self._walk(packed, self._hash_one(packed))

    def put_one(self, namespace_id: int, key: bytes, entry: tuple[int, ...]) -> bool:
        """Make `entry` the key's; whether the key is new."""
        packed = self._pack(namespace_id, key)
        tag = self._hash_one(packed)
        row = self._walk(packed, tag)
        is_new = not row
        if is_new:
            row = self._take_row()
            self._keys[row] = np.frombuffer(packed, "<u4")
            bucket = self._bucket_of(tag)
            self._links[row] = tag << 32 | self._heads.item(bucket)
            self._heads[bucket] = row
        elif self._entries["segment_id"].item(row) == entry[0]:
            self._entries[row] = entry
            return False
        self._entries[row] = entry
        self._members.setdefault(entry[0], array("I")).append(row)
        if is_new:
            self._spread()
        return is_new

    def remove_one(self, row: int) -> None:
        """Take out a row."""
        link = self._links.item(row)
        bucket = self._bucket_of(link >> 32)
        before, at = 0, self._heads.item(bucket)
        while at != row:
            before, at = at, self._links.item(at) & 0xFFFFFFFF
        following = link & 0xFFFFFFFF
        if before:
            self._links[before] = self._links.item(before) >> 32 << 32 | following
        else:
            self._heads[bucket] = following
        self._entries["segment_id"][row] = _NOWHERE
        self._free.append(row)

    def entry_of(self, row: int) -> tuple[int, int, int, int, int, int]:
        """What a row holds."""
        return cast(tuple[int, int, int, int, int, int], self._entries.item(row))

    def set_uses(self, row: int | Rows, uses: int) -> None:
        """Say how often a row, or each of several, has been used."""
        self._entries["uses"][row] = uses

    # Chains

    def _hash_one(self, packed: bytes) -> int:
        total: int = self._summand + sum(map(mul, self._unpack(packed), self._multipliers))
        return total >> 32 & 0xFFFFFFFF

    def _walk(self, packed: bytes, tag: int) -> int:
        row: int = self._heads.item(self._bucket_of(tag))
        while row:
            link: int = self._links.item(row)
            if link >> 32 == tag and self._keys[row].tobytes() == packed:
                return row
            row = link & 0xFFFFFFFF
        return 0

    def _following(self, link: int, tag: int) -> int:
        """The next row with a tag on the chain behind a link; 0 if there is none."""
        row = link & 0xFFFFFFFF
        while row:
            following: int = self._links.item(row)
            if following >> 32 == tag:
                break
            row = following & 0xFFFFFFFF
        return row

    def _bucket_of(self, tag: int) -> int:
        mask = (1 << (self._buckets - 1).bit_length()) - 1
        bucket = tag & mask
        return bucket if bucket < self._buckets else bucket & mask >> 1

    def _buckets_of(self, tags: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        mask = (1 << (self._buckets - 1).bit_length()) - 1
        buckets = (tags & np.uint64(mask)).astype(np.int64)
        return np.where(buckets < self._buckets, buckets, buckets & mask >> 1)

    def _link(self, rows: Rows, tags: npt.NDArray[np.uint64]) -> None:
        """Put rows at the front of their chains."""
        buckets = self._buckets_of(tags)
        while rows.size:
            following = self._heads.take(buckets)
            self._heads[buckets] = rows  # of those that share a bucket, one; the others come after it
            is_in = self._heads.take(buckets) == rows
            self._links[rows[is_in]] = tags[is_in] << _HIGH | following[is_in]
            is_out = ~is_in
            rows, tags, buckets = rows[is_out], tags[is_out], buckets[is_out]

    def _chained(self, buckets: npt.NDArray[np.int64]) -> Rows:
        """Every row in the chains of some buckets."""
        found = [self._heads.take(buckets)]
        found[0] = found[0][found[0] != 0]
        while found[-1].size:
            following = (self._links.take(found[-1]) & _LOW).astype(np.uint32)
            found.append(following[following != 0])
        return np.concatenate(found)

    # Growing

    def _take_row(self) -> int:
        if self._free:
            return self._free.pop()
        self._reserve(1)
        self._top += 1
        return self._top - 1

    def _take_rows(self, count: int) -> Rows:
        reused = min(count, len(self._free))
        rows = np.array(self._free[len(self._free) - reused :], dtype=np.uint32)
        del self._free[len(self._free) - reused :]
        fresh = count - reused
        self._reserve(fresh)
        self._top += fresh
        return np.concatenate([rows, np.arange(self._top - fresh, self._top, dtype=np.uint32)])

    def _reserve(self, count: int) -> None:
        """Have room for so many rows that were never taken: large blocks are remapped, not copied."""
        have = len(self._links)
        need = self._top + count
        if need <= have:
            return
        rows = max(need, have + min(max(have // 8, _FIRST_ROWS), _MAX_MORE_ROWS))
        self._keys.resize((rows, self._keys.shape[1]), refcheck=False)
        self._entries.resize(rows, refcheck=False)
        self._links.resize(rows, refcheck=False)

    def _spread(self) -> None:
        """Have at least as many buckets as rows, by splitting the next ones."""
        count = len(self)
        if count <= self._buckets:
            return
        old = self._buckets
        new = max(count, old + min(old, _MORE_BUCKETS))
        if new > len(self._heads):
            room = max(new, old + min(max(old // 8, _FIRST_BUCKETS), _MAX_MORE_ROWS))
            self._heads.resize(room, refcheck=False)
        # A new bucket's rows all stand in the one whose number lacks its highest bit.
        half = 1 << old.bit_length() - 1
        is_one_round = new <= 2 * half
        parents = np.arange(old - half, new - half) if is_one_round else np.arange(old)
        rows = self._chained(parents)
        self._heads[parents] = 0
        self._buckets = new
        self._link(rows, self._links.take(rows) >> _HIGH)
