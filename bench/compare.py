"""One contender against another, round by round: the table of ratios that several sections end with."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Protocol


class Measured(Protocol):
    """One run of one contender."""

    contender: str
    round: int
    faults: list[str]

    @property
    def rate(self) -> float: ...


def ratios(runs: Sequence[Measured], one: str, other: str) -> list[float]:
    """How many times as fast `one` was as `other`, in the rounds in which both count."""
    rates = {(each.contender, each.round): each.rate for each in runs if not each.faults}
    rounds = sorted({each.round for each in runs})
    pairs = [(rates.get((one, number)), rates.get((other, number))) for number in rounds]
    return [first / second for first, second in pairs if first and second]


def table(runs: Sequence[Measured], goals: Sequence[tuple[str, str, float | None]], digits: int) -> list[str]:
    """The lines of the table; none when there is nothing to compare."""
    rows = []
    for one, other, goal in goals:
        found = ratios(runs, one, other)
        if not found:
            continue
        middle = median(found)
        verdict = "–" if goal is None else f"≥ {goal:g} {'met' if middle >= goal else 'missed'}"
        span = f"{min(found):.{digits}f}–{max(found):.{digits}f}"
        rows.append(f"| {one} : {other} | {middle:.{digits}f} | {span} | {verdict} |")
    if not rows:
        return []
    return [
        "",
        "| ratio, median of the rounds | measured | lowest–highest | goal |",
        "|---|---|---|---|",
        *rows,
    ]
