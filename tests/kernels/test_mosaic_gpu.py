"""The Mosaic GPU kernels in the GPU interpreter, which reports races between copies and what reads them.

Building one interpreted program takes seconds, so the shared cases are run in a few shapes; the whole suite is marked
slow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import mosaic_gpu
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.proof.targets import abstract_mesh
from tests.kernels.cases import FILLERS, MIXED, OPTIONS, Built, Case, build, sinks, slopes
from tests.kernels.devices import OLD, gpu_interpreter, new_jax
from tests.kernels.suite import Arrays, AttentionSuite, WhereTaken, assert_same_bits, replaced

BFLOAT16 = ("bfloat16", "none")
DECODE = ((1, 9), (0, 0), (1, 1), (1, 530), (1, 0), (1, 129))
TOGETHER = {"window": 9, "soft_cap": 1.1, "alibi_slopes": slopes(12), "sinks": sinks(12), "scale": 0.2}
# Tensor cores multiply 16-bit numbers: a float32 case of the suite is run on its queries, keys and values as bfloat16.
AS_BFLOAT16 = {"float32": BFLOAT16, "bfloat16": BFLOAT16, "float16": ("float16", "none")}


class MosaicSuite(AttentionSuite):
    implementation = "mosaic_gpu"
    # Weights are rounded to the 8 digits of bfloat16 before they multiply values. A float32 case is run as bfloat16.
    tolerance = {"float32": 2e-2, "bfloat16": 2e-2, "float16": 4e-3}
    examples = 2

    def fit(self, case: Case) -> Case:
        size = 64 if case.size <= 64 else 128
        page_size = next((size for size in (8, 16, 32) if case.page_size <= size), -(-case.page_size // 64) * 64)
        formats = [AS_BFLOAT16.get(kind[0], kind) for kind in (case.k_format, case.v_format)]
        float16 = case.query_dtype == "float16"
        return dataclasses.replace(
            case,
            size=size,
            v_size=case.v_size and size,
            page_size=page_size,
            query_dtype="float16" if float16 else "bfloat16",
            k_format=formats[0],
            v_format=formats[1],
        )

    def run(self, built: Built) -> Arrays:
        with gpu_interpreter():
            return super().run(built)

    def check(self, case: Case) -> Arrays:
        return super().check(self.fit(case))


@new_jax
class TestMosaic(MosaicSuite):
    """A few shapes of the suite's, and those that the kernels must never refuse."""

    @pytest.mark.parametrize("name", ["plain"])
    def test_options(self, name):
        self.check(OPTIONS[name])

    def test_options_together(self):
        self.check(Case(MIXED, heads=12, kv_heads=4, options=TOGETHER))

    @pytest.mark.parametrize(
        ("k_format", "v_format", "size", "page_size", "options"),
        [
            (BFLOAT16, BFLOAT16, 128, 128, {}),
            (("float8_e4m3fn", "token"), ("float16", "none"), 64, 128, {"causal": False}),
            (("float8_e4m3fn", "token"), ("float8_e4m3fn", "token"), 128, 16, {}),
            (("int8", "head"), ("float8_e4m3fn", "tensor"), 64, 16, {"sinks": sinks(4)}),
            (("int8", "token"), ("float8_e5m2", "head"), 64, 32, {}),
        ],
    )
    def test_formats(self, k_format, v_format, size, page_size, options):
        """Decoding alone, one row long enough to be shared by two programs."""
        options = {"max_query_len": 1, **options}
        self.check(Case(DECODE, size=size, page_size=page_size, k_format=k_format, v_format=v_format, options=options))

    def test_float16_queries(self):
        """They keep all their digits, as two bfloat16 where keys are multiplied as that; a row takes two tiles here."""
        case = Case(
            ((1, 20), (1, 70)),
            heads=40,
            kv_heads=1,
            query_dtype="float16",
            k_format=BFLOAT16,
            v_format=("int8", "tensor"),
            options={"max_query_len": 1},
        )
        _, lse = self.check(case)
        np.testing.assert_allclose(lse, self.built(case).lse, rtol=0, atol=2e-5)

    def test_what_no_row_owns_changes_no_bit(self):
        case = Case(MIXED, k_format=BFLOAT16, v_format=("float8_e4m3fn", "token"), options={"window": 9})
        outs = [self.check(dataclasses.replace(case, filler=filler)) for filler in FILLERS]
        for out in outs[1:]:
            assert_same_bits(out, outs[0])

    @pytest.mark.parametrize("name", ["plain"])
    def test_a_row_does_not_depend_on_its_batch(self, name):
        super().test_a_row_does_not_depend_on_its_batch(name)

    def test_nor_on_the_width_of_its_table(self):
        """Which is how many programs may share a row, most of them for nothing."""
        built = self.built(Case(((1, 530), (1, 20)), heads=2, kv_heads=1, page_size=16, spare=200))
        outs = []
        for columns in (34, 234):
            arguments = replaced(built.arguments, 3, np.asarray(built.arguments[3])[:, :columns])
            outs.append(self.run(dataclasses.replace(built, arguments=arguments)))
        np.testing.assert_allclose(outs[0][0].astype(np.float64), built.out, rtol=0, atol=2e-2)
        assert_same_bits(outs[1], outs[0])

    def test_numbers_beyond_float16(self):
        """Queries are brought near 1 where keys are multiplied as float16, and so are weights times scales."""
        formats = {"k_format": ("float8_e4m3fn", "head"), "v_format": ("float8_e4m3fn", "token")}
        built = self.built(Case(((1, 70), (1, 9)), options={"scale": 64**-0.5, "max_query_len": 1}, **formats))
        for power in (-60, 60):
            options = {**built.options, "v_scale": built.options["v_scale"] * 2.0**power}
            options["k_scale"] = built.options["k_scale"] * 2.0**-power
            query, *others = built.arguments
            changed = dataclasses.replace(built, arguments=(query * 2.0**power, *others), options=options)
            out, lse = self.run(changed)
            np.testing.assert_allclose(out.astype(np.float64) * 2.0**-power, built.out, rtol=0, atol=2e-2)
            np.testing.assert_allclose(lse, built.lse, rtol=0, atol=1e-4)

    # What needs other shapes is left to the whole suite.
    test_head_sizes = test_page_sizes_at_their_edges = test_decode_alone = test_a_window_in_an_array = None
    test_a_known_answer = test_known_means_at_page_edges = test_tables_wider_than_needed = None
    test_the_cap_comes_after_the_scale = test_a_window_holds_its_own_query = test_nor_do_quantised_slots = None
    test_the_default_scale_is_that_of_the_head_size = None
    test_a_window_reads_nothing_before_it = test_nor_on_the_shapes_of_its_batch = None
    test_a_prompt_in_chunks_is_the_prompt = test_parts_of_the_keys_join = test_a_poisoned_row_harms_no_other = None
    test_a_chunk_stands_behind_what_is_cached = test_any_rows = test_any_shapes = None


@new_jax
@pytest.mark.slow
class TestWholeSuite(WhereTaken, MosaicSuite):
    """Everything, where the kernels take it; skipped with their own words where they do not."""

    @pytest.mark.parametrize("cut", [1, 9])
    def test_parts_of_the_keys_join(self, cut):
        """Pages of 8 slots: a prefix of 17 of them would hold this step's keys too, which need the causal mask."""
        super().test_parts_of_the_keys_join(cut)

    # Known to more digits than weights in bfloat16 have, or for a head of 96.
    test_a_known_answer = test_the_cap_comes_after_the_scale = None
    test_the_default_scale_is_that_of_the_head_size = None


# --- without running anything ---------------------------------------------------------------------------------------


def call_of(**change):
    """A small call as the op makes it."""
    from tests.kernels.test_tpu import make_call

    return make_call(**change)


@new_jax
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("query", ["bfloat16", "float16"])
def test_what_it_must_do_is_not_refused(size, page_size, dtype, query):
    q = jax.ShapeDtypeStruct((4, 32, size), jnp.dtype(query))
    with abstract_mesh("NVIDIA H200", "gpu"):
        assert mosaic_gpu.refuses(call_of(shape=(64, 8, page_size, size), dtype=dtype, q=q)) is None


@new_jax
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tree_mask": jax.ShapeDtypeStruct((4, 1), jnp.uint32)}, "tree"),
        ({"shape": (32, 8, 16, 96)}, "head size"),
        ({"shape": (32, 8, 48, 128)}, "page size"),
        ({"dtype": "float32"}, "float32"),
        ({"dtype": "uint8", "shape": (32, 8, 16, 64)}, "uint8"),
        ({"v_pages": None}, "pages of their own"),
        ({"q": jax.ShapeDtypeStruct((4, 32, 128), jnp.float32)}, "queries"),
        ({"q": jax.ShapeDtypeStruct((1 << 17, 32, 128), jnp.bfloat16), "rows": 1 << 17}, "tiles"),
    ],
)
def test_what_it_refuses_it_explains(change, reason):
    assert reason in mosaic_gpu.refuses(call_of(**change))


@pytest.mark.skipif(not OLD, reason="this jax is new enough")
def test_an_old_jax_is_refused():
    assert jax.__version__ in mosaic_gpu.refuses(call_of())


CHIPS = [("NVIDIA H200", None), ("NVIDIA GH200 480GB", None), ("NVIDIA GB200", None), ("NVIDIA A100-SXM4-80GB", "A100")]


@new_jax
@pytest.mark.parametrize(
    ("kind", "refused"), [*CHIPS, ("NVIDIA GeForce RTX 5090", "RTX"), ("AMD Instinct MI300X", "AMD")]
)
def test_which_gpus_it_takes(kind, refused):
    with abstract_mesh(kind, "gpu"):
        reason = mosaic_gpu.refuses(call_of())
    assert reason is None if refused is None else refused in reason


@new_jax
@pytest.mark.parametrize(("kind", "kernels"), [(None, 0), ("NVIDIA H200", 2), ("NVIDIA GB200", 2)])
def test_it_is_chosen_on_gpus_alone(kind, kernels):
    rows = ((1, 9), (1, 600))  # long enough for the second kernel, which joins the parts of a row
    case = Case(rows, size=128, page_size=16, k_format=BFLOAT16, v_format=BFLOAT16, query_dtype="bfloat16")
    built = build(case)
    with abstract_mesh(kind, "gpu") if kind else contextlib.nullcontext():
        traced = jax.jit(lambda *x: paged_attention(*x, max_query_len=1)).trace(*built.arguments)
    assert len(set(re.findall(r"paged_attention_\w+", str(traced.jaxpr)))) == kernels


@new_jax
@pytest.mark.parametrize("kind", ["NVIDIA H200"])
def test_it_lowers_for_absent_gpus(kind):
    """As far as a GPU's own compiler, which is not needed for it; layouts are settled by then."""
    scale = jax.ShapeDtypeStruct((64, 8, 16), jnp.float32)
    call = call_of(shape=(64, 8, 16, 128), dtype="int8", k_scale=scale, v_scale=scale, columns=64)
    arrays = {name: x for name, x in vars(call).items() if isinstance(x, jax.ShapeDtypeStruct)}
    with abstract_mesh(kind, "gpu"):
        traced = jax.jit(lambda arrays: mosaic_gpu.attend(dataclasses.replace(call, **arrays))).trace(arrays)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu", text)) == 3
