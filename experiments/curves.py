"""One panel of latency curves (figures 12, 14, 16, 17): runs, knees, ratios and the drawing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

from experiments import knee, paper
from experiments.context import Context
from experiments.figure import Panel, Series, VerdictRow, judge
from experiments.plots.paper_series import paper_series
from experiments.setting import Setting

LATENCY_TOP_S = 1.0
"""The paper clips its curves at about one second per token."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """Our panel, its verdict rows, and the knee of each system at 0.5 s/token."""

    panel: Panel
    rows: tuple[VerdictRow, ...]
    knees: dict[str, float | None]


def answer_panel(
    context: Context,
    figure: str,
    panel: paper.LatencyPanel,
    systems: Sequence[str],
    settings_of: Callable[[str], list[Setting]],
    *,
    tolerance: float,
    ratio_tolerance: float,
    ratios: Sequence[str] = ("orca_oracle",),
    calibrated: Collection[str] = (),
    rates_tested: bool = True,
    note: str = "",
    true_crossing: bool = True,
) -> Answer:
    """Runs the panel's curves and judges the rates at 0.5 s/token and the ratios of paged to other systems.

    Args:
        settings_of: the runs of a system's curve, in order of their rates.
        tolerance, ratio_tolerance: relative, for real traces.
        ratios: systems that paged is compared with.
        calibrated: systems whose curve is a calibration point.
        rates_tested: whether the rates themselves are judged or only shown.
        note: goes on every row.
        true_crossing: whether to find the true crossing as well (shown, not tested).
    """
    level = knee.LEVEL_S
    curves = {system: settings_of(system) for system in systems}
    first = next(iter(curves.values()))[0]
    workload = context.workload(first.dataset)
    knees = {}
    extended = {}
    for system, settings in curves.items():
        curves[system] = knee.extend(context, settings, level)
        extended[system] = curves[system][len(settings) :]
        knees[system] = knee.read(context, curves[system], level)
    exact = dict.fromkeys(systems)
    if true_crossing and context.preset == "paper":
        exact = dict(zip(systems, knee.true_crossings(context, list(curves.values()), level), strict=True))
    rows, series = [], []
    place = f"panel {panel.key}, {panel.title}"
    for system, settings in curves.items():
        drawn = panel.curve(system)
        printed = drawn.crossings.get(level)
        found = exact[system]
        beyond = f"below the level at the last rate; read up to {settings[-1].rate:g}" if extended[system] else ""
        detail = "; ".join(filter(None, (note, beyond)))
        rows.append(
            judge(figure, system, f"{place}: req/s at {level:g} s/token", workload, printed, knees[system],
                  context.tolerance(tolerance), kind="calibrated" if system in calibrated else "predicted",
                  note=detail, tested=rates_tested)
        )  # fmt: skip
        if found is not None:
            setting = f"{place}: req/s at {level:g} s/token, true crossing"
            rows.append(judge(figure, system, setting, workload, printed, found, tolerance, tested=False))
        series += paper_series(drawn)
        latency = knee.latencies(context, settings)
        shown = [(s.rate, value) for s, value in zip(settings, latency, strict=True)]
        keep = [point for index, point in enumerate(shown) if index == 0 or shown[index - 1][1] <= LATENCY_TOP_S]
        x, y = zip(*keep, strict=True)
        series.append(Series(paper.label(system), "paxkv", x, y, system=system))
    for other in ratios:
        base, top = knees.get(other), knees.get("paged")
        ours = top / base if base and top else None
        printed = panel.curve("paged").crossings[level] / panel.curve(other).crossings[level]
        rows.append(
            judge(figure, f"paged/{other}", f"{place}: ratio at {level:g} s/token", workload, printed, ours,
                  context.tolerance(ratio_tolerance), note=note)
        )  # fmt: skip
    drawing = Panel(
        f"({panel.key}) {panel.title}", "request rate (req/s)", "normalised latency (s/token)", "line",
        tuple(series), ylim=(0.0, LATENCY_TOP_S),
    )  # fmt: skip
    return Answer(drawing, tuple(rows), knees)
