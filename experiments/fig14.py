r"""Figure 14: parallel sampling and beam search with 2, 4 and 6 sequences (OPT-13B, Alpaca).

Claim: the gain over Orca (Oracle) grows from 1.3x with basic sampling to 2.3x with beams of width 6 (section 6.3).

    python -m experiments.reproduce --preset=paper --only=fig14 [--traces=DIR]     (10 minutes on two cores)

Expected: the rate at 0.5 s/token within 15%, the ratio to Oracle within 12%. Beams choose their parents uniformly
(no score is better than another): a neutral stand-in for a model, not fitted.
"""

from __future__ import annotations

from experiments import paper
from experiments.context import Context, Preset
from experiments.curves import answer_panel
from experiments.figure import Chapter, Figure
from experiments.setting import Setting

SECONDS = 3600.0
SYSTEMS = ("orca_max", "orca_pow2", "orca_oracle", "paged")
WIDTHS = {"a": (2, False), "b": (4, False), "c": (6, False), "d": (2, True), "e": (4, True), "f": (6, True)}
TOLERANCE, RATIO_TOLERANCE = 0.15, 0.12


def panel_settings(panel: str, system: str) -> list[Setting]:
    """The runs of one curve, at the artifact's rates and one more."""
    width, beam = WIDTHS[panel]
    return [
        Setting(system, "opt-13b", "alpaca", rate, SECONDS, num_seqs=width, beam=beam)  # type: ignore[arg-type]
        for rate in paper.reading_grid("fig14", panel, system)
    ]


def settings(preset: Preset) -> list[Setting]:
    if preset == "smoke":
        return []
    return [s for panel in WIDTHS for system in SYSTEMS for s in panel_settings(panel, system)]


def chapter(context: Context) -> Chapter | None:
    if context.preset == "smoke":
        return None
    answers = [
        answer_panel(
            context,
            "fig14",
            paper.FIG14.panel(key),
            SYSTEMS,
            lambda system, key=key: panel_settings(key, system),
            tolerance=TOLERANCE,
            ratio_tolerance=RATIO_TOLERANCE,
            note="beams draw their parents uniformly" if beam else "",
            true_crossing=False,
        )
        for key, (_, beam) in WIDTHS.items()
    ]
    drawing = Figure(
        "fig14",
        "Parallel sampling and beam search (figure 14)",
        "Sharing pages between the sequences of a request widens the gain.",
        "python -m experiments.reproduce --preset=paper --only=fig14",
        tuple(answer.panel for answer in answers),
        (
            "The paper's curves are known by their rates at 0.1 and 0.5 s/token.",
            "Two choices of the model's form, without a constant, were made after seeing this figure: the serving "
            "overhead goes with requests, and swapped bytes cross the link while the step computes.",
        ),
    )
    return Chapter("fig14", drawing, tuple(row for answer in answers for row in answer.rows))
