"""Storing rows of tokens in pages, in plain XLA: of one array of pages, or of one layer of a pool of them.

``pallas_kernels.in_place`` says why a scatter is not always the way.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32, Shaped

from pallas_kernels import in_place


def store(
    pool: Shaped[Array, "... K B *D"],
    rows: Shaped[Array, "T K *D"],
    slots: Int32[Array, " T"],
    layer: Int32[Array, ""] | None = None,
) -> Shaped[Array, "... K B *D"]:
    """``rows[t]`` at slot ``slots[t]`` of pages; what is out of range is dropped.

    Args:
        pool: pages [N,K,B,...], or [L,N,K,B,...] with a layer.
        rows: as they are stored.
        slots: n * B + offset; those in range are distinct.
        layer: which of L; out of range, nothing is stored.
    """
    if not slots.shape[0]:
        return pool
    layers = () if layer is None else (layer,)
    # XLA turns a scatter of one row into slices, around which it copies the pool in a model: one row takes the loop.
    put = _scatter if in_place.scatters(pool) and slots.shape[0] > 1 else _store
    return put(pool, rows, slots, *layers)


def _scatter(pool, rows, slots, *layers):
    num_pages, _, page_size = pool.shape[len(layers) :][:3]
    # Each dropped row gets an id of its own past the end: the scatter is told that all indices are distinct.
    beyond = num_pages + jnp.arange(slots.shape[0], dtype=jnp.int32)
    page = jnp.where(_valid(pool, slots, layers), slots // page_size, beyond)
    where = pool.at[(*(jnp.full_like(page, layer) for layer in layers), page, slice(None), slots % page_size)]
    return where.set(rows, mode="drop", unique_indices=True, wrap_negative_indices=False)


def _loop(pool, rows, slots, *layers):
    depth = len(layers)
    page_size = pool.shape[depth + 2]
    count, pick = in_place.real(_valid(pool, slots, layers))

    def body(i, pool):
        slot = slots[pick[i]]
        start = (*layers, slot // page_size, 0, slot % page_size, *(0,) * (pool.ndim - depth - 3))
        row = jnp.expand_dims(in_place.movable(rows)[pick[i]], (*range(depth + 1), depth + 2))
        return in_place.update(pool, row, start)

    return lax.fori_loop(0, count, body, pool)


def _valid(pool, slots, layers) -> Bool[Array, " T"]:
    num_pages, _, page_size = pool.shape[len(layers) :][:3]
    valid = in_place.in_range(slots, num_pages * page_size)
    for layer in layers:
        valid &= in_place.in_range(layer, pool.shape[0])
    return valid


_store = in_place.differentiated_as(_scatter, 2, in_place.by_platform(_loop, _scatter))
