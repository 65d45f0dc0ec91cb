"""The scheduler: first come, first served, one token budget, all sequences of a request together.

One rule schedules everything: a group has tokens that are known and tokens that are computed; a step hands
out a token budget so that the second catches up with the first. Running groups come first, then swapped
ones, then waiting ones; the group that came last is the first to be preempted (paper section 4.5).

The scheduler holds no arrays and reads no clock. It makes a :class:`StepPlan`; whoever executes the plan
answers with a :class:`StepResult`; :meth:`Scheduler.complete` takes it in. A device and a cost model drive
the same object.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from paxkv.config import SchedulerConfig
from paxkv.metrics import Counters
from paxkv.request import Request
from paxkv.sched import beam, hashing
from paxkv.sched.check import check_scheduler
from paxkv.sched.draft import Draft
from paxkv.sched.events import RequestRejected, SchedulerStalled
from paxkv.sched.memory import Copies, Memory
from paxkv.sched.plan import StepOutcome, StepPlan, StepResult
from paxkv.sched.roster import Roster
from paxkv.sched.sequence import Group
from paxkv.sched.waste import Usage


class ForcePolicy(Protocol):
    """Makes rare paths happen at chosen steps (tests)."""

    def preempt(self, step: int, running: list[Group]) -> list[tuple[Group, str]]:
        """Groups to preempt before this step, each with ``recompute`` or ``swap``."""
        ...

    def evict(self, step: int) -> int:
        """Idle cached pages to give up before this step."""
        ...


class Scheduler:
    """Decides who runs.

    Args:
        config: limits and choices.
        memory: the paged, reserved or static memory to schedule over.
        force: makes preemptions and evictions happen at chosen steps; plans then cover one step each.
        check: verify conservation after every plan and completion (slow).

    Attributes:
        tick: the decode clock; every decoding sequence gains one token per tick.
        step: steps completed.
        roster: which group is where; to look at, not to change.
        counters: prefix queries and hits, preemptions, recomputed tokens, swapped pages.
    """

    def __init__(
        self, config: SchedulerConfig, memory: Memory, *, force: ForcePolicy | None = None, check: bool = False
    ) -> None:
        self.config = config
        self.memory = memory
        self.roster = Roster(memory)
        self.counters = Counters()
        self.tick = 0
        self.step = 0
        self._force = force
        self._check = check
        self._next_order = 0
        self._next_seq_id = 0
        self._plan: StepPlan | None = None
        self._committed = 0  # steps of the plan whose slots were given beforehand
        self._copies: Copies = []  # that the next plan must make
        self._released: list[int | str] = []

    # --- requests --------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Takes a request into the waiting queue.

        Raises:
            RequestRejected: it can never be served; the message has the numbers. Nothing else changes.
        """
        limit = self.config.max_model_len
        if request.request_id in self.roster.groups:
            raise RequestRejected(request.request_id, "a request with this id is in flight; choose another id")
        if request.prompt_tokens >= limit:
            raise RequestRejected(
                request.request_id,
                f"the prompt has {request.prompt_tokens} tokens and max_model_len is {limit}, "
                "which leaves no room for an output token; shorten the prompt",
            )
        if request.num_seqs > self.config.max_step_seqs:
            raise RequestRejected(
                request.request_id,
                f"it has {request.num_seqs} sequences, max_num_seqs is {self.config.max_num_seqs} and "
                f"max_num_batched_tokens is {self.config.max_num_batched_tokens}; ask for fewer",
            )
        if request.prompt_ids is not None and not hashing.can_hash(request.prompt_ids):
            raise RequestRejected(request.request_id, "prompt_ids must be whole numbers of at most 64 bits; mend them")
        target = min(request.max_tokens, limit - request.prompt_tokens)
        reason = self.memory.never_fits(request, target)
        if reason is not None:
            raise RequestRejected(request.request_id, reason)
        group = Group(request, self._next_order, self._next_seq_id)
        group.target = target
        self._next_order += 1
        self._next_seq_id += request.num_seqs
        self.roster.submit(group)

    def abort(self, request_id: int | str) -> bool:
        """Drops a request wherever it is and frees what it holds. False if it is unknown or finished."""
        self._require_no_plan("abort")
        group = self.roster.groups.get(request_id)
        if group is None:
            return False
        self.roster.drop(group, self.tick)
        self.counters = self.counters.add(failed=1)
        return True

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.roster.groups)

    @property
    def num_waiting(self) -> int:
        """Groups in the waiting queue."""
        return len(self.roster.waiting)

    @property
    def num_running(self) -> int:
        """Groups that hold device memory and take part in steps."""
        return len(self.roster.running)

    @property
    def num_swapped(self) -> int:
        """Groups whose pages are in the host pool."""
        return len(self.roster.swapped)

    def group(self, request_id: int | str) -> Group:
        """The group of a request in flight."""
        return self.roster.groups[request_id]

    def table(self, seq_id: int) -> list[int]:
        """The block table of a sequence in the current plan."""
        group = self.roster.decoding.get(seq_id)
        if group is None:
            group = next(g for g in self.roster.prefilling if any(s.seq_id == seq_id for s in g.seqs))
        return next(s.table for s in group.seqs if s.seq_id == seq_id)

    # --- planning --------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Makes the next plan, or returns None when there is no request.

        Raises:
            SchedulerStalled: requests wait and nothing could be scheduled.
        """
        self._require_no_plan("schedule")
        roster, memory, tick = self.roster, self.memory, self.tick
        if not roster.groups:
            return None
        draft = Draft(self.config, roster, tick, self._copies, self.counters)
        self._copies = []
        if self._force is not None:
            memory.evict(self._force.evict(self.step))
            for victim, mode in self._force.preempt(self.step, [group for group in roster.running if not group.held]):
                draft.preempt(victim, "forced", mode)

        prompts_only = self.config.step_kind == "prompts_only"
        if prompts_only and not draft.preempted:
            draft.admit(draft.continue_prefills(0))
        decode = bool(roster.decoding) and not (prompts_only and draft.prefills)
        if decode:
            draft.grow()
        if roster.swapped and not draft.swap_out and not (prompts_only and draft.prefills):
            draft.bring_back()
        if not prompts_only:
            used = len(roster.decoding)
            draft.admit(used + draft.continue_prefills(used))
        self.counters = draft.counters
        self._plan = self._plan_of(draft, decode or bool(draft.swap_in))
        if self._check:
            check_scheduler(self, tick + bool(self._plan.decodes))
        return self._plan

    def _plan_of(self, draft: Draft, decode: bool) -> StepPlan:
        """What was drafted, as a plan; ``decode``: whether decoding sequences have got their slots."""
        roster, memory, tick = self.roster, self.memory, self.tick
        decodes = tuple(roster.decoding) if decode else ()
        if not (draft.prefills or decodes or draft.preempted):
            raise SchedulerStalled(f"requests wait and none could be scheduled ({draft.blocked}):\n{self.dump()}")
        beams = [*(roster.beams if decodes else ()), *draft.resuming_beams()]
        horizon, growth = 1, ()
        if decodes and not (roster.prefilling or draft.preempted or draft.swap_in or roster.beams or self._force):
            steps = min(roster.steps_to_deadline(tick), self.config.max_horizon)
            horizon, growth = memory.horizon(tick, steps, roster.width)
        return StepPlan(
            step=self.step,
            prefills=tuple(draft.prefills),
            decodes=decodes,
            copies=tuple(draft.copies),
            swap_out=tuple(draft.swap_out),
            swap_in=tuple(draft.swap_in),
            admitted=tuple(draft.admitted),
            preempted=tuple(draft.preempted.values()),
            blocked=draft.blocked,
            horizon=horizon,
            open_to_arrivals=not roster.waiting and not roster.swapped,
            num_groups=(roster.num_decoding_groups if decodes else 0) + draft.num_prefill_groups,
            context_tokens=roster.decode_tokens(tick) if decodes else 0,
            context_pages=memory.context_pages() if decodes else 0,
            growth=growth,
            beams=tuple((group.request.request_id, len(group.seqs)) for group in beams),
        )

    def commit(self, steps: int) -> None:
        """Gives the slots of the first ``steps`` steps of the current plan now.

        For an executor that runs several steps in one dispatch and needs whole block tables beforehand. The plan must
        then be completed with exactly that many steps.

        Raises:
            ValueError: no plan is open, it was committed before, or its horizon is shorter.
        """
        plan = self._plan
        if plan is None or self._committed:
            raise ValueError("commit needs a plan that was not committed yet; call schedule first")
        if not 1 <= steps <= plan.horizon:
            raise ValueError(f"a commitment must cover 1 to {plan.horizon} steps, got {steps}")
        self._committed = steps
        if steps > 1:
            self.memory.advance(self.tick, steps)

    # --- completion ------------------------------------------------------------------------------

    def complete(self, result: StepResult) -> StepOutcome:
        """Takes in what came of the current plan.

        Raises:
            ValueError: no plan is open, or the result does not fit it. The state is then unchanged.
        """
        plan = self._plan
        if plan is None:
            raise ValueError("complete needs a plan; call schedule first")
        if not 1 <= result.steps <= plan.horizon:
            raise ValueError(f"a result must cover 1 to {plan.horizon} steps, got {result.steps}")
        if self._committed not in (0, result.steps):
            raise ValueError(f"{self._committed} steps were committed, the result covers {result.steps}")
        parents = self._parents_of(plan, result)
        if result.ended:
            self._require_tokens(plan, result.ended)
        committed, self._plan, self._committed = self._committed, None, 0
        self._released = []
        first_tokens: list[int | str] = []
        if plan.decodes:
            if result.steps > 1 and not committed:
                self.memory.advance(self.tick, result.steps)
            self.tick += result.steps
            if result.tokens is not None:
                self._record_tokens(plan.decodes, result)
        if plan.prefills:
            self._complete_prefills(plan, result, first_tokens)
        for group, chosen in parents:
            self._copies += self.memory.reorder(group, chosen, group.known_at(self.tick) - 1)
        self.step += result.steps
        if result.ended:
            self._end_sequences(result.ended)
        self._finish_due()
        if self._check:
            check_scheduler(self, self.tick)
        return StepOutcome(tuple(first_tokens), tuple(self._released))

    def learn(self, request_id: int | str, ids: Iterable[int]) -> None:
        """Takes the next output ids of a request of one sequence, where the results of its steps did not carry them.

        An executor that keeps sampled tokens on the device knows them a step late. Pages become findable by content
        as far as their tokens are known; a request that is gone, or has several sequences, is left alone.

        Raises:
            ValueError: more ids than the sequence has tokens.
        """
        group = self.roster.groups.get(request_id)
        if group is None or group.ids is None or group.request.num_seqs > 1:
            return
        known = group.known_at(self.tick) - group.padding
        new = list(ids)
        if len(group.ids) + len(new) > known:
            raise ValueError(
                f"request {request_id!r} has {known} tokens, {len(group.ids)} of them with ids; got {len(new)} more"
            )
        group.ids += new
        if group.decoding and not group.held:
            self.memory.publish(group, min(len(group.ids), known - 1))

    def end(self, request_id: int | str) -> tuple[int | str, ...]:
        """Finishes a request of one sequence that produced an end token in an earlier step, wherever it is now.

        Returns:
            The requests that this finishes: the whole batch, where it is the last of a static one; none if it waits
            for its batch, is unknown or has finished already, as when that token was its last.
        """
        self._require_no_plan("end")
        group = self.roster.groups.get(request_id)
        if group is None or group.held:
            return ()
        if group.request.num_seqs > 1:
            raise ValueError(
                f"request {request_id!r} has {group.request.num_seqs} sequences; name them in a StepResult"
            )
        self._released = []
        (self._retire if group.decoding else self._finish)(group)
        return tuple(self._released)

    def _parents_of(self, plan: StepPlan, result: StepResult) -> list[tuple[Group, tuple[int, ...]]]:
        chosen = []
        for request_id, width in plan.beams:
            if result.parents is None or request_id not in result.parents:
                raise ValueError(f"the result must name the parents of the {width} beams of request {request_id!r}")
            chosen.append((self.roster.groups[request_id], beam.place(result.parents[request_id], width)))
        return chosen

    def _require_tokens(self, plan: StepPlan, ended: tuple[int, ...]) -> None:
        """Only a sequence that gets a token can end, and only once."""
        gets = set(plan.decodes)
        for group in self.roster.prefilling:
            if group.completes(plan.prefills):
                gets.update(seq.seq_id for seq in group.seqs)
        if len(set(ended)) < len(ended) or not gets.issuperset(ended):
            raise ValueError(f"sequences that end must get a token and end once: {ended} ended, {sorted(gets)} get one")

    def _complete_prefills(self, plan: StepPlan, result: StepResult, first_tokens: list[int | str]) -> None:
        done = {chunk.seq_id: chunk.start + chunk.count for chunk in plan.prefills}
        for group in list(self.roster.prefilling):
            jobs = []
            touched = False
            for job in group.jobs:
                if job[0].seq_id in done:
                    job[1], touched = done[job[0].seq_id], True
                if job[1] < job[2]:
                    jobs.append(job)
            if touched:
                self.memory.publish(group, jobs[0][1] if jobs else group.known)
            group.jobs = jobs
            if jobs or not touched:
                continue
            del self.roster.prefilling[group]
            if group.generated_at(self.tick) == 0:
                first_tokens.append(group.request.request_id)
                if len(group.seqs) > 1:
                    self._copies += self.memory.fork(group)
            group.known += 1
            if result.tokens is not None:
                group.learn(result.tokens.get(group.seqs[0].seq_id, ()), group.known)
            self.roster.start(group, self.tick)

    def _record_tokens(self, decodes: tuple[int, ...], result: StepResult) -> None:
        """Output ids of groups of one sequence; their pages become findable as they fill."""
        assert result.tokens is not None
        for seq_id in decodes:
            group = self.roster.decoding[seq_id]
            known = group.known_at(self.tick)
            if group.learn(result.tokens.get(seq_id, ()), known):
                self.memory.publish(group, known - 1)

    def _end_sequences(self, ended: tuple[int, ...]) -> None:
        """Sequences that met an end token leave; a group ends with its last one."""
        for seq_id in ended:
            group = self.roster.decoding.get(seq_id)
            if group is None or group.held:  # the row of a static batch goes on after its last token
                continue
            if len(group.seqs) == 1:
                self._retire(group)
            else:
                self.roster.drop_sequence(group, seq_id, self.tick)

    def _finish_due(self) -> None:
        """Groups that have reached their length limit end, or wait for their static batch."""
        for group in self.roster.pop_due(self.tick):
            self._retire(group)
        if self.memory.num_held == len(self.roster.decoding) and not self.roster.prefilling:
            self._finish_held()  # nothing, unless the last active group of a batch was aborted

    def _retire(self, group: Group) -> None:
        """The group has all its tokens: it ends, or waits for its static batch."""
        if self.memory.hold(group, self.tick):
            self.roster.hold(group)
        elif self.memory.num_held:
            group.held = True
            self._finish_held()
        else:
            self._finish(group)

    def _finish_held(self) -> None:
        for group in [group for group in self.roster.running if group.held]:
            self._finish(group)

    def _finish(self, group: Group) -> None:
        self.roster.drop(group, self.tick)
        self.counters = self.counters.add(finished=1)
        self._released.append(group.request.request_id)

    # --- inspection ------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """The pool by use in the first step of the current plan (or now, between plans)."""
        plan, roster = self._plan, self.roster
        decode_tokens = roster.decode_tokens(self.tick)
        if plan is None or not plan.decodes:
            decode_tokens -= len(roster.decoding)  # the newest token of each has no slot yet
        tokens, narrow, wide = decode_tokens, 0, 0
        if roster.prefilling:
            done = {c.seq_id: c.start + c.count for c in plan.prefills} if plan is not None else {}
            for group in roster.prefilling:
                tokens += group.known * len(group.seqs)
                common = group.common_tokens(self.memory.page_size) if len(group.seqs) > 1 else 0
                for seq, start, end in group.jobs:
                    position = done[seq.seq_id] if seq.seq_id in done else start
                    shared = max(0, common - position)
                    wide += shared
                    narrow += min(end - position, group.known - group.padding) - shared  # padding is no token
        return self.memory.usage(self.tick, tokens, (narrow, wide))

    @property
    def num_growing(self) -> int:
        """Sequences that gain a live token per step."""
        return len(self.roster.decoding) - self.memory.num_held

    def dump(self) -> str:
        """The state in words, for error messages."""
        memory = self.memory
        free = f"free pages {memory.num_free_pages} of {memory.num_pages}"
        return f"step {self.step}, tick {self.tick}, {free}\n{self.roster}"

    def groups(self) -> list[Group]:
        """All groups in flight."""
        return list(self.roster.groups.values())

    def _require_no_plan(self, call: str) -> None:
        if self._plan is not None:
            raise ValueError(f"{call} needs the current plan to be completed first; call complete with its result")
