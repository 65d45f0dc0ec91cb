r"""Beyond the paper: how much do the knees of figure 12 depend on the seed?

The rate at 0.5 s/token of each system in panel a (and d with the paper preset), read as in figure 12, for three seeds.
A seed draws other arrivals and another order of the same lengths.

    python -m experiments.reproduce --preset=paper --only=study_seeds [--traces=DIR]     (1 minute on two cores)

Expected: no number of the paper. A difference from the paper that is smaller than the spread says nothing.
"""

from __future__ import annotations

from experiments import fig12, knee, paper
from experiments.context import Context, Preset
from experiments.figure import Chapter, Table
from experiments.setting import Setting

SEEDS = (0, 1, 2)
"""Seed 0 is figure 12's own."""


def cases(preset: Preset) -> list[tuple[str, str, tuple[int, ...]]]:
    """(panel, system, seeds); smoke compares two systems under two seeds."""
    if preset == "smoke":
        return [("a", system, SEEDS[:2]) for system in ("orca_oracle", "paged")]
    return [(panel, system, SEEDS) for panel in "ad" for system in fig12.SYSTEMS]


def settings(preset: Preset) -> list[Setting]:
    return [
        setting
        for panel, system, seeds in cases(preset)
        for seed in seeds
        for setting in fig12.panel_settings(panel, system, seed)
    ]


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
        (panel, system): [knee.read(context, fig12.panel_settings(panel, system, seed)) for seed in seeds]
        for panel, system, seeds in cases(context.preset)
    }


def chapter(context: Context) -> Chapter:
    found = knees(context)
    rows = []
    for (panel, system), values in found.items():
        printed = paper.FIG12.panel(panel).curve(system).crossings[knee.LEVEL_S]
        padded = values + [None] * (len(SEEDS) - len(values))
        rows.append((panel, paper.label(system), *padded, *spread(values), printed))
    for panel in dict.fromkeys(panel for panel, _ in found):
        ratios = [
            None if top is None or base is None else top / base
            for top, base in zip(found[panel, "paged"], found[panel, "orca_oracle"], strict=True)
        ]
        curves = paper.FIG12.panel(panel)
        printed = curves.curve("paged").crossings[knee.LEVEL_S] / curves.curve("orca_oracle").crossings[knee.LEVEL_S]
        padded = ratios + [None] * (len(SEEDS) - len(ratios))
        rows.append((panel, "paged / Orca (Oracle)", *padded, *spread(ratios), printed))
    table = Table(
        f"Rate at {knee.LEVEL_S:g} s/token by seed (req/s; the last rows are ratios)",
        ("panel of figure 12", "system", *(f"seed {seed}" for seed in SEEDS), "least", "most", "spread, %", "paper"),
        tuple(rows),
        "Spread: (most - least) / mean. Seed 0 is the one of figure 12. The paper's column is shown, not tested.",
    )
    return Chapter("study_seeds", tables=(table,), title="How much the knees depend on the seed")
