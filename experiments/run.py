"""Runs settings: one run directory each, over processes, resumed where they are complete."""

from __future__ import annotations

import dataclasses
import itertools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any

from experiments.calibration import Calibration
from experiments.setting import (
    Setting,
    build_cost,
    build_memory,
    build_requests,
    build_workload_of,
    scheduler_config,
)
from paxkv import metrics
from paxkv.record import RunDirectory
from paxkv.sched.plan import StepOutcome, StepPlan, StepResult
from paxkv.sched.scheduler import Scheduler
from paxkv.sim.simulate import SimResult, StepHook, Window, simulate

Summary = dict[str, Any]
FORMAT = 1
"""Goes into every run's configuration: raise it when the meaning of a summary changes."""


def config_of(setting: Setting, calibration: Calibration, traces: str | None) -> dict[str, Any]:
    """Everything that decides a run's result. Whether traces are real matters, where they lie does not."""
    return {
        "format": FORMAT,
        "setting": dataclasses.asdict(setting),
        "calibration": calibration.to_dict(),
        "workload": "real" if traces else "embedded",
    }


def _finite(value: float) -> float | None:
    return None if math.isnan(value) else value


def execute(
    setting: Setting, calibration: Calibration, traces: str | None = None, on_step: StepHook | None = None
) -> tuple[Summary, SimResult]:
    """Simulates one setting and condenses it.

    Returns:
        the summary (JSON types: latencies in s, shares in percent, counts) and the full result.
    """
    workload = build_workload_of(setting, traces)
    memory = build_memory(setting)
    scheduler = Scheduler(scheduler_config(setting), memory)
    result = simulate(
        build_requests(setting, workload),
        scheduler,
        build_cost(setting, calibration),
        windows=[Window(*window) for window in setting.windows] or [Window(0.0, setting.duration_s)],
        on_step=on_step,
    )
    served = ~(result.finish_s != result.finish_s)
    columns = (result.arrival_s[served], result.first_token_s[served], result.finish_s[served])
    output = result.output_tokens[served]
    windows = [
        {
            "start_s": window.start_s,
            "end_s": window.end_s,
            "steps": meter.steps,
            "shares": meter.shares(),
            "mean_groups": meter.mean_groups,
            "sharing_saved": meter.sharing_saved,
            "utilisation": 100.0 - meter.shares()["free"] if meter.steps else None,
        }
        for window, meter in zip(
            [Window(*w) for w in setting.windows] or [Window(0.0, setting.duration_s)], result.meters, strict=True
        )
    ]
    finished = int(served.sum())
    counters = result.counters
    summary: Summary = {
        "workload_hash": workload.content_hash,
        "workload_source": workload.source,
        "requests": len(result.arrival_s),
        "finished": finished,
        "rejected": len(result.rejected),
        "num_pages": memory.num_pages,
        "page_size": memory.page_size,
        "normalised_latency_s": _finite(result.normalised_latency_s),
        "ttft_s": metrics.percentiles(columns[1] - columns[0], (50, 90, 99)) if finished else {},
        "tpot_s": metrics.percentiles(metrics.tpots(columns[1], columns[2], output), (50, 90, 99)) if finished else {},
        "steps": result.steps,
        "decode_tokens": result.tokens,
        "end_s": result.end_s,
        "output_tokens_per_s": float(output.sum() * setting.num_seqs / result.end_s) if finished else 0.0,
        "preemptions": counters.preemptions,
        "recomputed_tokens": counters.recomputed_tokens,
        "swapped_out_pages": counters.swapped_out_pages,
        "prefix_hit_rate": counters.prefix_hits / counters.prefix_queries if counters.prefix_queries else None,
        "preemption_rate": counters.preemptions / finished if finished else None,
        "windows": windows,
    }
    return summary, result


def _run_one(setting: Setting, calibration: Calibration, traces: str | None, root: str, record: bool) -> Summary:
    """Executes a setting in its run directory, unless it is complete there."""
    config = config_of(setting, calibration, traces)
    with RunDirectory(root, setting.name, config, record=record) as run:
        if run.complete:
            return run.load_summary()
        if not record:
            summary, _ = execute(setting, calibration, traces)
            return run.write_summary(summary)
        rows: list[dict[str, Any]] = []

        def on_step(start: float, end: float, plan: StepPlan, result: StepResult, outcome: StepOutcome) -> None:
            rows.append(
                {
                    "step": plan.step,
                    "steps": result.steps,
                    "start_s": start,
                    "end_s": end,
                    "prefill_tokens": plan.prefill_tokens,
                    "decodes": len(plan.decodes),
                    "groups": plan.num_groups,
                    "context_tokens": plan.context_tokens,
                    "preempted": [dataclasses.asdict(event) for event in plan.preempted],
                    "blocked": plan.blocked.value if plan.blocked else None,
                    "finished": list(outcome.finished),
                }
            )
            if len(rows) >= 4096:
                run.append_steps(rows)
                rows.clear()

        summary, result = execute(setting, calibration, traces, on_step)
        run.append_steps(rows)
        refused = dict(result.rejected)
        run.append_requests(
            {
                "request": index,
                "arrival_s": float(result.arrival_s[index]),
                "first_token_s": _finite(float(result.first_token_s[index])),
                "finish_s": _finite(float(result.finish_s[index])),
                "output_tokens": int(result.output_tokens[index]),
                "preemptions": int(result.preemptions[index]),
                "rejected": refused.get(index),
            }
            for index in range(len(result.arrival_s))
        )
        return run.write_summary(summary)


def expected_cost(setting: Setting) -> float:
    """A rough measure of a run's work, to start long runs first and to tell the time left."""
    work = setting.rate * setting.duration_s * (1.0 + 4.0 * (setting.num_seqs - 1) * setting.beam)
    return 200.0 + work * (3.0 if setting.dataset in ("sharegpt", "chat") else 1.0) * (
        3.0 if setting.prefix_tokens else 1.0
    )


class Runner:
    """Runs settings over processes and keeps their summaries.

    Args:
        root: folder of the run directories.
        calibration: the constants of the cost model.
        traces: folder of real traces, or None for the embedded statistics.
        processes: worker processes (default: the machine's cores).
        record: also write rows per step and per request.
        progress: called with (finished work, all work, label) as runs start and end.
    """

    def __init__(
        self,
        root: str | Path,
        calibration: Calibration,
        traces: str | None = None,
        *,
        processes: int | None = None,
        record: bool = False,
        progress: Callable[[float, float, str], None] | None = None,
    ) -> None:
        self.root = str(root)
        self.calibration = calibration
        self.traces = traces
        self.processes = processes or os.cpu_count() or 1
        self.record = record
        self.progress = progress or (lambda done, total, label: None)
        self._summaries: dict[Setting, Summary] = {}
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Runner:
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=error[0] is None, cancel_futures=True)

    def __len__(self) -> int:
        """Runs known so far."""
        return len(self._summaries)

    def workload_hashes(self) -> dict[str, str]:
        """Content hash of each workload that was run, by its description."""
        return {s["workload_source"]: s["workload_hash"] for s in self._summaries.values()}

    def run(self, settings: Iterable[Setting]) -> list[Summary]:
        """Summaries of ``settings`` in their order; each distinct one runs once.

        Raises:
            RuntimeError: a run failed; the message names its setting.
        """
        ordered = list(settings)
        todo = sorted(set(ordered) - self._summaries.keys(), key=expected_cost, reverse=True)
        if self.processes == 1 or len(todo) == 1:
            self._in_turn(todo)
        else:
            self._spread(todo)
        return [self._summaries[setting] for setting in ordered]

    def _in_turn(self, todo: Sequence[Setting]) -> None:
        total, done = sum(map(expected_cost, todo)), 0.0
        for setting in todo:
            self.progress(done, total, setting.name)
            try:
                self._summaries[setting] = _run_one(setting, self.calibration, self.traces, self.root, self.record)
            except Exception as error:
                raise RuntimeError(f"the run {setting} failed: {error}") from error
            done += expected_cost(setting)
            self.progress(done, total, setting.name)

    def _spread(self, todo: Sequence[Setting]) -> None:
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.processes, mp_context=context)
        total = sum(map(expected_cost, todo))
        done = 0.0
        queue = iter(todo)
        running: dict[Future[Summary], Setting] = {}
        while True:
            for setting in itertools.islice(queue, self.processes + 1 - len(running)):
                arguments = (setting, self.calibration, self.traces, self.root, self.record)
                running[self._pool.submit(_run_one, *arguments)] = setting
            if not running:
                return
            self.progress(done, total, next(iter(running.values())).name)
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                setting = running.pop(future)
                try:
                    self._summaries[setting] = future.result()
                except Exception as error:
                    raise RuntimeError(f"the run {setting} failed: {error}") from error
                done += expected_cost(setting)
                self.progress(done, total, setting.name)
