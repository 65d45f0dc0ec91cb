"""The paper's latency curves as series to draw."""

from __future__ import annotations

from experiments.figure import Series
from experiments.paper import Curve, label


def paper_series(curve: Curve) -> tuple[Series, ...]:
    """A curve with its drawn points and the line that leaves the plot after them.

    Where the paper's points are not known, the crossings stand in for them: the rate at each level, without a line.
    """
    name = label(curve.system, "paper")
    if not curve.points:
        crossings = sorted(curve.crossings.items())
        rates, levels = tuple(rate for _, rate in crossings), tuple(level for level, _ in crossings)
        return (Series(f"{name}, crossings", "paper", rates, levels, curve.system, style="points"),)
    drawn = Series(name, "paper", curve.rates, curve.latencies, curve.system)
    if not curve.leaving:
        return (drawn,)
    rates, latencies = zip(*curve.leaving, strict=True)
    return drawn, Series(f"{name}, leaving the plot", "paper", rates, latencies, curve.system, style="plain")
