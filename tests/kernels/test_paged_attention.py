"""Paged attention in plain XLA and spelled out, over the cases that every implementation shares."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.paged_attention.api import paged_attention
from tests.kernels.suite import AttentionSuite


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
