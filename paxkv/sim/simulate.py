"""Runs a workload through the scheduler on a cost model's clock.

Decisions are exact, step by step; only time is modelled. A plan's horizon is skipped in one go, and a test
holds every finish time, preemption and waste sum equal to the run that takes single steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paxkv.config import require
from paxkv.request import Request
from paxkv.sched.events import RequestRejected
from paxkv.sched.plan import StepOutcome, StepPlan, StepResult
from paxkv.sched.scheduler import Scheduler
from paxkv.sched.waste import WasteMeter
from paxkv.sim.cost_model import BeamModel, CostExecutor, CostModel

NEVER = float("inf")


@dataclasses.dataclass(frozen=True)
class Window:
    """Steps that begin in ``[start_s, end_s)`` are averaged."""

    start_s: float = 0.0
    end_s: float = NEVER

    def __post_init__(self) -> None:
        require(
            0 <= self.start_s < self.end_s,
            f"a window must begin at zero or later and before it ends, got [{self.start_s}, {self.end_s})",
        )


@dataclasses.dataclass(frozen=True)
class SimResult:
    """What a simulated run gave.

    Attributes:
        arrival_s, first_token_s, finish_s: per request [R], NaN where the request was refused.
        output_tokens: per request [R], tokens generated for each of its sequences.
        preemptions: per request [R].
        rejected: (request index, reason) of the refused ones.
        steps: steps run.
        tokens: tokens decoded over all sequences. A first token comes with its prompt and is not among them; the
            rows of a static batch that have finished are computed, and are.
        end_s: clock at the end.
        meters: one waste meter per window.
        counters: the scheduler's counters.
    """

    arrival_s: np.ndarray
    first_token_s: np.ndarray
    finish_s: np.ndarray
    output_tokens: np.ndarray
    preemptions: np.ndarray
    rejected: tuple[tuple[int, str], ...]
    steps: int
    tokens: int
    end_s: float
    meters: tuple[WasteMeter, ...]
    counters: Any

    @property
    def normalised_latency_s(self) -> float:
        """Mean over served requests of end-to-end latency / output length, s/token (paper section 6.1)."""
        served = ~np.isnan(self.finish_s)
        if not served.any():
            return float("nan")
        latency = (self.finish_s - self.arrival_s)[served] / self.output_tokens[served]
        return float(latency.mean())


StepHook = Callable[[float, float, StepPlan, StepResult, StepOutcome], None]


def simulate(
    requests: Sequence[Request],
    scheduler: Scheduler,
    cost: CostModel,
    *,
    windows: Sequence[Window] = (),
    beams: BeamModel | None = None,
    on_step: StepHook | None = None,
) -> SimResult:
    """Runs ``requests`` (sorted by arrival, ids 0 to R-1 in order) until all are finished or refused.

    Args:
        requests: the workload.
        scheduler: a fresh scheduler over the memory of the system to study.
        cost: the step-time model.
        windows: time windows to average waste over.
        beams: stands in for the scores of a beam search.
        on_step: called after each executed plan with (start, end, plan, result, outcome), for recording.

    Raises:
        ValueError: requests out of order, or one that never arrives.
    """
    arrivals = [request.arrival_s for request in requests]
    num_requests = len(requests)
    require(
        all(a <= b for a, b in zip(arrivals, arrivals[1:], strict=False)),
        "requests must be sorted by arrival_s; sort the workload first",
    )
    require(
        not arrivals or arrivals[-1] < NEVER,
        f"every request must arrive, request {num_requests - 1} has arrival_s=inf; leave it out",
    )
    # Results are columns by request, so an id is the index of its row.
    require(
        all(request.request_id == index for index, request in enumerate(requests)),
        f"request ids must be 0 to {num_requests - 1} in order; number the requests after sorting them",
    )
    first_token = [NEVER] * num_requests
    finish = [NEVER] * num_requests
    output = [0] * num_requests
    preemptions = [0] * num_requests
    rejected: list[tuple[int, str]] = []
    meters = tuple(WasteMeter() for _ in windows)
    edges = sorted({edge for w in windows for edge in (w.start_s, w.end_s)} | {NEVER})
    executor = CostExecutor(cost, beams)
    memory, page_size = scheduler.memory, scheduler.memory.page_size
    schedule, complete, execute = scheduler.schedule, scheduler.complete, executor.execute
    submitted, edge = 0, 0
    steps = tokens = 0
    active: list[WasteMeter] = []
    next_arrival = arrivals[0] if arrivals else NEVER

    while True:
        clock = executor.clock_s
        while next_arrival <= clock:
            request = requests[submitted]
            try:
                scheduler.submit(request)
                output[submitted] = min(request.max_tokens, scheduler.config.max_model_len - request.prompt_tokens)
            except RequestRejected as refusal:
                rejected.append((submitted, refusal.reason))
            submitted += 1
            next_arrival = arrivals[submitted] if submitted < num_requests else NEVER
        plan = schedule()
        if plan is None:
            if next_arrival == NEVER:
                break
            executor.clock_s = next_arrival
            continue
        if clock >= edges[edge]:
            while clock >= edges[edge]:
                edge += 1
            active = [m for m, w in zip(meters, windows, strict=True) if w.start_s <= clock < w.end_s]
        until = edges[edge]
        if plan.open_to_arrivals and next_arrival < until:
            until = next_arrival
        executor.until_s = until
        usage = scheduler.usage() if active else None
        growing = scheduler.num_growing if plan.decodes else 0
        result = execute(plan)
        if usage is not None:
            for meter in active:
                meter.add(
                    usage,
                    result.steps,
                    groups=scheduler.num_running,
                    growing=growing,
                    growth=plan.growth,
                    page_size=page_size,
                    absorbs=memory.absorbs,
                )
        outcome = complete(result)
        now = executor.clock_s
        steps += result.steps
        tokens += len(plan.decodes) * result.steps
        for event in plan.preempted:
            preemptions[event.request_id] += 1  # type: ignore[index]
        for request_id in outcome.first_tokens:
            first_token[request_id] = now  # type: ignore[index]
        for request_id in outcome.finished:
            finish[request_id] = now  # type: ignore[index]
        if on_step is not None:
            on_step(clock, now, plan, result, outcome)

    def times(values: list[float]) -> np.ndarray:
        array = np.array(values, dtype=np.float64)
        array[array == NEVER] = np.nan
        return array

    return SimResult(
        arrival_s=np.array(arrivals, dtype=np.float64),
        first_token_s=times(first_token),
        finish_s=times(finish),
        output_tokens=np.array(output, dtype=np.int64),
        preemptions=np.array(preemptions, dtype=np.int64),
        rejected=tuple(rejected),
        steps=steps,
        tokens=tokens,
        end_s=executor.clock_s,
        meters=meters,
        counters=scheduler.counters,
    )
