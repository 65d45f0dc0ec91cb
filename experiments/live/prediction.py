"""What the simulator says about a live setting, in the terms of the summary of a real run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.live.setting import (
    LiveSetting,
    build_live_memory,
    build_live_requests,
    build_live_workload,
    live_scheduler_config,
)
from paxkv import metrics
from paxkv.sched.plan import StepOutcome, StepPlan, StepResult
from paxkv.sched.scheduler import Scheduler
from paxkv.sched.waste import WasteMeter
from paxkv.sim.cost_model import CostModel
from paxkv.sim.simulate import Window, simulate

Summary = dict[str, Any]
UNTIMED = CostModel(floor_s=1.0, weights_s=0.0, token_s=0.0)
"""For a run whose decisions alone are predicted."""


def predict(setting: LiveSetting, cost: CostModel, traces: str | None = None) -> Summary:
    """Runs the same requests through the same scheduler and memory on a clock of calculated steps."""
    workload = build_live_workload(setting, traces)
    requests = build_live_requests(setting, workload)
    unseen, last_s, produced = len(requests), 0.0, 0

    def watch(start: float, end: float, plan: StepPlan, result: StepResult, outcome: StepOutcome) -> None:
        nonlocal unseen, last_s, produced
        if unseen:
            unseen -= plan.num_new
            last_s = start
        if unseen:
            produced += plan.tokens_given(result.steps)

    def once(windows: Sequence[Window], hook=None):
        scheduler = Scheduler(live_scheduler_config(setting), build_live_memory(setting))
        return simulate(requests, scheduler, cost, windows=windows, on_step=hook)

    once((), watch)
    # The pool is full of work until the plan that admits the last request.
    result = once([Window(), Window(0.0, last_s)] if last_s else [Window()])
    tokens = int(result.output_tokens.sum()) * setting.num_seqs
    arrival, first, last = result.arrival_s, result.first_token_s, result.finish_s
    meters = [meter_summary(one) for one in result.meters] + [None]
    return {
        "seconds": result.end_s,
        "tokens_per_s": tokens / result.end_s,
        "full_tokens_per_s": produced / last_s if last_s else None,
        "normalised_latency_s": result.normalised_latency_s,
        "ttft_s": metrics.percentiles(first - arrival, (50, 90, 99)),
        "tpot_s": metrics.percentiles(metrics.tpots(first, last, result.output_tokens), (50, 90, 99)),
        "steps": result.steps,
        "all": meters[0],
        "full": meters[1],
        "preemptions": result.counters.preemptions,
        "recomputed_tokens": result.counters.recomputed_tokens,
    }


def meter_summary(meter: WasteMeter) -> Summary | None:
    """Means over the steps of a meter in JSON types, None where it saw none."""
    if not meter.steps:
        return None
    return {
        "steps": meter.steps,
        "shares": meter.shares(),
        "mean_groups": meter.mean_groups,
        "sharing_saved": meter.sharing_saved,
    }
