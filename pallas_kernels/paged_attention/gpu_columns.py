"""The queries of a step as GPU kernels take them: tiles of columns that share a row's keys.

A column is one query head of one query. A row with n queries has n * G columns per KV head, query by query. A tile
holds a fixed number of neighbouring columns of one row; a row's last tile is filled up with columns that see nothing.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.arguments import Call
from pallas_kernels.paged_attention.places import Places

LOG2_E = math.log2(math.e)
NEVER = 2**30  # a window that holds every key

ROW, LOW, HIGH = range(3)


@dataclasses.dataclass(frozen=True)
class Launch:
    """Which rows a launch attends, and in what tiles.

    Attributes:
        low, high: a row is attended if low <= its queries < high.
        width: columns of a tile.
        count: tiles that there can be.
        split: slots of a stretch, what one program reads of a row.
        parts: stretches that the tables can hold.
    """

    low: int
    high: int
    width: int
    count: int
    split: int
    parts: int


def launches(call: Call, narrow: int, wide: int, block: int, split: int) -> tuple[Launch, ...]:
    """One launch for rows with few queries, whose keys several programs share, and one for rows with more.

    Args:
        narrow, wide: columns of their tiles. A row has few queries if they fit in one narrow tile, or if it has one.
        block: slots of a block.
        split: slots of a stretch of a row with few queries. It is the same in every batch, so that a row's bits are.

    Returns:
        The two, or the first alone where no row can have more queries.
    """
    rows, pages = call.block_tables.shape
    tokens, group, capacity = call.q.shape[0], call.group_size, pages * call.page_size
    few = max(1, narrow // group)
    count = min(rows, tokens) * -(-few * group // narrow)
    first = Launch(1, few + 1, narrow, count, split, -(-capacity // split))
    if min(call.max_query_len or tokens, tokens) <= few:
        return (first,)
    count = tokens * group // wide + min(rows, tokens // (few + 1))
    return first, Launch(few + 1, tokens + 1, wide, count, -(-capacity // block) * block, 1)


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The tiles of a launch, W of M columns, and where each token's columns are in them.

    Attributes:
        fields: int32 [W,3]: the row, and the slots LOW <= slot < HIGH that any column sees (none in a spare tile).
        query: [W,K,M,D] in the dtype that the matrix units take.
        factor: what the product of a column with a stored key is multiplied by, to the base 2 (under a soft cap twice
            that, over the cap), float32 [W,K,M].
        slope: ALiBi slopes to the base 2, float32 [W,K,M], or None.
        begin, stop: slots that a column sees: begin <= slot < stop, int32 [W,M].
        position: position of a column's query, int32 [W,M].
        tile, place: tile of each token's columns and place in it, int32 [T,G].
        chosen: whether a token belongs to a row of the launch, bool [T].
    """

    fields: jax.Array
    query: jax.Array
    factor: jax.Array
    slope: jax.Array | None
    begin: jax.Array
    stop: jax.Array
    position: jax.Array
    tile: jax.Array
    place: jax.Array
    chosen: jax.Array


def cut(call: Call, places: Places, launch: Launch, dtype: jnp.dtype) -> Tiles:
    """Cuts the columns of a launch's rows into tiles, with queries in ``dtype``."""
    width, count = launch.width, launch.count
    chosen = (places.query_lens >= launch.low) & (places.query_lens < launch.high)
    tokens, heads, size = call.q.shape
    kv_heads, group = call.num_kv_heads, call.group_size
    lengths = jnp.where(chosen, places.query_lens * group, 0)
    counts = (lengths + width - 1) // width
    ends = jnp.cumsum(counts, dtype=jnp.int32)
    index = jnp.arange(count, dtype=jnp.int32)
    row = jnp.minimum(jnp.sum(ends <= index[:, None], axis=1, dtype=jnp.int32), counts.shape[0] - 1)
    first = (index - (ends[row] - counts[row])) * width
    column = first[:, None] + jnp.arange(width, dtype=jnp.int32)  # [W,M]
    used = (column < lengths[row][:, None]) & (index < ends[-1])[:, None]
    token = jnp.clip(call.query_starts[row][:, None] + column // group, 0, tokens - 1)
    position = places.position[token]
    begin, stop = bounds(call, position, call.kv_lens[row][:, None])
    stop = jnp.where(used, stop, 0)
    low = jnp.min(jnp.where(used, begin, NEVER), axis=1)
    fields = jnp.stack([row, low, jnp.max(stop, axis=1)], axis=1)
    query = call.q.reshape(tokens, kv_heads, group, size)[token, :, column % group]  # [W,M,K,D]
    query = jnp.where(used[..., None, None], query, jnp.zeros_like(query)).swapaxes(1, 2)
    query, factor = scaled(call, query, dtype)
    slope = None
    if call.alibi_slopes is not None:
        slope = LOG2_E * call.alibi_slopes.reshape(kv_heads, group)[:, column % group].swapaxes(0, 1)
    offset = jnp.arange(tokens, dtype=jnp.int32) - call.query_starts[places.row]
    own = offset[:, None] * group + jnp.arange(group, dtype=jnp.int32)  # [T,G]
    tile = jnp.clip((ends - counts)[places.row][:, None] + own // width, 0, count - 1)
    is_chosen = chosen[places.row] & places.real
    return Tiles(fields, query, factor, slope, begin, stop, position, tile, own % width, is_chosen)


def bounds(call: Call, position: jax.Array, kv_len: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The slots that queries at ``position`` see: begin <= slot < stop."""
    # A length beyond the table ends with it.
    kv_len = jnp.minimum(kv_len, call.block_tables.shape[1] * call.page_size)
    stop = jnp.minimum(position + 1, kv_len) if call.causal else jnp.broadcast_to(kv_len, position.shape)
    if call.window is None:
        return jnp.zeros_like(position), stop
    window = jnp.where(call.window < 1, NEVER, jnp.minimum(call.window, NEVER))
    return jnp.maximum(position + 1 - window, 0), stop


def scaled(call: Call, query: jax.Array, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Queries [W,K,M,D] in ``dtype``, and the factor [W,K,M] of their logits to the base 2.

    float16 has fewer exponents than bfloat16, so float16 queries are brought near 1 by a power of two per column.
    """
    factor = jnp.full(query.shape[:3], call.scale, jnp.float32)
    if dtype == jnp.float16 and query.dtype != jnp.float16:
        wide = query.astype(jnp.float32)
        largest = jnp.max(jnp.abs(wide), axis=3)
        _, exponent = jnp.frexp(jnp.where(jnp.isfinite(largest), largest, 1.0))
        query = jnp.ldexp(wide, -exponent[..., None])
        factor = jnp.ldexp(factor, exponent)
    if call.k_scale is not None and not per_token(call.k_scale, call.k_pages):
        factor *= call.k_scale.reshape(-1, 1)
    # Under a soft cap c, logits become c - 2 c / (1 + exp(2 logit / c)).
    factor *= LOG2_E if call.soft_cap is None else 2 * LOG2_E / call.soft_cap
    return query.astype(dtype), factor


def collect(call: Call, tiles: Tiles, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Brings tiles back into the order of the tokens.

    Args:
        out: [W,K,M,Dv].
        lse: natural log-sum-exp, [W,K,M].

    Returns:
        [T,H,Dv] and [T,H]; whatever for tokens of other rows.
    """
    tokens, heads = call.q.shape[:2]
    out = jnp.swapaxes(out, 1, 2)[tiles.tile, tiles.place]  # [T,G,K,Dv]
    lse = jnp.swapaxes(lse, 1, 2)[tiles.tile, tiles.place]
    return jnp.swapaxes(out, 1, 2).reshape(tokens, heads, -1), jnp.swapaxes(lse, 1, 2).reshape(tokens, heads)


def per_token(scale: jax.Array | None, stored: jax.Array) -> bool:
    """Whether a scale differs by token, so that a kernel has to read it beside the pages."""
    return scale is not None and scale.shape == stored.shape[:3] and scale.shape[0] * scale.shape[2] > 1


def finish(call: Call, places: Places, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What needs no keys: V's scale where it does not differ by token, attention sinks, and zeros for padding.

    Args:
        out: [T,H,Dv] float32.
        lse: [T,H].
    """
    if call.v_scale is not None and not per_token(call.v_scale, call.v_pages):
        scale = jnp.broadcast_to(call.v_scale.reshape(-1), (call.num_kv_heads,))
        out *= jnp.repeat(scale, call.group_size)[:, None]
    if call.sinks is not None:
        joint = jnp.logaddexp(lse, call.sinks)
        out *= jnp.where(jnp.isneginf(lse), 0.0, jnp.exp(lse - joint))[..., None]
        lse = joint
    real = places.real[:, None]
    return jnp.where(real[..., None], out, 0.0), jnp.where(real, lse, -jnp.inf)
