"""Where every slot of the pool is: one small example per share, and sums over runs of steps in closed form."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.config import CacheConfig, SchedulerConfig
from paxkv.request import Request
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.plan import StepResult
from paxkv.sched.reserve import ReservedMemory
from paxkv.sched.scheduler import Scheduler
from paxkv.sched.waste import CATEGORIES, Usage, WasteMeter


def paged(**config) -> Scheduler:
    limits = SchedulerConfig(max_num_batched_tokens=20, max_num_seqs=9, step_kind="chunked")
    return Scheduler(limits, PagedMemory(CacheConfig(20, 4, **config)), check=True)


def step(scheduler: Scheduler, **result) -> Usage:
    """The pool in the step, which is then completed."""
    scheduler.schedule()
    usage = scheduler.usage()
    scheduler.complete(StepResult(**result))
    return usage


def shares(usage: Usage) -> dict[str, int]:
    return {name: getattr(usage, name) for name in CATEGORIES if getattr(usage, name)}


def test_live_internal_and_free():
    """Ten tokens in three pages of four."""
    scheduler = paged()
    scheduler.submit(Request("a", 10, 5))
    usage = step(scheduler)
    assert shares(usage) == {"live": 10, "internal": 2, "free": 68}
    assert (usage.pages, usage.logical_pages) == (3, 3)
    assert shares(step(scheduler)) == {"live": 11, "internal": 1, "free": 68}
    assert shares(scheduler.usage()) == {"live": 11, "internal": 1, "free": 68}  # the newest has no slot yet


def test_shared():
    """Three samples of ten tokens: nine tokens are one copy for all, until each writes into its own third page."""
    scheduler = paged()
    scheduler.submit(Request("a", 10, 5, num_seqs=3))
    usage = step(scheduler)
    assert shares(usage) == {"shared": 10, "internal": 2, "free": 68}
    assert (usage.pages, usage.logical_pages) == (3, 9)
    usage = step(scheduler)
    assert shares(usage) == {"shared": 8, "live": 9, "internal": 3, "free": 60}
    assert (usage.pages, usage.logical_pages) == (5, 9)


def test_reserved():
    """A prompt of 30 tokens, 20 a step: its last ten slots are taken, and empty until the next step."""
    scheduler = paged()
    scheduler.submit(Request("a", 30, 5))
    assert shares(step(scheduler)) == {"live": 20, "reserved": 10, "internal": 2, "free": 48}
    assert shares(step(scheduler)) == {"live": 30, "internal": 2, "free": 48}


def test_reserved_of_a_shared_prompt():
    scheduler = paged()
    scheduler.submit(Request("a", 30, 2, num_seqs=2))
    assert shares(step(scheduler)) == {"shared": 20, "reserved": 10, "internal": 2, "free": 48}


def test_reserved_when_different_answers_are_recomputed():
    """Two samples of 18 + 6 tokens come back: 16 tokens are shared, and each has 8 of its own to compute."""
    scheduler = paged()
    scheduler.submit(Request("a", 18, 9, num_seqs=2))
    for _ in range(6):
        step(scheduler)
    scheduler._force = type("Force", (), {"preempt": lambda s, n, r: [(r[0], "recompute")], "evict": lambda s, n: 0})()
    assert shares(step(scheduler)) == {"free": 80}
    scheduler._force = None
    assert shares(step(scheduler)) == {"shared": 16, "live": 4, "reserved": 12, "free": 48}
    assert shares(step(scheduler)) == {"shared": 16, "live": 16, "free": 48}


def test_cached_pages_are_free():
    scheduler = paged(prefix_caching=True)
    scheduler.submit(Request("a", 10, 1, prompt_ids=tuple(range(10))))
    step(scheduler)
    usage = scheduler.usage()
    assert (shares(usage), usage.cached, usage.pages) == ({"free": 80}, 2, 0)


def test_swapped_sequences_are_not_in_the_pool():
    memory = PagedMemory(CacheConfig(20, 4, num_host_pages=9))
    force = type("Force", (), {"preempt": lambda s, n, r: [(r[-1], "swap")] if n == 1 else [], "evict": lambda s, n: 0})
    scheduler = Scheduler(SchedulerConfig(), memory, force=force(), check=True)
    scheduler.submit(Request("a", 4, 5))
    scheduler.submit(Request("b", 9, 5))
    step(scheduler)
    assert shares(step(scheduler)) == {"live": 5, "internal": 3, "free": 72}


def test_external_and_internal_of_a_reservation():
    """Pow2: 10 + 5 tokens reserve 10 + 8 = 18, which are 5 pages of 4 in a chunk of 8."""
    scheduler = Scheduler(SchedulerConfig(max_model_len=64), ReservedMemory(20, 4, 64, "pow2"), check=True)
    scheduler.submit(Request("a", 10, 5))
    assert shares(step(scheduler)) == {"live": 10, "reserved": 5, "internal": 3, "external": 14, "free": 48}
    assert shares(step(scheduler)) == {"live": 11, "reserved": 4, "internal": 3, "external": 14, "free": 48}


@pytest.mark.parametrize("change", [{"live": 11}, {"free": 69}, {"internal": 3, "reserved": -1}])
def test_shares_must_add_up(change):
    usage = Usage(live=10, internal=2, free=68)
    usage.check(80)
    with pytest.raises(AssertionError, match="must add up to its 80 slots, got live"):
        dataclasses.replace(usage, **change).check(80)


# --- sums over steps ------------------------------------------------------------------------------


@given(
    page_size=st.integers(1, 5),
    steps=st.integers(1, 40),
    growing=st.integers(1, 6),
    cached=st.integers(0, 60),
    spare=st.integers(0, 30),
    absorbs=st.sampled_from(["internal", "reserved"]),
    data=st.data(),
)
def test_a_run_of_steps_is_the_sum_of_its_steps(page_size, steps, growing, cached, spare, absorbs, data):
    """Sequences gain a token per step; new pages come from the free ones, then from the cached ones."""
    growth = tuple(data.draw(st.lists(st.integers(0, 2), min_size=page_size, max_size=page_size)))
    if absorbs == "reserved":
        growth = (0,) * page_size
    taken = sum(growth[j % page_size] for j in range(steps - 1))
    usage = Usage(
        live=50,
        shared=7,
        reserved=growing * steps,
        internal=growing * steps,
        external=3,
        free=(taken + spare) * page_size,
        pages=30,
        logical_pages=40,
        cached=min(cached, taken + spare),
    )
    options = {"groups": 4, "growing": growing, "page_size": page_size, "absorbs": absorbs}
    whole, single = WasteMeter(), WasteMeter()
    whole.add(usage, steps, growth=growth, **options)
    now = dataclasses.replace(usage)
    for j in range(steps):
        if j:
            pages = growth[(j - 1) % page_size]
            plain = now.free // page_size - now.cached
            now.live += growing
            setattr(now, absorbs, getattr(now, absorbs) - growing + (pages * page_size if absorbs == "internal" else 0))
            now.free -= pages * page_size
            now.pages += pages
            now.logical_pages += pages
            now.cached -= max(0, pages - plain)
        single.add(now, 1, growth=(), **options)
    assert whole.sums == single.sums
    assert (whole.steps, whole.groups) == (single.steps, single.groups) == (steps, 4 * steps)
    assert whole.sharing == pytest.approx(single.sharing, rel=1e-12)
    assert whole.sums.total == usage.total * steps


def test_what_a_meter_says():
    meter = WasteMeter()
    assert (meter.shares(), meter.mean_groups, meter.sharing_saved) == ({}, 0.0, 0.0)
    options = {"growing": 0, "growth": (), "page_size": 4, "absorbs": "internal"}
    meter.add(Usage(live=60, internal=20, free=20, pages=20, logical_pages=20), 1, groups=2, **options)
    meter.add(Usage(live=30, shared=30, internal=20, free=20, pages=20, logical_pages=60), 3, groups=6, **options)
    assert meter.mean_groups == 5.0
    assert meter.shares() == {
        "live": 37.5,
        "shared": 22.5,
        "reserved": 0.0,
        "internal": 20.0,
        "external": 0.0,
        "free": 20.0,
    }
    # Figure 15: 1 - 1 / mean(logical / physical) = 1 - 1 / ((1 + 3 * 3) / 4)
    assert meter.sharing_saved == pytest.approx(60.0)
