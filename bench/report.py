"""Rows of results: computed, printed, written."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import attrs


@attrs.frozen(kw_only=True)
class Row:
    """One line of the table. `ours` and `reference` are medians of `samples` measurements, taken in turns.

    `ratio` says how many times as fast as the reference we are, whatever the unit: above 1 we are faster.
    Rows without a reference have None for both.
    """

    name: str
    ours: float
    reference: float | None
    ratio: float | None
    unit: str
    samples: int

    @classmethod
    def of_times(cls, name: str, *, ours: Sequence[float], reference: Sequence[float] | None = None) -> Row:
        """From seconds per run; reported in milliseconds."""
        mine = statistics.median(ours)
        theirs = statistics.median(reference) if reference is not None else None
        return cls(
            name=name,
            ours=_digits(mine * 1e3),
            reference=None if theirs is None else _digits(theirs * 1e3),
            ratio=None if theirs is None else _digits(theirs / mine),
            unit="ms",
            samples=len(ours),
        )

    @classmethod
    def of_throughput(
        cls, name: str, *, moved_bytes: int, ours: Sequence[float], reference: Sequence[float]
    ) -> Row:
        """From seconds for `moved_bytes`; reported in GiB/s."""
        mine, theirs = (moved_bytes / 2**30 / statistics.median(seconds) for seconds in (ours, reference))
        return cls(
            name=name,
            ours=_digits(mine),
            reference=_digits(theirs),
            ratio=_digits(mine / theirs),
            unit="GiB/s",
            samples=len(ours),
        )

    def renamed(self, name: str) -> Row:
        """The same numbers under another name."""
        return attrs.evolve(self, name=name)

    def to_json(self) -> dict[str, object]:
        """The keys of latest.json."""
        return attrs.asdict(self)


def worst(name: str, rows: Sequence[Row]) -> Row:
    """The row with the lowest ratio, under a common name: a claim about all is a claim about the worst."""
    return min(rows, key=lambda row: row.ratio if row.ratio is not None else 0.0).renamed(name)


def worst_of_each(rows: Sequence[Row]) -> list[Row]:
    """`worst` for each name that rows share up to their first slash."""
    names = dict.fromkeys(row.name.partition("/")[0] for row in rows)
    return [worst(name, [row for row in rows if row.name.startswith(name + "/")]) for name in names]


def to_table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    head = ("name", "ours", "reference", "unit", "ratio", "samples")
    lines = [head] + [
        (row.name, _text(row.ours), _text(row.reference), row.unit, _text(row.ratio), str(row.samples))
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at in (0, 3) else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:g}"
