"""What is held and who waits for it, against a model; and which segments may go for it."""

from collections import Counter

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adp_gateway.device.memory import MemoryDevice
from adp_gateway.store.base import Status
from adp_gateway.store.catalog import Catalog
from adp_gateway.store.files import create_files
from adp_gateway.store.holds import Holds, KeyHold, Wait
from adp_gateway.store.index import Entry
from adp_gateway.store.reclaim import Plan, survivors
from adp_gateway.store.segment import Layout, Segment
from gateway.objects import KIB, NAMESPACE, OTHER_NAMESPACE, key

OK, MISS = Status.OK, Status.NOT_FOUND
names = st.lists(st.sampled_from([b"a", b"b", b"c", b"d"]), max_size=5)
spaces = st.sampled_from([NAMESPACE, OTHER_NAMESPACE])
steps = st.one_of(
    st.tuples(st.just("hold"), spaces, names, st.integers(0, 31)),
    st.tuples(st.just("release"), st.integers(0, 9)),
    st.tuples(st.just("wait"), spaces, names),
    st.tuples(st.just("abandon"), st.integers(0, 9)),
    st.tuples(st.just("ask"), spaces),
)


@attrs.define
class Deletion:
    """A wait, what it was asked to take, and what it has been given."""

    space: bytes
    keys: list[bytes]
    met: list[int]  # the holds that stood when it came
    taken: list[bytes] = attrs.field(factory=list)
    wait: Wait | None = None
    is_over: bool = False


@given(st.lists(steps, max_size=40))
def test_holds_do_what_their_model_does(program):
    holds = Holds()
    standing: dict[int, tuple[KeyHold, bytes, list[bytes]]] = {}
    deletions: list[Deletion] = []

    def held(space: bytes, only: list[int] | None = None) -> Counter[bytes]:
        rows = [standing[n] for n in standing if only is None or n in only]
        return Counter(name for _, its, keys in rows if its == space for name in keys)

    for number, step in enumerate(program):
        if step[0] == "hold":
            _, space, keys, mask = step
            statuses = bytes(OK if mask >> at & 1 else MISS for at in range(len(keys)))
            answer, hold = holds.hold(space, keys, statuses)
            waited_for = {
                name for each in deletions if each.space == space and each.wait for name in each.wait.left
            }
            expected = [
                OK if status == OK and name not in waited_for else MISS
                for name, status in zip(keys, statuses, strict=True)
            ]
            assert list(answer) == expected
            mine = [name for name, status in zip(keys, answer, strict=True) if status == OK]
            assert (hold.items, list(hold.keys)) == (len(mine), mine)
            standing[number] = (hold, space, mine)
        elif step[0] == "release" and standing:
            hold, _, _ = standing.pop(sorted(standing)[step[1] % len(standing)])
            hold.release()
            hold.release()
        elif step[0] == "wait":
            _, space, keys = step
            deletion = Deletion(space, keys, list(standing))
            deletions.append(deletion)
            deletion.wait = holds.when_free(space, keys, deletion.taken.extend)
            assert sorted(deletion.taken) == sorted(name for name in keys if name not in held(space))
        elif step[0] == "abandon" and deletions:
            deletion = deletions[step[1] % len(deletions)]
            assert deletion.wait is not None
            deletion.wait.abandon()
            deletion.is_over = True
        elif step[0] == "ask":
            assert dict(holds.held(step[1])) == dict(held(step[1]))
        assert holds.items == sum(len(keys) for _, _, keys in standing.values())
        for deletion in deletions:
            assert deletion.wait is not None
            left = {name for name in deletion.keys if name in held(deletion.space, deletion.met)}
            if deletion.is_over:
                assert deletion.wait.left == set()
            else:
                assert deletion.wait.left == left
                assert set(deletion.taken) == set(deletion.keys) - left
    for deletion in deletions:
        deletion.wait.abandon()
    for hold, _, _ in standing.values():
        hold.release()
    assert holds.items == 0
    assert (holds._fresh, holds._counts, holds._waits) == ({}, {}, {})


# ---------------------------------------------------------------- which segments may go


@pytest.fixture
def full():
    """A store for six segments with four in it, three of them sealed with five objects of 32 KiB each."""
    catalog = Catalog()
    with MemoryDevice(max_command_bytes=16 * KIB) as device:
        for segment_id in range(1, 5):
            segment = create_files(device, segment_id, Layout(256 * KIB), False)
            catalog.segments[segment_id] = segment
            segment.is_sealed = segment_id < 4
            for n in range(5 if segment_id < 4 else 0):
                name = key(10 * segment_id + n)
                entry = Entry(segment_id, segment.allocate(32 * KIB), 32 * KIB, 0, catalog.take_sequence())
                catalog.commit(NAMESPACE, name, entry)
        catalog.active = catalog.segments[4]
        yield catalog
        for segment in catalog.segments.values():
            segment.data.close()
            segment.journal.close()


def hold(catalog: Catalog, *numbers: int) -> KeyHold:
    keys = [key(n) for n in numbers]
    return catalog.holds.hold(NAMESPACE, keys, catalog.index.exist(NAMESPACE, keys))[1]


def plan_of(catalog: Catalog, segments: int = 5) -> Plan:
    return Plan(catalog, Layout(256 * KIB), catalog.used_bytes + (segments - 4) * 256 * KIB)


def test_a_segment_with_too_much_that_is_held_is_passed_over(full):
    plan = plan_of(full)
    first, second, third, _ = full.segments.values()
    assert plan.survivor_bytes(first, 1) == 124 * KIB
    assert plan.choose_victim(1) is first
    three = hold(full, 10, 11, 12)
    assert plan.choose_victim(1) is first, "three of them fit beside the object"
    assert plan.choose_victim(None) is second
    one = hold(full, 13, 20, 20)
    assert plan.choose_victim(1) is second
    assert plan.choose_victim(None) is third
    assert plan.choose_victim(1, stuck={second}) is third
    three.release()
    assert plan.choose_victim(1) is first
    one.release()
    assert plan.choose_victim(None) is first


def test_what_is_held_survives_before_what_was_read(full):
    elsewhere = Entry(1, full.segments[1].allocate(1), 1, 0, full.take_sequence())
    full.commit(OTHER_NAMESPACE, key(12), elsewhere)
    list(full.index.use(NAMESPACE, [key(10), key(11), key(14)]))
    kept = hold(full, 12, 14, 20)

    def names(budget: int) -> list[bytes]:
        return [survivor.key for survivor in survivors(full, full.segments[1], budget_bytes=budget)]

    assert names(1 << 20) == [key(12), key(14), key(10), key(11)]
    assert names(3 * 32 * KIB) == [key(12), key(14), key(10)]
    kept.release()
    assert names(1 << 20) == [key(10), key(11), key(14)]


def test_a_search_in_vain_is_not_repeated_until_a_hold_ends(full, monkeypatch):
    plan = plan_of(full)
    asked: list[Segment] = []
    has_held_bytes = Plan.has_held_bytes

    def counted(self: Plan, segment: Segment, *, more_than: int) -> bool:
        asked.append(segment)
        return has_held_bytes(self, segment, more_than=more_than)

    monkeypatch.setattr(Plan, "has_held_bytes", counted)
    kept = [hold(full, 10), hold(full, 20), hold(full, 30)]
    assert plan.choose_victim(None) is None
    assert len(asked) == 3
    assert plan.choose_victim(None) is None
    assert len(asked) == 3
    assert plan.choose_victim(1, moved_bytes=60 * KIB) is full.segments[1]
    kept[2].release()
    assert plan.choose_victim(None) is full.segments[3]


def test_what_is_mostly_dead_goes_before_the_oldest_unless_too_much_of_it_is_held(full):
    plan = plan_of(full)
    for n in range(20, 23):
        full.drop(NAMESPACE, key(n))
    second = full.segments[2]
    assert second.is_mostly_dead
    kept = hold(full, 23, 24)
    assert plan.survivor_bytes(second, 1) > plan.survivor_bytes(full.segments[1], 1)
    assert plan.choose_victim(1) is second
    assert plan.choose_victim(1, moved_bytes=200 * KIB) is full.segments[1]
    assert plan.choose_victim(None) is full.segments[1]
    assert {survivor.key for survivor in survivors(full, second, budget_bytes=1 << 20)} == {key(23), key(24)}
    kept.release()


def test_the_last_free_segment_is_kept_for_what_is_held(full):
    plan = plan_of(full)
    assert not plan.is_full
    assert not plan.needs_reserve(1)
    kept = [hold(full, *range(10 * n, 10 * n + 5)) for n in (1, 2, 3)]
    assert not plan.needs_reserve(1), "the active segment can be given up next"
    for n in range(4):
        entry = Entry(4, full.active.allocate(32 * KIB), 32 * KIB, 0, full.take_sequence())
        full.commit(NAMESPACE, key(40 + n), entry)
    kept.append(hold(full, 40, 41, 42, 43))
    assert plan.needs_reserve(1)
    assert not plan_of(full, segments=6).needs_reserve(1), "one more is free"
    for segment in full.segments.values():
        segment.readers = 1
    assert not plan.needs_reserve(1), "readers leave soon, and need no room"
    for segment in full.segments.values():
        segment.readers = 0
    kept[1].release()
    assert not plan.needs_reserve(1)
