"""What the records of one journal add up to. Pure: columns in, columns out.

A kill that a damaged disk has made unreadable must not bring its object back. A kill repeats the place, the
checksum and the sequence of the commit that it voids; so a record that does not decode, but still says two of
the three as an earlier commit does, voids that commit: it was the kill, or it was nothing that anybody needs.
"""

from typing import Final, TypeAlias, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from .format import RECORD, UNIT_BYTES, Kind, Records

_T = TypeVar("_T", bound=np.generic)
_SLOT: Final = np.dtype(np.int64)
Positions: TypeAlias = npt.NDArray[np.int64]


@attrs.frozen(kw_only=True)
class Replayed:
    """The outcome. Commits in the order of the journal."""

    live: Records  # committed and not killed
    missing: Records  # the same, but the data file ends before they do
    doubtful: Records  # committed, and killed by what may have been a kill
    commits: int  # as `Segment.commits`
    tail_bytes: int
    damaged_records: int  # in front of the last one that decodes
    slots: int  # up to and including that one; the header has the first
    last_sequence: int  # of all records, also those that are void


@attrs.define
class Replay:
    """Give it the journal piece by piece, then ask for the outcome."""

    _whole: list[Records] = attrs.field(factory=list)
    _whole_slots: list[Positions] = attrs.field(factory=list)
    _torn: list[Records] = attrs.field(factory=list)
    _torn_slots: list[Positions] = attrs.field(factory=list)

    def add(self, records: Records, is_whole: npt.NDArray[np.bool_], *, slot: int) -> None:
        """The records from `slot` on, and which of them decode. Their memory must stay as it is."""
        slots = np.arange(slot, slot + len(records))
        self._whole.append(_chosen(records, is_whole))
        self._whole_slots.append(_chosen(slots, is_whole))
        is_torn = ~is_whole
        is_torn &= (records["sequence"] != 0) | (records["checksum"] != 0)
        if is_torn.any():
            self._torn.append(records[is_torn])
            self._torn_slots.append(slots[is_torn])

    def outcome(self, *, data_bytes: int) -> Replayed:
        """What all that was added comes to, beside a data file of so many bytes."""
        records = _joined(self._whole, RECORD)
        slots = _joined(self._whole_slots, _SLOT)
        is_live, extra = _live(records)
        units = records["unit"].astype(np.int64)
        lengths = records["length"].astype(np.int64)
        is_here = units * UNIT_BYTES + lengths <= data_bytes
        is_doubtful = np.zeros(len(records), dtype=np.bool_)
        if self._torn:
            live = np.flatnonzero(is_live)
            torn, torn_slots = _joined(self._torn, RECORD), _joined(self._torn_slots, _SLOT)
            is_doubtful[live] = _named_by(records[live], slots[live], torn, torn_slots)
        is_commit = records["kind"] == Kind.COMMIT
        ends = units + np.maximum(-(-lengths // UNIT_BYTES), 1)
        last = int(slots[-1]) if len(slots) else 0
        damaged = last - len(slots)
        return Replayed(
            live=_chosen(records, is_live & ~is_doubtful & is_here),
            missing=records[is_live & ~is_doubtful & ~is_here],
            doubtful=records[is_doubtful],
            commits=int(np.count_nonzero(is_commit)) + extra + damaged,
            tail_bytes=int(ends.max(initial=0, where=is_commit)) * UNIT_BYTES,
            damaged_records=damaged,
            slots=last + 1,
            last_sequence=int(records["sequence"].max(initial=0)),
        )


def _joined(parts: list[npt.NDArray[_T]], dtype: np.dtype[_T]) -> npt.NDArray[_T]:
    return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype), *parts])


def _chosen(array: npt.NDArray[_T], is_chosen: npt.NDArray[np.bool_]) -> npt.NDArray[_T]:
    """What is chosen: without a copy if that is all, as it nearly always is."""
    return array if is_chosen.all() else array[is_chosen]


def _live(records: Records) -> tuple[npt.NDArray[np.bool_], int]:
    """Which are commits that nothing kills, and the number of kills that kill nothing."""
    order = np.argsort(records["unit"], kind="stable")
    units = records["unit"][order]
    is_commit = records["kind"][order] == Kind.COMMIT
    continues = np.zeros(len(order), dtype=np.bool_)  # says something of the same place as the one before
    continues[1:] = units[1:] == units[:-1]
    is_last = np.ones(len(order), dtype=np.bool_)
    is_last[:-1] = ~continues[1:]
    follows_commit = continues.copy()
    follows_commit[1:] &= is_commit[:-1]
    # What such a kill was for is one of the damaged, or never was: keep the slot count whole.
    extra = int(np.count_nonzero(~is_commit & ~follows_commit))
    is_live = np.zeros(len(order), dtype=np.bool_)
    is_live[order] = is_last & is_commit
    return is_live, extra


def _named_by(
    commits: Records, slots: Positions, torn: Records, torn_slots: Positions
) -> npt.NDArray[np.bool_]:
    """Which commits a torn record behind them names by two of place, checksum and sequence."""
    is_named = np.zeros(len(commits), dtype=np.bool_)
    if not len(commits):
        return is_named
    for by, others in (("sequence", ("unit", "checksum")), ("unit", ("checksum",))):
        order = np.argsort(commits[by], kind="stable")
        at = np.searchsorted(commits[by], torn[by], sorter=order)
        candidates = order[np.minimum(at, len(order) - 1)]
        agrees = np.zeros(len(torn), dtype=np.bool_)
        for other in others:
            agrees |= commits[other][candidates] == torn[other]
        agrees &= commits[by][candidates] == torn[by]
        agrees &= slots[candidates] < torn_slots
        is_named[candidates[agrees]] = True
    return is_named
