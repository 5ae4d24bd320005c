"""Who is reading what, and which deletes wait for them. Pure bookkeeping: no clock, no I/O, no event loop.

Readers of one key are counted in cohorts. A delete closes the cohort that is open, so readers who come later
(the key may have been written again meanwhile) start a new one and cannot keep the delete waiting for ever;
the delete itself waits for every cohort of the key that still has readers, also those closed before it.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias

import attrs

Subject: TypeAlias = tuple[bytes, bytes]  # (namespace, key)


@attrs.define(eq=False)
class Cohort:
    """The readers of one key between two deletes."""

    subject: Subject
    readers: int = 0
    is_open: bool = True
    waiting: "list[Drain]" = attrs.field(factory=list)


@attrs.define(eq=False)
class Drain:
    """A delete that waits. `notify` is called once, when the last cohort has gone."""

    notify: Callable[[], None]
    cohorts: list[Cohort] = attrs.field(factory=list)

    @property
    def is_done(self) -> bool:
        """Whether nobody is left to wait for."""
        return not self.cohorts


class LeaseLedger:
    """All cohorts of a store."""

    def __init__(self) -> None:
        self._cohorts: dict[Subject, list[Cohort]] = {}
        self._readers = 0

    @property
    def readers(self) -> int:
        """Leases outstanding, over all keys."""
        return self._readers

    def is_leased(self, subject: Subject) -> bool:
        """Whether anybody reads this key, in whatever version."""
        return subject in self._cohorts

    def enter(self, subject: Subject) -> Cohort:
        """Count one more reader. Hand the cohort to `leave` exactly once."""
        self._readers += 1
        cohorts = self._cohorts.setdefault(subject, [])
        if not cohorts or not cohorts[-1].is_open:
            cohorts.append(Cohort(subject))
        cohort = cohorts[-1]
        cohort.readers += 1
        return cohort

    def leave(self, cohort: Cohort) -> None:
        """Count one reader less; wakes the deletes for which it was the last."""
        self._readers -= 1
        cohort.readers -= 1
        if cohort.readers:
            return
        cohorts = self._cohorts[cohort.subject]
        cohorts.remove(cohort)
        if not cohorts:
            del self._cohorts[cohort.subject]
        for drain in cohort.waiting:
            drain.cohorts.remove(cohort)
            if drain.is_done:
                drain.notify()

    def drain(self, subjects: Iterable[Subject], notify: Callable[[], None]) -> Drain:
        """Start to wait for everybody who reads one of `subjects` now.

        It may be done already; then `notify` stays silent.
        """
        drain = Drain(notify)
        for subject in set(subjects):
            for cohort in self._cohorts.get(subject, ()):
                cohort.is_open = False
                cohort.waiting.append(drain)
                drain.cohorts.append(cohort)
        return drain

    def abandon(self, drain: Drain) -> None:
        """Stop waiting (the deleter left). Harmless when the drain is done."""
        for cohort in drain.cohorts:
            cohort.waiting.remove(drain)
        drain.cohorts.clear()
