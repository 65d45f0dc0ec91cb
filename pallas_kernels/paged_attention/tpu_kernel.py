"""The body of the TPU kernel: one loop over jobs, in it loops over blocks of pages, with copies running ahead.

A ring of VMEM slots holds the blocks in the order in which they are attended, across jobs: while one is attended the
next ``depth - 1`` are on their way. Per job a block is either inner, seen whole by every query, or at an edge, where
logits and values are masked; the two have loops of their own, so that the inner one has no masks.

    slot:      filling ──▶ waited for ──▶ attended ──▶ filling (with the block depth - 1 further on)
    job j:     queries fetched during job j-1; results leave during job j+1, from the other of two buffers
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.paged_attention import tpu_copies, tpu_jobs, tpu_softmax


@dataclasses.dataclass(frozen=True)
class Options:
    """What is compiled into a kernel besides its layout.

    Attributes:
        causal, window, sinks, alibi: whether there are any.
        soft_cap: as in the call.
        takes: which rows this launch attends, "all", those with a "single" query or with "several".
    """

    causal: bool
    window: bool
    sinks: bool
    alibi: bool
    soft_cap: float | None
    takes: str


@dataclasses.dataclass(frozen=True)
class Refs:
    """The kernel's operands and scratch, by name, in the order of the call; None where a call has none.

    Shapes in terms of ``Layout``: jobs J, teams U, height M, lines I, columns C.
    """

    # scalars
    tables: Any  # int32 [S * blocks * pages]
    runs: Any  # int32 [S * blocks], bit g: the g-th group of ``joined`` pages are neighbours in the pool
    kv_lens: Any  # int32 [S]
    query_starts: Any  # int32 [S+1]
    window: Any  # int32 [1]
    # operands in VMEM
    k_gain: Any  # float32 [U,M,128]: factor of the logits
    v_gain: Any  # float32 [U,I,128]: factor of the results
    row_facts: Any  # int32 [4,M,128]
    column_facts: Any  # int32 [2,1,C]
    # operands in HBM
    q_hbm: Any  # [T,U,fold * team heads,width]
    k_hbm: Any  # [N,page rows,width]
    v_hbm: Any  # [N,page rows,width]
    out_before: Any  # the outputs' buffers with what tokens without a job get
    lse_before: Any
    # outputs
    out_hbm: Any  # [T,U,team heads,size]
    lse_hbm: Any  # float32 [T,U,128]
    # scratch
    jobs: Any  # int32 [FIELDS,J] in SMEM
    k_ring: Any  # [depth,pages,page rows,width]
    v_ring: Any
    q: Any  # [2,queries,U,fold * team heads,width]
    out: Any  # [2,queries,U,team heads,size]
    lse: Any  # float32 [2,queries,U,128]
    left: Any  # [U,(2 for digits) M,sides * width]: left operands of the first products
    gain: Any  # float32 [U,M,128]: k_gain times the queries' digit scale
    logits: Any  # float32, or int32 for digits, [2,(2 for digits) M,C]: those that wait for their softmax
    top: Any  # float32 [U,M,128]: running maximum
    total: Any  # float32 [U,M,128]: running sum of weights, by lanes
    acc: Any  # float32 [U,M,width]: running sum of weighted values
    page_sem: Any  # [depth]
    q_sem: Any  # [2]
    out_sem: Any  # [2]
    # with options
    sinks: Any = None  # float32 [U,I,128], in units of log 2
    slopes: Any = None  # float32 [U,M,128], in units of log 2
    k_scale_hbm: Any = None  # float32 [N * scale rows,128], or [S,blocks,U,parts,streams * team runs,C]
    v_scale_hbm: Any = None
    k_scale_ring: Any = None  # float32 [depth,pages * scale rows,128], or [depth,U,parts,streams * team runs,C]
    v_scale_ring: Any = None
    k_scales: Any = None  # float32 [runs of a page,fold,block tiles,128]: those of the block attended, by columns
    v_scales: Any = None


def kernel(layout, options: Options, names: tuple[str, ...], *refs) -> None:
    """Attends everything that this launch is to attend."""
    refs = Refs(**dict(zip(names, refs, strict=True)))
    jobs = tpu_jobs.list_jobs(layout, options, refs)

    @pl.when(jobs > 0)
    def _():
        tpu_copies.query_copies(layout, refs, 0, start=True)
        cursor = jnp.int32(0), refs.jobs[tpu_jobs.LOW, 0]
        for slot in range(layout.depth - 1):
            for piece in tpu_copies.block_copies(layout, refs, slot, *cursor):
                piece()
            cursor = tpu_copies.next_block(refs, *cursor, jobs)
        run = functools.partial(run_job, layout, options, refs, jobs)
        lax.fori_loop(0, jobs, run, (jnp.int32(0), *cursor))
        pl.when(jobs >= 2)(lambda: tpu_copies.result_copies(layout, refs, jobs - 2, start=False))
        tpu_copies.result_copies(layout, refs, jobs - 1, start=False)


def run_job(layout, options: Options, refs: Refs, jobs: jax.Array, index: jax.Array, state: tuple) -> tuple:
    """Attends one job; the state is the ring's slot to read, and the job and block to start copies of next."""
    side = index & 1
    tpu_copies.query_copies(layout, refs, index, start=False)
    pl.when(index + 1 < jobs)(lambda: tpu_copies.query_copies(layout, refs, index + 1, start=True))
    tpu_softmax.place_queries(layout, refs, side)
    refs.top[...] = jnp.full(refs.top.shape, tpu_softmax.LOWEST, jnp.float32)
    refs.total[...] = jnp.zeros(refs.total.shape, jnp.float32)
    refs.acc[...] = jnp.zeros(refs.acc.shape, jnp.float32)
    job = tpu_jobs.load_job(layout, options, refs, index)
    end_page = (job.end + layout.page_size - 1) // layout.page_size

    def step(block, state, masked):
        slot, ahead_job, ahead_block = state
        count = jnp.minimum(end_page - block * layout.pages, layout.pages) if masked else None
        tpu_copies.wait_block(layout, refs, slot, count)
        free = jnp.where(slot == 0, layout.depth - 1, slot - 1)  # attended last
        pieces = tpu_copies.block_copies(layout, refs, free, ahead_job, ahead_block)
        tpu_softmax.attend_block(layout, options, refs, slot, block, job, masked, pieces)
        ahead = tpu_copies.next_block(refs, ahead_job, ahead_block, jobs)
        return jnp.where(slot == layout.depth - 1, 0, slot + 1), *ahead

    edge, inner = functools.partial(step, masked=True), functools.partial(step, masked=False)
    if options.window:
        state = lax.fori_loop(job.low, job.inner_low, edge, state)
    state = lax.fori_loop(job.inner_low, job.inner_high, inner, state)
    state = lax.fori_loop(job.inner_high, job.high, edge, state)

    pl.when(index >= 2)(lambda: tpu_copies.result_copies(layout, refs, index - 2, start=False))
    tpu_softmax.finish(layout, options, refs, side)
    tpu_copies.result_copies(layout, refs, index, start=True)
    return state
