"""The scheduler: first come, first served, one token budget, all sequences of a request together.

One rule schedules everything: a group has tokens that are known and tokens that are computed; a step hands
out a token budget so that the second catches up with the first. Running groups come first, then swapped
ones, then waiting ones; the group that came last is the first to be preempted (paper section 4.5).

The scheduler holds no arrays and reads no clock. It makes a :class:`StepPlan`; whoever executes the plan
answers with a :class:`StepResult`; :meth:`Scheduler.complete` takes it in. A device and a cost model drive
the same object.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from paxkv.config import SchedulerConfig
from paxkv.metrics import Counters
from paxkv.request import Request
from paxkv.sched import beam, hashing
from paxkv.sched.check import check_scheduler
from paxkv.sched.events import Admitted, Blocked, Miss, Preempted, RequestRejected, SchedulerStalled
from paxkv.sched.memory import Copies, Memory
from paxkv.sched.plan import Chunk, StepOutcome, StepPlan, StepResult
from paxkv.sched.preempt import choose_mode, tokens_lost
from paxkv.sched.sequence import Group, GroupState
from paxkv.sched.waste import Usage


def _requeue(queue: deque[Group], group: Group) -> None:
    """Puts a victim back into a queue kept in arrival order: nearly always at its head."""
    index = 0
    while index < len(queue) and queue[index].order < group.order:
        index += 1
    queue.insert(index, group)


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
        counters: prefix queries and hits, preemptions, recomputed tokens, swapped pages.
    """

    def __init__(
        self, config: SchedulerConfig, memory: Memory, *, force: ForcePolicy | None = None, check: bool = False
    ) -> None:
        self.config = config
        self.memory = memory
        self.counters = Counters()
        self.tick = 0
        self.step = 0
        self._force = force
        self._check = check
        self._groups: dict[int | str, Group] = {}
        self._waiting: deque[Group] = deque()
        self._swapped: deque[Group] = deque()
        self._running: dict[Group, None] = {}  # in arrival order
        self._prefilling: dict[Group, None] = {}
        self._decoding: dict[int, Group] = {}  # by sequence id
        self._beams: dict[Group, None] = {}
        self._wide: dict[Group, None] = {}  # running groups of several sequences
        self._deadlines: list[tuple[int, int, int, Group]] = []  # tick of the last token, order, epoch
        self._max_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)  # a decode is a token of the step
        self._num_seqs = 0
        self._num_decoding_groups = 0
        self._num_prefill_groups = 0
        self._offsets = 0  # sum of the decoding sequences' offsets
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
        if request.request_id in self._groups:
            raise RequestRejected(request.request_id, "a request with this id is in flight; choose another id")
        if request.prompt_tokens >= limit:
            raise RequestRejected(
                request.request_id,
                f"the prompt has {request.prompt_tokens} tokens and max_model_len is {limit}, "
                "which leaves no room for an output token; shorten the prompt",
            )
        if request.num_seqs > self._max_seqs:
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
        self._groups[request.request_id] = group
        self._waiting.append(group)

    def abort(self, request_id: int | str) -> bool:
        """Drops a request wherever it is and frees what it holds. False if it is unknown or finished."""
        self._require_no_plan("abort")
        group = self._groups.get(request_id)
        if group is None:
            return False
        self._drop(group)
        self.counters = self.counters.add(failed=1)
        return True

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._groups)

    @property
    def num_waiting(self) -> int:
        """Groups in the waiting queue."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Groups that hold device memory and take part in steps."""
        return len(self._running)

    @property
    def num_swapped(self) -> int:
        """Groups whose pages are in the host pool."""
        return len(self._swapped)

    def group(self, request_id: int | str) -> Group:
        """The group of a request in flight."""
        return self._groups[request_id]

    def table(self, seq_id: int) -> list[int]:
        """The block table of a sequence in the current plan."""
        if seq_id in self._decoding:
            group = self._decoding[seq_id]
        else:
            group = next(g for g in self._prefilling if any(s.seq_id == seq_id for s in g.seqs))
        return next(s.table for s in group.seqs if s.seq_id == seq_id)

    # --- planning --------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Makes the next plan, or returns None when there is no request.

        Raises:
            SchedulerStalled: requests wait and nothing could be scheduled.
        """
        self._require_no_plan("schedule")
        if not self._groups:
            return None
        preempted: dict[Group, Preempted] = {}
        swap_out: Copies = []
        swap_in: Copies = []
        copies, self._copies = self._copies, []
        prefills: list[Chunk] = []
        admitted: list[Admitted] = []
        blocked: Blocked | None = None
        memory, tick = self.memory, self.tick
        self._num_prefill_groups = 0
        if self._force is not None:
            memory.evict(self._force.evict(self.step))
            for victim, mode in self._force.preempt(self.step, [g for g in self._running if not g.held]):
                self._preempt(victim, "forced", preempted, swap_out, mode)

        prompts_only = self.config.step_kind == "prompts_only"
        if prompts_only and not preempted:
            used = self._continue_prefills(0, prefills)
            blocked = self._admit(used, preempted, prefills, admitted)
        decode = bool(self._decoding) and not (prompts_only and prefills)
        if decode:
            if memory.fits(tick, self._width()):
                copies += memory.grow(tick)
            else:
                copies += self._grow_tight(preempted, swap_out)
        if self._swapped and not swap_out and not (prompts_only and prefills):
            self._swap_in(preempted, swap_in, copies)
        if not prompts_only:
            used = len(self._decoding)
            used += self._continue_prefills(used, prefills)
            blocked = self._admit(used, preempted, prefills, admitted)
        decodes = tuple(self._decoding) if decode or swap_in else ()

        if not (prefills or decodes or preempted):
            raise SchedulerStalled(f"requests wait and none could be scheduled ({blocked}):\n{self.dump()}")
        beams = list(self._beams) if decodes and self._beams else []
        if prefills:
            beams += self._resuming_beams(prefills)
        horizon, growth = 1, ()
        if decodes and not (self._prefilling or preempted or swap_in or self._beams or self._force):
            horizon, growth = memory.horizon(tick, self._steps_to_deadline(), self._width())
        self._plan = StepPlan(
            step=self.step,
            prefills=tuple(prefills),
            decodes=decodes,
            copies=tuple(copies),
            swap_out=tuple(swap_out),
            swap_in=tuple(swap_in),
            admitted=tuple(admitted),
            preempted=tuple(preempted.values()),
            blocked=blocked,
            horizon=horizon,
            open_to_arrivals=not self._waiting and not self._swapped,
            num_groups=(self._num_decoding_groups if decodes else 0) + self._num_prefill_groups,
            context_tokens=self._offsets + len(self._decoding) * tick if decodes else 0,
            context_pages=memory.context_pages() if decodes else 0,
            growth=growth,
            beams=tuple((group.request.request_id, len(group.seqs)) for group in beams),
        )
        if self._check:
            check_scheduler(self, tick + bool(decodes))
        return self._plan

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

    def _resuming_beams(self, prefills: list[Chunk]) -> list[Group]:
        """Beam groups whose recomputation ends with these chunks: their next tokens compete again."""
        groups = [group for group in self._prefilling if group.request.beam and group.generated_at(self.tick) > 0]
        return [group for group in groups if group.completes(prefills)]

    def _width(self) -> int:
        return max((len(group.seqs) for group in self._wide), default=1) if self._wide else 1

    def _steps_to_deadline(self) -> int:
        deadlines = self._deadlines
        while deadlines and (deadlines[0][3].epoch != deadlines[0][2] or deadlines[0][3].held):
            heapq.heappop(deadlines)
        limit = deadlines[0][0] - self.tick if deadlines else 1  # none: the rest of a static batch was aborted
        return min(limit, self.config.max_horizon)

    def _grow_tight(self, preempted: dict[Group, Preempted], swap_out: Copies) -> Copies:
        """The paper's loop: each group in order must pass the can-append test, else the last one goes."""
        memory, tick, copies = self.memory, self.tick, []
        # A group that was swapped in may stand before one that arrived earlier and was recomputed.
        order = sorted(self._running, key=lambda group: group.order)
        i = 0
        while i < len(order):
            group = order[i]
            i += 1
            if not group.decoding:
                continue
            while not memory.can_append(group):
                if i == 1 and len(order) == 1 and memory.can_append_alone(group, tick):
                    break
                victim = order.pop()
                self._preempt(victim, "no free page for the next token of an earlier request", preempted, swap_out)
                if victim is group:
                    break
            if group.decoding:
                copies += memory.append(group, tick)
        return copies

    def _preempt(
        self,
        group: Group,
        cause: str,
        preempted: dict[Group, Preempted],
        swap_out: Copies,
        mode: str | None = None,
    ) -> None:
        memory = self.memory
        mode = mode or choose_mode(group, self.config.preemption)
        free = memory.num_free_pages
        was_decoding = group.decoding
        if was_decoding:
            self._stop(group)
        self._prefilling.pop(group, None)
        stored = group.known - 1 if was_decoding else group.known
        lost = tokens_lost(group, stored, memory.page_size)
        pairs = memory.swap_out(group, stored) if mode == "swap" and was_decoding else None
        if mode == "swap" and pairs is None:
            mode = "recompute"
            cause += "; the host pool has no room for its pages" if was_decoding else "; its prompt is not complete"
        if pairs is not None:
            swap_out += pairs
            group.state = GroupState.SWAPPED
            _requeue(self._swapped, group)
        else:
            memory.release(group, stored)
            group.jobs = []
            group.state = GroupState.WAITING
            _requeue(self._waiting, group)
        del self._running[group]
        self._wide.pop(group, None)
        self._num_seqs -= len(group.seqs)
        group.preemptions += 1
        self.counters = self.counters.add(preemptions=1, swapped_out_pages=len(pairs or ()))
        freed = memory.num_free_pages - free
        preempted[group] = Preempted(group.request.request_id, mode, cause, 0 if pairs else lost, freed)

    def _swap_in(self, preempted: dict[Group, Preempted], swap_in: Copies, copies: Copies) -> None:
        memory, tick = self.memory, self.tick
        while self._swapped:
            group = self._swapped[0]
            if group in preempted or self._num_seqs + len(group.seqs) > self._max_seqs:
                return
            if not memory.can_swap_in(group, tick, alone=not self._running):
                return
            self._swapped.popleft()
            pairs = memory.swap_in(group, group.known - 1)
            swap_in += pairs
            self.counters = self.counters.add(swapped_in_pages=len(pairs))
            self._enter(group)
            self._start(group)
            copies += memory.append(group, tick)

    def _continue_prefills(self, used: int, prefills: list[Chunk]) -> int:
        """Hands the budget that is left to prompts that were begun; returns the tokens given."""
        given = 0
        for group in self._prefilling:
            given += self._take_chunks(group, self.config.max_num_batched_tokens - used - given, prefills)
        return given

    def _take_chunks(self, group: Group, budget: int, prefills: list[Chunk]) -> int:
        given = 0
        for job in group.jobs:
            count = min(job[2] - job[1], budget - given)
            if count <= 0:
                break
            prefills.append(Chunk(job[0].seq_id, job[1], count, job[1] + count == job[2]))
            given += count
        self._num_prefill_groups += given > 0
        return given

    def _admit(
        self, used: int, preempted: dict[Group, Preempted], prefills: list[Chunk], admitted: list[Admitted]
    ) -> Blocked | None:
        """Admits waiting groups in order while budget, sequences and memory allow; says what stopped it."""
        config, memory, waiting = self.config, self.memory, self._waiting
        if not waiting:
            return None
        if self._swapped:
            return Blocked.SWAPPED_FIRST
        whole = config.step_kind != "chunked"
        budget_left = config.max_num_batched_tokens - used
        fresh: list[Group] = []
        blocked = None
        while waiting:
            group = waiting[0]
            budget = config.max_num_batched_tokens - used
            if group in preempted:
                blocked = Blocked.JUST_PREEMPTED
            elif self._num_seqs + len(group.seqs) > self._max_seqs:
                blocked = Blocked.SEQUENCES
            elif budget <= 0:
                blocked = Blocked.BUDGET
            else:
                # A group that could not be computed whole even in an empty step is cut into chunks.
                cut = not whole or (used == 0 and not self._running)
                blocked = memory.admit(group, alone=not self._running, budget=None if cut else budget)
            if blocked is not None:
                break
            waiting.popleft()
            fresh.append(group)
            resumed = group.preemptions > 0
            hit, miss = memory.lookup_result()
            if resumed:
                self.counters = self.counters.resume(sum(job[2] - job[1] for job in group.jobs))
            elif miss is not Miss.OFF:
                self.counters = self.counters.admit(group.known, hit)
            admitted.append(Admitted(group.request.request_id, hit, miss, resumed))
            self._enter(group)
            self._prefilling[group] = None
            used += sum(job[2] - job[1] for job in group.jobs)
        if fresh:
            memory.seal()
            for group in fresh:
                budget_left -= self._take_chunks(group, budget_left, prefills)
        return blocked

    # --- state -----------------------------------------------------------------------------------

    def _enter(self, group: Group) -> None:
        group.state = GroupState.RUNNING
        self._running[group] = None
        self._num_seqs += len(group.seqs)
        if len(group.seqs) > 1:
            self._wide[group] = None

    def _start(self, group: Group) -> None:
        """The group, whose ``known`` is set, decodes from the current tick on."""
        tick, num_seqs = self.tick, len(group.seqs)
        group.offset = group.known - tick
        group.decoding = True
        for seq in group.seqs:
            self._decoding[seq.seq_id] = group
        self._num_decoding_groups += 1
        self._offsets += group.offset * num_seqs
        if group.request.beam:
            self._beams[group] = None
        last = tick + group.target - group.generated_at(tick)
        heapq.heappush(self._deadlines, (last, group.order, group.epoch, group))
        self.memory.start(group, tick)

    def _stop(self, group: Group) -> None:
        """The group decodes no longer; its ``known`` is stored."""
        self.memory.stop(group, self.tick)
        group.known = group.known_at(self.tick)
        group.decoding = False
        group.epoch += 1
        for seq in group.seqs:
            del self._decoding[seq.seq_id]
        self._num_decoding_groups -= 1
        self._offsets -= group.offset * len(group.seqs)
        self._beams.pop(group, None)

    def _leave(self, group: Group) -> None:
        """The group gives back everything and is no longer running."""
        was_decoding = group.decoding
        if was_decoding:
            self._stop(group)
        self._prefilling.pop(group, None)
        self.memory.release(group, group.known - 1 if was_decoding else group.known)
        del self._running[group]
        self._wide.pop(group, None)
        self._num_seqs -= len(group.seqs)

    def _drop(self, group: Group) -> None:
        """The group is gone, wherever it was, and gives back what it held there."""
        if group.state is GroupState.WAITING:
            self._waiting.remove(group)
        elif group.state is GroupState.SWAPPED:
            self.memory.release_swapped(group, group.known - 1)
            self._swapped.remove(group)
        else:
            self._leave(group)
        group.state = GroupState.FINISHED
        del self._groups[group.request.request_id]

    def _finish(self, group: Group) -> None:
        self._drop(group)
        self.counters = self.counters.add(finished=1)
        self._released.append(group.request.request_id)

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
        group = self._groups.get(request_id)
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
        group = self._groups.get(request_id)
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
            chosen.append((self._groups[request_id], beam.place(result.parents[request_id], width)))
        return chosen

    def _require_tokens(self, plan: StepPlan, ended: tuple[int, ...]) -> None:
        """Only a sequence that gets a token can end, and only once."""
        gets = set(plan.decodes)
        for group in self._prefilling:
            if group.completes(plan.prefills):
                gets.update(seq.seq_id for seq in group.seqs)
        if len(set(ended)) < len(ended) or not gets.issuperset(ended):
            raise ValueError(f"sequences that end must get a token and end once: {ended} ended, {sorted(gets)} get one")

    def _complete_prefills(self, plan: StepPlan, result: StepResult, first_tokens: list[int | str]) -> None:
        done = {chunk.seq_id: chunk.start + chunk.count for chunk in plan.prefills}
        for group in list(self._prefilling):
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
            del self._prefilling[group]
            if group.generated_at(self.tick) == 0:
                first_tokens.append(group.request.request_id)
                if len(group.seqs) > 1:
                    self._copies += self.memory.fork(group)
            group.known += 1
            if result.tokens is not None:
                group.learn(result.tokens.get(group.seqs[0].seq_id, ()), group.known)
            self._start(group)

    def _record_tokens(self, decodes: tuple[int, ...], result: StepResult) -> None:
        """Output ids of groups of one sequence; their pages become findable as they fill."""
        assert result.tokens is not None
        for seq_id in decodes:
            group = self._decoding[seq_id]
            known = group.known_at(self.tick)
            if group.learn(result.tokens.get(seq_id, ()), known):
                self.memory.publish(group, known - 1)

    def _end_sequences(self, ended: tuple[int, ...]) -> None:
        """Sequences that met an end token leave; a group ends with its last one."""
        for seq_id in ended:
            group = self._decoding.get(seq_id)
            if group is None or group.held:  # the row of a static batch goes on after its last token
                continue
            if len(group.seqs) == 1:
                self._retire(group)
                continue
            index = next(i for i, seq in enumerate(group.seqs) if seq.seq_id == seq_id)
            self.memory.release_sequence(group, index, group.known_at(self.tick) - 1)
            del group.seqs[index], self._decoding[seq_id]
            self._offsets -= group.offset
            self._num_seqs -= 1

    def _finish_due(self) -> None:
        """Groups that have reached their length limit end, or wait for their static batch."""
        deadlines, tick = self._deadlines, self.tick
        while deadlines and deadlines[0][0] <= tick:
            _, _, epoch, group = heapq.heappop(deadlines)
            if group.epoch == epoch and not group.held:
                self._retire(group)
        if self.memory.num_held == len(self._decoding) and not self._prefilling:
            self._finish_held()  # nothing, unless the last active group of a batch was aborted

    def _retire(self, group: Group) -> None:
        """The group has all its tokens: it ends, or waits for its static batch."""
        if self.memory.hold(group, self.tick):
            group.held = True
            self._beams.pop(group, None)
        elif self.memory.num_held:
            group.held = True
            self._finish_held()
        else:
            self._finish(group)

    def _finish_held(self) -> None:
        for group in [group for group in self._running if group.held]:
            self._finish(group)

    # --- inspection ------------------------------------------------------------------------------

    def usage(self) -> Usage:
        """The pool by use in the first step of the current plan (or now, between plans)."""
        planned = self._plan is not None
        decode_tokens = self._offsets + len(self._decoding) * self.tick
        if not (planned and self._plan is not None and self._plan.decodes):
            decode_tokens -= len(self._decoding)  # the newest token of each has no slot yet
        tokens, narrow, wide = decode_tokens, 0, 0
        if self._prefilling:
            done = {c.seq_id: c.start + c.count for c in self._plan.prefills} if self._plan is not None else {}
            for group in self._prefilling:
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
        return len(self._decoding) - self.memory.num_held

    def dump(self) -> str:
        """The state in words, for error messages."""
        lines = [
            f"step {self.step}, tick {self.tick}, free pages {self.memory.num_free_pages} of {self.memory.num_pages}",
            f"running {list(self._running)[:8]}",
            f"swapped {list(self._swapped)[:8]}",
            f"waiting ({len(self._waiting)}) {list(self._waiting)[:8]}",
        ]
        return "\n".join(lines)

    def groups(self) -> list[Group]:
        """All groups in flight."""
        return list(self._groups.values())

    def _require_no_plan(self, call: str) -> None:
        if self._plan is not None:
            raise ValueError(f"{call} needs the current plan to be completed first; call complete with its result")
