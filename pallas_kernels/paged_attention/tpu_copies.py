"""Copies between HBM and VMEM inside the kernel: pages into the ring, queries in, results out."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import tpu_jobs
from pallas_kernels.paged_attention.tpu_jobs import job_tokens

PIECE = 4  # pages, at least, that are issued at one place


def block_copies(layout, refs, slot: jax.Array, job: jax.Array, block: jax.Array) -> list[Callable[[], None]]:
    """What starts the copies of a block's pages into a slot of the ring, in pieces.

    The compiler keeps copies into the ring and loads from it in the order of the program, so pieces called at one place
    would hold up all arithmetic for as long as it takes to issue them, 7 bundles a page. Between the products of
    different teams they fill the gaps in which a softmax waits for its own results.

    Pages past the job's last token are not read, so a part of the slot may keep what it held. Table entries that are
    neighbours in the pool come in one copy.
    """
    row = refs.jobs[tpu_jobs.ROW, job]
    count = (refs.jobs[tpu_jobs.END, job] + layout.page_size - 1) // layout.page_size - block * layout.pages
    entry = row * (refs.runs.shape[0] // refs.kv_lens.shape[0]) + block
    base = entry * layout.pages

    def start(first, length, wanted):
        page = refs.tables[base + first]  # outside of the predicate, which would only choose where to read

        @pl.when(wanted)
        def _():
            for source, ring, rows in page_sides(layout, refs):
                target = ring.at[slot, pl.ds(first * rows, length * rows)]
                source = source.at[pl.ds(page * rows, length * rows)]
                pltpu.make_async_copy(source, target, refs.page_sem.at[slot]).start()

    def start_group(group):
        first, limit = group * layout.joined, count
        if layout.joined > 1:
            whole = ((refs.runs[entry] >> group) & 1 == 1) & (first + layout.joined <= count)
            start(first, layout.joined, whole)
            limit = jnp.where(whole, 0, count)
        # Predicates, not branches, which would end the stretch of program that is scheduled together.
        for page in range(first, first + layout.joined):
            start(page, 1, page < limit)

    def start_scales():
        for source, ring in gathered_sides(layout, refs):
            pltpu.make_async_copy(source.at[row, block], ring.at[slot], refs.page_sem.at[slot]).start()

    def start_groups(first, end):
        for group in range(first, end):
            start_group(group)

    groups, some = layout.pages // layout.joined, max(1, PIECE // layout.joined)
    pieces = [functools.partial(start_groups, first, min(first + some, groups)) for first in range(0, groups, some)]
    if gathered_sides(layout, refs):
        pieces.append(lambda: pl.when(count > 0)(start_scales))
    return pieces


def next_block(refs, job: jax.Array, block: jax.Array, jobs: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The job and block whose copies come after those of this one."""
    following = jnp.minimum(job + 1, jobs)
    done = block + 1 >= refs.jobs[tpu_jobs.HIGH, job]
    return jnp.where(done, following, job), jnp.where(done, refs.jobs[tpu_jobs.LOW, following], block + 1)


def page_sides(layout, refs) -> list[tuple]:
    """What is copied page by page: source, ring, and how much of the first axis of both is a page."""
    sides = [(refs.k_hbm, refs.k_ring, 1), (refs.v_hbm, refs.v_ring, 1)]
    if layout.scale_rows:
        scales = ((refs.k_scale_hbm, refs.k_scale_ring), (refs.v_scale_hbm, refs.v_scale_ring))
        sides += [(*side, layout.scale_rows) for side in scales if side[1] is not None]
    return sides


def gathered_sides(layout, refs) -> list[tuple]:
    """What is copied once per block, since the host has gathered it: source and ring."""
    if layout.scale_rows:
        return []
    sides = ((refs.k_scale_hbm, refs.k_scale_ring), (refs.v_scale_hbm, refs.v_scale_ring))
    return [side for side in sides if side[1] is not None]


def wait_block(layout, refs, slot: jax.Array, count: jax.Array | None) -> None:
    """Waits for the ``count`` pages (1 to all; None: all) of a slot."""

    def wait(ref):
        pltpu.make_async_copy(ref, ref, refs.page_sem.at[slot]).wait()

    for _, ring, rows in page_sides(layout, refs):
        if count is None:
            wait(ring.at[slot])
            continue
        for bit in range(layout.pages.bit_length()):  # what is waited for is an amount, whichever pages it was
            some = ring.at[slot, pl.ds(0, rows << bit)]
            pl.when((count >> bit) & 1 == 1)(functools.partial(wait, some))
    for _, ring in gathered_sides(layout, refs):
        wait(ring.at[slot])


def each_token(layout, refs, job: jax.Array, act: Callable[[jax.Array, jax.Array], None]) -> None:
    """Calls ``act(token, place in the job)`` for every query of a job."""
    first, count = job_tokens(layout, refs, job)
    if layout.queries == 1:
        act(first, 0)
    else:
        lax.fori_loop(0, count, lambda i, _: act(first + i, i), None)


def query_copies(layout, refs, job: jax.Array, start: bool) -> None:
    """Starts the copies of a job's queries, or waits for them."""
    side = job & 1

    def act(token, place):
        copy = pltpu.make_async_copy(refs.q_hbm.at[token], refs.q.at[side, place], refs.q_sem.at[side])
        copy.start() if start else copy.wait()

    each_token(layout, refs, job, act)


def result_copies(layout, refs, job: jax.Array, start: bool) -> None:
    """Starts the copies of a job's results, or waits for them."""
    side = job & 1

    def act(token, place):
        for source, target in ((refs.out, refs.out_hbm), (refs.lse, refs.lse_hbm)):
            copy = pltpu.make_async_copy(source.at[side, place], target.at[token], refs.out_sem.at[side])
            copy.start() if start else copy.wait()

    each_token(layout, refs, job, act)
