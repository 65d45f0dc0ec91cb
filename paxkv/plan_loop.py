"""The loop of an engine: one plan after the other is scheduled, dispatched and read.

::

    schedule ──▶ commit ──▶ build inputs ──▶ dispatch ──▶ complete ─┐        (host)
                                               │                    └─▶ next plan, while the device runs
                                               └─ tokens stay on the device; the host reads them a step later

Reading a step late costs nothing where the next plan does not depend on the tokens. Where it does (beams, several
sequences of a request, penalties) the loop waits. A sequence whose end token is seen late has computed one dispatch
too many; what it sampled after its end is dropped.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterable

from paxkv.inflight import InFlight
from paxkv.intake import take_tokens
from paxkv.output import Live
from paxkv.sched.plan import StepOutcome, StepPlan, StepResult
from paxkv.sched.scheduler import Scheduler
from paxkv.steps.executor import DeviceExecutor, Ticket
from paxkv.steps.step import StepOutputs

StepHook = Callable[[float, float, StepPlan, StepResult, StepOutcome], None]


@dataclasses.dataclass
class EngineStats:
    """Sums since the engine was made.

    Attributes:
        dispatches, steps: dispatches made and steps run in them.
        prompt_tokens, output_tokens: computed prompt tokens, and output tokens given to requests.
        host_s: host seconds of planning, building and reading, waits for the device left out.
        wait_s: host seconds spent waiting for tokens.
    """

    dispatches: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    host_s: float = 0.0
    wait_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Hooks:
    """What is told to whoever watches.

    Attributes:
        clock: seconds.
        on_plan: called with each plan before it runs.
        on_step: called with (start, end, plan, result, outcome) after each plan's tokens were read.
    """

    clock: Callable[[], float] = time.perf_counter
    on_plan: Callable[[StepPlan], None] | None = None
    on_step: StepHook | None = None


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A dispatched plan and what completing it said."""

    ticket: Ticket
    outcome: StepOutcome
    result: StepResult


class PlanLoop:
    """Carries out the scheduler's plans on the device.

    Args:
        scheduler: makes the plans.
        executor: dispatches them.
        inflight: the requests that they are for.
        stats: sums that are kept up.
        overlap: make the next plan while the device runs, where it allows that.
        hooks: clock and watchers.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: DeviceExecutor,
        inflight: InFlight,
        stats: EngineStats,
        *,
        overlap: bool,
        hooks: Hooks,
    ) -> None:
        self.scheduler, self.executor, self.inflight, self.stats = scheduler, executor, inflight, stats
        self._overlap, self._hooks = overlap, hooks
        self._finds_content = scheduler.memory.finds_content
        self._flight: _Flight | None = None
        self._fetched = False
        self._late_ends: list[int | str] = []

    def advance(self) -> None:
        """Carries out one plan, or reads what is left if there is nothing to plan."""
        begin, waited = self._hooks.clock(), self.stats.wait_s
        plan = self.scheduler.schedule()
        if plan is None:
            self._land()
        else:
            self._carry_out(plan)
        self.stats.host_s += self._hooks.clock() - begin - (self.stats.wait_s - waited)

    def _carry_out(self, plan: StepPlan) -> None:
        scheduler, inflight = self.scheduler, self.inflight
        if self._hooks.on_plan is not None:
            self._hooks.on_plan(plan)
        self._apply_admissions(plan)
        steps = self._steps_of(plan)
        scheduler.commit(steps)
        if self._flight is not None and self._needs_tokens(plan):
            self._read()
        seqs = itertools.chain(plan.decodes, (chunk.seq_id for chunk in plan.prefills))
        # Rows that a static batch keeps after their end belong to nobody.
        lives = {id(live): live for live in map(inflight.owner.get, seqs) if live is not None}.values()
        tops = any(live.wants_tops for live in lives)
        for lane in map(inflight.lanes.__getitem__, plan.decodes):
            if not lane.done:
                inflight.take_place(lane)
        ticket = self.executor.dispatch(
            plan, inflight.lanes, steps, siblings=inflight.siblings, tops=tops, clock=self._hooks.clock
        )
        self.stats.dispatches += 1
        self.stats.steps += steps
        self.stats.prompt_tokens += plan.prefill_tokens
        if ticket.work is not None:
            for lane in ticket.work.sampled:
                lane.known += steps
        self._land()
        if self._must_wait(lives):
            self._run_now(ticket)
        else:
            result = StepResult(steps)
            self._flight, self._fetched = _Flight(ticket, scheduler.complete(result), result), False
        self._apply_ends()

    def _apply_admissions(self, plan: StepPlan) -> None:
        """What entering and being preempted mean for the lanes of a request."""
        inflight = self.inflight
        for admitted in plan.admitted:
            live = inflight.live[admitted.request_id]
            if not admitted.resumed:
                live.cached_tokens = admitted.cached_tokens
            for item in live.transcripts:
                item.lane.padding = live.group.padding
        for preempted in plan.preempted:
            live = inflight.live[preempted.request_id]
            for item in live.transcripts:
                inflight.free_place(item.lane)
                item.lane.held = None
                if live.wide:
                    # Some of its sequences may have sampled while others were still being computed: they will again.
                    item.lane.known = live.group.known

    def _steps_of(self, plan: StepPlan) -> int:
        if plan.horizon == 1:
            return 1
        if any(self.inflight.lanes[seq_id].variant == "full" for seq_id in plan.decodes):
            return 1
        return min(plan.horizon, self.executor.max_steps)

    def _needs_tokens(self, plan: StepPlan) -> bool:
        """Whether the plan computes tokens whose ids the host has not read yet."""
        lanes = self.inflight.lanes
        for chunk in plan.prefills:
            lane = lanes[chunk.seq_id]
            if chunk.start + chunk.count - lane.padding > len(lane.ids):
                return True
        return any(
            not (lane.fetched or lane.done) and (lane.slot < 0 or lane.variant == "full")
            for lane in map(lanes.__getitem__, plan.decodes)
        )

    def _must_wait(self, lives: Iterable[Live]) -> bool:
        """Whether the plan after the one for these requests needs to know its tokens."""
        if not self._overlap or any(live.wide or live.transcripts[0].lane.variant == "full" for live in lives):
            return True
        if self._finds_content:
            # The last pages of a sequence are found by content only if its ids are known before it leaves.
            return any(
                item.lane.known - item.lane.prompt_len >= live.target for live in lives for item in live.transcripts
            )
        return False

    # --- reading ---------------------------------------------------------------------------------

    def _run_now(self, ticket: Ticket) -> None:
        """Completes a plan with its tokens in hand: what ended, and which beams continue which."""
        outputs = self._wait(ticket)
        intake = take_tokens(ticket, outputs, self.inflight.owner)
        self.stats.output_tokens += intake.tokens
        ended = self.inflight.due_ends(ticket.plan, intake.ended)
        tokens = self._sampled_ids(ticket, outputs)
        result = StepResult(ticket.num_steps, ended=tuple(ended), tokens=tokens, parents=intake.parents)
        self._finish(ticket, result, self.scheduler.complete(result))

    def _land(self) -> None:
        """Reads the tokens of the dispatch before, and hands out what they changed."""
        flight = self._flight
        if flight is None:
            return
        if not self._fetched:
            self._read()
        self._flight = None
        self._finish(flight.ticket, flight.result, flight.outcome)

    def _read(self) -> None:
        flight = self._flight
        assert flight is not None
        outputs = self._wait(flight.ticket)
        intake = take_tokens(flight.ticket, outputs, self.inflight.owner)
        self.stats.output_tokens += intake.tokens
        self._learn(flight.ticket)
        self._late_ends += [self.inflight.owner[seq_id].request_id for seq_id in intake.ended]
        self._fetched = True

    def _apply_ends(self) -> None:
        """Sequences whose end token was read late leave the scheduler now that no plan is open."""
        ends, self._late_ends = self._late_ends, []
        for request_id in ends:
            self.scheduler.end(request_id)
        if len(self.inflight.lanes) > 2 * len(self.inflight.owner) + 64:
            self.inflight.keep_lanes(seq.seq_id for group in self.scheduler.groups() for seq in group.seqs)

    def _wait(self, ticket: Ticket) -> StepOutputs | None:
        begin = self._hooks.clock()
        outputs = self.executor.fetch(ticket)
        self.stats.wait_s += self._hooks.clock() - begin
        return outputs

    def _sampled_ids(self, ticket: Ticket, outputs: StepOutputs | None) -> dict[int, tuple[int, ...]] | None:
        """Every token of the dispatch, those behind an end too: their keys and values are in the pages."""
        if ticket.work is None or outputs is None or not self._finds_content:
            return None
        rows = outputs.tokens.T.tolist()
        return {lane.sequence.seq_id: tuple(rows[row]) for row, lane in enumerate(ticket.work.sampled)}

    def _learn(self, ticket: Ticket) -> None:
        """Tells the scheduler the ids of requests of one sequence, so that their pages are found by content."""
        if ticket.work is None or not self._finds_content:
            return
        for lane in ticket.work.sampled:
            live = self.inflight.owner.get(lane.sequence.seq_id)
            if live is None or live.wide:
                continue
            group = live.group
            if group.ids is not None:
                self.scheduler.learn(live.request_id, lane.ids[len(group.ids) :])

    def _finish(self, ticket: Ticket, result: StepResult, outcome: StepOutcome) -> None:
        """Hands out what a dispatch changed and closes the requests that have all their tokens."""
        now = self._hooks.clock()
        if ticket.work is not None:
            owner = self.inflight.owner
            for live in dict.fromkeys(owner.get(lane.sequence.seq_id) for lane in ticket.work.sampled):
                if live is not None:
                    self.inflight.report(live, now)
        if self._hooks.on_step is not None:
            self._hooks.on_step(ticket.start_s, now, ticket.plan, result, outcome)
