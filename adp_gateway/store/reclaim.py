"""Which segment goes, and which of its objects get a second chance. Pure: plans only.

Objects leave as they came, a segment at a time, oldest first. An object that has been read since it was
written is written again at the front instead of being evicted, and must be read again to earn that again: the
CLOCK rule, with a segment for a tick. It comes close to least-recently-used and costs a read one flag.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .index import Entry, Index
from .segment import Segment, extent_bytes


class Survivor(NamedTuple):
    """An object that stays."""

    namespace: bytes
    key: bytes
    entry: Entry


def choose_victim(segments: Iterable[Segment]) -> Segment | None:
    """The segment to give up next; None if all are in use.

    An empty one if there is any; else the one with the least life in it, if that is little enough to be moved
    as a whole: so what was deleted, replaced or evicted makes room before anything that is current has to.
    Else the oldest. `segments` in order of age. Those being read or written, and the one being filled, are
    left alone.
    """
    candidates = [segment for segment in segments if segment.is_sealed and segment.is_idle]
    empty = (segment for segment in candidates if not segment.objects)
    mostly_dead = (segment for segment in candidates if segment.is_mostly_dead)
    barest = min(mostly_dead, key=lambda segment: segment.live_bytes / segment.charge_bytes, default=None)
    return next(empty, None) or barest or next(iter(candidates), None)


def survivors(index: Index, victim: Segment, *, budget_bytes: int) -> Iterator[Survivor]:
    """The objects of `victim` that stay, as far as the budget goes.

    Those that have earned a second chance, or all if it is mostly dead.

    The budget is what makes reclaiming end: it must stay well below what removing the victim gives back.
    """
    is_everything = victim.is_mostly_dead
    for namespace, keys in victim.members.items():
        for key in dict.fromkeys(keys):
            entry = index.get(namespace, key)
            if entry is None or entry.segment_id != victim.segment_id:
                continue
            if not (entry.is_used or is_everything):
                continue
            budget_bytes -= extent_bytes(entry.length)
            if budget_bytes < 0:
                return
            yield Survivor(namespace, key, entry)
