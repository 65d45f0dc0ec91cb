"""page_copy everywhere: the reference, plain XLA, and what the op refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.page_copy.api import IMPLEMENTATIONS, copy_pages, put_pages, take_pages
from tests.kernels.page_copy_suite import PageCopySuite


class TestReference(PageCopySuite):
    implementation = "reference"


class TestXla(PageCopySuite):
    implementation = "xla"


@pytest.mark.parametrize("implementation", ["xla", "reference"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_derivatives(implementation, dtype):
    """What a page ends up in has the derivative of that page; what is overwritten has none."""
    pool = jnp.ones((1, 3, 1, 1), dtype)
    weights = jnp.asarray([1.0, 10.0, 100.0]).reshape(1, 3, 1, 1)
    ids = np.asarray([1, -1], np.int32)

    def copied(pool):
        return (copy_pages([pool], ids, ids - 1, implementation=implementation)[0] * weights).sum()

    def taken(pool):
        return take_pages([pool], ids, implementation=implementation)[0].sum()

    def put(pool, content):
        return (put_pages([pool], ids, [content], implementation=implementation)[0] * weights).sum()

    np.testing.assert_array_equal(jax.grad(copied)(pool).ravel(), [0, 11, 100])
    np.testing.assert_array_equal(jax.grad(taken)(pool).ravel(), [0, 1, 0])
    of_pool, of_content = jax.grad(put, (0, 1))(pool, jnp.ones((2, 1, 1, 1), dtype))
    np.testing.assert_array_equal(of_pool.ravel(), [1, 0, 100])
    np.testing.assert_array_equal(of_content.ravel(), [10, 0])


POOL = [np.zeros((2, 3, 1, 4), np.float32), np.zeros((2, 3, 1), np.int8)]
IDS = np.zeros(2, np.int32)
CONTENT = [np.zeros((2, 2, 1, 4), np.float32), np.zeros((2, 2, 1), np.int8)]


@pytest.mark.parametrize(
    ("function", "arguments", "error", "message"),
    [
        (copy_pages, (POOL[0], IDS, IDS), TypeError, "pool: must be a list or tuple of arrays; got ndarray"),
        (copy_pages, ([], IDS, IDS), ValueError, "pool: must have at least one; got no array"),
        (copy_pages, ([1], IDS, IDS), TypeError, r"pool\[0\]: must be an array; got int"),
        (copy_pages, ([np.zeros((2, 3))], IDS, IDS), ValueError, r"pool\[0\]: must be \[L,N,...\]"),
        (copy_pages, ([np.zeros((2, 0, 3))], IDS, IDS), ValueError, r"pool\[0\]: must be .* without an empty axis"),
        (copy_pages, ([POOL[0], np.zeros((2, 4, 1))], IDS, IDS), ValueError, r"pool\[1\]: must have the layers and"),
        (copy_pages, (POOL, IDS, IDS[:1]), ValueError, "destinations: must be as long as sources; got lengths 2 and 1"),
        (copy_pages, (POOL, IDS.astype(np.int64), IDS), TypeError, "sources: dtype must be one of int32; got int64"),
        (take_pages, (POOL, IDS[None]), ValueError, "ids: must have 1 axes"),
        (put_pages, (POOL, IDS, CONTENT[:1]), ValueError, "content: must have one for each of 2; got 1 arrays"),
        (put_pages, (POOL, IDS[:1], CONTENT), ValueError, r"content\[0\]: must be \[C,L,...\] .* = \(1, 2, 1, 4\)"),
        (put_pages, (POOL, IDS, CONTENT[::-1]), TypeError, r"content\[0\]: dtype must be one of float32; got int8"),
    ],
)
def test_bad_arguments_are_named(function, arguments, error, message):
    with pytest.raises(error, match=message):
        function(*arguments)


def test_the_table_ends_with_what_refuses_nothing():
    assert list(IMPLEMENTATIONS)[-2:] == ["xla", "reference"]
