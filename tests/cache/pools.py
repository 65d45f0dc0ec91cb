"""What tests of the cache share: pools of every format, rows to write into them, and their bits."""

from __future__ import annotations

import jax
import numpy as np

from pallas_kernels.pages import PageFormat
from paxkv.cache.layout import PageLayout
from paxkv.cache.pages import KVPages, init, write

LAYERS, KV_HEADS, HEAD_SIZE = 2, 2, 8

FORMATS = {
    "float32": ("float32", "none"),
    "bfloat16": ("bfloat16", "none"),
    "float16": ("float16", "none"),
    "e4m3": ("float8_e4m3fn", "none"),
    "e4m3 per token": ("float8_e4m3fn", "token"),
    "e5m2 per head": ("float8_e5m2", "head"),
    "int8 per tensor": ("int8", "tensor"),
    "int8 per token": ("int8", "token"),
    "int4 per head": ("int4", "head"),
    "int4 per token": ("int4", "token"),
}
"""Every dtype, and every kind of scale."""

KINDS = ("float32", "bfloat16", "e5m2 per head", "e4m3 per token", "int4 per token")
"""Those that differ in how their bytes move."""

OUTSIDE = (-1, -(2**31), 2**31 - 1)
"""Ids that no pool has; tests add those just past the end."""

jitted_write = jax.jit(write, donate_argnums=0)


def layout_of(name: str, *, num_pages: int = 6, page_size: int = 4, **changes) -> PageLayout:
    sizes = {"num_layers": LAYERS, "num_kv_heads": KV_HEADS, "head_size": HEAD_SIZE, **changes}
    return PageLayout(num_pages=num_pages, page_size=page_size, k_format=PageFormat(*FORMATS[name]), **sizes)


def static_scales(layout: PageLayout) -> dict[str, float]:
    """What ``init`` wants of a format with a static scale: one that holds normal numbers."""
    if layout.k_format.scale not in ("tensor", "head"):
        return {}
    scale = 4.0 / layout.k_format.max_value
    return {"k_scale": scale, "v_scale": scale}


def empty(name: str, **sizes) -> KVPages:
    layout = layout_of(name, **sizes)
    return init(layout, **static_scales(layout))


def full(name: str, seed: int = 0, **sizes) -> KVPages:
    """A pool whose every slot was written, in every layer with other numbers."""
    pages = empty(name, **sizes)
    for layer in range(pages.layout.num_layers):
        pages = jitted_write(
            pages, layer, *rows(pages.layout.num_slots, seed + layer), np.arange(pages.layout.num_slots)
        )
    return pages


def rows(count: int, seed: int = 0) -> np.ndarray:
    """[2, count, K, D] keys and values."""
    return np.random.default_rng(seed).normal(size=(2, count, KV_HEADS, HEAD_SIZE)).astype(np.float32)


def bits(tree) -> list[np.ndarray]:
    """The bytes of every leaf, along its last axis."""
    return [np.array(leaf).view(np.uint8) for leaf in jax.tree.leaves(tree)]


def assert_same_bits(got, want) -> None:
    got, want = bits(got), bits(want)
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one, other)


def assert_in_place(memory, layout: PageLayout) -> None:
    """All of the pool is aliased, and temporaries take less than a twentieth of it, by a program's memory analysis."""
    assert memory.alias_size_in_bytes >= layout.bytes
    assert memory.temp_size_in_bytes < 0.05 * layout.bytes, f"{memory.temp_size_in_bytes} beside {layout.bytes}"
