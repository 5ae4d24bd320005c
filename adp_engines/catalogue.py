"""What the scheduler knows about each chunk: the table behind every lookup. Pure: time in, work out.

The rule that the whole adapter rests on: a chunk is a HIT only while its verified bytes lie in our own
staging memory. What is left after a HIT is a copy inside this host, which cannot fail because a gateway did.

                 ask           answer "present"      ask, slots free       bytes verified
    (unknown) -------> ASKED -----------------> PRESENT -------------> FETCHING -----------> STAGED
        ^                | "absent", failure,      | no slot: MISS        | failure,            |
        |                | deadline                v at once              | deadline            |
        |                v                                                v                     |
        +------------- ABSENT <-------------------------------------------+                     |
        |   its time is up, or a store of the chunk completed                                   |
        +---------------------------------------------------------------------------------------+
                                             evicted, reset

Answers belong to the entry that asked, not to the key: one that comes for an entry which is no longer the
key's entry (a deadline passed, a store completed, the table was reset) changes nothing but gives its memory
back. So a late "absent" can never hide a chunk that was stored meanwhile.

Every state but STAGED has a deadline, because the engine has none: it would ask for ever.
"""

import enum
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import attrs

from .staging import SlotPool


class Answer(enum.Enum):
    """What the engine is told about a chunk."""

    MISS = "miss"
    #: The bytes are here, verified.
    HIT = "hit"
    #: The gateway has it and its bytes are on their way.
    COMING = "coming"
    #: Not known yet.
    ASK_AGAIN = "ask again"


class State(enum.Enum):
    """Where the knowledge about a chunk stands. See the module's diagram."""

    ASKED = "asked"
    ABSENT = "absent"
    PRESENT = "present"
    FETCHING = "fetching"
    STAGED = "staged"


@attrs.frozen(kw_only=True)
class Limits:
    """How long each state may last, in seconds."""

    lookup_seconds: float
    load_seconds: float
    absent_seconds: float
    #: How long "the gateway has it" is believed before the bytes are asked for.
    present_seconds: float = 5.0
    #: How long staged bytes that nobody has loaded yet are kept for the request that wanted them.
    hold_seconds: float = 1.0


@attrs.define(eq=False)
class Entry:
    """One chunk's knowledge. Identity matters: answers find their way back by it."""

    key: bytes
    state: State
    deadline: float
    slots: tuple[int, ...] = ()
    pins: int = 0
    #: Step and time when the engine last asked for the chunk.
    asked_step: int = 0
    asked_at: float = 0.0
    #: Whether staged bytes were loaded at least once: from then on they are only a cache.
    is_used: bool = False
    #: Whether the entry has left the table while its slots were still being written or read.
    is_detached: bool = False


@attrs.define(kw_only=True)
class Counters:
    """Monotonic counts of everything that ended in a miss, and why. Names are stable: they become metrics."""

    lookups: int = 0
    chunks_absent: int = 0
    chunks_fetched: int = 0
    chunks_evicted: int = 0
    misses_disconnected: int = 0
    misses_lookup_failed: int = 0
    misses_lookup_timeout: int = 0
    misses_load_failed: int = 0
    misses_load_timeout: int = 0
    misses_no_staging: int = 0
    stores_known: int = 0
    stores_disconnected: int = 0
    loads_unverified: int = 0


class Catalogue:
    """The table. Not thread safe: it belongs to the scheduler's thread."""

    def __init__(
        self,
        *,
        pool: SlotPool,
        slots_per_chunk: int,
        limits: Limits,
        reserve_slots: int = 0,
        reserve_for: frozenset[bytes] = frozenset(),
    ) -> None:
        """`reserve_slots` slots are only for keys that end in one of `reserve_for` (4 bytes each).

        Groups of which a hit needs a few chunks at its end must find room even when the groups of which it
        needs all from the start fill the rest.
        """
        self.counters = Counters()
        self._reserve_slots = reserve_slots
        self._reserve_for = reserve_for
        self._pool = pool
        self._slots_per_chunk = slots_per_chunk
        self._limits = limits
        self._entries: dict[bytes, Entry] = {}
        self._questions: list[Entry] = []
        self._fetches: list[Entry] = []
        # Staged chunks, the one not asked for the longest first. Pinned ones are not in here.
        self._evictable: OrderedDict[bytes, Entry] = OrderedDict()
        self._step = 0
        self._next_sweep = 4096

    def __len__(self) -> int:
        return len(self._entries)

    def ask(self, key: bytes, now: float, *, is_reachable: bool) -> Answer:
        """Answer one lookup; remember what has to be asked or fetched for it. One dictionary access in most
        cases."""
        self.counters.lookups += 1
        entry = self._entries.get(key)
        if entry is None:
            return self._ask_unknown(key, now, is_reachable)
        entry.asked_step = self._step
        entry.asked_at = now
        match entry.state:
            case State.STAGED:
                if not entry.pins:
                    self._evictable.move_to_end(key)
                return Answer.HIT
            case State.ABSENT:
                return Answer.MISS if now < entry.deadline else self._ask_unknown(key, now, is_reachable)
            case State.PRESENT:
                if now >= entry.deadline:
                    return self._ask_unknown(key, now, is_reachable)
                return self._fetch(entry, now) if is_reachable else self._give_up(entry, now, "disconnected")
            case State.ASKED | State.FETCHING:
                waiting = Answer.ASK_AGAIN if entry.state is State.ASKED else Answer.COMING
                if not is_reachable:
                    return self._give_up(entry, now, "disconnected")
                if now < entry.deadline:
                    return waiting
                return self._give_up(entry, now, "lookup" if waiting is Answer.ASK_AGAIN else "load")

    def take_questions(self) -> list[Entry]:
        """Chunks to ask the gateway about since the last call, in the order they were looked up."""
        questions, self._questions = self._questions, []
        return [entry for entry in questions if not entry.is_detached]

    def take_fetches(self) -> list[Entry]:
        """Chunks whose bytes are to be read into their `slots` (one a shard) since the last call."""
        fetches, self._fetches = self._fetches, []
        wanted = []
        for entry in fetches:
            if entry.is_detached:
                self._pool.give_back(entry.slots)
            else:
                wanted.append(entry)
        return wanted

    def answered(self, entries: Iterable[Entry], present: Iterable[bool], now: float) -> None:
        """The gateway said, for each of `entries`, whether it has every shard."""
        for entry, is_present in zip(entries, present, strict=True):
            if entry.is_detached:
                continue
            if is_present:
                entry.state, entry.deadline = State.PRESENT, now + self._limits.present_seconds
            else:
                self.counters.chunks_absent += 1
                self._set_absent(entry, now)

    def lookup_failed(self, entries: Iterable[Entry], now: float) -> None:
        """The question got no answer: misses, for a while."""
        for entry in entries:
            if not entry.is_detached:
                self.counters.misses_lookup_failed += 1
                self._set_absent(entry, now)

    def fetched(self, entries: Iterable[Entry], verified: Iterable[bool], now: float) -> None:
        """The read into the slots of `entries` ended; `verified` says whose every byte is in place."""
        for entry, is_verified in zip(entries, verified, strict=True):
            if entry.is_detached:
                self._pool.give_back(entry.slots)
            elif is_verified:
                self.counters.chunks_fetched += 1
                entry.state = State.STAGED
                self._evictable[entry.key] = entry
            else:
                self.counters.misses_load_failed += 1
                self._pool.give_back(entry.slots)
                self._set_absent(entry, now)

    def pin(self, keys: Sequence[bytes]) -> list[Entry] | None:
        """Hold the staged bytes of `keys` until `unpin`. None, and nothing held, if one of them is not
        staged."""
        entries = [self._entries.get(key) for key in keys]
        held = [entry for entry in entries if entry is not None and entry.state is State.STAGED]
        if len(held) != len(keys):
            self.counters.loads_unverified += 1
            return None
        for entry in held:
            entry.pins += 1
            self._evictable.pop(entry.key, None)
        return held

    def unpin(self, entries: Iterable[Entry]) -> None:
        """Let go of what `pin` returned: every reader of those slots is done."""
        for entry in entries:
            entry.pins -= 1
            entry.is_used = True
            if entry.pins:
                continue
            if entry.is_detached:
                self._pool.give_back(entry.slots)
            else:
                self._evictable[entry.key] = entry

    def stored(self, keys: Iterable[bytes]) -> None:
        """A store of `keys` ended: forget what was believed about them, the gateway knows better now."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None and entry.state in (State.ABSENT, State.ASKED):
                self._detach(entry)

    def distrust(self, keys: Iterable[bytes], now: float) -> None:
        """A load of `keys` failed after all: misses for a while, or the same request would come back for
        them."""
        for key in keys:
            entry = self._entries.get(key)
            if entry is not None:
                self._detach(entry)
            fresh = self._entries[key] = Entry(key, State.ABSENT, 0.0)
            self._set_absent(fresh, now)

    def is_known_stored(self, key: bytes, now: float) -> bool:
        """Whether storing `key` would only repeat what the gateway has said it holds."""
        entry = self._entries.get(key)
        if entry is None:
            return False
        if entry.state is State.PRESENT:
            return now < entry.deadline
        return entry.state in (State.FETCHING, State.STAGED)

    def end_step(self, now: float) -> None:
        """The engine finished a scheduling step. Now and then this forgets chunks that nobody asks for."""
        self._step += 1
        if len(self._entries) < self._next_sweep:
            return
        stale = [
            entry
            for entry in self._entries.values()
            if entry.state in (State.ABSENT, State.PRESENT) and now >= entry.deadline
        ]
        for entry in stale:
            self._detach(entry)
        self._next_sweep = max(4096, 2 * len(self._entries))

    def reset(self) -> None:
        """Forget everything. Slots that are being written or read come back when that has ended."""
        for entry in list(self._entries.values()):
            self._detach(entry)

    def _ask_unknown(self, key: bytes, now: float, is_reachable: bool) -> Answer:
        if not is_reachable:
            self.counters.misses_disconnected += 1
            return Answer.MISS
        entry = Entry(key, State.ASKED, now + self._limits.lookup_seconds, (), 0, self._step, now)
        self._entries[key] = entry
        self._questions.append(entry)
        return Answer.ASK_AGAIN

    def _fetch(self, entry: Entry, now: float) -> Answer:
        keep = 0 if entry.key[-4:] in self._reserve_for else self._reserve_slots
        while (slots := self._pool.take(self._slots_per_chunk, keep=keep)) is None:
            if not self._evict_one(now):
                # Waiting for a slot could wait for the very request that asks: serve what fits.
                self.counters.misses_no_staging += 1
                return Answer.MISS
        entry.slots = slots
        entry.state, entry.deadline = State.FETCHING, now + self._limits.load_seconds
        self._fetches.append(entry)
        return Answer.COMING

    def _evict_one(self, now: float) -> bool:
        victim = next(iter(self._evictable.values()), None)
        if victim is None or victim.asked_step >= self._step - 1:
            return False
        if not victim.is_used and now - victim.asked_at < self._limits.hold_seconds:
            return False
        self.counters.chunks_evicted += 1
        self._detach(victim)
        return True

    def _give_up(self, entry: Entry, now: float, reason: str) -> Answer:
        match reason:
            case "disconnected":
                self.counters.misses_disconnected += 1
            case "lookup":
                self.counters.misses_lookup_timeout += 1
            case _:
                self.counters.misses_load_timeout += 1
        self._detach(entry)
        if reason != "disconnected":
            # When the gateway is away there is nothing to be learned by not asking: reachability says it all.
            fresh = self._entries[entry.key] = Entry(entry.key, State.ABSENT, 0.0)
            self._set_absent(fresh, now)
        return Answer.MISS

    def _set_absent(self, entry: Entry, now: float) -> None:
        entry.state, entry.slots = State.ABSENT, ()
        entry.deadline = now + self._limits.absent_seconds

    def _detach(self, entry: Entry) -> None:
        """Take `entry` out of the table. Its slots come back now, or with the last who still touches them."""
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]
        entry.is_detached = True
        if entry.state is State.STAGED and not entry.pins:
            self._evictable.pop(entry.key, None)
            self._pool.give_back(entry.slots)
