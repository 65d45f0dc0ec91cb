"""page_copy on TPUs, in the interpreter, where a race or an access out of bounds fails."""

from __future__ import annotations

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.page_copy.api import copy_pages, take_pages
from pallas_kernels.proof.targets import abstract_mesh
from tests.kernels.devices import tpu_interpreter
from tests.kernels.page_copy_suite import DTYPES, PageCopySuite


class TpuSuite(PageCopySuite):
    implementation = "tpu"
    examples = 3

    def run(self, *arguments):
        with tpu_interpreter():
            return super().run(*arguments)

    @pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "float16"])
    def test_any_bits_move_unchanged(self, dtype):
        super().test_any_bits_move_unchanged(dtype)


class TestTpu(TpuSuite):
    @pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
    def test_any_bits_move_unchanged(self, dtype):
        super().test_any_bits_move_unchanged(dtype)

    test_any_pairs = None


@pytest.mark.slow
class TestWholeSuite(TpuSuite):
    """Everything."""


@pytest.mark.parametrize(
    ("pool", "reason"),
    [
        ([np.zeros((2, 3, 2, 8, 64), np.float16)], "float16"),
        ([np.zeros((2, 3, 4), np.float32)], "tiles"),
    ],
)
def test_what_it_refuses_it_explains(pool, reason):
    ids = np.zeros(2, np.int32)
    with pytest.raises(ValueError, match=f"tpu cannot do this call: .*{reason}"):
        copy_pages(pool, ids, ids, implementation="tpu")


@pytest.mark.parametrize(("chip", "kernels"), [(None, 0), ("TPU v5 lite", 1), ("TPU7x", 1)])
def test_it_is_chosen_on_tpus_alone(chip, kernels):
    pool = [jax.ShapeDtypeStruct((2, 8, 4, 16, 128), jnp.int8), jax.ShapeDtypeStruct((2, 8, 4, 16), jnp.float32)]
    ids = jax.ShapeDtypeStruct((4,), jnp.int32)
    with abstract_mesh(chip, "tpu") if chip else contextlib.nullcontext():
        for function, arguments in ((copy_pages, (pool, ids, ids)), (take_pages, (pool, ids))):
            assert str(jax.jit(function).trace(*arguments).jaxpr).count("pallas_call[") == kernels
