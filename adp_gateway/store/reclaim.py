"""Which segment goes, and which of its objects are written again. Pure: plans only.

Whose turn it is says the policy (`eviction`); here is what the store adds. What nobody needs goes before the
policy is asked: empty segments, then those that are mostly dead, whose objects all move. What is in use is
never chosen: not what is being read or written, nor the segment that is being filled. What is held stays in
any case, so it comes first among what is written again; a segment that holds more of it than the budget takes
is passed over, until its holds have ended.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from itertools import chain
from typing import NamedTuple

import attrs
import numpy as np

from .catalog import Catalog
from .eviction import MOST_KEPT
from .index import Entry
from .segment import Layout, Segment, extent_bytes


class Survivor(NamedTuple):
    """An object that stays."""

    namespace: bytes
    key: bytes
    entry: Entry


def choose_victim(
    catalog: Catalog, *, is_fit: Callable[[Segment], bool] = lambda _segment: True
) -> Segment | None:
    """The segment to give up next; None if all are in use or none is fit.

    An empty one if there is any; else the one with the least life in it, if that is little enough to be moved
    as a whole: so what was deleted, replaced or evicted makes room before anything that is current has to.
    Else the policy's; what the policy keeps on the way goes to the end of its queue and loses its marks.
    """
    segments = catalog.segments.values()
    idle = candidates(segments)
    empty = next((segment for segment in idle if not segment.objects), None)
    if empty is not None:
        return empty
    mostly_dead = [segment for segment in idle if segment.is_mostly_dead]
    mostly_dead.sort(key=lambda segment: segment.live_bytes / segment.charge_bytes)
    is_fit = cache(is_fit)  # nothing that it depends on changes here
    victim = next(filter(is_fit, mostly_dead), None)
    if victim is not None:
        return victim
    kept = 0
    while victim := next(filter(is_fit, candidates(catalog.policy.order(segments))), None):
        if kept == MOST_KEPT or not catalog.policy.is_kept(victim, catalog.marked_bytes(victim)):
            break
        catalog.keep(victim)
        kept += 1
    return victim


def candidates(segments: Iterable[Segment]) -> list[Segment]:
    """Those that nobody uses."""
    return [segment for segment in segments if segment.is_sealed and segment.is_idle]


def survivors(catalog: Catalog, victim: Segment, *, budget_bytes: int) -> Iterator[Survivor]:
    """The objects of `victim` that stay, as far as the budget goes.

    Those that are held, then those that are marked, or all if it is mostly dead.

    The budget is what makes reclaiming end: it must stay well below what removing the victim gives back.
    """
    held = list(_held(catalog, victim))
    places = {survivor.entry.place for survivor in held}
    others = (survivor for survivor in _worthy(catalog, victim) if survivor.entry.place not in places)
    for survivor in chain(held, others):
        budget_bytes -= extent_bytes(survivor.entry.length)
        if budget_bytes < 0:
            return
        yield survivor


def _worthy(catalog: Catalog, victim: Segment) -> Iterator[Survivor]:
    is_everything = victim.is_mostly_dead
    for group in catalog.index.segment(victim.segment_id):
        keys = group.keys
        chosen = range(len(keys)) if is_everything else np.flatnonzero(group.entries["uses"]).tolist()
        for position in chosen:
            yield Survivor(group.namespace, keys[position], group.entry(position))


def _held(catalog: Catalog, victim: Segment) -> Iterator[Survivor]:
    if not catalog.holds.items:
        return
    for group in catalog.index.segment(victim.segment_id):
        held = catalog.holds.held(group.namespace)
        if not held:
            continue
        for position, key in enumerate(group.keys):
            if key in held:
                yield Survivor(group.namespace, key, group.entry(position))


@attrs.define(eq=False)
class Plan:
    """What may go when, in a store that takes `capacity_bytes`."""

    _catalog: Catalog
    _layout: Layout
    _capacity_bytes: int
    _hopeless: object = None  # the circumstances in which no victim was found

    @property
    def is_full(self) -> bool:
        """Whether one more segment would be too much."""
        return self._catalog.used_bytes + self._layout.segment_bytes > self._capacity_bytes

    def survivor_bytes(self, victim: Segment, length: int) -> int:
        """How much of `victim` may go into a segment that is opened for an object of `length` bytes."""
        room_bytes = self._layout.data_bytes - extent_bytes(length)
        return room_bytes if victim.is_mostly_dead else min(room_bytes, self._layout.data_bytes // 2)

    def choose_victim(
        self, length: int | None, *, moved_bytes: int = 0, stuck: Collection[Segment] = ()
    ) -> Segment | None:
        """The segment to give up next, none of `stuck`, and with no more held objects than still may go into
        the segment that was opened for `length` bytes and has `moved_bytes` of others already. None: no
        segment has been opened, so nothing can be moved."""

        def choose(is_fit: Callable[[Segment], bool]) -> Segment | None:
            return choose_victim(self._catalog, is_fit=is_fit)

        return self._search(choose, length, moved_bytes, stuck)

    def _search(
        self,
        choose: Callable[[Callable[[Segment], bool]], Segment | None],
        length: int | None,
        moved_bytes: int = 0,
        stuck: Collection[Segment] = (),
    ) -> Segment | None:
        """What `choose` makes of what is fit. A search in vain has looked at all that is held: it is not
        repeated until a hold has ended."""
        catalog = self._catalog
        idle = [segment.segment_id for segment in candidates(catalog.segments.values())]
        circumstances = (catalog.holds.ended, len(catalog.index), idle, length, moved_bytes)
        if circumstances == self._hopeless:
            return None

        def is_fit(segment: Segment) -> bool:
            room_bytes = 0 if length is None else self.survivor_bytes(segment, length) - moved_bytes
            return segment not in stuck and not self.has_held_bytes(segment, more_than=max(0, room_bytes))

        found = choose(is_fit)
        if found is None and not stuck:
            self._hopeless = circumstances
        return found

    def needs_reserve(self, length: int) -> bool:
        """Whether the last free segment must stay free, though `length` bytes have no room elsewhere.

        If it were opened, none could be given up for another, so much is held. And later, when each holds a
        little only, there would be no room to write that again.
        """
        catalog = self._catalog
        if (
            not catalog.holds.items
            or catalog.used_bytes + 2 * self._layout.segment_bytes <= self._capacity_bytes
            or not candidates(catalog.segments.values())
        ):
            return False
        active = catalog.active
        if active is not None and not self.has_held_bytes(
            active, more_than=self.survivor_bytes(active, length)
        ):
            return False

        def any_of_them(is_fit: Callable[[Segment], bool]) -> Segment | None:
            return next(filter(is_fit, candidates(catalog.segments.values())), None)

        return self._search(any_of_them, length) is None

    def has_held_bytes(self, segment: Segment, *, more_than: int) -> bool:
        """Whether the objects of `segment` that are held would take more than so much of another."""
        for survivor in _held(self._catalog, segment):
            more_than -= extent_bytes(survivor.entry.length)
            if more_than < 0:
                return True
        return False
