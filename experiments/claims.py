r"""Statements about sizing and tuning LLM serving, each with a verdict that follows from runs.

    python -m experiments.reproduce --preset=paper --only=claims [--traces=DIR]     (runs what they rest on)

The statements circulate among people who serve models; the numbers are theirs. Confirmed, refuted, or conditional (true
only under the conditions that our figure names); the rule of each verdict stands beside it. What needs a model, kernels
or quantised pages is listed and not judged yet.
"""

from __future__ import annotations

import dataclasses

from experiments import fig02, fig13, study_health, study_page_size, study_utilization
from experiments.claim_judges import JUDGES, WAITING
from experiments.context import Context, Preset
from experiments.figure import Chapter, Table
from experiments.setting import Setting


@dataclasses.dataclass(frozen=True)
class Claim:
    """A statement and the figure that is given for it."""

    number: int
    statement: str
    figure: str


CLAIMS = (
    Claim(1, "reserving the maximum length in one piece leaves most of the KV memory empty", "60% to 80%"),
    Claim(2, "pages of 16 or 32 tokens leave little waste", "about 4%; a fifth of the waste"),
    Claim(3, "paging enlarges the effective batch", "x3 to x5"),
    Claim(
        4, "paging, quantisation, offload and prefix sharing together serve more at once", "x3 to x5; capacity x2 to x3"
    ),
    Claim(5, "a 13B model: 26 GB of weights on a 40 GB card, and a third of the card for KV", "35% (or 30%)"),
    Claim(6, "KV bytes = 2 x layers x heads x head size x tokens x batch x bytes", "exact"),
    Claim(7, "Llama-3-70B in bf16: KV of 20 requests of 8,000 tokens, and of 32", "over 40 GB; about 65 GB"),
    Claim(8, "a margin for metadata and leftover fragmentation should be planned", "20%"),
    Claim(
        9,
        "memory_utilization 0.90 by default; 0.95 packs more under steady load; 0.80 saves bursts",
        "0.80, 0.90, 0.95",
    ),
    Claim(10, "two requests with one 2,000-token system prompt store it once", "exactly once"),
    Claim(11, "prefix caching removes the prefill of a shared prompt; chat should hit often", "over 60%"),
    Claim(12, "paging avoids computing keys and values again", "none"),
    Claim(13, "prefill is bound by compute, decode by memory bandwidth", "none"),
    Claim(14, "whole prefills make others' tokens stutter; chunks stop that and add throughput", "up to +50%"),
    Claim(15, "8-bit KV halves the cache, 4-bit quarters it", "x2, x4"),
    Claim(16, "fp8 KV hardly costs quality; int4 shows on reasoning", "under 0.5 point"),
    Claim(17, "fp8 KV alone gives more capacity", "+40% to +60%"),
    Claim(18, "static scales are cheaper, dynamic ones more accurate", "none"),
    Claim(19, "under tight latency and low load, smaller batches beat quantisation; else it wins", "none"),
    Claim(20, "speculation keeps the output exactly and helps only while batches are small", "none"),
    Claim(21, "proposing by n-grams suits repetitive text and costs nothing", "none"),
    Claim(22, "offloading cold KV to host memory or NVMe serves contexts beyond the device", "past 1M tokens"),
    Claim(23, "healthy pools are well used and next to nobody is preempted", "80% to 90%, about 0"),
    Claim(24, "paging works with any standard transformer", "Llama, Mistral, Qwen, GPT-NeoX, Falcon, DeepSeek, ..."),
    Claim(25, "a local card runs out of memory beyond five concurrent users", "5"),
)


def settings(preset: Preset) -> list[Setting]:
    modules = (fig02, fig13, study_page_size, study_utilization, study_health)
    return [setting for module in modules for setting in module.settings(preset)]


def row(context: Context, claim: Claim) -> tuple:
    """A claim's row: judged by its study, or what it waits for."""
    start = (claim.number, claim.statement, None if claim.figure == "none" else claim.figure)
    if claim.number in WAITING:
        return (*start, "not judged", f"not judged here yet: needs {WAITING[claim.number]}", None, None)
    found = JUDGES[claim.number](context)
    return (*start, found.verdict, found.ours, found.rule, found.shown_by)


def chapter(context: Context) -> Chapter:
    note = "Each verdict is computed from the runs named beside it, by the rule named beside it."
    if context.preset == "smoke":
        note += " With the smoke preset they rest on fewer runs; the paper preset may judge otherwise."
    table = Table(
        "Claims about serving, put to the test",
        ("#", "claim", "claimed", "verdict", "ours", "rule of the verdict", "shown by"),
        tuple(row(context, claim) for claim in CLAIMS),
        note,
    )
    return Chapter("claims", tables=(table,), title="Claims about serving, each with a verdict")
