"""The pool is written where it lies: aliased whole, and next to nothing beside it, for every format."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from paxkv.cache.layout import PageLayout
from paxkv.cache.pages import KVPages, copy_pages, gather, init, swap_in, swap_out, write
from tests.cache.pools import FORMATS, KINDS, assert_in_place, layout_of, static_scales

LARGE = {"num_pages": 1024, "page_size": 16, "num_layers": 2, "num_kv_heads": 4, "head_size": 64}
IDS = jax.ShapeDtypeStruct((8,), jnp.int32)
ROWS = jax.ShapeDtypeStruct((8, 4, 64), jnp.float32)


def shapes(layout: PageLayout) -> KVPages:
    return jax.eval_shape(functools.partial(init, layout, **static_scales(layout)))


def memory_of(function, *arguments, donate=()):
    return jax.jit(function, donate_argnums=donate).lower(*arguments).compile().memory_analysis()


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_a_step_copies_none_of_the_pool(name, scanned):
    """Copy-on-write, then every layer writes its rows and reads pages, in a scan or one after the other."""
    layout = layout_of(name, **LARGE)

    def layer(carry, index, v, slots):
        # As in a decoder, a layer's reads feed what the next layer writes, so no read can be left until after it.
        pages, k = carry
        pages = write(pages, index, k, v, slots)
        return pages, k + gather(pages, index, slots[:2])[0].sum()

    def step(pages, k, v, slots, src, dst):
        carry = (copy_pages(pages, src, dst), k)
        if scanned:
            every = jnp.arange(layout.num_layers)
            return jax.lax.scan(lambda carry, index: (layer(carry, index, v, slots), None), carry, every)[0]
        for index in range(layout.num_layers):
            carry = layer(carry, index, v, slots)
        return carry

    assert_in_place(memory_of(step, shapes(layout), ROWS, ROWS, IDS, IDS, IDS, donate=0), layout)


@pytest.mark.parametrize("name", KINDS)
def test_swapping_copies_none_of_the_pool(name):
    """Out: no more than what is taken. In: where the pages lie."""
    layout = layout_of(name, **LARGE)
    pages = shapes(layout)
    content = jax.eval_shape(swap_out, pages, IDS)
    assert memory_of(swap_out, pages, IDS).temp_size_in_bytes < 0.05 * layout.bytes
    assert_in_place(memory_of(swap_in, pages, IDS, content, donate=0), layout)


def test_a_copied_pool_would_be_seen():
    """The tests above can fail: a scan that has the pool in its inputs and outputs copies it."""
    layout = layout_of("float32", **LARGE)

    def step(pages, k, slots):
        def layer(carry, inputs):
            index, k_pages = inputs
            return carry, k_pages.at[0, 0, 0].add(index)

        return jax.lax.scan(layer, 0, (jnp.arange(layout.num_layers), pages.k))[1]

    assert memory_of(step, shapes(layout), ROWS, IDS, donate=0).temp_size_in_bytes > 0.05 * layout.bytes
