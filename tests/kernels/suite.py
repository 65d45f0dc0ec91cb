"""What every implementation of paged attention must do, as one class that each of them subclasses."""

from __future__ import annotations

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_kernels.paged_attention.api import merge_states, paged_attention
from tests.kernels.cases import (
    DECODE,
    FILLERS,
    FORMATS,
    MIXED,
    OPTIONS,
    PAGE_SIZES,
    SIZES,
    Built,
    Case,
    build,
    edge_rows,
    select,
)

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}

Arrays = tuple[np.ndarray, np.ndarray]


@functools.cache
def compiled(implementation: str | None, statics: tuple) -> jax.stages.Wrapped:
    """The op under jit; cases of the same shapes and options share one."""

    def run(arguments: tuple, arrays: dict) -> tuple[jax.Array, jax.Array]:
        return paged_attention(*arguments, **arrays, **dict(statics), return_lse=True, implementation=implementation)

    return jax.jit(run)


class AttentionSuite:
    """Every test of the op. A subclass named ``Test...`` sets ``implementation`` and overrides only what it must.

    Attributes:
        implementation: a name in ``IMPLEMENTATIONS``.
        tolerance: largest error per dtype of the queries, times the largest output (at least 1).
        examples: of each property; fewer where a compile or an interpreter is slow.
    """

    implementation: str | None = None
    tolerance = TOLERANCE
    examples = 20

    def reason_to_skip(self, case: Case) -> str | None:
        """Why this implementation is not run on a case, or None."""
        del case
        return None

    def fit(self, case: Case) -> Case:
        """The case in a shape that this implementation does natively: a larger head, or page, say."""
        return case

    def run(self, built: Built) -> Arrays:
        """Output and log-sum-exp of a call. An interpreter wraps this."""
        arrays = {name: x for name, x in built.options.items() if isinstance(x, jax.Array)}
        statics = tuple(sorted((name, x) for name, x in built.options.items() if name not in arrays))
        out, lse = compiled(self.implementation, statics)(built.arguments, arrays)
        return np.asarray(out), np.asarray(lse)

    def built(self, case: Case) -> Built:
        """Arguments and right answer of the case as this implementation takes it; skips where it does not."""
        case = self.fit(case)
        reason = self.reason_to_skip(case)
        if reason is not None:
            pytest.skip(reason)
        return build(case)

    def check(self, case: Case) -> Arrays:
        """Runs a case and holds it against the oracle."""
        built = self.built(case)
        out, lse = self.run(built)
        tolerance = self.tolerance[case.query_dtype]
        scale = max(1.0, np.abs(built.out).max(initial=0.0))
        np.testing.assert_allclose(out.astype(np.float64), built.out, rtol=0, atol=tolerance * scale)
        lse_tolerance = max(1e-4, tolerance)
        np.testing.assert_allclose(lse.astype(np.float64), built.lse, rtol=lse_tolerance, atol=lse_tolerance)
        return out, lse

    # --- against the oracle ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", OPTIONS)
    def test_options(self, name):
        self.check(OPTIONS[name])

    @pytest.mark.parametrize("size", SIZES)
    def test_head_sizes(self, size):
        self.check(Case(MIXED, size=size))

    @pytest.mark.parametrize("page_size", PAGE_SIZES)
    def test_page_sizes_at_their_edges(self, page_size):
        self.check(Case(edge_rows(page_size), page_size=page_size))

    @pytest.mark.parametrize("kind", FORMATS, ids=str)
    def test_formats(self, kind):
        """Each format as keys, and the one after it in the list as values."""
        other = FORMATS[(FORMATS.index(kind) + 1) % len(FORMATS)]
        self.check(Case(MIXED, k_format=kind, v_format=other))

    @pytest.mark.parametrize("option", [{}, {"window": 70}], ids=["plain", "window"])
    def test_decode_alone(self, option):
        self.check(Case(DECODE, options={"max_query_len": 1, **option}))

    @pytest.mark.parametrize("window", [None, 0, -3, 1, 5, 2**31 - 1])
    def test_a_window_in_an_array(self, window):
        """As layers under a scan have it; below 1 it is none."""
        built = self.built(Case(MIXED, options={} if window is None or window < 1 else {"window": window}))
        built.options["window"] = jnp.int32(0 if window is None else window)
        out, _ = self.run(built)
        np.testing.assert_allclose(out, built.out, rtol=0, atol=self.tolerance["float32"])

    # --- known answers ---------------------------------------------------------------------------------------------

    def numbers(self, case: Case) -> Arrays:
        """Lane 0 of head 0 of the output, and the log-sum-exp of head 0, after the oracle has agreed."""
        out, lse = self.check(dataclasses.replace(case, padding=0))
        return out[:, 0, 0], lse[:, 0]

    @pytest.mark.parametrize("count", [1, 5])
    def test_a_known_answer(self, count):
        given = 1.0, (0.0, 1.0, 2.0, 3.0, 4.0), (1.0, 2.0, 3.0, 4.0, 5.0)
        out, lse = self.numbers(Case(((count, 5),), given=given, options={"scale": 1.0}))
        np.testing.assert_allclose([out[-1], lse[-1]], [4.4519416, 4.4519144], rtol=1e-5)

    @pytest.mark.parametrize("page_size", [1, 8, 16, 128])
    def test_known_means_at_page_edges(self, page_size):
        rows = tuple((1, length) for length in (0, 1, 15, 16, 17, 32))
        given = 0.0, (0.0,) * 32, tuple(range(32))
        out, lse = self.numbers(Case(rows, page_size=page_size, given=given))
        np.testing.assert_allclose(out, [0, 0, 7, 7.5, 8, 15.5], rtol=1e-6)
        np.testing.assert_allclose(lse, [-np.inf, 0, 2.708050, 2.772589, 2.833213, 3.465736], rtol=1e-5, atol=1e-6)

    @pytest.mark.parametrize("spare", [0, 2, 6, 128])
    def test_tables_wider_than_needed(self, spare):
        given = 0.0, (0.0,) * 16, tuple(range(16))
        out, _ = self.numbers(Case(((1, 16),), page_size=16, spare=spare, given=given))
        np.testing.assert_allclose(out, [7.5], rtol=1e-6)

    @pytest.mark.parametrize(("soft_cap", "answer"), [(5.0, 1.4585787), (None, 1.1193181)])
    @pytest.mark.parametrize("count", [1, 3])
    def test_the_cap_comes_after_the_scale(self, soft_cap, answer, count):
        given = 1.0, (80.0, 64.0, 0.0), (1.0, 2.0, 4.0)
        out, _ = self.numbers(Case(((count, 3),), given=given, options={"scale": 0.125, "soft_cap": soft_cap}))
        np.testing.assert_allclose(out[-1], answer, rtol=1e-5)

    def test_a_window_holds_its_own_query(self):
        given = 0.0, (0.0,) * 41, tuple(range(41))
        rows = tuple((1, position + 1) for position in (18, 19, 20, 31, 32, 40))
        out, _ = self.numbers(Case(rows, page_size=16, given=given, options={"window": 20}))
        np.testing.assert_allclose(out, [9, 9.5, 10.5, 21.5, 22.5, 30.5], rtol=1e-6)
        out, _ = self.numbers(Case(((2, 10),), given=given, options={"window": 4}))
        np.testing.assert_allclose(out, [6.5, 7.5], rtol=1e-6)

    def test_a_chunk_stands_behind_what_is_cached(self):
        given = 0.0, (0.0,) * 8, tuple(range(8))
        out, _ = self.numbers(Case(((3, 8),), given=given))
        np.testing.assert_allclose(out, [2.5, 3.0, 3.5], rtol=1e-6)

    def test_the_default_scale_is_that_of_the_head_size(self):
        """A head of 96 padded to 128 lanes would divide by the wrong root."""
        case = Case(((1, 2),), size=96, given=(1.0, (96.0, 86.4), (0.0, 1.0)))
        assert self.fit(case).size == 96
        out, _ = self.numbers(case)
        np.testing.assert_allclose(out, 0.2729323, rtol=1e-5)

    # --- bits ------------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("name", ["plain", "window 4", "tree", "sinks"])
    def test_what_no_row_owns_changes_no_bit(self, name):
        first = None
        for filler in FILLERS:
            for v_filler in FILLERS if filler == 0.0 else (0.0, filler):
                case = dataclasses.replace(OPTIONS[name], filler=filler, v_filler=v_filler)
                got = self.check(case)
                first = first or got
                assert_same_bits(got, first)

    @pytest.mark.parametrize("kind", [("float8_e4m3fn", "token"), ("int8", "token"), ("int4", "head")], ids=str)
    def test_nor_do_quantised_slots(self, kind):
        runs = [self.check(Case(MIXED, k_format=kind, v_format=kind, filler=filler)) for filler in FILLERS]
        for got in runs[1:]:
            assert_same_bits(got, runs[0])

    def test_a_window_reads_nothing_before_it(self):
        """Pages that a window has left may be freed."""
        built = self.built(Case(((1, 64), (6, 70)), options={"window": 5}, spare=0))
        first = self.run(built)
        tables = np.asarray(built.arguments[3]).copy()
        tables[:, : 64 // self.fit(Case(MIXED)).page_size - 3] = -1
        got = self.run(dataclasses.replace(built, arguments=replaced(built.arguments, 3, tables)))
        assert_same_bits(got, first)

    @pytest.mark.parametrize("name", ["plain", "window 33", "all"])
    def test_a_row_does_not_depend_on_its_batch(self, name):
        built = self.built(dataclasses.replace(OPTIONS[name], padding=3))
        whole = self.run(built)
        starts = np.asarray(built.arguments[5])
        counts = np.diff(starts)
        rows = len(counts)
        for chosen in ([6], [5], [8, 7, 6, 5, 4, 3, 2, 1, 0], [5, 1, 6]):
            part = select(built, [(row, 0, counts[row]) for row in chosen], rows)
            index = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in chosen])
            got = self.run(part)
            assert_same_bits([x[: len(index)] for x in got], [x[index] for x in whole])

    def test_nor_on_the_shapes_of_its_batch(self):
        built = self.built(OPTIONS["plain"])
        whole = self.run(built)
        starts = np.asarray(built.arguments[5])
        for row in (5, 6):
            count = starts[row + 1] - starts[row]
            got = self.run(select(built, [(row, 0, count)], rows=1, tokens=count))
            assert_same_bits(got, [x[starts[row] : starts[row + 1]] for x in whole])

    def test_a_poisoned_row_harms_no_other(self):
        built = self.built(Case(MIXED))
        whole = self.run(built)
        starts = np.asarray(built.arguments[5])
        query = np.array(built.arguments[0])
        query[starts[5] : starts[6]] = np.nan
        got = self.run(dataclasses.replace(built, arguments=replaced(built.arguments, 0, query)))
        others = np.ones(len(query), bool)
        others[starts[5] : starts[6]] = False
        assert_same_bits([x[others] for x in got], [x[others] for x in whole])

    # --- parts of rows, and joined rows ----------------------------------------------------------------------------

    @pytest.mark.parametrize("chunks", [(1, 36), (16, 21), (15, 1, 21), (1,) * 37], ids=str)
    def test_a_prompt_in_chunks_is_the_prompt(self, chunks):
        built = self.built(Case(((37, 37),), padding=0))
        first = 0
        for count in chunks:
            part = select(built, [(0, first, count)])
            out, _ = self.run(part)
            np.testing.assert_allclose(out, part.out, rtol=0, atol=self.tolerance["float32"])
            first += count

    @pytest.mark.parametrize("cut", [1, 9, 17])
    def test_parts_of_the_keys_join(self, cut):
        """A shared prefix: its keys in one call, without a mask, and the rest in another."""
        case = Case(((1, 80), (3, 75)), options={"causal": False}, padding=0)
        built, plain = self.built(case), self.built(dataclasses.replace(case, options={}))
        slots = self.fit(case).page_size
        tables, lengths = np.asarray(built.arguments[3]), np.asarray(built.arguments[4])
        prefix = replaced(built.arguments, 4, np.minimum(lengths, cut * slots).astype(np.int32))
        rest = np.concatenate([tables[:, cut:], np.full((2, cut), -1, np.int32)], axis=1)
        suffix = replaced(replaced(plain.arguments, 3, rest), 4, np.maximum(lengths - cut * slots, 0).astype(np.int32))
        parts = [
            self.run(dataclasses.replace(built, arguments=prefix)),
            self.run(dataclasses.replace(plain, arguments=suffix)),
        ]
        out, lse = merge_states(*(np.stack(x) for x in zip(*parts, strict=True)))
        np.testing.assert_allclose(out, plain.out, rtol=0, atol=self.tolerance["float32"])
        np.testing.assert_allclose(lse, plain.lse, rtol=1e-4, atol=1e-4)

    # --- properties ------------------------------------------------------------------------------------------------

    @pytest.mark.parametrize("option", [{}, {"window": 11, "soft_cap": 2.0}], ids=["plain", "window and cap"])
    def test_any_rows(self, option):
        """Rows of any kind in one compiled shape."""

        @hypothesis.settings(max_examples=self.examples)
        @hypothesis.given(rows=st.lists(row_strategy(), max_size=6), seed=st.integers(0, 2**16))
        def holds(rows, seed):
            tokens = 40 - sum(count for count, _ in rows)
            hypothesis.assume(tokens >= 0)
            rows = (*rows, *((0, 0),) * (6 - len(rows)))
            page = self.fit(Case(())).page_size
            spare = 120 // page + 1 - max(-(-length // page) for _, length in rows)
            self.check(Case(rows, padding=tokens, spare=spare, pages=6 * (120 // page + 1), options=option, seed=seed))

        holds()

    def test_any_shapes(self):
        @hypothesis.settings(max_examples=max(1, self.examples // 3))
        @hypothesis.given(
            rows=st.lists(row_strategy(), min_size=1, max_size=4),
            kv_heads=st.integers(1, 4),
            groups=st.integers(1, 9),
            size=st.integers(1, 40).map(lambda half: 2 * half),
            page_size=st.integers(1, 40),
            formats=st.tuples(st.sampled_from(FORMATS), st.sampled_from(FORMATS)),
            seed=st.integers(0, 2**16),
        )
        def holds(rows, kv_heads, groups, size, page_size, formats, seed):
            self.check(
                Case(
                    tuple(rows),
                    heads=kv_heads * groups,
                    kv_heads=kv_heads,
                    size=size,
                    page_size=page_size,
                    k_format=formats[0],
                    v_format=formats[1],
                    seed=seed,
                )
            )

        holds()


def row_strategy() -> st.SearchStrategy[tuple[int, int]]:
    """(queries, tokens) of a row: decoding, a short chunk or a longer one, of up to 120 tokens."""
    return st.integers(0, 120).flatmap(
        lambda length: st.tuples(st.one_of(st.just(min(1, length)), st.integers(0, min(length, 12))), st.just(length))
    )


def replaced(arguments: tuple, index: int, value: np.ndarray) -> tuple:
    """The arguments with one of them exchanged, in its own dtype."""
    value = jnp.asarray(value, arguments[index].dtype)
    return (*arguments[:index], value, *arguments[index + 1 :])


def assert_same_bits(got: Arrays | list[np.ndarray], want: Arrays | list[np.ndarray]) -> None:
    """Output and log-sum-exp agree bit for bit."""
    for one, other in zip(got, want, strict=True):
        np.testing.assert_array_equal(one.view(np.uint8), other.view(np.uint8))


class WhereTaken(AttentionSuite):
    """Skips a call that the implementation refuses, with its own words."""

    def run(self, built: Built) -> Arrays:
        try:
            return super().run(built)
        except ValueError as error:
            if f"{self.implementation} cannot do this call" in str(error):
                pytest.skip(str(error))
            raise
