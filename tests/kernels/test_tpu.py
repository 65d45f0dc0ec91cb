"""The TPU kernel in the TPU interpreter: races and reads out of bounds raise, whatever a copy has not filled is NaN.

A compile takes seconds, so the shared cases are run in a few shapes, blocks are small, and the whole suite is marked
slow.
"""

from __future__ import annotations

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import tpu, tpu_blocks, tpu_chip
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.paged_attention.arguments import Call
from pallas_kernels.paged_attention.tpu_blocks import Blocks
from pallas_kernels.proof.targets import abstract_mesh
from tests.kernels.cases import FILLERS, MIXED, OPTIONS, Built, Case, build, sinks, slopes
from tests.kernels.devices import tpu_interpreter
from tests.kernels.suite import Arrays, AttentionSuite, WhereTaken, assert_same_bits, replaced

BFLOAT16 = ("bfloat16", "none")
DECODE = ((1, 9), (0, 0), (1, 1), (1, 128), (1, 300), (1, 0), (1, 129))


class TpuSuite(AttentionSuite):
    implementation = "tpu"
    examples = 2

    @pytest.fixture(autouse=True)
    def small_blocks(self, monkeypatch):
        sizes = {False: Blocks(queries=1, tokens=128, depth=3), True: Blocks(queries=4, tokens=128, depth=3)}
        monkeypatch.setattr(tpu_blocks, "default", lambda call, several: sizes[several])

    def fit(self, case: Case) -> Case:
        size = next(size for size in (64, 128, 256) if case.size <= size)
        page_size = max(16, 1 << (case.page_size - 1).bit_length())
        return dataclasses.replace(case, size=size, page_size=page_size, v_size=case.v_size and size)

    def run(self, built: Built) -> Arrays:
        with tpu_interpreter():
            return super().run(built)


class TestTpu(TpuSuite):
    """A few shapes of the suite's, those that the kernel must never refuse, and what is the kernel's own."""

    @pytest.mark.parametrize("name", ["plain", "not causal", "28 heads over 4", "71 heads over 1"])
    def test_options(self, name):
        self.check(OPTIONS[name])

    def test_options_together(self):
        options = {"window": 9, "soft_cap": 1.1, "alibi_slopes": slopes(4), "sinks": sinks(4), "scale": 0.2}
        self.check(Case(MIXED, options=options))

    @pytest.mark.parametrize(
        ("k_format", "v_format", "size", "page_size", "kv_heads"),
        [
            (BFLOAT16, BFLOAT16, 64, 16, 4),
            (BFLOAT16, ("float8_e4m3fn", "head"), 128, 16, 4),
            (("int8", "head"), ("float8_e4m3fn", "tensor"), 128, 128, 4),
            # Scales per token reach the kernel page by page in four ways, or gathered.
            (("float8_e4m3fn", "none"), ("int8", "token"), 128, 16, 8),
            (("float8_e4m3fn", "token"), ("float8_e4m3fn", "token"), 64, 16, 8),
            (("int8", "token"), BFLOAT16, 64, 32, 4),
            (("float8_e4m3fn", "token"), ("int8", "token"), 128, 128, 1),
            (("int8", "token"), BFLOAT16, 128, 16, 2),
        ],
        ids=str,
    )
    def test_formats(self, k_format, v_format, size, page_size, kv_heads):
        case = Case(
            DECODE,
            heads=8,
            kv_heads=kv_heads,
            size=size,
            page_size=page_size,
            k_format=k_format,
            v_format=v_format,
            query_dtype="bfloat16",
            options={"max_query_len": 1},
        )
        self.check(case)

    @pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU7x"])
    def test_other_chips(self, kind):
        """Their matrix units differ in width and in what they multiply, and so do the products."""
        case = Case(
            MIXED,
            heads=8,
            kv_heads=4,
            size=64,
            page_size=16,
            k_format=("int8", "token"),
            v_format=("float8_e4m3fn", "token"),
            query_dtype="bfloat16",
            options={"window": 33, "sinks": sinks(8)},
        )
        with abstract_mesh(kind, "tpu"):
            self.check(case)

    def test_what_no_row_owns_changes_no_bit(self):
        case = Case(MIXED, k_format=BFLOAT16, v_format=("float8_e4m3fn", "none"), query_dtype="bfloat16")
        outs = [self.check(dataclasses.replace(case, filler=filler)) for filler in FILLERS]
        for out in outs[1:]:
            assert_same_bits(out, outs[0])

    @pytest.mark.parametrize("name", ["plain"])
    def test_a_row_does_not_depend_on_its_batch(self, name):
        super().test_a_row_does_not_depend_on_its_batch(name)

    def test_neighbours_in_the_pool(self, monkeypatch):
        """Pages in the pool's order come in joined copies, and the bits are those of single ones."""
        case = Case(DECODE, k_format=BFLOAT16, v_format=BFLOAT16, query_dtype="bfloat16", options={"max_query_len": 1})
        built = self.built(case)
        query, k_pages, v_pages, tables, lengths, starts = built.arguments
        order = np.unique(np.concatenate([np.asarray(tables).clip(0).ravel(), np.arange(len(k_pages))]))
        held = np.concatenate([np.asarray(tables)[row, : -(-length // 16)] for row, length in enumerate(lengths)])
        order = np.concatenate([held, np.setdiff1d(order, held)])[: len(k_pages)]
        place = np.argsort(order).astype(np.int32)
        moved = np.where((np.asarray(tables) >= 0) & (np.asarray(tables) < len(place)), tables, 0)
        arguments = query, k_pages[order], v_pages[order], jnp.asarray(place[moved]), lengths, starts
        assert_same_bits(self.run(dataclasses.replace(built, arguments=arguments)), self.run(built))

    @pytest.mark.parametrize("causal", [True, False])
    def test_queries_that_see_nothing(self, causal):
        """Rows of several queries, empty or, if causal, shorter than their queries, between rows that see something."""
        built = self.built(Case(((3, 60), (5, 40), (6, 33), (1, 20)), options={"causal": causal}, padding=2))
        whole = self.run(built)
        out, lse = self.run(dataclasses.replace(built, arguments=replaced(built.arguments, 4, np.array([60, 0, 2, 0]))))
        blind = np.r_[3:8, 8 : 12 if causal else 8, 14:17]
        np.testing.assert_array_equal(out[blind], 0)
        np.testing.assert_array_equal(lse[blind], -np.inf)
        assert_same_bits([out[:3], lse[:3]], [whole[0][:3], whole[1][:3]])
        assert np.isfinite(lse[12:14]).all() and np.abs(out[12:14]).min() > 0

    def test_tables_that_do_not_fit_at_once(self, monkeypatch):
        monkeypatch.setattr(tpu, "TABLE_BYTES", 4 * 8 * 2)  # two rows of eight entries
        self.check(dataclasses.replace(OPTIONS["plain"], seed=1, heads=2))

    # What needs other shapes is left to the whole suite.
    test_head_sizes = test_page_sizes_at_their_edges = test_decode_alone = test_a_window_in_an_array = None
    test_a_known_answer = test_known_means_at_page_edges = test_tables_wider_than_needed = None
    test_the_cap_comes_after_the_scale = test_a_window_holds_its_own_query = None
    test_the_default_scale_is_that_of_the_head_size = test_nor_do_quantised_slots = None
    test_a_window_reads_nothing_before_it = test_nor_on_the_shapes_of_its_batch = None
    test_a_prompt_in_chunks_is_the_prompt = test_parts_of_the_keys_join = None
    test_a_chunk_stands_behind_what_is_cached = test_any_rows = test_any_shapes = None


@pytest.mark.slow
class TestWholeSuite(WhereTaken, TpuSuite):
    """Everything, where the kernel takes it; skipped with its own words where it does not."""

    def fit(self, case: Case) -> Case:
        return case if case.size in (80, 96, 192) else super().fit(case)

    # In pages: with pages of 16, more of them would hold the queries' own tokens, which a prefix must not.
    @pytest.mark.parametrize("cut", [1, 2, 4])
    def test_parts_of_the_keys_join(self, cut):
        super().test_parts_of_the_keys_join(cut)


# --- without running anything ---------------------------------------------------------------------------------------


def make_call(rows: int = 4, columns: int = 8, **change) -> Call:
    """A call as the op makes it, of shapes only where an array would be large."""
    shape = change.pop("shape", (32, 8, 16, 128))  # N, K, B, D
    dtype = change.pop("dtype", "bfloat16")
    pages = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    fields = dict(
        q=jax.ShapeDtypeStruct((rows, 32, shape[3]), jnp.bfloat16),
        k_pages=pages,
        v_pages=pages,
        block_tables=jax.ShapeDtypeStruct((rows, columns), jnp.int32),
        kv_lens=jax.ShapeDtypeStruct((rows,), jnp.int32),
        query_starts=jax.ShapeDtypeStruct((rows + 1,), jnp.int32),
        v_width=shape[3],
        k_scale=None,
        v_scale=None,
        scale=0.1,
        causal=True,
        window=None,
        soft_cap=None,
        alibi_slopes=None,
        sinks=None,
        tree_mask=None,
        max_query_len=None,
    )
    return Call(**{**fields, **change})


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("page_size", [16, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v6 lite", "TPU7x"])
def test_what_it_must_do_is_not_refused(size, page_size, dtype, kind):
    with abstract_mesh(kind, "tpu"):
        assert tpu.refuses(make_call(shape=(64, 8, page_size, size), dtype=dtype)) is None


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tree_mask": jax.ShapeDtypeStruct((4, 1), jnp.uint32)}, "tree"),
        ({"shape": (32, 8, 16, 96)}, "head size"),
        ({"shape": (32, 8, 48, 128)}, "page size"),
        ({"shape": (32, 8, 2, 128), "dtype": "int8"}, "fill"),
        ({"dtype": "float16"}, "float16"),
        ({"v_width": 64}, "size of the keys"),
        ({"columns": 1 << 18}, "KiB"),
        ({"shape": (32, 512, 512, 128), "q": jax.ShapeDtypeStruct((4, 512, 128), jnp.bfloat16)}, "MiB of VMEM"),
    ],
)
def test_what_it_refuses_it_explains(change, reason):
    assert reason in tpu.refuses(make_call(**change))


@pytest.mark.parametrize(("kind", "fmt"), [("TPU v5 lite", BFLOAT16), ("TPU7x", ("float8_e4m3fn", "tensor"))])
def test_tuned_blocks_attend_rows_that_are_longer(kind, fmt):
    """The committed sizes, in the shape that they were found for: rows of more than a block, shorter ones, a chunk."""
    rows = ((1, 1500), (1, 40), (70, 1100))
    shape = {"heads": 32, "kv_heads": 8, "size": 128, "page_size": 128, "query_dtype": "bfloat16"}
    built = build(Case(rows, **shape, k_format=fmt, v_format=fmt))
    with abstract_mesh(kind, "tpu"), tpu_interpreter():
        out = jax.jit(lambda *a: paged_attention(*a, **built.options, implementation="tpu"))(*built.arguments)
    np.testing.assert_allclose(np.asarray(out, np.float64)[:72], built.out[:72], atol=0.01)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_a_v4_has_no_small_floats(dtype):
    with abstract_mesh("TPU v4", "tpu"):
        assert tpu.refuses(make_call(dtype=dtype)) == f"a v4 has no {dtype}; got it in k_pages"
        assert tpu.refuses(make_call(dtype="int8")) is None
    with abstract_mesh("TPU v5 lite", "tpu"):
        assert tpu.refuses(make_call(dtype=dtype)) is None


def test_blocks_shrink_until_they_fit():
    call = make_call(shape=(32, 64, 16, 128), q=jax.ShapeDtypeStruct((4, 64, 128), jnp.bfloat16))
    wanted = tpu_blocks.default(call, several=False)
    large = tpu_blocks.arrange(call, wanted, tpu_chip.DEFAULT)
    assert (large.block_tokens, large.depth) == (wanted.tokens, wanted.depth)
    small = tpu_blocks.arrange(call, wanted, dataclasses.replace(tpu_chip.DEFAULT, vmem_bytes=16 << 20))
    assert small.depth == 2 and small.block_tokens < wanted.tokens
    held = sum(tpu_blocks.padded_bytes(*buffer) for buffer in tpu_blocks.buffers(call, small).values())
    assert held <= 12 << 20


@pytest.mark.parametrize("sizes", [(3, 512, 4), (1, 500, 4), (1, 512, 1), (0, 512, 2)])
def test_bad_block_sizes_are_named(sizes):
    with pytest.raises(ValueError, match="Blocks"):
        Blocks(*sizes)


@pytest.mark.parametrize(("kind", "kernels"), [(None, 0), ("TPU v5 lite", 1), ("TPU7x", 1)])
def test_it_is_chosen_on_tpus_alone(kind, kernels):
    built = build(Case(((1, 9), (1, 20)), size=128, page_size=16, options={"max_query_len": 1}))
    with abstract_mesh(kind, "tpu") if kind else contextlib.nullcontext():
        traced = jax.jit(lambda *x: paged_attention(*x, max_query_len=1)).trace(*built.arguments)
    assert str(traced.jaxpr).count("pallas_call[") == kernels
