"""Where an engine's pages lie inside an ADP object: pure arithmetic on the engine's own description.

An object is one chunk (`blocks_per_chunk` consecutive blocks) of one KV cache group, as one rank holds it:

    object = run of layer ref 0 | run of layer ref 1 | ...           in the engine's order
    run    = page of block 0 | page of block 1 | ...                 one page a block of the chunk
    page   = the unpadded bytes of one block in one tensor           [0, page_bytes) of the block's row

Runs are contiguous, so that one strided view of a staging slot serves all blocks of a job for a layer, and an
object holds no padding: equal objects have equal bytes whatever the engine's strides are.
"""

import hashlib
import json
from collections.abc import Sequence

import attrs

from .errors import UnknownLayout


@attrs.frozen(kw_only=True)
class Tensor:
    """One cache tensor as the engine describes it: `blocks` rows of `row_bytes`, `stride_bytes` apart."""

    blocks: int
    row_bytes: int
    stride_bytes: int


@attrs.frozen(kw_only=True)
class LayerRef:
    """The engine's statement that a layer's page is the first `page_bytes` of the rows of tensor `tensor`."""

    tensor: int
    page_bytes: int


@attrs.frozen(kw_only=True)
class Run:
    """A layer's part of an object: `blocks_per_chunk` pages of `page_bytes` from `offset` (bytes)."""

    tensor: int
    page_bytes: int
    offset: int


@attrs.frozen(kw_only=True)
class Group:
    """All runs of one KV cache group's objects."""

    runs: tuple[Run, ...]
    object_bytes: int


@attrs.frozen(kw_only=True)
class Geometry:
    """The objects of one rank."""

    blocks: int
    blocks_per_chunk: int
    groups: tuple[Group, ...]

    @classmethod
    def from_description(
        cls,
        tensors: Sequence[Tensor],
        group_refs: Sequence[Sequence[LayerRef]],
        *,
        blocks_per_chunk: int,
        layer_names: Sequence[Sequence[str]],
    ) -> "Geometry":
        """Lay out the objects of every group.

        `group_refs[g]` are the refs of group `g`, `layer_names[g]` the layers that the engine says it has.
        There is one ref a layer, or a single ref when the engine packs a whole group into one row.

        Raises UnknownLayout, naming the tensor or the layer, if anything has no home or does not add up.
        """
        _check(tensors, group_refs, layer_names)
        groups = []
        for refs in group_refs:
            runs = []
            offset = 0
            for ref in refs:
                runs.append(Run(tensor=ref.tensor, page_bytes=ref.page_bytes, offset=offset))
                offset += ref.page_bytes * blocks_per_chunk
            groups.append(Group(runs=tuple(runs), object_bytes=offset))
        return cls(blocks=tensors[0].blocks, blocks_per_chunk=blocks_per_chunk, groups=tuple(groups))

    @property
    def object_bytes(self) -> tuple[int, ...]:
        """Size of an object of each group, in bytes."""
        return tuple(group.object_bytes for group in self.groups)

    def digest(self, *extra: object) -> str:
        """Fingerprint of everything that decides which byte of an object means what.

        Not of the number of blocks: the same pages in a larger cache are the same pages. `extra` holds
        whatever JSON values the caller knows about the inside of a page.
        """
        description = [
            self.blocks_per_chunk,
            [[[run.page_bytes, run.offset] for run in group.runs] for group in self.groups],
            extra,
        ]
        return hashlib.sha256(json.dumps(description, separators=(",", ":")).encode()).hexdigest()


def _check(
    tensors: Sequence[Tensor], group_refs: Sequence[Sequence[LayerRef]], layer_names: Sequence[Sequence[str]]
) -> None:
    if not tensors or not group_refs:
        raise UnknownLayout("the engine has no KV cache to store")
    for index, tensor in enumerate(tensors):
        if tensor.blocks != tensors[0].blocks:
            raise UnknownLayout(
                f"cache tensor {index} has {tensor.blocks} blocks, tensor 0 {tensors[0].blocks}"
            )
        if not 0 < tensor.row_bytes <= tensor.stride_bytes:
            raise UnknownLayout(
                f"cache tensor {index} is not block first: rows of {tensor.row_bytes} bytes"
                f" every {tensor.stride_bytes}"
            )
    if len(group_refs) != len(layer_names):
        raise UnknownLayout(f"{len(layer_names)} KV cache groups, but tensors for {len(group_refs)}")
    homeless = set(range(len(tensors)))
    for group, (refs, names) in enumerate(zip(group_refs, layer_names, strict=True)):
        if len(refs) < len(names) and len(refs) != 1:
            raise UnknownLayout(
                f"layer {names[len(refs)]!r} of KV cache group {group} has no tensor that could be stored"
            )
        if not refs:
            raise UnknownLayout(f"KV cache group {group} has no tensors")
        for position, ref in enumerate(refs):
            layer = names[position] if len(refs) == len(names) else f"#{position}"
            if not 0 <= ref.tensor < len(tensors):
                raise UnknownLayout(f"layer {layer!r} of group {group} refers to unknown tensor {ref.tensor}")
            if not 0 < ref.page_bytes <= tensors[ref.tensor].row_bytes:
                raise UnknownLayout(
                    f"layer {layer!r} of group {group}: pages of {ref.page_bytes} bytes"
                    f" in rows of {tensors[ref.tensor].row_bytes}"
                )
            homeless.discard(ref.tensor)
    if homeless:
        raise UnknownLayout(f"cache tensor {min(homeless)} belongs to no KV cache group")


@attrs.frozen(kw_only=True)
class Moves:
    """Which blocks of one group move between the engine and which places of which objects.

    Three columns of equal length: block `blocks[i]` is block `places[i]` of object `objects[i]`, an index
    into the job's list of keys.
    """

    group: int
    blocks: tuple[int, ...]
    objects: tuple[int, ...]
    places: tuple[int, ...]


def plan_store(
    blocks_per_chunk: int, group_sizes: Sequence[int], block_ids: Sequence[int], key_groups: Sequence[int]
) -> tuple[list[Moves], tuple[int, ...]]:
    """Assign the source blocks of a store job to its objects.

    `key_groups[k]` is the group of key `k`; keys and blocks both come ordered by group, then by position.
    Only full chunks are stored: the engine says which block a group's run starts with but not where the run
    has gaps, so a group whose blocks do not come in exact chunks cannot be placed without guessing.

    Returns the moves and the indices of the keys that are not stored for that reason.
    """
    moves: list[Moves] = []
    refused: list[int] = []
    first_block = 0
    first_key = 0
    for group, size in enumerate(group_sizes):
        keys = _leading(key_groups, first_key, group)
        blocks = block_ids[first_block : first_block + size]
        if size == keys * blocks_per_chunk and 0 not in blocks:
            if size:
                moves.append(
                    Moves(
                        group=group,
                        blocks=tuple(blocks),
                        objects=tuple(first_key + i // blocks_per_chunk for i in range(size)),
                        places=tuple(i % blocks_per_chunk for i in range(size)),
                    )
                )
        else:
            refused.extend(range(first_key, first_key + keys))
        first_block += size
        first_key += keys
    refused.extend(range(first_key, len(key_groups)))
    return moves, tuple(refused)


def plan_load(
    blocks_per_chunk: int,
    group_sizes: Sequence[int],
    first_indices: Sequence[int],
    block_ids: Sequence[int],
    key_groups: Sequence[int],
) -> list[Moves] | None:
    """Assign the destination blocks of a load job to its objects.

    `first_indices[g]` is the position of group `g`'s first block in the request: it may lie inside a chunk,
    the part before it is what the engine already has and is left alone. Block id 0 is the engine's
    placeholder, which all requests share: it is never written.

    Returns None when keys and blocks do not match, or when one block would be written twice: such a job must
    not touch a single block.
    """
    moves: list[Moves] = []
    written: set[int] = set()
    first_block = 0
    first_key = 0
    for group, (size, first) in enumerate(zip(group_sizes, first_indices, strict=True)):
        keys = _leading(key_groups, first_key, group)
        needed = (first + size - 1) // blocks_per_chunk - first // blocks_per_chunk + 1 if size else 0
        if keys != needed:
            return None
        wanted = [i for i in range(size) if block_ids[first_block + i] != 0]
        blocks = tuple(block_ids[first_block + i] for i in wanted)
        if len(set(blocks)) != len(blocks) or not written.isdisjoint(blocks):
            return None
        written.update(blocks)
        if wanted:
            moves.append(
                Moves(
                    group=group,
                    blocks=blocks,
                    objects=tuple(
                        first_key + (first + i) // blocks_per_chunk - first // blocks_per_chunk
                        for i in wanted
                    ),
                    places=tuple((first + i) % blocks_per_chunk for i in wanted),
                )
            )
        first_block += size
        first_key += keys
    if first_key != len(key_groups) or first_block != len(block_ids):
        return None
    return moves


def _leading(key_groups: Sequence[int], start: int, group: int) -> int:
    count = 0
    while start + count < len(key_groups) and key_groups[start + count] == group:
        count += 1
    return count
