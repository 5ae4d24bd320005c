"""The bytes on disk: sizes, offsets, round trips, and that nothing damaged or misplaced decodes."""

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adp_gateway.errors import CorruptRecord, UnsupportedFormat
from adp_gateway.store import format as fmt
from gateway.objects import NAMESPACE

RECORD = fmt.Record(fmt.Kind.COMMIT, NAMESPACE, b"key", 3 * 4096, 5000, 0x1122334455667788, 9)

records = st.builds(
    fmt.Record,
    kind=st.sampled_from([int(kind) for kind in fmt.Kind]),
    namespace=st.binary(min_size=32, max_size=32),
    key=st.binary(min_size=1, max_size=128),
    offset=st.integers(0, 2**32 - 1).map(lambda unit: unit * 4096),
    length=st.integers(0, 2**32 - 1),
    checksum=st.integers(0, 2**64 - 1),
    sequence=st.integers(0, 2**64 - 1),
)


def test_sizes_are_those_of_the_description():
    assert len(fmt.encode_superblock()) == fmt.SUPERBLOCK_BYTES == 4096
    assert len(fmt.encode_header(fmt.Header(1, 1 << 20))) == fmt.RECORD_BYTES == 192
    assert len(fmt.encode_records([RECORD], segment_id=1, slot=1)) == 192


def test_a_record_is_laid_out_as_described():
    raw = fmt.encode_records([RECORD], segment_id=7, slot=2)
    assert raw[4:8] == bytes([1, 3, 0, 0])
    assert struct.unpack_from("<IIQQ", raw, 8) == (5000, 3, 0x1122334455667788, 9)
    assert raw[32:64] == NAMESPACE
    assert raw[64:192] == b"key".ljust(128, b"\0")
    seed = (7 * 0x9E3779B1 + 2) & 0xFFFFFFFF
    assert struct.unpack_from("<I", raw)[0] == zlib.crc32(raw[4:], seed)


def test_a_header_is_laid_out_as_described():
    raw = fmt.encode_header(fmt.Header(7, 1 << 20))
    assert raw[:8] == b"ADPSEGMT"
    assert struct.unpack_from("<I4xQQ", raw, 8) == (1, 7, 1 << 20)
    assert raw[32:] == bytes(160)


@given(st.lists(records, max_size=5), st.integers(1, 2**32), st.integers(1, 2**31))
def test_records_round_trip(wanted, segment_id, slot):
    raw = fmt.encode_records(wanted, segment_id=segment_id, slot=slot)
    assert list(fmt.decode_records(raw, segment_id=segment_id, slot=slot)) == wanted


@given(st.integers(0, 191), st.integers(1, 255))
def test_no_flipped_byte_goes_unnoticed(position, flip):
    raw = bytearray(fmt.encode_records([RECORD, RECORD], segment_id=1, slot=1))
    raw[position] ^= flip
    assert list(fmt.decode_records(bytes(raw), segment_id=1, slot=1)) == [None, RECORD]


@given(records, st.integers(1, 2**31), st.integers(1, 2**31))
def test_every_flipped_bit_of_a_record_is_put_back(record, segment_id, slot):
    raw = fmt.encode_records([record], segment_id=segment_id, slot=slot)
    number = int.from_bytes(raw, "little")
    for bit in range(0, 8 * 192, 7):
        flipped = (number ^ 1 << bit).to_bytes(192, "little")
        assert list(fmt.decode_records(flipped, segment_id=segment_id, slot=slot)) == [None]
        assert fmt.unflipped_record(flipped, segment_id=segment_id, slot=slot) == raw


@given(records, st.sets(st.integers(0, 8 * 192 - 1), min_size=2, max_size=3))
def test_more_than_one_flipped_bit_is_not_taken_for_one(record, bits):
    raw = fmt.encode_records([record], segment_id=1, slot=1)
    flipped = int.from_bytes(raw, "little")
    for bit in bits:
        flipped ^= 1 << bit
    assert fmt.unflipped_record(flipped.to_bytes(192, "little"), segment_id=1, slot=1) is None


def test_what_is_not_a_record_is_not_made_one():
    """A right checksum is not enough: kind, key and padding have to be those of a record."""
    body = fmt.encode_records([RECORD], segment_id=1, slot=1)[4:]
    for spoiled in (b"\7" + body[1:], body[:-1] + b"!"):
        raw = zlib.crc32(spoiled, 0x9E3779B1 + 1).to_bytes(4, "little") + spoiled
        raw = raw[:20] + bytes([raw[20] ^ 1]) + raw[21:]
        assert fmt.unflipped_record(raw, segment_id=1, slot=1) is None
    assert fmt.unflipped_record(bytes(192), segment_id=1, slot=1) is None


def test_a_blank_says_nothing():
    (blank,) = fmt.decode_records(fmt.encode_blank(segment_id=3, slot=9), segment_id=3, slot=9)
    assert blank.kind == fmt.Kind.KILL
    assert blank.offset >= 1 << 40


def test_a_record_counts_only_in_its_place():
    raw = fmt.encode_records([RECORD, RECORD], segment_id=1, slot=1)
    assert list(fmt.decode_records(raw, segment_id=2, slot=1)) == [None, None]
    assert list(fmt.decode_records(raw, segment_id=1, slot=2)) == [None, None]
    swapped = raw[192:] + raw[:192]
    assert list(fmt.decode_records(swapped, segment_id=1, slot=1)) == [None, None]


def test_half_a_record_and_zeros_are_no_records():
    raw = fmt.encode_records([RECORD], segment_id=1, slot=1)
    assert list(fmt.decode_records(raw + raw[:191], segment_id=1, slot=1)) == [RECORD]
    assert list(fmt.decode_records(bytes(384), segment_id=1, slot=1)) == [None, None]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_headers_round_trip(segment_id, segment_bytes):
    header = fmt.Header(segment_id, segment_bytes)
    assert fmt.decode_header(fmt.encode_header(header)) == header


@given(st.integers(0, 255))
def test_one_flipped_bit_of_a_header_is_put_back(bit):
    header = fmt.Header(7, 1 << 20)
    raw = bytearray(fmt.encode_header(header))
    raw[bit // 8] ^= 1 << bit % 8
    assert fmt.decode_header(bytes(raw)) == header


@given(st.integers(0, 31), st.integers(1, 255).filter(lambda flip: flip.bit_count() > 1))
def test_a_damaged_header_is_noticed(position, flip):
    raw = bytearray(fmt.encode_header(fmt.Header(1, 1 << 20)))
    raw[position] ^= flip
    with pytest.raises(CorruptRecord):
        fmt.decode_header(bytes(raw))
    with pytest.raises(CorruptRecord):
        fmt.decode_header(bytes(raw[:191]))


def test_superblocks():
    fmt.check_superblock(fmt.encode_superblock())
    for raw in (b"", bytes(4096), fmt.encode_superblock()[:15], b"X" + fmt.encode_superblock()[1:]):
        with pytest.raises(CorruptRecord):
            fmt.check_superblock(raw)


@pytest.mark.parametrize("bit", range(128))
def test_one_flipped_bit_of_a_superblock_is_put_back(bit):
    raw = bytearray(fmt.encode_superblock())
    raw[bit // 8] ^= 1 << bit % 8
    fmt.check_superblock(bytes(raw))
    assert fmt.is_superblock_of_ours(bytes(raw))
    newer = bytearray(newer_superblock())
    newer[bit // 8] ^= 1 << bit % 8
    with pytest.raises(UnsupportedFormat):
        fmt.check_superblock(bytes(newer))


@pytest.mark.parametrize("raw", [b"", b"ADP", bytes(4096), b"#!/bin/sh" * 9])
def test_other_files_are_no_superblocks(raw):
    assert not fmt.is_superblock_of_ours(raw)


def newer_superblock() -> bytes:
    start = struct.pack("<8sI", b"ADPSTORE", fmt.FORMAT_VERSION + 1)
    return start + struct.pack("<I", zlib.crc32(start))


def test_a_newer_format_is_told_by_name():
    with pytest.raises(UnsupportedFormat) as caught:
        fmt.check_superblock(newer_superblock())
    assert (caught.value.found, caught.value.supported) == (2, 1)
    assert str(caught.value) == "the store has format 2; this version reads up to 1"


@pytest.mark.parametrize("segment_id", [1, 99_999_999, 123_456_789])
def test_names_round_trip(segment_id):
    assert fmt.parse_name(fmt.data_name(segment_id)) == (segment_id, "data")
    assert fmt.parse_name(fmt.journal_name(segment_id)) == (segment_id, "log")


@pytest.mark.parametrize(
    "name",
    [
        "superblock",
        "lock",
        "seg-1.data",
        "seg-00000001.log~",
        "seg-0000000x.log",
        "seg-4294967295.log",
        "seg-99999999999.data",
    ],
)
def test_other_names_are_nobody_s(name):
    assert fmt.parse_name(name) is None
