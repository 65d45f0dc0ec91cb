"""One picture for the README: how close every tested number came, drawn from a verdict.json alone.

    python -m experiments.plots.overview --verdict=experiments/reference/verdict.json --out=docs/overview.svg

Left: the request rates that each system sustains, ours against the paper's, on the line where both agree. Right: ours
over the paper's for every tested row, figure by figure.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from absl import app, flags
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from experiments.figure import VerdictRow
from experiments.paper import SYSTEMS, label
from experiments.plots.style import COLORS, GUIDE, MARKERS, MISS, NEUTRAL, PASS
from experiments.plots.svg import RC, inline_svg
from experiments.report.load import ReportError, load_verdict
from experiments.report.score import Score, percent, scores

RATE_FIGURES = ("fig12", "fig14", "fig16", "fig17")
"""The figures whose rows for a single system are request rates."""

RATIO_LIMITS = (0.5, 2.0)
"""Rows further off than a factor of two are drawn at the edge."""


def write_overview(verdict: Path | str, out: Path | str) -> Path:
    """Writes the picture as SVG or PNG, by the name's ending; the same verdict gives the same bytes.

    Raises:
        ReportError: the verdict is missing or corrupt, or has no row that was tested.
    """
    out = Path(out)
    _, rows = load_verdict(Path(verdict))
    if not Score(rows).tested:
        raise ReportError(f"{verdict}: no tested row to draw")
    with rc_context(RC):
        canvas = draw_overview(rows)
        if out.suffix == ".svg":
            out.write_text(inline_svg(canvas, "overview", "paxkv against the paper", caption(rows)), encoding="utf-8")
        elif out.suffix == ".png":
            canvas.savefig(out, dpi=160, metadata={"Software": None})
        else:
            raise ReportError(f"{out}: the picture is written as .svg or .png")
    return out


def caption(rows: tuple[VerdictRow, ...]) -> str:
    """The picture's sentence, for its title and for a README's alt text."""
    total = Score(rows)
    return (
        f"{total.within} of {len(total.tested)} numbers of the paper within tolerance, "
        f"median error {percent(total.median_error)}, {len(total.misses)} misses."
    )


def draw_overview(rows: tuple[VerdictRow, ...]) -> Canvas:
    canvas = Canvas(figsize=(10.2, 4.3), layout="constrained")
    left, right = canvas.subplots(1, 2, width_ratios=(1, 1.25))
    canvas.suptitle(caption(rows), fontsize=10.5)
    _rates(left, rows)
    _ratios(right, rows)
    return canvas


def _rates(axes: Axes, rows: tuple[VerdictRow, ...]) -> None:
    """Sustained request rates on the identity line, logarithmic, one look per system."""
    axes.set(title="Sustained request rate, req/s", xlabel="paper", ylabel="paxkv", xscale="log", yscale="log")
    chosen = [row for row in rows if row.figure in RATE_FIGURES and row.system in SYSTEMS and row.passed is not None]
    chosen = [row for row in chosen if row.paper and row.ours]
    if not chosen:
        axes.text(0.5, 0.5, "no rates in this run", ha="center", transform=axes.transAxes, color=NEUTRAL)
        return
    values = [value for row in chosen for value in (row.paper, row.ours)]
    low, high = min(values) / 1.4, max(values) * 1.4
    axes.plot([low, high], [low, high], color=GUIDE, linewidth=1, zorder=1)
    axes.fill_between([low, high], [low * 0.9, high * 0.9], [low * 1.1, high * 1.1], color="#e4f3ea", zorder=0)
    for system in SYSTEMS:
        mine = [row for row in chosen if row.system == system]
        if mine:
            x, y = [row.paper for row in mine], [row.ours for row in mine]
            style = {"color": COLORS[system], "marker": MARKERS[system], "alpha": 0.75, "markeredgewidth": 0}
            axes.plot(x, y, linestyle="none", markersize=6, label=label(system), **style)
    axes.set(xlim=(low, high), ylim=(low, high))
    axes.set_aspect("equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    axes.legend(loc="lower right", title="band: ±10%")


def _ratios(axes: Axes, rows: tuple[VerdictRow, ...]) -> None:
    """Ours over the paper's, a line of marks per figure."""
    tested = {figure: score for figure, score in scores(rows).items() if score.tested}
    low, high = RATIO_LIMITS
    axes.set(title="Every tested number, ours over the paper's", xscale="log", xlabel="ours / paper", xlim=(low, high))
    axes.axvline(1, color=GUIDE, linewidth=1, zorder=1)
    axes.axvspan(0.9, 1.1, color="#e4f3ea", zorder=0)
    for line, score in enumerate(tested.values()):
        # A spread that is the same in every run keeps equal marks apart.
        spread = random.Random(line)
        for row in score.tested:
            y = line + spread.uniform(-0.24, 0.24)
            ratio = row.ours / row.paper if row.ours is not None and row.paper else None
            if ratio is None:
                # Nothing to divide by: a row that agrees with a zero stands at one, a value never reached at the edge.
                ratio = 1.0 if row.passed else high
            at = min(max(ratio, low), high) if ratio > 0 else low
            marker, color, size = ("o", PASS, 4) if row.passed else ("x", MISS, 5.5)
            axes.plot(at, y, marker, color=color, markersize=size, alpha=0.7, clip_on=False)
    names = [f"{figure}  {score.within}/{len(score.tested)}" for figure, score in tested.items()]
    axes.set_yticks(range(len(tested)), names)
    axes.set_ylim(len(tested) - 0.4, -0.6)
    axes.xaxis.set_major_locator(FixedLocator([0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    marks = [("within its tolerance", "o", PASS), ("miss", "x", MISS)]
    handles = [Line2D([], [], linestyle="none", marker=m, color=c, markersize=5, label=t) for t, m, c in marks]
    axes.legend(handles=handles, loc="upper left", frameon=True, framealpha=0.9, edgecolor="none")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"no arguments expected, got {' '.join(argv[1:])}")
    try:
        print(write_overview(Path(flags.FLAGS.verdict), Path(flags.FLAGS.out)))
    except ReportError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    flags.DEFINE_string("verdict", None, "The verdict.json to read.", required=True)
    flags.DEFINE_string("out", "overview.svg", "The picture to write, .svg or .png.")
    app.run(main)
