"""Blocks of keys and values: a few pages of a row side by side, read from the pool and decoded to float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import pages
from pallas_kernels.paged_attention.arguments import Call

LINE = 64  # bytes of a cache line


def page_ids(call: Call, row: jax.Array, block: jax.Array, count: int) -> jax.Array:
    """The pages of a row's ``block``-th group of ``count`` pages.

    Args:
        row, block: int32 [...].

    Returns:
        int32 [...,count]; past the end of the table some page or other.
    """
    columns = block[..., None] * count + jnp.arange(count, dtype=jnp.int32)
    columns = jnp.minimum(columns, call.block_tables.shape[1] - 1)
    ids = call.block_tables.at[row[..., None], columns].get(mode="promise_in_bounds")
    return jnp.clip(ids, 0, call.k_pages.shape[0] - 1)


def touch(stored: jax.Array, ids: jax.Array) -> jax.Array:
    """Loads one element of every cache line of pages ``ids``; 0, int32, but not so that the compiler could know it.

    A copy of scattered pages waits for one line after the other; a reduction that stores nothing keeps many loads in
    flight, and the copy that follows then finds the lines in the cache. Add the result to the ids that it reads.
    """
    step = max(1, LINE // stored.dtype.itemsize)
    content = stored.at[ids].get(mode="promise_in_bounds")[..., ::step]
    content = lax.bitcast_convert_type(content, f"uint{8 * stored.dtype.itemsize}")
    zero = jnp.zeros((), content.dtype)
    return (lax.reduce(content, zero, lax.bitwise_or, range(content.ndim)).astype(jnp.int32) & 1) >> 1


def read(stored: jax.Array, ids: jax.Array) -> jax.Array:
    """The content of pages ``ids``, without its scale, float32 [...,K,B,D]."""
    content = pages.bits_of(stored).at[ids, jnp.arange(stored.shape[1])[:, None]].get(mode="promise_in_bounds")
    content = pages.unpack_int4(content) if stored.dtype == jnp.uint8 else pages.from_bits(content, stored.dtype)
    return content.astype(jnp.float32)


def read_scale(scale: jax.Array, stored: jax.Array, ids: jax.Array) -> jax.Array:
    """The scale of pages ``ids``, broadcastable to [...,K,B]."""
    if scale.shape == stored.shape[:3]:
        return scale.at[ids, jnp.arange(scale.shape[1])[:, None]].get(mode="promise_in_bounds")
    return scale[0]


def read_values(call: Call, ids: jax.Array, keys: jax.Array) -> jax.Array:
    """The values of pages ``ids``, without their scale: the V side, or the leading lanes of the keys already read."""
    return keys[..., : call.v_width] if call.v_pages is None else read(call.v_pages, ids)


def span(call: Call, first: jax.Array, end: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """The blocks of ``length`` slots that queries see.

    Args:
        first: the smallest position among the queries, int32 [...].
        end: one past the last slot that any of them sees, int32 [...].

    Returns:
        The first block and one past the last, int32 [...].
    """
    low = jnp.zeros_like(end)
    if call.window is not None:
        low = jnp.where(call.window < 1, 0, jnp.maximum(first - call.window + 1, 0)) // length
    return low, (jnp.maximum(end, 0) + length - 1) // length
