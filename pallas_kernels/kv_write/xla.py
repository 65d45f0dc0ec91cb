"""Writing keys and values in plain XLA: the path of CPUs, and everybody's fallback.

``pallas_kernels.in_place`` says why a scatter is not always the way.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import in_place
from pallas_kernels.kv_write.arguments import Call
from pallas_kernels.kv_write.reference import quantised


def refuses(call: Call) -> str | None:
    """Why this implementation cannot do the call, or None."""
    del call
    return None


def write(call: Call) -> list[tuple[jax.Array, jax.Array | None]]:
    """Pages and scale of each side."""
    results = []
    for side in call.sides:
        rows, scale = quantised(side)
        stored = store(side.pages, rows, call.slots)
        results.append((stored, side.scale if scale is None else store(side.scale, scale, call.slots)))
    return results


def store(pages: jax.Array, rows: jax.Array, slots: jax.Array) -> jax.Array:
    """``rows[t]`` [K,...] at slot ``slots[t]`` of pages [N,K,B,...]; what is out of range is dropped."""
    # XLA turns a scatter of one row into slices, around which it copies the pool in a model: one row takes the loop.
    if in_place.scatters(pages) and slots.shape[0] > 1:
        return _scatter(pages, rows, slots)
    return _store(pages, rows, slots)


def _scatter(pages, rows, slots):
    num_pages, _, page_size = pages.shape[:3]
    valid = in_place.in_range(slots, num_pages * page_size)
    # Each dropped row gets an id of its own past the end: the scatter is told that all indices are distinct.
    page = jnp.where(valid, slots // page_size, num_pages + jnp.arange(slots.shape[0], dtype=jnp.int32))
    where = pages.at[page, :, slots % page_size]
    return where.set(rows, mode="drop", unique_indices=True, wrap_negative_indices=False)


def _loop(pages, rows, slots):
    num_pages, _, page_size = pages.shape[:3]
    count, pick = in_place.real(in_place.in_range(slots, num_pages * page_size))

    def body(i, pages):
        slot = slots[pick[i]]
        start = (slot // page_size, 0, slot % page_size, *(0,) * (pages.ndim - 3))
        return in_place.update(pages, in_place.movable(rows)[pick[i]][None, :, None], start)

    return lax.fori_loop(0, count, body, pages)


_store = in_place.differentiated_as(_scatter, 2, in_place.by_platform(_loop, _scatter))
