"""Runs a scheduler as a device does that is never waited for: several steps a plan, tokens known late.

The other simulated executor, :class:`paxkv.testing.scripted.ScriptedRun`, takes one step at a time and checks every
slot in each. This one is for many requests. It runs random parts of each plan's horizon, with block tables that were
committed beforehand or not; it tells the scheduler of tokens and of ends some plans after the step that made them; and
it computes slots from the pages themselves, so that a page lost, aliased or stale changes all that follows it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from paxkv.request import Request
from paxkv.sched import beam
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.plan import Chunk, StepPlan, StepResult
from paxkv.sched.scheduler import Scheduler
from paxkv.sched.sequence import Group, GroupState
from paxkv.testing.fake_model import FakeModel
from paxkv.testing.scripted import PADDING, PageStore


class _Lane:
    """One sequence: its tokens, and how many of them are its output (what follows an end token is none)."""

    __slots__ = ("ended", "ids", "request", "stream", "told")

    def __init__(self, request: Request, stream: int, ids: list[int]) -> None:
        self.request, self.stream, self.ids = request, stream, ids
        self.ended = 0  # tokens up to the end token; 0 while none was drawn
        self.told = len(ids)

    @property
    def output(self) -> list[int]:
        return self.ids[self.request.prompt_tokens : self.ended or len(self.ids)]


class OverlappedRun:
    """Drives a scheduler to the end.

    Args:
        scheduler: a fresh one; build it with ``check=True``, so that each step is checked for conservation.
        model: chooses the tokens.
        seed: of the choices that an executor is free to make.
        commits: share of the plans whose slots are given before they run.
        lag: most plans between a step and the report of its tokens; 0 reports them with the step's result.

    Attributes:
        outputs: request id → sequence number → generated ids, of the sequences that have ended.
        finished: request ids in the order in which they finished.
        told: request ids as the scheduler named them when they finished.
        steps, plans: how many ran.
        longest: most steps of one plan.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        model: FakeModel,
        seed: int = 0,
        *,
        commits: float = 0.5,
        lag: int = 1,
        on_plan: Callable[[StepPlan], None] = lambda plan: None,
    ) -> None:
        self.scheduler, self.model = scheduler, model
        self.store = PageStore(scheduler.memory.page_size)
        self.outputs: dict[int | str, dict[int, list[int]]] = {}
        self.finished: list[int | str] = []
        self.told: list[int | str] = []
        self.steps = self.plans = self.longest = 0
        self._draw = random.Random(seed)
        self._commits, self._lag, self._on_plan = commits, lag, on_plan
        self._lanes: dict[int, _Lane] = {}
        self._reports: deque[list[tuple[int, int]]] = deque()  # per plan: (sequence, tokens it had then)
        memory = scheduler.memory
        self._pool, self._cache = (memory.pool, memory.cache) if isinstance(memory, PagedMemory) else (None, None)

    # --- driving ----------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """Submits a request. Raises as :meth:`Scheduler.submit` does."""
        self.scheduler.submit(request)
        self.outputs[request.request_id] = {}
        for stream, seq in enumerate(self.scheduler.group(request.request_id).seqs):
            self._lanes[seq.seq_id] = _Lane(request, stream, self.model.prompt(request))

    def abort(self, request_id: int | str) -> bool:
        """Aborts a request, as its user would."""
        known = self.scheduler.abort(request_id)
        for seq_id in [seq_id for seq_id, lane in self._lanes.items() if lane.request.request_id == request_id]:
            del self._lanes[seq_id]
        return known

    def step(self) -> StepPlan | None:
        """Runs one plan. None when there is no request."""
        scheduler = self.scheduler
        plan = scheduler.schedule()
        if plan is None:
            return None
        self._on_plan(plan)
        count = self._draw.randint(1, plan.horizon)
        commits = self._draw.random() < self._commits
        if commits:
            scheduler.commit(count)
        else:
            count = 1  # the tables hold one step, and nothing after it was given a slot
        self.store.move(plan)
        if plan.swap_in or any(event.mode == "swap" for event in plan.preempted):
            self._check_moved(plan)
        result = self._execute(plan, count)
        outcome = scheduler.complete(result)
        self.steps, self.plans, self.longest = self.steps + count, self.plans + 1, max(self.longest, count)
        self._retire()
        self.told += outcome.finished
        assert set(outcome.finished) <= set(self.finished), f"{outcome} names requests that are still there"
        while len(self._reports) > self._lag or (self._reports and self._draw.random() < 0.3):
            self._report(self._reports.popleft())
        if self._lag and not scheduler.has_work:
            self._reports.clear()
        return plan

    def run(self, limit: int = 100_000) -> dict[int | str, list[list[int]]]:
        """Runs until nothing is left; returns request id → generated ids of each sequence.

        Raises:
            AssertionError: not done after ``limit`` plans.
        """
        for _ in range(limit):
            if self.step() is None:
                return {request: [seqs[i] for i in sorted(seqs)] for request, seqs in self.outputs.items()}
        raise AssertionError(f"not done after {limit} plans:\n{self.scheduler.dump()}")

    # --- a device ---------------------------------------------------------------------------------

    def _execute(self, plan: StepPlan, count: int) -> StepResult:
        groups = [group for group in self.scheduler.groups() if group.state is GroupState.RUNNING]
        tables = {seq.seq_id: seq.table for group in groups for seq in group.seqs}
        samples: list[Group] = []
        if plan.prefills:
            inside = {seq.seq_id: group for group in groups for seq in group.seqs}
            done = {chunk.seq_id: chunk.start + chunk.count for chunk in plan.prefills}
            for chunk in plan.prefills:
                self._compute(chunk, tables[chunk.seq_id], inside[chunk.seq_id])
            samples = [
                group
                for group in groups
                if not group.decoding and all(done.get(seq.seq_id, start) >= end for seq, start, end in group.jobs)
            ]
        decodes = [group for group in groups if group.decoding and not group.held] if plan.decodes else []
        before = {seq.seq_id: len(self._lanes[seq.seq_id].ids) for group in decodes + samples for seq in group.seqs}
        parents: dict[int | str, tuple[int, ...]] = {}
        for group in samples:
            self._sample(group, tables, parents)
        for _ in range(count):
            for group in decodes:
                for seq in group.seqs:
                    self._write(seq.table, len(self._lanes[seq.seq_id].ids) - 1, seq.seq_id, group.padding, 1)
            for group in decodes:
                self._sample(group, tables, parents)
        grown = {seq_id: len(self._lanes[seq_id].ids) - length for seq_id, length in before.items()}
        # The ends of several sequences of one request come with the result; of one sequence, later.
        ended = [
            seq_id
            for seq_id in before
            if self._lanes[seq_id].ended and (self._lanes[seq_id].request.num_seqs > 1 or not self._lag)
        ]
        tokens = None
        if self._lag:
            self._reports.append([(seq_id, len(self._lanes[seq_id].ids)) for seq_id in grown])
        else:
            tokens = {seq_id: tuple(self._lanes[seq_id].ids[-number:]) for seq_id, number in grown.items()}
        return StepResult(count, tuple(ended), tokens, parents or None)

    def _compute(self, chunk: Chunk, table: list[int], group: Group) -> None:
        sharers = [seq.table for seq in group.seqs]
        for position in range(chunk.start, chunk.start + chunk.count):
            index = position // self.store.page_size
            writers = sum(len(other) > index and other[index] == table[index] for other in sharers)
            self._write(table, position - group.padding, chunk.seq_id, group.padding, writers)

    def _write(self, table: list[int], token: int, seq_id: int, padding: int, owners: int) -> None:
        """Computes the slot of a sequence's token number ``token`` from the slot before it."""
        position, lane = token + padding, self._lanes[seq_id]
        page = table[position // self.store.page_size]
        if self._pool is not None:
            assert self._pool.owners[page] == owners, f"page {page} is written with {self._pool.owners[page]} owners"
            assert self._cache is None or not self._cache.holds(page), f"page {page} is written while it is offered"
        value = PADDING
        if token >= 0:
            before = self._slot(table, position - 1) if token else self.model.root(lane.request)
            value = self.model.slot(before, lane.ids[token])
        self.store.write(table, position, value)

    def _slot(self, table: list[int], position: int) -> int:
        size = self.store.page_size
        slot = self.store.device[table[position // size]][position % size]
        assert slot is not None, f"slot {position} is read and was never written"
        return slot

    def _sample(self, group: Group, tables: dict[int, list[int]], parents: dict[int | str, tuple[int, ...]]) -> None:
        seqs, request = [seq.seq_id for seq in group.seqs], group.request
        lanes = [self._lanes[seq_id] for seq_id in seqs]
        known = len(lanes[0].ids)
        first = not group.decoding and known == request.prompt_tokens  # one prompt answers for all
        slots = [self._slot(tables[seqs[0] if first else seq], group.padding + known - 1) for seq in seqs]
        order = tuple(range(len(seqs)))
        if request.beam and not first:
            chosen = self.model.parents(request, known - request.prompt_tokens, len(seqs))
            parents[request.request_id], order = chosen, beam.place(chosen, len(seqs))
            ids = [lane.ids for lane in lanes]
            for lane, parent in zip(lanes, order, strict=True):
                lane.ids = list(ids[parent])
        for lane, parent in zip(lanes, order, strict=True):
            lane.ids.append(self.model.token(slots[parent], lane.stream))
            if not lane.ended and self.model.ends(slots[parent], lane.stream):
                lane.ended = len(lane.ids)

    # --- what the scheduler hears, and when --------------------------------------------------------

    def _report(self, entries: list[tuple[int, int]]) -> None:
        for seq_id, known in entries:
            lane = self._lanes.get(seq_id)
            if lane is None or lane.request.num_seqs > 1:
                continue
            self.scheduler.learn(lane.request.request_id, lane.ids[lane.told : known])
            lane.told = known
            if lane.ended and lane.ended <= known:
                self.told += self.scheduler.end(lane.request.request_id)
        self._retire()

    def _retire(self) -> None:
        """Takes the outputs of the sequences that the scheduler holds no longer."""
        groups = self.scheduler.groups()
        alive = {seq.seq_id for group in groups for seq in group.seqs}
        unfinished = {group.request.request_id for group in groups}
        for seq_id in [seq_id for seq_id in self._lanes if seq_id not in alive]:
            lane = self._lanes.pop(seq_id)
            name = lane.request.request_id
            self.outputs[name][lane.stream] = lane.output
            if name not in unfinished and len(self.outputs[name]) == lane.request.num_seqs:
                self.finished.append(name)

    # --- checks -----------------------------------------------------------------------------------

    def _check_moved(self, plan: StepPlan) -> None:
        """Every slot of the sequences that were swapped holds their tokens, not only the one that is read next."""
        for group in self.scheduler.groups():
            swapped = group.state is GroupState.SWAPPED
            if not (swapped or (plan.swap_in and group.decoding)):
                continue
            for seq in group.seqs:
                lane, slot, want = self._lanes[seq.seq_id], self.model.root(group.request), []
                for token in lane.ids[:-1]:
                    slot = self.model.slot(slot, token)
                    want.append(slot)
                found = self.store.read(seq.table, len(want), host=swapped)
                assert found == want, f"{seq} does not hold its tokens after the transfers of step {plan.step}"
