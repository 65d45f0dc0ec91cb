"""Pages hold the right tokens: random runs of every memory, seed by seed, every slot checked in every step."""

from __future__ import annotations

import random

import pytest

from paxkv.config import CacheConfig, SchedulerConfig
from paxkv.request import Request
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.events import RequestRejected
from paxkv.sched.memory import Memory
from paxkv.sched.reserve import ReservedMemory
from paxkv.sched.scheduler import Scheduler
from paxkv.sched.static import StaticMemory
from paxkv.testing.fake_model import FakeModel
from paxkv.testing.force import ForceRandomly
from paxkv.testing.scripted import ScriptedRun

LIMIT = 40
BATCH = 40
"""Seeds per test case."""


def paged(draw: random.Random) -> Memory:
    page_size = draw.choice([1, 2, 4, 16])
    return PagedMemory(
        CacheConfig(
            draw.choice([1, 2, 3]) * -(-LIMIT // page_size),
            page_size,
            num_host_pages=draw.choice([0, 3, 100]),
            watermark=draw.choice([0, 0.01, 0.3, 0.9]),
            prefix_caching=draw.random() < 0.6,
            eviction=draw.choice(["lru", "fifo", "lfu", "mru"]),
        )
    )


def reserved(draw: random.Random) -> Memory:
    page_size = draw.choice([1, 2, 4, 16])
    pages = draw.choice([45, 90, 150]) // page_size
    return ReservedMemory(max(2, pages), page_size, LIMIT, draw.choice(["max", "pow2", "oracle"]))


def static(draw: random.Random) -> Memory:
    return StaticMemory(draw.choice([2, 4, 6]), LIMIT + 8, LIMIT + 4)


def random_request(draw: random.Random, request_id: int) -> Request:
    num_seqs, prompt = draw.choice([1, 1, 1, 2, 3, 4]), draw.randint(1, 30)
    ids = tuple([0] * (prompt // 2) + [draw.randrange(3) for _ in range(prompt - prompt // 2)])
    return Request(
        request_id,
        prompt,
        draw.randint(1, 20),
        num_seqs=num_seqs,
        beam=num_seqs > 1 and draw.random() < 0.5,
        prompt_ids=ids if draw.random() < 0.7 else None,
        salt=draw.choice([None, None, "x"]),
    )


def random_run(make, seed: int) -> tuple[int, int]:
    """One run with its checks; returns (requests finished, preemptions)."""
    draw = random.Random(seed)
    memory = make(draw)
    config = SchedulerConfig(
        max_num_seqs=draw.choice([4, 8]),
        max_num_batched_tokens=draw.choice([8, 20, 64]),
        max_model_len=LIMIT,
        step_kind=draw.choice(["mixed", "prompts_only", "chunked"]),
        preemption=draw.choice(["auto", "recompute", "swap"]),
    )
    force = ForceRandomly(seed) if draw.random() < 0.5 else None
    model = FakeModel(seed, vocab=50, end_share=draw.choice([0, 0.05, 0.2]))
    forgets = draw.random() < 0.5
    run = ScriptedRun(
        Scheduler(config, memory, force=force, check=True), model, tells=lambda step: not forgets or step % 3 > 0
    )
    taken, aborted = [], set()
    for index in range(7):
        request = random_request(draw, index)
        try:
            run.submit(request)
        except RequestRejected:
            continue
        taken.append(request)
        for _ in range(draw.randint(0, 3)):
            run.step()
        if draw.random() < 0.1 and run.abort(index):
            aborted.add(index)
    outputs, expected = run.run(5000), run.expected(*taken)
    for request_id in set(expected) - aborted:
        assert outputs[request_id] == expected[request_id], f"seed {seed}, request {request_id}"
    assert memory.num_free_pages == memory.num_pages
    assert set(run.finished) == set(expected) - aborted
    return len(run.finished), run.scheduler.counters.preemptions


@pytest.mark.parametrize("batch", range(25))
def test_paged(batch):
    results = [random_run(paged, seed) for seed in range(batch * BATCH, (batch + 1) * BATCH)]
    assert sum(finished for finished, _ in results) > 3 * BATCH
    assert sum(preemptions for _, preemptions in results) > BATCH


@pytest.mark.parametrize("batch", range(8))
@pytest.mark.parametrize("make", [reserved, static])
def test_contiguous(make, batch):
    results = [random_run(make, seed) for seed in range(batch * BATCH, (batch + 1) * BATCH)]
    assert sum(finished for finished, _ in results) > 2 * BATCH


@pytest.mark.parametrize("page_size", [1, 2, 4, 16])
@pytest.mark.parametrize("num_host_tokens", [0, 32, 400])
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_long_answers_under_pressure(page_size, num_host_tokens, prefix_caching):
    """Nothing forced: a pool for two and a half of the ten sequences that want to run."""
    pages = 100 // page_size
    memory = PagedMemory(CacheConfig(pages, page_size, num_host_tokens // page_size, prefix_caching=prefix_caching))
    limits = SchedulerConfig(max_num_batched_tokens=64, max_model_len=LIMIT, max_num_seqs=20)
    run = ScriptedRun(Scheduler(limits, memory, check=True))
    requests = [Request(i, 5 + i, 20, num_seqs=1 + i % 2, prompt_ids=tuple(range(5 + i))) for i in range(8)]
    run.submit(*requests)
    assert run.run() == run.expected(*requests)
    counters = run.scheduler.counters
    assert counters.preemptions > 3
    assert (counters.swapped_out_pages > 0) == (num_host_tokens > 0)
    assert counters.swapped_out_pages == counters.swapped_in_pages
    assert (counters.prefix_hits > 0) == (prefix_caching and page_size < 16)
