"""Names of objects (spec section 2).

On the wire a key is opaque bytes, unique within its namespace. Engines build it from what makes a block's
bytes unique: the block hash, never truncated, the KV cache group, and the shard that one rank holds.
"""

import struct
from typing import Self

import attrs

from .constants import MAX_KEY_BYTES, NAMESPACE_BYTES
from .errors import LocalProtocolError

_TAIL = struct.Struct(">II")


@attrs.frozen(kw_only=True)
class ObjectKey:
    """An engine's name for one shard of one block (or chunk of blocks) of one KV cache group.

    `to_bytes()` is the canonical form: the hash, then group and shard as big-endian 32-bit integers, so that
    keys of one block sort together and the hash keeps its full length.
    """

    block_hash: bytes = attrs.field(
        validator=[attrs.validators.min_len(1), attrs.validators.max_len(MAX_KEY_BYTES - _TAIL.size)]
    )
    group: int = attrs.field(validator=[attrs.validators.ge(0), attrs.validators.lt(2**32)])
    shard: int = attrs.field(default=0, validator=[attrs.validators.ge(0), attrs.validators.lt(2**32)])

    def to_bytes(self) -> bytes:
        """Canonical bytes: `block_hash || u32 group || u32 shard` (big endian)."""
        return self.block_hash + _TAIL.pack(self.group, self.shard)

    @classmethod
    def from_bytes(cls, key: bytes) -> Self:
        """The inverse of `to_bytes`. Raises LocalProtocolError for bytes that cannot be such a key."""
        if not _TAIL.size < len(key) <= MAX_KEY_BYTES:
            raise LocalProtocolError(f"not an engine key: {len(key)} bytes")
        group, shard = _TAIL.unpack_from(key, len(key) - _TAIL.size)
        return cls(block_hash=key[: -_TAIL.size], group=group, shard=shard)


def check_namespace(namespace: bytes) -> bytes:
    """Return `namespace` if it is a fingerprint of the right size; raise LocalProtocolError otherwise."""
    if not isinstance(namespace, bytes):
        raise LocalProtocolError(f"a namespace is bytes, not {type(namespace).__name__}")
    if len(namespace) != NAMESPACE_BYTES:
        raise LocalProtocolError(f"a namespace is {NAMESPACE_BYTES} bytes, not {len(namespace)}")
    return namespace
