"""The values that pass between the scheduler and whoever runs its steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Protocol

from paxkv.sched.events import Admitted, Blocked, Preempted


@dataclasses.dataclass(frozen=True, slots=True)
class Chunk:
    """Prompt tokens of one sequence to compute in this step.

    Attributes:
        seq_id: whose keys and values are written.
        start: position of the first token of the chunk.
        count: tokens computed.
        last: whether the sequence's prompt is complete after this chunk, so that a token can be sampled.
    """

    seq_id: int
    start: int
    count: int
    last: bool


@dataclasses.dataclass(frozen=True, slots=True)
class StepPlan:
    """One scheduling decision.

    Attributes:
        step: index of the first step that the plan covers.
        prefills: prompt chunks.
        decodes: ids of the sequences that get one token per step.
        swap_out: (device page, host page) pairs to copy first: what follows may write these device pages.
        swap_in: (host page, device page) pairs to copy next.
        copies: page copies (source, destination) to make last before the step, for copy-on-write.
        admitted, preempted: what changed, with reasons.
        blocked: why the head of the waiting queue stays there, or None when nothing waits.
        horizon: the most steps that can run before a new decision is needed. It ends where a sequence
            reaches its length limit or a can-append test would fail. An executor may stop earlier.
        open_to_arrivals: whether a request that arrives could be admitted before the horizon ends.
        num_groups: request groups in the step.
        context_tokens: tokens whose keys and values the decodes of the first step read.
        context_pages: pages of those tokens, summed over sequences.
        growth: pages allocated by the second and later steps of the horizon, cyclic with the page size.
        beams: (request id, width) of the groups whose parents the executor must choose: those that decode, and
            those whose recomputation ends in this step.
    """

    step: int
    prefills: tuple[Chunk, ...]
    decodes: tuple[int, ...]
    swap_out: tuple[tuple[int, int], ...]
    swap_in: tuple[tuple[int, int], ...]
    copies: tuple[tuple[int, int], ...]
    admitted: tuple[Admitted, ...]
    preempted: tuple[Preempted, ...]
    blocked: Blocked | None
    horizon: int
    open_to_arrivals: bool
    num_groups: int
    context_tokens: int
    context_pages: int
    growth: tuple[int, ...]
    beams: tuple[tuple[int | str, int], ...]

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens computed in the step."""
        return sum(chunk.count for chunk in self.prefills)

    @property
    def num_new(self) -> int:
        """Requests that the plan admits for the first time."""
        return sum(not admitted.resumed for admitted in self.admitted)

    def tokens_given(self, steps: int) -> int:
        """Output tokens that the plan gives in ``steps`` steps: one per decode and step, one at the end of a prompt."""
        return len(self.decodes) * steps + sum(chunk.last for chunk in self.prefills)


@dataclasses.dataclass(frozen=True, slots=True)
class StepResult:
    """What came of a plan.

    Attributes:
        steps: how many of the plan's steps ran, 1 to its horizon.
        ended: sequences that produced an end token in the last of them.
        tokens: per sequence the sampled ids, when they are known on the host.
        parents: per beam group, the index of the parent of each new beam.
    """

    steps: int = 1
    ended: tuple[int, ...] = ()
    tokens: Mapping[int, tuple[int, ...]] | None = None
    parents: Mapping[int | str, tuple[int, ...]] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class StepOutcome:
    """What a completed plan changed for the requests.

    Attributes:
        first_tokens: requests whose first token was produced by the plan's first step.
        finished: requests that ended with the plan's last step.
    """

    first_tokens: tuple[int | str, ...]
    finished: tuple[int | str, ...]


class Executor(Protocol):
    """Runs plans: on a device, or on a cost model's clock."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Runs between 1 and ``plan.horizon`` steps."""
        ...
