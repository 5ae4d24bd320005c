"""Copies between an engine's cache tensors and staging memory, one call a layer for all blocks of a job.

Host memory is the one kind of `transfers.PageCopies` there is so far; a device with streams implements the
same three calls, with `mark` recording an event on the engine's stream and both copies waiting for it.
"""

from collections.abc import Sequence

import torch

from .errors import UnsupportedEngine
from .geometry import Geometry, Moves, Run
from .staging import Region
from .transfers import PageCopies


def copies_for(geometry: Geometry, tensors: Sequence[torch.Tensor]) -> PageCopies:
    """The copies for the device that holds `tensors` (int8, one row a block).

    Raises UnsupportedEngine for a device that has none.
    """
    kinds = {tensor.device.type for tensor in tensors}
    if kinds != {"cpu"}:
        raise UnsupportedEngine(
            f"no copies between staging and cache tensors on {', '.join(sorted(kinds))} yet"
        )
    return HostCopies(geometry, tensors)


class HostCopies:
    """Copies for cache tensors in host memory: what the engine computed before it submits is in memory."""

    def __init__(self, geometry: Geometry, tensors: Sequence[torch.Tensor]) -> None:
        self._geometry = geometry
        self._tensors = tensors

    def mark(self) -> None:
        """Nothing to record: what was computed before is in memory."""

    def store(self, mark: object, moves: Moves, region: Region, slots: Sequence[int]) -> None:
        """See PageCopies."""
        blocks, objects, places = self._columns(moves, slots)
        for run in self._geometry.groups[moves.group].runs:
            pages, staged = self._views(run, region)
            staged[objects, places] = pages[blocks]

    def load(self, mark: object, moves: Moves, region: Region, slots: Sequence[int]) -> None:
        """See PageCopies."""
        blocks, objects, places = self._columns(moves, slots)
        for run in self._geometry.groups[moves.group].runs:
            pages, staged = self._views(run, region)
            pages[blocks] = staged[objects, places]

    def _columns(self, moves: Moves, slots: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return (
            torch.tensor(moves.blocks),
            torch.tensor([slots[index] for index in moves.objects]),
            torch.tensor(moves.places),
        )

    def _views(self, run: Run, region: Region) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer's pages as (block, page) and its place in every slot as (slot, place, page)."""
        rows = self._tensors[run.tensor]
        slot_bytes = region.name.slot_bytes
        # Indexing moves whole elements: wide ones, where everything is aligned for them.
        width = torch.int64
        if any(n % 8 for n in (run.page_bytes, run.offset, rows.stride(0), rows.shape[1], rows.data_ptr())):
            width = torch.int8
        size = width.itemsize
        memory = torch.frombuffer(region.memory, dtype=width)
        staged = memory.as_strided(
            (region.name.slots, self._geometry.blocks_per_chunk, run.page_bytes // size),
            (slot_bytes // size, run.page_bytes // size, 1),
            run.offset // size,
        )
        return rows.view(width)[:, : run.page_bytes // size], staged
