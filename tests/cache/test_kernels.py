"""Where a device has kernels, the cache writes, copies and swaps through them: the same bits, and in place."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.proof import targets
from pallas_kernels.proof.targets import abstract_mesh
from paxkv.cache.pages import copy_pages, init, swap_out, write
from tests.cache.pools import OUTSIDE, assert_in_place, bits, layout_of, static_scales
from tests.kernels.devices import tpu_interpreter

SIZES = {"num_pages": 4, "page_size": 32, "head_size": 128}
SLOTS = np.array([0, 33, *OUTSIDE, 127, 128, 64], np.int32)


def traced(name: str) -> str:
    """A write into a pool of this format as it is traced."""
    layout = layout_of(name, **SIZES)
    rows = np.zeros((len(SLOTS), layout.num_kv_heads, 128), np.float32)
    return str(jax.make_jaxpr(write)(init(layout, **static_scales(layout)), 0, rows, rows, SLOTS))


@pytest.mark.parametrize("name", ["bfloat16", "e5m2 per head", "int8 per token"])
def test_a_tpu_writes_the_same_bits(name):
    layout = layout_of(name, **SIZES)
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(3, 2, len(SLOTS), layout.num_kv_heads, 128)).astype(np.float32)

    def run():
        pages = init(layout, **static_scales(layout))
        for (k, v), layer in zip(rows, (0, 1, 2), strict=True):  # there is no layer 2
            pages = jax.jit(write)(pages, jnp.int32(layer), k, v, SLOTS)
        return bits(jax.jit(copy_pages)(pages, np.array([0, 1]), np.array([2, -1])))

    plain = run()
    with abstract_mesh("TPU v6 lite", "tpu"), tpu_interpreter():
        assert "name=kv_write" in traced(name)
        found = run()
    for got, want in zip(found, plain, strict=True):
        np.testing.assert_array_equal(got, want)
    assert "kv_write" not in traced(name)  # a CPU has no kernel


@pytest.mark.parametrize(("name", "page_size"), [("bfloat16", 32), ("int8 per token", 128)])
@pytest.mark.parametrize("target", ["v5e", "v6e", "7x", "sm_90a"])
def test_a_step_for_a_device_copies_none_of_the_pool(target, name, page_size):
    """Compiled for a device that need not be here: a scan over layers, each of which writes, after a copy of pages."""
    try:
        targets.versions(target)
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    # Not the scales of small pages: XLA turns those around for 7x, once a step, not to fill a quarter of its lanes.
    layout = layout_of(name, num_pages=1024, page_size=page_size, num_kv_heads=8, head_size=128)
    chip = targets.mesh(target)
    whole = jax.sharding.NamedSharding(chip, jax.sharding.PartitionSpec())

    def placed(tree):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), tree)

    def step(pages, k, slots, ids):
        pages = copy_pages(pages, ids, ids + 8)

        def layer(pages, index):
            return write(pages, index, k, k, slots), None

        pages = jax.lax.scan(layer, pages, jnp.arange(layout.num_layers))[0]
        return pages, swap_out(pages, ids).k.sum()

    pages = placed(jax.eval_shape(functools.partial(init, layout)))
    rows = jax.ShapeDtypeStruct((8, 8, 128), jnp.bfloat16, sharding=whole)
    ids = jax.ShapeDtypeStruct((8,), jnp.int32, sharding=whole)
    with jax.set_mesh(chip):
        lowered = jax.jit(step, donate_argnums=0).lower(pages, rows, ids, ids)
    assert "kv_write" in lowered.as_text()
    assert_in_place(lowered.compile().memory_analysis(), layout)
