"""Prompt lookup: the public edge cases (B21), and the newest useful match against a naive search."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.sched.propose import NgramProposer, propose


@pytest.mark.parametrize(
    ("ids", "count", "proposed"),
    [
        ([], 3, ()),
        ([5], 3, ()),
        ([1, 2, 3], 3, ()),
        ([1, 2, 3, 1, 2], 5, (3, 1, 2)),
        ([7, 7, 7, 7], 3, (7, 7)),
        ([7, 7, 7, 7], 1, (7,)),
        ([7] * 10, 3, (7, 7, 7)),
        ([1, 2, 9, 1, 2, 8, 1, 2], 2, (8, 1)),  # the newest match
        ([1, 2, 9, 1, 2, 8, 1, 2], 5, (9, 1, 2, 8, 1)),  # the newest that five tokens follow
        ([1, 2, 3, 1, 2], 0, ()),
    ],
)
def test_two_tokens(ids, count, proposed):
    assert propose(ids, count, n=2) == proposed


@pytest.mark.parametrize(("limit", "length"), [(7, 0), (8, 0), (9, 1), (10, 2), (11, 3), (100, 3)])
def test_limit(limit, length):
    """B21: with 7 tokens held of 8, the step's own token is the last."""
    assert len(propose([4] * 7, 3, n=2, limit=limit)) == length


def test_longer_runs_first():
    ids = [1, 2, 3, 40, 9, 2, 3, 50, 1, 2, 3]
    assert NgramProposer(ids, max_n=3, min_n=1).propose(1) == (40,)
    assert NgramProposer(ids, max_n=2, min_n=1).propose(1) == (50,)
    assert NgramProposer([6, 1, 5, 2, 6], max_n=3, min_n=1).propose(2) == (1, 5)
    assert NgramProposer([6, 1, 5, 2, 6], max_n=3, min_n=2).propose(2) == ()


def naive(ids, count, n):
    """Every earlier occurrence, newest first; the first that enough follows, else the one that most follows."""
    starts = [at + n for at in range(len(ids) - n - 1, -1, -1) if n <= len(ids) and ids[at : at + n] == ids[-n:]]
    found = [tuple(ids[start : start + count]) for start in starts]
    return next((run for run in found if len(run) == count), max(found, key=len, default=()))


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 6), st.integers(1, 3), st.integers(0, 30))
def test_naive_search(ids, count, n, split):
    assert propose(ids, count, n=n) == naive(ids, count, n)
    grown = NgramProposer(ids[:split], max_n=n, min_n=n)
    grown.extend(ids[split:])
    assert grown.propose(count) == naive(ids, count, n)


@pytest.mark.parametrize(("max_n", "min_n"), [(2, 0), (2, 3)])
def test_refuses(max_n, min_n):
    with pytest.raises(ValueError, match=f"got min_n={min_n} and max_n={max_n}"):
        NgramProposer(max_n=max_n, min_n=min_n)
