"""Arrivals: the artifact's rules, the statistics of each process, and one hash per seed everywhere."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.workload import (
    Lengths,
    WorkloadError,
    arrival_times,
    build_workload,
    embedded_lengths,
    sample_lengths,
    translation_workload,
)

PAIRS = Lengths("pairs", [1, 2, 3, 4, 5], [10, 20, 30, 40, 50], "test")


@pytest.mark.parametrize("seed", [0, 1, 7])
def test_slots_follow_the_artifact(seed):
    """The rule of the paper's artifact, written the long way with the global generators it uses."""
    state, random_state = np.random.get_state(), random.getstate()
    try:
        np.random.seed(seed)
        random.seed(seed)
        times = []
        for slot, count in enumerate(np.random.poisson(lam=0.5 * 0.01, size=60 * 100)):
            times += [slot * 0.01] * count
        pairs = [(p, 10 * p) for p in (1, 2, 3, 4, 5)]
        while len(pairs) < len(times):
            pairs += pairs[:5]
        pairs = pairs[: len(times)]
        random.shuffle(pairs)
    finally:
        np.random.set_state(state)
        random.setstate(random_state)
    workload = build_workload(PAIRS, 0.5, 60, seed=seed)
    assert len(workload) > 5
    assert workload.arrival_s.tolist() == times
    assert list(zip(workload.prompt_tokens.tolist(), workload.output_tokens.tolist(), strict=True)) == pairs


def test_seeds_are_independent_of_global_state():
    before = np.random.get_state()[1].tolist(), random.getstate()
    first = build_workload(PAIRS, 1, 100, seed=3)
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before
    np.random.rand(5)
    random.random()
    assert build_workload(PAIRS, 1, 100, seed=3) == first
    assert build_workload(PAIRS, 1, 100, seed=4) != first


def test_the_first_pairs_are_taken():
    workload = build_workload(embedded_lengths("alpaca"), 2, 100)
    taken = embedded_lengths("alpaca").prompt[: len(workload)]
    assert sorted(workload.prompt_tokens) == sorted(taken)
    assert workload.prompt_tokens.tolist() != taken.tolist()


# Hashes that must not change: a new Python, NumPy or machine that draws another workload is caught here.
PINNED = {
    ("slots", 0): (1160, "a59348526497dfa6a2e0f820e272afc76b32b0da213d5c0209c10973681150cd"),
    ("slots", 1): (1202, "3acbf1d03af84af41fe7ca3199a6829cbf888e5efa30526a7a0097d73336333d"),
    ("poisson", 0): (1188, "779293ddd82e3a362db7db1c27fcaea534ed7aeb8d634d73555133c338489382"),
    ("poisson", 1): (1207, "356a7589d367990edaff6bb1bf6e4c1019387b00070d95da01ff120a35af30a5"),
    ("gamma", 0): (1113, "cd65dee278e8c72da2b54f8d51efe39fa6195dc05b11e7c5cbc9ce01d11e23a3"),
    ("gamma", 1): (1353, "6e59f2f351b90589c95e30e5e6b65a8fbc9b511c1dfb44be2b08afc545053b93"),
    ("all_at_once", 0): (1200, "9d39d6ea310708d1839aba2103b81bd383eaf4c2509a7ef0aeb4851c7f73f3f8"),
    ("all_at_once", 1): (1200, "bf32ad9b5e17a42c6dc5890200bc24392a994b2b5905689dfbe1326142735287"),
}


@pytest.mark.parametrize(("arrivals", "seed"), PINNED)
def test_pinned_hashes(arrivals, seed):
    burstiness = 4 if arrivals == "gamma" else 1
    workload = build_workload(embedded_lengths("sharegpt"), 2, 600, arrivals=arrivals, seed=seed, burstiness=burstiness)
    assert (len(workload), workload.content_hash) == PINNED[arrivals, seed]


def test_pinned_hash_of_a_long_workload():
    workload = build_workload(embedded_lengths("alpaca"), 30, 3600)
    assert len(workload) == 107_935
    assert workload.content_hash == "a44a4f3e128733d1ea592def45ecc3be6928787dc0b7dc560d4644dd04657c79"


@pytest.mark.parametrize(
    ("arrivals", "burstiness", "variation"),
    [
        ("slots", 1, 1),
        ("poisson", 1, 1),
        ("gamma", 1, 1),
        ("gamma", 0.25, 0.25),
        ("gamma", 4, 4),
        ("gamma", 13.2, 13.2),
    ],
)
def test_rate_and_burstiness(arrivals, burstiness, variation):
    times = np.concatenate(
        [np.diff(arrival_times(5, 20_000, arrivals=arrivals, burstiness=burstiness, seed=s)) for s in range(4)]
    )
    standard_error = variation / np.sqrt(len(times))
    assert 1 / times.mean() == pytest.approx(5, rel=4 * standard_error)
    assert times.std() / times.mean() == pytest.approx(variation, rel=0.02 + 12 * standard_error)


def test_poisson_counts_are_poisson():
    times = arrival_times(3, 50_000, arrivals="poisson", seed=2)
    counts = np.bincount(times.astype(int), minlength=50_000)
    assert counts.mean() == pytest.approx(3, rel=0.02)
    assert counts.var() == pytest.approx(3, rel=0.05)
    np.testing.assert_array_equal(times, np.rint(times * 1e6) / 1e6)  # whole microseconds


def test_slots_share_their_start():
    times = arrival_times(300, 10)
    np.testing.assert_array_equal(times, np.rint(times * 100) * 0.01)
    assert len(np.unique(times)) < len(times)


def test_all_at_once():
    workload = build_workload(PAIRS, 2, 3.5, arrivals="all_at_once", name="burst")
    assert workload.arrival_s.tolist() == [0.0] * 7
    assert sorted(workload.prompt_tokens.tolist()) == [1, 1, 2, 2, 3, 4, 5]
    assert workload.name == "burst"


def test_names_and_sources_say_how_it_was_made():
    workload = build_workload(embedded_lengths("alpaca"), 2, 60, arrivals="gamma", burstiness=2, seed=5)
    assert workload.name == "alpaca-2rps-60s-gamma(cv=2)-seed5"
    assert workload.source == "embedded:alpaca; arrivals gamma(cv=2), rate 2/s, 60 s, seed 5"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rate": 0}, "rate must be finite and above zero"),
        ({"rate": -1.0}, "rate must be finite and above zero .* got -1.0"),
        ({"rate": float("nan")}, "rate must be finite and above zero .* got nan"),
        ({"rate": float("inf")}, "rate must be finite"),
        ({"rate": "2"}, "rate must be a number of requests per second, got '2'"),
        ({"rate": True}, "rate must be a number of requests per second, got True"),
        ({"duration_s": 0}, "duration_s must be finite and above zero"),
        ({"duration_s": -5}, "duration_s must be finite and above zero"),
        ({"duration_s": float("nan")}, "duration_s must be finite and above zero"),
        ({"rate": 1e6, "duration_s": 3600}, "at most 10000000 requests, got 1000000.0 x 3600"),
        ({"rate": 1e300, "duration_s": 1e300}, "at most 10000000 requests"),
        ({"rate": 1e-9, "duration_s": 1e6}, "arrivals='slots' needs a duration of 0.01 to 100000 s, got 1000000"),
        ({"duration_s": 0.001}, "arrivals='slots' needs a duration"),
        ({"rate": 1e-6}, "no request arrives at rate=1e-06 in duration_s=60.0 with seed=0"),
        ({"seed": -1}, "seed must be in 0"),
        ({"seed": 2**32}, "seed must be in 0 .. 4294967295"),
        ({"seed": 1.0}, "seed must be an integer, got 1.0"),
        ({"arrivals": "uniform"}, "arrivals must be one of slots, poisson, gamma, all_at_once, got 'uniform'"),
        ({"burstiness": 2}, "burstiness=2.0 has no meaning for arrivals='slots'"),
        ({"arrivals": "gamma", "burstiness": 0}, "burstiness must be finite and above zero"),
        ({"arrivals": "gamma", "burstiness": 1000}, "burstiness must be in 0.001 .. 100.0, got 1000.0"),
        ({"lengths": [(1, 2)]}, "lengths must be a Lengths value .* got list"),
        ({"max_model_len": 10, "arrivals": "all_at_once"}, "prompt \\+ output <= max_model_len=10, but request"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    arguments = {"lengths": PAIRS, "rate": 2.0, "duration_s": 60.0} | arguments
    with pytest.raises(WorkloadError, match=message):
        build_workload(**arguments)


def test_translation_prompts_start_with_the_prefix():
    pairs = Lengths("mt", [10, 1600, 20], [15, 200, 30], "test")
    workload = translation_workload(pairs, 5, 60, prefix_tokens=341, seed=1)
    assert workload.prefix_tokens == 341
    # 341 + 1600 + 200 is over 2047, so the second pair is left out
    assert {*zip(workload.prompt_tokens.tolist(), workload.output_tokens.tolist(), strict=True)} == {
        (351, 15),
        (361, 30),
    }
    np.testing.assert_array_equal(workload.arrival_s, arrival_times(5, 60, seed=1))
    assert workload.source.endswith("shared prefix 341 tokens")
    with pytest.raises(WorkloadError, match="prefix_tokens must be in 0"):
        translation_workload(pairs, 5, 60, prefix_tokens=-1)
    with pytest.raises(WorkloadError, match="no pair of 'mt' has prompt"):
        translation_workload(pairs, 5, 60, prefix_tokens=2040)


def test_pinned_hash_of_the_translation_workload():
    workload = translation_workload(embedded_lengths("wmt16"), 40, 1200, prefix_tokens=341)
    assert workload.content_hash == "b283cf7cbf418b0009c0e80c272ce8bc37d9000d12f9443156e0cc70f278f73a"


@given(
    rate=st.floats(0.05, 200),
    duration_s=st.floats(1, 50),
    arrivals=st.sampled_from(["slots", "poisson", "gamma", "all_at_once"]),
    burstiness=st.floats(0.1, 20),
    seed=st.integers(0, 2**32 - 1),
)
def test_times_are_sorted_and_inside(rate, duration_s, arrivals, burstiness, seed):
    options = {"arrivals": arrivals, "seed": seed, "burstiness": burstiness if arrivals == "gamma" else 1}
    try:
        times = arrival_times(rate, duration_s, **options)
    except WorkloadError as error:
        assert "no request arrives" in str(error)
        return
    assert np.all(np.diff(times) >= 0)
    assert 0 <= times[0] and times[-1] < duration_s
    np.testing.assert_array_equal(times, arrival_times(rate, duration_s, **options))


# -- distributions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "mean", "least", "content_hash"),
    [
        ("fixed(7)", 7, 7, "d3fcf463563027c95f167de8906a31a5e19a79a5f8dd0a06743c17aee9554230"),
        ("uniform(1, 100)", 50.5, 1, "60ad7653e2550dbbddc5833a0a0e07acc9420a077626385698afbcb4f6649e83"),
        ("geometric(20)", 20, 1, "6f26bd94c8161e3ac73c6479cd81bb986d0b0e98e6f2110e21e0369061b7e2f8"),
        ("lognormal(300,1.2)", 300, 1, "a137a6e38590c15c7ea814c311a62a143f1fcb153446dc53ad0b514a3b92707e"),
    ],
)
def test_distributions(rule, mean, least, content_hash):
    lengths = sample_lengths(rule, "fixed(5)", 40_000)
    assert lengths.prompt.mean() == pytest.approx(mean, rel=0.03)
    assert lengths.prompt.min() >= least
    assert set(lengths.output.tolist()) == {5}
    assert lengths.source == f"distribution:prompt {rule}, output fixed(5), seed 0"
    assert build_workload(sample_lengths(rule, "fixed(5)", 1000), 2, 600).content_hash == content_hash


def test_long_draws_are_drawn_again():
    lengths = sample_lengths("uniform(1,100)", "uniform(1,100)", 5000, max_total_tokens=60)
    assert len(lengths) == 5000
    assert (lengths.prompt + lengths.output).max() == 60
    with pytest.raises(WorkloadError, match="max_total_tokens=99 must leave enough pairs, got 0 of 10"):
        sample_lengths("fixed(50)", "fixed(50)", 10, max_total_tokens=99)


@pytest.mark.parametrize(
    "rule",
    ["", "fixed", "fixed()", "fixed(0)", "fixed(1.5)", "fixed(-1)", "fixed(nan)", "fixed(inf)", "fixed(x)", "zipf(2)"]
    + ["uniform(5,4)", "uniform(1)", "geometric(0.5)", "lognormal(300)", "fixed(1e99)", "fixed(2**3)", None, 7],
)
def test_bad_distributions_are_refused(rule):
    with pytest.raises(WorkloadError, match="prompt"):
        sample_lengths(rule, "fixed(5)", 10)
