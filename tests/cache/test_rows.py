"""Rows that would read or write outside the pool are refused before the launch (public fault B24)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from paxkv.cache.rows import Rows

PAGES, SIZE = 6, 4


def rows(**changes) -> Rows:
    """Nine tokens of which the newest two are computed, a decode of a full page, and a row that only pads."""
    plain = Rows(
        block_tables=np.asarray([[5, 0, 2], [3, -1, 99], [-1, -1, -1]]),
        kv_lens=np.asarray([9, 4, 0]),
        query_starts=np.asarray([0, 2, 3, 3]),
        slots=np.asarray([3, 8, 15, -1]),
    )
    return dataclasses.replace(plain, **{name: np.asarray(value) for name, value in changes.items()})


def test_what_is_behind_a_row_may_be_anything():
    rows().check(PAGES, SIZE)
    rows(slots=[-1, -1, -1, 1000]).check(PAGES, SIZE)  # not written; and the last one only pads


@pytest.mark.parametrize("page", [-1, PAGES, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_a_page_in_use_that_is_none(page, block):
    tables = rows().block_tables.copy()
    tables[0, block] = page
    with pytest.raises(ValueError, match=rf"must lie in 0\.\.5, got {page} in row 0, block {block}"):
        rows(block_tables=tables).check(PAGES, SIZE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lens": [13, 4, 0]}, r"kv_lens must lie in 0\.\.12 \(3 pages of 4\), got \[13, 4, 0\]; row 0"),
        ({"kv_lens": [9, -1, 0]}, r"kv_lens must lie in .*; row 1"),
        ({"kv_lens": [1, 4, 0]}, r"more queries than keys \(queries \[2, 1, 0\]\)"),
        ({"query_starts": [1, 2, 3, 3]}, "query_starts must rise from 0 to at most the 4 tokens"),
        ({"query_starts": [0, 3, 2, 3]}, "query_starts must rise"),
        ({"query_starts": [0, 2, 3, 5]}, "query_starts must rise"),
        ({"query_starts": [0, 2, 3]}, r"rows are block_tables \[S,P\]"),
        ({"slots": [3, 24, 15, -1]}, r"slots must lie in 0\.\.23, or be -1 .*, got 24 for token 1"),
        ({"slots": [-2, 8, 15, -1]}, "got -2 for token 0"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        rows(**changes).check(PAGES, SIZE)


def test_more_queries_than_a_row_may_have():
    with pytest.raises(ValueError, match="no row may have more than 1 queries"):
        dataclasses.replace(rows(), max_query_len=1).check(PAGES, SIZE)
