r"""Figure 12: normalised latency against request rate, five systems, three models, two data sets.

Claim: paging sustains 1.7x to 2.7x the request rate of Orca (Oracle), 2.7x to 8x of Orca (Max) and up to 22x of
FasterTransformer at similar latency (paper section 6.2).

    python -m experiments.reproduce --preset=paper --only=fig12 [--traces=DIR]     (about 10 minutes on two cores)

Expected: the rate at 0.5 s/token within 10% in panels a, b, d, e and 15% in c, f; ratios of paged to Oracle and to
Max within 15%. The paged curves of a and d, and the low-load points of the others, are calibration points.
"""

from __future__ import annotations

from experiments import paper
from experiments.context import Context, Preset
from experiments.curves import answer_panel
from experiments.figure import Chapter, Figure
from experiments.setting import Setting

PANELS = {
    "a": ("opt-13b", "sharegpt"),
    "b": ("opt-66b", "sharegpt"),
    "c": ("opt-175b", "sharegpt"),
    "d": ("opt-13b", "alpaca"),
    "e": ("opt-66b", "alpaca"),
    "f": ("opt-175b", "alpaca"),
}
SYSTEMS = ("static", "orca_max", "orca_pow2", "orca_oracle", "paged")


def trace_seconds(model: str, system: str) -> float:
    """Length of the trace: an hour, a quarter of one for OPT-175B except FasterTransformer (sections 2 and 6.1)."""
    return 900.0 if model == "opt-175b" and system != "static" else 3600.0


def setting_at(panel: str, system: str, rate: float, seed: int = 0) -> Setting:
    """The run behind one point of a curve."""
    model, dataset = PANELS[panel]
    return Setting(
        system,  # type: ignore[arg-type]
        model,
        dataset,
        rate,
        trace_seconds(model, system),
        engine="static" if system == "static" else "serving",
        seed=seed,
    )


def panel_settings(panel: str, system: str, seed: int = 0) -> list[Setting]:
    """The runs of one curve, at the rates at which the paper's curve is read."""
    return [setting_at(panel, system, rate, seed) for rate in paper.reading_grid("fig12", panel, system)]


TOLERANCES = {"a": 0.10, "b": 0.10, "c": 0.15, "d": 0.10, "e": 0.10, "f": 0.15}
RATIO_TOLERANCE = 0.15
CALIBRATED = {("a", "paged"), ("d", "paged")}
SMOKE_PANELS = "a"


def panels_of(preset: Preset) -> str:
    """The panels that a preset runs."""
    return SMOKE_PANELS if preset == "smoke" else "abcdef"


def settings(preset: Preset) -> list[Setting]:
    return [s for panel in panels_of(preset) for system in SYSTEMS for s in panel_settings(panel, system)]


def chapter(context: Context) -> Chapter:
    panels = [paper.FIG12.panel(key) for key in panels_of(context.preset)]
    answers = [
        answer_panel(
            context,
            "fig12",
            panel,
            SYSTEMS,
            lambda system, key=panel.key: panel_settings(key, system),
            tolerance=TOLERANCES[panel.key],
            ratio_tolerance=RATIO_TOLERANCE,
            ratios=("orca_oracle", "orca_max"),
            calibrated={system for key, system in CALIBRATED if key == panel.key},
        )
        for panel in panels
    ]
    drawing = Figure(
        "fig12",
        "Normalised latency against request rate (figure 12)",
        "Paging sustains a higher request rate than contiguous reservation at the same latency.",
        "python -m experiments.reproduce --preset=paper --only=fig12",
        tuple(answer.panel for answer in answers),
        ("Dashed and hollow: the paper's points. Solid: ours, at the same rates.",),
    )
    return Chapter("fig12", drawing, tuple(row for answer in answers for row in answer.rows))
