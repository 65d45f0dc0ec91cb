"""Rows with one query: a work list of (row, block of keys) items, a few items at a time.

The softmax of a row is split over its items. Every item takes as its base not the largest logit but the next power of
two above its exponential, so that moving a partial sum to another base only changes exponents and rounds nothing. Items
are added in the order of the row's keys. Both together make a row's bits independent of which items shared an
iteration, that is of the rest of the batch.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention import blocks
from pallas_kernels.paged_attention.arguments import Call
from pallas_kernels.paged_attention.places import Places, bend, visible
from pallas_kernels.paged_attention.states import finish

ITEM_SLOTS = 64  # keys of an item, if pages are not larger
ITEMS = 8  # items of an iteration
NONE = -1e30  # exponent of an item without visible keys
LN2 = math.log(2.0)


def attend(call: Call, places: Places) -> tuple[jax.Array, jax.Array]:
    """Output [S,H,Dv] and log-sum-exp [S,H] of the rows with one query, float32; whatever for other rows."""
    rows, heads = call.block_tables.shape[0], call.q.shape[1]
    group = max(1, ITEM_SLOTS // call.page_size)
    length = group * call.page_size
    alone = (places.query_lens == 1) & (call.kv_lens > 0)
    low, high = blocks.span(call, places.cached, call.kv_lens, length)
    counts = jnp.where(alone, high - low, 0)
    ends = jnp.cumsum(counts)
    rank = jnp.cumsum((counts > 0).astype(jnp.int32)) - 1  # place of a row among those with work

    def step(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        done, top, total, out = state
        item = done + jnp.arange(ITEMS, dtype=jnp.int32)
        row = jnp.minimum(jnp.sum(ends <= item[:, None], axis=1, dtype=jnp.int32), rows - 1)
        block = low[row] + item - (ends[row] - counts[row])
        place = jnp.where(item < ends[-1], rank[row] - rank[row[0]], ITEMS)  # [W]; ITEMS: no such item
        partial = attend_items(call, places, row, block, group)
        sums = [lax.dynamic_slice_in_dim(x, rank[row[0]], ITEMS) for x in (top, total, out)]
        sums = add(sums, partial, place)
        state = [lax.dynamic_update_slice_in_dim(x, y, rank[row[0]], 0) for x, y in zip(state[1:], sums, strict=True)]
        return done + ITEMS, *state

    # ITEMS rows more than needed: an iteration rewrites ITEMS rows from the first one that it works on.
    top = jnp.full((rows + ITEMS, heads), NONE, jnp.float32)
    out = jnp.zeros((rows + ITEMS, heads, call.v_width), jnp.float32)
    state = lax.while_loop(lambda s: s[0] < ends[-1], step, (jnp.int32(0), top, jnp.zeros_like(top), out))
    worked = (counts > 0)[:, None]
    top, total, out = (x[jnp.maximum(rank, 0)] for x in state[1:])
    top, total = jnp.where(worked, top, NONE), jnp.where(worked, total, 0.0)
    if call.sinks is not None:
        sink_top = jnp.ceil(call.sinks / LN2)
        base = jnp.maximum(top, sink_top)
        shrink = power_of_two(top - base)
        total = total * shrink + jnp.exp(call.sinks - base * LN2)
        top, out = base, jnp.where(worked[..., None], out, 0.0) * shrink[..., None]
    return finish(out, total, top * LN2)


def attend_items(
    call: Call, places: Places, row: jax.Array, block: jax.Array, group: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of each item's query over the item's keys alone.

    Args:
        row, block: int32 [W].
        group: pages of a block.

    Returns:
        Base exponent [W,H] (integers, NONE where nothing is visible), sum of weights [W,H] and of weighted values
        [W,H,Dv], all against 2**exponent.
    """
    items, slots, size = row.shape[0], call.page_size, call.q.shape[2]
    heads = (call.num_kv_heads, call.group_size)
    ids = blocks.page_ids(call, row, block, group)  # [W,g]
    token = jnp.clip(call.query_starts[row], 0, call.q.shape[0] - 1)
    offsets = jnp.arange(group * slots, dtype=jnp.int32)
    seen, distance = jax.vmap(lambda r, t, b: visible(call, places, r, t[None], b * group * slots + offsets))(
        row, token, block
    )
    seen = seen.reshape(items, group, 1, 1, slots)
    keys = blocks.read(call.k_pages, ids)  # [W,g,K,B,D]
    query = (call.q[token].astype(jnp.float32) * call.scale).reshape(items, 1, *heads, size)
    query = jnp.broadcast_to(query, (items, group, *heads, size))
    logits = jnp.einsum("wpkgd,wpkbd->wpkgb", query, keys, precision="highest")
    if call.k_scale is not None:
        logits *= blocks.read_scale(call.k_scale, call.k_pages, ids)[..., None, :]
    slopes = None if call.alibi_slopes is None else call.alibi_slopes.reshape(*heads, 1)
    logits = bend(call, logits, slopes, distance.reshape(seen.shape))
    logits = jnp.where(seen, logits, -jnp.inf)
    top = jnp.maximum(jnp.ceil(jnp.max(logits, axis=(1, 4), keepdims=True) / LN2), NONE)
    weights = jnp.exp(logits - top * LN2)  # [W,g,K,G,B]
    total = jnp.sum(weights, axis=(1, 4))
    if call.v_scale is not None:
        scale = blocks.read_scale(call.v_scale, call.k_pages if call.v_pages is None else call.v_pages, ids)
        weights = jnp.where(seen, weights * scale[..., None, :], 0.0)
    values = jnp.where(seen[..., 0, :, None], blocks.read_values(call, ids, keys), 0.0)  # [W,g,K,B,Dv]
    out = jnp.sum(jnp.einsum("wpkgb,wpkbd->wpkgd", weights, values, precision="highest"), axis=1)
    flat = (items, heads[0] * heads[1])
    return top.reshape(flat), total.reshape(flat), out.reshape(*flat, -1)


def add(sums: list[jax.Array], partial: tuple[jax.Array, ...], place: jax.Array) -> tuple[jax.Array, ...]:
    """Adds each item's partial sums to those of its row.

    Args:
        sums: exponents [W,H], sums of weights [W,H] and of weighted values [W,H,Dv] of W rows in a row.
        partial: the same of W items.
        place: which of the rows an item belongs to, int32 [W]; W for none.
    """
    top, total, out = sums
    item_top, item_total, item_out = partial
    mine = place == jnp.arange(ITEMS, dtype=jnp.int32)[:, None]  # [row, item]
    base = jnp.maximum(top, jnp.max(jnp.where(mine[..., None], item_top, NONE), axis=1))
    shrink = power_of_two(top - base)
    total, out = total * shrink, out * shrink[..., None]
    for item in range(ITEMS):  # one after the other, so that the order is that of the keys
        factor = power_of_two(item_top[item] - base)  # [row,H]
        belongs = mine[:, item, None]
        total += jnp.where(belongs, item_total[item] * factor, 0.0)
        out += jnp.where(belongs[..., None], item_out[item] * factor[..., None], 0.0)
    return base, total, out


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2**exponent for integral exponents of at most 127, exactly; 0 below the normal numbers."""
    bits = (jnp.clip(exponent, -127.0, 127.0).astype(jnp.int32) + 127) << 23
    return lax.bitcast_convert_type(bits, jnp.float32)
