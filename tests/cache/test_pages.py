"""The pool of pages: what is written is read, what is out of range is dropped, what moves keeps its bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.pages import PageFormat
from paxkv.cache.layout import PageLayout
from paxkv.cache.pages import copy_pages, gather, init, swap_in, swap_out, write
from paxkv.cache.tiers import HostPool

FORMATS = {
    "float32": (PageFormat("float32"), None, 0.0),
    "bfloat16": (PageFormat("bfloat16"), None, 2.0**-8),
    "float16": (PageFormat("float16"), None, 2.0**-11),
    "e4m3 per tensor": (PageFormat("float8_e4m3fn", "tensor"), 0.02, 2.0**-4),
    "e5m2 per head": (PageFormat("float8_e5m2", "head"), 0.02, 2.0**-3),
    "int8 per token": (PageFormat("int8", "token"), None, 0.5 / 127),
    "int4 per token": (PageFormat("int4", "token"), None, 0.5 / 7),
}


def pool(name: str, pages: int = 6, page_size: int = 4, layers: int = 2, fill: float = 0.0):
    fmt, scale, _ = FORMATS[name]
    return init(PageLayout(layers, pages, page_size, 2, 8, k_format=fmt), k_scale=scale, v_scale=scale, fill=fill)


def rows(count: int, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    both = np.random.default_rng(seed).normal(size=(2, count, 2, 8)).astype(np.float32)
    return jnp.asarray(both[0]), jnp.asarray(both[1])


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_read(name):
    k, v = rows(7)
    slots = jnp.asarray([20, 21, 22, 23, 8, 9, 10])  # page 5, then page 2
    pages = jax.jit(write, donate_argnums=0)(pool(name), 1, k, v, slots)
    for want, got in zip((k, v), gather(pages, 1, jnp.asarray([5, 2])), strict=True):
        error = np.abs(np.asarray(got[:7]) - np.asarray(want))
        assert (error <= FORMATS[name][2] * np.abs(np.asarray(want)).max() + 1e-7).all(), error.max()
    assert not np.asarray(gather(pages, 0, jnp.asarray([5, 2]))[0]).any()


@pytest.mark.parametrize("name", FORMATS)
def test_slots_out_of_range_are_dropped(name):
    """B24: a pool of 4 pages of 2; slots -1, 3 and 8 are padding, real and past the end."""
    before = pool(name, pages=4, page_size=2)
    kept = jax.tree.map(np.asarray, before)
    after = write(before, 0, *rows(3), jnp.asarray([-1, 3, 8]))
    for old, new in ((kept.k, after.k), (kept.v, after.v)):
        changed = np.argwhere((np.asarray(new).view(np.uint8) != old.view(np.uint8)).any((0, 2, 4)))
        assert changed.tolist() == [[1, 1]]


@pytest.mark.parametrize("name", FORMATS)
def test_copies_read_all_sources_first_and_drop_padding(name):
    pages = write(pool(name), 1, *rows(24), jnp.arange(24))
    before = jax.tree.map(np.asarray, pages)
    after = copy_pages(pages, jnp.asarray([0, 1, -1, 9]), jnp.asarray([1, 0, 3, 4]))
    for old, new in ((before.k, after.k), (before.v, after.v)):
        want = old.copy()
        want[:, [1, 0]] = old[:, [0, 1]]
        np.testing.assert_array_equal(np.asarray(new).view(np.uint8), want.view(np.uint8))


@pytest.mark.parametrize("name", FORMATS)
def test_swapping_keeps_every_bit(name):
    pages = write(pool(name), 1, *rows(24), jnp.arange(24))
    before = jax.tree.map(np.asarray, pages)
    host = HostPool(pages.layout, 4)
    ids = jnp.asarray([4, 1, -1])
    host.put(np.asarray([2, 0, -1]), swap_out(pages, ids))
    empty = pool(name)
    after = swap_in(empty, ids, jax.device_put(host.get(np.asarray([2, 0, -1]))))
    for field in ("k", "v", "k_scale", "v_scale"):
        old, new = getattr(before, field), getattr(after, field)
        if old is not None and old.shape[1] == 6:
            np.testing.assert_array_equal(
                np.asarray(new)[:, [4, 1]].view(np.uint8), old[:, [4, 1]].view(np.uint8), strict=True
            )


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_those_of_the_arrays_and_every_leaf_is_its_own(name):
    pages = pool(name)
    leaves = jax.tree.leaves(pages)
    assert pages.layout.bytes == sum(leaf.nbytes for leaf in leaves)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


@pytest.mark.parametrize("scanned", [True, False])
@pytest.mark.parametrize("name", FORMATS)
def test_a_step_aliases_the_pool_and_copies_none_of_it(name, scanned):
    fmt, scale, _ = FORMATS[name]
    layout = PageLayout(4, 1024, 16, 4, 64, k_format=fmt)
    pages = jax.eval_shape(lambda: init(layout, k_scale=scale, v_scale=scale))

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

    side, ids = jax.ShapeDtypeStruct((8, 4, 64), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)
    memory = jax.jit(step, donate_argnums=0).lower(pages, side, side, ids, ids, ids).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= layout.bytes
    assert memory.temp_size_in_bytes < 0.05 * layout.bytes, f"{memory.temp_size_in_bytes} of {layout.bytes}"
