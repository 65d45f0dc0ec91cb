"""Copying pages in the most obvious way: gather, then scatter."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import in_place
from pallas_kernels.page_copy.arguments import Call
from pallas_kernels.pages import bits_of, from_bits


def refuses(call: Call) -> str | None:
    """Why this implementation cannot do the call, or None."""
    del call
    return None


def copy(call: Call) -> tuple[jax.Array, ...]:
    """The pool after the copies."""
    onto = destinations_of(call, in_place.in_range(call.sources, call.num_pages))
    return tuple(_copy(x, call.sources, onto) for x in call.pool)


def take(call: Call) -> tuple[jax.Array, ...]:
    """What the sources hold."""
    return tuple(_take(x, call.sources) for x in call.pool)


def put(call: Call) -> tuple[jax.Array, ...]:
    """The pool with the content in it."""
    onto = destinations_of(call, True)
    return tuple(_put(x, content, onto) for x, content in zip(call.pool, call.content, strict=True))


def destinations_of(call: Call, wanted: jax.Array | bool) -> jax.Array:
    """Where pages go; those that are dropped to one past the end each, as negative ids would wrap."""
    inside = in_place.in_range(call.destinations, call.num_pages) & wanted
    return jnp.where(inside, call.destinations, call.num_pages + jnp.arange(call.count, dtype=jnp.int32))


def _plain_copy(pages, src, dst):
    return pages.at[:, dst].set(pages[:, src], mode="drop", unique_indices=True)


def _plain_take(pages, src):
    there = in_place.in_range(src, pages.shape[1])
    found = jnp.moveaxis(pages[:, jnp.where(there, src, 0)], 1, 0)
    return jnp.where(there.reshape(-1, *(1,) * (pages.ndim - 1)), found, 0)


def _plain_put(pages, content, dst):
    return pages.at[:, dst].set(jnp.moveaxis(content, 0, 1), mode="drop", unique_indices=True)


def _bitwise(plain, linear):
    def fast(pages, *rest):
        bits = (bits_of(x) for x in rest[: linear - 1])
        return from_bits(plain(bits_of(pages), *bits, *rest[linear - 1 :]), pages.dtype)

    return in_place.differentiated_as(plain, linear, fast)


_copy, _take, _put = _bitwise(_plain_copy, 1), _bitwise(_plain_take, 1), _bitwise(_plain_put, 2)
