"""The page pool: who owns what, what sharing saves, what becomes free, and a check that notices."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.sched.block import PagePool
from paxkv.sched.prefix_cache import PrefixCache


def test_pages_are_taken_in_order_and_the_last_one_freed_is_next():
    pool = PagePool(4)
    assert [pool.take() for _ in range(4)] == [0, 1, 2, 3]
    for page in (2, 0):
        pool.drop(page, 0)
    assert (pool.take(), pool.take()) == (0, 2)


def test_an_empty_pool_says_so():
    pool = PagePool(1)
    pool.take()
    with pytest.raises(LookupError, match="ask num_free first"):
        pool.take()
    with pytest.raises(LookupError):
        PagePool(0).take()


def test_a_page_is_not_freed_twice():
    pool = PagePool(1)
    page = pool.take()
    pool.drop(page, 3)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.drop(page, 3)
    assert pool.num_free == 1


def test_sharing_is_counted_once_and_again():
    """Three owners of a page with five tokens: five tokens are shared, ten are counted twice."""
    pool = PagePool(2)
    page = pool.take()
    pool.share(page, 5)
    assert (pool.shared_tokens, pool.duplicate_tokens) == (5, 5)
    pool.share(page, 5)
    assert (pool.shared_tokens, pool.duplicate_tokens) == (5, 10)
    pool.drop(page, 5)
    pool.drop(page, 5)
    assert (pool.shared_tokens, pool.duplicate_tokens) == (0, 0)
    assert (pool.owners[page], pool.num_free) == (1, 1)


def test_a_table_is_dropped_last_page_first():
    """So that the next request gets the pages in their old order, and a cached prefix outlives its continuation."""
    pool = PagePool(3)
    table = [pool.take() for _ in range(3)]
    pool.drop_table(table, 10, 4)
    assert table == []
    assert [pool.take() for _ in range(3)] == [0, 1, 2]

    cache = PrefixCache()
    pool = PagePool(3, cache)
    table = [pool.take() for _ in range(3)]
    for page in table:
        cache.publish(page, page)
    pool.drop_table(table, 12, 4)
    assert [pool.take() for _ in range(3)] == [2, 1, 0]


def test_free_pages_go_before_cached_ones():
    cache = PrefixCache()
    pool = PagePool(3, cache)
    kept, other = pool.take(), pool.take()
    cache.publish("key", kept)
    pool.drop_table([kept, other], 8, 4)
    assert pool.num_free == 3
    assert {pool.take(), pool.take()} == {other, 2}
    assert cache.lookup(["key"]) == [kept]
    assert pool.take() == kept
    assert cache.lookup(["key"]) == []


def test_evict_moves_idle_pages_to_the_free_list():
    cache = PrefixCache()
    pool = PagePool(4, cache)
    pages = [pool.take() for _ in range(4)]
    for page in pages:
        cache.publish(page, page)
    pool.drop_table(pages[1:], 12, 4)
    assert pool.evict(2) == 2
    assert pool.evict(5) == 1  # page 0 is in use
    assert (pool.num_free, cache.num_idle) == (3, 0)
    assert PagePool(4).evict(2) == 0


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool.owners.__setitem__(1, 2), "page 1: 2 owners counted, 1 block-table entries found"),
        (lambda pool: pool._free.append(3), "on the free list twice"),
        (lambda pool: pool._free.remove(3), "free 1 + idle 0 + used 2"),
        (lambda pool: pool._free.append(0), "free 3 + idle 0 + used 2"),
    ],
)
def test_check_notices(damage, message):
    pool = PagePool(4)
    tables = [[pool.take(), pool.take()]]
    pool.check(tables)
    damage(pool)
    with pytest.raises(AssertionError, match=re.escape(message)):
        pool.check(tables)


@given(st.data())
def test_against_counting(data):
    """Random takes, shares and drops of whole tables; the sums must be those that counting gives."""
    page_size = data.draw(st.integers(1, 4))
    pool = PagePool(8)
    tables: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    for name in range(data.draw(st.integers(1, 25))):
        if tables and data.draw(st.booleans()):
            gone = data.draw(st.sampled_from(sorted(tables)))
            pool.drop_table(tables.pop(gone), lengths.pop(gone), page_size)
        else:
            parent = data.draw(st.sampled_from([None, *sorted(tables)]))
            shared = tables[parent][: lengths[parent] // page_size] if parent is not None else []
            new = data.draw(st.integers(0 if shared else 1, 3))
            if pool.num_free < new:
                continue
            for page in shared:
                pool.share(page, page_size)
            tables[name] = [*shared, *(pool.take() for _ in range(new))]
            last = data.draw(st.integers(1, page_size)) if new else page_size
            lengths[name] = (len(tables[name]) - 1) * page_size + last
        pool.check(list(tables.values()))
        fills = {
            page: min(page_size, lengths[name] - i * page_size)
            for name, table in tables.items()
            for i, page in enumerate(table)
        }
        owners = {page: sum(page in table for table in tables.values()) for page in fills}
        assert pool.shared_tokens == sum(fills[page] for page in fills if owners[page] > 1)
        assert pool.duplicate_tokens == sum(fills[page] * (owners[page] - 1) for page in fills)
        assert pool.num_free == 8 - len(fills)
