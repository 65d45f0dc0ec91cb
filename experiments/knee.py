"""The rate at which a latency curve crosses a level: as the paper's drawing is read, and truly.

The paper's curve is a line through its plotted points, so its crossing depends on the rates that were run. `read`
does the same with our runs at the same rates. `true_crossings` bisects between them; it is shown, never tested.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from experiments import paper
from experiments.context import Context
from experiments.setting import Setting

LEVEL_S = 0.5
"""Normalised latency, s/token, at which rates are compared."""

EXTRA_RATES = 8
"""How far a curve is followed beyond the paper's rates when it has not crossed the level there."""

ROUNDS = 10
"""Most runs spent on each true crossing; four or five are usual."""

NARROW = 0.004
"""A bracket this narrow, as a share of the rate, needs no further run."""


def latencies(context: Context, settings: Sequence[Setting]) -> list[float]:
    """Normalised latency of each run, s/token."""
    return [summary["normalised_latency_s"] for summary in context.summaries(settings)]


def read(context: Context, settings: Sequence[Setting], level: float = LEVEL_S) -> float | None:
    """The crossing of the line through the runs of one curve."""
    return paper.read_knee([setting.rate for setting in settings], latencies(context, settings), level)


def extend(context: Context, settings: Sequence[Setting], level: float = LEVEL_S) -> list[Setting]:
    """The curve's runs, and further ones by its last step while the last is below the level."""
    grid = list(settings)
    step = grid[-1].rate - grid[-2].rate
    for _ in range(EXTRA_RATES):
        if latencies(context, grid[-1:])[0] >= level:
            break
        grid.append(dataclasses.replace(grid[-1], rate=round(grid[-1].rate + step, 6)))
    return grid


def true_crossings(context: Context, curves: Sequence[Sequence[Setting]], level: float = LEVEL_S) -> list[float | None]:
    """The rate at which each curve's system truly crosses the level, to a few thousandths.

    Between the two grid rates around the level, each round runs the rate at which the logarithm of latency would
    cross, kept away from the ends; after two rounds that fell on one side, the middle: a curve that is flat and then
    steep would else be approached in small steps. All curves advance together, so that the runs fill all processes.
    """
    brackets: list[tuple[tuple[float, float], tuple[float, float]] | None] = []
    below: list[list[bool]] = [[] for _ in curves]
    for settings in curves:
        points = list(zip([s.rate for s in settings], latencies(context, settings), strict=True))
        around = [(a, b) for a, b in zip(points, points[1:], strict=False) if a[1] < level <= b[1]]
        brackets.append(around[0] if around else None)
    for _ in range(ROUNDS):
        trials = {}
        for index, bracket in enumerate(brackets):
            if bracket is not None and bracket[1][0] > (1 + NARROW) * bracket[0][0]:
                halve = below[index][-2:] in ([True, True], [False, False])
                trials[index] = dataclasses.replace(curves[index][0], rate=_between(*bracket, level, halve=halve))
        if not trials:
            break
        for (index, trial), latency in zip(trials.items(), latencies(context, list(trials.values())), strict=True):
            low, high = brackets[index]  # type: ignore[misc]
            point = (trial.rate, latency)
            below[index].append(latency < level)
            brackets[index] = (point, high) if latency < level else (low, point)
    return [None if bracket is None else _between(*bracket, level) for bracket in brackets]


def _between(low: tuple[float, float], high: tuple[float, float], level: float, *, halve: bool = False) -> float:
    share = 0.5 if halve else math.log(level / low[1]) / math.log(high[1] / low[1])
    share = min(max(share, 0.15), 0.85)
    return float(f"{low[0] + share * (high[0] - low[0]):.4g}")
