"""Objects above the device limit of a gateway that does not cut them (spec section 5.13). Pure arithmetic.

The client cuts such an object into fragments and stores each as an object of its own; then, last, a manifest
under the object's key, which makes all of them visible at once. A fragment's key is made of the manifest, so
of everything that the object is: fragments of two versions never meet, whoever writes, reads or dies when.
"""

import hashlib
import struct
from collections.abc import Iterable, Iterator, Sequence
from typing import Self

import attrs
import xxhash

from .protocol.constants import Feature
from .protocol.messages import Limits

MANIFEST_MAGIC = b"\x8aADP manifest\r\n\x1a"
MANIFEST_BYTES = 64
FRAGMENT_KEY_BYTES = 32
MAX_FRAGMENTS = 16384  # of one object: what a manifest makes its reader do has a limit
MAX_OBJECT_BYTES = 2**32 - 1

_LAYOUT = struct.Struct("<16sIIIIQ16s")  # magic, object bytes, fragment bytes, fragments, 0, digest, zeros
_CHECK = struct.Struct("<Q")  # XXH3-64 of what stands before it
_INDEX = struct.Struct("<I")
_RESERVED = bytes(16)
assert _LAYOUT.size + _CHECK.size == MANIFEST_BYTES
assert len(MANIFEST_MAGIC) == 16


class UnsoundManifest(ValueError):
    """A manifest, but not one that this version could have written."""


@attrs.frozen(kw_only=True)
class Manifest:
    """An object in fragments of `fragment_bytes`, the last of which may be shorter.

    `digest` is the XXH3-64 of the fragments' checksums, each as a little-endian `u64`: it says of every byte
    what the object's own checksum would say, and neither side has to hash the bytes a second time.
    """

    object_bytes: int
    fragment_bytes: int
    digest: int

    @property
    def count(self) -> int:
        """How many fragments there are."""
        return count_fragments(self.object_bytes, self.fragment_bytes)

    def encode(self) -> bytes:
        """The 64 bytes that stand under the object's key."""
        raw = _LAYOUT.pack(
            MANIFEST_MAGIC, self.object_bytes, self.fragment_bytes, self.count, 0, self.digest, _RESERVED
        )
        return raw + _CHECK.pack(xxhash.xxh3_64_intdigest(raw))

    @classmethod
    def decode(cls, raw: bytes) -> Self | None:
        """The manifest that `raw` is; None for the bytes of any other object. Raises UnsoundManifest."""
        if not looks_like_manifest(raw):
            return None
        (check,) = _CHECK.unpack_from(raw, _LAYOUT.size)
        if check != xxhash.xxh3_64_intdigest(raw[: _LAYOUT.size]):
            return None
        _, object_bytes, fragment_bytes, count, zero, digest, zeros = _LAYOUT.unpack_from(raw)
        if (
            zero
            or zeros != _RESERVED
            or object_bytes < MANIFEST_BYTES
            or not 0 < fragment_bytes <= object_bytes
            or count != count_fragments(object_bytes, fragment_bytes)
            or count > MAX_FRAGMENTS
        ):
            raise UnsoundManifest(raw.hex())
        return cls(object_bytes=object_bytes, fragment_bytes=fragment_bytes, digest=digest)

    def keys(self, key: bytes) -> list[bytes]:
        """The names of the fragments of the object `key`: SHA-256 of manifest, key and index."""
        stem = hashlib.sha256(self.encode() + key)
        found = []
        for index in range(self.count):
            whole = stem.copy()
            whole.update(_INDEX.pack(index))
            found.append(whole.digest())
        return found

    def sizes(self) -> list[int]:
        """The lengths of the fragments, in order."""
        full, rest = divmod(self.object_bytes, self.fragment_bytes)
        return [self.fragment_bytes] * full + [rest] * (rest > 0)

    def cut(self, memory: memoryview) -> Iterator[memoryview]:
        """The places of the fragments in memory for the object."""
        for begin in range(0, self.object_bytes, self.fragment_bytes):
            yield memory[begin : min(begin + self.fragment_bytes, self.object_bytes)]


@attrs.frozen(kw_only=True)
class Way:
    """How objects are stored at a gateway. `boot_id` is empty where any boot is as good."""

    cuts_itself: bool
    fragment_bytes: int  # the largest object that it stores as it is, if it does not cut itself
    takes_fragments: bool  # whether manifests and the names of fragments fit its limits
    boot_id: bytes

    @classmethod
    def of(cls, features: Feature, limits: Limits, boot_id: bytes) -> Self:
        """The way of a gateway that has introduced itself so."""
        largest = min(limits.max_command_bytes, limits.max_object_bytes, limits.max_inflight_bytes)
        return cls(
            cuts_itself=Feature.FRAGMENTS in features,
            fragment_bytes=largest,
            takes_fragments=largest >= MANIFEST_BYTES and limits.max_key_bytes >= FRAGMENT_KEY_BYTES,
            boot_id=boot_id,
        )

    def for_any_boot(self) -> Self:
        """The same, also after the gateway has been started again."""
        return attrs.evolve(self, boot_id=b"")

    def holds_at(self, other: "Way") -> bool:
        """Whether what was planned for this way is right at a gateway of the `other`."""
        return self == (other if self.boot_id else other.for_any_boot())

    def needs_cutting(self, pieces: Sequence[memoryview], object_bytes: int) -> bool:
        """Whether an object must be stored through a manifest: it is too large for the device, or a reader
        would take its own bytes for one. The latter at every gateway: a store may change its gateway."""
        if object_bytes == MANIFEST_BYTES and looks_like_manifest(b"".join(pieces)):
            return True
        return object_bytes > self.fragment_bytes and not self.cuts_itself

    def can_cut(self, object_bytes: int) -> bool:
        """Whether an object that needs cutting can be had at all."""
        return (
            self.takes_fragments
            and object_bytes <= MAX_OBJECT_BYTES
            and count_fragments(object_bytes, self.fragment_bytes) <= MAX_FRAGMENTS
        )


def count_fragments(object_bytes: int, fragment_bytes: int) -> int:
    """How many pieces of `fragment_bytes` cover `object_bytes`."""
    return -(-object_bytes // fragment_bytes)


def looks_like_manifest(raw: bytes) -> bool:
    """Whether an object of these bytes may only be stored through a manifest."""
    return len(raw) == MANIFEST_BYTES and raw.startswith(MANIFEST_MAGIC)


def cut_pieces(pieces: Iterable[memoryview], fragment_bytes: int) -> list[list[memoryview]]:
    """The bytes of `pieces`, laid end to end, in runs of `fragment_bytes`; the last may be shorter."""
    found: list[list[memoryview]] = []
    room = 0
    for piece in pieces:
        offset = 0
        while offset < len(piece):
            if not room:
                found.append([])
                room = fragment_bytes
            part = piece[offset : offset + room]
            found[-1].append(part)
            offset += len(part)
            room -= len(part)
    return found


def checksum_of(pieces: Iterable[memoryview]) -> int:
    """The XXH3-64 of one fragment."""
    digest = xxhash.xxh3_64()
    for piece in pieces:
        digest.update(piece)
    return digest.intdigest()


def digest_of(checksums: Sequence[int]) -> int:
    """What a manifest says of its fragments' checksums, in order."""
    return xxhash.xxh3_64_intdigest(struct.pack(f"<{len(checksums)}Q", *checksums))
