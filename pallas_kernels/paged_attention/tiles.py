"""Tiles of queries, one after the other, each of which walks over its row's keys with an online softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention import blocks
from pallas_kernels.paged_attention.arguments import Call
from pallas_kernels.paged_attention.places import Places, bend, visible
from pallas_kernels.paged_attention.states import finish

BLOCK_SLOTS = 128  # keys of a block, if pages are not larger
LOWEST = -1e30  # start of the running maximum: finite, so that differences are


def attend(call: Call, places: Places, chosen: jax.Array, width: int) -> tuple[jax.Array, jax.Array]:
    """Output [T,H,Dv] and log-sum-exp [T,H] of the chosen rows, in tiles of ``width``, float32; whatever for others."""
    tokens, heads, _ = call.q.shape
    rows = call.block_tables.shape[0]
    counts = jnp.where(chosen, (places.query_lens + width - 1) // width, 0)
    ends = jnp.cumsum(counts)
    queries = jnp.pad(call.q, ((0, width - 1), (0, 0), (0, 0)))

    def step(state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
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


def attend_tile(
    call: Call, places: Places, row: jax.Array, first: jax.Array, query: jax.Array
) -> tuple[jax.Array, jax.Array]:
    width, heads, size = query.shape
    kv_heads, groups = call.num_kv_heads, call.group_size
    group = max(1, BLOCK_SLOTS // call.page_size)
    length = group * call.page_size
    query = query.astype(jnp.float32) * call.scale
    query = query.reshape(width, kv_heads, groups, size).transpose(1, 2, 0, 3).reshape(kv_heads, groups * width, size)
    tokens = call.query_starts[row] + first + jnp.arange(width, dtype=jnp.int32)
    in_row = first + jnp.arange(width, dtype=jnp.int32) < places.query_lens[row]
    kv_len, cached = call.kv_lens[row], places.cached[row]
    ordered = call.causal and call.tree_mask is None
    end = jnp.minimum(kv_len, cached + first + width) if ordered else kv_len
    # A query of a tree stands no earlier than right behind the cached tokens (or on the last, if it sees no query).
    low, high = blocks.span(call, cached + first if ordered else cached - 1, end, length)
    slopes = None if call.alibi_slopes is None else call.alibi_slopes.reshape(kv_heads, groups, 1, 1)
    shape = (kv_heads, groups, width, length)

    def step(block: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        top, total, out = state
        ids = blocks.page_ids(call, row, block, group)
        ids = ids + blocks.touch(call.k_pages, ids)
        if call.v_pages is not None:
            ids = ids + blocks.touch(call.v_pages, ids)
        keys = blocks.read(call.k_pages, ids).reshape(kv_heads, length, -1)
        values = blocks.read_values(call, ids, keys).reshape(kv_heads, length, -1)
        slots = block * length + jnp.arange(length, dtype=jnp.int32)
        seen, distance = visible(call, places, row, tokens, slots)  # [Q,C]
        seen &= in_row[:, None]
        values = jnp.where(jnp.any(seen, axis=0)[:, None], values, 0.0)
        logits = jnp.einsum("kqd,kcd->kqc", query, keys, precision="highest").reshape(shape)
        if call.k_scale is not None:
            logits *= flatten(blocks.read_scale(call.k_scale, call.k_pages, ids))
        logits = jnp.where(seen, bend(call, logits, slopes, distance), -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(logits, axis=3))
        weights = jnp.exp(logits - new_top[..., None])
        shrink = jnp.exp(top - new_top)
        total = total * shrink + jnp.sum(weights, axis=3)
        if call.v_scale is not None:
            scale = blocks.read_scale(call.v_scale, call.k_pages if call.v_pages is None else call.v_pages, ids)
            weights = jnp.where(seen, weights * flatten(scale), 0.0)
        weights = weights.reshape(kv_heads, groups * width, length)
        part = jnp.einsum("kqc,kcd->kqd", weights, values, precision="highest").reshape(out.shape)
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
    return jnp.transpose(out, (2, 0, 1, 3)).reshape(width, heads, -1), jnp.transpose(lse, (2, 0, 1)).reshape(width, -1)


def flatten(scale: jax.Array) -> jax.Array:
    """A scale that fits [g,K,B] as one that fits [K,1,1,g*B]."""
    if scale.ndim == 2:  # [1,1] or [K,1]: the same for all slots
        return scale[:, :, None, None]
    return scale.reshape(scale.shape[0], 1, 1, -1)
