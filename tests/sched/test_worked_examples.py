"""The paper's worked examples, figures 3 and 6 to 10, as literal expectations."""

from __future__ import annotations

import pytest

from paxkv.config import CacheConfig, SchedulerConfig
from paxkv.request import Request
from paxkv.sched.block import PagePool
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.plan import StepPlan, StepResult
from paxkv.sched.reserve import ReservedMemory
from paxkv.sched.scheduler import Scheduler


def scheduler(memory, **limits) -> Scheduler:
    return Scheduler(SchedulerConfig(**limits), memory, check=True)


def paged(num_pages: int = 24, page_size: int = 4, **config) -> PagedMemory:
    return PagedMemory(CacheConfig(num_pages, page_size, **config))


def arrange(pool: PagePool, *pages: int) -> None:
    """Makes ``pages`` the next ones to be handed out: the page freed last is taken first."""
    free = [pool.take() for _ in range(pool.num_free)]
    assert set(pages) <= set(free)
    for page in [page for page in free if page not in pages] + list(reversed(pages)):
        pool.drop(page, 0)


def step(scheduler: Scheduler, **result) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.complete(StepResult(**result))
    return plan


def tables(scheduler: Scheduler, request_id: str) -> list[list[int]]:
    return [seq.table for seq in scheduler.group(request_id).seqs]


def fills(table: list[int], tokens: int, page_size: int = 4) -> dict[int, int]:
    """Filled slots of each page of a table that holds ``tokens`` tokens."""
    return {page: min(page_size, tokens - index * page_size) for index, page in enumerate(table)}


@pytest.mark.parametrize(
    ("limit", "prompt", "output", "reserved", "never_used"), [(2048, 7, 3, 2, 2038), (512, 3, 2, 1, 507)], ids="AB"
)
def test_figure_3(limit, prompt, output, reserved, never_used):
    """A reservation of the maximum length, while the first token is current: what it holds and what it wastes."""
    memory = ReservedMemory(limit // 16, 16, limit, "max")
    run = scheduler(memory, max_model_len=limit)
    run.submit(Request("A", prompt, output))
    step(run)  # the prompt; it gives the current token
    run.schedule()
    usage = run.usage()
    assert usage.live == prompt + 1
    assert (usage.reserved, usage.internal, usage.external, usage.free) == (reserved, never_used, 0, 0)


def test_figure_3_gap_between_requests():
    """External fragmentation: A needs 2048 slots and B 512, but a buddy allocator has only larger gaps to offer."""
    memory = ReservedMemory(128 + 64 + 64, 16, 2048, "oracle")
    run = scheduler(memory)
    for name, prompt, output in (("A", 1000, 1048), ("B", 300, 213), ("C", 520, 10)):
        run.submit(Request(name, prompt, output))
    run.schedule()
    assert tables(run, "A") == [list(range(128, 256))]
    assert tables(run, "B") == [list(range(33))]  # 513 tokens are 33 pages, in a chunk of 64
    assert tables(run, "C") == [list(range(64, 64 + 34))]
    usage = run.usage()
    assert usage.external == (64 * 16 - 513) + (64 * 16 - 530)
    assert usage.free == 0
    assert usage.internal == 0


def test_figure_6():
    """Seven prompt tokens on blocks 7 and 1, the first output token fills block 1, the second opens block 3."""
    memory = paged()
    arrange(memory.pool, 7, 1, 3)
    run = scheduler(memory)
    run.submit(Request("A", 7, 3))
    plan = step(run)
    assert [(c.start, c.count, c.last) for c in plan.prefills] == [(0, 7, True)]
    assert fills(*tables(run, "A"), 7) == {7: 4, 1: 3}
    plan = step(run)
    assert plan.decodes == (0,)
    assert fills(*tables(run, "A"), 8) == {7: 4, 1: 4}
    run.schedule()
    assert fills(*tables(run, "A"), 9) == {7: 4, 1: 4, 3: 1}
    assert (run.usage().live, run.usage().internal) == (9, 3)
    run.complete(StepResult())
    assert not run.has_work
    assert memory.num_free_pages == 24


def test_figure_7():
    """Two requests at once: neighbouring logical blocks lie anywhere, and never in each other's."""
    memory = paged()
    arrange(memory.pool, 7, 1, 5, 2, 3)
    run = scheduler(memory)
    run.submit(Request("A", 7, 4))
    run.submit(Request("B", 5, 4))
    step(run)
    step(run)
    run.schedule()
    assert tables(run, "A") == [[7, 1, 3]]
    assert tables(run, "B") == [[5, 2]]
    assert fills([7, 1, 3], 9) == {7: 4, 1: 4, 3: 1}
    assert fills([5, 2], 7) == {5: 4, 2: 3}
    assert run.usage().live == 16


def test_figure_8():
    """Two samples of one prompt: the first writer copies block 1 to block 3, the last writer writes in place."""
    memory = paged()
    arrange(memory.pool, 7, 1, 3, 8, 9)
    run = scheduler(memory)
    run.submit(Request("A", 7, 4, num_seqs=2))
    step(run)
    assert tables(run, "A") == [[7, 1], [7, 1]]
    assert (memory.pool.owners[7], memory.pool.owners[1]) == (2, 2)
    plan = run.schedule()
    assert plan.copies == ((1, 3),)
    assert tables(run, "A") == [[7, 3], [7, 1]]
    assert [memory.pool.owners[page] for page in (7, 1, 3)] == [2, 1, 1]
    usage = run.usage()
    assert (usage.shared, usage.live, usage.pages, usage.logical_pages) == (4, 8, 3, 4)
    run.complete(StepResult())
    plan = run.schedule()
    assert plan.copies == ()
    assert tables(run, "A") == [[7, 3, 8], [7, 1, 9]]
    assert [memory.pool.owners[page] for page in (7, 1, 3, 8, 9)] == [2, 1, 1, 1, 1]


def test_full_last_block_is_never_copied():
    """As figure 8, but the prompt fills its blocks: both samples open blocks of their own."""
    memory = paged()
    run = scheduler(memory)
    run.submit(Request("A", 8, 4, num_seqs=2))
    step(run)
    for _ in range(3):
        assert step(run).copies == ()
    assert memory.num_free_pages == 24


@pytest.mark.parametrize("page_size", [1, 4])
def test_figure_9(page_size):
    """Four beams: blocks 2, 4, 5, 8 are freed, 9 to 12 are allocated, and what survives is shared."""
    memory = paged(page_size=page_size)
    pool = memory.pool
    run = scheduler(memory)
    run.submit(Request("A", page_size, 5 * page_size, num_seqs=4, beam=True))
    step(run)
    assert tables(run, "A") == [[0]] * 4
    for block, parents in (
        ((1, 20, 21, 2), (0, 0, 0, 3)),
        ((3, 20, 21, 4), (0, 0, 0, 3)),
        ((5, 6, 7, 8), (0, 1, 2, 3)),
    ):
        arrange(pool, *block)
        for token in range(page_size):
            plan = step(run, parents={"A": parents if token == page_size - 1 else (0, 1, 2, 3)})
            assert plan.copies == ()
    assert tables(run, "A") == [[0, 1, 3, 5], [0, 1, 3, 6], [0, 1, 3, 7], [0, 2, 4, 8]]

    in_use = {page for page in range(24) if pool.owners[page]}
    group = run.group("A")
    memory.reorder(group, (1, 1, 2, 2), group.known_at(run.tick) - 1)
    freed = in_use - {page for page in range(24) if pool.owners[page]}
    assert freed == {2, 4, 5, 8}
    arrange(pool, 9, 10, 11, 12)
    run.schedule()
    assert tables(run, "A") == [[0, 1, 3, 6, 9], [0, 1, 3, 6, 10], [0, 1, 3, 7, 11], [0, 1, 3, 7, 12]]
    owners = {page: pool.owners[page] for page in (0, 1, 3, 6, 7, 9, 10, 11, 12)}
    assert owners == {0: 4, 1: 4, 3: 4, 6: 2, 7: 2, 9: 1, 10: 1, 11: 1, 12: 1}
    assert (run.usage().shared, run.usage().live) == (5 * page_size, 4)
    assert (run.usage().pages, run.usage().logical_pages) == (9, 20)


def test_figure_9_half_filled_blocks_are_copied():
    """Two candidates that continue one parent in the middle of a block: one copies it, the other goes on in it."""
    memory = paged()
    arrange(memory.pool, 0, 1, 2, 3)
    run = scheduler(memory)
    run.submit(Request("A", 4, 8, num_seqs=2, beam=True))
    step(run)
    step(run, parents={"A": (1, 1)})
    assert tables(run, "A") == [[0, 2], [0, 2]]  # block 1 held the beam that was dropped
    assert (memory.pool.owners[1], memory.pool.owners[2]) == (0, 2)
    plan = run.schedule()
    assert plan.copies == ((2, 1),)
    assert tables(run, "A") == [[0, 1], [0, 2]]


def test_figure_10():
    """A shared translation prefix: its full blocks are one copy for all, the rest is computed with the task input."""
    prefix = tuple(range(100, 110))
    memory = paged(prefix_caching=True)
    run = scheduler(memory)
    run.submit(Request("A", 13, 3, prompt_ids=prefix + (1, 2, 3)))
    step(run)
    run.submit(Request("B", 14, 2, prompt_ids=prefix + (4, 5, 6, 7), num_seqs=2))
    plan = run.schedule()
    assert [(chunk.start, chunk.count) for chunk in plan.prefills] == [(8, 6)]
    assert plan.admitted[0].cached_tokens == 8
    (a,), (b, other) = tables(run, "A"), tables(run, "B")
    assert a[:2] == b[:2]
    assert not set(a[2:]) & set(b[2:])
    assert [memory.pool.owners[page] for page in b] == [3, 3, 2, 2]
    run.complete(StepResult())
    plan = run.schedule()
    assert plan.copies == ((other[3], b[3]),)  # the last block of the shared prompt is copied on write
    assert b[:3] == other[:3]


@pytest.mark.parametrize(("prefix", "cached"), [(80, 80), (341, 336)])
def test_figure_16_cached_part(prefix, cached):
    """One example of 80 tokens is five blocks of 16; five examples of 341 tokens leave five to compute."""
    memory = paged(100, 16, prefix_caching=True)
    run = scheduler(memory)
    ids = tuple(range(prefix))
    run.submit(Request("A", prefix + 20, 2, prompt_ids=ids + tuple(range(-1, -21, -1))))
    step(run)
    run.submit(Request("B", prefix + 30, 2, prompt_ids=ids + tuple(range(-101, -131, -1))))
    plan = run.schedule()
    assert plan.admitted[0].cached_tokens == cached
    assert plan.prefill_tokens == prefix + 30 - cached
