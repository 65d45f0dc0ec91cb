"""Copying pages in plain XLA: the path of CPUs, and everybody's fallback.

``pallas_kernels.in_place`` says why a scatter is not always the way.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import in_place
from pallas_kernels.page_copy.arguments import Call
from pallas_kernels.pages import from_bits


def refuses(call: Call) -> str | None:
    """Why this implementation cannot do the call, or None."""
    del call
    return None


def copy(call: Call) -> tuple[jax.Array, ...]:
    """The pool after the copies."""
    return tuple(_copy(x, call.sources, call.destinations) for x in call.pool)


def take(call: Call) -> tuple[jax.Array, ...]:
    """What the sources hold."""
    return tuple(_take(x, call.sources) for x in call.pool)


def put(call: Call) -> tuple[jax.Array, ...]:
    """The pool with the content in it."""

    def one(x, content):
        return (_scatter if in_place.scatters(x) else _put)(x, content, call.destinations)

    return tuple(map(one, call.pool, call.content))


def _scatter(pool, content, ids):
    where = pool.at[:, in_place.past_end(ids, pool.shape[1])]
    # All are distinct: only so can the scatter be transposed.
    return where.set(jnp.moveaxis(content, 0, 1), mode="drop", unique_indices=True, wrap_negative_indices=False)


def _loop(pool, content, ids):
    count, pick = in_place.real(in_place.in_range(ids, pool.shape[1]))

    def body(i, pool):
        page = in_place.movable(content)[pick[i]][:, None]
        return in_place.update(pool, page, (0, ids[pick[i]], *(0,) * (pool.ndim - 2)))

    return lax.fori_loop(0, count, body, pool)


def _bitwise_take(pool, ids):
    return from_bits(_plain_take(in_place.movable(pool), ids), pool.dtype)


def _plain_take(pool, ids):
    found = jnp.take(pool, in_place.past_end(ids, pool.shape[1]), axis=1, mode="fill", fill_value=0)
    return jnp.moveaxis(found, 1, 0)


def _layerwise_copy(pool, src, dst):
    """One layer after the other, so that what was read of the sources takes one layer's pages, not all layers'."""
    num_layers, num_pages = pool.shape[:2]
    paired = in_place.in_range(src, num_pages) & in_place.in_range(dst, num_pages)
    src = jnp.where(paired, src, 0)
    dst = jnp.where(paired, dst, num_pages + jnp.arange(dst.shape[0], dtype=jnp.int32))

    def body(pool, layer):
        where = pool.at[jnp.full_like(dst, layer), dst]
        return where.set(pool[layer, src], mode="drop", unique_indices=True, wrap_negative_indices=False), None

    return lax.scan(body, pool, jnp.arange(num_layers, dtype=jnp.int32))[0]


def _loop_copy(pool, src, dst):
    num_layers, num_pages = pool.shape[:2]
    count, pick = in_place.real(in_place.in_range(src, num_pages) & in_place.in_range(dst, num_pages))
    src, dst, tail = src[pick], dst[pick], (0,) * (pool.ndim - 2)

    def read(layer, i, carry):
        pool, stage = carry
        page = lax.dynamic_slice(in_place.movable(pool), (layer, src[i], *tail), (1, 1, *pool.shape[2:]))
        return lax.optimization_barrier(pool), lax.dynamic_update_slice(stage, page[0], (i, *tail))

    def write(layer, stage, i, pool):
        return in_place.update(pool, lax.dynamic_slice_in_dim(stage, i, 1)[None], (layer, dst[i], *tail))

    def one_layer(layer, carry):
        pool, stage = lax.fori_loop(0, count, functools.partial(read, layer), carry)
        return lax.fori_loop(0, count, functools.partial(write, layer, stage), pool), stage

    def all_layers(_, pool):
        # Made from the pool, not from zeros, so that it varies over the same axes inside shard_map.
        stage = jnp.broadcast_to(in_place.movable(pool[0, 0]), (src.shape[0], *pool.shape[2:]))
        return lax.fori_loop(0, num_layers, one_layer, (pool, stage))[0]

    # A loop of no or one turn: without pairs not even the stage is made. A cond might copy the pool.
    return lax.fori_loop(0, jnp.minimum(count, 1), all_layers, pool)


_put = in_place.differentiated_as(_scatter, 2, in_place.by_platform(_loop, _scatter))
_take = in_place.differentiated_as(_plain_take, 1, _bitwise_take)
_copy = in_place.differentiated_as(_layerwise_copy, 1, in_place.by_platform(_loop_copy, _layerwise_copy))
