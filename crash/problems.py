"""What was found wrong, and the table that ends every run."""

from __future__ import annotations

from typing import Protocol

import attrs

MOST_TOLD = 20


@attrs.define
class Problems:
    """Sentences, and how many there are of each kind."""

    counts: dict[str, int] = attrs.field(factory=dict)
    texts: list[str] = attrs.field(factory=list)

    def add(self, kind: str, text: str) -> None:
        """One more."""
        self.counts[kind] = self.counts.get(kind, 0) + 1
        self.texts.append(f"{kind}: {text}")


class Report(Protocol):
    """What a run comes to."""

    problems: Problems

    @property
    def rows(self) -> list[tuple[str, str]]:
        """Names and values for the table."""
        ...

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong, and something was tried."""
        ...


def to_table(report: Report) -> str:
    """The rows, the first problems, and the verdict."""
    rows, problems = report.rows, report.problems
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name.ljust(width)}   {value}" for name, value in rows]
    lines += [f"  problem: {text}" for text in problems.texts[:MOST_TOLD]]
    return "\n".join([*lines, "", "PASS" if report.passed else "FAIL"])
