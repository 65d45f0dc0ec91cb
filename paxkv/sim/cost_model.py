"""What a step costs: a roofline with overheads, and the executor that keeps its clock.

One step takes::

    floor + max(weight bytes / bandwidth, FLOPs of all tokens / rate)
          + exchange of all tokens' activations between devices
          + per-sequence and per-group overhead
          + KV bytes read / bandwidth + pages read * cost per page
          + page copies and the calls of swaps

and no less than the swapped bytes take over the host link. The maximum, not the sum, of reading the weights and
computing: a step does both at once. Swapped bytes cross the link while the step computes, and only what they take
longer is added; the calls that start the copies are not hidden. The constants are calibrated once, on points that
the report names.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Protocol

from paxkv.config import require
from paxkv.sched.plan import StepPlan, StepResult


@dataclasses.dataclass(frozen=True)
class CostModel:
    """Seconds per part of a step, for one model on one set of devices.

    Attributes:
        floor_s: what every step costs, whatever it holds.
        weights_s: reading all weights once.
        token_s: computing one token (FLOPs of a token / effective rate).
        exchange_token_s: summing one token's activations over the devices of tensor parallelism.
        sequence_s: overhead of one sequence in the step.
        group_s: overhead of one request group in the step.
        kv_token_s: reading the keys and values of one token of context.
        page_read_s: overhead of reading one page (all layers).
        page_copy_s: copying one page inside the device.
        swap_out_page_s: the calls that move one page to the host.
        swap_in_page_s: the calls that move one page back.
        swap_out_link_s: the bytes of one page on their way to the host.
        swap_in_link_s: the bytes of one page on their way back.
    """

    floor_s: float
    weights_s: float
    token_s: float
    exchange_token_s: float = 0.0
    sequence_s: float = 0.0
    group_s: float = 0.0
    kv_token_s: float = 0.0
    page_read_s: float = 0.0
    page_copy_s: float = 0.0
    swap_out_page_s: float = 0.0
    swap_in_page_s: float = 0.0
    swap_out_link_s: float = 0.0
    swap_in_link_s: float = 0.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            require(
                value >= 0 and value < float("inf"),
                f"CostModel.{field.name} is a time in seconds, zero or more and finite, got {value!r}",
            )

    def fixed_s(self, plan: StepPlan) -> float:
        """The part of the plan's first step that does not grow with the context."""
        decodes = len(plan.decodes)
        tokens = decodes
        sequences = decodes
        for chunk in plan.prefills:
            tokens += chunk.count
            sequences += 1
        compute = self.token_s * tokens
        return (
            self.floor_s
            + (compute if compute > self.weights_s else self.weights_s)
            + self.exchange_token_s * tokens
            + self.sequence_s * sequences
            + self.group_s * plan.num_groups
        )

    def transfer_s(self, plan: StepPlan) -> float:
        """Page copies and the calls of swaps that the plan makes before its first step."""
        return (
            self.page_copy_s * len(plan.copies)
            + self.swap_out_page_s * len(plan.swap_out)
            + self.swap_in_page_s * len(plan.swap_in)
        )

    def link_s(self, plan: StepPlan) -> float:
        """How long the plan's swapped bytes occupy the host link."""
        return self.swap_out_link_s * len(plan.swap_out) + self.swap_in_link_s * len(plan.swap_in)

    def step_s(self, plan: StepPlan) -> float:
        """The plan's first step, in seconds."""
        transfer, link = self.transfer_s(plan), self.link_s(plan)
        if not plan.decodes and not plan.prefills:
            return transfer + link
        step = (
            self.fixed_s(plan)
            + transfer
            + self.kv_token_s * plan.context_tokens
            + self.page_read_s * plan.context_pages
        )
        return step if link <= step - transfer else link + transfer


class BeamModel(Protocol):
    """Stands in for a model's scores: names the parents of a beam group's next tokens."""

    def parents(self, width: int) -> tuple[int, ...]:
        """``width`` parents in ``0..width - 1``."""
        ...


class UniformBeams:
    """Every new beam continues a parent drawn uniformly: no score is better than another.

    The neutral assumption: it has no parameter to fit. Figure 15's beam rows judge it.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def parents(self, width: int) -> tuple[int, ...]:
        draw = self._random.random
        return tuple(int(draw() * width) for _ in range(width))


class CostExecutor:
    """Executes plans by adding their cost to a clock.

    Args:
        cost: the step-time model.
        beams: names parents for beam groups.

    Attributes:
        clock_s: simulated seconds.
        until_s: a plan's horizon is left at the first step boundary at or after this time.
    """

    def __init__(self, cost: CostModel, beams: BeamModel | None = None) -> None:
        self.cost = cost
        self.clock_s = 0.0
        self.until_s = float("inf")
        self._beams = beams or UniformBeams()

    def execute(self, plan: StepPlan) -> StepResult:
        cost = self.cost
        horizon = plan.horizon
        if horizon == 1:
            self.clock_s += cost.step_s(plan)
            if not plan.beams:
                return ONE_STEP
            parents = self._beams.parents
            return StepResult(1, parents={request: parents(width) for request, width in plan.beams})
        # The same sums in the same order as step_s, so that the clock is bit-equal to single steps.
        fixed = cost.fixed_s(plan)
        first = fixed + cost.transfer_s(plan)
        kv, read = cost.kv_token_s, cost.page_read_s
        clock, until = self.clock_s, self.until_s
        tokens, pages, decodes = plan.context_tokens, plan.context_pages, len(plan.decodes)
        growth, cycle = plan.growth, len(plan.growth)
        clock += first + kv * tokens + read * pages
        steps = 1
        if cycle:
            while steps < horizon and clock < until:
                tokens += decodes
                pages += growth[(steps - 1) % cycle]
                clock += fixed + kv * tokens + read * pages
                steps += 1
        else:
            while steps < horizon and clock < until:
                tokens += decodes
                clock += fixed + kv * tokens + read * pages
                steps += 1
        self.clock_s = clock
        return StepResult(steps)


ONE_STEP = StepResult(1)
