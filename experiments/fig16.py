r"""Figure 16: translation with a shared prefix of one or five examples (LLaMA-13B, WMT16 En-De).

Claim: sharing the prefix's pages gives 1.67x (80 tokens) and 3.58x (341 tokens) the rate of Orca (Oracle)
(section 6.4).

    python -m experiments.reproduce --preset=paper --only=fig16 [--traces=DIR]     (3 minutes)

Expected: ratios 1.69 and 3.54 (as drawn, at 0.5 s/token) and the rates within 10%. Decoding is greedy, so it runs on
the bare step without the serving overhead of sampling. The prefix is found by content: only whole pages of it hit
(5 of 5 pages, 21 of 21.3).
"""

from __future__ import annotations

from experiments import paper
from experiments.context import Context, Preset
from experiments.curves import answer_panel
from experiments.figure import Chapter, Figure
from experiments.setting import Setting

SECONDS = 1200.0
SYSTEMS = ("orca_oracle", "paged")
TOLERANCE = 0.10


def panel_settings(panel: str, system: str) -> list[Setting]:
    """The runs of one curve."""
    return [
        Setting(system, "llama-13b", "wmt16", rate, SECONDS, engine="bare", prefix_tokens=paper.PREFIX_TOKENS[panel])  # type: ignore[arg-type]
        for rate in paper.reading_grid("fig16", panel, system)
    ]


def settings(preset: Preset) -> list[Setting]:
    if preset == "smoke":
        return []
    return [s for panel in "ab" for system in SYSTEMS for s in panel_settings(panel, system)]


def chapter(context: Context) -> Chapter | None:
    if context.preset == "smoke":
        return None
    answers = [
        answer_panel(
            context,
            "fig16",
            paper.FIG16.panel(key),
            SYSTEMS,
            lambda system, key=key: panel_settings(key, system),
            tolerance=TOLERANCE,
            ratio_tolerance=TOLERANCE,
        )
        for key in "ab"
    ]
    drawing = Figure(
        "fig16",
        "A shared prefix (figure 16)",
        "The longer the shared prefix, the larger the gain from storing it once.",
        "python -m experiments.reproduce --preset=paper --only=fig16",
        tuple(answer.panel for answer in answers),
    )
    return Chapter("fig16", drawing, tuple(row for answer in answers for row in answer.rows))
