"""The backward pass of paged attention: derivatives for the queries, and for the keys and values of the call's tokens.

As the forward pass in ``tiles``: tiles of queries, one after the other, each of which walks over its row's keys, with
the softmax recomputed from the log-sum-exp (Dao et al. 2022, algorithm 4). A tile's walk has two parts: the pages of
the tokens cached before the call, which are constants, and the call's own tokens, which lie side by side.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import pages
from pallas_kernels.paged_attention import blocks, products, tiles
from pallas_kernels.paged_attention.arguments import Call
from pallas_kernels.paged_attention.places import Places, bend, locate, visible

TILE = 64  # queries of a tile


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Given:
    """What the walks read, token by token; ``TILE - 1`` tokens longer than the call, so that each tile is whole.

    Attributes:
        q: queries, [T,H,D].
        k, v: the call's own keys and values, [T,K,D] and [T,K,Dv].
        d_out: cotangent of the output, [T,H,Dv] float32.
        lse: log-sum-exp, finite, [T,H] float32.
        fall: what the derivative by a weight is lowered by, because all weights sum to 1, [T,H] float32.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    d_out: jax.Array
    lse: jax.Array
    fall: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Cotangents so far, float32: of queries and own keys and values, as long as ``Given``, and of the slopes [H]."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    slopes: jax.Array


@dataclasses.dataclass(frozen=True)
class Tile:
    """A tile of Q queries, its rows head by head: zeros where a query lies past the row's end.

    Attributes:
        row: its row, int32 scalar.
        first: which of the row's queries is its first, int32 scalar.
        tokens, in_row: token index of each query, and whether it belongs to the row, [Q].
        query, d_out: [K,G*Q,D] with the scale, and [K,G*Q,Dv].
        lse, fall: [K,G,Q].
    """

    row: jax.Array
    first: jax.Array
    tokens: jax.Array
    in_row: jax.Array
    query: jax.Array
    d_out: jax.Array
    lse: jax.Array
    fall: jax.Array


def own_content(call: Call, stored: jax.Array, scale: jax.Array | None) -> jax.Array:
    """One side of the call's own tokens as their pages hold it, [T,K,D]: float32 if scaled; zeros for padding."""
    places = locate(call)
    slots = places.cached[places.row] + jnp.arange(call.q.shape[0], dtype=jnp.int32) - call.query_starts[places.row]
    held = places.real & (slots >= 0) & (slots < call.block_tables.shape[1] * call.page_size)
    slots = jnp.where(held, slots, 0)
    ids = jnp.clip(call.block_tables[places.row, slots // call.page_size], 0, stored.shape[0] - 1)
    content = stored[ids, :, slots % call.page_size]
    content = pages.unpack_int4(content) if stored.dtype == jnp.uint8 else content
    if scale is not None:
        per_token = scale.shape == stored.shape[:3]
        scale = scale[ids, :, slots % call.page_size] if per_token else scale[0, :, 0]
        content = content.astype(jnp.float32) * scale[..., None]
    return jnp.where(held[:, None, None], content, jnp.zeros((), content.dtype))


def differentiate(
    call: Call, own: tuple[jax.Array, jax.Array], answer: tuple[jax.Array, jax.Array], cotangents: tuple
) -> tuple[Sums, jax.Array | None]:
    """Cotangents of a call's inputs.

    Args:
        call: the call; of its pages only the tokens cached before it are read.
        own: keys and values of the call's tokens, as ``own_content``.
        answer: output [T,H,Dv] and log-sum-exp [T,H].
        cotangents: of both.

    Returns:
        Those of queries, own keys, own values and slopes, float32; that of the sinks, if there are any. Zeros for
        padding.
    """
    places = locate(call)
    count = call.q.shape[0]
    out, lse = answer
    d_out, d_lse = (x.astype(jnp.float32) for x in cotangents)
    used = places.real[:, None] & ~jnp.isneginf(lse)
    fall = jnp.where(used, jnp.sum(d_out * out.astype(jnp.float32), axis=2) - d_lse, 0.0)
    lse = jnp.where(used, lse, 0.0)

    def longer(x: jax.Array) -> jax.Array:
        return jnp.pad(x, ((0, TILE - 1), *((0, 0),) * (x.ndim - 1)))

    given = Given(*(longer(x) for x in (call.q, *own, d_out, lse, fall)))
    shapes = (given.q.shape, given.k.shape, given.v.shape, call.q.shape[1:2])
    sums = Sums(*(jnp.zeros(shape, jnp.float32) for shape in shapes))
    sums = add_rows(call, places, given, sums, places.query_lens == 1, 1)
    if call.max_query_len != 1:
        sums = add_rows(call, places, given, sums, places.query_lens > 1, TILE)
    d_sinks = None
    if call.sinks is not None:
        d_sinks = -jnp.sum(jnp.where(used, jnp.exp(call.sinks - lse) * fall, 0.0), axis=0)
    return dataclasses.replace(sums, q=sums.q[:count], k=sums.k[:count], v=sums.v[:count]), d_sinks


def add_rows(call: Call, places: Places, given: Given, sums: Sums, chosen: jax.Array, width: int) -> Sums:
    """Adds what the chosen rows, bool [S], contribute, in tiles of ``width`` queries."""
    counts = jnp.where(chosen, (places.query_lens + width - 1) // width, 0)
    ends = jnp.cumsum(counts)

    def step(state: tuple) -> tuple:
        number, sums = state
        row = jnp.minimum(jnp.sum(ends <= number, dtype=jnp.int32), counts.shape[0] - 1)
        first = (number - (ends[row] - counts[row])) * width
        tile = cut(call, places, given, row, first, width)
        d_query, d_slopes = from_cached(call, places, tile)
        return number + 1, add_own(call, places, given, tile, sums, d_query, d_slopes)

    return lax.while_loop(lambda state: state[0] < ends[-1], step, (jnp.int32(0), sums))[1]


def cut(call: Call, places: Places, given: Given, row: jax.Array, first: jax.Array, width: int) -> Tile:
    """The tile of ``width`` queries of a row that starts with its query ``first``."""
    kv_heads, groups = call.num_kv_heads, call.group_size
    index = first + jnp.arange(width, dtype=jnp.int32)
    in_row = index < places.query_lens[row]
    start = call.query_starts[row] + first

    def part(x: jax.Array) -> jax.Array:
        x = lax.dynamic_slice_in_dim(x, start, width).astype(jnp.float32)
        x = jnp.where(in_row.reshape(width, *(1,) * (x.ndim - 1)), x, 0.0)
        return jnp.moveaxis(x.reshape(width, kv_heads, groups, *x.shape[2:]), 0, 2)

    query, d_out = (part(x).reshape(kv_heads, groups * width, -1) for x in (given.q, given.d_out))
    tokens = call.query_starts[row] + index
    return Tile(row, first, tokens, in_row, query * call.scale, d_out, part(given.lse), part(given.fall))


def weigh(
    call: Call,
    tile: Tile,
    keys: jax.Array,
    values: jax.Array,
    scales: tuple[jax.Array | None, jax.Array | None],
    seen: jax.Array,
    distance: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The softmax of a tile over some keys and its derivative.

    Args:
        keys, values: [K,C,D], [K,C,Dv].
        scales: of keys and of values, [K,C] or what broadcasts, or None for 1.
        seen, distance: as from ``visible``, [Q,C].

    Returns:
        Weights and derivative by the products of (scaled) queries and keys, [K,G*Q,C]; derivative by the slopes [K,G].
    """
    shape = (call.num_kv_heads, call.group_size, *seen.shape)
    raw = products.scores(tile.query, keys).reshape(shape)
    d_weights = products.scores(tile.d_out, values).reshape(shape)
    k_scale, v_scale = scales
    raw = raw if k_scale is None else raw * k_scale[:, None, None]
    d_weights = d_weights if v_scale is None else d_weights * v_scale[:, None, None]
    slopes = None if call.alibi_slopes is None else call.alibi_slopes.reshape(*shape[:2], 1, 1)
    logits = bend(call, raw, slopes, distance)
    # What is not seen may be anything, NaN too.
    weights = jnp.where(seen, jnp.exp(logits - tile.lse[..., None]), 0.0)
    d_raw = jnp.where(seen, weights * (d_weights - tile.fall[..., None]), 0.0)
    d_slopes = jnp.sum(d_raw * distance, axis=(2, 3)) if slopes is not None else jnp.zeros(shape[:2], jnp.float32)
    if call.soft_cap is not None:
        d_raw = jnp.where(seen, d_raw * (1.0 - jnp.square(jnp.tanh(raw / call.soft_cap))), 0.0)
    flat = (shape[0], shape[1] * shape[2], shape[3])
    return weights.reshape(flat), d_raw.reshape(flat), d_slopes


def from_cached(call: Call, places: Places, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """What the tokens cached before the call add to a tile's queries [K,G*Q,D] and to the slopes [K,G]."""
    group = tiles.block_pages(call, tile.query.shape[1] <= products.FEW)
    length = group * call.page_size
    cached = places.cached[tile.row]
    ordered = call.causal and call.tree_mask is None
    # A query of a tree stands no earlier than right behind the cached tokens (or on the last, if it sees no query).
    low, high = blocks.span(call, cached + (tile.first if ordered else -1), cached, length)

    def step(block: jax.Array, state: tuple) -> tuple:
        d_query, d_slopes = state
        k_runs, v_runs = blocks.hold(call, block)
        ids = blocks.page_ids(call, tile.row, block, group)
        runs = blocks.warm((k_runs, v_runs), blocks.head_runs(call, ids))
        slots = block * length + jnp.arange(length, dtype=jnp.int32)
        seen, distance = visible(call, places, tile.row, tile.tokens, slots)
        seen &= tile.in_row[:, None] & (slots < cached)
        keys, values = (blocks.read(side, runs, call.page_size) for side in (k_runs, v_runs))
        scales = tuple(x if x is None else blocks.read_scale(call, x, runs) for x in (call.k_scale, call.v_scale))
        _, d_raw, part = weigh(call, tile, keys, values, scales, seen, distance)
        used = jnp.any(seen, axis=0)
        if call.k_scale is not None:
            d_raw = jnp.where(used, d_raw * scales[0][:, None], 0.0)
        return d_query + products.mix(d_raw, keys, used), d_slopes + part

    start = jnp.zeros_like(tile.query), jnp.zeros((call.num_kv_heads, call.group_size), jnp.float32)
    return lax.fori_loop(low, high, step, start)


def add_own(
    call: Call, places: Places, given: Given, tile: Tile, sums: Sums, d_query: jax.Array, d_slopes: jax.Array
) -> Sums:
    """Adds what a tile and the call's own tokens of its row contribute, and what the tile's queries have so far."""
    width, cached, total = tile.tokens.shape[0], places.cached[tile.row], places.query_lens[tile.row]
    start = call.query_starts[tile.row]
    ordered = call.causal and call.tree_mask is None
    low, high = blocks.span(
        call,
        tile.first if ordered else jnp.int32(-1),
        jnp.minimum(total, tile.first + width) if ordered else total,
        width,
    )

    def step(block: jax.Array, state: tuple) -> tuple:
        d_query, d_keys, d_values, d_slopes = state
        index = block * width + jnp.arange(width, dtype=jnp.int32)
        in_row = index < total
        at = start + block * width
        keys, values = (lax.dynamic_slice_in_dim(x, at, width).swapaxes(0, 1) for x in (given.k, given.v))
        seen, distance = visible(call, places, tile.row, tile.tokens, cached + index)
        # A row without keys has its query at -1.
        seen &= tile.in_row[:, None] & in_row & (cached + index >= 0)
        weights, d_raw, part = weigh(call, tile, keys, values, (None, None), seen, distance)
        d_query += products.mix(d_raw, keys, jnp.any(seen, axis=0))
        key_part = jnp.einsum("kqc,kqd->ckd", d_raw, tile.query, precision="highest")
        value_part = jnp.einsum("kqc,kqd->ckd", weights, tile.d_out, precision="highest")
        d_keys = add_tokens(d_keys, at, in_row, key_part)
        d_values = add_tokens(d_values, at, in_row, value_part)
        return d_query, d_keys, d_values, d_slopes + part

    state = (d_query, sums.k, sums.v, d_slopes)
    d_query, d_keys, d_values, d_slopes = lax.fori_loop(low, high, step, state)
    heads = call.q.shape[1]
    d_query = d_query.reshape(call.num_kv_heads, call.group_size, width, -1) * call.scale
    d_query = jnp.moveaxis(d_query, 2, 0).reshape(width, heads, -1)
    d_query = add_tokens(sums.q, start + tile.first, tile.in_row, d_query)
    return Sums(d_query, d_keys, d_values, sums.slopes + d_slopes.reshape(heads))


def add_tokens(total: jax.Array, start: jax.Array, counted: jax.Array, part: jax.Array) -> jax.Array:
    """``total`` [T,...] with ``part`` [C,...] added from token ``start`` on, where ``counted`` [C].

    A tile may reach past its row, and a row that is not finite harms no other.
    """
    old = lax.dynamic_slice_in_dim(total, start, part.shape[0])
    part = jnp.where(counted[:, None, None], part, 0.0)
    return lax.dynamic_update_slice_in_dim(total, old + part, start, 0)
