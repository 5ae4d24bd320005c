from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from adp_engines.catalogue import Answer, Catalogue, Limits, State
from adp_engines.staging import SlotPool

LIMITS = Limits(lookup_seconds=1, load_seconds=10, absent_seconds=2, present_seconds=5, hold_seconds=1)
KEYS = [bytes([n]) * 8 + bytes(4) for n in range(8)]
A, B, C, *_ = KEYS


class Desk:
    """A catalogue with a clock, and a scheduler step in one call."""

    def __init__(self, *, slots: int = 8, shards: int = 1, **options: object) -> None:
        self.pool = SlotPool(slots)
        self.catalogue = Catalogue(pool=self.pool, slots_per_chunk=shards, limits=LIMITS, **options)
        self.now = 100.0
        self.is_reachable = True

    def ask(self, *keys: bytes) -> list[Answer]:
        return [self.catalogue.ask(key, self.now, is_reachable=self.is_reachable) for key in keys]

    def end_step(self):
        questions, fetches = self.catalogue.take_questions(), self.catalogue.take_fetches()
        self.catalogue.end_step(self.now)
        return questions, fetches

    def learn(self, *keys: bytes, present: bool = True) -> None:
        self.ask(*keys)
        questions, _ = self.end_step()
        self.catalogue.answered(questions, [present] * len(questions), self.now)

    def stage(self, *keys: bytes) -> None:
        self.learn(*keys)
        self.ask(*keys)
        _, fetches = self.end_step()
        self.catalogue.fetched(fetches, [True] * len(fetches), self.now)

    def idle(self, seconds: float, steps: int = 3) -> None:
        self.now += seconds
        for _ in range(steps):
            self.end_step()


def test_whole_way_from_unknown_to_hit() -> None:
    desk = Desk()
    assert desk.ask(A, B) == [Answer.ASK_AGAIN] * 2
    questions, fetches = desk.end_step()
    assert ([entry.key for entry in questions], fetches) == ([A, B], [])
    assert desk.ask(A, B) == [Answer.ASK_AGAIN] * 2
    assert desk.end_step() == ([], [])  # asked once, however often it is looked up
    desk.catalogue.answered(questions, [True, False], desk.now)
    assert desk.ask(A, B) == [Answer.COMING, Answer.MISS]
    _, (fetch,) = desk.end_step()
    assert (fetch.key, len(fetch.slots)) == (A, 1)
    assert desk.ask(A) == [Answer.COMING]
    desk.catalogue.fetched([fetch], [True], desk.now)
    assert desk.ask(A) == [Answer.HIT]


def test_bytes_that_were_not_verified_are_a_miss_and_give_their_slot_back() -> None:
    desk = Desk(slots=1)
    desk.learn(A)
    desk.ask(A)
    _, fetches = desk.end_step()
    desk.catalogue.fetched(fetches, [False], desk.now)
    assert desk.ask(A) == [Answer.MISS]
    assert desk.pool.free == 1
    assert desk.catalogue.counters.misses_load_failed == 1


def test_b18_failed_read_is_not_asked_for_again_at_once() -> None:
    desk = Desk()
    desk.learn(A)
    desk.ask(A)
    _, fetches = desk.end_step()
    desk.catalogue.fetched(fetches, [False], desk.now)
    assert [desk.ask(A) for _ in range(100)] == [[Answer.MISS]] * 100
    assert desk.end_step() == ([], [])


class TestDeadlines:
    def test_b17_silent_lookup_ends_in_a_miss(self) -> None:
        desk = Desk()
        desk.ask(A)
        questions, _ = desk.end_step()
        desk.now += 0.99
        assert desk.ask(A) == [Answer.ASK_AGAIN]
        desk.now += 0.01
        assert desk.ask(A) == [Answer.MISS]
        assert desk.catalogue.counters.misses_lookup_timeout == 1
        desk.catalogue.answered(questions, [True], desk.now)
        assert desk.ask(A) == [Answer.MISS]  # the late answer belongs to a question that was given up

    def test_b17_silent_read_ends_in_a_miss_and_keeps_its_memory_until_it_ended(self) -> None:
        desk = Desk(slots=1)
        desk.learn(A)
        desk.ask(A)
        _, fetches = desk.end_step()
        desk.now += 10
        assert desk.ask(A) == [Answer.MISS]
        assert desk.catalogue.counters.misses_load_timeout == 1
        assert desk.pool.free == 0
        desk.catalogue.fetched(fetches, [True], desk.now)
        assert desk.pool.free == 1
        assert desk.ask(A) == [Answer.MISS]

    def test_absence_is_believed_for_its_time_only(self) -> None:
        desk = Desk()
        desk.learn(A, present=False)
        desk.now += 1.99
        assert desk.ask(A) == [Answer.MISS]
        desk.now += 0.01
        assert desk.ask(A) == [Answer.ASK_AGAIN]

    def test_presence_is_believed_for_its_time_only(self) -> None:
        desk = Desk()
        desk.learn(A)
        desk.now += 5
        assert desk.ask(A) == [Answer.ASK_AGAIN]


class TestUnreachable:
    def test_unknown_chunks_are_misses_and_leave_no_trace(self) -> None:
        desk = Desk()
        desk.is_reachable = False
        assert desk.ask(A, B) == [Answer.MISS] * 2
        assert desk.end_step() == ([], [])
        desk.is_reachable = True
        assert desk.ask(A) == [Answer.ASK_AGAIN]

    def test_nobody_waits_for_a_gateway_that_went_away(self) -> None:
        desk = Desk()
        desk.learn(A)
        assert desk.ask(A, B) == [Answer.COMING, Answer.ASK_AGAIN]
        desk.end_step()
        desk.is_reachable = False
        assert desk.ask(A, B) == [Answer.MISS] * 2

    def test_staged_bytes_do_not_need_the_gateway(self) -> None:
        desk = Desk()
        desk.stage(A)
        desk.is_reachable = False
        assert desk.ask(A) == [Answer.HIT]


class TestStaging:
    def test_prefix_longer_than_staging_is_served_as_far_as_it_fits(self) -> None:
        desk = Desk(slots=2)
        desk.learn(A, B, C)
        assert desk.ask(A, B, C) == [Answer.COMING, Answer.COMING, Answer.MISS]
        _, fetches = desk.end_step()
        desk.catalogue.fetched(fetches, [True, True], desk.now)
        # Asking for C never costs the chunks in front of it, however often it is asked for.
        assert [desk.ask(A, B, C) for _ in range(5) if desk.end_step()] == [
            [Answer.HIT, Answer.HIT, Answer.MISS]
        ] * 5

    def test_staged_chunk_that_nobody_asks_for_makes_room(self) -> None:
        desk = Desk(slots=1)
        desk.stage(A)
        desk.learn(B)
        assert desk.ask(B) == [Answer.MISS]
        desk.idle(1.0)
        assert desk.ask(B) == [Answer.COMING]
        assert desk.ask(A) == [Answer.ASK_AGAIN]
        assert desk.catalogue.counters.chunks_evicted == 1

    def test_used_chunk_makes_room_without_waiting(self) -> None:
        desk = Desk(slots=1)
        desk.stage(A)
        desk.catalogue.unpin(desk.catalogue.pin([A]) or [])
        desk.learn(B)
        desk.idle(0.0)
        assert desk.ask(B) == [Answer.COMING]

    def test_least_recently_asked_goes_first(self) -> None:
        desk = Desk(slots=2)
        desk.stage(A, B)
        desk.idle(0.5)
        desk.ask(A)
        desk.idle(0.7)
        desk.learn(C)
        assert desk.ask(C) == [Answer.COMING]
        assert desk.ask(A, B) == [Answer.HIT, Answer.ASK_AGAIN]

    def test_every_shard_has_its_slot(self) -> None:
        desk = Desk(slots=5, shards=2)
        desk.learn(A, B, C)
        assert desk.ask(A, B, C) == [Answer.COMING, Answer.COMING, Answer.MISS]
        _, fetches = desk.end_step()
        assert len({slot for entry in fetches for slot in entry.slots}) == 4

    def test_reserve_is_for_the_groups_named(self) -> None:
        window = b"w" * 8 + (1).to_bytes(4, "big")
        desk = Desk(slots=3, reserve_slots=1, reserve_for=frozenset({(1).to_bytes(4, "big")}))
        desk.learn(A, B, C, window)
        assert desk.ask(A, B, C) == [Answer.COMING, Answer.COMING, Answer.MISS]
        assert desk.ask(window) == [Answer.COMING]


class TestPins:
    def test_pinned_slots_are_never_reused(self) -> None:
        desk = Desk(slots=1)
        desk.stage(A)
        (pinned,) = desk.catalogue.pin([A]) or []
        desk.learn(B)
        desk.idle(1000.0)
        assert desk.ask(B) != [Answer.COMING]
        desk.catalogue.unpin([pinned])
        desk.learn(B)
        desk.idle(2.0)
        assert desk.ask(B) == [Answer.COMING]

    def test_pins_count(self) -> None:
        desk = Desk(slots=1)
        desk.stage(A)
        first, second = desk.catalogue.pin([A]), desk.catalogue.pin([A])
        desk.catalogue.unpin(first or [])
        desk.catalogue.reset()
        assert desk.pool.free == 0
        desk.catalogue.unpin(second or [])
        assert desk.pool.free == 1

    def test_b05_what_was_not_verified_is_not_loaded(self) -> None:
        desk = Desk()
        desk.stage(A)
        desk.learn(B)
        assert desk.catalogue.pin([A, B]) is None
        assert desk.catalogue.pin([C]) is None
        assert desk.catalogue.counters.loads_unverified == 2
        desk.catalogue.reset()
        assert desk.pool.free == 8  # the failed pin holds nothing


class TestStores:
    def test_b18_store_ends_the_belief_in_absence(self) -> None:
        desk = Desk()
        desk.learn(A, present=False)
        desk.catalogue.stored([A])
        assert desk.ask(A) == [Answer.ASK_AGAIN]

    def test_b18_late_absent_does_not_hide_what_was_stored_meanwhile(self) -> None:
        desk = Desk()
        desk.ask(A)
        old, _ = desk.end_step()
        desk.catalogue.stored([A])
        desk.ask(A)
        new, _ = desk.end_step()
        desk.catalogue.answered(new, [True], desk.now)
        desk.catalogue.answered(old, [False], desk.now)
        assert desk.ask(A) == [Answer.COMING]

    def test_only_what_the_gateway_said_it_holds_need_not_be_stored(self) -> None:
        desk = Desk()
        assert not desk.catalogue.is_known_stored(A, desk.now)
        desk.ask(A)
        assert not desk.catalogue.is_known_stored(A, desk.now)
        desk.learn(B)
        assert desk.catalogue.is_known_stored(B, desk.now)
        assert not desk.catalogue.is_known_stored(B, desk.now + 5)
        desk.stage(C)
        assert desk.catalogue.is_known_stored(C, desk.now + 1000)

    def test_distrusted_chunks_are_misses_until_their_time_is_up(self) -> None:
        desk = Desk()
        desk.stage(A)
        pinned = desk.catalogue.pin([A])
        desk.catalogue.distrust([A], desk.now)
        assert desk.ask(A) == [Answer.MISS]
        desk.catalogue.unpin(pinned or [])
        assert desk.pool.free == 8
        desk.now += 2
        assert desk.ask(A) == [Answer.ASK_AGAIN]


def test_reset_forgets_all_and_loses_no_slot() -> None:
    desk = Desk(slots=4)
    desk.stage(A)
    desk.learn(B, C)
    desk.ask(B, C)
    _, under_way = desk.end_step()
    pinned = desk.catalogue.pin([A])
    desk.ask(KEYS[4])
    desk.catalogue.reset()
    assert len(desk.catalogue) == 0
    assert desk.end_step() == ([], [])
    desk.catalogue.fetched(under_way, [True, True], desk.now)
    desk.catalogue.unpin(pinned or [])
    assert desk.pool.free == 4
    assert desk.ask(A) == [Answer.ASK_AGAIN]


def test_table_does_not_grow_with_every_chunk_ever_looked_up() -> None:
    desk = Desk()
    for n in range(50):
        desk.learn(*(b"%8d%4d" % (n, i) for i in range(1000)), present=False)
        desk.idle(3.0)
    assert len(desk.catalogue) < 6000


class CatalogueMachine(RuleBasedStateMachine):
    """Any order of asks, answers, loads, stores, resets and time: no slot is lost, shared or leaked."""

    SLOTS = 5

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(slots=self.SLOTS, shards=2)
        self.questions: list = []
        self.reads: list = []
        self.pins: list = []

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=4), is_reachable=st.booleans())
    def ask(self, keys: Iterable[bytes], is_reachable: bool) -> None:
        self.desk.is_reachable = is_reachable
        for key, answer in zip(keys, self.desk.ask(*keys), strict=True):
            if answer is Answer.HIT:
                assert self.desk.catalogue._entries[key].state is State.STAGED

    @rule()
    def end_step(self) -> None:
        questions, reads = self.desk.end_step()
        self.questions.append(questions)
        self.reads.extend(reads)

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if self.questions:
            batch = self.questions.pop(data.draw(st.integers(0, len(self.questions) - 1)))
            if data.draw(st.booleans()):
                present = data.draw(st.lists(st.booleans(), min_size=len(batch), max_size=len(batch)))
                self.desk.catalogue.answered(batch, present, self.desk.now)
            else:
                self.desk.catalogue.lookup_failed(batch, self.desk.now)

    @rule(data=st.data(), is_verified=st.booleans())
    def arrive(self, data: st.DataObject, is_verified: bool) -> None:
        if self.reads:
            entry = self.reads.pop(data.draw(st.integers(0, len(self.reads) - 1)))
            self.desk.catalogue.fetched([entry], [is_verified], self.desk.now)

    @rule(keys=st.lists(st.sampled_from(KEYS), min_size=1, max_size=2, unique=True))
    def pin(self, keys: list[bytes]) -> None:
        held = self.desk.catalogue.pin(keys)
        if held is not None:
            self.pins.append(held)

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if self.pins:
            self.desk.catalogue.unpin(self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))))

    @rule(key=st.sampled_from(KEYS), what=st.sampled_from(["stored", "distrust", "reset"]))
    def disturb(self, key: bytes, what: str) -> None:
        match what:
            case "stored":
                self.desk.catalogue.stored([key])
            case "distrust":
                self.desk.catalogue.distrust([key], self.desk.now)
            case _:
                self.desk.catalogue.reset()

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 20.0]))
    def pass_time(self, seconds: float) -> None:
        self.desk.now += seconds

    @invariant()
    def every_slot_has_one_owner(self) -> None:
        catalogue = self.desk.catalogue
        owners = {id(entry): entry for entry in catalogue._entries.values() if entry.slots}
        owners |= {id(entry): entry for entry in [*self.reads, *catalogue._fetches] if entry.slots}
        owners |= {id(entry): entry for held in self.pins for entry in held}
        owned = [slot for entry in owners.values() for slot in entry.slots]
        assert len(owned) == len(set(owned))
        assert len(owned) + self.desk.pool.free == self.SLOTS
        assert set(owned).isdisjoint(self.desk.pool._free)


TestAnyOrder = CatalogueMachine.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("count", [10_000])
def test_lookups_cost_a_dictionary_access(count: int) -> None:
    """Ten thousand chunks looked up again and again ask the gateway once."""
    desk = Desk()
    keys = [n.to_bytes(12, "big") for n in range(count)]
    for _ in range(5):
        desk.ask(*keys)
    questions, _ = desk.end_step()
    assert len(questions) == count
