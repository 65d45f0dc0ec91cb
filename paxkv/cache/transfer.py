"""How token rows and whole pages move in one array of the pool, [L,N,K,B,...]: data or per-token scales.

Every function drops or blanks what is out of range; none clamps, none wraps. Every one works in place on a donated
array. What XLA does on CPUs shapes this file (measured on jax 0.10 and 0.12; tests/cache/test_memory.py holds it):

- It scatters in place at a tenth of a microsecond per row, except for the small floats (float8, and bfloat16 before
  0.12): there it converts the whole operand to float32 and back, two copies of the pool. Bitcasts around the scatter
  copy the pool too. A ``dynamic_update_slice`` between two bitcasts is fused and stays in place, so small floats take a
  loop of those.
- A scatter pays for its padding. Copies are mostly padding, so they take a loop that ends at the last real pair.
- A conversion or bitcast of the pool inside a loop that does not change the pool is hoisted out, and copies it. Such a
  loop carries the pool and returns it behind an ``optimization_barrier``.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, Shaped

from pallas_kernels.pages import bits_of, from_bits

_BF16_SCATTERS_IN_PLACE = jax.__version_info__ >= (0, 12)


def store_rows(
    pool: Shaped[Array, "L N K B *D"], layer: Int32[Array, ""], rows: Shaped[Array, "T K *D"], slots: Int32[Array, " T"]
) -> Shaped[Array, "L N K B *D"]:
    """``rows[t]`` stored at slot ``slots[t]`` of ``layer``; what is out of range is dropped."""
    if not slots.shape[0]:
        return pool
    # XLA turns a scatter of one row into slices, around which it copies the pool in a model: one row takes the loop.
    if _scatters_in_place(pool) and slots.shape[0] > 1:
        return _scatter_rows(pool, rows, layer, slots)
    return _store(pool, rows, layer, slots)


def take_pages(pool: Shaped[Array, "L N K B *D"], ids: Int32[Array, " C"]) -> Shaped[Array, "C L K B *D"]:
    """The pages ``ids`` of all layers, bit for bit; zeros where out of range."""
    return _take(pool, ids) if _is_float(pool) else _take_pages(pool, ids)


def put_pages(
    pool: Shaped[Array, "L N K B *D"], ids: Int32[Array, " C"], content: Shaped[Array, "C L K B *D"]
) -> Shaped[Array, "L N K B *D"]:
    """The pages ``ids`` of all layers replaced by ``content``; what is out of range is dropped."""
    if not ids.shape[0]:
        return pool
    if _scatters_in_place(pool):
        return _scatter_pages(pool, content, ids)
    return _put(pool, content, ids)


def copy_within(
    pool: Shaped[Array, "L N K B *D"], src: Int32[Array, " C"], dst: Int32[Array, " C"]
) -> Shaped[Array, "L N K B *D"]:
    """Page ``src[i]`` copied onto page ``dst[i]``, all read before any is written; pairs out of range are dropped."""
    if not src.shape[0]:
        return pool
    return _copy(pool, src, dst) if _is_float(pool) else _copy_pages(pool, src, dst)


# --- rows ---------------------------------------------------------------------------------------------------------


def _scatter_rows(pool, rows, layer, slots):
    num_pages, page_size = pool.shape[1], pool.shape[3]
    valid = _valid_rows(pool, layer, slots)
    # Each dropped row gets an id of its own past the end: the scatter is told that all indices are distinct.
    page = jnp.where(valid, slots // page_size, num_pages + jnp.arange(slots.shape[0], dtype=jnp.int32))
    where = pool.at[jnp.full_like(page, layer), page, :, slots % page_size]
    return where.set(rows, mode="drop", unique_indices=True, wrap_negative_indices=False)


def _loop_rows(pool, rows, layer, slots):
    page_size = pool.shape[3]
    count, pick = _real(_valid_rows(pool, layer, slots))

    def body(i, pool):
        slot = slots[pick[i]]
        start = (layer, slot // page_size, 0, slot % page_size, *(0,) * (pool.ndim - 4))
        return _update(pool, _movable(rows)[pick[i]][None, None, :, None], start)

    return lax.fori_loop(0, count, body, pool)


def _valid_rows(pool, layer, slots) -> Bool[Array, " T"]:
    num_layers, num_pages, _, page_size = pool.shape[:4]
    return _in_range(slots, num_pages * page_size) & _in_range(layer, num_layers)


# --- pages --------------------------------------------------------------------------------------------------------


def _scatter_pages(pool, content, ids):
    where = pool.at[:, _past_end(ids, pool.shape[1])]
    return where.set(jnp.moveaxis(content, 0, 1), mode="drop", wrap_negative_indices=False)


def _loop_pages(pool, content, ids):
    count, pick = _real(_in_range(ids, pool.shape[1]))

    def body(i, pool):
        page = _movable(content)[pick[i]][:, None]
        return _update(pool, page, (0, ids[pick[i]], *(0,) * (pool.ndim - 2)))

    return lax.fori_loop(0, count, body, pool)


def _take_pages(pool, ids):
    return from_bits(_plain_take(_movable(pool), ids), pool.dtype)


def _plain_take(pool, ids):
    found = jnp.take(pool, _past_end(ids, pool.shape[1]), axis=1, mode="fill", fill_value=0)
    return jnp.moveaxis(found, 1, 0)


def _layerwise_copy(pool, src, dst):
    """One layer after the other, so that what was read of the sources takes one layer's pages, not all layers'."""
    num_layers, num_pages = pool.shape[:2]
    paired = _in_range(src, num_pages) & _in_range(dst, num_pages)
    src = jnp.where(paired, src, 0)
    dst = jnp.where(paired, dst, num_pages + jnp.arange(dst.shape[0], dtype=jnp.int32))

    def body(pool, layer):
        where = pool.at[jnp.full_like(dst, layer), dst]
        return where.set(pool[layer, src], mode="drop", unique_indices=True, wrap_negative_indices=False), None

    return lax.scan(body, pool, jnp.arange(num_layers, dtype=jnp.int32))[0]


def _loop_copy(pool, src, dst):
    num_layers, num_pages = pool.shape[:2]
    count, pick = _real(_in_range(src, num_pages) & _in_range(dst, num_pages))
    src, dst, tail = src[pick], dst[pick], (0,) * (pool.ndim - 2)

    def read(layer, i, carry):
        pool, stage = carry
        page = lax.dynamic_slice(_movable(pool), (layer, src[i], *tail), (1, 1, *pool.shape[2:]))
        return lax.optimization_barrier(pool), lax.dynamic_update_slice(stage, page[0], (i, *tail))

    def write(layer, stage, i, pool):
        return _update(pool, lax.dynamic_slice_in_dim(stage, i, 1)[None], (layer, dst[i], *tail))

    def one_layer(layer, carry):
        pool, stage = lax.fori_loop(0, count, functools.partial(read, layer), carry)
        return lax.fori_loop(0, count, functools.partial(write, layer, stage), pool), stage

    def all_layers(_, pool):
        # Made from the pool, not from zeros, so that it varies over the same axes inside shard_map.
        stage = jnp.broadcast_to(_movable(pool[0, 0]), (src.shape[0], *pool.shape[2:]))
        return lax.fori_loop(0, num_layers, one_layer, (pool, stage))[0]

    # A loop of no or one turn: without pairs not even the stage is made. A cond might copy the pool.
    return lax.fori_loop(0, jnp.minimum(count, 1), all_layers, pool)


# --- derivatives --------------------------------------------------------------------------------------------------


def _differentiated_as(plain, linear: int, fast):
    """``fast``, with the derivative of ``plain``, which computes the same and is linear in its first arguments.

    Bits have no derivative, and a loop whose length is known only when it runs has no transpose.
    """
    function = jax.custom_jvp(lambda *args: fast(*args))

    @function.defjvp
    def _(primals, tangents):
        return function(*primals), plain(*tangents[:linear], *primals[linear:])

    return function


def _by_platform(cpu, default):
    return lambda *args: lax.platform_dependent(*args, cpu=cpu, default=default)


_store = _differentiated_as(_scatter_rows, 2, _by_platform(_loop_rows, _scatter_rows))
_put = _differentiated_as(_scatter_pages, 2, _by_platform(_loop_pages, _scatter_pages))
_take = _differentiated_as(_plain_take, 1, _take_pages)
_copy_pages = _by_platform(_loop_copy, _layerwise_copy)
_copy = _differentiated_as(_layerwise_copy, 1, _copy_pages)


# --- small floats -------------------------------------------------------------------------------------------------


def _is_float(pool: Array) -> bool:
    return jnp.issubdtype(pool.dtype, jnp.floating)


def _scatters_in_place(pool: Array) -> bool:
    if pool.dtype == jnp.bfloat16:
        return _BF16_SCATTERS_IN_PLACE
    return not _is_float(pool) or pool.dtype in (jnp.float32, jnp.float16)


def _movable(x: Array) -> Array:
    """``x``, or its bits where XLA would compute on it in float32."""
    return x if _scatters_in_place(x) else bits_of(x)


def _update(pool: Array, bits: Array, start) -> Array:
    return from_bits(lax.dynamic_update_slice(_movable(pool), bits, start), pool.dtype)


# --- what is real -------------------------------------------------------------------------------------------------


def _real(valid: Bool[Array, " C"]) -> tuple[Int32[Array, ""], Int32[Array, " C"]]:
    """How many turns a loop takes to reach the last valid entry, and which entry each turn handles.

    A turn that meets an invalid entry handles the last valid one, which does no harm twice.
    """
    index = jnp.arange(valid.shape[0], dtype=jnp.int32)
    last = jnp.max(jnp.where(valid, index, -1), initial=-1)
    return last + 1, jnp.where(valid, index, jnp.maximum(last, 0))


def _in_range(ids: Int32[Array, "*C"], size: int) -> Bool[Array, "*C"]:
    return (ids >= 0) & (ids < size)


def _past_end(ids: Int32[Array, " C"], size: int) -> Int32[Array, " C"]:
    """Ids with every one that is out of range moved past the end, where nothing wraps."""
    return jnp.where(_in_range(ids, size), ids, size)
