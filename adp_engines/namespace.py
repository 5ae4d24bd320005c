"""Namespaces: fingerprints of everything that makes cache bytes interchangeable (W9).

Objects of two engines meet only if their fingerprints are equal, so the rule is: whatever could change a
byte, or the meaning of a byte, is a field here; whatever cannot (names, paths, ports, the number of blocks)
is not. A field too many costs a cold cache after a change, a field too few serves wrong bytes.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import attrs

#: Raised whenever the layout of objects or the derivation of keys changes.
FORMAT_VERSION = 1

_WEIGHT_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz", ".tensors"})
_WINDOW_BYTES = 16384
_WINDOWS = 16

JSON = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]


@attrs.frozen(kw_only=True)
class Identity:
    """What an engine's cache bytes depend on. Every field counts; see `fingerprint`."""

    #: Which weights: `weights_identity` of a directory, or what the user called them.
    model: JSON
    #: Model settings that change what is computed from the same weights (overrides, position scaling,
    #: quantisation).
    computation: Mapping[str, JSON]
    #: How cache values are represented: dtypes of caches and states, cache modes, scales.
    cache: Mapping[str, JSON]
    #: Tokens per hash, blocks per chunk, and each group's block size and description of its pages.
    blocks: Mapping[str, JSON]
    #: Sizes of every parallel axis, and whether ranks hold the same bytes.
    parallel: Mapping[str, JSON]
    #: Each rank's `Geometry.digest`, in rank order.
    layouts: tuple[str, ...]
    #: Hash algorithm of the block keys and a digest of its seed.
    hashing: Mapping[str, JSON]
    #: The engine and the version line whose page layouts were used.
    engine: Mapping[str, JSON]

    def fingerprint(self) -> bytes:
        """The namespace: 32 bytes, equal exactly when every field is equal."""
        return hashlib.sha256(canonical_json([FORMAT_VERSION, attrs.asdict(self)])).digest()


def canonical_json(value: object) -> bytes:
    """The one JSON text of a value: sorted keys, no white space, no NaN. Raises TypeError or ValueError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def diverged(namespace: bytes) -> bytes:
    """A namespace that nobody else has, for weights in memory that are no longer those that were named."""
    return hashlib.sha256(namespace + os.urandom(32)).digest()


def weights_identity(directory: Path) -> JSON:
    """Identify the model in `directory` by content: all of its configuration, and samples of its weights.

    Weights are too large to read whole at every start. For each file this takes its size and 16 windows of 16
    KiB spread evenly from the first to the last byte: training touches them all, and a header names every
    tensor. The directory's own path does not count.

    Raises OSError if a file cannot be read, FileNotFoundError if there is no model.
    """
    config = directory / "config.json"
    weights = sorted(p for p in directory.iterdir() if p.suffix in _WEIGHT_SUFFIXES and p.is_file())
    if not config.is_file() and not weights:
        raise FileNotFoundError(f"no model in {directory}")
    return {
        "config": hashlib.sha256(config.read_bytes()).hexdigest() if config.is_file() else None,
        "weights": [[path.name, path.stat().st_size, _sampled_digest(path)] for path in weights],
    }


def _sampled_digest(path: Path) -> str:
    digest = hashlib.sha256()
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= _WINDOWS * _WINDOW_BYTES:
            digest.update(file.read())
        else:
            for window in range(_WINDOWS):
                file.seek((size - _WINDOW_BYTES) * window // (_WINDOWS - 1))
                digest.update(file.read(_WINDOW_BYTES))
    return digest.hexdigest()
