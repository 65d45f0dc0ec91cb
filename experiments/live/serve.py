"""Drives the real engine through one setting and condenses what happened.

The clock of a run starts when the engine is ready: making the weights, compiling and warming up are timed apart.
Output lengths are those of the trace (end tokens are ignored) and decoding is greedy or seeded, so every system must
give the same tokens; their digests are kept with the run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.live.model import LiveModel
from experiments.live.prediction import UNTIMED, Summary, meter_summary
from experiments.live.setting import (
    PAGE_SIZE,
    LiveSetting,
    build_live_memory,
    build_live_requests,
    build_live_workload,
    live_scheduler_config,
    num_host_pages,
    prompt_ids,
)
from paxkv import metrics
from paxkv.engine import Engine, EngineConfig
from paxkv.output import RequestOutput
from paxkv.request import Request
from paxkv.sampling import SamplingParams
from paxkv.sched.plan import StepOutcome, StepPlan, StepResult
from paxkv.sched.scheduler import Scheduler
from paxkv.sched.waste import Usage, WasteMeter
from paxkv.sim.simulate import simulate
from paxkv.steps.buckets import Buckets
from paxkv.steps.inputs import StepKey
from paxkv.workload import Workload

Outputs = list[list[list[int]]]
"""Token ids by request and sequence."""
IDLE_S = 0.0005
"""How long to sleep at most while nothing runs and nothing is due."""


@dataclasses.dataclass(frozen=True)
class LiveResult:
    """What a run gave: its summary, the tokens, and a row per dispatched plan."""

    summary: Summary
    outputs: Outputs
    steps: list[dict[str, Any]]


class PoolWatch:
    """Accounts the pool plan by plan, over the whole run and while requests wait for memory.

    The second ends with the plan that admits the last request: until then there is always one more request than fits.

    Args:
        requests: how many will be admitted.

    Attributes:
        scheduler: of the engine that is watched.
        all, full: the pool over all plans, and over those with requests waiting.
        full_end_s, full_tokens: when the latter ended, and the tokens given until then.
        steps: a row per plan.
    """

    scheduler: Scheduler

    def __init__(self, requests: int) -> None:
        self.all = WasteMeter()
        self.full = WasteMeter()
        self.full_end_s: float | None = None
        self.full_tokens = 0
        self.steps: list[dict[str, Any]] = []
        self._unseen = requests
        self._open: deque[tuple[Usage, int, int, bool]] = deque()

    def on_plan(self, plan: StepPlan) -> None:
        """The plan was made and has not run: what the pool holds in its first step."""
        scheduler = self.scheduler
        self._unseen -= plan.num_new
        growing = scheduler.num_growing if plan.decodes else 0
        self._open.append((scheduler.usage(), scheduler.num_running, growing, self._unseen > 0))

    def on_step(self, start_s: float, end_s: float, plan: StepPlan, result: StepResult, outcome: StepOutcome) -> None:
        """The plan ran."""
        usage, groups, growing, full = self._open.popleft()
        memory = self.scheduler.memory
        for meter in (self.all, self.full) if full else (self.all,):
            meter.add(
                usage, result.steps, groups=groups, growing=growing, growth=plan.growth,
                page_size=memory.page_size, absorbs=memory.absorbs,
            )  # fmt: skip
        if full:
            self.full_tokens += plan.tokens_given(result.steps)
        elif self.full_end_s is None:
            self.full_end_s = start_s
        self.steps.append(
            {
                "step": plan.step,
                "steps": result.steps,
                "start_s": start_s,
                "end_s": end_s,
                "prefill_tokens": plan.prefill_tokens,
                "prefills": len(plan.prefills),
                "decodes": len(plan.decodes),
                "groups": plan.num_groups,
                "context_tokens": plan.context_tokens,
                "copies": len(plan.copies),
                "preempted": len(plan.preempted),
            }
        )


def sampling_of(setting: LiveSetting, output_tokens: int) -> SamplingParams:
    """Greedy for one sequence, seeded sampling for several, beams where asked for."""
    common = {"max_tokens": output_tokens, "ignore_eos": True, "seed": setting.seed}
    if setting.beam:
        return SamplingParams(**common, temperature=0.0, n=setting.num_seqs, beam_width=setting.num_seqs)
    if setting.num_seqs > 1:
        return SamplingParams(**common, temperature=1.0, n=setting.num_seqs)
    return SamplingParams(**common, temperature=0.0)


def serve(
    engine: Engine,
    prompts: Sequence[tuple[int, ...]],
    sampling: Sequence[SamplingParams],
    arrival_s: Sequence[float],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[float, list[RequestOutput]]:
    """Adds each request when it is due and steps until all are done.

    Returns:
        The clock at which the run began, and the last output of each request.

    Raises:
        RuntimeError: a request was not served.
    """
    begin = clock()
    finished: dict[int, RequestOutput] = {}
    due = 0
    while due < len(prompts) or engine.has_work:
        now = clock() - begin
        while due < len(prompts) and arrival_s[due] <= now:
            engine.add_request(prompts[due], sampling[due], request_id=due, arrival_s=begin + arrival_s[due])
            due += 1
        if not engine.has_work:
            time.sleep(max(0.0, min(IDLE_S, arrival_s[due] - now)))
            continue
        for output in engine.step():
            if output.finished:
                finished[int(output.request_id)] = output
    lost = [name for name in range(len(prompts)) if name not in finished or finished[name].times.first_token_s is None]
    if lost:
        raise RuntimeError(f"{len(lost)} of {len(prompts)} requests were not served, the first is {lost[0]}")
    return begin, [finished[name] for name in range(len(prompts))]


def open_engine(setting: LiveSetting, model: LiveModel, watch: PoolWatch | None = None) -> Engine:
    """An engine over the memory of the setting's system."""
    config = EngineConfig(
        scheduler=live_scheduler_config(setting),
        page_size=PAGE_SIZE,
        num_host_pages=num_host_pages(setting),
        prefix_caching=setting.prefix_caching,
    )
    hooks = {} if watch is None else {"on_plan": watch.on_plan, "on_step": watch.on_step}
    engine = Engine(model.config, model.params, config, memory=build_live_memory(setting), **hooks)
    if watch is not None:
        watch.scheduler = engine.scheduler
    return engine


def run_live(setting: LiveSetting, model: LiveModel, traces: str | None = None) -> LiveResult:
    """Runs one setting on the clock, after everything that it needs was compiled.

    Raises:
        RuntimeError: a request was not served.
    """
    workload = build_live_workload(setting, traces)
    prompts = prompt_ids(setting, workload)
    sampling = [sampling_of(setting, tokens) for tokens in workload.output_tokens.tolist()]
    warm = warm_up(setting, model, build_live_requests(setting, workload), sampling)
    watch = PoolWatch(len(prompts))
    with open_engine(setting, model, watch) as engine:
        cpu_s = time.process_time()
        begin, finished = serve(engine, prompts, sampling, workload.arrival_s.tolist())
        end, cpu_s = time.perf_counter(), time.process_time() - cpu_s
        summary = condense(setting, workload, finished, watch, begin, end)
        summary |= {
            "warm_up_s": warm,
            "late_compiles": len(engine.log.entries),
            "host_s": engine.stats.host_s,
            "cpu_s": cpu_s,
        }
    for row in watch.steps:
        row["start_s"] -= begin
        row["end_s"] -= begin
    outputs = [[list(one.token_ids) for one in output.outputs] for output in finished]
    return LiveResult(summary, outputs, watch.steps)


def warm_up(
    setting: LiveSetting, model: LiveModel, requests: Sequence[Request], sampling: Sequence[SamplingParams]
) -> float:
    """Compiles all steps that the run will take; returns the seconds that it cost."""
    begin = time.perf_counter()
    with open_engine(setting, model) as engine:
        if setting.beam:  # which steps it takes depends on the model's scores
            serve(engine, [request.prompt_ids or () for request in requests], sampling, [0.0] * len(requests))
        elif not setting.foreseen:  # and here on the clock
            engine.warm_up(variants=(sampling[0].variant,))
        else:
            engine.executor.warm_up(steps_of(setting, requests, sampling[0].variant, engine.executor.builder.buckets))
    return time.perf_counter() - begin


def steps_of(setting: LiveSetting, requests: Sequence[Request], variant: str, buckets: Buckets) -> list[StepKey]:
    """The compiled steps of a run that can be foreseen: a simulated one makes the same plans."""
    keys: dict[StepKey, None] = {}

    def look(start: float, end: float, plan: StepPlan, result: StepResult, outcome: StepOutcome) -> None:
        decodes = len(plan.decodes)
        if not plan.prefills:
            if decodes:
                size = buckets.decode(decodes)
                keys[StepKey("decode", size, size, variant)] = None
            return
        chunks = Counter(chunk.seq_id // setting.num_seqs for chunk in plan.prefills)
        # One prompt answers for all sequences of its request; recomputed sequences answer each for itself.
        last = Counter(chunk.seq_id // setting.num_seqs for chunk in plan.prefills if chunk.last)
        samples = sum(setting.num_seqs if chunks[name] == 1 else count for name, count in last.items())
        keys[StepKey("mixed", *buckets.mixed(plan.prefill_tokens + decodes, decodes + samples), variant)] = None

    scheduler = Scheduler(live_scheduler_config(setting), build_live_memory(setting))
    simulate(requests, scheduler, UNTIMED, on_step=look)
    return list(keys)


def condense(
    setting: LiveSetting,
    workload: Workload,
    finished: Sequence[RequestOutput],
    watch: PoolWatch,
    begin: float,
    end: float,
) -> Summary:
    """The run in JSON types: seconds, shares in percent, tokens per second."""
    arrival, first, last = (
        np.array([getattr(output.times, name) for output in finished]) - begin
        for name in ("arrival_s", "first_token_s", "finish_s")
    )
    tokens = workload.output_tokens
    produced = int(tokens.sum()) * setting.num_seqs
    full_s = None if watch.full_end_s is None else watch.full_end_s - begin
    memory, counters = watch.scheduler.memory, watch.scheduler.counters
    digests = [digest(output) for output in finished]
    return {
        "workload_hash": workload.content_hash,
        "workload_source": workload.source,
        "requests": len(finished),
        "prompt_tokens": int(workload.prompt_tokens.sum()),
        "output_tokens": produced,
        "num_pages": memory.num_pages,
        "page_size": memory.page_size,
        "seconds": end - begin,
        "tokens_per_s": produced / (end - begin),
        "full_tokens_per_s": watch.full_tokens / full_s if full_s else None,
        "normalised_latency_s": float(metrics.normalised_latencies(arrival, last, tokens).mean()),
        "ttft_s": metrics.percentiles(metrics.ttfts(arrival, first), (50, 90, 99)),
        "tpot_s": metrics.percentiles(metrics.tpots(first, last, tokens), (50, 90, 99)),
        "steps": sum(row["steps"] for row in watch.steps),
        "plans": len(watch.steps),
        "all": meter_summary(watch.all),
        "full": meter_summary(watch.full),
        "preemptions": counters.preemptions,
        "recomputed_tokens": counters.recomputed_tokens,
        "prefix_hit_rate": counters.prefix_hits / counters.prefix_queries if counters.prefix_queries else None,
        "tokens_hash": hashlib.sha256("".join(digests).encode()).hexdigest()[:16],
        "request_hashes": digests,
    }


def digest(output: RequestOutput) -> str:
    """Eight hexadecimal digits that stand for all tokens of a request."""
    ids = [list(one.token_ids) for one in output.outputs]
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:8]


def score_next(setting: LiveSetting, model: LiveModel, ids: Sequence[int]) -> dict[int, float]:
    """Log-probabilities of the likeliest tokens after ``ids``, from a step of their own."""
    with open_engine(dataclasses.replace(setting, system="paged"), model) as engine:
        wanted = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=engine.config.max_logprobs)
        (output,) = engine.generate([list(ids)], wanted)
    return dict(output.outputs[0].logprobs[0].top)
