"""`python -m bench.eviction`: which eviction policy serves agents best, by simulation. No device, no gateway.

Agents return after think time with the history of the time before and a little more, and read from the
front until the first block that is missing; what is missing is computed, and stored again. Beside them, batch
jobs store prompts that nobody asks for again. What counts is the share of agents' prompt tokens that is
restored, and how often a byte is written until it is gone.

The last policy of the table is the gateway's own module, driven with segments of blocks. docs/adr/0016 has
the table and what it decided.
"""

from __future__ import annotations

import argparse
import heapq
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import attrs

from adp_gateway.store.eviction import (
    KEPT_SHARE,
    MOST_KEPT,
    PROBATION_SHARE,
    Ghosts,
    Queue,
    TwoQueues,
)

BLOCK_TOKENS = 128
FIRST_TOKENS, MOST_TOKENS, TURN_TOKENS = (33_000, 36_000), 40_000, 900
SYSTEM_BLOCKS = 40
WARMUP = 0.3  # of the requests, which are not counted
NAMESPACE = bytes(32)


@attrs.frozen(kw_only=True)
class Workload:
    """Agents, and how much of what is written comes from batch jobs. `restart`: of the store, half way."""

    name: str
    agents: int
    batch_share: float = 0.0
    think_seconds: float = 180.0
    late_share: float = 0.15  # of the returns take five times as long
    hours: float = 3.0
    restart: bool = False


@attrs.frozen
class Request:
    """One prompt, block by block."""

    blocks: list[int]
    is_agent: bool


WORKLOADS = (
    Workload(name="all fits", agents=20),
    Workload(name="1.4x", agents=40),
    Workload(name="1.4x, half batch", agents=40, batch_share=0.5),
    Workload(name="0.8x, 70% batch", agents=22, batch_share=0.7),
    Workload(name="2x, 30% batch", agents=56, batch_share=0.3),
    Workload(name="0.8x, 70% batch, restart", agents=22, batch_share=0.7, restart=True),
    Workload(name="1.4x, restart", agents=40, restart=True),
)


def requests(workload: Workload, *, seed: int) -> list[Request]:
    """The trace, in the order of time."""
    chance = random.Random(seed)
    blocks = 0

    def fresh(count: int) -> list[int]:
        nonlocal blocks
        blocks += count
        return list(range(blocks - count, blocks))

    prompts = [fresh(SYSTEM_BLOCKS) for _ in range(3)]

    def session() -> list[int]:
        length = int(chance.uniform(*FIRST_TOKENS)) // BLOCK_TOKENS
        return chance.choice(prompts) + fresh(length - SYSTEM_BLOCKS)

    think = workload.think_seconds
    histories = {agent: session() for agent in range(workload.agents)}
    events = [(chance.uniform(0, 2 * think), agent) for agent in histories]
    turns = (MOST_TOKENS - sum(FIRST_TOKENS) / 2) / TURN_TOKENS
    written_rate = (
        workload.agents
        / (think * (1 + 4 * workload.late_share))
        * (TURN_TOKENS + sum(FIRST_TOKENS) / 2 / turns)
    )
    share = workload.batch_share
    batch_rate = written_rate * share / (1 - share) / FIRST_TOKENS[0]
    if batch_rate:
        events.append((chance.expovariate(batch_rate), -1))
    heapq.heapify(events)
    trace: list[Request] = []
    while (event := heapq.heappop(events))[0] < workload.hours * 3600:
        now, agent = event
        if agent < 0:
            trace.append(Request(fresh(FIRST_TOKENS[0] // BLOCK_TOKENS), is_agent=False))
            heapq.heappush(events, (now + chance.expovariate(batch_rate), -1))
            continue
        history = histories[agent]
        trace.append(Request(list(history), is_agent=True))
        history += fresh(max(1, int(chance.expovariate(1 / TURN_TOKENS)) // BLOCK_TOKENS))
        if len(history) * BLOCK_TOKENS > MOST_TOKENS:
            histories[agent] = session()
        pause = chance.lognormvariate(0, 0.7) * think * 0.78
        heapq.heappush(events, (now + pause * (5 if chance.random() < workload.late_share else 1), agent))
    return trace


class Cache(Protocol):
    """A store of blocks. `moved`: written a second time to make room."""

    moved: int

    def has(self, block: int) -> bool:
        """Whether it is there."""
        ...

    def read(self, block: int) -> None:
        """It is there, and read."""
        ...

    def put(self, block: int) -> None:
        """It is not there, and stored."""
        ...

    def restart(self) -> None:
        """Forget what a restart forgets."""
        ...


class Fifo:
    """First in, first out."""

    def __init__(self, capacity: int) -> None:
        self.moved = 0
        self._capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def has(self, block: int) -> bool:
        return block in self._blocks

    def read(self, block: int) -> None:
        pass

    def put(self, block: int) -> None:
        self._blocks[block] = None
        if len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def restart(self) -> None:
        pass


class Lru(Fifo):
    """Least recently used, block by block: what a log can do only by writing everything again."""

    def read(self, block: int) -> None:
        self._blocks.move_to_end(block)


class S3Fifo:
    """S3-FIFO as published, block by block: one block in ten on probation, two reads to leave it."""

    def __init__(self, capacity: int, *, share: float = 0.1, needed: int = 2) -> None:
        self.moved = 0
        self._capacity, self._needed = capacity, needed
        self._small_size = int(capacity * share)
        self._small: deque[int] = deque()
        self._main: deque[int] = deque()
        self._ghosts: OrderedDict[int, None] = OrderedDict()
        self._uses: dict[int, int] = {}

    def has(self, block: int) -> bool:
        return block in self._uses

    def read(self, block: int) -> None:
        self._uses[block] = min(3, self._uses[block] + 1)

    def put(self, block: int) -> None:
        uses = self._uses
        while len(uses) >= self._capacity:
            if len(self._small) >= self._small_size or not self._main:
                oldest = self._small.popleft()
                if uses[oldest] >= self._needed:
                    uses[oldest] = 0
                    self._main.append(oldest)
                    continue
                self._ghosts[oldest] = None
                if len(self._ghosts) > self._capacity - self._small_size:
                    self._ghosts.popitem(last=False)
            else:
                oldest = self._main.popleft()
                if uses[oldest]:
                    uses[oldest] -= 1
                    self._main.append(oldest)
                    continue
            del uses[oldest]
        uses[block] = 0
        if block in self._ghosts:
            del self._ghosts[block]
            self._main.append(block)
        else:
            self._small.append(block)

    def restart(self) -> None:
        self._uses = dict.fromkeys(self._uses, 0)
        self._ghosts.clear()


@attrs.define(eq=False)
class LogSegment:
    """Blocks that were written together. What counts is blocks, not bytes."""

    blocks: list[int] = attrs.field(factory=list)
    queue: Queue = Queue.PROBATION
    turn: int = 0

    @property
    def charge_bytes(self) -> int:
        return len(self.blocks)


class Log:
    """What the two logs have in common: a segment that is filled, one in reserve, marks on blocks."""

    def __init__(self, capacity: int, *, segment_blocks: int) -> None:
        self.moved = 0
        self._most_marks = 1
        self._segment_blocks = segment_blocks
        self._most_segments = capacity // segment_blocks - 2
        self._segments: list[LogSegment] = []
        self._active = LogSegment()
        self._places: dict[int, LogSegment] = {}
        self._marks: dict[int, int] = {}

    def has(self, block: int) -> bool:
        return block in self._places

    def read(self, block: int) -> None:
        self._marks[block] = self._most_marks

    def put(self, block: int) -> None:
        if len(self._active.blocks) >= self._segment_blocks:
            self._segments.append(self._active)
            self._active = LogSegment()
            room = self._segment_blocks // 2
            while len(self._segments) > self._most_segments:
                room -= self._give_up(self._victim(), room)
        self._write(block, self._first_marks(block))

    def _write(self, block: int, marks: int) -> None:
        self._active.blocks.append(block)
        self._places[block], self._marks[block] = self._active, marks

    def _give_up(self, victim: LogSegment, room: int) -> int:
        self._segments.remove(victim)
        here = [block for block in victim.blocks if self._places.get(block) is victim]
        stay = [block for block in here if self._marks[block]][:room]
        for block in stay:
            self._write(block, self._marks[block] - 1)
        gone = [block for block in here if self._places[block] is victim]
        for block in gone:
            del self._places[block]
        self._evicted(gone)
        self.moved += len(stay)
        return len(stay)

    def restart(self) -> None:
        self._marks = dict.fromkeys(self._marks, 0)

    def _victim(self) -> LogSegment:
        return self._segments[0]

    def _first_marks(self, _block: int) -> int:
        return 0

    def _evicted(self, blocks: list[int]) -> None:
        pass


class ClockLog(Log):
    """The policy before: the oldest segment goes, what was read is written again."""


class TwoQueueLog(Log):
    """The gateway's policy. `ghosts`: slots for them, as a multiple of the blocks that fit. `marks`: turns
    that a read is good for; the gateway has one. `recalls`: only the youngest are on probation after a
    restart."""

    def __init__(
        self,
        capacity: int,
        *,
        segment_blocks: int,
        share: float = PROBATION_SHARE,
        kept: float = KEPT_SHARE,
        marks: int = 1,
        ghosts: float = 6.0,
        recalls: bool = False,
    ) -> None:
        super().__init__(capacity, segment_blocks=segment_blocks)
        self._slots, self._share, self._kept = max(1, int(ghosts * capacity)), share, kept
        self._recalls = recalls
        self._most_marks = marks
        self._policy = self._new_policy()

    def _new_policy(self) -> TwoQueues:
        ghosts = Ghosts(self._slots, seed=1)
        return TwoQueues(ghosts, probation_share=self._share, kept_share=self._kept)

    def restart(self) -> None:
        super().restart()
        self._policy = self._new_policy()
        for segment in self._segments:
            segment.queue, segment.turn = Queue.PROBATION, 0
        self._segments.sort(key=lambda segment: max(segment.blocks, default=0))
        if self._recalls:
            for segment in self._segments[: -int(self._share * len(self._segments))]:
                segment.queue = Queue.MAIN

    def _victim(self) -> LogSegment:
        kept = 0
        while True:
            first = next(
                segment
                for segment in self._policy.order([*self._segments, self._active])
                if segment is not self._active
            )
            here = [block for block in first.blocks if self._places.get(block) is first]
            marked = sum(1 for block in here if self._marks[block])
            if kept == MOST_KEPT or not self._policy.is_kept(first, marked):
                return first
            self._policy.keep(first)
            kept += 1
            for block in here:
                self._marks[block] = max(0, self._marks[block] - 1)

    def _first_marks(self, block: int) -> int:
        (is_back,) = self._policy.returned(NAMESPACE, [block.to_bytes(8, "little")])
        return self._most_marks if is_back else 0

    def _evicted(self, blocks: list[int]) -> None:
        self._policy.evicted(NAMESPACE, (block.to_bytes(8, "little") for block in blocks))


@attrs.frozen
class Outcome:
    """`restored`: of the agents' prompt tokens. `written`: bytes on the device for each byte stored."""

    restored: float
    written: float

    def __str__(self) -> str:
        return f"{100 * self.restored:.1f} ({self.written:.2f})"


def play(trace: Sequence[Request], cache: Cache, *, restart: bool) -> Outcome:
    """The outcome of a trace, after its warm-up."""
    restored = asked = stored = moved = 0
    for at, request in enumerate(trace):
        if at == int(WARMUP * len(trace)):
            restored = asked = stored = 0
            moved = cache.moved
        if restart and at in (len(trace) // 2, len(trace) * 3 // 4):
            cache.restart()
        hits = next(
            (n for n, block in enumerate(request.blocks) if not cache.has(block)), len(request.blocks)
        )
        for block in request.blocks[:hits]:
            cache.read(block)
        for block in request.blocks[hits:]:
            if not cache.has(block):
                cache.put(block)
                stored += 1
        if request.is_agent:
            restored, asked = restored + hits, asked + len(request.blocks)
    return Outcome(restored / asked, (stored + cache.moved - moved) / stored)


def bound(trace: Sequence[Request], capacity: int) -> Outcome:
    """Belady's: nobody can have more of the blocks, in whatever order, and be it by knowing the future."""
    sequence = [(at, block) for at, request in enumerate(trace) for block in request.blocks]
    never = len(sequence)
    following = [never] * len(sequence)
    seen: dict[int, int] = {}
    for position in range(len(sequence) - 1, -1, -1):
        block = sequence[position][1]
        following[position] = seen.get(block, never)
        seen[block] = position
    there: dict[int, int] = {}  # block -> when it is asked for next
    latest: list[tuple[int, int]] = []
    hits = asked = 0
    for position, (at, block) in enumerate(sequence):
        if at >= int(WARMUP * len(trace)) and trace[at].is_agent:
            asked += 1
            hits += block in there
        there.pop(block, None)
        if following[position] == never:
            continue
        there[block] = following[position]
        heapq.heappush(latest, (-following[position], block))
        while len(there) > capacity:
            when, last = heapq.heappop(latest)
            if there.get(last) == -when:
                del there[last]
    return Outcome(hits / asked, 1.0)


Make = Callable[[int], Cache]


def policies(segment_blocks: int) -> dict[str, Make]:
    """The rows of the table."""

    def ours(**changes: float) -> Make:
        return lambda capacity: TwoQueueLog(capacity, segment_blocks=segment_blocks, **changes)  # type: ignore[arg-type]

    rows: dict[str, Make] = {
        "FIFO": Fifo,
        "LRU": Lru,
        "S3-FIFO (10%, two reads)": S3Fifo,
        "S3-FIFO (10%, one read)": lambda capacity: S3Fifo(capacity, needed=1),
        "S3-FIFO (30%, one read)": lambda capacity: S3Fifo(capacity, share=0.3, needed=1),
        "CLOCK by segments (before)": lambda capacity: ClockLog(capacity, segment_blocks=segment_blocks),
        "two queues": ours(),
    }
    for share in (0.1, 0.2, 0.3, 0.5):
        rows[f"... share {share}"] = ours(share=share)
    for kept in (0.2, 0.5, 1.01):
        rows[f"... kept {kept}"] = ours(kept=kept)
    for marks in (2, 3):
        rows[f"... marks for {marks} turns"] = ours(marks=marks)
    for ghosts in (0.0, 1.0, 2.0):
        rows[f"... ghosts {ghosts}"] = ours(ghosts=ghosts)
    rows["... the youngest 40% on probation after a restart"] = ours(recalls=True)
    return rows


def main(arguments: Iterable[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.eviction")
    parser.add_argument("--segments", type=int, default=64, help="segments in the store (default 64)")
    parser.add_argument("--blocks", type=int, default=8192, help="blocks that fit (default 8192)")
    parser.add_argument("--seeds", type=int, default=3, help="traces of each workload (default 3)")
    options = parser.parse_args(None if arguments is None else list(arguments))
    traces = [[requests(w, seed=seed) for seed in range(options.seeds)] for w in WORKLOADS]

    def line(name: str, outcome: Callable[[Sequence[Request], Workload], Outcome]) -> None:
        cells: list[str] = []
        for workload, its in zip(WORKLOADS, traces, strict=True):
            outcomes = [outcome(trace, workload) for trace in its]
            mean = Outcome(
                sum(each.restored for each in outcomes) / len(outcomes),
                sum(each.written for each in outcomes) / len(outcomes),
            )
            cells.append(str(mean))
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)

    print("| policy | " + " | ".join(workload.name for workload in WORKLOADS) + " |")
    print("|---|" + "---|" * len(WORKLOADS))
    line("Belady's bound", lambda trace, _: bound(trace, options.blocks))
    for name, make in policies(options.blocks // options.segments).items():
        line(name, lambda trace, w, make=make: play(trace, make(options.blocks), restart=w.restart))  # type: ignore[misc]
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
