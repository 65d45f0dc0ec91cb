"""Paged attention against the float64 oracle, every implementation over one case base."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from pallas_kernels.paged_attention.api import IMPLEMENTATIONS, paged_attention
from tests.kernels.cases import FORMATS, MIXED, OPTIONS, PAGE_SIZES, SIZES, Case, build, edge_rows

TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 4e-3}


def check(case: Case, implementation: str) -> jax.Array:
    built = build(case)
    out, lse = paged_attention(*built.arguments, **built.options, return_lse=True, implementation=implementation)
    tolerance = TOLERANCE[case.query_dtype] * max(1.0, np.abs(built.out).max())
    np.testing.assert_allclose(np.asarray(out, np.float64), built.out, rtol=0, atol=tolerance)
    np.testing.assert_allclose(np.asarray(lse, np.float64), built.lse, rtol=1e-4, atol=1e-4)
    return out


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, implementation):
    check(OPTIONS[name], implementation)


@pytest.mark.parametrize("size", SIZES)
def test_head_sizes(size):
    check(Case(MIXED, size=size), "xla")


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_page_sizes_at_their_edges(page_size):
    check(Case(edge_rows(page_size), page_size=page_size), "xla")


@pytest.mark.parametrize("kind", FORMATS, ids=str)
def test_formats(kind):
    check(Case(MIXED, k_format=kind, v_format=kind), "xla")


@pytest.mark.parametrize("name", ["plain", "sinks", "window 4"])
def test_what_no_row_owns_changes_no_bit(name):
    outs = [
        check(dataclasses.replace(OPTIONS[name], filler=filler), "xla")
        for filler in (0.0, float("nan"), float("inf"), 1e30)
    ]
    for out in outs[1:]:
        np.testing.assert_array_equal(np.asarray(outs[0]), np.asarray(out))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window"),
        ({"soft_cap": 0.0}, "soft_cap"),
        ({"implementation": "cuda"}, "implementation"),
        ({"scale": float("nan")}, "scale"),
        ({"max_query_len": 0}, "max_query_len"),
        ({"sinks": np.zeros(3, np.float32)}, "sinks"),
    ],
)
def test_bad_arguments_are_named(change, message):
    built = build(OPTIONS["plain"])
    with pytest.raises((ValueError, TypeError), match=message):
        paged_attention(*built.arguments, **{**built.options, **change})
