"""The Triton kernels in Pallas' interpreter, and their lowering for GPUs that are absent.

A compile takes more than a second, so the shared cases are run in a few shapes, and the whole suite is marked slow.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import pages
from pallas_kernels.paged_attention import triton_gpu, triton_words
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.arguments import Call
from pallas_kernels.proof.targets import abstract_mesh
from tests.kernels.cases import DECODE, FORMATS, MIXED, Built, Case, build, select, sinks
from tests.kernels.suite import TOLERANCE, Arrays, AttentionSuite, assert_same_bits, compiled, replaced

BFLOAT16 = ("bfloat16", "none")
LONG = ((1, 1100), (3, 700), (1, 512), (1, 513), (1, 3), (0, 0))
"""Rows of up to three stretches."""


@functools.cache
def quick(statics: tuple) -> jax.stages.Wrapped:
    """The op as the suite compiles it, but in half the time: what it computes is the same."""
    run = compiled("triton_gpu", statics).__wrapped__
    return jax.jit(run, compiler_options={"xla_backend_optimization_level": 0})


class TritonSuite(AttentionSuite):
    implementation = "triton_gpu"
    examples = 5

    def run(self, built: Built) -> Arrays:
        arrays = {name: x for name, x in built.options.items() if isinstance(x, jax.Array)}
        statics = tuple(sorted((name, x) for name, x in built.options.items() if name not in arrays))
        out, lse = quick(statics)(built.arguments, arrays)
        return np.asarray(out), np.asarray(lse)


def only(name: str, values: list):
    """A test of the suite with fewer parameters."""

    def test(self, value):
        getattr(super(TestTriton, self), name)(value)

    return pytest.mark.parametrize("value", values, ids=str)(test)


class TestTriton(TritonSuite):
    """A few shapes of the suite's, and what is the kernels' own."""

    names = ["all", "not causal", "wide tree", "28 heads over 4", "71 heads over 1", "values wider", "float16 queries"]
    test_options = only("test_options", names)
    test_head_sizes = only("test_head_sizes", [80, 256])
    test_page_sizes_at_their_edges = only("test_page_sizes_at_their_edges", [1, 3, 256])
    test_formats = only("test_formats", [FORMATS[index] for index in (5, 6, 9, 12)])
    test_decode_alone = only("test_decode_alone", [{"window": 70}])
    test_a_window_in_an_array = only("test_a_window_in_an_array", [0, 5, 2**31 - 1])
    test_a_known_answer = only("test_a_known_answer", [5])
    test_what_no_row_owns_changes_no_bit = only("test_what_no_row_owns_changes_no_bit", ["window 4"])
    test_nor_do_quantised_slots = only("test_nor_do_quantised_slots", [("float8_e4m3fn", "token")])
    test_a_row_does_not_depend_on_its_batch = only("test_a_row_does_not_depend_on_its_batch", ["all"])
    test_any_rows = only("test_any_rows", [{}])

    @pytest.mark.parametrize(
        ("k_format", "v_format", "page_size"),
        [
            (BFLOAT16, BFLOAT16, 16),
            (("float8_e4m3fn", "token"), ("int8", "token"), 16),
            (("int8", "head"), ("float8_e4m3fn", "tensor"), 128),
            (("int4", "token"), BFLOAT16, 16),
            (("float16", "none"), ("int4", "head"), 16),
            (("float8_e5m2", "none"), ("float8_e4m3fn", "token"), 5),
        ],
        ids=str,
    )
    def test_numbers_that_tensor_cores_take(self, k_format, v_format, page_size):
        options = {"max_query_len": 1, "sinks": sinks(4)}
        formats = {"k_format": k_format, "v_format": v_format, "query_dtype": "bfloat16"}
        self.check(Case(DECODE, size=64, page_size=page_size, options=options, **formats))

    def test_rows_that_several_programs_share(self):
        """The merge gives the same bits for a row in any batch."""
        case = Case(LONG, size=8, page_size=16, v_format=("int8", "head"), options={"sinks": sinks(4)})
        built = self.built(case)
        whole = self.check(case)
        starts = np.asarray(built.arguments[5])
        for row in (1, 3):
            span = slice(starts[row], starts[row + 1])
            count = span.stop - span.start
            got = self.run(select(built, [(row, 0, count)], len(LONG)))
            assert_same_bits([x[:count] for x in got], [x[span] for x in whole])

    def test_nor_on_the_width_of_its_table(self):
        """Which decides how many programs may share a row, and whether there is a merge."""
        built = self.built(Case(((1, 500), (2, 20)), page_size=16, spare=30, options={"sinks": sinks(4)}))
        narrow = replaced(built.arguments, 3, np.asarray(built.arguments[3])[:, :32])
        assert [[x.parts for x in triton_gpu.launches(call_of(built, x))] for x in (built.arguments, narrow)] == [
            [2],
            [1],
        ]
        assert_same_bits(self.run(dataclasses.replace(built, arguments=narrow)), self.run(built))

    def test_numbers_beyond_float16(self):
        """Queries are brought near 1 where keys are multiplied as float16, and so are weights times scales."""
        formats = {"k_format": ("float8_e4m3fn", "head"), "v_format": ("float8_e4m3fn", "token")}
        case = Case(((1, 70), (1, 9)), query_dtype="bfloat16", options={"max_query_len": 1}, **formats)
        built = self.built(case)
        for power in (-60, 60):
            scaled = {"v_scale": built.options["v_scale"] * 2.0**power, "k_scale": built.options["k_scale"]}
            scaled["k_scale"] *= 2.0**-power
            query, *others = built.arguments
            arguments = (query * 2.0**power, *others)
            out, lse = self.run(dataclasses.replace(built, arguments=arguments, options={**built.options, **scaled}))
            tolerance = TOLERANCE["bfloat16"]
            np.testing.assert_allclose(out.astype(np.float64) * 2.0**-power, built.out, rtol=0, atol=tolerance)
            np.testing.assert_allclose(lse, built.lse, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("kind", [("int4", "token"), ("float8_e4m3fn", "none")], ids=str)
    def test_bytes_in_pairs(self, kind, monkeypatch):
        """As pools of 2^31 to 2^32 bytes are read."""
        monkeypatch.setattr(triton_words, "NARROW_OFFSETS", (0, 2**32))
        other = ("int8", "head") if kind[0] == "int4" else ("float8_e5m2", "none")
        case = Case(MIXED[:-1], k_format=kind, v_format=other)
        assert triton_words.in_pairs(self.built(case).arguments[1])
        self.check(case)

    # What needs other shapes is left to the whole suite.
    test_known_means_at_page_edges = test_tables_wider_than_needed = test_the_cap_comes_after_the_scale = None
    test_a_window_holds_its_own_query = test_a_chunk_stands_behind_what_is_cached = None


@pytest.mark.slow
class TestWholeSuite(TritonSuite):
    """Everything."""

    examples = 20


# --- without running a kernel ----------------------------------------------------------------------------------------


def call_of(built: Built, arguments: tuple | None = None, **change) -> Call:
    """A built case as the implementation gets it."""
    q, k_pages, v_pages, tables, lengths, starts = arguments or built.arguments
    fields = {name: None for name in ("k_scale", "v_scale", "window", "soft_cap", "alibi_slopes", "sinks", "tree_mask")}
    fields |= {"max_query_len": None, "scale": 1.0, "causal": True, "v_width": v_pages.shape[3], **change}
    return Call(q, k_pages, v_pages, tables, lengths, starts, **fields)


def pool(dtype: str, num_pages: int, size: int = 128, **change) -> Call:
    """A call over a large pool that does not exist: 8 KV heads and pages of 16."""
    stored = jax.ShapeDtypeStruct((num_pages, 8, 16, size), jnp.dtype(dtype))
    shapes = {"q": (2, 32, size), "block_tables": (2, 4), "kv_lens": (2,), "query_starts": (3,)}
    dtypes = {"q": jnp.bfloat16}
    ints = {name: jax.ShapeDtypeStruct(shape, dtypes.get(name, jnp.int32)) for name, shape in shapes.items()}
    ints |= change
    arguments = ints["q"], stored, stored, ints["block_tables"], ints["kv_lens"], ints["query_starts"]
    return call_of(Built(arguments, {}, np.zeros(0), np.zeros(0)))


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "int8", "int4"])
@pytest.mark.parametrize("unit", ["float16", "float32"])
@pytest.mark.parametrize("paired", [False, True])
def test_every_code_is_decoded_exactly(kind, unit, paired):
    stored = jnp.arange(256, dtype=jnp.uint8)
    content = stored if kind == "int4" else jax.lax.bitcast_convert_type(stored, jnp.dtype(kind))
    want = np.asarray((pages.unpack_int4(content) if kind == "int4" else content).astype(jnp.float32))
    planes = 1 + (kind == "int4")
    words = stored if kind != "int8" else content
    if paired:
        words, planes = jax.lax.bitcast_convert_type(stored.reshape(-1, 2), jnp.uint16), 2 * planes
    side = triton_words.Words(kind, len(want), planes, unit, native=False)
    got = [triton_words.plane(side, words, index) for index in range(planes)]
    assert {x.dtype.name for x in got} == {unit}
    got = np.stack([np.asarray(x).astype(np.float32) for x in got], axis=-1).reshape(-1)
    np.testing.assert_array_equal(got, want)
    number = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(got)[number], np.signbit(want)[number])  # of zeros


@pytest.mark.parametrize("kind", ["A100-SXM4-80GB", "H200"])
def test_it_is_chosen_where_it_is_the_first_that_can(kind):
    """A tree mask, which Mosaic GPU does not take."""
    built = build(Case(((4, 20), (1, 9)), tree=True))
    with abstract_mesh(f"NVIDIA {kind}", "gpu"):
        traced = jax.jit(functools.partial(paged_attention, **built.options)).trace(*built.arguments)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "xla.gpu.triton" in text and "paged_attend_m" in text


@pytest.mark.parametrize("dtype", ["int8", "uint8", "float8_e4m3fn", "bfloat16"])
@pytest.mark.parametrize("num_pages", [131_072, 131_073, 262_144, 262_145])
def test_no_offset_passes_what_counts_it(dtype, num_pages):
    """Page 131,072 of 8 heads and 16 slots of 128 bytes is the first at 2^31 bytes.

    Triton adds 32-bit offsets, in words and with a sign, to arrays of up to 2^32 bytes, and 64-bit ones to larger.
    """
    call = pool(dtype, num_pages)
    assert triton_gpu.refuses(call) is None
    _, words = jax.eval_shape(lambda x: (0, triton_words.view(x, jnp.dtype("bfloat16"), False)[1]), call.k_pages)
    assert words.size * words.dtype.itemsize == call.k_pages.size * call.k_pages.dtype.itemsize
    assert words.size <= 2**31 or words.size * words.dtype.itemsize > 2**32


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (pool("bfloat16", 8, size=320), "256 elements; got 320"),
        (pool("int8", 2**24), "2\\^31 slots"),
        (pool("int8", 140_000, size=127), "even number"),
        (pool("int8", 8, block_tables=jax.ShapeDtypeStruct((2, 1 << 22), jnp.int32)), "got 131072"),
        (dataclasses.replace(pool("int8", 8), v_pages=None), "pages of their own"),
        (pool("int8", 8, q=jax.ShapeDtypeStruct((2, 32, 128), jnp.float64)), "float64"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_it_refuses_it_explains(call, reason):
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(triton_gpu.refuses(call))
