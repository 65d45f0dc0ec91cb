"""What an experiment hands to the report: figures, tables and verdict rows, as frozen values that survive JSON.

An experiment returns one `Chapter`. The report and the plots read chapters back from the run directory and never run
anything, so everything a reader sees is in these values.

    experiment -> Chapter -> chapters/<id>.json -> report.html
                     |-> rows -> verdict.json
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

PaperOrOurs = Literal["paper", "paxkv"]
PanelKind = Literal["line", "bar", "stacked", "hist"]
SeriesStyle = Literal["line", "points", "plain", "step", "guide"]
ToleranceKind = Literal["relative", "absolute", "factor", "range", "exact"]
RowKind = Literal["calibrated", "predicted"]

Number = float | None
"""A value, or None where there is none: a gap in a series, a rate that is never reached."""


def _check_choice(what: str, value: str, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{what} must be one of {', '.join(get_args(choices))}, got {value!r}")


@dataclass(frozen=True)
class Series:
    """One curve, one group of bars, or one histogram.

    `system` picks the colour and marker, the same in every figure (a name of `experiments.paper.SYSTEMS`, or any other
    word, such as a segment of a stacked bar). In a "hist" panel `x` holds the bin edges, one more than `y`.
    Styles: "line" has markers, "points" has markers only, "plain" and "step" have none, "guide" is a thin grey line
    such as a threshold.
    """

    label: str
    source: PaperOrOurs
    x: tuple[float, ...]
    y: tuple[Number, ...]
    system: str = ""
    style: SeriesStyle = "line"

    def __post_init__(self) -> None:
        _check_choice("source", self.source, PaperOrOurs)
        _check_choice("style", self.style, SeriesStyle)
        object.__setattr__(self, "x", tuple(float(value) for value in self.x))
        object.__setattr__(self, "y", tuple(_number(value) for value in self.y))
        if len(self.x) not in (len(self.y), len(self.y) + 1):
            raise ValueError(f"series {self.label!r}: one y per x (or per bin), got {len(self.x)} and {len(self.y)}")


@dataclass(frozen=True)
class Panel:
    """A pair of axes. In a "bar" or "stacked" panel `x` is a position, named by `xticklabels`.

    Bars that share a position stand side by side. In a "stacked" panel the series of one source pile up at each
    position in the order given, the paper's pile left of ours.
    """

    title: str
    xlabel: str
    ylabel: str
    kind: PanelKind
    series: tuple[Series, ...]
    xscale: Literal["linear", "log", "log2"] = "linear"
    yscale: Literal["linear", "log"] = "linear"
    ylim: tuple[float, float] | None = None
    xlim: tuple[float, float] | None = None
    xticklabels: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_choice("kind", self.kind, PanelKind)
        object.__setattr__(self, "series", tuple(self.series))
        object.__setattr__(self, "xticklabels", tuple(self.xticklabels))
        for name in ("xlim", "ylim"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, tuple(getattr(self, name)))
        for series in self.series:
            extra = len(series.x) - len(series.y)
            if extra != (1 if self.kind == "hist" else 0):
                raise ValueError(
                    f"panel {self.title!r} of kind {self.kind}: series {series.label!r} has {extra} more x"
                )


@dataclass(frozen=True)
class Figure:
    """A figure of the paper, drawn with the paper's points and ours together.

    `id` is "fig02"; `claim` says in a sentence what the paper shows there; `command` makes it again.
    """

    id: str
    title: str
    claim: str
    command: str
    panels: tuple[Panel, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class VerdictRow:
    """One number of the paper beside ours.

    `rel_err` is signed, (ours - paper) / |paper|; for a range it is the distance outside, relative to the nearer end.
    `tolerance` is read by `tolerance_kind`: a fraction (relative), the unit of the value (absolute), a factor either
    way (factor), half the width of a range whose middle is `paper` (range), half a printed digit (exact).
    `passed` is None for a row that is shown and not tested. In JSON its key is "pass".
    `kind` says whether the point was used to calibrate the clock or is a prediction. `note` explains a miss.
    """

    figure: str
    system: str
    setting: str
    workload: str
    paper: Number
    ours: Number
    rel_err: Number
    tolerance: float
    tolerance_kind: ToleranceKind
    passed: bool | None
    kind: RowKind
    note: str = ""

    def __post_init__(self) -> None:
        _check_choice("tolerance_kind", self.tolerance_kind, ToleranceKind)
        _check_choice("kind", self.kind, RowKind)
        for name in ("paper", "ours", "rel_err"):
            object.__setattr__(self, name, _number(getattr(self, name)))

    def to_dict(self) -> dict[str, Any]:
        return {("pass" if key == "passed" else key): value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> VerdictRow:
        return cls(**_only(cls, {("passed" if key == "pass" else key): value for key, value in values.items()}))


def judge(
    figure: str,
    system: str,
    setting: str,
    workload: str,
    paper: float | None,
    ours: float | None,
    tolerance: float,
    tolerance_kind: ToleranceKind = "relative",
    *,
    kind: RowKind = "predicted",
    note: str = "",
    tested: bool = True,
) -> VerdictRow:
    """A row whose `rel_err` and `passed` follow from the two numbers; see `VerdictRow` for the tolerances.

    A number of ours that does not exist (a rate that is never reached) fails. A row without a number of the paper, or
    with `tested` false, is shown only.
    """
    if not (math.isfinite(tolerance) and tolerance >= 0):
        raise ValueError(f"tolerance must be finite and not negative, got {tolerance}")
    if tolerance_kind == "factor" and tolerance < 1:
        raise ValueError(f"a factor tolerance is at least 1, got {tolerance}")
    paper, ours = _number(paper), _number(ours)
    error = _relative_error(paper, ours, tolerance, tolerance_kind)
    passed = _within(paper, ours, tolerance, tolerance_kind) if tested and paper is not None else None
    return VerdictRow(
        figure, system, setting, workload, paper, ours, error, tolerance, tolerance_kind, passed, kind, note
    )


def judge_range(
    figure: str,
    system: str,
    setting: str,
    workload: str,
    low: float,
    high: float,
    ours: float | None,
    *,
    kind: RowKind = "predicted",
    note: str = "",
) -> VerdictRow:
    """A row for a range that the paper gives: the row's `paper` is its middle, `tolerance` half its width."""
    if not low <= high:
        raise ValueError(f"a range needs low <= high, got {low} and {high}")
    middle, half = (low + high) / 2, (high - low) / 2
    return judge(figure, system, setting, workload, middle, ours, half, "range", kind=kind, note=note)


def judge_printed(
    figure: str,
    system: str,
    setting: str,
    workload: str,
    paper: float,
    ours: float | None,
    digits: int = 2,
    *,
    kind: RowKind = "predicted",
    note: str = "",
) -> VerdictRow:
    """A row that must agree to the printed digits after the decimal point ("7.00 exact")."""
    return judge(figure, system, setting, workload, paper, ours, 0.5 * 10**-digits, "exact", kind=kind, note=note)


def _relative_error(paper: Number, ours: Number, tolerance: float, kind: ToleranceKind) -> Number:
    if paper is None or ours is None:
        return None
    if kind == "range":
        low, high = paper - tolerance, paper + tolerance
        nearest = min(max(ours, low), high)
        return (ours - nearest) / abs(nearest) if nearest else ours - nearest
    if paper == 0:
        return 0.0 if ours == 0 else None  # no relative error from zero; the absolute tolerance still judges the row
    return (ours - paper) / abs(paper)


def _within(paper: float, ours: Number, tolerance: float, kind: ToleranceKind) -> bool:
    if ours is None:
        return False
    # The slack keeps 0.5 - 0.45 inside a tolerance of 0.05 in binary floating point.
    slack = 1e-9 * max(1.0, abs(paper))
    if kind == "relative":
        return abs(ours - paper) <= tolerance * abs(paper) + slack
    if kind == "factor":
        return ours > 0 and paper > 0 and max(ours / paper, paper / ours) <= tolerance + slack
    return abs(ours - paper) <= tolerance + slack  # absolute, exact, and a range about its middle


@dataclass(frozen=True)
class Table:
    """A table of the report: text, numbers and truth values, None for an empty cell."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        object.__setattr__(self, "rows", tuple(tuple(_cell(cell) for cell in row) for row in self.rows))
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(f"table {self.title!r}: {len(self.columns)} columns, but a row has {len(row)}: {row}")


@dataclass(frozen=True)
class Chapter:
    """What one experiment returns. `title` names a chapter that has no figure of the paper."""

    id: str
    figure: Figure | None = None
    rows: tuple[VerdictRow, ...] = ()
    tables: tuple[Table, ...] = ()
    title: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(self.rows))
        object.__setattr__(self, "tables", tuple(self.tables))

    def to_dict(self) -> dict[str, Any]:
        figure = None if self.figure is None else asdict(self.figure)
        rows, tables = [row.to_dict() for row in self.rows], [asdict(table) for table in self.tables]
        return {"id": self.id, "title": self.title, "figure": figure, "rows": rows, "tables": tables}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Chapter:
        figure = values.get("figure")
        return cls(
            id=values["id"],
            figure=None if figure is None else figure_from_dict(figure),
            rows=tuple(VerdictRow.from_dict(row) for row in values.get("rows", ())),
            tables=tuple(Table(**_only(Table, table)) for table in values.get("tables", ())),
            title=values.get("title", ""),
        )

    def save(self, path: Path | str) -> None:
        """Writes the chapter as JSON; a reader sees the old file or the new one, never half of one."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(path.name + ".part")
        part.write_text(json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(part, path)

    @classmethod
    def load(cls, path: Path | str) -> Chapter:
        return cls.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))


def figure_from_dict(values: dict[str, Any]) -> Figure:
    """A `Figure` from what `dataclasses.asdict` and JSON made of one."""
    panels = []
    for panel in values["panels"]:
        series = tuple(Series(**_only(Series, one)) for one in panel["series"])
        panels.append(Panel(**{**_only(Panel, panel), "series": series}))
    return Figure(**{**_only(Figure, values), "panels": tuple(panels), "notes": tuple(values.get("notes", ()))})


def _only(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """The given values, refused when a key is no field: a misspelt key must not vanish in silence."""
    unknown = sorted(set(values) - {field.name for field in fields(cls)})
    if unknown:
        raise ValueError(f"{cls.__name__} has no field {', '.join(unknown)}")
    return values


def _number(value: Any) -> Number:
    """A plain float, None for None and for what JSON cannot carry (NaN, infinity)."""
    if value is None:
        return None
    value = float(value)
    return value if math.isfinite(value) else None


def _cell(value: Any) -> Any:
    """A table cell as JSON has it: NumPy scalars become Python numbers, anything else but text becomes text."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float):
        return _number(value)
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)
