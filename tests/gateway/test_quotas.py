"""Accounts and quotas as bookkeeping: no store, no device."""

from collections.abc import Sequence

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from adp_gateway.store.base import Status
from adp_gateway.store.leases import Subject
from adp_gateway.store.quotas import PREFIX_BYTES, Account, Book, Books, Shelf, Sight
from adp_gateway.store.segment import object_charge

UNIT = object_charge(1)
OWN = b"tenant-a"


class Objects:
    """What is there, as a store would tell."""

    def __init__(self) -> None:
        self.sights: dict[Subject, Sight] = {}
        self.sequence = 0

    def book(self, quota_bytes: int | None) -> Book:
        account = Account(name="a", prefix=OWN, quota_bytes=quota_bytes)
        self.of_a = Book(account, self.shelf())
        return self.of_a

    def shelf(self) -> Shelf:
        return Shelf(self._tickets, self._named, self.sights.get, self._cool, self.drop)

    def _tickets(self, _namespace: bytes, keys: Sequence[bytes]) -> list[int]:
        return [sum(key) % 7 for key in keys]  # places are used again

    def _named(self, tickets: Sequence[int], sequences: Sequence[int]) -> list[Subject | None]:
        subjects = {
            (self._tickets(subject[0], [subject[1]])[0], sight.sequence): subject
            for subject, sight in self.sights.items()
        }
        return [subjects.get(pair) for pair in zip(tickets, sequences, strict=True)]

    def put(self, subject: Subject, length: int) -> None:
        if subject in self.sights:
            self.drop(subject)
        self.sequence += 1
        self.sights[subject] = Sight(self.sequence, length, is_used=False, is_pinned=False)
        self.of_a.add(subject, length, self.sequence)

    def drop(self, subject: Subject) -> None:
        self.of_a.remove(subject, self.sights.pop(subject).length)

    def mark(self, subject: Subject, **what: bool) -> None:
        self.sights[subject] = self.sights[subject]._replace(**what)

    def _cool(self, subject: Subject) -> None:
        self.mark(subject, is_used=False)


def name(n: int) -> Subject:
    return OWN, b"%d" % n


def stored(objects: Objects, book: Book, *numbers: int, length: int = 1) -> None:
    for n in numbers:
        assert book.admit(name(n), length) == Status.OK
        objects.put(name(n), length)
        book.leave(name(n), length)


def test_the_coldest_goes_and_the_used_goes_round_once() -> None:
    objects = Objects()
    book = objects.book(3 * UNIT)
    stored(objects, book, 1, 2, 3)
    objects.mark(name(1), is_used=True)
    stored(objects, book, 4)
    assert set(objects.sights) == {name(1), name(3), name(4)}
    assert not objects.sights[name(1)].is_used
    stored(objects, book, 5)
    assert set(objects.sights) == {name(1), name(4), name(5)}
    stored(objects, book, 6, 7)
    assert set(objects.sights) == {name(5), name(6), name(7)}
    assert book.stats.evicted_objects == 4


def test_all_used_goes_by_age() -> None:
    objects = Objects()
    book = objects.book(3 * UNIT)
    stored(objects, book, 1, 2, 3)
    for n in (1, 2, 3):
        objects.mark(name(n), is_used=True)
    stored(objects, book, 4)
    assert set(objects.sights) == {name(2), name(3), name(4)}
    assert not any(sight.is_used for sight in objects.sights.values())


def test_what_is_pinned_stays_and_if_that_is_not_enough_nothing_changes() -> None:
    objects = Objects()
    book = objects.book(3 * UNIT)
    stored(objects, book, 1, 2, 3)
    objects.mark(name(1), is_pinned=True)
    objects.mark(name(2), is_used=True)
    before = dict(objects.sights)
    assert book.admit(name(4), 3 * 4096 - 3 * 384) == Status.CAPACITY_EXHAUSTED
    assert objects.sights == before
    stored(objects, book, 4, length=4097)  # two and a bit: both that may go do
    assert set(objects.sights) == {name(1), name(4)}


def test_larger_than_the_quota_is_too_large_and_evicts_nothing() -> None:
    objects = Objects()
    book = objects.book(3 * UNIT)
    stored(objects, book, 1, 2, 3)
    assert book.admit(name(4), 3 * 4096) == Status.OK
    book.leave(name(4), 3 * 4096)
    assert book.admit(name(4), 4 * 4096) == Status.TOO_LARGE
    assert book.stats.evicted_objects == 3


def test_overwriting_costs_the_difference() -> None:
    objects = Objects()
    book = objects.book(3 * UNIT)
    stored(objects, book, 1, 2, 3)
    stored(objects, book, 2, 2, 1, 3)
    assert set(objects.sights) == {name(1), name(2), name(3)}
    assert book.stats.used_bytes == 3 * UNIT


def test_room_is_spoken_for_from_before_the_put_until_it_has_ended() -> None:
    objects = Objects()
    book = objects.book(3 * UNIT)
    stored(objects, book, 1)
    assert book.admit(name(2), 1) == Status.OK
    assert book.admit(name(3), 1) == Status.OK
    assert book.admit(name(3), 1) == Status.OK  # the same key again: one of the two will be current
    assert book.admit(name(4), 1) == Status.OK  # evicts 1
    assert objects.sights == {}
    assert book.admit(name(5), 1) is None
    objects.put(name(2), 1)
    assert book.admit(name(5), 1) is None  # what is being written may not go, even when it has been
    book.leave(name(2), 1)
    assert book.admit(name(5), 1) == Status.OK
    assert objects.sights == {}


def test_a_quota_that_was_lowered() -> None:
    objects = Objects()
    book = objects.book(None)
    stored(objects, book, *range(5))
    assert book.stats.used_bytes == 5 * UNIT
    assert not book.shrink()
    lower = objects.book(2 * UNIT)
    for (namespace, key), sight in objects.sights.items():
        lower.add((namespace, key), sight.length, sight.sequence)
    assert lower.shrink()
    assert set(objects.sights) == {name(3), name(4)}
    assert not lower.shrink()


def test_deletes_do_not_make_the_queue_grow() -> None:
    objects = Objects()
    book = objects.book(100 * UNIT)
    for n in range(20_000):
        stored(objects, book, n)
        objects.drop(name(n))
    assert len(book._queue) < 2000


def test_who_owns_a_namespace() -> None:
    objects = Objects()
    accounts = [Account(name=name, prefix=name.encode() * PREFIX_BYTES) for name in "ab"]
    books = Books(accounts, objects.shelf())
    found = [books.of(prefix * 32) for prefix in (b"a", b"b", b"c")]
    assert [book and book.account for book in found] == [*accounts, None]
    assert [account.name for account in books.stats] == ["a", "b"]


names = st.integers(0, 5).map(name)
lengths = st.sampled_from([0, 4096, 4097, 10_000, 40_000])


class BookMachine(RuleBasedStateMachine):
    """Puts that overlap, succeed, fail, are overtaken by deletes: never more than the quota."""

    QUOTA = 12 * UNIT

    def __init__(self) -> None:
        super().__init__()
        self.objects = Objects()
        self.book = self.objects.book(self.QUOTA)
        self.under_way: list[tuple[Subject, int]] = []

    @rule(subject=names, length=lengths)
    def begin(self, subject: Subject, length: int) -> None:
        before = dict(self.objects.sights)
        outcome = self.book.admit(subject, length)
        if outcome == Status.OK:
            self.under_way.append((subject, length))
        else:
            assert self.objects.sights == before
        for gone in before.keys() - self.objects.sights.keys():
            assert not before[gone].is_pinned
            assert gone != subject
            assert gone not in dict(self.under_way)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), succeeds=st.booleans())
    def end(self, data: st.DataObject, succeeds: bool) -> None:
        subject, length = self.under_way.pop(data.draw(st.integers(0, len(self.under_way) - 1)))
        if succeeds:
            self.objects.put(subject, length)
        self.book.leave(subject, length)

    @precondition(lambda self: self.objects.sights)
    @rule(data=st.data(), what=st.sampled_from(["delete", "use", "pin", "unpin"]))
    def touch(self, data: st.DataObject, what: str) -> None:
        subject = data.draw(st.sampled_from(sorted(self.objects.sights)))
        if what == "delete":
            self.objects.drop(subject)
        elif what == "use":
            self.objects.mark(subject, is_used=True)
        else:
            self.objects.mark(subject, is_pinned=what == "pin")

    @invariant()
    def keeps_the_quota(self) -> None:
        sizes: dict[Subject, list[int]] = {}
        for subject, sight in self.objects.sights.items():
            sizes.setdefault(subject, []).append(object_charge(sight.length))
        assert self.book.stats.used_bytes == sum(map(sum, sizes.values())) <= self.QUOTA
        for subject, length in self.under_way:
            sizes.setdefault(subject, []).append(object_charge(length))
        assert self.book._bound_bytes == sum(map(max, sizes.values())) <= self.QUOTA
        assert self.book.stats.objects == len(self.objects.sights)


TestBook = BookMachine.TestCase


@pytest.mark.parametrize("length", [0, 1, 4096])
def test_tiny_objects_are_not_free(length: int) -> None:
    assert object_charge(length) == 4096 + 384
