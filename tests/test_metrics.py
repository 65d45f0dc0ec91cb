"""Latency definitions (case B33), counters at admission (B32), health figures."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv import metrics
from paxkv.metrics import Counters, Health

TIMES = (1.0, 1.1, 1.2, 1.4)


def test_latencies_of_one_request():
    assert metrics.ttft(0.0, TIMES) == 1.0
    assert metrics.tpot(TIMES) == pytest.approx(0.1333333, abs=1e-7)
    assert metrics.itl(TIMES) == pytest.approx((0.1, 0.1, 0.2))
    assert np.mean(metrics.itl(TIMES)) == pytest.approx(0.1333333, abs=1e-7)  # 0.35 would count the first wait
    assert metrics.end_to_end(0.0, TIMES) == 1.4
    assert metrics.ttft(0.5, TIMES) == 0.5  # counted from when it was due


def test_one_token_has_no_time_per_token():
    assert metrics.tpot([2.0]) is None
    assert metrics.itl([2.0]) == ()
    assert metrics.ttft(0.5, [2.0]) == 1.5
    assert metrics.end_to_end(0.5, [2.0]) == 1.5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: metrics.ttft(0.0, []), "at least one output token"),
        (lambda: metrics.tpot([]), "at least one output token"),
        (lambda: metrics.itl([]), "at least one output token"),
        (lambda: metrics.ttft(2.0, TIMES), "must not come before the arrival, got token at 1.0 and arrival at 2.0"),
        (lambda: metrics.end_to_end(float("nan"), TIMES), "must not come before the arrival"),
        (lambda: metrics.itl([1.0, 0.9]), "must not decrease, got 0.9 after 1.0"),
        (lambda: metrics.ttft(0.0, [1.0, float("nan")]), "must not decrease, got nan"),
        (lambda: metrics.percentiles([1.0], [101]), r"rank lies in \[0, 100\], got 101"),
        (lambda: metrics.ttfts([1.0, 2.0], [1.5, 1.0]), r"got \[-1.\] at row \[1\]"),
        (lambda: metrics.ttfts([1.0], [float("nan")]), "negative or NaN"),
        (lambda: metrics.normalised_latencies([0.0], [1.0], [0]), "at least 1, got"),
        (lambda: metrics.tpots([0.0], [1.0], [0]), "at least 1, got"),
        (lambda: metrics.ttfts([1.0, 2.0], [1.5]), "equally long"),
        (lambda: metrics.mean([1.0, 2.0], [True]), "one entry for each of 2 requests"),
        (lambda: metrics.time_weighted_mean([1.0], [-1.0]), "durations_s must not be negative"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_normalised_latency():
    # (10 - 0) / 20 = 0.5 and (7 - 1) / 4 = 1.5: the mean of the ratios is 1.0, the ratio of the sums 16/24.
    found = metrics.normalised_latencies([0, 1], [10, 7], [20, 4])
    assert found.tolist() == [0.5, 1.5]
    assert metrics.mean(found) == 1.0


def test_percentiles_leave_out_failures_and_absent_values():
    values = [1.0, 2.0, 3.0, 1000.0, float("nan")]
    failed = [False, False, False, True, False]
    assert metrics.percentiles(values, (0, 50, 75, 100), failed) == {"p0": 1.0, "p50": 2.0, "p75": 2.5, "p100": 3.0}
    assert metrics.mean(values, failed) == 2.0
    assert metrics.percentiles(values, (99.9,), [True] * 5) == {"p99.9": None}
    assert metrics.mean([], None) is None
    assert metrics.percentiles([7.0], ()) == {}


def test_summary_of_a_run():
    found = metrics.summarise(
        arrival_s=[0.0, 1.0, 5.0],
        first_token_s=[1.0, 2.0, float("nan")],
        finish_s=[1.4, 2.0, float("nan")],
        output_tokens=[4, 1, 0],
        failed=[False, False, True],
    )
    assert (found.finished, found.failed) == (2, 1)
    assert found.normalised_latency_s == pytest.approx((1.4 / 4 + 1.0) / 2)
    assert found.ttft_s["mean"] == 1.0 and found.ttft_s["p99"] == 1.0
    assert found.tpot_s["mean"] == pytest.approx(0.1333333, abs=1e-7)  # the one-token request is left out
    assert found.end_to_end_s["p50"] == pytest.approx(1.2)


def test_summary_without_a_finished_request():
    found = metrics.summarise([0.0], [0.0], [0.0], [0], failed=[True])
    assert (found.finished, found.failed, found.normalised_latency_s) == (0, 1, None)
    assert set(found.ttft_s.values()) == {None}


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.lists(st.floats(0.001, 10), min_size=1, max_size=6)), min_size=1, max_size=5
    )
)
def test_arrays_agree_with_single_requests(requests):
    arrivals, tokens = [], []
    for arrival, gaps in requests:
        arrivals.append(arrival)
        tokens.append((arrival + np.cumsum(gaps)).tolist())
    first, last = [times[0] for times in tokens], [times[-1] for times in tokens]
    count = [len(times) for times in tokens]
    assert metrics.ttfts(arrivals, first).tolist() == [
        metrics.ttft(a, t) for a, t in zip(arrivals, tokens, strict=True)
    ]
    assert metrics.end_to_ends(arrivals, last).tolist() == [
        metrics.end_to_end(a, t) for a, t in zip(arrivals, tokens, strict=True)
    ]
    for array, single in zip(metrics.tpots(first, last, count), map(metrics.tpot, tokens), strict=True):
        assert np.isnan(array) if single is None else array == single


def test_time_weighted_mean():
    assert metrics.time_weighted_mean([0.5, 1.0], [3.0, 1.0]) == 0.625
    assert metrics.time_weighted_mean([0.5], [0.0]) is None
    assert metrics.time_weighted_mean([], []) is None


def test_prefix_hits_count_at_admission():
    # A: 64 tokens, cold. B: 64 tokens, 48 cached, refused nine times, then admitted.
    counters = Counters().admit(64)
    counters = counters.admit(64, 48)
    assert (counters.prefix_queries, counters.prefix_hits) == (128, 48)
    assert Health.of(counters, 0.0).prefix_hit_rate == 0.375  # counting all ten lookups gives 0.6818


def test_recompute_is_no_prefix_hit():
    counters = Counters().admit(100).admit(200).add(preemptions=1).resume(140).add(finished=2)
    assert counters.prefix_hits == 0 and counters.recomputed_tokens == 140
    found = Health.of(counters, 0.85)
    assert found == Health(prefix_hit_rate=0.0, pool_utilisation=0.85, preemption_rate=0.5)


def test_nothing_has_happened_yet():
    assert Health.of(Counters(), None) == Health(None, None, None)


def test_since_takes_a_warm_up_away():
    warm = Counters(prefix_queries=10, prefix_hits=5, finished=1)
    later = warm.admit(20, 1).add(finished=3, swapped_out_pages=2, swapped_in_pages=2)
    assert later.since(warm) == Counters(
        prefix_queries=20, prefix_hits=1, finished=3, swapped_out_pages=2, swapped_in_pages=2
    )
    with pytest.raises(ValueError, match="counters never decrease"):
        warm.since(later)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Counters().add(preemptions=-1), "never decrease: the increment of preemptions"),
        (lambda: Counters().add(preemptions=0.5), "whole number"),
        (lambda: Counters().add(preemptons=1), "no counter 'preemptons'; there are prefix_queries"),
        (lambda: Counters(finished=-1), "Counters.finished is a whole number of at least 0, got -1"),
        (lambda: Counters().admit(10, 11), "prefix_hits cannot exceed prefix_queries, got 11 of 10"),
        (lambda: Health.of(Counters(), 1.5), r"share in \[0, 1\], got 1.5"),
        (lambda: Health.of(Counters(), float("nan")), r"share in \[0, 1\], got nan"),
    ],
)
def test_bad_counters_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=20))
def test_counters_never_decrease(admissions):
    counters, seen = Counters(), [Counters()]
    for queries, hits in admissions:
        counters = counters.admit(max(queries, hits), min(queries, hits)).add(preemptions=hits % 2)
        seen.append(counters)
    for before, after in zip(seen, seen[1:], strict=False):
        assert after.since(before).prefix_queries >= 0
    assert counters.prefix_queries == sum(max(pair) for pair in admissions)
