"""What every implementation of page_copy must do, as one class that each of them subclasses."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_kernels.page_copy.api import copy_pages, put_pages, take_pages

OUTSIDE = (-1, -(2**31), 2**31 - 1)
DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8", "uint8")


@dataclasses.dataclass(frozen=True)
class Shapes:
    """A pool of two data arrays, and scales per token for the 8-bit ones.

    Attributes:
        layers, pages, kv_heads, page_size, size: L, N, K, B, D.
        dtypes: of keys and values; one alone for a latent.
    """

    layers: int = 3
    pages: int = 6
    kv_heads: int = 2
    page_size: int = 16
    size: int = 64
    dtypes: tuple[str, ...] = ("bfloat16", "float8_e4m3fn")


def build(shapes: Shapes, seed: int = 0) -> list[np.ndarray]:
    """Random bytes: no bit may change on the way."""
    rng = np.random.default_rng(seed)
    pool = []
    for dtype in map(jnp.dtype, shapes.dtypes):
        shape = shapes.layers, shapes.pages, shapes.kv_heads, shapes.page_size
        raw = rng.integers(0, 256, (*shape, shapes.size * dtype.itemsize), np.uint8)
        pool.append(raw.view(dtype))
        if dtype.itemsize == 1:
            pool.append(rng.normal(size=shape).astype(np.float32))
    return pool


def assert_same_bits(got, want) -> None:
    for one, other in zip(got, want, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(*(np.ascontiguousarray(x).view(np.uint8) for x in (one, other)))


@functools.cache
def compiled(function: Callable, implementation: str | None) -> jax.stages.Wrapped:
    return jax.jit(functools.partial(function, implementation=implementation))


class PageCopySuite:
    """Every test of the op. A subclass named ``Test...`` sets ``implementation`` and overrides only what it must."""

    implementation: str | None = None
    examples = 20

    def fit(self, shapes: Shapes) -> Shapes:
        """The shapes that this implementation does natively."""
        return shapes

    def run(self, function: Callable, *arguments) -> list[np.ndarray]:
        """The results of one of the three functions. An interpreter wraps this."""
        return [np.asarray(x) for x in compiled(function, self.implementation)(*arguments)]

    def check_copies(self, pool: list[np.ndarray], pairs: list[tuple[int, int]]) -> None:
        want = [x.copy() for x in pool]
        count = pool[0].shape[1]
        for source, destination in pairs:
            if 0 <= source < count and 0 <= destination < count:
                for new, old in zip(want, pool, strict=True):
                    new[:, destination] = old[:, source]
        sources, destinations = np.asarray(pairs, np.int32).reshape(-1, 2).T
        assert_same_bits(self.run(copy_pages, pool, sources, destinations), want)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_any_bits_move_unchanged(self, dtype):
        shapes = self.fit(Shapes(dtypes=(dtype,)))
        pool = build(shapes)
        self.check_copies(pool, [(3, 0), (0, 3), (-1, 2), (4, 5)])
        ids = np.asarray([2, shapes.pages, *OUTSIDE, 5, 0], np.int32)
        content = self.run(take_pages, pool, ids)
        want = []
        for x in pool:
            taken = np.zeros((len(ids), x.shape[0], *x.shape[2:]), x.dtype)
            taken[[0, 5, 6]] = np.moveaxis(x[:, [2, 5, 0]], 1, 0)
            want.append(taken)
        assert_same_bits(content, want)
        where = np.asarray([1, *OUTSIDE, shapes.pages, 0, 4], np.int32)
        put = [x.copy() for x in pool]
        for new, rows in zip(put, content, strict=True):
            new[:, [1, 0, 4]] = np.moveaxis(rows[[0, 5, 6]], 0, 1)
        assert_same_bits(self.run(put_pages, pool, where, content), put)

    @pytest.mark.parametrize(
        "pairs",
        [
            [(0, 1), (1, 2), (-1, 5), (2, 0), (3, 4), (3, 5)],  # a ring, padding, one source for two
            [(5, 5), (0, 0), (-1, -1), (2, 1), (-1, -1), (-1, -1)],  # onto itself
            [(0, 1), (2, 3), (4, 5), (-1, -1), (-1, -1), (-1, -1)],  # apart
            [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (-1, 0)],  # a chain
            [(-1, 2), (3, -1), (6, 0), (0, 6), (2**31 - 1, 1), (4, -(2**31))],  # nowhere
        ],
        ids=["ring", "itself", "apart", "chain", "nowhere"],
    )
    def test_all_sources_are_read_first(self, pairs):
        shapes = self.fit(Shapes())
        self.check_copies(build(shapes), pairs)

    def test_any_pairs(self):
        shapes = self.fit(Shapes())
        pool = build(shapes)
        sources = st.lists(st.sampled_from((*range(6), 6, *OUTSIDE)), min_size=6, max_size=6)

        @hypothesis.settings(max_examples=self.examples)
        @hypothesis.given(sources, st.permutations(range(6)), sources)
        def holds(sources, destinations, nowhere):
            gone = [
                place if place not in range(6) else there for place, there in zip(nowhere, destinations, strict=True)
            ]
            self.check_copies(pool, list(zip(sources, gone, strict=True)))

        holds()

    @pytest.mark.parametrize(
        "shape", [{"page_size": 128, "size": 128}, {"kv_heads": 1, "dtypes": ("bfloat16",)}], ids=str
    )
    def test_shapes(self, shape):
        self.check_copies(build(self.fit(Shapes(**shape))), [(1, 0), (2, 1)])

    def test_nothing_to_do_is_nothing(self):
        pool, none = build(self.fit(Shapes())), np.zeros(0, np.int32)
        assert_same_bits(self.run(copy_pages, pool, none, none), pool)
        content = self.run(take_pages, pool, none)
        assert [x.shape for x in content] == [(0, x.shape[0], *x.shape[2:]) for x in pool]
        assert_same_bits(self.run(put_pages, pool, none, content), pool)
