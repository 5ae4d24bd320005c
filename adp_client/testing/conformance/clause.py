"""What a clause is, and what became of it.

A clause is one sentence of the spec with a function that finds out whether the program under test keeps it.
The function returns if it does, raises `Broken` with one sentence if it does not, and `NotApplicable` if the
question cannot be asked of this program. A chapter is the clauses of one module, in order.
"""

import enum
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import attrs

from adp_client.protocol.constants import Feature

T = TypeVar("T")

#: What a clause's function looks like. `T` is `Trial` for gateways, `Scene` for clients.
Check = Callable[[T], Awaitable[None]]


class Level(enum.Enum):
    """Conformance levels of the spec's section 10, from which on a clause is part of the contract."""

    GATEWAY = "gateway"
    FULL = "full"


class Verdict(enum.Enum):
    """What became of a clause."""

    PASSED = "pass"
    FAILED = "fail"
    SKIPPED = "skip"


class Broken(Exception):
    """The program under test does not keep the clause. The text says what was expected and what came."""


class NotApplicable(Exception):
    """The clause cannot be checked here. The text says why."""


@attrs.frozen(kw_only=True)
class Result:
    """One clause and its verdict. `sentence`: what went wrong, or why it was skipped."""

    id: str
    section: str
    statement: str
    verdict: Verdict
    sentence: str = ""


@attrs.frozen(kw_only=True)
class Clause(Generic[T]):
    """One promise.

    id: a section of the spec, a dash, a name: `5.4-too-large`.
    needs: features without which there is nothing to check.
    """

    id: str
    level: Level
    needs: Feature
    statement: str
    check: Check[T] = attrs.field(repr=False)

    @property
    def section(self) -> str:
        """Where the spec says so."""
        return self.id.partition("-")[0]

    def result(self, verdict: Verdict, sentence: str = "") -> Result:
        """What became of it."""
        return Result(
            id=self.id,
            section=self.section,
            statement=self.statement,
            verdict=verdict,
            sentence=sentence,
        )


@attrs.frozen(kw_only=True)
class Report:
    """What a contract found, clause by clause in the contract's order."""

    results: tuple[Result, ...]

    @property
    def failures(self) -> tuple[Result, ...]:
        """What is not kept."""
        return tuple(result for result in self.results if result.verdict is Verdict.FAILED)

    @property
    def is_kept(self) -> bool:
        """Whether nothing failed. What was skipped does not count."""
        return not self.failures

    def count(self, verdict: Verdict) -> int:
        """How many clauses have this verdict."""
        return sum(result.verdict is verdict for result in self.results)

    def __str__(self) -> str:
        counts = ", ".join(f"{self.count(verdict)} {verdict.value}" for verdict in Verdict)
        return "\n".join([counts, *(f"{each.id}: {each.sentence}" for each in self.failures)])


class Chapter(Generic[T]):
    """The clauses of one module."""

    def __init__(self) -> None:
        self.clauses: list[Clause[T]] = []

    def clause(
        self, id: str, *, level: Level = Level.GATEWAY, needs: Feature = Feature.NONE
    ) -> Callable[[Check[T]], Check[T]]:
        """Make a clause of the function below. Its docstring is the statement."""

        def add(check: Check[T]) -> Check[T]:
            statement = " ".join((check.__doc__ or "").split())
            self.clauses.append(Clause(id=id, level=level, needs=needs, statement=statement, check=check))
            return check

        return add


def expect(subject: str, expected: object, got: object) -> None:
    """Raise Broken unless the two are equal."""
    if expected != got:
        raise Broken(f"{subject}: expected {shown(expected)}, got {shown(got)}")


def shown(value: object) -> str:
    """`value` for a sentence: codes by name, long bytes by their beginning."""
    if isinstance(value, enum.Enum):
        return value.name or str(value.value)
    if isinstance(value, (bytes, bytearray)):
        raw = bytes(value)
        return repr(raw) if len(raw) <= 16 else f"{len(raw)} bytes beginning with {raw[:16]!r}"
    if value is None:
        return "nothing"
    if isinstance(value, (list, tuple)):
        if len(value) <= 8:
            return f"[{', '.join(map(shown, value))}]"
        return f"[{', '.join(map(shown, value[:8]))}, ... {len(value)} in all]"
    return str(value)
