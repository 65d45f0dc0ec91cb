"""The prefix index on production traces: hit rates to four decimals, unbounded and with an LRU of five sizes.

The expected values stand beside the traces. Their rule: blocks are looked up as the longest cached prefix and inserted
after that; a request touches its blocks last-to-first, so that a prefix's head is the most recent; then the oldest go.
The seeded twin compares the same replay with a list that does exactly this.
"""

from __future__ import annotations

import functools
import pathlib
import random
from collections.abc import Iterable, Sequence

import pytest

from paxkv.sched.block import PagePool
from paxkv.sched.prefix_cache import PrefixCache
from paxkv.workload import read_mooncake

RATES = {
    "conversation": {None: 0.3664, 100_000: 0.3637, 30_000: 0.3257, 10_000: 0.2116, 3_000: 0.0653, 1_000: 0.0445},
    "synthetic": {None: 0.6396, 100_000: 0.6396, 30_000: 0.6242, 10_000: 0.4239, 3_000: 0.1906, 1_000: 0.0841},
}
BLOCKS = {"conversation": (288_500, 182_790), "synthetic": (121_877, 43_924)}


@functools.cache
def hash_ids(path: pathlib.Path) -> tuple[tuple[int, ...], ...]:
    ids = read_mooncake(path).hash_ids
    assert ids is not None
    return ids


def replay(requests: Iterable[Sequence[int]], num_pages: int) -> list[int]:
    """Hits of each request when one after the other takes its pages, computes them and leaves."""
    cache = PrefixCache("lru")
    pool = PagePool(num_pages, cache)
    found = []
    for ids in requests:
        hits = cache.lookup(ids)
        for page in hits:
            pool.share(page, 512)
        table = hits + [pool.take() for _ in range(len(ids) - len(hits))]
        for key, page in zip(ids[len(hits) :], table[len(hits) :], strict=True):
            cache.publish(key, page)
        found.append(len(hits))
        pool.drop_table(table, 512 * len(table), 512)
    pool.check([])
    return found


def naive_replay(requests: Iterable[Sequence[int]], num_blocks: int) -> list[int]:
    """The same with a list of blocks, oldest first."""
    blocks: list[int] = []
    found = []
    for ids in requests:
        present = set(blocks)
        found.append(next((index for index, block in enumerate(ids) if block not in present), len(ids)))
        for block in reversed(ids):
            if block in present:
                blocks.remove(block)
            blocks.append(block)
        del blocks[: max(0, len(blocks) - num_blocks)]
    return found


@pytest.mark.parametrize(("trace", "size"), [(trace, size) for trace, rates in RATES.items() for size in rates])
def test_mooncake(shared_data, trace, size):
    requests = hash_ids(shared_data / "traces" / f"mooncake_{trace}.jsonl.gz")
    total, distinct = BLOCKS[trace]
    assert (sum(map(len, requests)), len({block for ids in requests for block in ids})) == (total, distinct)
    hits = replay(requests, distinct if size is None else size)
    assert round(sum(hits) / total, 4) == RATES[trace][size]


def sessions(seed: int, count: int) -> list[tuple[int, ...]]:
    """Conversations that grow turn by turn behind shared system prompts; an id stands for all blocks up to its own."""
    draw = random.Random(seed)
    known: dict[tuple[int, ...], int] = {}

    def named(content: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(known.setdefault(content[: i + 1], len(known)) for i in range(len(content)))

    open_sessions: list[tuple[int, ...]] = []
    requests = []
    for turn in range(count):
        if not open_sessions or draw.random() < 0.3:
            open_sessions.append((-1 - draw.randrange(5),) * draw.randint(1, 4))
        index = draw.randrange(max(0, len(open_sessions) - 30), len(open_sessions))
        open_sessions[index] += tuple(turn * 10 + i for i in range(draw.randint(0, 6)))
        requests.append(named(open_sessions[index][:40]))
    return requests


@pytest.mark.parametrize("size", [41, 60, 100, 300, 1000, 10_000])
def test_seeded_sessions(size):
    requests = sessions(size, 1500)
    hits = replay(requests, size)
    assert hits == naive_replay(requests, size)
    assert 0 < sum(hits) < sum(map(len, requests))
    if size < 10_000:
        assert sum(hits) < sum(replay(requests, 10_000))
