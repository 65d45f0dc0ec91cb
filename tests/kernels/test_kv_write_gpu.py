"""kv_write in Pallas Mosaic GPU, in the GPU interpreter, which reports races between copies and what reads them."""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import numpy as np
import pytest

from pallas_kernels.kv_write import mosaic_gpu
from pallas_kernels.kv_write.api import kv_write
from pallas_kernels.pages import PageFormat
from pallas_kernels.proof.targets import abstract_mesh
from tests.kernels.devices import OLD, gpu_interpreter, new_jax
from tests.kernels.kv_write_suite import FORMATS, Case, KvWriteSuite

NATIVE = [kind for kind in FORMATS if kind[0] in mosaic_gpu.PAGE_DTYPES]


class MosaicSuite(KvWriteSuite):
    implementation = "mosaic_gpu"

    def fit(self, case: Case) -> Case:
        """Head sizes that a warp divides."""
        size, v_size = (one and max(64, one) for one in (case.size, case.v_size))
        return dataclasses.replace(case, size=size, v_size=v_size)

    def run(self, sides, slots):
        with gpu_interpreter():
            return super().run(sides, slots)

    @pytest.mark.parametrize("kind", NATIVE, ids=str)
    def test_formats(self, kind):
        """Each format as keys, and the one after it in the list as values."""
        self.check(Case(k_format=kind, v_format=NATIVE[(NATIVE.index(kind) + 1) % len(NATIVE)]))

    @pytest.mark.parametrize("kind", [x for x in NATIVE if x[1] != "tensor"], ids=str)
    def test_what_does_not_fit_saturates(self, kind):
        self.check(Case(k_format=kind, v_format=kind, wild=True, spread=1000.0))


@new_jax
class TestMosaic(MosaicSuite):
    """Everything."""


def write(dtype: str, size: int, tokens: int = 2):
    fmt = PageFormat(dtype)
    pages = np.zeros((2, 4, 16, size), fmt.storage_dtype)
    rows, slots = np.zeros((tokens, 4, size), np.float32), np.full(tokens, -1, np.int32)
    return kv_write(pages, None, rows, None, slots, k_format=fmt, implementation="mosaic_gpu")


@new_jax
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("bfloat16", 80), "the head size must be one of 64, 128, 256; got 80"),
        (("bfloat16", 64, 70_000), "one launch writes at most 65535 tokens; got 70000"),
    ],
)
def test_what_it_refuses_it_explains(arguments, reason):
    with pytest.raises(ValueError, match=f"mosaic_gpu cannot do this call: {reason}"):
        write(*arguments)


@pytest.mark.skipif(not OLD, reason="this jax is new enough")
def test_an_old_jax_is_refused():
    with pytest.raises(ValueError, match=r"it needs jax 0\.11\.2 or later"):
        write("bfloat16", 64)


@new_jax
@pytest.mark.parametrize(("chip", "kernels"), [(None, 0), ("NVIDIA A100-SXM4-80GB", 0), ("NVIDIA H200", 1)])
def test_it_is_chosen_where_it_was_built_for(chip, kernels):
    fmt = PageFormat("int8", "token")
    pages, scale = jax.ShapeDtypeStruct((8, 4, 16, 128), "int8"), jax.ShapeDtypeStruct((8, 4, 16), "float32")
    rows, slots = jax.ShapeDtypeStruct((4, 4, 128), "bfloat16"), jax.ShapeDtypeStruct((4,), "int32")

    def call(pages, scale, rows, slots):
        return kv_write(pages, pages, rows, rows, slots, k_format=fmt, k_scale=scale, v_scale=scale)

    with abstract_mesh(chip, "gpu") if chip else contextlib.nullcontext():
        assert str(jax.jit(call).trace(pages, scale, rows, slots).jaxpr).count("name=kv_write_") == kernels
