"""Who runs when: order, limits, refusals, aborts, horizons, and that nothing ever stalls."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxkv.config import CacheConfig, SchedulerConfig
from paxkv.request import Request
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.events import Blocked, RequestRejected, SchedulerStalled
from paxkv.sched.plan import StepPlan, StepResult
from paxkv.sched.scheduler import Scheduler
from paxkv.testing.fake_model import FakeModel
from paxkv.testing.force import ForceAt, ForceRandomly
from paxkv.testing.scripted import ScriptedRun


def paged(num_pages: int = 100, page_size: int = 4, *, force=None, limits=None, **cache) -> Scheduler:
    cache = {"watermark": 0.0, **cache}
    memory = PagedMemory(CacheConfig(num_pages, page_size, **cache))
    return Scheduler(SchedulerConfig(**(limits or {})), memory, force=force, check=True)


def submit(scheduler: Scheduler, *sizes: tuple[int, int] | tuple[int, int, int]) -> None:
    """Requests a, b, c, ... of (prompt, output) or (prompt, output, sequences)."""
    for name, (prompt, output, *wide) in zip("abcdefghij", sizes, strict=False):
        scheduler.submit(Request(name, prompt, output, num_seqs=wide[0] if wide else 1))


def step(scheduler: Scheduler, **result) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.complete(StepResult(**result))
    return plan


def admitted(plan: StepPlan) -> str:
    return "".join(str(event.request_id) for event in plan.admitted)


def drain(scheduler: Scheduler, limit: int = 10_000) -> list:
    finished = []
    for _ in range(limit):
        if scheduler.schedule() is None:
            return finished
        finished += scheduler.complete(StepResult()).finished
    raise AssertionError(scheduler.dump())


# --- order and limits -----------------------------------------------------------------------------


def test_first_come_first_served():
    """A small request never overtakes a large one that waits for memory."""
    scheduler = paged(9)
    submit(scheduler, (12, 5), (25, 5), (1, 1), (1, 1))
    plan = step(scheduler)
    assert (admitted(plan), plan.blocked) == ("a", Blocked.PAGES)
    assert scheduler.num_waiting == 3
    assert drain(scheduler) == ["a", "c", "d", "b"]


def test_prompts_and_decodes_share_one_step():
    scheduler = paged()
    submit(scheduler, (10, 5))
    step(scheduler)
    scheduler.submit(Request("z", 7, 5))
    plan = step(scheduler)
    assert (plan.decodes, [(chunk.seq_id, chunk.count) for chunk in plan.prefills]) == ((0,), [(1, 7)])
    assert plan.num_groups == 2


def test_prompts_only_steps():
    scheduler = paged(limits={"step_kind": "prompts_only"})
    submit(scheduler, (10, 5))
    step(scheduler)
    scheduler.submit(Request("z", 7, 5))
    plan = step(scheduler)
    assert (plan.decodes, plan.prefill_tokens) == ((), 7)
    assert step(scheduler).decodes == (0, 1)


def test_token_budget():
    """20 tokens a step: 12 + 8, then 2 decodes and 18 for prompts, of which the next needs 19."""
    scheduler = paged(limits={"max_num_batched_tokens": 20, "max_num_seqs": 9})
    submit(scheduler, (12, 9), (8, 2), (19, 9), (1, 9))
    assert admitted(step(scheduler)) == "ab"
    plan = step(scheduler)
    assert (admitted(plan), plan.blocked) == ("", Blocked.BUDGET)
    assert admitted(step(scheduler)) == "c"  # b has ended


def test_a_prompt_longer_than_the_budget_is_cut_when_it_is_alone():
    scheduler = paged(limits={"max_num_batched_tokens": 20, "max_num_seqs": 9})
    submit(scheduler, (8, 3), (50, 2), (5, 2))
    plans = [step(scheduler) for _ in range(6)]
    assert [plan.prefill_tokens for plan in plans] == [8, 0, 0, 20, 20, 10 + 5]
    assert [chunk.last for plan in plans for chunk in plan.prefills] == [True, False, False, True, True]


def test_prompts_only_keeps_the_budget_behind_a_cut_prompt():
    scheduler = paged(limits={"max_num_batched_tokens": 20, "max_num_seqs": 9, "step_kind": "prompts_only"})
    submit(scheduler, (30, 3), (11, 3), (9, 3))
    assert [step(scheduler).prefill_tokens for _ in range(3)] == [20, 10, 20]


def test_chunks_fill_the_budget():
    scheduler = paged(limits={"max_num_batched_tokens": 20, "max_num_seqs": 9, "step_kind": "chunked"})
    submit(scheduler, (30, 3), (15, 5))
    plans = [step(scheduler) for _ in range(4)]
    chunks = [[(chunk.seq_id, chunk.start, chunk.count, chunk.last) for chunk in plan.prefills] for plan in plans]
    assert chunks == [[(0, 0, 20, False)], [(0, 20, 10, True), (1, 0, 10, False)], [(1, 10, 5, True)], []]
    assert [plan.decodes for plan in plans] == [(), (), (0,), (0, 1)]


def test_sequences_are_limited_not_groups():
    scheduler = paged(limits={"max_num_seqs": 5})
    submit(scheduler, (4, 5, 2), (4, 2, 2), (4, 5, 2), (4, 5, 1))
    plan = step(scheduler)
    assert (admitted(plan), plan.blocked) == ("ab", Blocked.SEQUENCES)
    step(scheduler)
    assert admitted(step(scheduler)) == "cd"  # b has ended


def test_decodes_never_exceed_the_budget():
    """Every sequence that decodes is a token of the step, so no more run than the step has tokens."""
    scheduler = paged(limits={"max_num_batched_tokens": 6})
    submit(scheduler, (1, 9, 4), (1, 9, 4), (1, 9, 2))
    step(scheduler)
    plan = step(scheduler)
    assert (len(plan.decodes), plan.blocked) == (4, Blocked.SEQUENCES)
    with pytest.raises(RequestRejected, match="7 sequences, max_num_seqs is 256 and max_num_batched_tokens is 6"):
        scheduler.submit(Request("z", 1, 2, num_seqs=7))


def test_admission_keeps_the_watermark():
    """5% of 100 pages: the last five are for sequences that run."""
    scheduler = paged(100, watermark=0.05)
    submit(scheduler, (4 * 90, 30), (4 * 6, 2))
    plan = step(scheduler)
    assert (admitted(plan), plan.blocked) == ("a", Blocked.PAGES)
    scheduler.abort("b")
    scheduler.submit(Request("c", 4 * 5, 2))
    # One page for a's next token, then exactly five would be left: not for c.
    plan = step(scheduler)
    assert (admitted(plan), scheduler.memory.num_free_pages) == ("", 9)
    scheduler.abort("c")
    scheduler.submit(Request("d", 4 * 4, 2))
    assert admitted(step(scheduler)) == "d"
    assert scheduler.memory.num_free_pages == 5


def test_the_watermark_is_waived_for_a_request_alone():
    """Otherwise one that needs the pages of the watermark would wait forever."""
    for watermark in (0.1, 0.5, 0.99):
        scheduler = paged(10, watermark=watermark)
        submit(scheduler, (38, 2), (38, 2))
        assert admitted(step(scheduler)) == "a"
        assert drain(scheduler) == ["a", "b"]


# --- refusals -------------------------------------------------------------------------------------


def test_one_request_larger_than_the_pool():
    """B14: 8 pages of 16, limit 256. A and C can never fit and are refused with numbers; B and D do not notice."""
    scheduler = paged(8, 16, limits={"max_model_len": 256})
    run = ScriptedRun(scheduler)
    with pytest.raises(RequestRejected, match="needs 14 pages of 16 tokens .* 209 stored tokens.*, the pool has 8"):
        run.submit(Request("A", 200, 10))
    b, d = Request("B", 10, 10), Request("D", 100, 29)
    run.submit(b)
    run.step()
    with pytest.raises(RequestRejected, match="needs 13 pages"):
        run.submit(Request("C", 100, 100))
    run.submit(d)
    assert run.run() == run.expected(b, d)
    assert scheduler.memory.num_free_pages == 8
    with pytest.raises(RequestRejected, match="needs 9 pages"):
        run.submit(Request("E", 100, 30))  # 129 stored tokens; D's 128 were the most


def test_a_group_larger_than_the_pool():
    """Two sequences share the prompt's full page: 1 + 2 * 4 pages; three need 13."""
    scheduler = paged(9, 16)
    run = ScriptedRun(scheduler)
    wide = Request("a", 20, 60, num_seqs=2)
    run.submit(wide)
    with pytest.raises(RequestRejected, match=r"13 pages .* \(3 sequence\(s\) of 79 stored tokens\)"):
        run.submit(Request("b", 20, 60, num_seqs=3))
    assert run.run() == run.expected(wide)


@pytest.mark.parametrize(
    ("prompt", "output", "gives"), [(31, 10, 1), (31, 1, 1), (30, 2, 2), (1, 100, 31), (10, 1, 1), (32, 1, None)]
)
def test_fence_posts_of_the_length_limit(prompt, output, gives):
    """B15: limit 32. A prompt of 31 leaves room for one token; one of 32 is refused; each leaves the next alone."""
    scheduler = paged(16, limits={"max_model_len": 32})
    run = ScriptedRun(scheduler)
    if gives is None:
        with pytest.raises(RequestRejected, match=f"prompt has {prompt} tokens and max_model_len is 32"):
            run.submit(Request("a", prompt, output))
        with pytest.raises(RequestRejected):
            run.submit(Request("a", prompt + 1, output))
    else:
        run.submit(Request("a", prompt, output))
        assert [len(ids) for ids in run.run()["a"]] == [gives]
        assert len(run.plans) == gives  # no step behind the last token
    normal = Request("b", 5, 5)
    run.submit(normal)
    assert run.run()["b"] == run.expected(normal)["b"]
    assert scheduler.memory.num_free_pages == 16


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (-1, 5), (2.0, 5), (True, 5)])
def test_degenerate_requests_are_no_requests(sizes):
    with pytest.raises(ValueError, match="whole number of at least 1"):
        Request("a", *sizes)
    with pytest.raises(ValueError, match="prompt_ids must have"):
        Request("a", 2, 2, prompt_ids=())


def test_an_id_is_used_once_at_a_time():
    scheduler = paged()
    submit(scheduler, (5, 2))
    with pytest.raises(RequestRejected, match="in flight"):
        submit(scheduler, (5, 2))
    drain(scheduler)
    submit(scheduler, (5, 2))
    assert drain(scheduler) == ["a"]


def test_a_refusal_changes_nothing():
    scheduler = paged(8)
    submit(scheduler, (5, 9), (25, 4))
    step(scheduler)
    before = (scheduler.dump(), scheduler.counters, scheduler.usage())
    for request in (Request("a", 1, 1), Request("y", 99, 1), Request("z", 5000, 1), Request("w", 1, 1, num_seqs=300)):
        with pytest.raises(RequestRejected) as refusal:
            scheduler.submit(request)
        assert refusal.value.request_id == request.request_id
        assert refusal.value.reason in str(refusal.value)
    assert before == (scheduler.dump(), scheduler.counters, scheduler.usage())
    assert drain(scheduler) == ["a", "b"]


# --- protocol -------------------------------------------------------------------------------------


def test_plan_and_result_alternate():
    scheduler = paged()
    assert scheduler.schedule() is None
    with pytest.raises(ValueError, match="needs a plan"):
        scheduler.complete(StepResult())
    submit(scheduler, (5, 3))
    scheduler.schedule()
    for call in (scheduler.schedule, lambda: scheduler.abort("a")):
        with pytest.raises(ValueError, match="completed first"):
            call()
    scheduler.complete(StepResult())


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (StepResult(0), "1 to 1 steps, got 0"),
        (StepResult(2), "1 to 1 steps, got 2"),
        (StepResult(ended=(7,)), "must get a token"),
        (StepResult(ended=(0, 0)), "end once"),
        (StepResult(ended=(3,)), "must get a token"),
        (StepResult(parents={}), "parents of the 2 beams of request 'b'"),
        (StepResult(parents={"b": (0, 2)}), "needs 2 parents in 0..1"),
    ],
)
def test_a_result_that_does_not_fit_changes_nothing(result, message):
    """Sequence 0 decodes, 1 and 2 are beams, 3 is in the middle of its prompt."""
    scheduler = paged(limits={"max_num_batched_tokens": 12, "max_num_seqs": 9, "step_kind": "chunked"})
    scheduler.submit(Request("a", 5, 9))
    scheduler.submit(Request("b", 5, 9, num_seqs=2, beam=True))
    step(scheduler)
    scheduler.submit(Request("c", 30, 2))
    scheduler.schedule()
    before = (scheduler.dump(), scheduler.counters, scheduler.usage())
    if result.parents is None:
        result = StepResult(result.steps, result.ended, parents={"b": (0, 1)})
    with pytest.raises(ValueError, match=message):
        scheduler.complete(result)
    assert before == (scheduler.dump(), scheduler.counters, scheduler.usage())
    scheduler.complete(StepResult(parents={"b": (0, 1)}, ended=(0,)))


def test_a_first_token_can_be_the_end():
    """Of a group of three, one sequence ends with the token that its prompt gives, and the other two at once later."""
    scheduler = paged()
    submit(scheduler, (6, 9, 3), (5, 9))
    outcome_of = lambda **result: (scheduler.schedule(), scheduler.complete(StepResult(**result)))[1]  # noqa: E731
    outcome = outcome_of(ended=(1, 3))
    assert (outcome.first_tokens, outcome.finished) == (("a", "b"), ("b",))
    assert len(scheduler.group("a").seqs) == 2
    assert outcome_of(ended=(0, 2)).finished == ("a",)
    assert scheduler.memory.num_free_pages == 100


def test_ends_and_length_limits_in_one_step():
    """One sequence of a group ends in the very step in which the group reaches its limit, as does another group."""
    scheduler = paged()
    submit(scheduler, (6, 3, 3), (5, 3), (5, 9))
    for _ in range(2):
        step(scheduler)
    scheduler.schedule()
    assert sorted(scheduler.complete(StepResult(ended=(1, 3))).finished) == ["a", "b"]
    assert (scheduler.num_running, scheduler.num_growing) == (1, 1)
    assert drain(scheduler) == ["c"]


def test_tables_of_running_sequences():
    scheduler = paged(limits={"max_num_batched_tokens": 12, "max_num_seqs": 9, "step_kind": "chunked"})
    submit(scheduler, (5, 9), (30, 2))
    step(scheduler)
    scheduler.schedule()
    assert scheduler.table(0) == scheduler.group("a").seqs[0].table
    assert scheduler.table(1) == scheduler.group("b").seqs[0].table
    assert len(scheduler.table(1)) == 8


# --- aborts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_seqs", [1, 3])
@pytest.mark.parametrize("state", ["waiting", "prefill", "first token", "decoding", "preempted", "swapped", "resumed"])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_abort_in_every_state(state, num_seqs, prefix_caching):
    """What the victim holds comes back at once, and the two others end as if it had never been."""
    mode = "swap" if state == "swapped" else "recompute"
    force = ForceAt({4: [("victim", mode)]} if state in ("preempted", "swapped", "resumed") else {})
    limits = SchedulerConfig(max_num_batched_tokens=12, max_num_seqs=9, step_kind="chunked")
    memory = PagedMemory(CacheConfig(40, 4, num_host_pages=20, prefix_caching=prefix_caching))
    scheduler = Scheduler(limits, memory, force=force, check=True)
    run = ScriptedRun(scheduler)
    others = [Request("first", 9, 12, num_seqs=2), Request("last", 9, 12)]
    victim = Request("victim", 17, 12, num_seqs=num_seqs, prompt_ids=tuple(range(17)))
    run.submit(others[0], victim, others[1])
    steps = {"waiting": 0, "prefill": 1, "first token": 3, "decoding": 4, "preempted": 5, "swapped": 5, "resumed": 6}
    for _ in range(steps[state]):
        run.step()
    group = scheduler.group("victim")
    seen = {
        "waiting": group.state.value == "waiting",
        "prefill": bool(group.jobs) and not group.decoding,
        "first token": group.decoding and group.generated_at(scheduler.tick) == 1,
        "decoding": group.decoding and group.generated_at(scheduler.tick) == 2,
        "preempted": group.state.value == "waiting" and group.preemptions == 1,
        "swapped": group.state.value == "swapped",
        "resumed": group.state.value == "running" and group.preemptions == 1,
    }
    assert seen[state]
    assert run.abort("victim")
    assert not run.abort("victim")
    assert scheduler.counters.failed == 1
    memory.check(scheduler.groups(), scheduler.tick)
    outputs = run.run()
    assert {name: outputs[name] for name in ("first", "last")} == run.expected(*others)
    assert (memory.num_free_pages, memory.host.num_free) == (40, 20)


def test_abort_of_unknown_requests():
    scheduler = paged()
    submit(scheduler, (5, 1))
    drain(scheduler)
    assert not scheduler.abort("a")
    assert not scheduler.abort("never seen")
    assert scheduler.counters.failed == 0


# --- horizons -------------------------------------------------------------------------------------


def test_a_horizon_ends_at_the_first_length_limit():
    scheduler = paged(limits={"max_horizon": 30})
    submit(scheduler, (5, 9), (3, 60))
    step(scheduler)
    plan = scheduler.schedule()
    assert plan.horizon == 8
    assert scheduler.complete(StepResult(8)).finished == ("a",)
    assert scheduler.schedule().horizon == 30


def test_a_horizon_ends_where_a_test_would_fail():
    """Nine pages of four: a and b hold one each; at 18 tokens each the tenth page is asked for."""
    scheduler = paged(9)
    submit(scheduler, (4, 30), (4, 30))
    step(scheduler)
    plan = scheduler.schedule()
    assert plan.horizon == 12
    assert plan.growth == (0, 0, 0, 2)
    scheduler.complete(StepResult(12))
    assert scheduler.memory.num_free_pages == 1
    plan = scheduler.schedule()  # 17 stored tokens each
    assert [(event.request_id, event.mode) for event in plan.preempted] == [("b", "recompute")]


@settings(max_examples=500)
@given(
    page_size=st.integers(1, 5),
    num_pages=st.integers(2, 60),
    prompts=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    output=st.integers(2, 40),
    num_seqs=st.integers(1, 2),
    max_horizon=st.integers(1, 40),
)
def test_a_horizon_is_as_long_as_can_be(page_size, num_pages, prompts, output, num_seqs, max_horizon):
    """Compared with a walk that counts pages step by step: one page per sequence of the widest group stays free."""
    scheduler = paged(num_pages, page_size, limits={"max_horizon": max_horizon})
    for index, prompt in enumerate(prompts):
        wide = num_seqs if index == 0 and prompt % page_size == 0 else 1  # no half-filled page to copy
        try:
            scheduler.submit(Request(index, prompt, output, num_seqs=wide))
        except RequestRejected:
            continue
    if scheduler.schedule() is None:
        return
    scheduler.complete(StepResult())
    plan = scheduler.schedule()
    if plan is None or plan.prefills or plan.preempted:
        return
    running = [group for group in scheduler.groups() if group.decoding]
    lengths = [group.known_at(scheduler.tick) for group in running for _ in group.seqs]
    width = max(len(group.seqs) for group in running)
    free, steps = scheduler.memory.num_free_pages, 1
    while steps < min(max_horizon, output - 1):
        free -= sum((length + steps - 1) % page_size == 0 for length in lengths)
        if free < width:
            break
        steps += 1
    assert plan.horizon == steps


@pytest.mark.parametrize("seed", range(40))
def test_any_way_through_a_horizon_is_the_same(seed):
    """Taken whole, in single steps or in random parts: the same finish steps, preemptions and pool use."""

    def trajectory(part) -> list:
        draw, cut = random.Random(seed), random.Random(1)
        cache = CacheConfig(draw.choice([12, 20, 40]), draw.choice([2, 4, 8]), num_host_pages=draw.choice([0, 30]))
        scheduler = Scheduler(SchedulerConfig(max_num_seqs=8), PagedMemory(cache), check=True)
        for name in range(8):
            try:
                request = Request(name, draw.randint(1, 20), draw.randint(1, 25), num_seqs=draw.choice([1, 1, 2]))
                scheduler.submit(request)
            except RequestRejected:
                continue
        seen = []
        while (plan := scheduler.schedule()) is not None:
            steps = part(plan.horizon, cut)
            outcome = scheduler.complete(StepResult(steps))
            events = (outcome.finished, outcome.first_tokens, plan.preempted, plan.admitted)
            if any(events):
                seen.append((plan.step, scheduler.step if outcome.finished else None, events, scheduler.usage()))
        return [*seen, scheduler.step, scheduler.counters]

    whole = trajectory(lambda horizon, cut: horizon)
    single = trajectory(lambda horizon, cut: 1)
    parts = trajectory(lambda horizon, cut: cut.randint(1, horizon))

    def events(trace: list) -> list:
        """What happened and when; a plan that covers several steps begins earlier than its last step."""
        flat = []
        for step, end, (finished, first, preempted, admitted), usage in trace[:-2]:
            flat += [(step, first, preempted, admitted)] if first or preempted or admitted else []
            flat += [(end, finished, usage)] if finished else []
        return [*flat, *trace[-2:]]

    assert events(whole) == events(single) == events(parts)
    assert len(events(whole)) >= 5


def test_open_to_arrivals():
    scheduler = paged(10)
    submit(scheduler, (12, 9), (30, 5))
    step(scheduler)
    assert not step(scheduler).open_to_arrivals  # b waits, and nobody may overtake it
    scheduler.abort("b")
    assert step(scheduler).open_to_arrivals


# --- no stall -------------------------------------------------------------------------------------


def cheap_run(seed: int) -> int:
    """A run without checks but with everything else: returns its steps."""
    draw = random.Random(seed)
    page_size, limit = draw.choice([1, 2, 4, 16]), 24
    cache = CacheConfig(
        draw.choice([1, 2, 3]) * -(-limit // page_size),
        page_size,
        num_host_pages=draw.choice([0, 2, 40]),
        watermark=draw.choice([0.0, 0.01, 0.5, 0.97]),
        prefix_caching=draw.random() < 0.3,
    )
    config = SchedulerConfig(
        max_num_seqs=draw.choice([2, 5]),
        max_num_batched_tokens=draw.choice([3, 7, 50]),
        max_model_len=limit,
        step_kind=draw.choice(["mixed", "chunked", "prompts_only"]),
        preemption=draw.choice(["auto", "recompute", "swap"]),
    )
    force = ForceRandomly(seed) if draw.random() < 0.2 else None
    scheduler = Scheduler(config, PagedMemory(cache), force=force)
    waiting = []
    for name in range(draw.randint(2, 5)):
        num_seqs, prompt = draw.choice([1, 1, 1, 2, 3]), draw.randint(1, 16)
        beam = num_seqs > 1 and draw.random() < 0.3
        ids = (0,) * prompt if draw.random() < 0.5 else None
        waiting.append(Request(name, prompt, draw.randint(1, 9), num_seqs=num_seqs, beam=beam, prompt_ids=ids))
    served = 0
    for _ in range(3000):
        if waiting and draw.random() < 0.5:
            try:
                scheduler.submit(waiting.pop())
                served += 1
            except RequestRejected:
                pass
        plan = scheduler.schedule()
        if plan is None:
            if not waiting:
                break
            continue
        ended = tuple(seq for seq in plan.decodes if draw.random() < 0.03)
        parents = {name: tuple(draw.randrange(width) for _ in range(width)) for name, width in plan.beams}
        scheduler.complete(StepResult(1 if ended or parents else plan.horizon, ended, parents=parents or None))
    assert not scheduler.has_work, f"seed {seed}:\n{scheduler.dump()}"
    assert scheduler.counters.finished == served
    assert scheduler.memory.num_free_pages == scheduler.memory.num_pages
    return scheduler.step


@pytest.mark.parametrize("batch", range(10))
def test_ten_thousand_runs_never_stall(batch):
    assert sum(cheap_run(seed) for seed in range(1000 * batch, 1000 * (batch + 1))) > 10_000


def test_a_stall_is_an_error_with_a_dump():
    """Memory that refuses everything: no hang, but an error that shows the state."""

    class Broken(PagedMemory):
        def admit(self, group, *, alone, budget):
            return Blocked.PAGES

    scheduler = Scheduler(SchedulerConfig(), Broken(CacheConfig(8)), check=True)
    submit(scheduler, (5, 5), (6, 5))
    with pytest.raises(SchedulerStalled) as stall:
        scheduler.schedule()
    message = str(stall.value)
    for part in ("requests wait", "Blocked.PAGES", "free pages 8 of 8", "waiting (2)", "'a'", "known=6"):
        assert part in message


def test_swapped_work_that_cannot_return_is_a_stall_too():
    class Broken(PagedMemory):
        def can_swap_in(self, group, tick, *, alone):
            return False

    memory = Broken(CacheConfig(8, num_host_pages=8))
    scheduler = Scheduler(SchedulerConfig(), memory, check=True, force=ForceAt({1: [("a", "swap")]}))
    submit(scheduler, (5, 5))
    step(scheduler)
    assert step(scheduler).preempted
    with pytest.raises(SchedulerStalled, match=r"swapped \[Group\('a'"):
        scheduler.schedule()


def test_check_notices_a_leak():
    """The checks that every other test leans on do fail when a page is lost."""

    class Leaky(PagedMemory):
        def release(self, group, stored):
            group.seqs[0].table.pop()
            super().release(group, stored)

    scheduler = Scheduler(SchedulerConfig(), Leaky(CacheConfig(8)), check=True)
    submit(scheduler, (5, 2))
    step(scheduler)
    scheduler.schedule()
    with pytest.raises(AssertionError, match="page 0: 1 owners counted, 0 block-table entries found"):
        scheduler.complete(StepResult())


def test_check_notices_a_plan_without_pages():
    class Forgetful(PagedMemory):
        def grow(self, tick):
            return []

    scheduler = Scheduler(SchedulerConfig(), Forgetful(CacheConfig(8, 5)), check=True)
    submit(scheduler, (5, 3))
    step(scheduler)
    with pytest.raises(AssertionError, match="holds 1 pages for 6 tokens"):
        scheduler.schedule()


def test_scripted_runs_see_a_wrong_model():
    """The expected outputs are another way to the same tokens: another model gives others."""
    requests = [Request("a", 9, 8), Request("b", 9, 8, num_seqs=3, beam=True)]
    run = ScriptedRun(paged(), FakeModel(1))
    run.submit(*requests)
    assert run.run() == run.expected(*requests)
    assert run.outputs["a"][0] != FakeModel(2).outputs(requests[0], 8)[0]
