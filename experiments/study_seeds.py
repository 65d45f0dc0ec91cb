r"""Beyond the paper: how much do the knees of figure 12 depend on the seed?

The rate at 0.5 s/token of each system in panel a (and d with the paper preset), read at the rates of figure 12, for
three seeds. A seed draws other arrivals and another order of the same lengths.

    python -m experiments.reproduce --preset=paper --only=study_seeds [--traces=DIR]     (1 minute on two cores)

Expected: no number of the paper. A difference from the paper that is smaller than the spread says nothing. Seed 0 is
figure 12's own; of the other seeds only the two rates around the knee are run, found by walking from seed 0's. Where a
curve has not crossed at the last rate of figure 12, the walk goes on by the same step.
"""

from __future__ import annotations

import bisect
import dataclasses

from experiments import fig12, knee, paper
from experiments.context import Context, Preset
from experiments.figure import Chapter, Table
from experiments.setting import Setting

SEEDS = (0, 1, 2)


def cases(preset: Preset) -> list[tuple[str, str, tuple[int, ...]]]:
    """(panel, system, seeds); smoke compares two systems under two seeds."""
    if preset == "smoke":
        return [("a", system, SEEDS[:2]) for system in ("orca_oracle", "paged")]
    return [(panel, system, SEEDS) for panel in "ad" for system in fig12.SYSTEMS]


def settings(preset: Preset) -> list[Setting]:
    """Figure 12's own runs; where the walks of the other seeds lead is known only then."""
    return [s for panel, system, _ in cases(preset) for s in fig12.panel_settings(panel, system)]


def crossing(context: Context, panel: str, system: str, seed: int) -> float | None:
    """The rate at which a seed's curve crosses the level between two neighbouring rates; None if none within reach."""
    curve = knee.extend(context, fig12.panel_settings(panel, system))
    rates = [setting.rate for setting in curve]
    known = knee.read(context, curve)
    at = len(rates) - 2 if known is None else bisect.bisect_left(rates, known) - 1
    for _ in range(knee.EXTRA_RATES):
        rates.append(round(2 * rates[-1] - rates[-2], 6))
    while 0 <= at < len(rates) - 1:
        pair = [dataclasses.replace(curve[0], rate=rate, seed=seed) for rate in rates[at : at + 2]]
        low, high = knee.latencies(context, pair)
        if low < knee.LEVEL_S <= high:
            return knee.read(context, pair)
        at += -1 if low >= knee.LEVEL_S else 1
    return None


def spread(values: list[float | None]) -> tuple[float | None, float | None, float | None]:
    """(least, most, spread in percent of their mean), None where a knee does not exist."""
    found = [value for value in values if value is not None]
    if len(found) < len(values) or not found:
        return None, None, None
    least, most = min(found), max(found)
    return least, most, 100.0 * (most - least) / (sum(found) / len(found))


def knees(context: Context) -> dict[tuple[str, str], list[float | None]]:
    """The rate at 0.5 s/token for each seed, by (panel, system)."""
    return {
        (panel, system): [crossing(context, panel, system, seed) for seed in seeds]
        for panel, system, seeds in cases(context.preset)
    }


def _row(panel: str, name: str, values: list[float | None], printed: float) -> tuple:
    missing = [None] * (len(SEEDS) - len(values))
    return (panel, name, *values, *missing, *spread(values), printed)


def chapter(context: Context) -> Chapter:
    found = knees(context)
    rows = []
    for (panel, system), values in found.items():
        printed = paper.FIG12.panel(panel).curve(system).crossings[knee.LEVEL_S]
        rows.append(_row(panel, paper.label(system), values, printed))
    for panel in dict.fromkeys(panel for panel, _ in found):
        pairs = zip(found[panel, "paged"], found[panel, "orca_oracle"], strict=True)
        ratios = [None if top is None or base is None else top / base for top, base in pairs]
        printed = paper.FIG12.panel(panel).ratio(knee.LEVEL_S, "orca_oracle")
        rows.append(_row(panel, "ratio of paged to Orca (Oracle)", ratios, printed))
    table = Table(
        f"Rate at {knee.LEVEL_S:g} s/token by seed (req/s; the last rows are ratios)",
        ("panel of figure 12", "system", *(f"seed {seed}" for seed in SEEDS), "least", "most", "spread, %", "paper"),
        tuple(rows),
        "Spread: (most - least) / mean. Seed 0 is the one of figure 12. The paper's column is shown, not tested.",
    )
    return Chapter("study_seeds", tables=(table,), title="How much the knees depend on the seed")
