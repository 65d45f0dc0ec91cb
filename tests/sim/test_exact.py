"""Skip-ahead is exact: a run that skips whole horizons equals, bit for bit, the run that plans every step.

Compared are the times of every request, the clock at the end of every plan, preemptions, the integrals of the waste
meters, and the decisions of every step, down to the pages that are copied and swapped.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.config import CacheConfig, SchedulerConfig
from paxkv.request import Request
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.plan import StepPlan
from paxkv.sched.reserve import ReservedMemory
from paxkv.sched.scheduler import Scheduler
from paxkv.sched.static import StaticMemory
from paxkv.sched.waste import WasteMeter
from paxkv.sim.cost_model import CostExecutor, CostModel
from paxkv.sim.simulate import SimResult, Window, simulate
from paxkv.workload import build_workload, embedded_lengths

LIMIT = 512
"""Longest sequence here. The pools below hold two or three of them, so that the paged ones always run dry."""

# Every part of a step costs something, in numbers that are no round binary fractions: a clock that adds the same terms
# in another order ends elsewhere.
COST = CostModel(
    floor_s=9.3e-3,
    weights_s=16.7e-3,
    token_s=1.3e-4,
    exchange_token_s=2.3e-6,
    sequence_s=4.1e-4,
    group_s=7e-5,
    kv_token_s=5.3e-7,
    page_read_s=1.1e-6,
    page_copy_s=1.7e-5,
    swap_out_page_s=6.1e-4,
    swap_in_page_s=5.9e-4,
    swap_out_link_s=1.1e-2,
    swap_in_link_s=1.2e-2,
)

MEMORIES = {
    "page1": lambda: PagedMemory(CacheConfig(1200, page_size=1, num_host_pages=700)),
    "page16": lambda: PagedMemory(CacheConfig(75, num_host_pages=44)),
    "page64": lambda: PagedMemory(CacheConfig(19, page_size=64, num_host_pages=12)),
    "orca_max": lambda: ReservedMemory(141, 16, LIMIT, "max"),
    "orca_pow2": lambda: ReservedMemory(141, 16, LIMIT, "pow2"),
    "orca_oracle": lambda: ReservedMemory(141, 16, LIMIT, "oracle"),
    "static": lambda: StaticMemory(5, LIMIT, LIMIT - 8),
}
PAGED = ("page1", "page16", "page64")
KINDS = ("mixed", "chunked", "prompts_only")
# Edges that fall inside horizons, a window shorter than a step, an open end, and two that overlap.
WINDOWS = (Window(3.1, 17.3), Window(5.0, 5.004), Window(9.77), Window(0.0, 1000.0))


@functools.cache
def small_lengths():
    return embedded_lengths("sharegpt", max_total_tokens=LIMIT)


def workload(rate: float = 3.0, duration_s: float = 15.0, *, arrivals="slots", num_seqs=1, beam=False, seed=0):
    """Requests with ShareGPT's lengths up to ``LIMIT`` tokens."""
    lengths = build_workload(small_lengths(), rate, duration_s, arrivals=arrivals, seed=seed)
    columns = (lengths.prompt_tokens.tolist(), lengths.output_tokens.tolist(), lengths.arrival_s.tolist())
    rows = enumerate(zip(*columns, strict=True))
    return [Request(i, p, o, t, num_seqs=num_seqs, beam=beam) for i, (p, o, t) in rows]


def expand(plan: StepPlan, steps: int) -> list[tuple]:
    """What each of a plan's steps does: the changes belong to the first, the decodes to all."""
    changes = (plan.prefills, plan.swap_out, plan.swap_in, plan.copies, plan.admitted, plan.preempted, plan.beams)
    rows, tokens, pages = [], plan.context_tokens, plan.context_pages
    for j in range(steps):
        rows.append((changes if j == 0 else ((),) * len(changes), plan.decodes, plan.num_groups, tokens, pages))
        tokens += len(plan.decodes)
        pages += plan.growth[j % len(plan.growth)] if plan.growth else 0
    return rows


@dataclasses.dataclass
class Trace:
    """A run, with the clock and the decisions of its steps."""

    result: SimResult
    scheduler: Scheduler
    decisions: list[tuple]
    clock: dict[int, float]  # at the end of each plan, by the index of the next step
    blocked: dict[int, object]  # by the index of each plan's first step
    busy_s: float

    @property
    def plans(self) -> int:
        return len(self.clock)


def run(memory, requests, *, windows=WINDOWS, check=False, **config) -> Trace:
    scheduler = Scheduler(SchedulerConfig(**{"max_model_len": LIMIT} | config), memory, check=check)
    decisions, clock, blocked, busy_s = [], {}, {}, 0.0

    def on_step(start, end, plan, result, outcome):
        nonlocal busy_s
        assert plan.step == len(decisions)
        busy_s += end - start
        blocked[plan.step] = plan.blocked
        decisions.extend(expand(plan, result.steps))
        clock[len(decisions)] = end

    result = simulate(requests, scheduler, COST, windows=windows, on_step=on_step)
    assert len(decisions) == result.steps == scheduler.step
    return Trace(result, scheduler, decisions, clock, blocked, busy_s)


def require_equal(skip: Trace, single: Trace) -> None:
    """Bit for bit. Only ``sharing``, a sum of quotients, may differ in its last digits."""
    a, b = skip.result, single.result
    for field in ("arrival_s", "first_token_s", "finish_s", "output_tokens", "preemptions"):
        np.testing.assert_array_equal(getattr(a, field), getattr(b, field), err_msg=field)
    for field in ("rejected", "steps", "tokens", "end_s", "counters"):
        assert getattr(a, field) == getattr(b, field), field
    first = next((i for i, (x, y) in enumerate(zip(skip.decisions, single.decisions, strict=True)) if x != y), None)
    assert first is None, f"step {first}: {skip.decisions[first]} or {single.decisions[first]}"
    assert skip.clock == {step: single.clock[step] for step in skip.clock}
    assert skip.blocked == {step: single.blocked[step] for step in skip.blocked}
    for skipped, stepped in zip(a.meters, b.meters, strict=True):
        assert (skipped.steps, skipped.groups) == (stepped.steps, stepped.groups)
        assert skipped.sums == stepped.sums
        assert math.isclose(skipped.sharing, stepped.sharing, rel_tol=1e-12)


def compare(make, requests, **options) -> Trace:
    """Runs both ways and returns the run that skips."""
    skip = run(make(), requests, **options)
    require_equal(skip, run(make(), requests, **options | {"max_horizon": 1}))
    return skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", MEMORIES)
def test_every_memory_and_step_kind(memory, kind):
    budget = 96 if kind == "chunked" else 1 << 20 if memory == "static" else 2560
    trace = compare(MEMORIES[memory], workload(), step_kind=kind, max_num_batched_tokens=budget)
    assert trace.plans < 0.6 * trace.result.steps, "the run hardly skipped, so it shows nothing"
    assert sum(meter.steps for meter in trace.result.meters[:3]) > 500
    if memory in PAGED:
        assert trace.result.counters.preemptions > 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", PAGED)
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_preemption(memory, kind, preemption):
    trace = compare(
        MEMORIES[memory], workload(seed=1), step_kind=kind, preemption=preemption, max_num_batched_tokens=600
    )
    counters = trace.result.counters
    assert counters.recomputed_tokens > 0 if preemption == "recompute" else counters.swapped_out_pages > 0
    assert counters.swapped_in_pages == counters.swapped_out_pages
    assert counters.preemptions == trace.result.preemptions.sum() > 5


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize(("num_seqs", "beam"), [(3, False), (2, True), (3, True)], ids=["n3", "beam2", "beam3"])
def test_groups(memory, num_seqs, beam):
    requests = workload(1.5, 8.0, num_seqs=num_seqs, beam=beam, seed=2)
    budget = 1 << 20 if memory == "static" else 2560
    trace = compare(MEMORIES[memory], requests, max_num_batched_tokens=budget)
    assert trace.result.counters.finished > 3
    if memory in PAGED:
        assert trace.result.counters.swapped_in_pages > 0
        assert any(meter.sums.shared for meter in trace.result.meters)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("kind", KINDS)
def test_groups_in_every_step_kind(kind, preemption):
    requests = workload(1.5, 10.0, num_seqs=3, seed=3)
    options = {"step_kind": kind, "preemption": preemption, "max_num_batched_tokens": 200}
    trace = compare(MEMORIES["page16"], requests, **options)
    assert trace.result.counters.preemptions > 0
    assert trace.plans < 0.5 * trace.result.steps


def with_ids(requests, prefix: int) -> list[Request]:
    """The same requests behind a prefix of all. Prompts of equal length share more: all, or their first half."""
    shared = tuple(range(prefix))
    changed = []
    for request in requests:
        own = [10_000 + request.prompt_tokens * 7 + j for j in range(request.prompt_tokens)]
        if request.request_id % 2:
            half = len(own) // 2
            own[half:] = [1_000_000 + 1000 * request.request_id + j for j in range(len(own) - half)]
        ids = shared + tuple(own)
        changed.append(dataclasses.replace(request, prompt_tokens=len(ids), prompt_ids=ids))
    return changed


@pytest.mark.parametrize("eviction", ["lru", "fifo", "lfu", "mru"])
@pytest.mark.parametrize("kind", KINDS)
def test_shared_prefixes(kind, eviction):
    config = CacheConfig(90, num_host_pages=40, prefix_caching=True, eviction=eviction)
    requests = with_ids(workload(2.5, 12.0, seed=4), 80)
    options = {"step_kind": kind, "max_num_batched_tokens": 256, "max_model_len": LIMIT + 80}
    trace = compare(lambda: PagedMemory(config), requests, **options)
    memory = trace.scheduler.memory
    assert trace.result.counters.prefix_hits > 0
    assert trace.result.counters.preemptions > 0
    assert isinstance(memory, PagedMemory) and memory.cache is not None and memory.cache.evictions > 20
    assert trace.result.meters[0].sums.cached > 0


@pytest.mark.parametrize("page_size", [1, 64])
def test_shared_prefixes_in_other_pages(page_size):
    config = CacheConfig(1440 // page_size, page_size, 900 // page_size, prefix_caching=True)
    requests = with_ids(workload(2.5, 12.0, num_seqs=2, seed=5), 128)
    trace = compare(lambda: PagedMemory(config), requests, max_model_len=LIMIT + 128)
    assert trace.result.counters.prefix_hits > 0
    assert trace.result.counters.swapped_out_pages > 0


@pytest.mark.parametrize("arrivals", ["at once", "bursty", "sparse"])
@pytest.mark.parametrize("memory", MEMORIES)
def test_arrivals(memory, arrivals):
    if arrivals == "at once":
        requests = workload(2.0, 12.0, arrivals="all_at_once")
    elif arrivals == "bursty":
        lengths = build_workload(small_lengths(), 2.0, 15.0, arrivals="gamma", burstiness=4.0, seed=1)
        columns = (lengths.prompt_tokens.tolist(), lengths.output_tokens.tolist(), lengths.arrival_s.tolist())
        requests = [Request(i, p, o, t) for i, (p, o, t) in enumerate(zip(*columns, strict=True))]
    else:
        requests = workload(0.08, 200.0, arrivals="poisson")
    trace = compare(MEMORIES[memory], requests, windows=(Window(2.0, 90.0), Window(30.5, 31.0), Window(0.0)))
    assert trace.plans < 0.6 * trace.result.steps
    idle_s = trace.result.end_s - trace.busy_s
    assert idle_s > 50 if arrivals == "sparse" else idle_s < 5


@pytest.mark.parametrize("memory", MEMORIES)
def test_with_every_plan_checked(memory):
    requests = workload(2.0, 10.0, seed=6)
    budget = 1 << 20 if memory == "static" else 2560
    checked = run(MEMORIES[memory](), requests, check=True, max_num_batched_tokens=budget)
    require_equal(checked, run(MEMORIES[memory](), requests, max_horizon=1, check=True, max_num_batched_tokens=budget))


@pytest.mark.parametrize("max_horizon", [2, 3, 16, 17, 18, 100])
def test_any_longest_horizon_gives_the_same_run(max_horizon):
    requests = workload(2.0, 10.0, seed=7)
    longest = run(MEMORIES["page16"](), requests, preemption="swap")
    require_equal(
        run(MEMORIES["page16"](), requests, preemption="swap", max_horizon=max_horizon),
        run(MEMORIES["page16"](), requests, preemption="swap", max_horizon=1),
    )
    assert longest.result.counters.swapped_out_pages > 0


def test_limits_on_sequences_and_tokens():
    requests = workload(3.0, 10.0, seed=8)
    for config in ({"max_num_seqs": 2}, {"max_num_batched_tokens": 3}, {"max_num_batched_tokens": 40}):
        for kind in KINDS:
            compare(MEMORIES["page16"], requests, step_kind=kind, **config)


def test_windows_cut_horizons_and_change_nothing_else():
    requests = workload(0.5, 20.0, seed=9)
    edges = [0.37 * i for i in range(1, 60)]
    windows = tuple(Window(a, b) for a, b in zip(edges, edges[1:], strict=False))
    cut = compare(MEMORIES["page16"], requests, windows=windows)
    whole = compare(MEMORIES["page16"], requests, windows=(Window(edges[0], edges[-1]),))
    np.testing.assert_array_equal(cut.result.finish_s, whole.result.finish_s)
    assert cut.decisions == whole.decisions
    assert cut.plans > whole.plans
    assert sum(meter.steps for meter in cut.result.meters) == whole.result.meters[0].steps
    assert sum(meter.sums.live for meter in cut.result.meters) == whole.result.meters[0].sums.live


ROW = st.tuples(st.sampled_from([0.0, 0.0, 0.05, 0.7, 30.0]), st.integers(1, 40), st.integers(1, 60))
"""Seconds since the request before, prompt, output."""


@given(
    rows=st.lists(ROW, min_size=1, max_size=12),
    page_size=st.sampled_from([1, 2, 5, 16]),
    slots=st.integers(100, 260),
    host=st.integers(0, 30),
    width=st.sampled_from([(1, False), (1, False), (2, False), (3, True)]),
    kind=st.sampled_from(KINDS),
    preemption=st.sampled_from(["auto", "recompute", "swap"]),
    budget=st.sampled_from([4, 17, 2560]),
    prefix_caching=st.booleans(),
    edge=st.floats(0.01, 3.0),
)
def test_small_random_runs(rows, page_size, slots, host, width, kind, preemption, budget, prefix_caching, edge):
    requests, now = [], 0.0
    for index, (gap, prompt, output) in enumerate(rows):
        now += gap
        requests.append(
            Request(index, prompt, output, now, num_seqs=width[0], beam=width[1], prompt_ids=tuple(range(prompt)))
        )
    config = CacheConfig(-(-slots // page_size), page_size, host, prefix_caching=prefix_caching)
    compare(
        lambda: PagedMemory(config),
        requests,
        windows=(Window(0.0, edge), Window(edge)),
        check=True,
        step_kind=kind,
        preemption=preemption,
        max_num_batched_tokens=budget,
    )


# --- no work per sequence in a skip -------------------------------------------------------------------------------

HORIZON = 200


def lines_of_a_horizon(memory, num_requests: int) -> tuple[int, int]:
    """Python lines executed in planning, running, metering and completing one horizon, and the pages it appends."""
    scheduler = Scheduler(SchedulerConfig(max_horizon=HORIZON, max_num_batched_tokens=1 << 20), memory)
    executor, meter = CostExecutor(COST), WasteMeter()
    for index in range(num_requests):
        scheduler.submit(Request(index, 3, 1000))
    scheduler.complete(executor.execute(scheduler.schedule()))
    free, count = memory.num_free_pages, 0

    def on_event(frame, event, argument):
        nonlocal count
        count += event == "line"
        return on_event

    before = sys.gettrace()
    sys.settrace(on_event)
    try:
        plan = scheduler.schedule()
        usage, growing = scheduler.usage(), scheduler.num_growing
        result = executor.execute(plan)
        meter.add(
            usage,
            result.steps,
            groups=scheduler.num_running,
            growing=growing,
            growth=plan.growth,
            page_size=memory.page_size,
            absorbs=memory.absorbs,
        )
        scheduler.complete(result)
    finally:
        sys.settrace(before)
    assert result.steps == HORIZON and len(plan.decodes) == num_requests
    return count, free - memory.num_free_pages


@pytest.mark.parametrize(
    "make",
    [
        lambda: PagedMemory(CacheConfig(1000, page_size=1024)),
        lambda: ReservedMemory(128 * 128, 16, 2048, "oracle"),
        lambda: ReservedMemory(128 * 128, 16, 2048, "max"),
    ],
    ids=["paged", "orca_oracle", "orca_max"],
)
def test_a_skip_does_no_work_per_sequence(make):
    few, few_pages = lines_of_a_horizon(make(), 10)
    many, many_pages = lines_of_a_horizon(make(), 100)
    assert few_pages == many_pages == 0
    assert many == few
    assert few < 25 * HORIZON, "a step of a horizon is a few lines: clock, pages, sharing"


def test_a_skip_works_per_appended_page_only():
    few, few_pages = lines_of_a_horizon(PagedMemory(CacheConfig(5000, page_size=16)), 10)
    many, many_pages = lines_of_a_horizon(PagedMemory(CacheConfig(5000, page_size=16)), 100)
    assert (few_pages, many_pages) == (10 * 12, 100 * 12)  # 4 tokens stored, then 200 more: 12 boundaries of 16
    assert many - few <= 10 * (many_pages - few_pages)


def test_a_static_batch_is_skipped_too():
    """Its usage counts the members of the batch, once per plan; nothing is counted per step."""
    few, _ = lines_of_a_horizon(StaticMemory(10), 10)
    many, _ = lines_of_a_horizon(StaticMemory(100), 100)
    assert many - few <= 10 * 90
