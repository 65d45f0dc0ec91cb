"""Latency curves as the paper draws them, and how a request rate is read off one.

The paper calls a rate "sustained" without naming a threshold. The rates in this package are where the straight lines
between the drawn points cross 0.1, 0.2 or 0.5 s/token; `read_knee` reads our own curves by the same rule, on the same
grid of rates, because the grid itself moves the reading.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from experiments.paper.frozen import FrozenMap
from experiments.paper.systems import Source

PLOT_LIMIT = 1.0
"""The paper clips its latency axes at about 1 s/token."""


@dataclass(frozen=True)
class Curve:
    """One system's curve of normalised latency (s/token) against request rate (req/s).

    `points` are the drawn markers (empty where only the crossings are known). `clipped` says that the last one lies
    above `PLOT_LIMIT`; `off_plot` is the rate at which the line leaves the top of the plot toward a point that is not
    drawn. `crossings` maps a level in s/token to the rate read there. `artifact` is the list of rates in the authors'
    scripts, which gives the rate after the last drawn one.
    """

    system: str
    points: tuple[tuple[float, float], ...]
    crossings: Mapping[float, float]
    artifact: tuple[float, ...] = ()
    clipped: bool = False
    off_plot: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "crossings", FrozenMap.of(self.crossings))
        for name, rates in (("points", self.rates), ("artifact", self.artifact)):
            if any(b <= a for a, b in zip(rates, rates[1:], strict=False)):
                raise ValueError(f"{self.system}: {name} must have increasing rates, got {rates}")

    @property
    def rates(self) -> tuple[float, ...]:
        return tuple(rate for rate, _ in self.points)

    @property
    def latencies(self) -> tuple[float, ...]:
        return tuple(latency for _, latency in self.points)

    @property
    def leaving(self) -> tuple[tuple[float, float], ...]:
        """Where the line runs that leaves the plot toward a point that is not drawn; empty if no line does.

        From the last drawn point through the crossing read on that line, and on as straight to `PLOT_LIMIT`.
        """
        if self.off_plot is None or not self.points:
            return ()
        (rate, low), level = self.points[-1], max(self.crossings)
        slope = (self.crossings[level] - rate) / (level - low)
        return self.points[-1], (rate + slope * (PLOT_LIMIT - low), PLOT_LIMIT)

    def grid(self, beyond: int = 1) -> tuple[float, ...]:
        """The rates to simulate so that our curve is read as the paper's was: drawn ones and `beyond` further ones.

        The further ones are the next of the artifact's list; where it has none left, the last step is repeated. A curve
        without drawn points has the artifact's whole list in their place.
        """
        drawn = self.rates or self.artifact
        further = [rate for rate in self.artifact if rate > drawn[-1]]
        grid = [*drawn, *further[:beyond]]
        # Rounded, so that 2.0 + 0.1 is the rate 2.1 and not a float beside it.
        while len(grid) < len(drawn) + beyond:
            grid.append(round(2 * grid[-1] - grid[-2], 6))
        return tuple(grid)


@dataclass(frozen=True)
class Ratio:
    """How many times the rate of `over` the paper's own system sustains at `level` s/token, as tabulated."""

    level: float
    over: str
    value: float


@dataclass(frozen=True)
class LatencyPanel:
    """One panel: a model, a workload and one curve per system, in the order of `SYSTEMS`."""

    key: str
    title: str
    model: str
    dataset: str
    curves: tuple[Curve, ...]
    ratios: tuple[Ratio, ...] = ()

    @property
    def systems(self) -> tuple[str, ...]:
        return tuple(curve.system for curve in self.curves)

    def curve(self, system: str) -> Curve:
        for curve in self.curves:
            if curve.system == system:
                return curve
        raise KeyError(f"panel {self.key} has no system {system!r}; it has {', '.join(self.systems)}")

    def ratio(self, level: float, over: str) -> float:
        for ratio in self.ratios:
            if (ratio.level, ratio.over) == (level, over):
                return ratio.value
        raise KeyError(f"panel {self.key} has no ratio over {over!r} at {level} s/token")


@dataclass(frozen=True)
class LatencyFigure:
    """A figure of latency curves."""

    id: str
    title: str
    source: Source
    panels: tuple[LatencyPanel, ...]

    def panel(self, key: str) -> LatencyPanel:
        for panel in self.panels:
            if panel.key == key:
                return panel
        raise KeyError(f"{self.id} has no panel {key!r}; it has {', '.join(panel.key for panel in self.panels)}")


def read_knee(rates: Sequence[float], latencies: Sequence[float], level: float) -> float | None:
    """The rate at which the straight lines through the points first cross `level` from below.

    None when the curve starts at or above the level, or never reaches it: neither has a crossing to read.

    Args:
        rates: request rates in req/s, increasing.
        latencies: normalised latency at each rate, s/token.
        level: the threshold in s/token.

    Raises:
        ValueError: the lengths differ, the rates do not increase, or a value is not finite.
    """
    if len(rates) != len(latencies):
        raise ValueError(f"one latency per rate, got {len(rates)} rates and {len(latencies)} latencies")
    if not all(math.isfinite(value) for value in (*rates, *latencies)):
        raise ValueError(f"rates and latencies must be finite, got {tuple(rates)} and {tuple(latencies)}")
    points = list(zip(rates, latencies, strict=True))
    for (rate, low), (next_rate, high) in zip(points, points[1:], strict=False):
        if next_rate <= rate:
            raise ValueError(f"rates must increase, got {rate} then {next_rate}")
        if low < level <= high:
            return rate + (level - low) / (high - low) * (next_rate - rate)
    return None


def parse_points(text: str) -> tuple[tuple[tuple[float, float], ...], bool]:
    """Points from "rate:latency ..."; a trailing + marks a last point above `PLOT_LIMIT`. Returns points, clipped."""
    words = text.split()
    points = tuple((float(rate), float(latency.rstrip("+"))) for rate, latency in (word.split(":") for word in words))
    return points, bool(words) and words[-1].endswith("+")


def parse_rates(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split())


def curve(
    system: str, points: str, at: Mapping[float, float], artifact: str = "", off_plot: float | None = None
) -> Curve:
    """A `Curve` from the compact text in which the data files of this package are written."""
    parsed, clipped = parse_points(points)
    return Curve(system, parsed, at, parse_rates(artifact), clipped, off_plot)
