"""Who may keep how much. Pure bookkeeping: no clock, no I/O, no event loop; both stores call it.

An account owns the namespaces that begin with its prefix, so the owner of an object can be read from its name
and nothing about accounts is ever written to the device (docs/adr/0013). An object counts as what a segment
keeps for it, payload in whole units and two journal records, so that a million empty objects are not free.

Room is taken before a put begins to wait and given back when it ends, whichever way. Of the versions of a key
that are current or on their way only the largest counts, because only one of them can be current at a time:
so overwriting costs the difference, and whatever is committed, lost or deleted in whatever order, an account
never has more than its quota.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import attrs

from .base import AccountStats, Status
from .leases import Subject
from .segment import object_charge

PREFIX_BYTES = 8

#: Names of versions that are gone are dropped from a queue when there are this many more than half of it.
_SLACK = 1024


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
    """The three things that quotas ask of a store."""

    look: Callable[[Subject], Sight | None]
    cool: Callable[[Subject], None]  # take back that the object has been used
    evict: Callable[[Subject], None]


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
        self._queue: deque[tuple[bytes, bytes, int]] = deque()  # namespace, key, sequence

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
        charge, pending = object_charge(length), self._largest_pending(subject)
        self._objects += 1
        self._used_bytes += charge
        self._bound_bytes += max(charge, pending) - pending
        if self.account.quota_bytes is not None:
            self._queue.append((*subject, sequence))
            if len(self._queue) > 2 * self._objects + _SLACK:
                self._queue = deque(entry for entry in self._queue if self._sight(entry))

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

    def _sight(self, entry: tuple[bytes, bytes, int]) -> Sight | None:
        """The version that a place in the queue stands for, if it is still there."""
        namespace, key, sequence = entry
        sight = self._shelf.look((namespace, key))
        return sight if sight is not None and sight.sequence == sequence else None

    def _make_room(self, excess_bytes: int, *, keep: Subject | None = None) -> bool:
        """Evict until `excess_bytes` have gone; whether they have. If they cannot go, nothing does."""
        if excess_bytes <= 0:
            return True
        victims: list[Subject] = []
        kept: list[tuple[bytes, bytes, int]] = []
        warm: list[tuple[int, int]] = []  # place in `kept`, charge
        passed = 0
        for entry in self._queue:
            if excess_bytes <= 0:
                break
            passed += 1
            sight = self._sight(entry)
            if sight is None:
                continue
            subject = entry[:2]
            if sight.is_pinned or subject == keep or subject in self._pending:
                kept.append(entry)
            elif sight.is_used:
                warm.append((len(kept), object_charge(sight.length)))
                kept.append(entry)
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
        victims += [kept[place][:2] for place in sorted(gone)]
        for place, _ in warm[spent:]:
            self._shelf.cool(kept[place][:2])
        for _ in range(passed):
            self._queue.popleft()
        self._queue.extend(entry for place, entry in enumerate(kept) if place not in gone)
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
