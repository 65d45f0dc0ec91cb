"""Executors that run several steps at once and read tokens late: slots beforehand, ids and ends afterwards."""

from __future__ import annotations

import pytest

from paxkv.config import CacheConfig, SchedulerConfig
from paxkv.request import Request
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.plan import StepResult
from paxkv.sched.prefix_cache import PrefixCache
from paxkv.sched.scheduler import Scheduler
from paxkv.testing.force import ForceAt


def paged(num_pages: int = 40, page_size: int = 4, *, force=None, limits=None, **cache) -> Scheduler:
    memory = PagedMemory(CacheConfig(num_pages, page_size, **{"watermark": 0.0, **cache}))
    return Scheduler(SchedulerConfig(**(limits or {})), memory, force=force, check=True)


def start(scheduler: Scheduler, *requests: Request) -> None:
    for request in requests:
        scheduler.submit(request)
    scheduler.schedule()
    scheduler.complete(StepResult())


def test_commit_gives_the_slots_of_the_whole_run_and_changes_nothing_else():
    tables = []
    for commits in (False, True):
        scheduler = paged()
        start(scheduler, Request("a", 3, 20), Request("b", 6, 20))
        plan = scheduler.schedule()
        assert plan.horizon >= 9
        if commits:
            scheduler.commit(9)
            # Stored before: 3 and 6 tokens; nine more each.
            assert [len(scheduler.table(seq)) for seq in plan.decodes] == [3, 4]
        scheduler.complete(StepResult(9))
        tables.append(([list(scheduler.table(seq)) for seq in plan.decodes], scheduler.tick, scheduler.step))
    assert tables[0] == tables[1]


def test_commit_refuses_what_it_cannot_keep():
    scheduler = paged()
    with pytest.raises(ValueError, match="call schedule first"):
        scheduler.commit(1)
    start(scheduler, Request("a", 3, 6))
    plan = scheduler.schedule()
    with pytest.raises(ValueError, match=f"1 to {plan.horizon} steps, got {plan.horizon + 1}"):
        scheduler.commit(plan.horizon + 1)
    scheduler.commit(2)
    with pytest.raises(ValueError, match="not committed yet"):
        scheduler.commit(2)
    with pytest.raises(ValueError, match="2 steps were committed, the result covers 1"):
        scheduler.complete(StepResult(1))
    scheduler.complete(StepResult(2))


def test_ids_that_come_late_make_pages_findable_and_no_page_before_its_ids():
    scheduler = paged(prefix_caching=True)
    prompt = tuple(range(10, 16))
    start(scheduler, Request("a", 6, 12, prompt_ids=prompt))
    for _ in range(7):
        scheduler.schedule()
        scheduler.complete(StepResult())
    output = list(range(100, 108))
    scheduler.learn("a", output[:3])  # 9 ids: two full pages
    follow = (*prompt, *output, 7)
    scheduler.submit(Request("b", len(follow), 2, prompt_ids=follow))
    plan = scheduler.schedule()
    assert plan.admitted[0].cached_tokens == 8
    scheduler.complete(StepResult())
    with pytest.raises(ValueError, match="15 tokens, 9 of them with ids; got 7 more"):
        scheduler.learn("a", [*output[3:], 1, 2])
    scheduler.learn("a", output[3:])
    scheduler.abort("b")
    scheduler.submit(Request("c", len(follow), 2, prompt_ids=follow))
    assert scheduler.schedule().admitted[0].cached_tokens == 12
    scheduler.complete(StepResult())
    scheduler.learn("gone", [1])


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("mode", ["stays", "recompute", "swap"])
def test_a_page_is_offered_once(monkeypatch, mode, late):
    """When it fills, not at every step: again only where another page of its content was evicted."""
    offers = []
    publish = PrefixCache.publish
    monkeypatch.setattr(PrefixCache, "publish", lambda self, *entry: offers.append(entry) or publish(self, *entry))
    monkeypatch.setattr(PrefixCache, "holds", lambda self, page: offers.append(page) or page in self._key_of)
    force = None if mode == "stays" else ForceAt({200: [("a", mode)]})
    scheduler = paged(110, prefix_caching=True, num_host_pages=110, force=force, limits={"max_num_batched_tokens": 999})
    scheduler.submit(Request("a", 6, 400, prompt_ids=tuple(range(6))))
    group, told = scheduler.group("a"), 6
    for token in range(390):
        scheduler.schedule()
        scheduler.complete(StepResult(tokens=None if late else {0: (token,)}))
        if late:
            known = group.known_at(scheduler.tick) - 1  # the newest is on its way
            scheduler.learn("a", [token] * (known - told))
            told = known
    pages, index = group.known_at(scheduler.tick) // 4, scheduler.memory.cache
    assert len(index.items()) >= pages - 1 > 90
    assert (index.evictions > 0) == (mode == "swap")
    assert len(offers) <= pages * (2 + index.evictions)  # asked for once more where it leaves


@pytest.mark.parametrize("mode", ["running", "recompute", "swap", "prefill"])
def test_an_end_seen_late_ends_the_request_wherever_it_is(mode):
    """Its end is told a step late, and that step may have preempted it or begun to recompute it."""
    victims = {} if mode == "running" else {2: [("a", "swap" if mode == "swap" else "recompute")]}
    limits = {"step_kind": "chunked", "max_num_batched_tokens": 4, "max_num_seqs": 4}
    scheduler = paged(num_host_pages=20, force=ForceAt(victims), limits=limits)
    start(scheduler, Request("b", 2, 12), Request("a", 2, 12))
    for _ in range(3 if mode == "prefill" else 2):
        scheduler.schedule()
        scheduler.complete(StepResult())
    states = {"running": (2, 0, 0), "recompute": (1, 0, 1), "swap": (1, 1, 0), "prefill": (2, 0, 0)}
    assert (scheduler.num_running, scheduler.num_swapped, scheduler.num_waiting) == states[mode]
    finished = scheduler.counters.finished
    assert scheduler.end("a") == ("a",)
    assert scheduler.end("a") == ()
    assert scheduler.counters.finished == finished + 1
    assert scheduler.num_running == 1 and not scheduler.num_swapped and not scheduler.num_waiting
    while scheduler.schedule() is not None:
        scheduler.complete(StepResult())
    assert scheduler.memory.num_free_pages == scheduler.memory.num_pages


def test_end_is_for_requests_of_one_sequence_between_plans():
    scheduler = paged()
    start(scheduler, Request("a", 3, 6, num_seqs=2))
    with pytest.raises(ValueError, match="2 sequences; name them in a StepResult"):
        scheduler.end("a")
    scheduler.schedule()
    with pytest.raises(ValueError, match="completed first"):
        scheduler.end("a")
