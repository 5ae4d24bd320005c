"""The pure parts: index, lease ledger, catalog, choice of victims, configuration."""

from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adp_gateway.config import MIB, StoreConfig, default_capacity_bytes, default_segment_bytes
from adp_gateway.device.memory import MemoryDevice
from adp_gateway.store.catalog import Catalog
from adp_gateway.store.files import create_files
from adp_gateway.store.format import MAX_SEGMENT_ID, RECORD_BYTES, UNIT_BYTES
from adp_gateway.store.index import FEW, Entry, Index
from adp_gateway.store.leases import LeaseLedger
from adp_gateway.store.quotas import Account
from adp_gateway.store.reclaim import Survivor, choose_victim, survivors
from adp_gateway.store.segment import Layout
from gateway.objects import KIB, NAMESPACE, OTHER_NAMESPACE, key

entries = st.builds(
    Entry,
    segment_id=st.integers(0, MAX_SEGMENT_ID),
    offset=st.integers(0, 2**32 - 1).map(lambda unit: unit * UNIT_BYTES),
    length=st.integers(0, 2**32 - 1),
    checksum=st.integers(0, 2**64 - 1),
    sequence=st.integers(0, 2**64 - 1),
    uses=st.integers(0, 3),
)


@given(entries)
def test_an_entry_survives_its_packing(entry):
    index = Index()
    index.put(NAMESPACE, b"key", entry)
    assert index.get(NAMESPACE, b"key") == entry


def test_the_index_is_a_dictionary_of_dictionaries():
    index = Index()
    first, second = Entry(1, 0, 10, 11, 1), Entry(1, 4096, 20, 22, 2)
    index.put(NAMESPACE, b"a", first)
    index.put(OTHER_NAMESPACE, b"a", second)
    index.put(NAMESPACE, b"a", second)
    assert len(index) == 2
    assert index.exist(NAMESPACE, [b"a", b"b"]) == bytes([0, 1])
    assert index.exist(bytes(31), [b"a", b"b"]) == bytes([1, 1])
    assert list(index.use(NAMESPACE, [b"b", b"a"])) == [None, second]
    assert index.get(NAMESPACE, b"a") == second._replace(uses=1)
    assert index.get(OTHER_NAMESPACE, b"a") == second
    assert index.pop(NAMESPACE, b"a") == second._replace(uses=1)
    assert index.pop(NAMESPACE, b"a") is None
    assert len(index) == 1


def test_a_drain_ends_with_the_last_reader_and_tells_once():
    ledger, told = LeaseLedger(), []
    readers = [
        ledger.enter((NAMESPACE, b"a")),
        ledger.enter((NAMESPACE, b"a")),
        ledger.enter((NAMESPACE, b"b")),
    ]
    drain = ledger.drain([(NAMESPACE, b"a"), (NAMESPACE, b"b"), (NAMESPACE, b"a")], lambda: told.append(1))
    late = ledger.enter((NAMESPACE, b"a"))
    for reader in readers:
        assert not drain.is_done
        assert told == []
        ledger.leave(reader)
    assert drain.is_done
    assert told == [1]
    assert ledger.readers == 1
    assert ledger.is_leased((NAMESPACE, b"a"))
    ledger.leave(late)
    assert not ledger.is_leased((NAMESPACE, b"a"))
    assert ledger.drain([(NAMESPACE, b"a")], lambda: told.append(2)).is_done
    assert told == [1]


def test_an_abandoned_drain_is_not_told():
    ledger, told = LeaseLedger(), []
    reader = ledger.enter((NAMESPACE, b"a"))
    drain = ledger.drain([(NAMESPACE, b"a")], lambda: told.append(1))
    ledger.abandon(drain)
    ledger.leave(reader)
    assert told == []


@given(st.data())
def test_every_drain_waits_for_exactly_the_readers_before_it(data):
    """Against a model that remembers, for each drain, the readers it found."""
    ledger, told = LeaseLedger(), set()
    inside, expected = [], {}
    for n in range(data.draw(st.integers(1, 30))):
        subject = (NAMESPACE, data.draw(st.sampled_from([b"a", b"b"])))
        step = data.draw(st.sampled_from(["enter", "leave", "drain"]))
        if step == "enter":
            inside.append((ledger.enter(subject), n))
        elif step == "leave" and inside:
            cohort, reader = inside.pop(data.draw(st.integers(0, len(inside) - 1)))
            ledger.leave(cohort)
            for waiting in expected.values():
                waiting.discard(reader)
        elif step == "drain":
            found = {reader for cohort, reader in inside if cohort.subject == subject}
            drain = ledger.drain([subject], lambda n=n: told.add(n))
            assert drain.is_done == (not found)
            if found:
                expected[n] = found
        assert told == {n for n, waiting in expected.items() if not waiting}
        assert ledger.readers == len(inside)


@given(st.integers(16, 2**19).map(lambda units: units * UNIT_BYTES))
def test_a_layout_never_exceeds_its_segment(segment_bytes):
    layout = Layout(segment_bytes)
    assert layout.data_bytes + layout.journal_bytes == segment_bytes
    assert RECORD_BYTES * (1 + 2 * layout.max_commits) <= layout.journal_bytes
    assert layout.max_commits >= 10
    assert layout.data_bytes % UNIT_BYTES == 0


@pytest.fixture
def device():
    with MemoryDevice() as device:
        yield device


@pytest.fixture
def catalog(device):
    """Three segments, the last one active."""
    catalog = Catalog()
    for n in (1, 2, 3):
        segment = create_files(device, n, Layout(256 * KIB), False)
        catalog.segments[n] = segment
        catalog.seal()
        catalog.active = segment
    yield catalog
    for segment in catalog.segments.values():
        segment.data.close()
        segment.journal.close()


def commit(catalog: Catalog, segment_id: int, name: bytes, length: int = 100) -> Entry:
    segment = catalog.segments[segment_id]
    entry = Entry(segment_id, segment.tail_bytes, length, 0, catalog.take_sequence())
    segment.tail_bytes += UNIT_BYTES
    catalog.commit(NAMESPACE, name, entry)
    return entry


def kills(catalog: Catalog) -> list[tuple[int, int]]:
    return [(n, record.offset) for n, records in catalog.unkilled.items() for record in records]


def test_of_two_versions_the_later_put_counts_whichever_commits_first(catalog):
    early = Entry(3, 0, 100, 0, catalog.take_sequence())
    late = commit(catalog, 2, key(1))
    catalog.commit(NAMESPACE, key(1), early)
    assert catalog.index.get(NAMESPACE, key(1)) == late
    assert kills(catalog) == [(3, 0)]
    assert [segment.objects for segment in catalog.segments.values()] == [0, 1, 0]


def test_a_copy_of_the_same_version_takes_over(catalog):
    old = commit(catalog, 1, key(1))
    copy = old._replace(segment_id=3)
    catalog.commit(NAMESPACE, key(1), copy)
    assert catalog.index.get(NAMESPACE, key(1)) == copy
    assert kills(catalog) == [(1, 0)]


@pytest.mark.parametrize("accounts", [(), (Account(name="all", prefix=NAMESPACE[:8], quota_bytes=1 << 30),)])
@pytest.mark.parametrize("names", [[key(n) for n in range(30)], [b"x" * (1 + n) for n in range(30)]])
def test_a_batch_is_its_commits_one_after_the_other(catalog, accounts, names):
    """Also where some are there already, newer or older, or stand in the batch twice."""
    names = [*names, *names[:5]]
    entries = [Entry(3, n * UNIT_BYTES, 100 + n, n, 100 + n) for n in range(len(names))]
    batch, single = (
        Catalog(accounts, segments={n: attrs.evolve(segment) for n, segment in catalog.segments.items()})
        for _ in range(2)
    )
    for each in (batch, single):
        each.commit(NAMESPACE, names[3], Entry(2, 0, 10, 0, 50))
        each.commit(NAMESPACE, names[7], Entry(2, 4096, 10, 0, 500))
    batch.commit_many(NAMESPACE, names, entries)
    for name, entry in zip(names, entries, strict=True):
        single.commit(NAMESPACE, name, entry)
    assert look(batch, names) == look(single, names)
    assert sorted(kills(batch)) == sorted(kills(single))
    for each in (batch, single):
        each.doom(each.segments[3])
    assert look(batch, names) == look(single, names)
    assert batch.index.exist(NAMESPACE, names).count(0) == 1


def look(catalog: Catalog, names: list[bytes]) -> object:
    counts = [(s.objects, s.object_bytes, s.live_bytes) for s in catalog.segments.values()]
    return (catalog.index.get_many(NAMESPACE, names), counts, catalog.books.stats, catalog.tally)


def test_drop_of_another_version_does_nothing(catalog):
    old = commit(catalog, 1, key(1))
    new = commit(catalog, 2, key(1))
    assert catalog.drop(NAMESPACE, key(1), only=old) is None
    assert not catalog.lose(NAMESPACE, key(1), only=old)
    assert catalog.lose(NAMESPACE, key(1), only=new)
    assert kills(catalog) == [(1, 0)]
    assert catalog.object_bytes == 0


def test_doom_evicts_what_is_still_there(catalog):
    commit(catalog, 1, key(1), 100)
    commit(catalog, 1, key(2), 200)
    commit(catalog, 2, key(2), 300)
    catalog.doom(catalog.segments[1])
    assert catalog.index.exist(NAMESPACE, [key(1), key(2)]) == bytes([1, 0])
    assert (catalog.tally.evicted_objects, catalog.tally.evicted_bytes) == (1, 100)
    assert kills(catalog) == []
    (doomed,) = catalog.doomed
    assert catalog.used_bytes == 16384 + 3 * 256 * KIB, "its files still count until they are gone"
    doomed.data.close()
    doomed.journal.close()


def test_the_oldest_idle_sealed_segment_goes_unless_one_is_empty(catalog):
    first, second, third = catalog.segments.values()
    commit(catalog, 1, key(1))
    commit(catalog, 2, key(2))
    assert choose_victim(catalog) is first
    first.readers = 1
    assert choose_victim(catalog) is second
    second.writers = 1
    assert choose_victim(catalog) is None
    first.readers = second.writers = 0
    catalog.drop(NAMESPACE, key(2))
    assert choose_victim(catalog) is second
    assert catalog.active is third


def test_only_what_was_read_survives_and_only_within_the_budget(catalog):
    for n in range(5):
        commit(catalog, 1, key(n), 40_960)
    commit(catalog, 2, key(3))
    list(catalog.index.use(NAMESPACE, [key(1), key(2), key(3), key(4)]))
    first = catalog.segments[1]

    def plan(budget: int) -> list[bytes]:
        found: list[Survivor] = list(survivors(catalog, first, budget_bytes=budget))
        return [survivor.key for survivor in found]

    assert plan(1 << 20) == [key(1), key(2), key(4)]
    assert plan(2 * 40_960) == [key(1), key(2)]
    assert plan(40_959) == []
    catalog.drop(NAMESPACE, key(1))
    assert first.is_mostly_dead
    assert plan(1 << 20) == [key(0), key(2), key(4)], "then all of it does"
    assert plan(2 * 40_960) == [key(0), key(2)]


def test_what_is_mostly_dead_goes_before_the_oldest(catalog):
    first, second, _ = catalog.segments.values()
    for n in range(5):
        commit(catalog, 1, key(n), 40_960)
        commit(catalog, 2, key(10 + n), 40_960)
    assert choose_victim(catalog) is first
    for n in range(10, 12):
        catalog.drop(NAMESPACE, key(n))
    assert choose_victim(catalog) is second
    for n in range(3):
        catalog.drop(NAMESPACE, key(n))
    assert choose_victim(catalog) is first, "the barest of them"


def test_a_segment_that_is_full_by_number_is_not_mostly_dead(catalog):
    """Empty objects: a fraction of its bytes, but all of its places in the journal."""
    first = catalog.segments[1]
    for n in range(first.layout.max_commits):
        commit(catalog, 1, key(n), 0)
    assert first.live_bytes < first.charge_bytes // 2
    assert not first.is_mostly_dead
    for n in range(first.layout.max_commits // 2):
        catalog.drop(NAMESPACE, key(n))
    assert first.is_mostly_dead


def test_places_given_back_are_used_again(device):
    segment = create_files(device, 1, Layout(256 * KIB), False)
    first, second = segment.allocate(5000), segment.allocate(0)
    assert (first, second, segment.tail_bytes) == (0, 8192, 12288)
    segment.free(second, 0)
    segment.free(first, 5000)
    assert (segment.tail_bytes, segment.commits) == (0, 0)
    while segment.has_room(0):
        segment.allocate(0)
    assert segment.commits == segment.layout.max_commits == 20
    segment.data.close()
    segment.journal.close()


GOOD = {"directory": "kv"}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"capacity_bytes": 1000}, "'capacity_bytes' must be between 262144 and"),
        ({"capacity_bytes": "1G"}, "'capacity_bytes' must be a whole number: '1G'"),
        ({"io_threads": True}, "'io_threads' must be a whole number: True"),
        ({"io_threads": None}, "'io_threads' must be a whole number: None"),
        ({"io_threads": 0}, "'io_threads' must be between 1 and 256: 0"),
        ({"max_command_bytes": 5000}, "'max_command_bytes' must be a multiple of 4096: 5000"),
        ({"max_object_bytes": 1 << 32}, "'max_object_bytes' must be between"),
        ({"durability": "maybe"}, "'durability' must be in"),
        (
            {"capacity_bytes": MIB, "segment_bytes": MIB},
            "'capacity_bytes' must be at least 4194304, 4 segments",
        ),
    ],
)
def test_impossible_configuration_names_the_field(changes, complaint):
    with pytest.raises((ValueError, TypeError)) as caught:
        StoreConfig(**(GOOD | changes))
    assert complaint in str(caught.value)


def test_configuration_is_frozen_and_has_defaults_for_all_but_the_directory():
    settings = StoreConfig(**GOOD)
    assert settings.directory == Path("kv")
    assert (settings.max_command_bytes, settings.max_object_bytes) == (262144, 64 * MIB)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        settings.io_threads = 3


@given(st.integers(0, 2**50), st.integers(0, 2**50))
def test_default_sizes_fit_together(free_bytes, used_bytes):
    capacity = default_capacity_bytes(free_bytes=free_bytes, used_bytes=used_bytes)
    segment = default_segment_bytes(capacity)
    assert capacity % UNIT_BYTES == segment % UNIT_BYTES == 0
    assert 4 * segment <= capacity
    if capacity >= 512 * MIB:
        assert Layout(segment).data_bytes >= StoreConfig(**GOOD).max_object_bytes
    StoreConfig(directory="kv", capacity_bytes=capacity, segment_bytes=segment)


def test_nothing_is_killed_in_a_segment_that_is_gone(catalog):
    """A copy that ends after its target was doomed: the files go, and the commit with them."""
    entry = commit(catalog, 1, key(1))
    catalog.doom(catalog.segments[1])
    catalog.void(NAMESPACE, key(1), entry)
    assert kills(catalog) == []
    (doomed,) = catalog.doomed
    doomed.data.close()
    doomed.journal.close()


def test_what_was_lost_is_void_once_its_key_is_written_or_deleted(catalog):
    for n in range(4):
        catalog.lose(NAMESPACE, key(n), only=commit(catalog, 1, key(n)))
    assert kills(catalog) == []
    commit(catalog, 2, key(0))
    assert catalog.drop(NAMESPACE, key(1)) is None
    assert kills(catalog) == [(1, 0), (1, UNIT_BYTES)]
    assert set(catalog.lost) == {(NAMESPACE, key(2)), (NAMESPACE, key(3))}


def test_what_was_lost_is_void_also_when_its_key_is_one_of_a_batch(catalog):
    catalog.lose(NAMESPACE, key(5), only=commit(catalog, 1, key(5)))
    names = [key(n) for n in range(2 * FEW)]
    entries = [Entry(2, n * UNIT_BYTES, 100, 0, catalog.take_sequence()) for n in range(2 * FEW)]
    catalog.commit_many(NAMESPACE, names, entries)
    assert kills(catalog) == [(1, 0)]
    assert not catalog.lost
    assert catalog.index.get(NAMESPACE, key(5)) == entries[5]


def test_what_was_lost_goes_with_its_segment(catalog):
    lost = [commit(catalog, n, key(1)) for n in (1, 2)]
    catalog.lose(NAMESPACE, key(1), only=lost[1])
    catalog.lose(NAMESPACE, key(2), only=commit(catalog, 1, key(2)))
    catalog.commit(NAMESPACE, key(3), lost[0]._replace(sequence=99))
    catalog.lose(NAMESPACE, key(3), only=lost[0]._replace(sequence=99))
    catalog.lost[NAMESPACE, key(3)].append(lost[1])
    with_files_closed(catalog, 1)
    assert catalog.lost == {(NAMESPACE, key(1)): [lost[1]], (NAMESPACE, key(3)): [lost[1]]}


def test_kills_and_removals_are_in_order(catalog):
    """What was void before a segment was doomed comes before its files, what was afterwards behind them."""
    for segment_id in (1, 2, 3):
        commit(catalog, segment_id, key(segment_id))
        commit(catalog, segment_id, key(10 + segment_id))
    catalog.drop(NAMESPACE, key(2))
    catalog.drop(NAMESPACE, key(1))
    with_files_closed(catalog, 1)
    catalog.drop(NAMESPACE, key(3))
    (overdue,) = catalog.overdue
    assert overdue.segment.segment_id == 1
    assert list(overdue.kills) == [2], "those in the segment itself are not needed any more"
    assert kills(catalog) == [(3, 0)]
    with_files_closed(catalog, 2)
    assert [list(overdue.kills) for overdue in catalog.overdue] == [[], [3]]
    assert kills(catalog) == []


def with_files_closed(catalog: Catalog, segment_id: int) -> None:
    segment = catalog.segments[segment_id]
    catalog.doom(segment)
    segment.data.close()
    segment.journal.close()
