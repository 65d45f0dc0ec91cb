"""Blocks of keys and values: a few pages of a row side by side, read from the pool and decoded to float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import pages, platforms
from pallas_kernels.paged_attention.arguments import Call

LINE = 64  # bytes of a cache line
FRAME = 4096  # bytes of a page of virtual memory

Pool = tuple[jax.Array, jax.Array | None]
"""Keys and values as [N*K,B*D], head by head of each page. None where the values lie in the keys."""


def hold(call: Call, turn: jax.Array) -> Pool:
    """The call's pages, for one turn of a loop that reads them.

    XLA moves what does not change out of loops; of a read that converts, it moves the conversion, of the whole pool.
    Tied to the number of the turn, the pages change as far as it can see. Carrying them through the loop would do too,
    but then a loop that wrote them just before makes XLA copy them. It also copies what a loop sees in two shapes, or
    with an axis of length 1: hence one shape, and of two axes.
    """
    sides = [side for side in (call.k_pages, call.v_pages) if side is not None]
    runs = [side.reshape(side.shape[0] * side.shape[1], -1) for side in sides]
    if any(side.dtype != jnp.float32 for side in sides):
        *runs, _ = lax.optimization_barrier((*runs, turn))
    return runs[0], runs[1] if len(runs) > 1 else None


def page_ids(call: Call, row: jax.Array, block: jax.Array, count: int) -> jax.Array:
    """Pages of a row's ``block``-th group of ``count`` pages, int32 [count]; past the table any page."""
    columns = jnp.minimum(block * count + jnp.arange(count, dtype=jnp.int32), call.block_tables.shape[1] - 1)
    ids = call.block_tables.at[row, columns].get(mode="promise_in_bounds")
    return jnp.clip(ids, 0, call.k_pages.shape[0] - 1)


def head_runs(call: Call, ids: jax.Array) -> jax.Array:
    """Where every head of pages ``ids`` [g] lies in the pool, int32 [K,g]."""
    return ids * call.num_kv_heads + jnp.arange(call.num_kv_heads, dtype=jnp.int32)[:, None]


def warm(pool: Pool, places: jax.Array) -> jax.Array:
    """The same places of runs, int32 [K,g], once the runs are in the cache of a CPU; at once where it is none.

    Copying scattered pages waits for one line after the other; a reduction over one element of each line, which stores
    nothing, keeps many loads in flight, and one over one element of each frame looks up many addresses at a time.
    Added to the places, as a zero that no compiler can foresee, they precede the copies.
    """
    if platforms.current() != "cpu":
        return places
    in_order = places.T  # as they lie in memory
    for size in (FRAME, LINE):
        for runs in pool:
            if runs is not None:
                content = runs.at[in_order].get(mode="promise_in_bounds")[..., :: size // runs.dtype.itemsize]
                content = lax.bitcast_convert_type(content, f"uint{8 * runs.dtype.itemsize}")
                zero = jnp.zeros((), content.dtype)
                bits = lax.reduce(content, zero, lax.bitwise_or, tuple(range(content.ndim)))
                in_order += (bits.astype(jnp.int32) & 1) >> 1
    return in_order.T


def read(runs: jax.Array, places: jax.Array, slots: int, copy: bool = True) -> jax.Array:
    """The content of pages head by head, without its scale and as it is stored (int4 as int8), [K,g*B,D].

    Args:
        runs: one side of the pool, [N*K,B*D].
        places: of the runs in the pool, int32 [K,g].
        slots: B.
        copy: whether to copy the runs first, which a CPU does three times as fast as lane by lane; otherwise what reads
            the result gathers it from the pool.
    """
    content = runs.at[places].get(mode="promise_in_bounds")
    if copy:
        content = lax.optimization_barrier(content)
    content = content.reshape(places.shape[0], places.shape[1] * slots, -1)
    return pages.unpack_int4(content) if runs.dtype == jnp.uint8 else content


def read_scale(call: Call, scale: jax.Array, places: jax.Array) -> jax.Array:
    """The scale of runs ``places`` [K,g]: [K,g*B] if every token has one, else [1,1] or [K,1]."""
    if scale.shape != call.k_pages.shape[:3]:
        return scale[0]
    runs = scale.reshape(-1, scale.shape[2])
    return runs.at[places].get(mode="promise_in_bounds").reshape(scale.shape[1], -1)


def span(call: Call, first: jax.Array, end: jax.Array, length: int) -> tuple[jax.Array, jax.Array]:
    """The blocks of ``length`` slots that queries see.

    Args:
        first: the smallest position among the queries, int32.
        end: one past the last slot that any of them sees, int32.

    Returns:
        The first block and one past the last, int32.
    """
    low = jnp.zeros_like(end)
    if call.window is not None:
        low = jnp.where(call.window < 1, 0, jnp.maximum(first - call.window + 1, 0)) // length
    return low, (jnp.maximum(end, 0) + length - 1) // length
