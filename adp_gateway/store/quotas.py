"""Who may keep how much. Pure bookkeeping: no clock, no I/O, no event loop; both stores call it.

An account owns the namespaces that begin with its prefix, so the owner of an object can be read from its name
and nothing about accounts is ever written to the device (docs/adr/0013). An object counts as what a segment
keeps for it, payload in whole units and two journal records, so that a million empty objects are not free.

Room is taken before a put begins to wait and given back when it ends, whichever way. Of the versions of a key
that are current or on their way only the largest counts, because only one of them can be current at a time:
so overwriting costs the difference, and whatever is committed, lost or deleted in whatever order, an account
never has more than its quota.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import attrs

from .base import AccountStats, Status
from .leases import Subject
from .segment import object_charge

PREFIX_BYTES = 8

#: Names of versions that are gone are dropped from a queue when there are this many more than half of it.
_SLACK = 1024

_STEP = 32  # names that are looked up together


@attrs.frozen(kw_only=True)
class Account:
    """Whoever owns the namespaces that begin with `prefix`. `quota_bytes`: None for as much as there is."""

    name: str
    prefix: bytes
    quota_bytes: int | None = None


class Sight(NamedTuple):
    """What a store tells of an object that is there. `is_pinned`: somebody reads or holds it."""

    sequence: int
    length: int
    is_used: bool
    is_pinned: bool


@attrs.frozen
class Shelf:
    """What quotas ask of a store.

    A ticket is the store's own number, below 2**64, for the place where it keeps an object; later objects may
    have it again. `named` tells for pairs of ticket and sequence which object that is, or None where that
    version is not there any more.
    """

    tickets: Callable[[bytes, Sequence[bytes]], list[int]]  # of objects of a namespace that are there
    named: Callable[[Sequence[int], Sequence[int]], list[Subject | None]]
    look: Callable[[Subject], Sight | None]
    cool: Callable[[Subject], None]  # take back that the object has been used
    evict: Callable[[Subject], None]


class _Queue:
    """Tickets and sequences, first in, first out, in 16 bytes a pair and half as much again."""

    def __init__(self) -> None:
        self._tickets = array("Q")
        self._sequences = array("Q")
        self._first = 0  # what stands in front of it has gone

    def __len__(self) -> int:
        return len(self._tickets) - self._first

    def extend(self, tickets: Iterable[int], sequences: Iterable[int]) -> None:
        """Put pairs at the end."""
        self._tickets.extend(tickets)
        self._sequences.extend(sequences)

    def steps(self) -> Iterator[tuple[Sequence[int], Sequence[int]]]:
        """All of it in order, a step at a time."""
        for start in range(self._first, len(self._tickets), _STEP):
            yield self._tickets[start : start + _STEP], self._sequences[start : start + _STEP]

    def drop(self, count: int) -> None:
        """Take so many from the front."""
        self._first += count
        if 3 * self._first > len(self._tickets):
            del self._tickets[: self._first], self._sequences[: self._first]
            self._first = 0


class Book:
    """One account. Its queue is a clock: the oldest is next, but goes round again if it was used."""

    def __init__(self, account: Account, shelf: Shelf) -> None:
        self.account = account
        self._shelf = shelf
        self._objects = 0
        self._used_bytes = 0
        self._evicted_objects = 0
        self._bound_bytes = 0  # never less than used; what it can become if all that is under way succeeds
        self._pending: dict[Subject, list[int]] = {}  # charges of the puts under way
        self._queue = _Queue()

    @property
    def stats(self) -> AccountStats:
        """The account at this moment."""
        return AccountStats(
            name=self.account.name,
            objects=self._objects,
            used_bytes=self._used_bytes,
            quota_bytes=self.account.quota_bytes,
            evicted_objects=self._evicted_objects,
        )

    # What the store reports

    def add(self, subject: Subject, length: int, sequence: int) -> None:
        """An object has become current; the version before it, if any, has been removed."""
        namespace, key = subject
        self.add_many(namespace, [key], [length], [sequence])

    def add_many(
        self, namespace: bytes, keys: Sequence[bytes], lengths: Sequence[int], sequences: Sequence[int]
    ) -> None:
        """`add` for each."""
        charges = [object_charge(length) for length in lengths]
        self._objects += len(charges)
        self._used_bytes += sum(charges)
        self._bound_bytes += sum(charges)
        if self._pending:
            for key, charge in zip(keys, charges, strict=True):
                self._bound_bytes -= min(charge, self._largest_pending((namespace, key)))
        if self.account.quota_bytes is not None:
            self._queue.extend(self._shelf.tickets(namespace, keys), sequences)
            if len(self._queue) > 2 * self._objects + _SLACK:
                self._tidy()

    def remove(self, subject: Subject, length: int) -> None:
        """An object is not current any more."""
        charge, pending = object_charge(length), self._largest_pending(subject)
        self._objects -= 1
        self._used_bytes -= charge
        self._bound_bytes -= max(charge, pending) - pending

    # What the store asks

    def admit(self, subject: Subject, length: int) -> Status | None:
        """Whether a put of `length` bytes may begin. OK: call `leave` when it has ended, however.

        Evicts the account's own coldest objects for it, never one that is pinned or being written, and none
        at all if that would not be enough. None: not now, but ask again when one of the account's other puts
        has ended.
        """
        quota_bytes = self.account.quota_bytes
        charge = object_charge(length)
        if quota_bytes is not None:
            if charge > quota_bytes:
                return Status.TOO_LARGE
            growth = max(0, charge - self._held(subject))
            if not self._make_room(self._bound_bytes + growth - quota_bytes, keep=subject):
                return None if self._pending else Status.CAPACITY_EXHAUSTED
        before = self._held(subject)
        self._pending.setdefault(subject, []).append(charge)
        self._bound_bytes += self._held(subject) - before
        return Status.OK

    def leave(self, subject: Subject, length: int) -> None:
        """A put that was admitted has ended; if it succeeded, `add` has been called before."""
        before = self._held(subject)
        charges = self._pending[subject]
        charges.remove(object_charge(length))
        if not charges:
            del self._pending[subject]
        self._bound_bytes -= before - self._held(subject)

    def shrink(self) -> bool:
        """Evict down to the quota, which may have been lowered since; whether anything had to go."""
        before = self._evicted_objects
        if self.account.quota_bytes is not None:
            self._make_room(self._bound_bytes - self.account.quota_bytes)
        return self._evicted_objects > before

    def _largest_pending(self, subject: Subject) -> int:
        return max(self._pending.get(subject, ()), default=0)

    def _held(self, subject: Subject) -> int:
        """What the key counts for now: its current version, or the largest under way."""
        sight = self._shelf.look(subject)
        return max(0 if sight is None else object_charge(sight.length), self._largest_pending(subject))

    def _tidy(self) -> None:
        """Drop what is not there any more from the queue."""
        queue = _Queue()
        for ticket, sequence, subject in self._oldest():
            if subject is not None:
                queue.extend([ticket], [sequence])
        self._queue = queue

    def _oldest(self) -> Iterator[tuple[int, int, Subject | None]]:
        """The queue in order: ticket, sequence, and the object if it is still there."""
        for tickets, sequences in self._queue.steps():
            yield from zip(tickets, sequences, self._shelf.named(tickets, sequences), strict=True)

    def _make_room(self, excess_bytes: int, *, keep: Subject | None = None) -> bool:
        """Evict until `excess_bytes` have gone; whether they have. If they cannot go, nothing does."""
        if excess_bytes <= 0:
            return True
        victims: list[Subject] = []
        kept: list[tuple[int, int, Subject]] = []
        warm: list[tuple[int, int]] = []  # place in `kept`, charge
        passed = 0
        for ticket, sequence, subject in self._oldest():
            if excess_bytes <= 0:
                break
            passed += 1
            sight = None if subject is None else self._shelf.look(subject)
            if subject is None or sight is None:
                continue
            if sight.is_pinned or subject == keep or subject in self._pending:
                kept.append((ticket, sequence, subject))
            elif sight.is_used:
                warm.append((len(kept), object_charge(sight.length)))
                kept.append((ticket, sequence, subject))
            else:
                victims.append(subject)
                excess_bytes -= object_charge(sight.length)
        # Once round: now those that were used, as if the clock had passed them a second time.
        spent = 0
        while excess_bytes > 0 and spent < len(warm):
            excess_bytes -= warm[spent][1]
            spent += 1
        if excess_bytes > 0:
            return False
        gone = {place for place, _ in warm[:spent]}
        victims += [kept[place][2] for place in sorted(gone)]
        for place, _ in warm[spent:]:
            self._shelf.cool(kept[place][2])
        self._queue.drop(passed)
        for place, (ticket, sequence, _) in enumerate(kept):
            if place not in gone:
                self._queue.extend([ticket], [sequence])
        self._evicted_objects += len(victims)
        for victim in victims:
            self._shelf.evict(victim)
        return True


class Books:
    """The accounts of a store. Without any, nothing is counted and nothing costs."""

    def __init__(self, accounts: Iterable[Account], shelf: Shelf) -> None:
        self._books = {account.prefix: Book(account, shelf) for account in accounts}

    def __iter__(self) -> Iterator[Book]:
        return iter(self._books.values())

    def of(self, namespace: bytes) -> Book | None:
        """The book of whoever owns a namespace; None if nobody does."""
        return self._books.get(namespace[:PREFIX_BYTES])

    @property
    def stats(self) -> tuple[AccountStats, ...]:
        """Every account at this moment."""
        return tuple(book.stats for book in self)
