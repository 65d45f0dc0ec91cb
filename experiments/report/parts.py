"""Pieces of the page: tables, chips, the error strip and trees of values, each a function from values to HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.figure import Chapter, Table, VerdictRow
from experiments.paper import SYSTEMS, label
from experiments.plots.style import MISS, PASS
from experiments.report.score import Score, in_tolerances, number, paper_text, percent, status, tolerance_text

_CHIPS = {
    "confirmed": "within",
    "holds": "within",
    "within": "within",
    "pass": "within",
    "refuted": "miss",
    "miss": "miss",
    "conditional": "shown",
}


def esc(value: object) -> str:
    return html.escape(str(value))


def anchor(figure: str) -> str:
    """An id for a link: letters, digits and hyphens only."""
    return "".join(ch if ch.isalnum() else "-" for ch in figure)


def system_name(system: str) -> str:
    """`paged/orca_max` and the like read as names of systems; anything else stays what it is."""
    return " / ".join(label(part) if part in SYSTEMS else part for part in system.split("/"))


def chip(text: str, kind: str) -> str:
    return f'<span class="chip {kind}">{esc(text)}</span>'


def counts(score: Score) -> str:
    """Chips with the counts of a score; zero misses are said too."""
    parts = [chip(f"{score.within} of {len(score.tested)} within", "within" if not score.misses else "plain")]
    if score.misses:
        parts.append(chip(f"{len(score.misses)} miss" + ("es" if len(score.misses) > 1 else ""), "miss"))
    if score.shown:
        parts.append(chip(f"{score.shown} shown", "shown"))
    return " ".join(parts)


def strip(score: Score, width: int = 250, height: int = 26) -> str:
    """Every tested row as a mark: the middle is the paper's value, the band is the tolerance, the ends are twice it.

    A dot is within (a ring if calibrated), a cross is a miss; a miss without a value of ours stands at the right end.
    """

    def x(distance: float) -> float:
        return round(width / 2 + max(-2.0, min(2.0, distance)) * (width / 2 - 8) / 2, 1)

    middle = height / 2
    marks = []
    for row in score.tested:
        distance = in_tolerances(row)
        at = x(math.inf if distance is None else distance)
        if row.passed:
            fill = f'fill="{PASS}" fill-opacity=".55"' if row.kind == "predicted" else f'fill="none" stroke="{PASS}"'
            marks.append(f'<circle cx="{at}" cy="{middle}" r="3.4" {fill}/>')
        else:
            a, b, top, bottom = at - 4, at + 4, middle - 4, middle + 4
            path = f"M{a:.1f} {top}L{b:.1f} {bottom}M{a:.1f} {bottom}L{b:.1f} {top}"
            marks.append(f'<path d="{path}" stroke="{MISS}" stroke-width="2.2"/>')
    text = esc(f"{score.within} of {len(score.tested)} within tolerance")
    left, right = x(-1), x(1)
    return (
        f'<svg class="strip" viewBox="0 0 {width} {height}" role="img" aria-label="{text}"><title>{text}</title>'
        f'<rect x="{left}" y="3" width="{right - left}" height="{height - 6}" rx="3" class="band"/>'
        f'<line x1="{width / 2}" x2="{width / 2}" y1="1" y2="{height - 1}" class="axis"/>'
        f"{''.join(marks)}</svg>"
    )


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "") -> str:
    """A table of ready HTML cells."""
    head = "".join(f'<th scope="col">{esc(column)}</th>' for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    title = f"<caption>{esc(caption)}</caption>" if caption else ""
    return _scrolled(f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")


def _scrolled(inner: str) -> str:
    """A wide table scrolls by itself, reachable by keyboard too, and not the whole page with it."""
    return f'<div class="scroll" tabindex="0">{inner}</div>'


def value_table(one: Table) -> str:
    """A chapter's own table: numbers set right, verdict words as chips."""
    note = f'<p class="note">{esc(one.note)}</p>' if one.note else ""
    return table(one.columns, [[_cell(value) for value in row] for row in one.rows], caption=one.title) + note


def _cell(value: Any) -> str:
    if value is None:
        return '<span class="none">none</span>'
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (int, float)):
        return f'<span class="num">{number(value)}</span>'
    return chip(value, _CHIPS[value]) if value in _CHIPS else esc(value)


ROW_COLUMNS = ("", "figure", "system", "setting", "workload", "paper", "ours", "error", "tolerance", "kind", "note")


def verdict_rows(rows: Iterable[VerdictRow], *, filterable: bool = False, figure: bool = True) -> str:
    """Verdict rows as a table; the filterable one carries what the page's script needs."""
    columns = [column for column in ROW_COLUMNS if figure or column != "figure"]
    head = "".join(f'<th scope="col">{esc(column) or "verdict"}</th>' for column in columns)
    body = "".join(_verdict_row(row, figure) for row in rows)
    name = ' id="verdict-table"' if filterable else ""
    return _scrolled(f'<table class="verdict"{name}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>')


def _verdict_row(row: VerdictRow, figure: bool) -> str:
    cells = [chip(status(row), status(row))]
    if figure:
        cells.append(f'<a href="#{anchor(row.figure)}">{esc(row.figure)}</a>')
    cells += [esc(system_name(row.system)), f'<div class="setting">{esc(row.setting)}</div>', esc(row.workload)]
    ours = number(row.ours) if row.ours is not None else "not reached" if row.passed is False else "none"
    cells += [f'<span class="num">{text}</span>' for text in (paper_text(row), ours, percent(row.rel_err, signed=True))]
    cells += [esc(tolerance_text(row)) if row.passed is not None else "", esc(row.kind), esc(row.note)]
    data = f'data-figure="{esc(row.figure)}" data-status="{status(row)}" data-kind="{esc(row.kind)}"'
    return f"<tr {data}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def drawn_numbers(chapter: Chapter) -> str:
    """The points behind a figure, as text: the picture's equivalent for readers who cannot see it."""
    if chapter.figure is None:
        return ""
    rows = []
    for panel in chapter.figure.panels:
        for series in panel.series:
            if series.style == "guide":
                continue
            x = [
                panel.xticklabels[int(at)]
                if panel.kind in ("bar", "stacked") and 0 <= at < len(panel.xticklabels) and at == int(at)
                else number(at)
                for at in series.x
            ]
            pairs = zip(x, series.y, strict=False)
            rows.append([esc(panel.title), esc(series.label), esc(", ".join(f"{a}: {number(b)}" for a, b in pairs))])
    inner = table(("panel", "series", "points"), rows)
    return f"<details><summary>The numbers behind this figure</summary>{inner}</details>"


def tree(value: Any) -> str:
    """Any JSON value: objects as definition lists, lists as commas or bullets, numbers short."""
    if isinstance(value, Mapping):
        rows = "".join(f"<dt>{esc(key)}</dt><dd>{tree(inner)}</dd>" for key, inner in value.items())
        return f"<dl>{rows}</dl>"
    if isinstance(value, (list, tuple)):
        if any(isinstance(inner, (Mapping, list)) for inner in value):
            return "<ul>" + "".join(f"<li>{tree(inner)}</li>" for inner in value) + "</ul>"
        return ", ".join(tree(inner) for inner in value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    text = "none" if value is None else str(value)
    return f"<code>{esc(text)}</code>" if len(text) >= 16 and " " not in text else esc(text)


def records(points: Sequence[Mapping[str, Any]]) -> str:
    """A list of objects as a table with the union of their keys as columns."""
    columns = list(dict.fromkeys(key for point in points for key in point))
    rows = [[tree(point[key]) if key in point else "" for key in columns] for point in points]
    return table([column.replace("_", " ") for column in columns], rows)
