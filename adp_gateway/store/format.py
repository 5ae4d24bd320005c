"""Bytes on disk. Everything little-endian; every struct checked by CRC-32; nothing here does I/O.

A store is a directory:

    superblock             who made this and in which format
    seg-00000001.data      payloads, each from a multiple of 4096 on, nothing else
    seg-00000001.log       the journal of that segment: a header, then records, appended
    seg-00000002.data ...

Superblock, 4096 bytes:

    0  8s  magic "ADPSTORE"
    8  I   format version
    12 I   crc32 of the 12 bytes before
    16     zeros

Journal header and records are 192 bytes each, so that record n stands at 192 n and one damaged record costs
one record, not everything behind it.

    header                              record
    0  8s  magic "ADPSEGMT"             0  I     crc32 (see below)
    8  I   format version               4  B     kind: 1 commit, 2 kill
    12 I   crc32 of the other fields    5  B     key length, 1..128
    16 Q   segment number               6  H     zero
    24 Q   segment size in bytes        8  I     object length in bytes
    32     zeros                        12 I     offset in the data file, in units of 4096
                                        16 Q     XXH3-64 of the object
                                        24 Q     sequence
                                        32 32s   namespace
                                        64 128s  key, zero-padded

A record's crc covers its bytes from 4 on and starts from a number made of the segment's and of the record's
slot, so a record in the wrong journal or the wrong slot (an old block, a misdirected write) does not count.

One flipped bit in a superblock, a header or a record is put back: their checksums tell which it was. More
than that costs the record (docs/adr/0018).

A commit says: this object's bytes are all in the data file. A kill says: the commit at this offset is void. A
kill stands in the journal of the segment that holds its commit, so they vanish together with it, and no
tombstone ever has to be carried from one segment to another (docs/adr/0010). It repeats every field of its
commit: a damaged one can mostly still be told (`replay`). Of several commits for one key the highest sequence
counts.
"""

import enum
import functools
import re
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from adp_gateway.errors import CorruptRecord, UnsupportedFormat

FORMAT_VERSION: Final = 1
UNIT_BYTES: Final = 4096
SUPERBLOCK_NAME: Final = "superblock"
SUPERBLOCK_BYTES: Final = 4096
RECORD_BYTES: Final = 192
NAMESPACE_BYTES: Final = 32
MAX_KEY_BYTES: Final = 128

_SUPERBLOCK = struct.Struct("<8sII")
_HEADER = struct.Struct("<8sIIQQ")
_RECORD = struct.Struct("<IBBHIIQQ32s128s")
assert _SUPERBLOCK.size == 16
assert _HEADER.size == 32
assert _RECORD.size == RECORD_BYTES

#: The same for many records at a time.
RECORD: Final = np.dtype(
    [
        ("crc", "<u4"),
        ("kind", "u1"),
        ("key_bytes", "u1"),
        ("zero", "<u2"),
        ("length", "<u4"),
        ("unit", "<u4"),
        ("checksum", "<u8"),
        ("sequence", "<u8"),
        ("namespace", "u1", NAMESPACE_BYTES),
        ("key", "u1", MAX_KEY_BYTES),
    ]
)
Records: TypeAlias = npt.NDArray[np.void]  # of dtype RECORD
assert RECORD.itemsize == RECORD_BYTES
_AFTER_CRC = np.dtype((np.void, RECORD_BYTES - 4))

_STORE_MAGIC = b"ADPSTORE"
_SEGMENT_MAGIC = b"ADPSEGMT"
_NAME = re.compile(r"seg-([0-9]{8,10})\.(data|log)")
_NOWHERE = (2**32 - 1) * UNIT_BYTES  # behind the end of every segment
MAX_SEGMENT_ID: Final = 2**31  # far above what a store comes to, and far below what an index entry holds


class Kind(enum.IntEnum):
    """What a journal record says."""

    COMMIT = 1
    KILL = 2


class Record(NamedTuple):
    """One journal record. `offset` and `length` in bytes. A tuple, because recovery makes millions."""

    kind: int
    namespace: bytes
    key: bytes
    offset: int
    length: int
    checksum: int
    sequence: int


class Header(NamedTuple):
    """What a journal says of its segment."""

    segment_id: int
    segment_bytes: int


def data_name(segment_id: int) -> str:
    """The file of a segment's payloads."""
    return f"seg-{segment_id:08d}.data"


def journal_name(segment_id: int) -> str:
    """The file of a segment's records."""
    return f"seg-{segment_id:08d}.log"


def parse_name(name: str) -> tuple[int, str] | None:
    """(segment number, "data" or "log") of a segment's file name; None for any other.

    A number that no store comes to is somebody else's file, or the next segment could not be numbered.
    """
    match = _NAME.fullmatch(name)
    return (int(match[1]), match[2]) if match and int(match[1]) <= MAX_SEGMENT_ID else None


def aligned(length: int) -> int:
    """`length` rounded up to whole units."""
    return -(-length // UNIT_BYTES) * UNIT_BYTES


def _first_seed(segment_id: int, slot: int) -> int:
    """The crc start value of the record in `slot`; the next slot's is one more (modulo 2**32)."""
    return segment_id * 0x9E3779B1 + slot


def encode_superblock() -> bytes:
    """The superblock of this version."""
    start = struct.pack("<8sI", _STORE_MAGIC, FORMAT_VERSION)
    return (start + struct.pack("<I", zlib.crc32(start))).ljust(SUPERBLOCK_BYTES, b"\0")


def is_superblock_of_ours(raw: bytes) -> bool:
    """Whether this is, or was once, a superblock: the magic tells also where the rest is damaged."""
    return raw.startswith(_STORE_MAGIC) or _is_superblock(_unflipped(raw[:16], _is_superblock))


def _is_superblock(raw: bytes) -> bool:
    return raw.startswith(_STORE_MAGIC) and raw[12:16] == struct.pack("<I", zlib.crc32(raw[:12]))


def _unflipped(raw: bytes, is_whole: Callable[[bytes], bool]) -> bytes:
    """`raw`, or what it was before one of its bits flipped, if that makes it whole."""
    if is_whole(raw):
        return raw
    number = int.from_bytes(raw, "little")
    others = ((number ^ 1 << bit).to_bytes(len(raw), "little") for bit in range(8 * len(raw)))
    return next(filter(is_whole, others), raw)


def check_superblock(raw: bytes) -> None:
    """Return if this version can work on the store.

    Raises:
        CorruptRecord: not a superblock, or a damaged one.
        UnsupportedFormat: a newer version's.
    """
    if len(raw) < _SUPERBLOCK.size:
        raise CorruptRecord("the superblock is cut short")
    raw = _unflipped(raw[: _SUPERBLOCK.size], _is_superblock)
    if not _is_superblock(raw):
        raise CorruptRecord("the superblock is damaged")
    _magic, version, _crc = _SUPERBLOCK.unpack(raw)
    if version > FORMAT_VERSION:
        raise UnsupportedFormat(version, FORMAT_VERSION)


def encode_header(header: Header) -> bytes:
    """The first 192 bytes of a journal."""
    start = struct.pack("<8sI", _SEGMENT_MAGIC, FORMAT_VERSION)
    rest = struct.pack("<QQ", header.segment_id, header.segment_bytes)
    return (start + struct.pack("<I", zlib.crc32(start + rest)) + rest).ljust(RECORD_BYTES, b"\0")


def decode_header(raw: bytes) -> Header:
    """What a journal's first 192 bytes say.

    Raises:
        CorruptRecord: they do not decode.
    """
    if len(raw) < RECORD_BYTES:
        raise CorruptRecord("the segment header is cut short")
    raw = _unflipped(raw[: _HEADER.size], _is_header)
    if not _is_header(raw):
        raise CorruptRecord("the segment header is damaged")
    _magic, _version, _crc, segment_id, segment_bytes = _HEADER.unpack(raw)
    return Header(segment_id, segment_bytes)


def _is_header(raw: bytes) -> bool:
    return raw.startswith(_SEGMENT_MAGIC) and raw[12:16] == struct.pack(
        "<I", zlib.crc32(raw[:12] + raw[16:32])
    )


def encode_blank(*, segment_id: int, slot: int) -> bytes:
    """A record that says nothing, for the place of one that is lost: the kill of what never was."""
    blank = Record(Kind.KILL, bytes(NAMESPACE_BYTES), b"\0", _NOWHERE, 0, 0, 0)
    return encode_records([blank], segment_id=segment_id, slot=slot)


def encode_records(records: list[Record], *, segment_id: int, slot: int) -> bytes:
    """Journal bytes for `records`, the first of which will stand in slot `slot` (the header has slot 0)."""
    parts = bytearray()
    for seed, record in enumerate(records, _first_seed(segment_id, slot)):
        body = _RECORD.pack(
            0,
            record.kind,
            len(record.key),
            0,
            record.length,
            record.offset // UNIT_BYTES,
            record.checksum,
            record.sequence,
            record.namespace,
            record.key,
        )[4:]
        parts += struct.pack("<I", zlib.crc32(body, seed & 0xFFFFFFFF)) + body
    return bytes(parts)


def decode_columns(
    raw: bytes | bytearray, *, segment_id: int, slot: int
) -> tuple[Records, npt.NDArray[np.bool_]]:
    """The records in `raw`, whose first byte is that of slot `slot`, and which of them decode.

    They share the memory of `raw`. Bytes behind the last whole record are ignored.
    """
    records = np.frombuffer(raw, RECORD, len(raw) // RECORD_BYTES)
    first = _first_seed(segment_id, slot)
    seeds = [seed & 0xFFFFFFFF for seed in range(first, first + len(records))]
    rows = np.frombuffer(raw, np.uint8, len(records) * RECORD_BYTES).reshape(-1, RECORD_BYTES)
    bodies = np.ascontiguousarray(rows[:, 4:]).view(_AFTER_CRC)[:, 0].tolist()
    is_whole = records["crc"] == np.fromiter(map(zlib.crc32, bodies, seeds), np.uint32, len(records))
    is_whole &= (records["kind"] == Kind.COMMIT) | (records["kind"] == Kind.KILL)
    is_whole &= (records["key_bytes"] >= 1) & (records["key_bytes"] <= MAX_KEY_BYTES)
    is_whole &= records["zero"] == 0
    return records, is_whole


def to_records(columns: Records) -> Iterator[Record]:
    """One after the other."""
    names = ("kind", "key_bytes", "unit", "length", "checksum", "sequence")
    fields = [columns[name].tolist() for name in names]
    for position, (kind, key_bytes, unit, length, checksum, sequence) in enumerate(zip(*fields, strict=True)):
        namespace = columns["namespace"][position].tobytes()
        key = columns["key"][position, :key_bytes].tobytes()
        yield Record(kind, namespace, key, unit * UNIT_BYTES, length, checksum, sequence)


def decode_records(raw: bytes, *, segment_id: int, slot: int) -> Iterator[Record | None]:
    """As `decode_columns`, one after the other; None for one that does not decode."""
    columns, is_whole = decode_columns(raw, segment_id=segment_id, slot=slot)
    whole = to_records(columns[is_whole])
    for is_one in is_whole.tolist():
        yield next(whole) if is_one else None


def unflipped_record(raw: bytes, *, segment_id: int, slot: int) -> bytes | None:
    """The record of `slot` before one of its bits flipped; None if that is not what has happened to it.

    For a record between two that decode: a flip costs one record. What costs several in a row (a sector that
    went elsewhere, or came from elsewhere) could, in another slot, be told from a flip by nothing else.
    """
    number = int.from_bytes(raw, "little")
    crc = zlib.crc32(raw[4:], _first_seed(segment_id, slot) & 0xFFFFFFFF)
    bit = _flips().get(crc ^ number & 0xFFFFFFFF)
    if bit is None:
        return None
    whole = (number ^ 1 << bit).to_bytes(RECORD_BYTES, "little")
    (record,) = decode_records(whole, segment_id=segment_id, slot=slot)
    is_padded = record is not None and not any(whole[RECORD_BYTES - MAX_KEY_BYTES + len(record.key) :])
    return whole if is_padded else None


@functools.cache
def _flips() -> dict[int, int]:
    """Which bit of a record has flipped, by the difference between the crc that it has and the one it should.

    No two are alike: at this length, CRC-32 tells any two flips apart.
    """
    blank = zlib.crc32(bytes(RECORD_BYTES - 4))
    flips = {1 << bit: bit for bit in range(32)}
    for bit in range(32, 8 * RECORD_BYTES):
        flipped = (1 << bit).to_bytes(RECORD_BYTES, "little")[4:]
        flips[zlib.crc32(flipped) ^ blank] = bit
    return flips
