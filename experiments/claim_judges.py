"""Who judges which claim of `experiments.claims`: figures and sizing here, the studies in their own modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from experiments import (
    fig02,
    fig13,
    paper,
    sizing_claims,
    study_chunked,
    study_health,
    study_page_size,
    study_prefix,
    study_utilization,
)
from experiments.context import Context
from experiments.finding import Finding, graded
from experiments.run import Summary
from paxkv import sizing
from paxkv.config import OPT_13B, CacheConfig, SchedulerConfig
from paxkv.request import Request
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.scheduler import Scheduler
from paxkv.sim import hardware
from paxkv.sim.cost_model import CostModel
from paxkv.sim.simulate import SimResult, simulate
from paxkv.workload import load_lengths

EMPTY = (60.0, 80.0)
EMPTY_SLACK = 1.0
LARGER_BATCH = (3.0, 5.0)
LOCAL_CARD_BYTES = 24 * sizing.GIB
"""A consumer's card as people have it at home; its exact memory does not matter to the verdict."""
LOCAL_USERS = 50
LOCAL_PROMPT, LOCAL_ANSWER = 6144, 2048


def _sized(*results: sizing_claims.ClaimResult, rule: str) -> Finding:
    """Sizing's answers to one claim; several parts are confirmed together, refuted together, or conditional."""
    verdict = results[0].verdict if len(results) == 1 else graded(r.verdict == "confirmed" for r in results)
    return Finding(results[0].claim, verdict, "; ".join(r.explanation for r in results), rule, "sizing")


def _live(run: Summary) -> float:
    shares = run["windows"][0]["shares"]
    return shares["live"] + shares["shared"]


def _bars(context: Context) -> dict[str, Summary]:
    return dict(zip(fig02.SYSTEMS, context.summaries(fig02.settings(context.preset)), strict=True))


def empty_memory(context: Context) -> Finding:
    """Claim 1."""
    empty = {system: 100.0 - _live(run) for system, run in _bars(context).items() if system != "paged"}
    listed = ", ".join(f"{paper.label(system)} {share:.1f}%" for system, share in empty.items())
    low, high = EMPTY
    return Finding(
        1,
        graded([low - EMPTY_SLACK <= empty["orca_max"] <= high + EMPTY_SLACK]),
        f"slots without a token: {listed}",
        f"Orca (Max), which reserves the maximum length, between {low:g}% and {high:g}% ({EMPTY_SLACK:g} point of "
        "slack)",
        "fig02",
    )


def larger_batch(context: Context) -> Finding:
    """Claim 3."""
    ratios = {}
    for panel in fig13.panels_of(context.preset):
        batch = {s.system: fig13.mean_groups(context, s) for s in fig13.panel_settings(panel)}
        for system in ("orca_max", "orca_pow2", "orca_oracle"):
            ratios[f"{panel.dataset} over {paper.label(system)}"] = batch["paged"] / batch[system]
    low, high = LARGER_BATCH
    return Finding(
        3,
        graded(low <= ratio <= high for ratio in ratios.values()),
        "requests batched: " + ", ".join(f"{name} x{ratio:.1f}" for name, ratio in ratios.items()),
        f"every ratio between {low:g} and {high:g}",
        "fig13",
    )


def kv_share(context: Context) -> Finding:
    """Claim 5."""
    return _sized(
        sizing_claims.claim_kv_share(hardware.A100_40GB.memory_bytes), rule="pool within 2 points of 35% of the card"
    )


def kv_formula(context: Context) -> Finding:
    """Claim 6."""
    return _sized(
        sizing_claims.claim_kv_formula(), rule="confirmed if exact for models with fewer KV heads than query heads, too"
    )


def llama_70b(context: Context) -> Finding:
    """Claim 7."""
    parts = sizing_claims.claim_llama_70b(), sizing_claims.claim_llama_70b(32, 8000, 65, exact=True)
    return _sized(*parts, rule="20 requests: over 40 GB; 32 requests: within 5% of 65 GB")


def margin(context: Context) -> Finding:
    """Claim 8, predicted by sizing for the mean sequence of figure 2's run, beside what that run left empty."""
    run = _bars(context)["paged"]
    window = run["windows"][0]
    mean = _live(run) / 100.0 * run["num_pages"] * run["page_size"] / window["mean_groups"]
    found = _sized(
        sizing_claims.claim_margin(mean, sizing.KVLayout.of(OPT_13B, run["page_size"])),
        rule="predicted margin within a half of 20%",
    )
    measured = study_page_size.empty_share(run)
    return dataclasses.replace(
        found, ours=f"{found.ours}; the run left {measured:.2f}% of its allocated slots empty", shown_by="sizing, fig02"
    )


def serve_local_card(users: int = LOCAL_USERS) -> tuple[SimResult, int]:
    """That many users at once on a local card, each with a request of the model's full length; and the pool's pages."""
    shape = sizing.LLAMA_3_8B
    card = sizing.plan(shape, LOCAL_CARD_BYTES).require_pages()
    config = SchedulerConfig(max_model_len=shape.max_positions, max_num_batched_tokens=shape.max_positions)
    scheduler = Scheduler(config, PagedMemory(CacheConfig(card.num_pages)))
    requests = [Request(index, LOCAL_PROMPT, LOCAL_ANSWER) for index in range(users)]
    clock = CostModel(floor_s=0.0, weights_s=0.03, token_s=1e-4)  # only order matters here, not time
    return simulate(requests, scheduler, clock), card.num_pages


def local_card(context: Context) -> Finding:
    """Claim 25: sizing says how many fit, a run shows what becomes of the others."""
    lengths = load_lengths("sharegpt", context.traces)
    mean = round(float((lengths.prompt + lengths.output).mean()))
    found = _sized(
        sizing_claims.claim_local_card(LOCAL_CARD_BYTES, mean),
        rule="confirmed if five users fill the card and more are lost; refuted if more than five fit at full length; "
        "else conditional",
    )
    result, pages = serve_local_card()
    lost = sum(1 for finish in result.finish_s if finish != finish)
    verdict = "conditional" if found.verdict == "confirmed" and not lost else found.verdict
    ours = (
        f"{found.ours}. Run: {len(result.finish_s)} users at once with {LOCAL_PROMPT + LOCAL_ANSWER:,} tokens each on "
        f"{pages:,} pages: {len(result.finish_s) - lost} finish, {lost} lost, {result.counters.preemptions} preemptions"
    )
    return dataclasses.replace(found, verdict=verdict, ours=ours, shown_by="sizing, a run of claim_judges")


JUDGES: dict[int, Callable[[Context], Finding]] = {
    1: empty_memory,
    2: study_page_size.finding,
    3: larger_batch,
    5: kv_share,
    6: kv_formula,
    7: llama_70b,
    8: margin,
    9: study_utilization.finding,
    10: study_prefix.finding_stored_once,
    11: study_prefix.finding_hit_rate,
    12: study_prefix.finding_recomputing,
    13: study_chunked.finding_bounds,
    14: study_chunked.finding_chunks,
    23: study_health.finding,
    25: local_card,
}
"""What this part judges, by the claim's number."""

WAITING = {
    4: "quantised pages, offload and a combined run of the engine",
    15: "the engine and kernels with quantised pages",
    16: "the engine and kernels with quantised pages",
    17: "the engine and kernels with quantised pages",
    18: "the engine and kernels with quantised pages",
    19: "the engine and kernels with quantised pages",
    20: "the engine with speculation",
    21: "the engine with speculation",
    22: "the engine with offload tiers",
    24: "the engine's parity tests",
}
"""What the others wait for."""
