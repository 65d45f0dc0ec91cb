"""kv_write on TPUs, in the interpreter, where a race or an access out of bounds fails."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kv_write import tpu
from pallas_kernels.kv_write.api import kv_write
from pallas_kernels.pages import PageFormat
from pallas_kernels.proof.targets import abstract_mesh
from tests.kernels.devices import tpu_interpreter
from tests.kernels.kv_write_suite import FORMATS, NONE, Case, KvWriteSuite

BFLOAT16 = ("bfloat16", NONE)
NATIVE = [kind for kind in FORMATS if kind[0] in tpu.PAGE_DTYPES]


class TpuSuite(KvWriteSuite):
    implementation = "tpu"

    def fit(self, case: Case) -> Case:
        """Whole rows of lanes."""
        size, v_size = (one and max(64, one) for one in (case.size, case.v_size))
        return dataclasses.replace(case, size=size, v_size=v_size)

    def run(self, sides, slots):
        with tpu_interpreter():
            return super().run(sides, slots)

    @pytest.mark.parametrize("kind", NATIVE, ids=str)
    def test_formats(self, kind):
        """Each format as keys, and the one after it in the list as values."""
        self.check(Case(k_format=kind, v_format=NATIVE[(NATIVE.index(kind) + 1) % len(NATIVE)]))

    @pytest.mark.parametrize("kind", [("bfloat16", NONE), ("float8_e4m3fn", NONE), ("int8", "token")], ids=str)
    def test_what_does_not_fit_saturates(self, kind):
        self.check(Case(k_format=kind, v_format=kind, wild=True, spread=1000.0))

    def test_values_of_another_size(self):
        self.check(Case(size=64, v_size=128, page_size=32, k_format=BFLOAT16, v_format=("int8", "head")))


class TestTpu(TpuSuite):
    """What a kernel can get wrong in its own way; all else is left to the whole suite."""

    @pytest.mark.parametrize("kind", NATIVE[::2], ids=str)
    def test_formats(self, kind):
        super().test_formats(kind)

    @pytest.mark.parametrize("slots", [(9,), tuple(range(79, -1, -1))], ids=len)
    def test_any_number_of_tokens(self, slots):
        super().test_any_number_of_tokens(slots)

    def test_units_go_on_in_the_next_block(self, monkeypatch):
        """Blocks of 32 tokens, and pages of 128 slots that several blocks write."""
        monkeypatch.setattr(tpu, "BLOCK_BYTES", 0)
        slots = tuple(int(slot) for slot in np.random.default_rng(0).permutation(2 * 128)[:70])
        self.check(
            Case(slots, pages=2, page_size=128, size=128, v_size=128, k_format=("int8", "token"), v_format=BFLOAT16)
        )

    test_rows_of_16_bits = test_shapes = test_a_random_order = None


@pytest.mark.slow
class TestWholeSuite(TpuSuite):
    """Everything."""


# --- without running anything ---------------------------------------------------------------------------------------


def arrays_of(kind: tuple[str, str], shape=(64, 8, 16, 128), tokens: int = 4) -> tuple[dict, PageFormat]:
    fmt = PageFormat(*kind)
    count, heads, page_size, size = shape
    pages = jax.ShapeDtypeStruct((*shape[:3], fmt.width(size)), fmt.storage_dtype)
    rows = jax.ShapeDtypeStruct((tokens, heads, size), jnp.bfloat16)
    arrays = {name: pages for name in ("k_pages", "v_pages")} | {name: rows for name in ("k", "v")}
    if fmt.quantised:
        scale = jax.ShapeDtypeStruct(fmt.scale_shape(count, heads, page_size), jnp.float32)
        arrays |= {name: scale for name in ("k_scale", "v_scale")}
    return {**arrays, "slots": jax.ShapeDtypeStruct((tokens,), jnp.int32)}, fmt


def kernels_in(kind: tuple[str, str], implementation: str | None = None, **shapes) -> int:
    """How many kernels a call consists of."""
    arrays, fmt = arrays_of(kind, **shapes)
    step = jax.jit(lambda arrays: kv_write(**arrays, k_format=fmt, implementation=implementation))
    return str(step.trace(arrays).jaxpr).count("pallas_call[")


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("kind", [kind for kind in NATIVE if kind[0] in ("bfloat16", "float8_e4m3fn", "int8")], ids=str)
@pytest.mark.parametrize("chip", ["TPU v5 lite", "TPU v6 lite", "TPU7x"])
def test_what_it_must_do_it_is_chosen_for(size, page_size, kind, chip):
    with abstract_mesh(chip, "tpu"):
        assert kernels_in(kind, shape=(64, 8, page_size, size)) == 1


def test_it_is_chosen_on_tpus_alone():
    assert kernels_in(BFLOAT16) == 0


@pytest.mark.parametrize(
    ("kind", "shapes", "reason"),
    [
        (("int4", "head"), {}, "int4"),
        (("float16", NONE), {}, "float16"),
        (BFLOAT16, {"shape": (64, 8, 16, 96)}, "head size must be 32, 64 or a multiple of 128; got 96"),
        (BFLOAT16, {"shape": (64, 8, 3, 64)}, "pages of 3 slots of 64 do not fill rows of 128 lanes"),
        (BFLOAT16, {"tokens": 1 << 17}, "at most 65536 tokens"),
        (BFLOAT16, {"shape": (8, 512, 200, 128)}, "MiB of VMEM"),
    ],
)
def test_what_it_refuses_it_explains(kind, shapes, reason):
    with pytest.raises(ValueError, match=f"tpu cannot do this call: .*{reason}"):
        kernels_in(kind, "tpu", **shapes)
    with abstract_mesh("TPU v6 lite", "tpu"):
        assert kernels_in(kind, **shapes) == 0


def test_derivatives():
    """Those of the path in plain XLA."""
    pages, rows = np.zeros((2, 1, 8, 128), np.float32), np.ones((2, 1, 128), np.float32)
    slots, weights = np.asarray([3, -1], np.int32), np.arange(2048.0).reshape(2, 1, 8, 128)

    def total(k_pages, k):
        return (kv_write(k_pages, None, k, None, slots, k_format=PageFormat(), implementation="tpu")[0] * weights).sum()

    with tpu_interpreter():
        of_pages, of_rows = jax.grad(total, (0, 1))(pages, rows)
    want = weights.copy()
    want[0, 0, 3] = 0
    np.testing.assert_array_equal(of_pages, want)
    np.testing.assert_array_equal(of_rows, [weights[0, :, 3], 0 * weights[0, :, 3]])
