"""The arithmetic of cutting: exact cover, names, and what is a manifest and what is not."""

import struct

import attrs
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from adp_client.fragments import (
    FRAGMENT_KEY_BYTES,
    MANIFEST_BYTES,
    MANIFEST_MAGIC,
    MAX_FRAGMENTS,
    MAX_OBJECT_BYTES,
    Manifest,
    UnsoundManifest,
    Way,
    checksum_of,
    cut_pieces,
    digest_of,
    looks_like_manifest,
)
from adp_client.protocol.constants import Feature
from adp_client.protocol.messages import Limits

BOOT = b"b" * 16
SOUND = Manifest(object_bytes=884_736, fragment_bytes=262_144, digest=7)

manifests = st.builds(
    lambda fragment, count, less, digest: Manifest(
        object_bytes=max(MANIFEST_BYTES, fragment * count - less % fragment),
        fragment_bytes=min(fragment, max(MANIFEST_BYTES, fragment * count - less % fragment)),
        digest=digest,
    ),
    st.integers(MANIFEST_BYTES, 1 << 18),
    st.integers(1, 200),
    st.integers(0, 1 << 18),
    st.integers(0, 2**64 - 1),
)


@given(manifests)
def test_a_manifest_is_what_was_written(manifest):
    raw = manifest.encode()
    assert len(raw) == MANIFEST_BYTES
    assert looks_like_manifest(raw)
    assert Manifest.decode(raw) == manifest


@given(manifests, st.binary(min_size=1, max_size=128))
def test_fragments_cover_the_object_exactly_once(manifest, key):
    memory = memoryview(bytearray(manifest.object_bytes + 5))
    places = list(manifest.cut(memory))
    assert [len(place) for place in places] == manifest.sizes()
    for place in places:
        assert not any(place), "nothing is covered twice"
        place[:] = b"\1" * len(place)
    assert bytes(memory) == b"\1" * manifest.object_bytes + bytes(5)
    names = manifest.keys(key)
    assert len(set(names)) == manifest.count == len(places)
    assert {len(name) for name in names} == {FRAGMENT_KEY_BYTES}


@given(st.lists(st.binary(max_size=50), max_size=20), st.integers(1, 60))
def test_pieces_are_cut_where_the_object_is_however_it_was_given(parts, size):
    whole = b"".join(parts)
    fragments = [b"".join(pieces) for pieces in cut_pieces(map(memoryview, parts), size)]
    assert fragments == [whole[at : at + size] for at in range(0, len(whole), size)]


def test_another_version_another_key_or_another_size_has_other_fragments():
    names = [
        manifest.keys(key)
        for key in (b"k", b"l")
        for manifest in (
            SOUND,
            attrs.evolve(SOUND, digest=8),
            attrs.evolve(SOUND, object_bytes=884_735),
            attrs.evolve(SOUND, fragment_bytes=262_143),
        )
    ]
    assert len({name for each in names for name in each}) == 8 * 4


def test_the_digest_says_each_checksum_in_order():
    one, two = checksum_of([memoryview(b"on"), memoryview(b"e")]), checksum_of([memoryview(b"two")])
    assert one == xxhash.xxh3_64_intdigest(b"one")
    assert digest_of([one, two]) == xxhash.xxh3_64_intdigest(struct.pack("<QQ", one, two))
    assert digest_of([one, two]) != digest_of([two, one])


@given(st.binary(min_size=MANIFEST_BYTES, max_size=MANIFEST_BYTES) | st.binary(max_size=200))
def test_other_bytes_are_no_manifest(raw):
    assert Manifest.decode(raw) is None


@given(st.integers(0, MANIFEST_BYTES * 8 - 1))
def test_a_flipped_bit_makes_it_none(bit):
    raw = bytearray(SOUND.encode())
    raw[bit // 8] ^= 1 << bit % 8
    assert Manifest.decode(bytes(raw)) is None


def test_a_byte_more_or_less_makes_it_none():
    raw = SOUND.encode()
    assert Manifest.decode(raw[:-1]) is None
    assert Manifest.decode(raw + b"\0") is None


@pytest.mark.parametrize(
    "fields",
    [
        (884_736, 262_144, 4, 1, 7, bytes(16)),
        (884_736, 262_144, 4, 0, 7, bytes(15) + b"\1"),
        (884_736, 262_144, 3, 0, 7, bytes(16)),
        (884_736, 0, 4, 0, 7, bytes(16)),
        (884_736, 884_737, 1, 0, 7, bytes(16)),
        (63, 63, 1, 0, 7, bytes(16)),
        (MAX_FRAGMENTS + 1, 1, MAX_FRAGMENTS + 1, 0, 7, bytes(16)),
    ],
    ids=["reserved", "zeros", "count", "no size", "fragment above object", "tiny", "too many"],
)
def test_a_manifest_that_nobody_writes_is_told_from_plain_bytes(fields):
    raw = struct.pack("<16sIIIIQ16s", MANIFEST_MAGIC, *fields)
    with pytest.raises(UnsoundManifest):
        Manifest.decode(raw + struct.pack("<Q", xxhash.xxh3_64_intdigest(raw)))


def way(features=Feature.NONE, **limits) -> Way:
    return Way.of(features, Limits(**limits), BOOT)


def test_the_way_of_a_gateway():
    assert way() == Way(cuts_itself=False, fragment_bytes=256 << 10, takes_fragments=True, boot_id=BOOT)
    assert way(Feature.FRAGMENTS).cuts_itself
    assert way(max_object_bytes=1000).fragment_bytes == 1000
    assert way(max_inflight_bytes=999).fragment_bytes == 999
    assert not way(max_command_bytes=63).takes_fragments
    assert not way(max_key_bytes=31).takes_fragments


def test_what_must_be_cut_and_what_can_be():
    plain, cutting = way(Feature.FRAGMENTS, max_command_bytes=100), way(max_command_bytes=100)
    assert not cutting.needs_cutting([], 100)
    assert cutting.needs_cutting([], 101)
    assert not plain.needs_cutting([], 101)
    alike = [memoryview(MANIFEST_MAGIC), memoryview(bytes(48))]
    for each in (plain, cutting):
        assert each.needs_cutting(alike, 64)
        assert not each.needs_cutting([memoryview(bytes(64))], 64)
        assert each.can_cut(64)
    assert way(max_command_bytes=63).needs_cutting([memoryview(bytes(64))], 64)
    assert cutting.can_cut(100 * MAX_FRAGMENTS)
    assert not cutting.can_cut(100 * MAX_FRAGMENTS + 1)
    assert way(max_command_bytes=1 << 20).can_cut(MAX_OBJECT_BYTES)
    assert not way(max_command_bytes=1 << 20).can_cut(MAX_OBJECT_BYTES + 1)
    assert not way(max_command_bytes=0).can_cut(1)


def test_what_was_planned_for_one_boot_or_for_any():
    one, other = way(), Way.of(Feature.NONE, Limits(), b"c" * 16)
    assert one.holds_at(one)
    assert not one.holds_at(other)
    assert one.for_any_boot().holds_at(other)
    assert not one.for_any_boot().holds_at(way(Feature.FRAGMENTS))
