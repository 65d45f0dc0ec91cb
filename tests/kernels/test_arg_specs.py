"""Named calls are calls: their shapes fit together, their bytes are counted right, and bad ones are refused."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import bench
from pallas_kernels.paged_attention.arg_specs import ARG_SPECS, FIGURE_18A, SMALL, ArgSpec, small
from pallas_kernels.pages import PageFormat

ROWS = ((1, 40), (3, 17))


def called(spec: ArgSpec, arrays: bench.Arrays):
    """What the call gives, compiled as one program."""
    return jax.jit(lambda arrays: spec.call(arrays, "xla"))(arrays)


def test_names_say_what_is_where():
    assert all(name == spec.name for name, spec in ARG_SPECS.items())
    assert {f"decode_{count}x{length}" for count in (8, 64, 256) for length in (1024, 4096, 16384)} <= ARG_SPECS.keys()
    assert [(len(spec.rows), spec.rows[0][1]) for spec in FIGURE_18A] == [
        (count, length) for count in (8, 32) for length in (64, 128, 256)
    ]


@pytest.mark.parametrize("name", [*(spec.name for spec in SMALL), "decode_256x16384", "mixed", "verify_64x5"])
def test_a_spec_is_a_call(name):
    spec = ARG_SPECS[name]
    out = jax.eval_shape(lambda arrays: spec.call(arrays, "xla"), spec.shapes())
    assert (out.shape, out.dtype) == ((spec.num_tokens, spec.heads, spec.size), spec.query)


def test_every_option_reaches_the_call():
    formats = {"k": PageFormat("int8", "token"), "v": PageFormat("int4", "head")}
    options = {"window": 5, "soft_cap": 20.0, "sinks": True, "alibi": True, "lse": True}
    spec = ArgSpec("all", ROWS, heads=4, kv_heads=2, size=16, page_size=8, query="float32", **formats, **options)
    arrays = bench.make_arrays(spec)
    plain, lse = called(spec, arrays)
    assert lse.shape == (4, 4)
    for name in ("window", "soft_cap", "sinks", "alibi"):
        other = dataclasses.replace(spec, **{name: False if options[name] is True else None})
        kept = {key: x for key, x in arrays.items() if key in other.shapes()}
        assert not np.array_equal(plain, called(other, kept)[0]), f"{name} changes nothing"
    tree = dataclasses.replace(spec, tree=True).shapes()["tree_mask"]
    assert (tree.shape, tree.dtype) == ((4, 1), "uint32")


def test_bytes_that_a_call_reads():
    tokens = 2 * 1000 + 300
    rows = ((1, 1000), (1, 1000), (200, 300), (0, 77))  # nobody asks for the last row
    assert ArgSpec("a", rows).read_bytes == 2 * 2 * 8 * 128 * tokens
    mixed = ArgSpec("b", rows, k=PageFormat("int8", "token"), v=PageFormat("int4", "head"))
    assert mixed.read_bytes == tokens * 8 * (128 + 4 + 64)
    assert ArgSpec("c", rows, window=50).read_bytes == 2 * 2 * 8 * 128 * (50 + 50 + 249)
    assert ArgSpec("d", rows, window=5000).read_bytes == ArgSpec("a", rows).read_bytes


def test_made_arrays_are_what_the_spec_says():
    rows = ((1, 700), (1, 1), (40, 90), (5, 5))
    spec = dataclasses.replace(small(ArgSpec("a", rows)), k=PageFormat("float8_e4m3fn", "token"))
    arrays, shapes = bench.make_arrays(spec), spec.shapes()
    assert {name: (x.shape, x.dtype) for name, x in arrays.items()} == {
        name: (x.shape, x.dtype) for name, x in shapes.items()
    }
    used = [arrays["block_tables"][row, : -(-length // 16)] for row, (_, length) in enumerate(spec.rows)]
    used = np.concatenate(used)
    assert sorted(used) == list(range(spec.num_pages)), "each page belongs to one row"
    assert not np.array_equal(used, np.sort(used)), "in random order"
    in_order = bench.make_arrays(spec, shuffled=False)["block_tables"]
    assert np.array_equal(in_order[0, :3], [0, 1, 2])


def test_paged_and_contiguous_agree():
    """Figure 18a compares two calls that give the same, since their rows hold the same tokens."""
    paged = small(FIGURE_18A[0])
    whole = bench.contiguous(paged)
    assert (whole.page_size, whole.table_width) == (64, 1)
    arrays = bench.make_arrays(paged)
    order = np.asarray(arrays["block_tables"])
    moved = dict(arrays, block_tables=jnp.arange(8, dtype=jnp.int32)[:, None])
    for name in ("k_pages", "v_pages"):
        pages = np.asarray(arrays[name])[order]  # [S,P,K,B,D]
        moved[name] = jnp.asarray(pages.swapaxes(1, 2).reshape(8, paged.kv_heads, 64, paged.size))
    got, want = called(whole, moved), called(paged, arrays)
    assert np.allclose(got, want, atol=1e-5)
    with pytest.raises(ValueError, match="must have one length"):
        bench.contiguous(ARG_SPECS["mixed"])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_op_of_jax_gets_the_same_call():
    """In the interpreter, on what ours takes: a wrong layout or scale would make it a faster but other thing."""
    spec = small(ArgSpec("a", ((1, 250),)))
    arrays = bench.make_arrays(spec)
    assert bench.why_not_jax(spec) is None
    step, theirs = bench.jax_op(spec, arrays, interpret=True)
    assert np.allclose(step(theirs["q"], theirs), called(spec, arrays), atol=1e-5)
    assert bench.why_not_jax(ARG_SPECS["mixed"]) is not None
    assert bench.why_not_jax(dataclasses.replace(spec, window=9)) is not None


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"rows": ()}, "rows: bad must have a row; got none"),
        ({"rows": ((5, 4),)}, "rows: a row's queries must be among its tokens; got 5 of 4 in bad"),
        ({"heads": 10, "kv_heads": 4}, "heads: must be a multiple of kv_heads; got 10 and 4 in bad"),
    ],
)
def test_bad_specs_are_refused(change, rule):
    with pytest.raises(ValueError, match=rule):
        dataclasses.replace(ArgSpec("bad", ROWS), **change)
