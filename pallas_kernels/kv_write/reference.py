"""Writing keys and values, in the most obvious way: quantise, then scatter."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import in_place
from pallas_kernels.kv_write.arguments import Call, Side
from pallas_kernels.pages import bits_of, dynamic_scale, from_bits, quantise


def refuses(call: Call) -> str | None:
    """Why this implementation cannot do the call, or None."""
    del call
    return None


def quantised(side: Side) -> tuple[jax.Array, jax.Array | None]:
    """The rows as stored, [T,K,D] (D/2 for int4), and the scales that they get, [T,K]; None where those are static."""
    if side.fmt.scale == "token":
        scale = dynamic_scale(side.rows, side.fmt)
        return quantise(side.rows, side.fmt, scale), scale
    static = None if side.scale is None else side.scale[0, :, 0]
    return quantise(side.rows, side.fmt, static), None


def write(call: Call) -> list[tuple[jax.Array, jax.Array | None]]:
    """Pages and scale of each side."""
    inside = in_place.in_range(call.slots, call.num_pages * call.page_size)
    # Dropped tokens go to pages past the end: negative ones would wrap. Each has its own, as all indices are distinct.
    beyond = call.num_pages + jnp.arange(call.num_tokens, dtype=jnp.int32)
    page = jnp.where(inside, call.slots // call.page_size, beyond)
    offset = call.slots % call.page_size
    results = []
    for side in call.sides:
        rows, scale = quantised(side)
        pages = _put(side.pages, rows, page, offset)
        results.append((pages, side.scale if scale is None else _put(side.scale, scale, page, offset)))
    return results


def _plain_put(pages, rows, page, offset):
    return pages.at[page, :, offset].set(rows, mode="drop", unique_indices=True)


def _bitwise_put(pages, rows, page, offset):
    return from_bits(_plain_put(bits_of(pages), bits_of(rows), page, offset), pages.dtype)


_put = in_place.differentiated_as(_plain_put, 2, _bitwise_put)
