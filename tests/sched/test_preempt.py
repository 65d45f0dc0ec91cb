"""Preemption by the paper's rules: who goes, how, what comes back and when, and that no work is lost or doubled."""

from __future__ import annotations

import pytest

from paxkv.config import CacheConfig, SchedulerConfig
from paxkv.request import Request
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.events import Blocked
from paxkv.sched.plan import StepPlan, StepResult
from paxkv.sched.scheduler import Scheduler
from paxkv.testing.force import ForceAt
from paxkv.testing.scripted import ScriptedRun


def paged(num_pages: int, page_size: int = 4, *, force=None, limits=None, **cache) -> Scheduler:
    cache = {"watermark": 0.0, **cache}
    memory = PagedMemory(CacheConfig(num_pages, page_size, **cache))
    return Scheduler(SchedulerConfig(**(limits or {})), memory, force=force, check=True)


def scripted(num_pages: int, page_size: int = 4, **options) -> ScriptedRun:
    return ScriptedRun(paged(num_pages, page_size, **options))


def step(scheduler: Scheduler, **result) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.complete(StepResult(**result))
    return plan


def preempted(plan: StepPlan) -> list[tuple]:
    return [(event.request_id, event.mode) for event in plan.preempted]


def admitted(plan: StepPlan) -> list:
    return [event.request_id for event in plan.admitted]


# --- who goes -------------------------------------------------------------------------------------


def test_the_latest_arrival_goes_first():
    """Three full pages, one free: a takes it, b takes c's. Then none is free, and the test asks for one: b goes."""
    scheduler = paged(4)
    for name in "abc":
        scheduler.submit(Request(name, 4, 8))
    step(scheduler)
    plan = step(scheduler)
    assert preempted(plan) == [("c", "recompute")]
    assert plan.decodes == (0, 1)
    assert plan.preempted[0].cause == "no free page for the next token of an earlier request"
    plan = step(scheduler)
    assert preempted(plan) == [("b", "recompute")]
    assert plan.decodes == (0,)


def test_a_victim_can_be_the_one_that_asks():
    """The last of the queue finds no page: it has nobody behind it, so it goes itself."""
    scheduler = paged(4)
    scheduler.submit(Request("a", 7, 8))
    scheduler.submit(Request("b", 8, 4))
    step(scheduler)
    plan = step(scheduler)
    assert preempted(plan) == [("b", "recompute")]
    assert plan.decodes == (0,)


def test_the_test_asks_one_page_per_sequence_needed_or_not():
    """The artifact's can-append test: free pages >= sequences of the group, in every step. Here two sequences need no
    new page, one is free, and yet the later group goes."""
    scheduler = paged(7, num_host_pages=9)
    scheduler.submit(Request("a", 4, 9, num_seqs=2))
    scheduler.submit(Request("b", 4, 9, num_seqs=2))
    step(scheduler)
    assert scheduler.memory.num_free_pages == 5
    plan = step(scheduler)  # a opens two pages, and b two: one is left
    assert not plan.preempted
    assert scheduler.memory.num_free_pages == 1
    assert preempted(step(scheduler)) == [("b", "swap")]


def test_the_last_one_left_takes_what_it_needs():
    """Alone with the pool, a group passes with its exact need: nobody else could be put out for it."""
    scheduler = paged(3)
    scheduler.submit(Request("a", 8, 4, num_seqs=1))
    step(scheduler)
    for _ in range(3):
        assert not step(scheduler).preempted
    assert not scheduler.has_work


@pytest.mark.parametrize("ticks", range(4))
@pytest.mark.parametrize("beam", [False, True])
def test_a_group_left_alone_needs_only_its_copies(beam, ticks):
    """Two samples of 5 tokens in a pool of three pages: one page is free, and one copy is all that they need."""
    run = scripted(3)
    before, request = Request("a", 1, 1 + ticks), Request("b", 5, 3, num_seqs=2, beam=beam)
    run.submit(before)
    run.run()
    assert run.scheduler.tick == ticks
    run.submit(request)
    assert run.run() == run.expected(before, request)
    assert run.scheduler.counters.preemptions == 0


def test_all_sequences_of_a_group_or_none():
    scheduler = paged(9, num_host_pages=20)
    scheduler.submit(Request("a", 4, 9, num_seqs=2))
    scheduler.submit(Request("b", 4, 9, num_seqs=3))
    step(scheduler)
    for _ in range(8):
        plan = step(scheduler)
        running = {seq // 2 if seq < 2 else 1 for seq in plan.decodes}
        assert len(plan.decodes) == sum({0: 2, 1: 3}[group] for group in running)
    assert scheduler.counters.preemptions > 0


def test_arrival_order_decides_whatever_the_order_of_return():
    """c came after b, but was swapped and is back while b waits to be recomputed: c still goes before b."""
    force = ForceAt({1: [("c", "swap"), ("b", "recompute")]})
    scheduler = paged(6, num_host_pages=9, force=force)
    for name, prompt, output in (("a", 4, 12), ("b", 8, 8), ("c", 3, 9)):
        scheduler.submit(Request(name, prompt, output))
    step(scheduler)
    assert [event.request_id for event in step(scheduler).preempted] == ["c", "b"]
    plan = step(scheduler)
    assert (len(plan.swap_in), admitted(plan)) == (1, ["b"])
    assert [group.request.request_id for group in scheduler.roster.running] == ["a", "c", "b"]
    victims = []
    while scheduler.has_work and not victims:
        victims += preempted(step(scheduler))
    assert victims == [("c", "recompute")]


def test_victims_go_back_in_arrival_order():
    force = ForceAt({1: [("b", "recompute"), ("d", "recompute"), ("c", "recompute")], 2: [("a", "recompute")]})
    scheduler = paged(40, force=force, limits={"max_num_seqs": 4})
    for name in "abcde":
        scheduler.submit(Request(name, 4, 8))
    step(scheduler)
    step(scheduler)
    assert [group.request.request_id for group in scheduler.roster.waiting] == ["b", "c", "d", "e"]
    plan = step(scheduler)
    assert (admitted(plan), plan.blocked) == ([], Blocked.JUST_PREEMPTED)  # a is the head, and went in this step
    assert admitted(step(scheduler)) == ["a", "b", "c", "d"]


def test_no_return_in_the_same_step():
    """c's pages become free, and would do for c: but it waits for the next step, and so does d behind it."""
    scheduler = paged(20, force=ForceAt({1: [("c", "recompute")]}))
    for name in "abc":
        scheduler.submit(Request(name, 4, 8))
    step(scheduler)
    scheduler.submit(Request("d", 4, 8))
    plan = step(scheduler)
    assert (admitted(plan), plan.blocked) == ([], Blocked.JUST_PREEMPTED)
    plan = step(scheduler)
    assert [(event.request_id, event.resumed) for event in plan.admitted] == [("c", True), ("d", False)]


# --- how ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preference", "num_seqs", "mode"),
    [
        ("auto", 1, "recompute"),
        ("auto", 2, "swap"),
        ("swap", 1, "swap"),
        ("swap", 2, "swap"),
        ("recompute", 1, "recompute"),
        ("recompute", 2, "recompute"),
    ],
)
def test_mode(preference, num_seqs, mode):
    run = scripted(11, num_host_pages=11, limits={"preemption": preference})
    requests = [Request("a", 8, 17), Request("b", 7, 17, num_seqs=num_seqs)]
    run.submit(*requests)
    assert run.run() == run.expected(*requests)
    modes = {event.mode for plan in run.plans for event in plan.preempted}
    assert modes == {mode}


def test_recomputation_is_one_prefill_of_prompt_and_answer():
    run = scripted(20, 16, force=ForceAt({19: [("a", "recompute")]}))
    run.submit(Request("a", 30, 40))
    for _ in range(20):
        run.step()
    event = run.plans[-1].preempted[0]
    assert (event.tokens_lost, event.pages_freed, event.cause) == (48, 3, "forced")
    plan = run.step()
    assert [(chunk.start, chunk.count, chunk.last) for chunk in plan.prefills] == [(0, 49, True)]
    assert run.scheduler.counters.recomputed_tokens == 49


@pytest.mark.parametrize(("budget", "together"), [(20, True), (19, False)])
def test_recomputation_of_a_group_keeps_the_budget(budget, together):
    """Two samples of 9 + 2 tokens: 11 for the first, 3 for the second, which shares 8; beside 5 of c and one decode."""
    limits = {"max_num_batched_tokens": budget, "max_num_seqs": 9}
    scheduler = paged(30, force=ForceAt({2: [("b", "recompute")]}), limits=limits)
    scheduler.submit(Request("a", 1, 9))
    scheduler.submit(Request("b", 9, 9, num_seqs=2))
    step(scheduler)
    step(scheduler)
    scheduler.submit(Request("c", 5, 9))
    step(scheduler)
    plan = scheduler.schedule()
    assert admitted(plan) == (["b", "c"] if together else ["b"])
    assert plan.prefill_tokens == 11 + 3 + (5 if together else 0)


@pytest.mark.parametrize(("budget", "fits"), [(15, True), (14, False)])
def test_recomputation_of_a_group_waits_for_the_budget(budget, fits):
    limits = {"max_num_batched_tokens": budget, "max_num_seqs": 9}
    scheduler = paged(30, force=ForceAt({3: [("b", "recompute")]}), limits=limits)
    scheduler.submit(Request("a", 1, 9))
    step(scheduler)
    scheduler.submit(Request("b", 9, 9, num_seqs=2))
    step(scheduler)
    step(scheduler)
    step(scheduler)
    plan = scheduler.schedule()
    assert (admitted(plan), plan.blocked) == ((["b"], None) if fits else ([], Blocked.BUDGET))


def test_tokens_lost_counts_shared_pages_once():
    """Two samples of a 10-token prompt, 3 tokens later: 8 shared, 2 * 4 of their own. In prefill: what is computed."""
    force = ForceAt({1: [("b", "recompute")], 3: [("a", "recompute")]})
    limits = {"max_num_batched_tokens": 14, "max_num_seqs": 8, "step_kind": "chunked"}
    scheduler = paged(30, force=force, limits=limits)
    scheduler.submit(Request("a", 10, 9, num_seqs=2))
    scheduler.submit(Request("b", 10, 9, num_seqs=2))
    step(scheduler)
    assert step(scheduler).preempted[0].tokens_lost == 4
    step(scheduler)
    assert step(scheduler).preempted[0].tokens_lost == 8 + 2 * 4


def test_a_prompt_in_progress_is_recomputed_and_says_why():
    force = ForceAt({1: [("a", "swap")]})
    limits = {"max_num_batched_tokens": 4, "max_num_seqs": 4}
    scheduler = paged(20, force=force, num_host_pages=20, limits=limits)
    scheduler.submit(Request("a", 10, 3))
    step(scheduler)
    event = step(scheduler).preempted[0]
    assert (event.mode, event.cause) == ("recompute", "forced; its prompt is not complete")
    assert scheduler.num_swapped == 0


def test_swapping_moves_shared_pages_once():
    run = scripted(20, force=ForceAt({2: [("a", "swap")]}), num_host_pages=9)
    run.submit(Request("a", 10, 9, num_seqs=3))
    for _ in range(3):
        run.step()
    plan = run.plans[-1]
    assert len(plan.swap_out) == 2 + 3
    assert plan.preempted[0].pages_freed == 5
    assert plan.preempted[0].tokens_lost == 0
    assert run.scheduler.memory.host.num_free == 4
    plan = run.step()
    assert len(plan.swap_in) == 5
    assert len(plan.decodes) == 3
    assert run.scheduler.counters.recomputed_tokens == 0


def test_a_group_swapped_before_its_first_token_still_copies_on_write():
    run = scripted(20, force=ForceAt({1: [("a", "swap")]}), num_host_pages=9)
    request = Request("a", 10, 9, num_seqs=3)
    run.submit(request)
    assert run.run() == run.expected(request)
    assert len(run.plans[1].swap_out) == 3
    assert len(run.plans[2].copies) == 2
    assert run.plans[2].copies[0][0] in {page for _, page in run.plans[2].swap_in}


# --- coming back ----------------------------------------------------------------------------------


def test_nobody_is_admitted_while_somebody_is_swapped():
    scheduler = paged(20, force=ForceAt({1: [("b", "swap")]}), num_host_pages=9, limits={"max_num_seqs": 3})
    for name, width in (("a", 1), ("b", 2)):
        scheduler.submit(Request(name, 8, 9, num_seqs=width))
    step(scheduler)
    scheduler.submit(Request("c", 1, 1))
    plan = step(scheduler)
    assert (preempted(plan), admitted(plan), plan.blocked) == ([("b", "swap")], [], Blocked.SWAPPED_FIRST)
    plan = step(scheduler)  # b comes back, and c would be the fourth sequence
    assert (len(plan.decodes), plan.blocked) == (3, Blocked.SEQUENCES)


@pytest.mark.parametrize(("num_pages", "watermark", "returns"), [(9, 0.0, True), (8, 0.0, False), (9, 0.12, False)])
def test_swap_in_asks_for_its_pages_one_per_sequence_and_the_watermark(num_pages, watermark, returns):
    """b has 3 pages and 2 sequences, a has 4: 4 + 3 + 2 and the watermark must fit."""
    scheduler = paged(num_pages, force=ForceAt({2: [("b", "swap")]}), num_host_pages=9, watermark=watermark)
    scheduler.submit(Request("a", 12, 9))
    scheduler.submit(Request("b", 4, 9, num_seqs=2))
    step(scheduler)
    step(scheduler)
    plan = step(scheduler)
    assert (len(plan.swap_out), plan.swap_in, plan.blocked) == (3, (), None)  # nobody waits
    assert scheduler.memory.num_free_pages == num_pages - 4
    assert bool(step(scheduler).swap_in) == returns


def test_nothing_is_swapped_in_when_something_is_swapped_out():
    """Both at once would only trade places."""
    force = ForceAt({1: [("b", "swap")], 2: [("c", "swap")]})
    scheduler = paged(40, force=force, num_host_pages=40)
    for name in "abc":
        scheduler.submit(Request(name, 8, 9, num_seqs=2))
    step(scheduler)
    step(scheduler)
    plan = step(scheduler)
    assert (bool(plan.swap_out), plan.swap_in) == (True, ())
    plan = step(scheduler)
    assert len(plan.swap_in) == 2 + 4  # b's prompt, which its sequences still share; c's, and one for each sequence
    assert len(plan.decodes) == 6


def test_prompts_only_waits_with_the_swapped():
    force = ForceAt({1: [("b", "swap")]})
    run = scripted(40, force=force, num_host_pages=40, limits={"step_kind": "prompts_only"})
    requests = [Request("a", 8, 9), Request("b", 8, 9, num_seqs=2), Request("c", 8, 9)]
    run.submit(*requests)
    assert run.run() == run.expected(*requests)
    assert run.plans[2].swap_in


# --- B16: no work is lost, repeated or mis-sized ----------------------------------------------------


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("produced", [1, 2, 3, 18, 19])
def test_resumed_requests(produced, times, mode, prefix_caching):
    """30 prompt tokens, 40 to generate, pages of 16; put out once or twice running after so many tokens."""
    out = [produced, produced + 2][:times]  # a step gives one token; one step to be out, one to be back
    force = ForceAt({at: [("a", mode)] for at in out})
    run = scripted(12, 16, force=force, num_host_pages=12, prefix_caching=prefix_caching)
    request = Request("a", 30, 40, prompt_ids=tuple(range(30)))
    run.submit(request)
    outputs = run.run()
    assert outputs == run.expected(request)
    assert len(outputs["a"][0]) == 40
    assert [plan.step for plan in run.plans if plan.preempted] == out
    for known, at in enumerate(out, start=30 + produced):
        (event,), back = run.plans[at].preempted, run.plans[at + 1]
        assert event.mode == mode
        if mode == "swap":
            assert (event.tokens_lost, len(back.decodes), back.prefills) == (0, 1, ())
        else:
            hits = (known - 1) // 16 * 16 if prefix_caching else 0
            assert event.tokens_lost == known - 1
            assert (back.admitted[0].resumed, back.admitted[0].cached_tokens) == (True, hits)
            assert [(chunk.start, chunk.count) for chunk in back.prefills] == [(hits, known - hits)]
    assert len(run.plans) == 40 + times
    assert run.scheduler.counters.preemptions == times
    assert run.scheduler.memory.num_free_pages == 12


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("times", [1, 2])
def test_resumed_prompts(times, mode, prefix_caching):
    """The same before any token is produced: 20 of the 30 prompt tokens are computed, 16 of them can be found again."""
    limits = {"max_num_batched_tokens": 20, "max_num_seqs": 8}
    force = ForceAt({at: [("a", mode)] for at in (1, 3)[:times]})
    run = scripted(12, 16, force=force, num_host_pages=12, prefix_caching=prefix_caching, limits=limits)
    request = Request("a", 30, 40, prompt_ids=tuple(range(30)))
    run.submit(request)
    assert run.run() == run.expected(request)
    hits = 16 if prefix_caching else 0
    chunks = [[(chunk.start, chunk.count) for chunk in plan.prefills] for plan in run.plans]
    assert chunks[:3] == [[(0, 20)], [], [(hits, min(20, 30 - hits))]]
    assert run.plans[1].preempted[0].tokens_lost == 20
    if times == 2:  # with the index the prompt is complete when the second one comes, and one token produced
        back = [(0, 20)] if not prefix_caching else [(16, 15)] if mode == "recompute" else []
        assert chunks[3:5] == [[], back]


# --- B18: the host pool runs out -------------------------------------------------------------------


@pytest.mark.parametrize("num_host_pages", [0, 2, 64])
@pytest.mark.parametrize("beam", [False, True])
def test_host_pool_runs_out(num_host_pages, beam):
    """8 pages of 16; two groups of two need 12. All finish with the outputs of an uncontended run; both pools end
    empty; what cannot be swapped is recomputed, and says so."""
    run = scripted(8, 16, num_host_pages=num_host_pages)
    requests = [Request(name, 20, 27, num_seqs=2, beam=beam) for name in "ab"]
    run.submit(*requests)
    assert run.run() == run.expected(*requests)
    counters, memory = run.scheduler.counters, run.scheduler.memory
    assert counters.swapped_out_pages == counters.swapped_in_pages
    assert (counters.swapped_out_pages > 0) == (num_host_pages == 64)
    assert (memory.num_free_pages, memory.host.num_free) == (8, num_host_pages)
    causes = {event.cause for plan in run.plans for event in plan.preempted}
    assert causes
    assert all(("host pool has no room" in cause) == (num_host_pages < 64) for cause in causes)


def test_beams_compete_again_in_the_step_that_recomputes_them():
    """The token of the recomputing prefill is a beam step like any other: parents are chosen in it."""
    run = scripted(20, force=ForceAt({3: [("a", "recompute")]}), num_host_pages=0)
    request = Request("a", 10, 9, num_seqs=3, beam=True)
    run.submit(request)
    assert run.run() == run.expected(request)
    back = run.plans[4]
    assert (back.beams, back.decodes) == ((("a", 3),), ())
    assert [chunk.start for chunk in back.prefills] == [0, 8, 8]
    assert back.prefill_tokens == 13 + 2 * 5
