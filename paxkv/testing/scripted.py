"""Runs a scheduler to the end with a fake model, on simulated pages whose content is checked in every step.

The fake model reads the slot of a sequence's newest token through the block table and derives the next token from it.
A missed copy-on-write, a page handed out twice, a stale prefix hit or a swap to the wrong place therefore changes
outputs, and is named in the step in which it happens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from paxkv.request import Request
from paxkv.sched import beam, hashing
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.plan import Chunk, StepOutcome, StepPlan, StepResult
from paxkv.sched.scheduler import Scheduler
from paxkv.sched.sequence import Group, GroupState
from paxkv.sched.static import StaticMemory
from paxkv.testing.fake_model import FakeModel
from paxkv.testing.naive import NaivePages

PADDING = -1
"""What the slots hold that a static batch puts before a prompt."""


class PageStore:
    """What the pages hold. A page that was given back keeps its content, as on a device."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.device: dict[int, list[int | None]] = {}
        self.host: dict[int, list[int | None]] = {}

    def _page(self, page: int) -> list[int | None]:
        return self.device.setdefault(page, [None] * self.page_size)

    def move(self, plan: StepPlan) -> None:
        """The plan's transfers, in the order that :class:`StepPlan` states."""
        for device, host in plan.swap_out:
            self.host[host] = self._page(device)[:]
        for host, device in plan.swap_in:
            self.device[device] = self.host[host][:]
        for source, target in plan.copies:
            self.device[target] = self._page(source)[:]

    def write(self, table: Sequence[int], position: int, value: int) -> None:
        """Fills one slot of a sequence."""
        self._page(table[position // self.page_size])[position % self.page_size] = value

    def read(self, table: Sequence[int], count: int, *, host: bool = False) -> list[int | None]:
        """The first ``count`` slots of a sequence."""
        pages = table[: -(-count // self.page_size)]
        return [slot for page in pages for slot in (self.host[page] if host else self._page(page))][:count]


class ScriptedRun:
    """Drives a scheduler with a fake model, one step at a time, and checks all that can be checked from outside.

    In every step: the slots of each sequence hold exactly its tokens; a page is written by its only owner, and never
    while the prefix index offers it; block tables, sharing, copies and the use of the pool are those of
    :class:`NaivePages` (paged memory); the plan keeps its limits and counts its context right.

    Args:
        scheduler: a fresh one; build it with ``check=True`` to check conservation too.
        model: chooses the tokens.
        tells: step → whether the sampled ids are reported to the scheduler.

    Attributes:
        outputs: request id → sequence number → generated ids, of the sequences that have ended.
        finished: request ids in the order in which they finished.
        plans: every plan made.
    """

    def __init__(
        self, scheduler: Scheduler, model: FakeModel | None = None, *, tells: Callable[[int], bool] = lambda step: True
    ) -> None:
        memory = scheduler.memory
        self.scheduler = scheduler
        self.model = model or FakeModel()
        self.store = PageStore(memory.page_size)
        self.naive = NaivePages(memory.page_size) if isinstance(memory, PagedMemory) else None
        self.outputs: dict[int | str, dict[int, list[int]]] = {}
        self.finished: list[int | str] = []
        self.plans: list[StepPlan] = []
        self._cache = memory.cache if isinstance(memory, PagedMemory) else None
        self._tells = tells
        self._live: dict[int, tuple[Request, int]] = {}  # sequence → its request, and its number there
        self._ids: dict[int, list[int]] = {}
        self._slots: dict[int, list[int]] = {}  # what the slots of a sequence must hold
        self._keys: dict[int, list[bytes]] = {}
        self._content: dict[bytes | int, list[int]] = {}  # content key → what a page under it must hold
        self._naive_of: dict[int, int] = {}  # real page → naive page, while in use and after

    # --- driving ----------------------------------------------------------------------------------

    def submit(self, *requests: Request) -> None:
        """Submits requests. Raises as :meth:`Scheduler.submit` does."""
        for request in requests:
            self.scheduler.submit(request)
            self.outputs[request.request_id] = {}
            for stream, seq in enumerate(self.scheduler.group(request.request_id).seqs):
                self._live[seq.seq_id] = request, stream
                self._ids[seq.seq_id], self._slots[seq.seq_id], self._keys[seq.seq_id] = [], [], []
                self._extend(seq.seq_id, self.model.prompt(request))

    def abort(self, request_id: int | str) -> bool:
        """Aborts a request, as its user would."""
        known = self.scheduler.abort(request_id)
        self._forget([seq for seq, (request, _) in self._live.items() if request.request_id == request_id])
        return known

    def step(self) -> StepPlan | None:
        """Plans, runs and completes one step. None when there is no request."""
        plan = self.scheduler.schedule()
        if plan is None:
            return None
        self.plans.append(plan)
        self._check_plan(plan)
        if self.naive is not None:
            self._follow(plan, self.naive)
        self.store.move(plan)
        self._check_content()
        outcome = self.scheduler.complete(self._execute(plan))
        self._leave(outcome)
        self._check_index()
        return plan

    def run(self, limit: int = 100_000) -> dict[int | str, list[list[int]]]:
        """Steps until nothing is left; returns request id → generated ids of each sequence.

        Raises:
            AssertionError: not done after ``limit`` steps.
        """
        for _ in range(limit):
            if self.step() is None:
                return {request: [seqs[i] for i in sorted(seqs)] for request, seqs in self.outputs.items()}
        raise AssertionError(f"not done after {limit} steps:\n{self.scheduler.dump()}")

    def expected(self, *requests: Request) -> dict[int | str, list[list[int]]]:
        """What :meth:`run` must return for ``requests``."""
        limit = self.scheduler.config.max_model_len
        return {r.request_id: self.model.outputs(r, min(r.max_tokens, limit - r.prompt_tokens)) for r in requests}

    # --- a device ---------------------------------------------------------------------------------

    def _execute(self, plan: StepPlan) -> StepResult:
        running = [g for g in self.scheduler.groups() if g.state is GroupState.RUNNING]
        owners = Counter(page for group in running for seq in group.seqs for page in seq.table)
        for chunk in plan.prefills:
            self._write_chunk(chunk, owners)
        for seq_id in plan.decodes:
            group = self._group(seq_id)
            if not group.held:
                position = len(self._ids[seq_id]) - 1
                table, value = self.scheduler.table(seq_id), self._slots[seq_id][position]
                self._write(table, position + group.padding, value, owners, 1)

        done = {chunk.seq_id: chunk.start + chunk.count for chunk in plan.prefills}
        tokens: dict[int, tuple[int, ...]] = {}
        ended: list[int] = []
        parents: dict[int | str, tuple[int, ...]] = {}
        for group in running:
            if group.decoding:
                samples = bool(plan.decodes) and not group.held
            else:
                samples = all(done.get(seq.seq_id, start) >= end for seq, start, end in group.jobs)
            if samples:
                self._sample(group, tokens, ended, parents)
        return StepResult(1, tuple(ended), tokens if self._tells(plan.step) else None, parents or None)

    def _write_chunk(self, chunk: Chunk, owners: Counter[int]) -> None:
        table, group = self.scheduler.table(chunk.seq_id), self._group(chunk.seq_id)
        inside = Counter(page for seq in group.seqs for page in seq.table)
        for position in range(chunk.start, chunk.start + chunk.count):
            token = position - group.padding
            value = self._slots[chunk.seq_id][token] if token >= 0 else PADDING
            self._write(table, position, value, owners, inside[table[position // self.store.page_size]])
        assert chunk.last == (chunk.start + chunk.count == group.known), f"{chunk} of {group} is marked wrongly"

    def _write(self, table: list[int], position: int, value: int, owners: Counter[int], allowed: int) -> None:
        page = table[position // self.store.page_size]
        assert owners[page] == allowed, f"page {page} is written with {owners[page]} owners, {allowed} of them writing"
        assert not (self._cache and self._cache.holds(page)), f"page {page} is written while the prefix index offers it"
        self.store.write(table, position, value)

    def _sample(
        self,
        group: Group,
        tokens: dict[int, tuple[int, ...]],
        ended: list[int],
        parents: dict[int | str, tuple[int, ...]],
    ) -> None:
        """Reads each sequence's newest slot from its pages and draws the token that follows."""
        seqs, request = [seq.seq_id for seq in group.seqs], group.request
        known = len(self._ids[seqs[0]])
        one_prefill = not group.decoding and known == request.prompt_tokens  # it answers for all sequences
        tables = [(group.seqs[0] if one_prefill else seq).table for seq in group.seqs]
        slots = [self.store.read(table, group.padding + known)[-1] for table in tables]
        order: Sequence[int] = range(len(seqs))
        if request.beam and not one_prefill:
            parents[request.request_id] = self.model.parents(request, known - request.prompt_tokens, len(seqs))
            order = beam.place(parents[request.request_id], len(seqs))
            self._continue(seqs, order)
        for seq_id, parent in zip(seqs, order, strict=True):
            slot, stream = slots[parent], self._live[seq_id][1]
            assert slot is not None, f"sequence {seq_id} reads a slot that was never written"
            tokens[seq_id] = (self.model.token(slot, stream),)
            if self.model.ends(slot, stream):
                ended.append(seq_id)
        for seq_id in seqs:
            self._extend(seq_id, tokens[seq_id])

    # --- what sequences must hold -----------------------------------------------------------------

    def _extend(self, seq_id: int, ids: Sequence[int]) -> None:
        request, slots, page = self._live[seq_id][0], self._slots[seq_id], self.store.page_size
        is_prompt = not slots
        self._ids[seq_id] += ids
        for token in ids:
            slots.append(self.model.slot(slots[-1] if slots else self.model.root(request), token))
        if request.prompt_ids is None or not (is_prompt or request.num_seqs == 1):
            return  # nothing of it may be found by content
        root, old = hashing.root_key(request.salt, request.adapter), self._keys[seq_id]
        self._keys[seq_id] = keys = hashing.page_keys(self._ids[seq_id], page, root, old)
        for index in range(len(old), len(keys)):
            self._content[keys[index]] = slots[index * page : (index + 1) * page]

    def _continue(self, seqs: list[int], order: Sequence[int]) -> None:
        ids, slots = [self._ids[seq] for seq in seqs], [self._slots[seq] for seq in seqs]
        for seq_id, parent in zip(seqs, order, strict=True):
            self._ids[seq_id], self._slots[seq_id] = list(ids[parent]), list(slots[parent])
        if self.naive is not None:
            self.naive.reorder(seqs, order)

    def _leave(self, outcome: StepOutcome) -> None:
        alive = {seq.seq_id for group in self.scheduler.groups() for seq in group.seqs}
        gone = [seq for seq in self._live if seq not in alive]
        for seq_id in gone:
            request, stream = self._live[seq_id]
            self.outputs[request.request_id][stream] = self._ids[seq_id][request.prompt_tokens :]
        self._forget(gone)
        self.finished += outcome.finished

    def _forget(self, seqs: list[int]) -> None:
        for seq_id in seqs:
            del self._live[seq_id], self._ids[seq_id], self._slots[seq_id], self._keys[seq_id]
        if self.naive is not None:
            self.naive.drop(seqs)

    def _group(self, seq_id: int) -> Group:
        return self.scheduler.group(self._live[seq_id][0].request_id)

    # --- checks -----------------------------------------------------------------------------------

    def _check_plan(self, plan: StepPlan) -> None:
        config, groups = self.scheduler.config, self.scheduler.groups()
        width = sum(len(g.seqs) for g in groups if g.state is GroupState.RUNNING)
        assert width <= config.max_num_seqs, f"{width} sequences run"
        tokens = plan.prefill_tokens + len(plan.decodes)
        assert tokens <= config.max_num_batched_tokens, f"the step has {tokens} tokens"
        decoding = [group for group in groups if group.decoding] if plan.decodes else []
        assert sorted(plan.decodes) == sorted(seq.seq_id for group in decoding for seq in group.seqs)
        lengths = {seq: len(self._ids[seq]) + self._group(seq).padding for seq in plan.decodes}
        if not any(group.held for group in decoding):
            assert plan.context_tokens == sum(lengths.values()), f"context is {sum(lengths.values())}, {plan}"
        if not isinstance(self.scheduler.memory, StaticMemory):
            pages = sum(-(-length // self.store.page_size) for length in lengths.values())
            assert plan.context_pages == pages, f"the context has {pages} pages, the plan says {plan.context_pages}"
        chunked = {self._live[chunk.seq_id][0].request_id for chunk in plan.prefills}
        assert plan.num_groups == len(decoding) + len(chunked)
        assert plan.horizon == 1 or not (plan.prefills or plan.preempted or plan.swap_in)

    def _follow(self, plan: StepPlan, naive: NaivePages) -> None:
        """Does with dictionaries what the plan says, and compares."""
        scheduler, memory = self.scheduler, self.scheduler.memory
        assert isinstance(memory, PagedMemory)
        host_pages = memory.host.num_pages
        swapped = {"out": 0, "in": 0}
        for event in plan.preempted:
            seqs = [seq.seq_id for seq in scheduler.group(event.request_id).seqs]
            used = naive.num_pages
            if event.mode == "swap":
                swapped["out"] += naive.swap_out(seqs)
            else:
                needs = len({page for seq in seqs for page in naive.tables[seq]})
                full = naive.num_host_pages + needs > host_pages
                assert full or "host pool" not in event.cause, f"{event}: the host pool has room"
                for seq in seqs:
                    del naive.tables[seq]
            assert event.pages_freed == used - naive.num_pages, f"{event}: {used - naive.num_pages} pages became free"
        assert naive.num_host_pages <= host_pages, f"the host pool has {host_pages} pages"
        back = {self._live[seq][0].request_id for seq in naive.host_tables if seq in plan.decodes}
        for request_id in back:
            swapped["in"] += naive.swap_in([seq.seq_id for seq in scheduler.group(request_id).seqs])
        assert (len(plan.swap_out), len(plan.swap_in)) == (swapped["out"], swapped["in"]), f"{plan} must move {swapped}"
        for event in plan.admitted:
            group = scheduler.group(event.request_id)
            hits = group.seqs[0].table[: event.cached_tokens // self.store.page_size]
            naive.admit(
                [seq.seq_id for seq in group.seqs],
                group.known,
                group.request.prompt_tokens,
                [self._naive_of[page] for page in hits],
            )
        for chunk in plan.prefills:
            naive.compute(chunk.seq_id, chunk.start, chunk.count)
        copies = sum([naive.append(seq_id) for seq_id in plan.decodes])
        assert len(plan.copies) == copies, f"{copies} pages must be copied, the plan copies {plan.copies}"
        running = [group for group in scheduler.groups() if group.state is GroupState.RUNNING]
        self._naive_of |= naive.compare({seq.seq_id: seq.table for group in running for seq in group.seqs})
        usage = scheduler.usage()
        want = naive.usage() | {"external": 0}
        want["free"] = (scheduler.memory.num_pages - want["pages"]) * self.store.page_size
        got = {name: getattr(usage, name) for name in want}
        assert got == want, f"the pool is used as {want}, the scheduler says {got}"

    def _check_content(self) -> None:
        """Every sequence's slots hold its tokens, as far as they are computed, before the step writes more."""
        for group in self.scheduler.groups():
            state = group.state
            if state is GroupState.WAITING or group.held:
                continue
            for seq in group.seqs:
                known = len(self._ids[seq.seq_id])
                assert group.known_at(self.scheduler.tick) - group.padding == known, f"{group} must know {known} tokens"
                swapped = state is GroupState.SWAPPED
                decodes = group.decoding or swapped
                stored = group.padding + known - 1 if decodes else self._computed(group, seq.seq_id)
                found = self.store.read(seq.table, stored, host=swapped)
                want = [PADDING] * group.padding + self._slots[seq.seq_id]
                wrong = [i for i, slot in enumerate(found) if slot != want[i]]
                assert len(found) == stored and not wrong, (
                    f"step {self.scheduler.step}: slots {wrong} of {seq} hold other tokens' keys and values"
                )

    def _computed(self, group: Group, seq_id: int) -> int:
        """Slots of a sequence in prefill that are computed before this step."""
        starts = {seq.seq_id: start for seq, start, _ in group.jobs}
        first = starts.get(group.seqs[0].seq_id, group.known)
        if self.naive is None and seq_id not in starts and first < group.known:
            return 0  # its own pages are filled when the prompt is complete
        return min(first, starts.get(seq_id, group.known))

    def _check_index(self) -> None:
        """Every page that the prefix index offers holds what its key stands for."""
        for key, page in self._cache.items().items() if self._cache else ():
            assert key in self._content, f"page {page} is offered under a key that no request has"
            assert self.store.device.get(page) == self._content[key], f"page {page} does not hold what its key says"
