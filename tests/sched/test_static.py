"""FasterTransformer's batches: who joins, padding, and that everyone waits for the longest."""

from __future__ import annotations

import pytest

from paxkv.config import SchedulerConfig
from paxkv.request import Request
from paxkv.sched.events import Blocked, RequestRejected
from paxkv.sched.plan import StepPlan, StepResult
from paxkv.sched.scheduler import Scheduler
from paxkv.sched.static import StaticMemory
from paxkv.testing.fake_model import FakeModel
from paxkv.testing.force import ForceAt
from paxkv.testing.scripted import ScriptedRun


def static(rows: int = 5, **options) -> Scheduler:
    limits = SchedulerConfig(max_num_batched_tokens=100_000)
    return Scheduler(limits, StaticMemory(rows, **options), check=True)


def step(scheduler: Scheduler, steps: int = 1, **result) -> tuple[StepPlan, tuple]:
    plan = scheduler.schedule()
    return plan, scheduler.complete(StepResult(steps, **result)).finished


def admitted(plan: StepPlan) -> list:
    return [event.request_id for event in plan.admitted]


def test_a_batch_is_full():
    scheduler = static(rows=3)
    for name in "abcd":
        scheduler.submit(Request(name, 10, 5))
    plan, _ = step(scheduler)
    assert (admitted(plan), plan.blocked) == (["a", "b", "c"], Blocked.BATCH)


def test_batches_of_one():
    scheduler = static(rows=1)
    for name in "ab":
        scheduler.submit(Request(name, 10, 2))
    finished = [step(scheduler)[1] for _ in range(4)]
    assert finished == [(), ("a",), (), ("b",)]


def test_longest_prompt_and_longest_output_stay_within_2040():
    """The sum is of the batch's longest, not of one request: c's short prompt and long output close the batch."""
    scheduler = static()
    scheduler.submit(Request("a", 1000, 40))
    scheduler.submit(Request("b", 1040, 1000))
    scheduler.submit(Request("c", 10, 1001))
    scheduler.submit(Request("d", 10, 10))
    plan, _ = step(scheduler)
    assert (admitted(plan), plan.blocked) == (["a", "b"], Blocked.BATCH)  # and d does not overtake c
    with pytest.raises(RequestRejected, match="2041 tokens, a batch allows 2040"):
        scheduler.submit(Request("e", 1041, 1000))
    with pytest.raises(RequestRejected, match="6 sequences, a batch has 5 rows"):
        scheduler.submit(Request("f", 10, 10, num_seqs=6))


def test_prompts_are_padded_to_the_longest():
    scheduler = static()
    for name, prompt in (("a", 3), ("b", 9), ("c", 7)):
        scheduler.submit(Request(name, prompt, 4))
    plan, _ = step(scheduler)
    assert [chunk.count for chunk in plan.prefills] == [9, 9, 9]
    assert [scheduler.group(name).padding for name in "abc"] == [6, 0, 2]
    plan, _ = step(scheduler)
    assert (plan.context_tokens, plan.context_pages) == (30, 0)


def test_everyone_waits_for_the_longest():
    scheduler = static(rows=3)
    for name, output in (("a", 2), ("b", 6), ("c", 4)):
        scheduler.submit(Request(name, 10, output))
    finished = []
    for _ in range(5):
        scheduler.submit(Request(f"late {len(finished)}", 5, 1))
        plan, done = step(scheduler)
        assert plan.decodes == () or len(plan.decodes) == 3  # rows that are done are computed all the same
        finished.append(done)
    assert finished == [(), (), (), (), ()]
    assert scheduler.num_growing == 1
    _, done = step(scheduler)
    assert sorted(done) == ["a", "b", "c"]
    plan, done = step(scheduler)
    assert admitted(plan) == ["late 0", "late 1", "late 2"]
    assert sorted(done) == ["late 0", "late 1", "late 2"]


def test_horizons_end_where_a_request_does():
    scheduler = static()
    for name, output in (("a", 4), ("b", 9)):
        scheduler.submit(Request(name, 10, output))
    step(scheduler)
    plan = scheduler.schedule()
    assert plan.horizon == 3
    scheduler.complete(StepResult(3))
    plan = scheduler.schedule()
    assert (plan.horizon, len(plan.decodes)) == (5, 2)
    assert sorted(scheduler.complete(StepResult(5)).finished) == ["a", "b"]


def test_waste():
    """Two rows of 2048: what is padding or behind the true end is internal, what will still come is reserved."""
    scheduler = static(rows=4)
    scheduler.submit(Request("a", 10, 2))
    scheduler.submit(Request("b", 30, 5))
    step(scheduler)
    scheduler.schedule()
    usage = scheduler.usage()
    assert (usage.live, usage.reserved, usage.internal) == (11 + 31, 1 + 4, 2 * 2048 - 12 - 35)
    assert (usage.external, usage.free, usage.pages) == (0, 2 * 2048, 2)
    scheduler.complete(StepResult())
    scheduler.schedule()  # a has ended with 12 tokens and waits
    usage = scheduler.usage()
    assert (usage.live, usage.reserved, usage.internal) == (12 + 32, 3, 2 * 2048 - 12 - 35)
    scheduler.complete(StepResult())
    usage = scheduler.usage()  # between steps b's newest token has no slot yet
    assert (usage.live, usage.reserved) == (12 + 32, 3)


def test_a_prompt_cut_by_the_budget_counts_its_padding_as_waste():
    limits = SchedulerConfig(max_num_batched_tokens=8)
    scheduler = Scheduler(limits, StaticMemory(2), check=True)
    scheduler.submit(Request("a", 2, 3))
    scheduler.submit(Request("b", 20, 3))
    live = []
    while scheduler.schedule():
        live.append(scheduler.usage().live)
        scheduler.complete(StepResult())
    # a's 18 padding slots come first; from the fourth step on a decode takes one of the eight tokens.
    assert live[:5] == [0, 0, 2 + 4, 3 + 11, 4 + 18]


def test_end_tokens_hold_their_row():
    """A sequence that ends early waits too; the last one takes all with it, be it by an end token or by its length."""
    scheduler = static()
    for name, num_seqs in (("a", 1), ("b", 2), ("c", 1)):
        scheduler.submit(Request(name, 10, 9, num_seqs=num_seqs))
    step(scheduler)
    assert step(scheduler, ended=(0, 1))[1] == ()
    usage = scheduler.usage()
    assert (usage.live, usage.pages) == (12 + 12 + 2 * 11, 4)
    assert scheduler.num_growing == 2
    assert step(scheduler, ended=(2,))[1] == ()
    assert scheduler.usage().live == 12 + 12 + 13 + 12
    assert step(scheduler, ended=(0,))[1] == ()  # what a row gives after its end means nothing
    assert sorted(step(scheduler, ended=(0, 3))[1]) == ["a", "b", "c"]
    assert not scheduler.has_work
    assert scheduler.memory.num_free_pages == 5


def test_ends_told_late_name_the_whole_batch():
    """The last end lets all go, and says so: nobody else will."""
    scheduler = static()
    for name in "abc":
        scheduler.submit(Request(name, 10, 9))
    step(scheduler)
    step(scheduler)
    assert scheduler.end("b") == ()
    assert scheduler.end("b") == ()
    assert step(scheduler)[1] == ()
    assert scheduler.end("a") == ()
    assert sorted(scheduler.end("c")) == ["a", "b", "c"]
    assert scheduler.counters.finished == 3
    assert not scheduler.has_work


def test_abort_of_the_longest_lets_the_others_go():
    """Nobody is left who could end the batch: it ends with the next step, instead of never."""
    scheduler = static()
    for name, output in (("a", 2), ("b", 900)):
        scheduler.submit(Request(name, 10, output))
    step(scheduler)
    assert step(scheduler)[1] == ()
    assert scheduler.abort("b")
    plan = scheduler.schedule()
    assert plan.horizon == 1
    assert scheduler.complete(StepResult()).finished == ("a",)
    assert not scheduler.has_work
    assert scheduler.memory.num_held == 0


def test_abort_of_a_waiting_row():
    scheduler = static()
    for name, output in (("a", 2), ("b", 5)):
        scheduler.submit(Request(name, 10, output))
    step(scheduler)
    step(scheduler)
    assert scheduler.abort("a")
    assert scheduler.memory.num_held == 0
    outcomes = [step(scheduler)[1] for _ in range(3)]
    assert outcomes == [(), (), ("b",)]


def test_beams_copy_rows_and_hold_without_choosing():
    run = ScriptedRun(static(), FakeModel(end_share=0.05))
    requests = [Request("a", 10, 6, num_seqs=2, beam=True), Request("b", 4, 12, num_seqs=3, beam=True)]
    run.submit(*requests)
    assert run.run() == run.expected(*requests)
    assert any(plan.copies for plan in run.plans)
    assert [request_id for request_id, _ in run.plans[8].beams] == ["b"]
    assert len(run.plans[8].decodes) > run.plans[8].beams[0][1]  # a's rows are computed, but choose no parents


def test_a_preempted_row_resumes_in_a_later_batch():
    memory = StaticMemory(3)
    force = ForceAt({3: [("a", "swap")]})
    scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=9999), memory, check=True, force=force)
    run = ScriptedRun(scheduler)
    requests = [Request("a", 10, 8), Request("b", 25, 12)]
    run.submit(*requests)
    assert run.run() == run.expected(*requests)
    assert run.finished == ["b", "a"]


@pytest.mark.parametrize("options", [{"max_batch_len": 0}, {"max_batch_len": 2049}, {"rows": 0}])
def test_bad_sizes(options):
    with pytest.raises(ValueError, match="must be"):
        static(**options)
