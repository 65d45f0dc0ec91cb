"""A plan in the making: who is preempted, comes back, is admitted and computes how much in one step."""

from __future__ import annotations

from paxkv.config import SchedulerConfig
from paxkv.metrics import Counters
from paxkv.sched.events import Admitted, Blocked, Miss, Preempted
from paxkv.sched.memory import Copies
from paxkv.sched.plan import Chunk
from paxkv.sched.preempt import choose_mode, tokens_lost
from paxkv.sched.roster import Roster
from paxkv.sched.sequence import Group, GroupState


class Draft:
    """Gathers one plan. Every call moves groups at once; what it decided is in the attributes.

    Args:
        config: limits and choices.
        roster: who is where.
        tick: the decode clock.
        copies: page copies that the last step left to be made.
        counters: so far.

    Attributes:
        preempted: victims, by group.
        swap_out, swap_in, copies: page copies to make.
        prefills: prompt tokens to compute.
        admitted: groups that entered.
        blocked: what stopped admission, or None.
        num_prefill_groups: groups that ``prefills`` is for.
        counters: with what the draft did.
    """

    def __init__(self, config: SchedulerConfig, roster: Roster, tick: int, copies: Copies, counters: Counters) -> None:
        self.config, self.roster, self.tick = config, roster, tick
        self.memory = roster.memory
        self.max_seqs = config.max_step_seqs
        self.preempted: dict[Group, Preempted] = {}
        self.swap_out: Copies = []
        self.swap_in: Copies = []
        self.copies = copies
        self.prefills: list[Chunk] = []
        self.admitted: list[Admitted] = []
        self.blocked: Blocked | None = None
        self.num_prefill_groups = 0
        self.counters = counters

    def preempt(self, group: Group, cause: str, mode: str | None = None) -> None:
        """Takes a running group's pages (paper section 4.5).

        Args:
            cause: why, in words.
            mode: ``recompute`` or ``swap``; None lets the configuration choose.
        """
        memory, roster = self.memory, self.roster
        mode = mode or choose_mode(group, self.config.preemption)
        free = memory.num_free_pages
        was_decoding = group.decoding
        stored = roster.stop(group, self.tick)
        lost = tokens_lost(group, stored, memory.page_size)
        pairs = memory.swap_out(group, stored) if mode == "swap" and was_decoding else None
        if mode == "swap" and pairs is None:
            mode = "recompute"
            cause += "; the host pool has no room for its pages" if was_decoding else "; its prompt is not complete"
        roster.leave(group)
        if pairs is not None:
            self.swap_out += pairs
            roster.queue(group, GroupState.SWAPPED)
        else:
            memory.release(group, stored)
            group.jobs = []
            roster.queue(group, GroupState.WAITING)
        group.preemptions += 1
        self.counters = self.counters.add(preemptions=1, swapped_out_pages=len(pairs or ()))
        freed = memory.num_free_pages - free
        self.preempted[group] = Preempted(group.request.request_id, mode, cause, 0 if pairs else lost, freed)

    def grow(self) -> None:
        """Gives every decoding sequence its slot, at the expense of the groups that came last."""
        if self.memory.fits(self.tick, self.roster.width):
            self.copies += self.memory.grow(self.tick)
        else:
            self._grow_tight()

    def _grow_tight(self) -> None:
        """The paper's loop: each group in order must pass the can-append test, else the last one goes."""
        memory, tick = self.memory, self.tick
        # A group that was swapped in may stand before one that arrived earlier and was recomputed.
        order = sorted(self.roster.running, key=lambda group: group.order)
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
                self.preempt(victim, "no free page for the next token of an earlier request")
                if victim is group:
                    break
            if group.decoding:
                self.copies += memory.append(group, tick)

    def bring_back(self) -> None:
        """Swaps groups in, in order, while sequences and memory allow."""
        memory, roster, tick = self.memory, self.roster, self.tick
        while roster.swapped:
            group = roster.swapped[0]
            if group in self.preempted or roster.num_seqs + len(group.seqs) > self.max_seqs:
                return
            if not memory.can_swap_in(group, tick, alone=not roster.running):
                return
            roster.swapped.popleft()
            pairs = memory.swap_in(group, group.known - 1)
            self.swap_in += pairs
            self.counters = self.counters.add(swapped_in_pages=len(pairs))
            roster.enter(group)
            roster.start(group, tick)
            self.copies += memory.append(group, tick)

    def continue_prefills(self, used: int) -> int:
        """Hands the budget that ``used`` tokens leave to prompts that were begun; returns the tokens given."""
        given = 0
        for group in self.roster.prefilling:
            given += self._take_chunks(group, self.config.max_num_batched_tokens - used - given)
        return given

    def admit(self, used: int) -> None:
        """Admits waiting groups in order while budget, sequences and memory allow."""
        config, memory, roster = self.config, self.memory, self.roster
        waiting = roster.waiting
        if not waiting:
            return
        if roster.swapped:
            self.blocked = Blocked.SWAPPED_FIRST
            return
        budget_left = config.max_num_batched_tokens - used
        fresh: list[Group] = []
        while waiting:
            group = waiting[0]
            self.blocked = self._try_admit(group, used)
            if self.blocked is not None:
                break
            waiting.popleft()
            fresh.append(group)
            resumed = group.preemptions > 0
            hit, miss = memory.lookup_result()
            if resumed:
                self.counters = self.counters.resume(sum(job[2] - job[1] for job in group.jobs))
            elif miss is not Miss.OFF:
                self.counters = self.counters.admit(group.known, hit)
            self.admitted.append(Admitted(group.request.request_id, hit, miss, resumed))
            roster.enter(group)
            roster.prefilling[group] = None
            used += sum(job[2] - job[1] for job in group.jobs)
        if fresh:
            memory.seal()
            for group in fresh:
                budget_left -= self._take_chunks(group, budget_left)

    def _try_admit(self, group: Group, used: int) -> Blocked | None:
        """Gives a waiting group its pages, or says what stops it."""
        budget = self.config.max_num_batched_tokens - used
        if group in self.preempted:
            return Blocked.JUST_PREEMPTED
        if self.roster.num_seqs + len(group.seqs) > self.max_seqs:
            return Blocked.SEQUENCES
        if budget <= 0:
            return Blocked.BUDGET
        alone = not self.roster.running
        # A group that could not be computed whole even in an empty step is cut into chunks.
        cut = self.config.step_kind == "chunked" or (used == 0 and alone)
        return self.memory.admit(group, alone=alone, budget=None if cut else budget)

    def _take_chunks(self, group: Group, budget: int) -> int:
        given = 0
        for job in group.jobs:
            count = min(job[2] - job[1], budget - given)
            if count <= 0:
                break
            self.prefills.append(Chunk(job[0].seq_id, job[1], count, job[1] + count == job[2]))
            given += count
        self.num_prefill_groups += given > 0
        return given

    def resuming_beams(self) -> list[Group]:
        """Beam groups whose recomputation ends with these chunks: their next tokens compete again."""
        if not self.prefills:
            return []
        resuming = [x for x in self.roster.prefilling if x.request.beam and x.generated_at(self.tick) > 0]
        return [group for group in resuming if group.completes(self.prefills)]
