"""Tiles of queries, one after the other, each of which walks over its row's keys with an online softmax.

A tile knows nothing of other rows, and its walk is cut at fixed places, so a row's bits do not depend on its batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention import blocks, products
from pallas_kernels.paged_attention.arguments import Call
from pallas_kernels.paged_attention.places import Places, bend, visible
from pallas_kernels.paged_attention.states import finish

BLOCK_SLOTS = 128  # keys of a block, if pages are not larger
FEW_BYTES = 512 * 1024  # of a block for few queries, at most: with a copy of half of it, it stays in a cache of 1 MB
LOWEST = -1e30  # start of the running maximum: finite, so that differences are


def attend(call: Call, places: Places, chosen: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Attention of the chosen rows.

    Args:
        chosen: which rows, bool [S].
        width: queries of a tile.

    Returns:
        Output [T,H,Dv] and log-sum-exp [T,H], float32; anything at the tokens of other rows.
    """
    tokens, heads, _ = call.q.shape
    rows = call.block_tables.shape[0]
    counts = jnp.where(chosen, (places.query_lens + width - 1) // width, 0)
    ends = jnp.cumsum(counts)
    queries = jnp.pad(call.q, ((0, width - 1), (0, 0), (0, 0)))

    def step(state: tuple) -> tuple:
        tile, out, lse = state
        row = jnp.minimum(jnp.sum(ends <= tile, dtype=jnp.int32), rows - 1)
        first = (tile - (ends[row] - counts[row])) * width
        start = call.query_starts[row] + first
        query = lax.dynamic_slice_in_dim(queries, start, width)
        tile_out, tile_lse = attend_tile(call, places, row, first, query)
        # The part of a tile past its row's end lands on later tokens, whose own tile comes later.
        out = lax.dynamic_update_slice_in_dim(out, tile_out, start, 0)
        lse = lax.dynamic_update_slice_in_dim(lse, tile_lse, start, 0)
        return tile + 1, out, lse

    out = jnp.zeros((tokens + width - 1, heads, call.v_width), jnp.float32)
    lse = jnp.zeros((tokens + width - 1, heads), jnp.float32)
    _, out, lse = lax.while_loop(lambda s: s[0] < ends[-1], step, (jnp.int32(0), out, lse))
    return out[:tokens], lse[:tokens]


def block_pages(call: Call, few: bool) -> int:
    """Pages of a block: as many as matrix products like, for few queries no more than a cache holds."""
    count = BLOCK_SLOTS // call.page_size
    if few:
        sides = [side for side in (call.k_pages, call.v_pages) if side is not None]
        count = min(count, FEW_BYTES // sum(side.nbytes // side.shape[0] for side in sides))
    return max(1, count)


def attend_tile(
    call: Call, places: Places, row: jax.Array, first: jax.Array, query: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attention of one tile.

    Args:
        row: the tile's row, int32 scalar.
        first: which of the row's queries is the tile's first, int32 scalar.
        query: the queries, [Q,H,D].

    Returns:
        Output [Q,H,Dv] and log-sum-exp [Q,H], float32.
    """
    width, heads, size = query.shape
    kv_heads, groups = call.num_kv_heads, call.group_size
    few = groups * width <= products.FEW
    group = block_pages(call, few)
    length = group * call.page_size
    query = query.astype(jnp.float32) * call.scale
    query = query.reshape(width, kv_heads, groups, size).transpose(1, 2, 0, 3).reshape(kv_heads, groups * width, size)
    index = first + jnp.arange(width, dtype=jnp.int32)
    tokens, in_row = call.query_starts[row] + index, index < places.query_lens[row]
    kv_len, cached = call.kv_lens[row], places.cached[row]
    ordered = call.causal and call.tree_mask is None
    end = jnp.minimum(kv_len, cached + first + width) if ordered else kv_len
    # A query of a tree stands no earlier than right behind the cached tokens (or on the last, if it sees no query).
    low, high = blocks.span(call, cached + first if ordered else cached - 1, end, length)
    slopes = None if call.alibi_slopes is None else call.alibi_slopes.reshape(kv_heads, groups, 1, 1)
    shape = (kv_heads, groups, width, length)

    def step(block: jax.Array, state: tuple) -> tuple:
        top, total, out = state
        k_runs, v_runs = blocks.hold(call, block)
        ids = blocks.page_ids(call, row, block, group)
        runs = blocks.warm((k_runs, v_runs), blocks.head_runs(call, ids))
        slots = block * length + jnp.arange(length, dtype=jnp.int32)
        seen, distance = visible(call, places, row, tokens, slots)  # [Q,C]
        seen &= in_row[:, None]
        # Values in the keys are read twice, so they are worth a copy.
        keys = blocks.read(k_runs, runs, call.page_size, copy=not few or v_runs is None)
        logits = products.scores(query, keys).reshape(shape)
        if call.k_scale is not None:
            logits *= blocks.read_scale(call, call.k_scale, runs)[:, None, None]
        logits = jnp.where(seen, bend(call, logits, slopes, distance), -jnp.inf)
        new_top = jnp.maximum(top, products.largest(logits))
        weights = jnp.exp(logits - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        total = total * shrink + products.total(weights)
        if call.v_scale is not None:
            weights = jnp.where(seen, weights * blocks.read_scale(call, call.v_scale, runs)[:, None, None], 0.0)
        values = keys[..., : call.v_width] if v_runs is None else blocks.read(v_runs, runs, call.page_size)
        weights = weights.reshape(kv_heads, groups * width, length)
        part = products.mix(weights, values, jnp.any(seen, axis=0)).reshape(out.shape)
        return new_top, total, out * shrink[..., None] + part

    top = jnp.full((kv_heads, groups, width), LOWEST, jnp.float32)
    out = jnp.zeros((kv_heads, groups, width, call.v_width), jnp.float32)
    top, total, out = lax.fori_loop(low, high, step, (top, jnp.zeros_like(top), out))
    if call.sinks is not None:
        sinks = call.sinks.reshape(kv_heads, groups, 1)
        base = jnp.maximum(top, sinks)
        shrink = jnp.exp(top - base)
        top, total, out = base, total * shrink + jnp.exp(sinks - base), out * shrink[..., None]
    out, lse = finish(out, total, top)
    out = jnp.transpose(out, (2, 0, 1, 3)).reshape(width, heads, -1)
    return out, jnp.transpose(lse, (2, 0, 1)).reshape(width, -1)
