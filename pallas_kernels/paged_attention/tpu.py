"""Paged attention on TPUs (v5e, v6e, 7x; also v5p): one kernel for decoding, prefill and any mix.

The host side: what the kernel can do, how its operands are laid out, and how often it is launched.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention import tpu_blocks, tpu_chip, tpu_jobs
from pallas_kernels.paged_attention.arguments import Call
from pallas_kernels.paged_attention.tpu_blocks import Blocks, token_scaled
from pallas_kernels.paged_attention.tpu_kernel import Options, kernel
from pallas_kernels.paged_attention.tpu_layout import LANES, Layout
from pallas_kernels.paged_attention.tpu_softmax import LOG2_E

PLATFORM = "tpu"  # where it is taken without being named
PAGE_DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
TABLE_BYTES = 512 << 10  # of block tables in SMEM at a time


def refuses(call: Call) -> str | None:
    """Why this implementation cannot do the call, or None."""
    size, page_size, chip = call.q.shape[2], call.page_size, tpu_chip.current()
    if call.tree_mask is not None:
        return "it has no tree masks"
    if call.v_pages is None or call.v_width != size:
        return f"its values have the size of the keys, {size}; got {call.v_width}"
    if call.q.dtype == jnp.float64:
        return "it computes in float32 and the queries are float64"
    for name, pages in (("k_pages", call.k_pages), ("v_pages", call.v_pages)):
        if pages.dtype.name not in PAGE_DTYPES:
            return f"{name} must be one of {', '.join(PAGE_DTYPES)}; got {pages.dtype.name}"
        if chip.generation < 5 and pages.dtype.name.startswith("float8"):
            return f"a {chip.name} has no {pages.dtype.name}; got it in {name}"
        fold = max(1, LANES // size)
        if page_size < fold * 4 // pages.dtype.itemsize:
            return f"a page of {page_size} slots of {size} {pages.dtype.name} does not fill rows of {LANES} lanes"
    if size % LANES and size not in (32, 64):
        return f"the head size must be 32, 64 or a multiple of {LANES}; got {size}"
    if page_size & (page_size - 1):
        return f"the page size must be a power of two; got {page_size}"
    if call.q.shape[1] > LANES * call.num_kv_heads:
        return f"at most {LANES} query heads can share a KV head; got {call.group_size}"
    if call.block_tables.shape[1] * 4 > TABLE_BYTES:
        return f"a row of block_tables must fit in {TABLE_BYTES >> 10} KiB; got {call.block_tables.shape[1]} entries"
    try:
        for several in (False, True):
            tpu_blocks.arrange(call, tpu_blocks.default(call, several), chip)
    except ValueError as error:
        return str(error)
    return None


def attend(call: Call, blocks: tuple[Blocks, Blocks] | None = None) -> tuple[jax.Array, jax.Array]:
    """Output [T,H,Dv] and natural log-sum-exp [T,H].

    Rows with one query and rows with more are attended by a launch each, on the same buffers.

    Args:
        blocks: sizes for rows with one query and for rows with several; None for the default ones.
    """
    tokens, heads, size = call.q.shape
    blocks = blocks or (tpu_blocks.default(call, False), tpu_blocks.default(call, True))
    out = jnp.zeros((tokens, heads, size), jnp.bfloat16 if call.q.dtype == jnp.bfloat16 else jnp.float32)
    lse = jnp.full((tokens, heads), -jnp.inf, jnp.float32)
    if call.sinks is not None:  # what a query sees that has no keys
        real = jnp.arange(tokens, dtype=jnp.int32) < call.query_starts[-1]
        lse = jnp.where(real[:, None], call.sinks, lse)
    if call.max_query_len == 1:
        return launch(call, blocks[0], "all", out, lse)
    return launch(call, blocks[1], "several", *launch(call, blocks[0], "single", out, lse))


def launch(call: Call, blocks: Blocks, takes: str, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attends some rows, and writes what their queries get into ``out`` and ``lse``."""
    chip = tpu_chip.current()
    layout = tpu_blocks.arrange(call, blocks, chip)
    rows, columns = call.block_tables.shape
    columns += -columns % layout.pages
    tables = jnp.clip(call.block_tables, 0, call.k_pages.shape[0] - 1)
    tables = jnp.pad(tables, ((0, 0), (0, columns - call.block_tables.shape[1])))
    attend_rows = functools.partial(call_kernel, call, layout, chip, takes)
    some = min(rows, max(1, TABLE_BYTES // (4 * columns)))  # rows whose tables fit
    if some == rows:
        return attend_rows(tables, call.kv_lens, call.query_starts, out, lse)
    rest = -rows % some
    tables = jnp.pad(tables, ((0, rest), (0, 0)))
    kv_lens = jnp.pad(call.kv_lens, (0, rest))
    starts = jnp.pad(call.query_starts, (0, rest), mode="edge")

    def step(index, results):
        first = index * some
        part = [lax.dynamic_slice_in_dim(x, first, some) for x in (tables, kv_lens)]
        return attend_rows(*part, lax.dynamic_slice_in_dim(starts, first, some + 1), *results)

    return lax.fori_loop(0, (rows + rest) // some, step, (out, lse))


def call_kernel(
    call: Call,
    layout: Layout,
    chip: tpu_chip.Chip,
    takes: str,
    tables: jax.Array,
    kv_lens: jax.Array,
    query_starts: jax.Array,
    out: jax.Array,
    lse: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One launch over rows whose tables fit in SMEM."""
    tokens, heads, size = call.q.shape
    teams, team_heads = layout.teams, layout.team_heads
    options = Options(
        causal=call.causal,
        window=call.window is not None,
        sinks=call.sinks is not None,
        alibi=call.alibi_slopes is not None,
        soft_cap=call.soft_cap,
        takes=takes,
    )
    window = jnp.int32(0) if call.window is None else call.window
    scalars = {
        "tables": tables.reshape(-1),
        "runs": neighbours(tables, layout).reshape(-1),
        "kv_lens": kv_lens,
        "query_starts": query_starts,
        "window": window.reshape(1),
    }
    vmem = head_facts(call, layout)
    hbm = {
        "q_hbm": fold_queries(call, layout),
        "k_hbm": as_rows(call.k_pages, layout),
        "v_hbm": as_rows(call.v_pages, layout),
    }
    if token_scaled(call.k_pages, call.k_scale):
        hbm["k_scale_hbm"] = lay_scales(call.k_scale, tables, layout)
    if token_scaled(call.v_pages, call.v_scale):
        hbm["v_scale_hbm"] = lay_scales(call.v_scale, tables, layout)
    before = {
        "out_before": out.reshape(tokens, teams, team_heads, size),
        "lse_before": jnp.pad(lse.reshape(tokens, teams, team_heads), ((0, 0), (0, 0), (0, LANES - team_heads))),
    }
    scratch = tpu_blocks.buffers(call, layout)
    most_jobs = kv_lens.shape[0] + tokens // layout.queries + 1
    semaphores = {"page_sem": layout.depth, "q_sem": 2, "out_sem": 2}
    operands = scalars | vmem | hbm | before
    names = (*operands, "out_hbm", "lse_hbm", "jobs", *scratch, *semaphores)
    spaces = [pltpu.VMEM] * len(vmem) + [pl.ANY] * (len(hbm) + len(before))
    results = pl.pallas_call(
        functools.partial(kernel, layout, options, names),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in before.values()],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=space) for space in spaces],
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 2,
            scratch_shapes=[
                pltpu.SMEM((tpu_jobs.FIELDS, most_jobs), jnp.int32),
                *(pltpu.VMEM(*buffer) for buffer in scratch.values()),
                *(pltpu.SemaphoreType.DMA((count,)) for count in semaphores.values()),
            ],
        ),
        input_output_aliases={len(operands) - 2: 0, len(operands) - 1: 1},
        compiler_params=pltpu.CompilerParams(
            # Page ids are clipped above; the interpreter checks every access.
            disable_bounds_checks=True,
            vmem_limit_bytes=chip.vmem_bytes * 15 // 16,
        ),
        name=f"paged_attention_{takes}_q{layout.queries}_t{layout.block_tokens}x{layout.depth}",
    )(*operands.values())
    return results[0].reshape(tokens, heads, size), results[1][:, :, :team_heads].reshape(tokens, heads)


def as_rows(pages: jax.Array, layout: Layout) -> jax.Array:
    """Pages as rows of at least 128 lanes. Moves nothing if heads have 128 lanes or the pool is stored so."""
    return pages.reshape(pages.shape[0], layout.page_rows, layout.width)


def neighbours(tables: jax.Array, layout: Layout) -> jax.Array:
    """Which groups of ``joined`` table entries are consecutive pages: a bit each, a word per block, [S,blocks]."""
    rows, groups = tables.shape[0], layout.pages // layout.joined
    groups_of = tables.reshape(rows, -1, groups, layout.joined)
    consecutive = jnp.all(groups_of[..., 1:] == groups_of[..., :-1] + 1, axis=-1)
    return jnp.sum(consecutive << jnp.arange(groups, dtype=jnp.int32), axis=-1, dtype=jnp.int32)


def fold_queries(call: Call, layout: Layout) -> jax.Array:
    """Queries by teams, [T, teams, fold * team heads, width]: once for every place that a token may have in a row."""
    tokens, _, size = call.q.shape
    q = call.q if call.q.dtype == jnp.bfloat16 else call.q.astype(jnp.float32)
    q = q.reshape(tokens, layout.teams, layout.team_heads, size)
    if layout.fold == 1:
        return q
    places = [((0, 0), (0, 0), (0, 0), (i * size, layout.width - (i + 1) * size)) for i in range(layout.fold)]
    return jnp.concatenate([jnp.pad(q, place) for place in places], axis=2)


def head_facts(call: Call, layout: Layout) -> dict[str, jax.Array]:
    """What the kernel needs to know about each row and column of logits, see ``Refs``."""

    def per_head(x: jax.Array | None) -> jax.Array:
        """A scale per tensor or per KV head, for each query head."""
        x = jnp.ones((1,)) if x is None else x.reshape(-1)
        return jnp.repeat(jnp.broadcast_to(x, (layout.kv_heads,)), layout.group)

    def by_row(x: jax.Array, streams: int) -> jax.Array:
        x = x.astype(jnp.float32).reshape(layout.teams, 1, 1, layout.team_heads, 1)
        shape = (layout.teams, streams, layout.queries, layout.team_heads, LANES)
        return jnp.broadcast_to(x, shape).reshape(layout.teams, -1, LANES)

    k_scale = None if token_scaled(call.k_pages, call.k_scale) else call.k_scale
    v_scale = None if token_scaled(call.v_pages, call.v_scale) else call.v_scale
    unit = LOG2_E if call.soft_cap is None else 1.0 / call.soft_cap
    facts = {
        "k_gain": by_row(per_head(k_scale) * (call.scale * unit), layout.streams),
        "v_gain": by_row(per_head(v_scale), 1),
    }
    counts = (layout.halves, layout.fold, layout.queries, layout.team_heads)
    half, fold, query, head = np.meshgrid(*map(np.arange, counts), indexing="ij")
    head = head // layout.group
    rows = [half * layout.half_tokens + fold, query, head // layout.mixed, head % layout.mixed]
    rows = np.stack(rows).reshape(4, layout.height, 1).astype(np.int32)
    facts["row_facts"] = jnp.asarray(np.broadcast_to(rows, (4, layout.height, LANES)))
    column = np.arange(layout.columns)
    token = column // layout.run * layout.page_size + column % layout.slots * layout.fold
    columns = np.stack([token, column // layout.slots % layout.mixed]).astype(np.int32)
    facts["column_facts"] = jnp.asarray(columns[:, None])
    if call.sinks is not None:
        facts["sinks"] = by_row(call.sinks * LOG2_E, 1)
    if call.alibi_slopes is not None:
        facts["slopes"] = by_row(call.alibi_slopes * LOG2_E, layout.streams)
    return facts


def lay_scales(scale: jax.Array, tables: jax.Array, layout: Layout) -> jax.Array:
    """Scales per token in rows of 128, if the kernel takes them so (nothing moves if the pool is stored so, too).

    Else gathered by row, in the order of logits: [S, blocks, teams, parts, streams * team runs, columns].
    """
    if layout.scale_rows:
        return scale.reshape(-1, LANES)
    x = scale[tables]  # [S,columns of the table,K,B]
    x = x.reshape(
        *(tables.shape[0], -1, layout.halves, layout.parts, layout.part_pages),
        *(layout.teams, layout.team_runs, layout.mixed, layout.slots, layout.fold),
    )
    x = x.transpose(
        0, 1, 5, 3, 2, 9, 6, 4, 7, 8
    )  # S, blocks, teams, parts, halves, fold, team runs, pages, mixed, slots
    return x.reshape(*x.shape[:4], layout.streams * layout.team_runs, layout.columns)
