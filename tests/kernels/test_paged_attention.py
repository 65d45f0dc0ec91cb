"""Paged attention in plain XLA and spelled out, over the cases that every implementation shares."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write.api import kv_write
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.pages import PageFormat
from tests.kernels.cases import Case, build
from tests.kernels.suite import AttentionSuite, assert_same_bits


class TestXla(AttentionSuite):
    implementation = "xla"

    def test_a_pool_with_more_heads_than_int32_counts_is_refused(self):
        pages = jax.ShapeDtypeStruct((2**29, 4, 1, 8), jnp.bfloat16)
        q = jax.ShapeDtypeStruct((1, 4, 8), jnp.float32)
        ints = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 1), (1,), (2,))]
        with pytest.raises(ValueError, match="counts heads of pages in int32 and the pool has 2147483648"):
            jax.eval_shape(lambda *args: paged_attention(*args, implementation="xla"), q, pages, pages, *ints)


class TestReference(AttentionSuite):
    implementation = "reference"
    examples = 6

    # Not promised: XLA sees the whole batch's shape where it compiles the loop over tokens.
    test_nor_on_the_shapes_of_its_batch = None


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_arrays_of_numpy_do_too_without_a_jit(implementation):
    built = build(Case(((1, 9), (3, 7)), k_format=("int8", "token"), v_format=("bfloat16", "none")))

    def attend(convert):
        arguments, options = jax.tree.map(convert, (built.arguments, built.options))
        return paged_attention(*arguments, **options, implementation=implementation)

    assert_same_bits([attend(np.asarray)], [attend(jnp.asarray)])


def test_so_do_writes():
    fmt = PageFormat("int8", "token")
    pages, scale = np.zeros((2, 1, 4, 8), np.int8), np.ones((2, 1, 4), np.float32)
    new = np.ones((2, 1, 8), np.float32)
    given = (pages, pages, new, 2 * new, np.array([5, 0], np.int32))
    options = {"k_format": fmt, "v_format": fmt, "implementation": "xla"}
    got = kv_write(*given, **options, k_scale=scale, v_scale=scale)
    want = kv_write(*map(jnp.asarray, given), **options, k_scale=jnp.asarray(scale), v_scale=jnp.asarray(scale))
    assert_same_bits(jax.tree.leaves(got), jax.tree.leaves(want))
