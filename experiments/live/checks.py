"""What must hold in every live run, whatever the device: equal tokens, equal decisions, nothing compiled on the clock.

Each is a verdict row whose expected number is zero; a preset that misses one ends with an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from experiments.figure import VerdictRow, judge_printed
from experiments.live.prediction import Summary
from experiments.live.session import LiveSession
from experiments.live.setting import LiveSetting, build_live_workload, prompt_ids

DECISIONS = ("steps", "preemptions", "recomputed_tokens", "all", "full")
"""What two runs with the same decisions have in common, to the last digit."""
TIES = {"cpu": 1e-4, "other": 1e-2}
"""Log-probabilities closer than this are equal to rounding. Off a CPU, products of float32 may keep 10 bits only."""


def exact_rows(session: LiveSession, figure: str, place: str, settings: Sequence[LiveSetting]) -> list[VerdictRow]:
    """The rows for runs that serve the same requests on different systems.

    Args:
        place: what tells these runs from others of the figure.
    """
    runs = session.run(settings)
    found = compare_tokens(session, settings)
    foreseen = [(s, run) for s, run in zip(settings, runs, strict=True) if s.foreseen]
    unequal = [s.system for s, run in foreseen if not same_decisions(run, session.predict(s))]
    late = sum(run["late_compiles"] for run in runs)
    rows = [
        ("requests whose tokens differ between systems", found.wrong, found.text),
        ("compilations on the clock", late, ""),
    ]
    if foreseen:
        rows.append(("systems on which engine and simulator decide differently", len(unequal), ", ".join(unequal)))
    return [
        judge_printed(figure, f"{len(runs)} systems", f"{place}: {what}", workload_name(session, settings[0]), 0.0,
                      count, 0, note=note)
        for what, count, note in rows
    ]  # fmt: skip


def workload_name(session: LiveSession, setting: LiveSetting) -> str:
    """The workload column of a verdict row."""
    scale = setting.size.scale(setting.dataset)
    source = "real" if session.traces else "embedded"
    return f"{setting.dataset} ({source})" + (f" x {scale:g}" if scale != 1 else "")


def same_decisions(run: Summary, predicted: Summary) -> bool:
    """Whether the engine's run and the simulator's made the same decisions, as far as the summaries tell."""
    return all(run[name] == predicted[name] for name in DECISIONS)


@dataclasses.dataclass(frozen=True)
class TokenComparison:
    """How many requests have tokens that differ between systems, ties of rounding left out, and where they differ."""

    wrong: int
    text: str


def compare_tokens(session: LiveSession, settings: Sequence[LiveSetting]) -> TokenComparison:
    """Compares the digests of all requests of several systems; where they differ, looks at the first token that does.

    Systems batch differently, and a device may add up a product in another order for another batch. Two tokens whose
    logits are equal to rounding can then change places. Such a tie is told apart from a wrong token by scoring both.
    """
    runs = session.run(settings)
    if len({run["tokens_hash"] for run in runs}) == 1:
        return TokenComparison(0, "")
    base, base_run = settings[-1], runs[-1]
    wrong, ties = [], 0
    for setting, run in zip(settings, runs, strict=True):
        digests = zip(run["request_hashes"], base_run["request_hashes"], strict=True)
        for index in [index for index, (ours, theirs) in enumerate(digests) if ours != theirs]:
            gap = tie_gap(session, base, index, session.tokens(base)[index], session.tokens(setting)[index])
            limit = TIES["cpu" if session.device.startswith("cpu") else "other"]
            if gap is not None and gap <= limit:
                ties += 1
            else:
                wrong.append(f"{setting.system}, request {index}" + ("" if gap is None else f" by {gap:.2g}"))
    text = f"{ties} parted at a tie of logits"
    return TokenComparison(len(wrong), "; ".join([text, *wrong[:3]]))


def tie_gap(
    session: LiveSession, setting: LiveSetting, index: int, ours: list[list[int]], theirs: list[list[int]]
) -> float | None:
    """Log-probability of the one token over the other where two greedy outputs of a request first differ.

    None where the outputs are not those of one greedy sequence, or the other token is not among the likeliest.
    """
    from experiments.live.serve import score_next

    if len(ours) != 1 or len(theirs) != 1:
        return None
    at = next((i for i, (a, b) in enumerate(zip(ours[0], theirs[0], strict=True)) if a != b), None)
    if at is None:
        return None
    prompt = prompt_ids(setting, build_live_workload(setting, session.traces))[index]
    scores = score_next(setting, session.model, [*prompt, *ours[0][:at]])
    pair: list[Any] = [scores.get(ours[0][at]), scores.get(theirs[0][at])]
    return None if None in pair else abs(pair[0] - pair[1])
