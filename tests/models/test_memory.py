"""A step writes its pool in place, whatever its pages hold: aliased whole, and next to nothing beside it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.pages import PageFormat
from paxkv.cache.pages import init
from paxkv.cache.rows import Rows
from paxkv.models.decoder import Decoder, DecoderConfig
from paxkv.models.weights import unflatten, weight_specs
from paxkv.testing.tiny_model import tiny_config
from tests.cache.pools import assert_in_place
from tests.models.checkpoints import config_of

PAGES = 40_000

# Dtype of the model, and of the pages where it is another.
PAGES_OF = {
    "float32": ("float32", None),
    "bfloat16": ("bfloat16", None),
    "float16": ("float16", None),
    "float8_e4m3fn": ("bfloat16", PageFormat("float8_e4m3fn", "none")),
    "float8_e5m2": ("bfloat16", PageFormat("float8_e5m2", "token")),
    "int8": ("bfloat16", PageFormat("int8", "token")),
    "int4": ("bfloat16", PageFormat("int4", "token")),
}


def check_memory(config: DecoderConfig, tokens: int, rows: int, page_format: PageFormat | None) -> None:
    """Holds the memory analysis of a step, which is compiled and never run, against the pool's size."""

    def ints(*shape: int):
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    layout = config.cache_layout(PAGES, 16, page_format)
    pages = jax.eval_shape(lambda: init(layout))
    params = unflatten(weight_specs(config))
    step_rows = Rows(ints(rows, 8), ints(rows), ints(rows + 1), ints(tokens), 1 if tokens == rows else None)
    # The level changes machine code, not what is allocated, and halves the time.
    step = jax.jit(Decoder(config).apply, donate_argnums=3, compiler_options={"xla_backend_optimization_level": 0})
    lowered = step.lower({"params": params}, ints(tokens), ints(tokens), pages, step_rows, ints(rows))
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages)) == layout.bytes
    assert_in_place(lowered.compile().memory_analysis(), layout)


@pytest.mark.parametrize(
    ("scan_layers", "tokens", "rows"), [(True, 8, 8), (False, 32, 4)], ids=["stacked-decode", "unrolled-mixed"]
)
@pytest.mark.parametrize("dtype", PAGES_OF)
def test_a_step_does_not_copy_the_pool(scan_layers, tokens, rows, dtype):
    model, page_format = PAGES_OF[dtype]
    check_memory(tiny_config(scan_layers=scan_layers, dtype=model, num_layers=2), tokens, rows, page_format)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", ["deepseek_v3", "gemma2"])
def test_nor_do_latent_and_alternating_layers(name, dtype):
    model, page_format = PAGES_OF[dtype]
    check_memory(dataclasses.replace(config_of(name), dtype=model), 8, 4, page_format)
