r"""Figure 17: a chatbot, each prompt the last 1024 tokens of its conversation (OPT-13B).

Claim: paging sustains twice the rate of the three Orcas, which agree with one another (section 6.5). The drawn curves
give 1.49x to 1.54x at 0.5 s/token.

    python -m experiments.reproduce --preset=paper --only=fig17 [--traces=DIR]     (1 minute)

Expected: the ratio at 0.5 s/token within 12%, with ONE chance of a new conversation for all systems. The artifact
takes 0.5 for vLLM and 0.1 for the Orcas, which makes the Orcas' prompts longer. Here it is 0.1 for all: it continues
conversations most often and so comes nearest to the paper's "most prompts have 1024 tokens". The artifact's
conversations are not public: public ShareGPT turns stand in, so rates are shown and only ratios are judged.
"""

from __future__ import annotations

from experiments import paper
from experiments.context import Context, Preset
from experiments.curves import answer_panel
from experiments.figure import Chapter, Figure
from experiments.setting import Setting

SECONDS = 3600.0
NEW_PROBABILITY = 0.1
SYSTEMS = ("orca_max", "orca_pow2", "orca_oracle", "paged")
RATIO_TOLERANCE = 0.12


def settings_of(system: str) -> list[Setting]:
    """The runs of one curve."""
    return [
        Setting(system, "opt-13b", "chat", rate, SECONDS, new_probability=NEW_PROBABILITY)  # type: ignore[arg-type]
        for rate in paper.reading_grid("fig17", "a", system)
    ]


def settings(preset: Preset) -> list[Setting]:
    return [] if preset == "smoke" else [s for system in SYSTEMS for s in settings_of(system)]


def chapter(context: Context) -> Chapter | None:
    if context.preset == "smoke":
        return None
    answer = answer_panel(
        context,
        "fig17",
        paper.FIG17.panel("a"),
        SYSTEMS,
        settings_of,
        tolerance=0.15,
        ratio_tolerance=RATIO_TOLERANCE,
        ratios=("orca_oracle", "orca_pow2", "orca_max"),
        rates_tested=False,
        note=f"chance of a new conversation {NEW_PROBABILITY:g} for all systems",
    )
    drawing = Figure(
        "fig17",
        "A chatbot (figure 17)",
        "Long prompts make all reservations equal; paging sustains about 1.5x their rate.",
        "python -m experiments.reproduce --preset=paper --only=fig17",
        (answer.panel,),
    )
    return Chapter("fig17", drawing, answer.rows)
