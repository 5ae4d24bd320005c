"""What was asked of a store and what it acknowledged, and so what it may say after a crash. Pure.

Of each name there is one writer at a time, so its versions have an order. After a crash a name has the value
that was acknowledged last, or one that was asked for later; it may be absent where something may have been
evicted. Anything else is a verdict.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import random
from collections.abc import Callable, Iterable, Mapping

import attrs

SECTOR_BYTES = 512

Name = tuple[bytes, bytes]  # namespace, key


class Verdict(enum.Enum):
    """What is wrong with what was found."""

    CORRUPT = "bytes that nobody wrote under this name"
    HALF = "a part of a version, or a mixture of several"
    PHANTOM = "a version that had been replaced or deleted, or was never acknowledged in its time"
    LOST = "absent, although it was acknowledged"


def contents(name: Name, number: int, length: int) -> bytes:
    """The bytes of a version, made quickly. Of long enough ones, every sector is like no other version's."""
    stamp = hashlib.blake2b(b"%b %b %d" % (*name, number), digest_size=16).digest()
    start = int.from_bytes(stamp[:2], "little")
    noise = _noise(length)
    data = bytearray(noise[start : start + length])
    for position, byte in enumerate(stamp[:length]):
        places = range(position, length, SECTOR_BYTES)
        data[position::SECTOR_BYTES] = bytes([byte]) * len(places)
    return bytes(data)


@functools.lru_cache
def _noise_of(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def _noise(length: int) -> bytes:
    """Something to cut `length` bytes out of, from any of the first 65,536 places."""
    return _noise_of(1 << max(17, (length + 65536).bit_length()))


def digest(data: bytes | memoryview) -> bytes:
    """What stands for the bytes in a history."""
    return hashlib.blake2b(data, digest_size=16).digest()


@attrs.define(eq=False)
class Step:
    """One write or delete of a name. `print`: the digest of its bytes; None for a delete."""

    number: int
    length: int
    print: bytes | None
    asked: int
    acknowledged: int | None = None


class History:
    """All steps by name. `clock` gives moments: anything that grows, the same for asking and answering."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        self._steps: dict[Name, list[Step]] = {}
        self._count = 0
        self.acknowledged = 0

    @property
    def names(self) -> list[Name]:
        """Every name that was ever written or deleted."""
        return list(self._steps)

    def longest(self, name: Name) -> int:
        """Room for any version that the name has had."""
        return max((step.length for step in self._steps.get(name, ())), default=0)

    def now(self) -> int:
        """This moment."""
        return self._clock()

    # The writer reports

    def write(self, name: Name, length: int) -> tuple[Step, bytes]:
        """A write is about to be asked for; its step and its bytes."""
        self._count += 1
        data = contents(name, self._count, length)
        return self._ask(name, Step(self._count, length, digest(data), self._clock())), data

    def delete(self, name: Name) -> Step:
        """A delete is about to be asked for."""
        self._count += 1
        return self._ask(name, Step(self._count, 0, None, self._clock()))

    def _ask(self, name: Name, step: Step) -> Step:
        self._steps.setdefault(name, []).append(step)
        return step

    def acknowledge(self, step: Step) -> None:
        """It has been done."""
        step.acknowledged = self._clock()
        self.acknowledged += 1

    def withdraw(self, name: Name, step: Step) -> None:
        """It has been refused, which leaves the name as it was."""
        self._steps[name].remove(step)

    # The reader asks

    def allowed(self, name: Name, since: int, until: int) -> list[Step | None]:
        """What may be found by somebody who looks from moment `since` to `until`. None: nothing, ever."""
        steps = self._steps.get(name, [])
        first = -1
        for position, step in enumerate(steps):
            if _is_acknowledged(step, since):
                first = position
        later = [step for step in steps[first + 1 :] if step.asked <= until]
        return [steps[first] if first >= 0 else None, *later]

    def judge(
        self, name: Name, found: bytes | memoryview | None, since: int, until: int, *, may_evict: bool
    ) -> Verdict | None:
        """What is wrong with `found` (None: a miss); None if nothing is."""
        prints = {None if step is None else step.print for step in self.allowed(name, since, until)}
        if found is None:
            return None if may_evict or None in prints else Verdict.LOST
        return None if digest(found) in prints else self.identify(name, bytes(found))

    def identify(self, name: Name, found: bytes) -> Verdict | None:
        """What bytes that are not allowed now are."""
        steps = [step for step in self._steps.get(name, []) if step.print is not None]
        if digest(found) in {step.print for step in steps}:
            return Verdict.PHANTOM
        pieces = set(_sectors(found))
        for step in steps:
            if pieces.intersection(_sectors(contents(name, step.number, step.length))):
                return Verdict.HALF
        return Verdict.CORRUPT

    def settle(self, name: Name, found: bytes | memoryview | None) -> None:
        """The crash is over: whatever was under way has come to `found`, or has not.

        A miss settles nothing where it may be an eviction: what was evicted may come back, being current.
        """
        if found is None:
            return
        mark = digest(found)
        steps = self._steps[name]
        last = max(position for position, step in enumerate(steps) if step.print == mark)
        steps[last].acknowledged = self._clock()
        del steps[last + 1 :]

    def settle_absent(self, name: Name) -> None:
        """As `settle` for a miss that cannot be an eviction."""
        self.acknowledge(self.delete(name))

    def fork(
        self, clock: Callable[[], int], observed: Mapping[Name, bytes | None], at: int, *, may_evict: bool
    ) -> History:
        """The history of a store that was opened after a crash at moment `at`: what was observed is
        acknowledged. What may have been evicted may also come back. Its clock begins at 0."""
        later = History(clock)
        later._count = self._count
        for name, found in observed.items():
            steps = [step for step in self.allowed(name, at, at) if step is not None]
            if found is not None:
                steps = [step for step in steps if step.print == digest(found)][-1:]
            elif not may_evict:
                steps = []
            later._steps[name] = [
                attrs.evolve(
                    step,
                    asked=-1,
                    acknowledged=-1 if found is not None or _is_acknowledged(step, at) else None,
                )
                for step in steps
            ]
        return later

    def tell(self, name: Name, since: int, until: int) -> str:
        """What was allowed, for a message."""
        return ", ".join(
            "nothing"
            if step is None or step.print is None
            else f"version {step.number} ({step.length} bytes)"
            for step in self.allowed(name, since, until)
        )


def _is_acknowledged(step: Step, at: int) -> bool:
    return step.acknowledged is not None and step.acknowledged <= at


def _sectors(data: bytes) -> Iterable[bytes]:
    return (
        data[start : start + SECTOR_BYTES] for start in range(0, len(data) - SECTOR_BYTES + 1, SECTOR_BYTES)
    )
