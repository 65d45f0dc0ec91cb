"""Draws a `Figure` in the paper's form, its points and ours together: curves, bars, stacked bars, histograms."""

from __future__ import annotations

import math
from collections import defaultdict

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, NullLocator

from experiments.figure import Figure, Panel, Series
from experiments.plots.style import GUIDE, NEUTRAL, OUR_LINE, PAPER_LINE, Look, display, identity, looks

PANEL_WIDTH, PANEL_HEIGHT = 3.65, 2.75
"""Inches; three panels side by side fill the report's column."""


def draw(figure: Figure) -> Canvas:
    """The whole figure as a Matplotlib figure, with one legend for all panels."""
    count = len(figure.panels)
    columns = 1 if count == 1 else 2 if count in (2, 4) else 3
    rows = max(1, math.ceil(count / columns))
    width = {1: 6.0, 2: 9.0, 3: 3 * PANEL_WIDTH}[columns]
    canvas = Canvas(figsize=(width, rows * (3.4 if count == 1 else PANEL_HEIGHT) + 0.45), layout="constrained")
    look = looks(identity(series) for panel in figure.panels for series in panel.series if series.style != "guide")
    for index, panel in enumerate(figure.panels):
        _draw_panel(canvas.add_subplot(rows, columns, index + 1), panel, look)
    handles = _legend(figure, look)
    if handles:
        canvas.legend(handles=handles, loc="outside upper center", ncols=min(len(handles), 7 if columns == 3 else 4))
    return canvas


def _draw_panel(axes: Axes, panel: Panel, look: dict[str, Look]) -> None:
    axes.set(title=panel.title, xlabel=panel.xlabel, ylabel=panel.ylabel)
    {"line": _lines, "bar": _bars, "stacked": _piles, "hist": _histogram}[panel.kind](axes, panel, look)
    if panel.xscale == "log2":
        axes.set_xscale("log", base=2)
    else:
        axes.set_xscale(panel.xscale)
    axes.set_yscale(panel.yscale)
    for axis, scale in ((axes.xaxis, panel.xscale), (axes.yaxis, panel.yscale)):
        if scale != "linear":
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_locator(NullLocator())
    if panel.xscale == "log2":
        axes.set_xticks(sorted({x for series in panel.series for x in series.x}))
        axes.xaxis.set_minor_locator(NullLocator())
    if panel.xticklabels and panel.kind != "line":
        axes.set_xticks(range(len(panel.xticklabels)), panel.xticklabels)
    if panel.xlim is not None:
        axes.set_xlim(*panel.xlim)
    if panel.ylim is not None:
        axes.set_ylim(*panel.ylim)
    elif panel.yscale == "linear":
        low, high = axes.get_ylim()
        axes.set_ylim(min(0.0, low), high if low <= 0 else high * 1.04)  # from zero, with room for the top marker


def _lines(axes: Axes, panel: Panel, look: dict[str, Look]) -> None:
    # Ours first: the paper's hollow markers then lie on top and stay visible where both agree.
    for series in sorted(panel.series, key=lambda one: one.source == "paper"):
        y = [math.nan if value is None else value for value in series.y]
        if series.style == "guide":
            axes.plot(series.x, y, color=GUIDE, linewidth=0.9, linestyle=":", zorder=1)
            continue
        style = dict(PAPER_LINE if series.source == "paper" else OUR_LINE)
        one = look[identity(series)]
        if series.style == "points":
            style["linestyle"] = "none"
        step = {"drawstyle": "steps-post"} if series.style == "step" else {}
        axes.plot(
            series.x,
            y,
            color=one.color,
            marker="none" if series.style in ("plain", "step") else one.marker,
            markerfacecolor="none" if series.source == "paper" else one.color,
            markeredgecolor=one.color,
            zorder=4 if series.source == "paper" else 3,
            **style,
            **step,
        )


def _bar_fill(series: Series, look: dict[str, Look]) -> dict[str, object]:
    color = look[identity(series)].color
    if series.source == "paper":
        return {"facecolor": "white", "edgecolor": color, "linewidth": 1.2, "linestyle": "--", "hatch": "////"}
    return {"facecolor": color, "edgecolor": color, "linewidth": 1.2}


def _bars(axes: Axes, panel: Panel, look: dict[str, Look]) -> None:
    beside: dict[float, list[tuple[Series, float]]] = defaultdict(list)
    for series in panel.series:
        for x, y in zip(series.x, series.y, strict=True):
            if y is not None:
                beside[x].append((series, y))
    width = 0.82 / max((len(group) for group in beside.values()), default=1)
    for x, group in beside.items():
        for slot, (series, y) in enumerate(group):
            at = x + (slot - (len(group) - 1) / 2) * width
            axes.bar(at, y, width * 0.92, **_bar_fill(series, look))
            axes.annotate(f"{y:.3g}", (at, y), (0, 2), textcoords="offset points", ha="center", fontsize=6.5)
    axes.margins(y=0.12)


def _piles(axes: Axes, panel: Panel, look: dict[str, Look]) -> None:
    sources = [source for source in ("paper", "paxkv") if any(series.source == source for series in panel.series)]
    width = 0.8 / len(sources)
    base: dict[tuple[str, float], float] = defaultdict(float)
    for series in panel.series:
        offset = (sources.index(series.source) - (len(sources) - 1) / 2) * width
        for x, y in zip(series.x, series.y, strict=True):
            if not y:
                continue
            bottom = base[series.source, x]
            axes.bar(x + offset, y, width * 0.92, bottom=bottom, **_bar_fill(series, look))
            base[series.source, x] += y
            if y >= 4:  # a thinner segment has no room for its number
                box = {"boxstyle": "round,pad=0.12", "facecolor": "white", "edgecolor": "none"}
                ours = series.source == "paxkv"
                axes.text(
                    x + offset,
                    bottom + y / 2,
                    f"{y:.1f}",
                    ha="center",
                    va="center",
                    fontsize=6.5,
                    color="white" if ours else NEUTRAL,
                    bbox=None if ours else box,
                )


def _histogram(axes: Axes, panel: Panel, look: dict[str, Look]) -> None:
    for series in panel.series:
        color = look[identity(series)].color
        y = [0.0 if value is None else value for value in series.y]
        if series.source == "paper":
            axes.stairs(y, series.x, color=color, linestyle="--", linewidth=1.2, zorder=4)
        else:
            axes.stairs(y, series.x, color=color, fill=True, alpha=0.3, zorder=2)
            axes.stairs(y, series.x, color=color, linewidth=1.2, zorder=3)


def _legend(figure: Figure, look: dict[str, Look]) -> list[Line2D | Patch]:
    """One entry per system, then what dashed and solid mean."""
    names: dict[str, str] = {}
    sources: set[str] = set()
    lines = any(panel.kind == "line" for panel in figure.panels)
    for panel in figure.panels:
        for series in panel.series:
            if series.style == "guide":
                continue
            sources.add(series.source)
            names.setdefault(identity(series), display(series))
    handles: list[Line2D | Patch] = []
    for name, text in names.items():
        one = look[name]
        if not name:
            continue
        if lines:
            handles.append(
                Line2D([], [], color=one.color, marker=one.marker, linestyle="none", markersize=6, label=text)
            )
        else:
            handles.append(Patch(facecolor=one.color, edgecolor=one.color, label=text))
    for source, text in (("paper", "paper"), ("paxkv", "paxkv (ours)")):
        if source not in sources:
            continue
        paper = source == "paper"
        if lines:
            style = PAPER_LINE if paper else OUR_LINE
            fill = {"markerfacecolor": "none"} if paper else {}
            handles.append(Line2D([], [], color=NEUTRAL, marker="o", label=text, **style, **fill))
        else:
            fill = {"facecolor": "white", "linestyle": "--", "hatch": "////"} if paper else {"facecolor": NEUTRAL}
            handles.append(Patch(edgecolor=NEUTRAL, label=text, **fill))
    return handles
