"""Two sides of a row, measured in turns."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import attrs


@attrs.define
class Pair:
    """Seconds of each run of both sides."""

    ours: list[float] = attrs.field(factory=list)
    reference: list[float] = attrs.field(factory=list)


async def in_turns(
    ours: Callable[[], Awaitable[None]],
    reference: Callable[[], Awaitable[None]],
    check: Callable[[], None],
    *,
    samples: int,
    warm_ups: int,
) -> Pair:
    """Run both `samples` times, one after the other, and `check` after each what it has done. The first
    `warm_ups` do not count, nor does the check."""
    pair = Pair()
    for sample in range(samples + warm_ups):
        for side, seconds in ((ours, pair.ours), (reference, pair.reference)):
            began = time.perf_counter()
            await side()
            took = time.perf_counter() - began
            check()
            if sample >= warm_ups:
                seconds.append(took)
    return pair
