"""Beam search as memory sees it: survivors keep their slots, and counts are those of the live tables."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.config import CacheConfig, SchedulerConfig
from paxkv.request import Request
from paxkv.sched import beam
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.plan import StepResult
from paxkv.sched.scheduler import Scheduler
from paxkv.testing.fake_model import FakeModel
from paxkv.testing.scripted import ScriptedRun


@pytest.mark.parametrize(
    ("parents", "slots"),
    [
        ((0, 1, 2, 3), (0, 1, 2, 3)),
        ((3, 2, 1, 0), (0, 1, 2, 3)),
        ((1, 1, 2, 2), (1, 1, 2, 2)),
        ((2, 2, 2, 2), (2, 2, 2, 2)),
        ((3, 3, 1, 1), (3, 1, 1, 3)),
        ((0,), (0,)),
        ((), ()),
    ],
)
def test_place(parents, slots):
    assert beam.place(parents, len(parents)) == slots


@given(
    st.integers(1, 6).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), min_size=n, max_size=n)))
)
def test_place_keeps_survivors(case):
    width, parents = case
    slots = beam.place(parents, width)
    assert sorted(slots) == sorted(parents)
    assert all(slots[parent] == parent for parent in parents)


@pytest.mark.parametrize(("parents", "width"), [((0, 1), 3), ((0, 3, 1), 3), ((-1, 0), 2), ((), 1)])
def test_place_refuses(parents, width):
    with pytest.raises(ValueError, match=f"needs {width} parents in 0..{width - 1}"):
        beam.place(parents, width)


def test_a_parent_kept_twice_and_a_child_dropped():
    """B12: after every step the owners are those that the live tables name, and at the end all pages are back."""
    memory = PagedMemory(CacheConfig(40, 16))
    scheduler = Scheduler(SchedulerConfig(), memory, check=True)
    scheduler.submit(Request("a", 20, 40, num_seqs=3, beam=True))
    for parents in [None, (0, 0, 2), (1, 1, 1), (0, 1, 2), (2, 2, 0), (1, 0, 0)] * 6:
        plan = scheduler.schedule()
        scheduler.complete(StepResult(parents={"a": parents or (0, 0, 1)} if plan.beams else None))
        tables = [seq.table for seq in scheduler.group("a").seqs]
        assert [memory.pool.owners[page] for page in range(40)] == [
            sum(page in table for table in tables) for page in range(40)
        ]
    assert len(scheduler.group("a").seqs[0].table) == 4
    while (plan := scheduler.schedule()) is not None:
        scheduler.complete(StepResult(parents={"a": (0, 1, 1)}))
    assert memory.num_free_pages == 40


@pytest.mark.parametrize("prompt", [20, 32])
def test_samples_after_the_first_step(prompt):
    """B12: page 0 has both owners; the tails of a 20-token prompt are two pages; a full page is not copied."""
    memory = PagedMemory(CacheConfig(40, 16))
    run = ScriptedRun(Scheduler(SchedulerConfig(), memory, check=True))
    request = Request("a", prompt, 40, num_seqs=2)
    run.submit(request)
    run.step()
    plan = run.step()
    first, second = (seq.table for seq in run.scheduler.group("a").seqs)
    owners = memory.pool.owners
    assert first[0] == second[0]
    assert owners[first[0]] == 2
    assert first[-1] != second[-1]
    assert owners[first[-1]] == owners[second[-1]] == 1
    assert len(plan.copies) == (prompt == 20)
    assert 40 - memory.num_free_pages == (3 if prompt == 20 else 4)
    outputs = run.run()
    assert outputs == run.expected(request)
    assert outputs["a"][0] != outputs["a"][1]
    assert memory.num_free_pages == 40


@pytest.mark.parametrize("width", [2, 4, 6])
@pytest.mark.parametrize("end_share", [0.0, 0.05])
def test_beams_of_every_width(width, end_share):
    """Beams end one by one, the rest compete on; contents, copies and sharing are checked in every step."""
    memory = PagedMemory(CacheConfig(60, 4))
    run = ScriptedRun(Scheduler(SchedulerConfig(), memory, check=True), FakeModel(width, end_share=end_share))
    requests = [Request(i, 7 + i, 20, num_seqs=width, beam=True) for i in range(4)]
    run.submit(*requests)
    assert run.run() == run.expected(*requests)
    widths = {wide for plan in run.plans for _, wide in plan.beams}
    assert (len(widths) > 1) == (end_share > 0)
    assert any(plan.copies for plan in run.plans)
    assert all(plan.horizon == 1 for plan in run.plans if plan.beams)
