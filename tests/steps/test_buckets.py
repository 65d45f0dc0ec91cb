"""Every step within the limits has a bucket, that bucket is warmed up, and no bucket exceeds the limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.steps.buckets import Bucket, Buckets, Ladder


def test_sizes():
    assert Ladder(100).sizes == (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 100)
    assert Ladder(40, per_doubling=4).sizes == (1, 2, 4, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40)
    assert Ladder(40, start=16, per_doubling=1).sizes == (16, 32, 40)
    assert Ladder(64).sizes[-2:] == (48, 64)
    assert Ladder(5, start=16).sizes == (5,)
    assert Ladder(1).sizes == (1,)


@given(st.integers(1, 600), st.integers(1, 40), st.sampled_from([1, 2, 4]))
def test_fit_is_the_smallest_that_holds(limit, start, per_doubling):
    ladder = Ladder(limit, start, per_doubling)
    assert ladder.sizes[-1] == limit and len(set(ladder.sizes)) == len(ladder.sizes)
    worst = {1: 1 / 2, 2: 1 / 3, 4: 1 / 5}[per_doubling]
    for count in range(1, limit + 1):
        size = ladder.fit(count)
        assert size == min(size for size in ladder.sizes if size >= count)
        assert count <= max(8, start) or (size - count) / size < worst


@pytest.mark.parametrize("count", [0, -1, 101])
def test_fit_refuses(count):
    with pytest.raises(ValueError, match=f"holds 1 to 100 entries, got {count}"):
        Ladder(100).fit(count)


@pytest.mark.parametrize("values", [{"limit": 0}, {"limit": 2.0}, {"limit": 4, "start": 0}])
def test_ladder_refuses(values):
    with pytest.raises(ValueError, match="whole number of at least 1, got"):
        Ladder(**values)
    with pytest.raises(ValueError, match="per_doubling must be 1, 2 or 4, got 3"):
        Ladder(8, per_doubling=3)


@pytest.mark.parametrize(
    ("seqs", "tokens"), [(7, 317), (1, 1), (1, 50), (50, 1), (64, 64), (33, 257), (128, 300), (3, 2)]
)
def test_all_is_what_steps_need(seqs, tokens):
    """B25: budget 317, at most 7 rows, and other shapes: warm-up compiles exactly the buckets that steps ask for."""
    buckets = Buckets(seqs, tokens)
    rows = min(seqs, tokens)
    asked = {Bucket("decode", (buckets.decode(count),)) for count in range(1, rows + 1)}
    for count in range(1, tokens + 1):
        for samples in range(min(count, rows) + 1):
            size, held = buckets.mixed(count, samples)
            assert count <= size <= tokens and samples <= held <= rows
            asked.add(Bucket("mixed", (size, held)))
    asked |= {Bucket("copies", (buckets.copies(count),)) for count in range(1, seqs + 1)}
    listed = buckets.all()
    assert len(set(listed)) == len(listed)
    assert set(listed) == asked
    assert buckets.copies(0) == 0


def test_few_buckets():
    """A serving configuration compiles tens of programs, not hundreds."""
    assert len(Buckets(256, 2560).all()) < 75
    assert len({bucket.sizes[1] for bucket in Buckets(256, 2560).all() if bucket.kind == "mixed"}) == 3


def test_names():
    assert str(Bucket("decode", (32,))) == "decode[32]"
    assert str(Bucket("mixed", (256, 8))) == "mixed[256,8]"


@pytest.mark.parametrize(("tokens", "samples"), [(5, 6), (20, 8), (20, -1), (0, 0), (318, 1)])
def test_mixed_refuses(tokens, samples):
    with pytest.raises(ValueError, match="got"):
        Buckets(7, 317).mixed(tokens, samples)


@pytest.mark.parametrize("limits", [(0, 1), (1, 0), ("4", 8), (4, None)])
def test_limits_are_checked(limits):
    with pytest.raises(ValueError, match="whole number of at least 1, got"):
        Buckets(*limits)
