"""How close each figure came: counts, errors in words, and the results table for the README."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from experiments.figure import VerdictRow
from experiments.report.load import Run


@dataclass(frozen=True)
class Score:
    """The rows of one figure, or of all. Medians and worst are over tested rows that have a relative error."""

    rows: tuple[VerdictRow, ...]

    @property
    def tested(self) -> tuple[VerdictRow, ...]:
        return tuple(row for row in self.rows if row.passed is not None)

    @property
    def misses(self) -> tuple[VerdictRow, ...]:
        return tuple(row for row in self.rows if row.passed is False)

    @property
    def within(self) -> int:
        return sum(row.passed is True for row in self.rows)

    @property
    def shown(self) -> int:
        return sum(row.passed is None for row in self.rows)

    @property
    def unexplained(self) -> int:
        return sum(not row.note.strip() for row in self.misses)

    @property
    def _errors(self) -> list[float]:
        return [abs(row.rel_err) for row in self.tested if row.rel_err is not None]

    @property
    def median_error(self) -> float | None:
        return statistics.median(self._errors) if self._errors else None

    @property
    def worst_error(self) -> float | None:
        return max(self._errors, default=None)

    def of(self, kind: str) -> Score:
        return Score(tuple(row for row in self.rows if row.kind == kind))


def scores(rows: Iterable[VerdictRow]) -> dict[str, Score]:
    """A score per figure, in the order of the rows."""
    by_figure: dict[str, list[VerdictRow]] = {}
    for row in rows:
        by_figure.setdefault(row.figure, []).append(row)
    return {figure: Score(tuple(rows)) for figure, rows in by_figure.items()}


def in_tolerances(row: VerdictRow) -> float | None:
    """The signed distance from the paper in units of the tolerance: within is -1 to 1. None where we have no value."""
    if row.paper is None or row.ours is None:
        return None
    if row.tolerance_kind == "factor":
        if row.ours <= 0 or row.paper <= 0:
            return None
        distance, unit = math.log(row.ours / row.paper), math.log(row.tolerance)
    else:
        distance = row.ours - row.paper
        unit = row.tolerance * abs(row.paper) if row.tolerance_kind == "relative" else row.tolerance
    if unit == 0:
        return 0.0 if distance == 0 else math.copysign(math.inf, distance)
    return distance / unit


def number(value: float | None) -> str:
    """A number for a reader: four significant digits, no exponent below a million."""
    if value is None:
        return "none"
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:.2e}"


def percent(value: float | None, signed: bool = False) -> str:
    if value is None:
        return "n/a"
    return f"{100 * value:+.1f}%" if signed else f"{100 * value:.1f}%"


def paper_text(row: VerdictRow) -> str:
    """The paper's value as the paper gives it: a range stays a range."""
    if row.paper is None:
        return "none"
    if row.tolerance_kind == "range":
        return f"{number(row.paper - row.tolerance)} to {number(row.paper + row.tolerance)}"
    return number(row.paper)


def tolerance_text(row: VerdictRow) -> str:
    return {
        "relative": f"±{100 * row.tolerance:.3g}%",
        "absolute": f"±{row.tolerance:.3g}",
        "factor": f"×÷ {row.tolerance:.3g}",
        "range": "within the range",
        "exact": "printed digits",
    }[row.tolerance_kind]


def status(row: VerdictRow) -> str:
    return {True: "within", False: "miss", None: "shown"}[row.passed]


def markdown_table(run: Run) -> str:
    """The README's results table: one line per figure, how many rows are within tolerance and how far off they are."""
    lines = [
        "| figure | what | within tolerance | median error | worst error | misses explained |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for figure, score in scores(run.rows).items():
        if not score.tested:
            continue
        misses = len(score.misses)
        explained = f"{misses - score.unexplained} of {misses}" if misses else "no misses"
        title = run.title(figure).replace("|", "\\|")
        lines.append(
            f"| {figure} | {title} | {score.within} of {len(score.tested)} | {percent(score.median_error)} "
            f"| {percent(score.worst_error)} | {explained} |"
        )
    total = Score(run.rows)
    lines.append(
        f"| **all** | | **{total.within} of {len(total.tested)}** | {percent(total.median_error)} "
        f"| {percent(total.worst_error)} | {len(total.misses) - total.unexplained} of {len(total.misses)} |"
    )
    return "\n".join(lines)
