"""kv_write everywhere: the reference, plain XLA, and what the op refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write.api import IMPLEMENTATIONS, kv_write
from pallas_kernels.pages import PageFormat
from tests.kernels.kv_write_suite import KvWriteSuite


class TestReference(KvWriteSuite):
    implementation = "reference"


class TestXla(KvWriteSuite):
    implementation = "xla"


# --- in place -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [("float32", "none"), ("float8_e4m3fn", "token")], ids=str)
def test_it_writes_where_the_pages_lie(kind):
    fmt = PageFormat(*kind)
    pages = jax.ShapeDtypeStruct((512, 4, 16, 64), fmt.storage_dtype)
    rows = jax.ShapeDtypeStruct((8, 4, 64), jnp.float32)
    scale = jax.ShapeDtypeStruct((512, 4, 16), jnp.float32) if fmt.quantised else None

    def step(k_pages, v_pages, k_scale, v_scale, k, v, slots):
        return kv_write(k_pages, v_pages, k, v, slots, k_format=fmt, k_scale=k_scale, v_scale=v_scale)

    arrays = pages, pages, scale, scale, rows, rows, jax.ShapeDtypeStruct((8,), jnp.int32)
    memory = jax.jit(step, donate_argnums=(0, 1, 2, 3)).lower(*arrays).compile().memory_analysis()
    pool = 2 * pages.size * fmt.storage_dtype.itemsize
    assert memory.alias_size_in_bytes >= pool and memory.temp_size_in_bytes < 0.05 * pool


@pytest.mark.parametrize("implementation", ["xla", "reference"])
def test_derivatives(implementation):
    """What is stored has the derivative of its row, what is overwritten none."""
    pages, rows = np.zeros((2, 1, 2, 3), np.float32), np.ones((2, 1, 3), np.float32)

    def total(k_pages, k):
        slots = np.asarray([3, -1], np.int32)
        written = kv_write(k_pages, None, k, None, slots, k_format=PageFormat(), implementation=implementation)
        return (written[0] * jnp.arange(12.0).reshape(2, 1, 2, 3)).sum()

    of_pages, of_rows = jax.grad(total, (0, 1))(pages, rows)
    np.testing.assert_array_equal(of_pages.ravel(), [0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0, 0])
    np.testing.assert_array_equal(of_rows.ravel(), [9, 10, 11, 0, 0, 0])


# --- what is refused ------------------------------------------------------------------------------------------------


def arguments_of(**change) -> dict:
    """A good call, with some arguments replaced."""
    good = dict(
        k_pages=np.zeros((4, 2, 8, 16), np.int8),
        v_pages=np.zeros((4, 2, 8, 16), np.float32),
        k=np.zeros((3, 2, 16), np.float32),
        v=np.zeros((3, 2, 16), np.float32),
        slots=np.zeros(3, np.int32),
        k_format=PageFormat("int8", "head"),
        v_format=PageFormat(),
        k_scale=np.ones((1, 2, 1), np.float32),
    )
    return {**good, **change}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"slots": np.zeros(3)}, TypeError, "slots: dtype must be one of int32; got float64"),
        ({"slots": np.zeros((3, 1), np.int32)}, ValueError, r"slots: must have 1 axes; got shape \(3, 1\)"),
        ({"k": np.zeros((2, 2, 16), np.float32)}, ValueError, r"k: must be \[T,K,D\] .* = \(3, 2, 16\); got shape"),
        ({"k": np.zeros((3, 2, 15), np.float32)}, ValueError, r"k: must be \[T,K,D\]"),
        ({"k": np.zeros((3, 2, 16), np.int32)}, TypeError, "k: dtype must be one of float32, bfloat16, float16"),
        ({"k": [0.0]}, TypeError, "k: must be an array; got list"),
        ({"v": None}, TypeError, "v: must be an array; got NoneType"),
        ({"v_pages": None}, ValueError, "v: must be None where v_pages is"),
        ({"v_pages": None, "v": None}, ValueError, "v_format: must be None where v_pages is"),
        ({"v_pages": 3}, TypeError, "v_pages: must be an array; got int"),
        (
            {"v_pages": np.zeros((4, 2, 4, 16), np.float32)},
            ValueError,
            r"v_pages: must have the pages, heads",
        ),
        ({"k_pages": np.zeros((4, 2, 8, 16), np.float32)}, ValueError, "k_pages: .* is stored as int8; got float32"),
        ({"k_pages": np.zeros((4, 2, 8), np.int8)}, ValueError, "k_pages: must have 4 axes"),
        ({"k_pages": np.zeros((4, 0, 8, 16), np.int8)}, ValueError, "k_pages: no axis may be empty"),
        ({"k_format": "int8"}, TypeError, "k_format: must be a PageFormat; got str"),
        ({"k_scale": None}, ValueError, r"k_scale: .* needs a scale of shape \(1, 2, 1\); got None"),
        ({"k_scale": np.ones((1, 1, 1), np.float32)}, ValueError, r"k_scale: must be .* = \(1, 2, 1\); got shape"),
        ({"k_scale": np.ones((1, 2, 1))}, TypeError, "k_scale: dtype must be one of float32; got float64"),
        ({"v_scale": np.ones((1, 1, 1), np.float32)}, ValueError, "v_scale: .* takes no scale; got one"),
        ({"implementation": "cuda"}, ValueError, "implementation: must be one of .*xla.*; got cuda"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    with pytest.raises(error, match=message):
        kv_write(**arguments_of(**change))


def test_slots_must_fit_in_32_bits():
    """Public fault B04: a pool that int32 slots do not reach is refused, one that they just reach is not."""

    def shape_of(pages):
        arrays = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype)
            for name, x in arguments_of().items()
            if isinstance(x, np.ndarray)
        }
        for name in ("k_pages", "v_pages"):
            arrays[name] = jax.ShapeDtypeStruct((pages, 2, 8, 16), arrays[name].dtype)
        formats = dict(k_format=PageFormat("int8", "head"), v_format=PageFormat())
        return jax.eval_shape(lambda arrays: kv_write(**arrays, **formats), arrays)[0].shape

    assert shape_of(2**28 - 1) == (2**28 - 1, 2, 8, 16)
    with pytest.raises(ValueError, match=r"k_pages: slots N \* B must be at most 2147483647, to fit in int32"):
        shape_of(2**28)


def test_the_table_ends_with_what_refuses_nothing():
    assert list(IMPLEMENTATIONS)[-2:] == ["xla", "reference"]
