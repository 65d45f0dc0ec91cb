"""Simulated runs small enough to compute by hand, and what their figures mean."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from paxkv import metrics, sizing
from paxkv.config import CacheConfig, SchedulerConfig
from paxkv.request import Request
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.plan import StepPlan
from paxkv.sched.reserve import ReservedMemory
from paxkv.sched.scheduler import Scheduler
from paxkv.sched.static import StaticMemory
from paxkv.sched.waste import CATEGORIES
from paxkv.sim.cost_model import CostModel, UniformBeams
from paxkv.sim.simulate import SimResult, Window, simulate

# A step takes 2 s while it holds at most four tokens, and 0.25 s more for each further one. All sums are exact.
COST = CostModel(floor_s=1.0, weights_s=1.0, token_s=0.25)
NAN = float("nan")


def roomy() -> PagedMemory:
    return PagedMemory(CacheConfig(64, page_size=4))


def run(requests, memory=None, cost=COST, *, windows=(), beams=None, on_step=None, check=True, **config) -> SimResult:
    scheduler = Scheduler(SchedulerConfig(**config), memory or roomy(), check=check)
    return simulate(requests, scheduler, cost, windows=windows, beams=beams, on_step=on_step)


# --- times --------------------------------------------------------------------------------------------------------


def test_one_request():
    result = run([Request(0, 4, 3, arrival_s=10.0)])
    # The clock jumps to 10; one step for the prompt and the first token, one for each of the other two.
    assert result.first_token_s.tolist() == [12.0]
    assert result.finish_s.tolist() == [16.0]
    assert (result.steps, result.tokens, result.end_s) == (3, 2, 16.0)
    assert result.output_tokens.tolist() == [3]
    assert result.normalised_latency_s == 6 / 3


def test_one_output_token_needs_no_decode_step():
    result = run([Request(0, 8, 1)])
    assert result.first_token_s.tolist() == result.finish_s.tolist() == [3.0]  # 1 + 8 x 0.25
    assert (result.steps, result.tokens) == (1, 0)


def test_two_requests_overlap():
    result = run([Request(0, 4, 4), Request(1, 8, 2, arrival_s=1.0)])
    # 0-2 prompt of A; 2-5.25 A and the prompt of B, nine tokens; 5.25-7.25 both; 7.25-9.25 A alone.
    assert result.first_token_s.tolist() == [2.0, 5.25]
    assert result.finish_s.tolist() == [9.25, 7.25]
    assert result.steps == 4
    assert result.normalised_latency_s == (9.25 / 4 + 6.25 / 2) / 2


def test_prompts_of_their_own_step():
    result = run([Request(0, 4, 4), Request(1, 8, 2, arrival_s=1.0)], step_kind="prompts_only")
    # 0-2 prompt of A; 2-5 prompt of B, A waits; 5-7 both; 7-9 A; 9-11 A.
    assert result.first_token_s.tolist() == [2.0, 5.0]
    assert result.finish_s.tolist() == [11.0, 7.0]


def test_chunked_prompts():
    result = run([Request(0, 4, 4), Request(1, 8, 2, arrival_s=1.0)], step_kind="chunked", max_num_batched_tokens=4)
    # 0-2 prompt of A; then A takes one of four tokens and B three, three and two; a last step for B's second token.
    assert result.first_token_s.tolist() == [2.0, 8.0]
    assert result.finish_s.tolist() == [8.0, 10.0]


@pytest.mark.parametrize("arrival_s", [5.0, 6.0, 4.000001])
def test_an_arrival_inside_a_horizon_enters_at_the_next_boundary(arrival_s):
    plans = []
    result = run(
        [Request(0, 1, 10), Request(1, 1, 1, arrival_s=arrival_s)],
        on_step=lambda start, end, plan, result, outcome: plans.append((start, plan.horizon, result.steps)),
    )
    # A decodes from 2 on, up to nine steps in one go; B comes between the boundaries 4 and 6, or at 6.
    assert plans[1] == (2.0, 9, 2)
    assert plans[2][0] == 6.0
    assert result.first_token_s.tolist() == [2.0, 8.0]
    assert result.finish_s.tolist() == [20.0, 8.0]


def test_an_arrival_that_cannot_enter_does_not_cut_the_horizon():
    plans = []
    result = run(
        [Request(0, 1, 10), Request(1, 1, 1), Request(2, 1, 1, arrival_s=5.0)],
        on_step=lambda start, end, plan, result, outcome: plans.append(result.steps),
        max_num_seqs=1,
    )
    assert plans == [1, 9, 1, 1]
    assert result.finish_s.tolist() == [20.0, 22.0, 24.0]  # still first come, first served


def test_the_clock_jumps_over_idle_time():
    spans = []
    result = run(
        [Request(0, 1, 2), Request(1, 1, 2, arrival_s=1000.0), Request(2, 1, 1, arrival_s=1001.0)],
        on_step=lambda start, end, plan, result, outcome: spans.append((start, end)),
    )
    assert spans == [(0, 2), (2, 4), (1000, 1002), (1002, 1004)]
    assert result.finish_s.tolist() == [4.0, 1004.0, 1004.0]
    assert result.end_s == 1004


def test_steps_follow_one_another_without_gap_or_overlap():
    spans, steps = [], []

    def on_step(start, end, plan, result, outcome):
        spans.append((start, end))
        steps.append((plan.step, result.steps))

    requests = [Request(i, 3 + i % 5, 4 + i % 7, arrival_s=0.9 * i) for i in range(30)]
    result = run(requests, on_step=on_step)
    assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
    assert [a[0] + a[1] for a in steps] == [b[0] for b in steps[1:]] + [result.steps]


def test_a_static_batch_finishes_together():
    requests = [Request(0, 2, 2), Request(1, 4, 5), Request(2, 4, 1, arrival_s=1.0)]
    result = run(requests, StaticMemory(2, 64, 64), max_num_batched_tokens=1 << 20, max_model_len=64)
    # Both prompts are padded to four tokens: eight tokens, 3 s. Four steps of two rows follow, although the first
    # request has its tokens after one of them. The third waits for the whole batch.
    assert result.first_token_s.tolist() == [3.0, 3.0, 13.0]
    assert result.finish_s.tolist() == [11.0, 11.0, 13.0]
    assert result.tokens == 8, "rows that have finished are computed all the same"


def test_a_static_batch_takes_whoever_has_arrived():
    requests = [Request(0, 4, 3), Request(1, 4, 3, arrival_s=0.5), Request(2, 4, 3, arrival_s=3.0)]
    result = run(requests, StaticMemory(2, 64, 64), max_num_batched_tokens=1 << 20, max_model_len=64)
    assert result.finish_s.tolist() == [6.0, 13.0, 13.0]  # the second batch: eight prompt tokens, then two steps


# --- copies, swaps, pages -----------------------------------------------------------------------------------------

MOVES = dataclasses.replace(COST, page_copy_s=0.125, swap_out_page_s=0.5, swap_in_page_s=0.25)


def tight() -> PagedMemory:
    return PagedMemory(CacheConfig(4, page_size=2, num_host_pages=4))


def test_swapping_costs_its_pages():
    plans: list[StepPlan] = []
    result = run(
        [Request(0, 2, 6), Request(1, 2, 4)],
        tight(),
        MOVES,
        preemption="swap",
        on_step=lambda start, end, plan, result, outcome: plans.append(plan),
    )
    # 0-2 both prompts; 2-4 both open a second page, the pool is full; 4-7 no free page for A's next token, so B goes
    # out (two pages, 1 s); 7-13 A to its end; 13-15.5 B comes back (two pages, 0.5 s); 15.5-17.5 its last token.
    assert [len(plan.swap_out) for plan in plans if plan.preempted] == [2]
    assert result.finish_s.tolist() == [13.0, 17.5]
    assert result.preemptions.tolist() == [0, 1]
    assert (result.counters.swapped_out_pages, result.counters.swapped_in_pages) == (2, 2)
    assert result.counters.recomputed_tokens == 0


def test_an_arrival_behind_a_swapped_request_does_not_cut_the_horizon():
    plans = []
    result = run(
        [Request(0, 2, 6), Request(1, 2, 4), Request(2, 2, 1, arrival_s=8.0)],
        tight(),
        MOVES,
        preemption="swap",
        on_step=lambda start, end, plan, result, outcome: plans.append((start, result.steps)),
    )
    # As above; the horizon 7-11 ends where the pool does, not at 9. The third enters in the step that brings
    # the second back, not before.
    assert (7.0, 2) in plans
    assert result.finish_s[:2].tolist() == [13.0, 17.5]
    assert result.first_token_s[2] == 15.5


def test_recomputing_costs_its_tokens():
    result = run([Request(0, 2, 6), Request(1, 2, 4)], tight(), MOVES, preemption="recompute")
    # As above without the swaps: A ends at 12, then B computes its four known tokens in one step, and one more.
    assert result.finish_s.tolist() == [12.0, 16.0]
    assert result.first_token_s.tolist() == [2.0, 2.0], "the first token was there before the preemption"
    assert result.preemptions.tolist() == [0, 1]
    assert (result.counters.preemptions, result.counters.recomputed_tokens) == (1, 4)


def test_copy_on_write_costs_its_pages():
    result = run([Request(0, 3, 3, num_seqs=2)], roomy(), MOVES)
    # One prompt for both sequences. The first of them to write into the shared last page copies it.
    assert result.first_token_s.tolist() == [2.0]
    assert result.finish_s.tolist() == [2.0 + 2.125 + 2.0]
    assert result.tokens == 4
    assert result.output_tokens.tolist() == [3], "per sequence"


def test_beams_copy_what_they_share():
    class FirstWins:
        def parents(self, width):
            return (0,) * width

    result = run([Request(0, 3, 4, num_seqs=2, beam=True)], roomy(), MOVES, beams=FirstWins())
    # Each decode step ends with both beams on one table. The step that fills the page copies it; after a full page
    # both open one of their own, which the next step shares and copies again.
    assert result.finish_s.tolist() == [2.0 + 2.125 + 2.0 + 2.125]


PAGE_READS = dataclasses.replace(COST, page_read_s=0.5, kv_token_s=0.25)


def test_decodes_read_pages_and_tokens():
    result = run([Request(0, 3, 3)], PagedMemory(CacheConfig(8, page_size=2)), PAGE_READS)
    # The prompt step reads no context; then four tokens in two pages, and five in three.
    assert result.first_token_s.tolist() == [2.0]
    assert result.finish_s.tolist() == [2.0 + (2 + 1.0 + 1.0) + (2 + 1.25 + 1.5)]


@pytest.mark.parametrize("estimate", ["max", "pow2", "oracle"])
def test_reserved_memory_reads_the_pages_that_hold_tokens(estimate):
    memory = ReservedMemory(64, 2, 32, estimate)
    result = run([Request(0, 3, 3)], memory, PAGE_READS, max_model_len=32)
    assert result.finish_s.tolist() == [2.0 + 4.0 + 4.75]


def test_a_static_batch_reads_tokens_but_no_pages():
    memory = StaticMemory(2, 32, 32)
    result = run([Request(0, 3, 3)], memory, PAGE_READS, max_num_batched_tokens=1 << 20, max_model_len=32)
    assert result.finish_s.tolist() == [2.0 + (2 + 1.0) + (2 + 1.25)]


# --- requests that are not served ---------------------------------------------------------------------------------


def test_refused_requests_are_recorded_and_left_out():
    requests = [
        Request(0, 4, 3),
        Request(1, 64, 1),  # the prompt alone is longer than the model
        Request(2, 40, 9),  # longer than the pool
        Request(3, 4, 3, num_seqs=9),
        Request(4, 4, 3, arrival_s=50.0),
    ]
    result = run(requests, PagedMemory(CacheConfig(8, page_size=4)), max_model_len=64, max_num_seqs=8)
    assert [index for index, _ in result.rejected] == [1, 2, 3]
    reasons = dict(result.rejected)
    assert "the prompt has 64 tokens and max_model_len is 64" in reasons[1]
    assert "needs 12 pages of 4 tokens" in reasons[2] and "the pool has 8" in reasons[2]
    assert "9 sequences, max_num_seqs is 8" in reasons[3]
    for times in (result.first_token_s, result.finish_s):
        np.testing.assert_array_equal(np.isnan(times), [False, True, True, True, False])
    assert result.output_tokens.tolist() == [3, 0, 0, 0, 3]
    assert result.normalised_latency_s == 2.0
    assert result.counters.finished == 2


def test_a_refused_arrival_disturbs_nobody():
    alone = run([Request(0, 4, 9)])
    result = run([Request(0, 4, 9), Request(1, 5000, 1, arrival_s=3.0)])
    assert result.finish_s[0] == alone.finish_s[0]
    assert result.steps == alone.steps


def test_all_requests_refused():
    result = run([Request(i, 5000, 1, arrival_s=float(i)) for i in range(3)], windows=[Window()])
    assert len(result.rejected) == 3 and (result.steps, result.tokens) == (0, 0)
    assert math.isnan(result.normalised_latency_s)
    assert result.meters[0].shares() == {}
    assert (result.meters[0].mean_groups, result.meters[0].sharing_saved) == (0.0, 0.0)


def test_no_requests():
    result = run([], windows=[Window()])
    assert len(result.finish_s) == 0 and (result.steps, result.end_s) == (0, 0.0)
    assert math.isnan(result.normalised_latency_s)


def test_an_output_ends_at_the_longest_model_length():
    result = run([Request(0, 4, 100)], max_model_len=10)
    assert result.output_tokens.tolist() == [6]
    assert result.normalised_latency_s == 6 * 2 / 6


def test_arrivals_must_be_sorted():
    with pytest.raises(ValueError, match="requests must be sorted by arrival_s; sort the workload first"):
        run([Request(0, 1, 1, arrival_s=2.0), Request(1, 1, 1, arrival_s=1.0)])


def test_arrivals_must_come():
    with pytest.raises(ValueError, match="request 1 has arrival_s=inf"):
        run([Request(0, 1, 1), Request(1, 1, 1, arrival_s=math.inf)])


@pytest.mark.parametrize("ids", [(1, 0), (0, 2), (1, 2), ("a", "b"), (0, 0)])
def test_ids_must_count_from_zero(ids):
    with pytest.raises(ValueError, match="request ids must be 0 to 1 in order"):
        run([Request(i, 1, 1) for i in ids])


# --- windows ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start_s", "end_s"), [(-1.0, 5.0), (5.0, 5.0), (6.0, 5.0), (NAN, 5.0), (0.0, NAN)])
def test_windows_begin_before_they_end(start_s, end_s):
    with pytest.raises(ValueError, match="a window must begin at zero or later and before it ends"):
        Window(start_s, end_s)


def test_where_the_slots_are():
    windows = [Window(0, 2), Window(2, 4), Window(4, 6), Window(), Window(6.0, 100.0)]
    result = run([Request(0, 3, 3)], PagedMemory(CacheConfig(4, page_size=4)), windows=windows)
    # Steps begin at 0 (three tokens in one page), 2 (four) and 4 (five in two pages), of 16 slots.
    seen = [(m.steps, m.sums.live, m.sums.internal, m.sums.free) for m in result.meters]
    assert seen == [(1, 3, 1, 12), (1, 4, 0, 12), (1, 5, 3, 8), (3, 12, 4, 32), (0, 0, 0, 0)]
    assert result.meters[3].shares() == dict.fromkeys(CATEGORIES, 0.0) | {
        "live": 100 * 12 / 48, "internal": 100 * 4 / 48, "free": 100 * 32 / 48,
    }  # fmt: skip
    assert result.meters[3].mean_groups == 1.0
    assert result.meters[4].shares() == {}


def test_a_window_holds_the_steps_that_begin_in_it():
    requests = [Request(0, 1, 10)]  # steps begin at 0, 2, ..., 18
    windows = [Window(3.0, 7.0), Window(4.0, 6.0), Window(4.1, 5.9), Window(17.9), Window(18.0, 18.5)]
    result = run(requests, windows=windows)
    assert [meter.steps for meter in result.meters] == [2, 1, 0, 1, 1]
    assert [meter.sums.live for meter in result.meters] == [3 + 4, 3, 0, 10, 10]


def test_mean_groups_counts_requests_not_sequences():
    # A has two steps, B three, both from the start: 2 + 2 + 1 groups.
    result = run([Request(0, 2, 2, num_seqs=3), Request(1, 2, 3)], windows=[Window()])
    assert (result.meters[0].groups, result.meters[0].steps) == (5, 3)


def test_sharing_saved():
    memory = PagedMemory(CacheConfig(16, page_size=2))
    result = run([Request(0, 4, 3, num_seqs=2)], memory, windows=[Window()])
    # Two tables over the same two pages; then each opens a third page, which its next token fills:
    # 4 logical over 2 physical pages, 6 over 4, 6 over 4. Saved: 1 - 1 / mean(2, 1.5, 1.5).
    assert result.meters[0].sharing == 5.0
    assert result.meters[0].sharing_saved == 100 * (1 - 3 / 5)


def test_waste_of_the_orcas():
    requests = [Request(0, 3, 3)]
    for estimate, reserved, internal, external in [("oracle", 3, 0, 2), ("pow2", 3, 1, 1), ("max", 3, 26, 0)]:
        result = run(requests, ReservedMemory(16, 4, 32, estimate), windows=[Window(0.0, 1.0)], max_model_len=32)
        sums = result.meters[0].sums
        # Six tokens in the end, three there after the prompt. Oracle: six slots of two pages. Pow2: 3 + 4 slots. Max:
        # 32 slots, eight pages.
        assert (sums.live, sums.reserved, sums.internal, sums.external) == (3, reserved, internal, external)
        assert sums.total == 64


# --- figures of a run ---------------------------------------------------------------------------------------------


def test_latencies_follow_the_definitions():
    """TTFT from when the request was due; TPOT between the first and the last token; one token has none."""
    requests = [Request(0, 4, 4), Request(1, 8, 2, arrival_s=1.0), Request(2, 5000, 9), Request(3, 1, 1, 30.0)]
    requests = [dataclasses.replace(r, arrival_s=max(r.arrival_s, i * 1.0)) for i, r in enumerate(requests)]
    result = run(requests)
    served = ~np.isnan(result.finish_s)
    assert served.tolist() == [True, True, False, True]
    columns = (result.arrival_s[served], result.first_token_s[served], result.finish_s[served])
    assert metrics.ttfts(columns[0], columns[1]).tolist() == [2.0, 4.25, 2.0]
    tpots = metrics.tpots(columns[1], columns[2], result.output_tokens[served])
    assert tpots[:2].tolist() == [(9.25 - 2) / 3, 2.0] and math.isnan(tpots[2])
    normalised = metrics.normalised_latencies(columns[0], columns[2], result.output_tokens[served])
    assert result.normalised_latency_s == pytest.approx(normalised.mean(), rel=1e-15)


def test_latency_counts_from_arrival_not_from_admission():
    waiting = run([Request(0, 1, 10), Request(1, 1, 1, arrival_s=1.0)], max_num_seqs=1)
    assert waiting.first_token_s.tolist() == [2.0, 22.0]
    assert waiting.normalised_latency_s == (20 / 10 + 21 / 1) / 2


def test_health_counters():
    memory = PagedMemory(CacheConfig(64, page_size=4, prefix_caching=True))
    ids = tuple(range(12))
    requests = [
        Request(0, 12, 2, prompt_ids=ids),
        Request(1, 12, 2, arrival_s=100.0, prompt_ids=ids),  # all of its pages but the last token's are found
        Request(2, 12, 2, arrival_s=200.0, prompt_ids=(99, *ids[1:])),
    ]
    result = run(requests, memory, windows=[Window()])
    counters = result.counters
    assert (counters.prefix_queries, counters.prefix_hits) == (36, 8)
    assert (counters.finished, counters.failed, counters.preemptions) == (3, 0, 0)
    # Twelve prompt tokens compute in 1 + 3 s, four in 2 s.
    assert (result.first_token_s - result.arrival_s).tolist() == [4.0, 2.0, 4.0]


def test_recomputed_tokens_are_no_prefix_hits():
    memory = PagedMemory(CacheConfig(4, page_size=2, prefix_caching=True))
    requests = [Request(0, 2, 6, prompt_ids=(1, 2)), Request(1, 2, 4, prompt_ids=(3, 4))]
    counters = run(requests, memory, preemption="recompute").counters
    assert (counters.prefix_queries, counters.prefix_hits, counters.preemptions) == (4, 0, 1)


def test_counters_agree_with_the_requests():
    requests = [Request(i, 3 + i % 5, 4 + i % 7, arrival_s=0.5 * i) for i in range(40)]
    result = run(requests, PagedMemory(CacheConfig(10, page_size=2, num_host_pages=60)), preemption="swap")
    assert result.counters.finished == 40
    assert result.counters.preemptions == result.preemptions.sum() > 0
    # Every output token but each request's first is decoded, once.
    assert result.counters.recomputed_tokens == 0
    assert result.tokens == result.output_tokens.sum() - 40


def test_beam_runs_are_deterministic():
    requests = [Request(i, 5, 20, arrival_s=float(i), num_seqs=4, beam=True) for i in range(4)]

    def finish(seed):
        cost = dataclasses.replace(MOVES, page_read_s=0.01)
        return run(
            requests, PagedMemory(CacheConfig(80, page_size=4)), cost, beams=UniformBeams(seed)
        ).finish_s.tolist()

    assert finish(0) == finish(0)
    assert finish(0) != finish(1)


def test_beams_are_seeded_by_default():
    requests = [Request(i, 5, 20, num_seqs=3, beam=True) for i in range(3)]
    ends = {run(requests, cost=MOVES).end_s for _ in range(2)} | {
        run(requests, cost=MOVES, beams=UniformBeams(0)).end_s
    }
    assert len(ends) == 1


# --- what sizing promises -----------------------------------------------------------------------------------------


def memory_plan(pages: int, page_size: int, max_model_len: int | None = None) -> sizing.MemoryPlan:
    layout = sizing.KVLayout(2, 2, 16, page_size)
    return sizing.MemoryPlan(sizing.GIB, 1.0, 0, 0, 0, layout, explicit_pages=pages, max_model_len=max_model_len)


def serve_alone(plan: sizing.MemoryPlan, prompt: int, output: int, *, others: int = 0, **config) -> SimResult:
    """Runs one request, by ``others`` more of one page each that arrive with it."""
    memory = PagedMemory(CacheConfig(plan.num_pages, plan.layout.page_size))
    requests = [Request(0, prompt, output)] + [Request(1 + i, 1, 1) for i in range(others)]
    return run(requests, memory, max_model_len=plan.max_model_len or 1 << 20, **config)


@pytest.mark.parametrize("step_kind", ["mixed", "chunked", "prompts_only"])
@pytest.mark.parametrize(("pages", "page_size"), [(1, 16), (2, 1), (7, 1), (3, 5), (40, 16), (200, 16), (6, 64)])
def test_the_longest_request_is_really_servable(pages, page_size, step_kind):
    """B23: sizing's "longest request that fits" runs to its end, however it is split into prompt and output.

    The very last token is never stored, so a sequence of one token more still runs; one more than that is refused.
    """
    plan = memory_plan(pages, page_size)
    longest = plan.longest_request
    assert longest == pages * page_size
    for extra in (0, 1):
        total = longest + extra
        for prompt in {1, total // 2, total - 1}:
            result = serve_alone(plan, prompt, total - prompt, step_kind=step_kind, max_num_batched_tokens=100)
            assert result.rejected == () and result.output_tokens.tolist() == [total - prompt]
            assert result.counters.finished == 1 and result.preemptions.tolist() == [0]
        refused = serve_alone(plan, total // 2 + 1, longest + 2 - (total // 2 + 1), step_kind=step_kind)
        assert len(refused.rejected) == 1 and f"the pool has {pages}" in refused.rejected[0][1]


def test_the_longest_request_is_servable_in_company():
    plan = memory_plan(20, 16)
    result = serve_alone(plan, 100, plan.longest_request - 100, others=10)
    assert result.rejected == () and result.counters.finished == 11


@pytest.mark.parametrize("max_model_len", [100, 320])
def test_the_model_limits_the_longest_request(max_model_len):
    plan = memory_plan(20, 16, max_model_len)
    longest = plan.longest_request
    assert longest == max_model_len
    result = serve_alone(plan, longest - 1, 1)
    assert result.counters.finished == 1
    result = serve_alone(plan, 1, longest - 1)
    assert result.output_tokens.tolist() == [longest - 1] and result.counters.finished == 1
    assert len(serve_alone(plan, longest, 1).rejected) == 1
