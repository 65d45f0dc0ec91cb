r"""The paper's text claims beside its own curves and beside ours.

Some sentences of the paper do not match its drawings; a reproduction can only follow the curves. The third column reads
our curves, at the same rates and levels, and says by a stated rule whether the sentence holds for them.

    python -m experiments.reproduce --preset=paper --only=text_claims [--traces=DIR]     (runs figures 12, 14, 16, 17)

Expected: our readings agree with the paper's curves, so that a sentence which its own drawing contradicts fails here as
well. With the smoke preset only figure 12a and the arithmetic of figure 19a are there.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable

from experiments import fig12, fig14, fig16, fig17, fig19, knee, paper
from experiments.context import Context, Preset
from experiments.figure import Chapter, Table
from experiments.finding import Verdict, graded
from experiments.setting import Setting

SLACK = 0.05
"""Readings may lie this far outside a claimed range."""
PAIR_SLACK = 0.10
"""A claimed pair of ratios holds when both of ours lie this near."""
LEVELS = (0.1, 0.2, 0.5)
SHAREGPT, ALPACA = "abc", "def"
LATER = "paper preset"
NO_CROSSING = "a curve does not cross the level"


@dataclasses.dataclass(frozen=True)
class Answer:
    """Our reading of a claim, and what follows from it: `holds` where `graded` says confirmed, or why there is none."""

    ours: str
    verdict: str


def settings(preset: Preset) -> list[Setting]:
    return [s for module in (fig12, fig14, fig16, fig17) for s in module.settings(preset)]


def _named(verdict: Verdict) -> str:
    return "holds" if verdict == "confirmed" else verdict


def ratio_of(context: Context, top: list[Setting], base: list[Setting], level: float) -> float | None:
    """How many times the rate of `base` the curve `top` sustains at `level`; None where either is not crossed."""
    rates = [knee.read(context, knee.extend(context, curve), level) for curve in (top, base)]
    return None if rates[0] is None or rates[1] is None else rates[0] / rates[1]


def fig12_ratios(context: Context, panels: Iterable[str], over: str, level: float) -> dict[str, float]:
    """Paged over another system in the panels of figure 12 that the preset runs and both curves cross."""
    found = {}
    for panel in panels:
        if panel in fig12.panels_of(context.preset):
            ratio = ratio_of(
                context, fig12.panel_settings(panel, "paged"), fig12.panel_settings(panel, over), level
            )  # fmt: skip
            if ratio is not None:
                found[panel] = ratio
    return found


def _listed(ratios: dict[str, float]) -> str:
    models = {panel: fig12.PANELS[panel][0].removeprefix("opt-").upper() for panel in ratios}
    return ", ".join(f"{ratio:.2f} ({models[panel]})" for panel, ratio in ratios.items())


def judge_range(context: Context, over: str, low: float, high: float) -> Answer:
    """A claimed range over ShareGPT's panels: holds when all readings at 0.5 s/token lie in it."""
    main = fig12_ratios(context, SHAREGPT, over, knee.LEVEL_S)
    other = {level: fig12_ratios(context, SHAREGPT, over, level) for level in LEVELS if level != knee.LEVEL_S}

    def inside(ratio: float) -> bool:
        return low * (1 - SLACK) <= ratio <= high * (1 + SLACK)

    verdict = graded(map(inside, main.values()))
    if verdict == "refuted" and any(inside(r) for ratios in other.values() for r in ratios.values()):
        verdict = "conditional"
    parts = [f"{_listed(main)} at {knee.LEVEL_S:g} s/token"]
    parts += [f"{_listed(ratios)} at {level:g}" for level, ratios in other.items() if ratios]
    return _over_panels(context, "; ".join(parts), verdict)


def _over_panels(context: Context, ours: str, verdict: Verdict) -> Answer:
    """An answer that needs all panels: smoke shows its one panel and does not judge."""
    if verdict == "not judged":
        return Answer(NO_CROSSING, verdict)
    if context.preset == "paper":
        return Answer(ours, _named(verdict))
    return Answer(f"{ours} (panel {fig12.panels_of(context.preset)} alone)", LATER)


def sharegpt_over_oracle(context: Context) -> Answer:
    return judge_range(context, "orca_oracle", 1.7, 2.7)


def sharegpt_over_max(context: Context) -> Answer:
    return judge_range(context, "orca_max", 2.7, 8.0)


def over_static(context: Context) -> Answer:
    """ "Up to 22x": holds when the largest reading at 0.5 s/token reaches it, conditional when another level's does."""
    largest = {}
    for level in LEVELS:
        ratios = fig12_ratios(context, SHAREGPT, "static", level)
        if ratios:
            panel = max(ratios, key=lambda key: ratios[key])
            largest[level] = (ratios[panel], panel)
    reached = {level: 22.0 * (1 - SLACK) <= ratio for level, (ratio, _) in largest.items()}
    verdict = graded(reached.values())
    if knee.LEVEL_S in reached and verdict != "refuted":
        verdict = "confirmed" if reached[knee.LEVEL_S] else "conditional"
    words = "; ".join(f"{ratio:.1f} at {level:g} s/token (panel {panel})" for level, (ratio, panel) in largest.items())
    return _over_panels(context, f"at most {words}", verdict)


def judge_pair(ours: tuple[float | None, float | None], claimed: tuple[float, float]) -> Answer:
    """Two claimed ratios: both within `PAIR_SLACK`."""
    if ours[0] is None or ours[1] is None:
        return Answer(NO_CROSSING, "not judged")
    near = [abs(found / told - 1) <= PAIR_SLACK for found, told in zip(ours, claimed, strict=True)]
    return Answer(f"{ours[0]:.2f} and {ours[1]:.2f} at {knee.LEVEL_S:g} s/token", _named(graded(near)))


def alpaca_sharing_over_oracle(context: Context) -> Answer:
    if context.preset != "paper":
        return Answer(LATER, LATER)
    basic = fig12_ratios(context, "d", "orca_oracle", knee.LEVEL_S).get("d")
    curves = [fig14.panel_settings("f", system) for system in ("paged", "orca_oracle")]
    return judge_pair((basic, ratio_of(context, *curves, knee.LEVEL_S)), (1.3, 2.3))


def shared_prefix(context: Context) -> Answer:
    if context.preset != "paper":
        return Answer(LATER, LATER)
    ratios = [
        ratio_of(
            context, fig16.panel_settings(panel, "paged"), fig16.panel_settings(panel, "orca_oracle"), knee.LEVEL_S
        )
        for panel in "ab"
    ]
    return judge_pair((ratios[0], ratios[1]), (1.67, 3.58))


def chatbot(context: Context) -> Answer:
    """ "2x": holds within `PAIR_SLACK` over all three Orcas."""
    if context.preset != "paper":
        return Answer(LATER, LATER)
    top = fig17.settings_of("paged")
    ratios = {
        system: ratio_of(context, top, fig17.settings_of(system), knee.LEVEL_S)
        for system in ("orca_max", "orca_pow2", "orca_oracle")
    }
    found = {system: ratio for system, ratio in ratios.items() if ratio is not None}
    if not found:
        return Answer(NO_CROSSING, "not judged")
    words = ", ".join(f"{ratio:.2f} ({paper.label(system)})" for system, ratio in found.items())
    near = [abs(ratio / 2 - 1) <= PAIR_SLACK for ratio in found.values()]
    return Answer(f"{words} at {knee.LEVEL_S:g} s/token", _named(graded(near)))


def recompute_overhead(context: Context) -> Answer:
    """Read as a share of swap's time, and read as "at most 20% above it"."""
    times = [fig19.microbenchmark_ms(context, block) for block in paper.BLOCK_SIZES]
    shares = [found["recompute"] / found["swap_in_out"] for found in times]
    verdict = graded([max(shares) <= 0.2, max(shares) <= 1.2])
    return Answer(
        f"{min(shares):.0%} to {max(shares):.0%} of swapping in and out; at most {max(shares) - 1:.0%} slower",
        _named(verdict),
    )


def headline(context: Context) -> Answer:
    """ "2x to 4x": the median over the Orcas and the panels lies in the range."""
    ratios = [
        ratio
        for over in ("orca_max", "orca_pow2", "orca_oracle")
        for ratio in fig12_ratios(context, SHAREGPT + ALPACA, over, knee.LEVEL_S).values()
    ]
    if not ratios:
        return Answer(NO_CROSSING, "not judged")
    middle = statistics.median(ratios)
    inside = [2.0 <= ratio <= 4.0 for ratio in ratios]
    verdict: Verdict = "confirmed" if 2.0 <= middle <= 4.0 else graded(inside)
    words = (
        f"median {middle:.2f} over {len(ratios)} ratios to the Orcas, {sum(inside)} of them in the range "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
    )
    return _over_panels(context, words, verdict)


def kernel_overhead(context: Context) -> Answer:
    return Answer("not judged here yet: needs the kernels", "not judged")


JUDGES: dict[str, Callable[[Context], Answer]] = {
    "sharegpt_over_oracle": sharegpt_over_oracle,
    "sharegpt_over_max": sharegpt_over_max,
    "over_fastertransformer": over_static,
    "alpaca_sharing_over_oracle": alpaca_sharing_over_oracle,
    "shared_prefix": shared_prefix,
    "chatbot": chatbot,
    "kernel_overhead": kernel_overhead,
    "recompute_overhead": recompute_overhead,
    "headline": headline,
}
"""By the id of the claim in `experiments.paper.TEXT_CLAIMS`."""


def chapter(context: Context) -> Chapter:
    rows = []
    for claim in paper.TEXT_CLAIMS:
        answer = JUDGES[claim.id](context)
        rows.append((claim.figure, claim.claim, claim.plotted, claim.verdict, answer.ours, answer.verdict))
    table = Table(
        "What the text says, what the paper's curves show, what ours show",
        ("figure", "text", "the paper's curves", "text against them", "our curves", "text against ours"),
        tuple(rows),
        f"Ours by rule: a range holds when every panel's ratio at {knee.LEVEL_S:g} s/token lies in it ({SLACK:.0%} "
        "slack), is conditional when only some do or only at another level; a pair or a single ratio holds within "
        f"{PAIR_SLACK:.0%}; an 'up to' holds when the largest ratio reaches it; the headline by the median ratio.",
    )
    return Chapter("text_claims", tables=(table,), title="The paper's text against its curves and ours")
