"""Random use of the scheduler over paged memory, by hypothesis, checked against dictionaries and by content.

Every step goes through :class:`ScriptedRun`, which compares block tables, sharing, copies and pool use with
:class:`NaivePages`, and every slot with the tokens it must hold. The scheduler checks conservation itself.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from paxkv.config import CacheConfig, SchedulerConfig
from paxkv.request import Request
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.events import RequestRejected
from paxkv.sched.scheduler import Scheduler
from paxkv.sched.sequence import Group
from paxkv.testing.fake_model import FakeModel
from paxkv.testing.scripted import ScriptedRun

LIMIT = 40
"""Longest sequence, so that every group is done within some dozens of steps."""


class ForceNext:
    """Does before the next step what the test has asked for since the last one."""

    def __init__(self) -> None:
        self.victims: list[tuple[int, str]] = []
        self.pages = 0

    def preempt(self, step: int, running: list[Group]) -> list[tuple[Group, str]]:
        chosen = {running[index % len(running)]: mode for index, mode in self.victims} if running else {}
        self.victims = []
        return list(chosen.items())

    def evict(self, step: int) -> int:
        pages, self.pages = self.pages, 0
        return pages


class SchedulerMachine(RuleBasedStateMachine):
    """Submits, steps, aborts, preempts, swaps and evicts in any order; at the end everything must finish."""

    prefix_caching = True

    @initialize(
        page_size=st.sampled_from([1, 2, 4, 16]),
        room=st.integers(0, 3),
        host=st.sampled_from([0, 3, 200]),
        watermark=st.sampled_from([0.0, 0.01, 0.3, 0.95]),
        eviction=st.sampled_from(["lru", "fifo", "lfu", "mru"]),
        kind=st.sampled_from(["mixed", "chunked", "prompts_only"]),
        preemption=st.sampled_from(["auto", "recompute", "swap"]),
        budget=st.sampled_from([6, 16, 64]),
        ends=st.sampled_from([0.0, 0.1]),
        forgets=st.booleans(),
    )
    def build(self, page_size, room, host, watermark, eviction, kind, preemption, budget, ends, forgets):
        pages = (1 + room) * -(-LIMIT // page_size)
        cache = CacheConfig(pages, page_size, host, watermark, self.prefix_caching, eviction)
        limits = SchedulerConfig(5, budget, LIMIT, kind, preemption)
        self.force = ForceNext()
        self.scheduler = Scheduler(limits, PagedMemory(cache), force=self.force, check=True)
        tells: Callable[[int], bool] = (lambda step: step % 4 > 0) if forgets else (lambda step: True)
        self.run = ScriptedRun(self.scheduler, FakeModel(vocab=3, end_share=ends), tells=tells)
        self.taken: list[Request] = []
        self.aborted: set[int | str] = set()

    @rule(
        prompt=st.integers(1, 30),
        shared=st.integers(0, 30),
        output=st.integers(1, 20),
        num_seqs=st.sampled_from([1, 1, 1, 2, 3, 4]),
        beam=st.booleans(),
        salt=st.sampled_from([None, None, "x"]),
        gives_ids=st.booleans(),
        draw=st.randoms(use_true_random=False),
    )
    def submit(self, prompt, shared, output, num_seqs, beam, salt, gives_ids, draw):
        ids = tuple([0] * min(prompt, shared) + [draw.randrange(2) for _ in range(prompt - min(prompt, shared))])
        request = Request(
            len(self.run.outputs),
            prompt,
            output,
            num_seqs=num_seqs,
            beam=beam and num_seqs > 1,
            prompt_ids=ids if gives_ids else None,
            salt=salt,
        )
        before = (self.scheduler.num_waiting, self.scheduler.num_running, self.scheduler.counters)
        try:
            self.run.submit(request)
        except RequestRejected:
            assert before == (self.scheduler.num_waiting, self.scheduler.num_running, self.scheduler.counters)
        else:
            self.taken.append(request)

    @rule(count=st.integers(1, 6))
    def step(self, count):
        for _ in range(count):
            self.run.step()

    @precondition(lambda self: self.scheduler.has_work)
    @rule(index=st.integers(0, 100))
    def abort(self, index):
        groups = self.scheduler.groups()
        request_id = groups[index % len(groups)].request.request_id
        assert self.run.abort(request_id)
        assert not self.run.abort(request_id)
        self.aborted.add(request_id)

    @rule(index=st.integers(0, 10), mode=st.sampled_from(["recompute", "swap"]))
    def preempt(self, index, mode):
        self.force.victims.append((index, mode))

    @rule(pages=st.integers(1, 8))
    def evict(self, pages):
        self.force.pages += pages

    def teardown(self):
        if not hasattr(self, "run"):
            return
        outputs = self.run.run(limit=4000)
        expected = self.run.expected(*self.taken)
        for request in self.taken:
            if request.request_id not in self.aborted:
                assert outputs[request.request_id] == expected[request.request_id]
        memory, counters = self.scheduler.memory, self.scheduler.counters
        assert memory.num_free_pages == memory.num_pages
        assert memory.host.num_free == memory.host.num_pages
        assert (counters.finished, counters.failed) == (len(self.taken) - len(self.aborted), len(self.aborted))


class UncachedMachine(SchedulerMachine):
    """The same without a prefix index, where pages take the short way back to the free list."""

    prefix_caching = False


TestCached = SchedulerMachine.TestCase
TestCached.settings = settings(max_examples=1000, stateful_step_count=30)
TestUncached = UncachedMachine.TestCase
TestUncached.settings = settings(max_examples=600, stateful_step_count=30)


@pytest.mark.parametrize(("page_size", "pages"), [(1, 70), (2, 40), (4, 26), (16, 10)])
@pytest.mark.parametrize("kind", ["mixed", "chunked", "prompts_only"])
def test_everything_at_once(page_size, pages, kind):
    """One fixed run in which every rare path is taken, so that the machine's luck cannot hide one."""
    force = ForceNext()
    memory = PagedMemory(CacheConfig(pages, page_size, num_host_pages=pages, prefix_caching=True))
    limits = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=24, max_model_len=LIMIT, step_kind=kind)
    run = ScriptedRun(Scheduler(limits, memory, force=force, check=True), FakeModel(vocab=5, end_share=0.02))
    requests = [
        Request(i, 9 + i % 13, 12, num_seqs=1 + i % 4, beam=i % 4 > 1, prompt_ids=tuple([0] * 8 + [i] * (1 + i % 13)))
        for i in range(24)
    ]
    for index, request in enumerate(requests):
        run.submit(request)
        if index % 3 == 0:
            force.victims += [(index, "swap"), (index + 1, "recompute")]
        force.pages += index % 2
        run.step()
    assert run.run() == run.expected(*requests)
    plans = run.plans
    assert {event.mode for plan in plans for event in plan.preempted} == {"swap", "recompute"}
    assert any(plan.swap_in for plan in plans)
    assert any(plan.copies for plan in plans) or page_size == 1
    assert any(event.cached_tokens for plan in plans for event in plan.admitted)
    assert any(plan.beams and plan.prefills for plan in plans)
    assert any("forced" not in event.cause for plan in plans for event in plan.preempted)
    assert memory.cache.evictions > 0
