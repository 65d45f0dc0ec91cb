"""Gaps between the tokens of running requests, measured while a workload is simulated under a token budget."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from experiments.calibration import Calibration
from experiments.setting import Setting, build_cost, build_memory, build_requests, build_workload_of, scheduler_config
from paxkv.sched.plan import StepOutcome, StepPlan, StepResult
from paxkv.sched.scheduler import Scheduler
from paxkv.sim.simulate import Window, simulate
from paxkv.workload import Workload, build_workload, sample_lengths

LEVELS = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
SAMPLED_PAIRS = 4000


@dataclasses.dataclass(frozen=True)
class Trial:
    """A setting under a token budget.

    Attributes:
        setting: system, model, workload, step kind. Its first window bounds what is counted.
        budget: most tokens of one step (`max_num_batched_tokens`).
        lengths: rules for prompt and output lengths (see `sample_lengths`) that replace the data set's.
    """

    setting: Setting
    budget: int
    lengths: tuple[str, str] | None = None

    def workload(self, traces: str | None) -> Workload:
        """The setting's workload, or its arrivals with sampled lengths."""
        setting = self.setting
        if self.lengths is None:
            return build_workload_of(setting, traces)
        pairs = sample_lengths(*self.lengths, SAMPLED_PAIRS, seed=setting.seed, max_total_tokens=2047)
        return build_workload(pairs, setting.rate, setting.duration_s, seed=setting.seed)


class GapMeter:
    """Counts gaps between successive tokens of a sequence, and tokens per second in a window.

    Steps that a plan runs in one go differ only by the growth of their contexts: each counts as their mean.
    A preempted sequence's wait is a gap of it.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        self._last: dict[int, float] = {}
        self._gaps: list[float] = []
        self._counts: list[int] = []
        self.tokens = 0

    def __call__(self, start: float, end: float, plan: StepPlan, result: StepResult, outcome: StepOutcome) -> None:
        counted = self._window.start_s <= start < self._window.end_s
        step = (end - start) / result.steps
        firsts: dict[float, int] = {}
        for sequence in plan.decodes:
            gap = start + step - self._last.get(sequence, start)
            firsts[gap] = firsts.get(gap, 0) + 1
            self._last[sequence] = end
        for chunk in plan.prefills:
            if chunk.last:
                if chunk.seq_id in self._last:
                    gap = end - self._last[chunk.seq_id]
                    firsts[gap] = firsts.get(gap, 0) + 1
                self._last[chunk.seq_id] = end
        if counted:
            self.tokens += plan.tokens_given(result.steps)
            if result.steps > 1 and plan.decodes:
                firsts[step] = firsts.get(step, 0) + (result.steps - 1) * len(plan.decodes)
            self._gaps += firsts
            self._counts += firsts.values()

    def percentiles(self) -> dict[str, float]:
        """Gaps in seconds at `LEVELS`: the smallest gap that this share of all gaps does not pass."""
        gaps, counts = np.array(self._gaps), np.array(self._counts)
        order = np.argsort(gaps, kind="stable")
        reached = np.cumsum(counts[order])
        return {
            name: float(gaps[order][np.searchsorted(reached, share * reached[-1])]) for name, share in LEVELS.items()
        }


def measure(trial: Trial, calibration: Calibration, traces: str | None) -> dict[str, Any]:
    """Simulates a trial: gap percentiles (s), tokens/s in the window, first-token p99 (s), preemptions per request."""
    setting = trial.setting
    window = Window(*setting.windows[0])
    config = dataclasses.replace(scheduler_config(setting), max_num_batched_tokens=trial.budget)
    scheduler, meter = Scheduler(config, build_memory(setting)), GapMeter(window)
    workload = trial.workload(traces)
    result = simulate(
        build_requests(setting, workload),
        scheduler,
        build_cost(setting, calibration),
        windows=[window],
        on_step=meter,
    )
    waits = (result.first_token_s - result.arrival_s)[~np.isnan(result.first_token_s)]
    return {
        "gaps_s": meter.percentiles(),
        "tokens_per_s": meter.tokens / (window.end_s - window.start_s),
        "normalised_latency_s": result.normalised_latency_s,
        "ttft_p99_s": float(np.percentile(waits, 99)),
        "mean_groups": result.meters[0].mean_groups,
        "preemption_rate": result.counters.preemptions / len(workload),
    }
