"""The pool of pages: what is written is read, what is out of range is dropped, what moves keeps its bits."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.pages import PageFormat
from paxkv.cache.layout import PageLayout
from paxkv.cache.pages import copy_pages, gather, init, swap_in, swap_out, write
from tests.cache.pools import (
    FORMATS,
    HEAD_SIZE,
    KINDS,
    KV_HEADS,
    LAYERS,
    OUTSIDE,
    assert_same_bits,
    bits,
    empty,
    full,
    jitted_write,
    layout_of,
    rows,
    static_scales,
)

jitted_gather, jitted_copy = jax.jit(gather), jax.jit(copy_pages)
jitted_out, jitted_in = jax.jit(swap_out), jax.jit(swap_in)

FLOAT_STEPS = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11, "e4m3": 2.0**-4, "e5m2": 2.0**-3}
"""Half the distance to the next number, as a share of the number; integers have theirs from the scale."""


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_written_is_read(name):
    k, v = rows(7)
    slots = np.asarray([20, 21, 22, 23, 8, 9, 10])  # page 5, then page 2
    pages = jitted_write(empty(name), 1, k, v, slots)
    for want, got in zip((k, v), jitted_gather(pages, 1, np.asarray([5, 2])), strict=True):
        kind, _, scaled = name.partition(" per ")
        if kind in FLOAT_STEPS:
            bound = FLOAT_STEPS[kind] * np.abs(want) + (2.0**-10 if kind == "e4m3" else 1e-7)
        else:
            largest = np.abs(want).max(-1, keepdims=True) if scaled == "token" else 4.0
            bound = 0.5001 * largest / (127 if kind == "int8" else 7)
        assert (np.abs(np.asarray(got[:7]) - want) <= bound).all()
    assert not np.asarray(jitted_gather(pages, 0, np.asarray([5, 2]))[0]).any()


def test_formats_of_keys_and_values_are_apart():
    layout = PageLayout(1, 3, 4, 2, 8, k_format=PageFormat("bfloat16"), v_format=PageFormat("int8", "token"))
    k, v = rows(4)
    pages = write(init(layout), 0, k, v, np.arange(4))
    assert (pages.k.dtype, pages.v.dtype, pages.k_scale) == (jnp.bfloat16, jnp.int8, None)
    got = gather(pages, 0, np.asarray([0]))
    np.testing.assert_array_equal(got[0], jnp.asarray(k, jnp.bfloat16).astype(jnp.float32))
    np.testing.assert_allclose(got[1], v, atol=0.5 / 127 * np.abs(v).max())


def test_a_latent_has_no_values():
    """MLA stores one array, of another width than the heads that are made from it."""
    layout = PageLayout(2, 3, 4, 1, 24, v_head_size=0, k_format=PageFormat("bfloat16"))
    latent = np.random.default_rng(0).normal(size=(3, 1, 24)).astype(np.float32)
    pages = write(init(layout), 1, latent, None, np.asarray([4, 5, -1]))
    assert pages.v is None
    k, v = gather(pages, 1, np.asarray([1]))
    np.testing.assert_array_equal(k[:2], jnp.asarray(latent[:2], jnp.bfloat16).astype(jnp.float32))
    assert v is None
    content = swap_out(copy_pages(pages, np.asarray([1]), np.asarray([0])), np.asarray([0]))
    assert_same_bits(swap_in(init(layout), np.asarray([1]), content), pages)
    with pytest.raises(ValueError, match="this pool stores no values: give v=None"):
        write(pages, 1, latent, latent, np.arange(3))


# --- out of range: dropped or blank, never another page (public fault B24) --------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_slots_out_of_range_are_dropped(name):
    """A pool of 4 pages of 2; slots -1, 3 and 8 are padding, real and past the end."""
    before = full(name, num_pages=4, page_size=2)
    kept = bits(before)
    slots = np.asarray([-1, 3, 8, *OUTSIDE])
    after = jitted_write(before, 0, *rows(len(slots), seed=9), slots)
    for old, new in zip(kept, bits(after), strict=True):
        if old.shape[1] == 4:  # not a static scale
            changed = np.argwhere((new != old).reshape(*old.shape[:3], 2, -1).any((2, 4)))
            assert changed.tolist() == [[0, 1, 1]]
    kept = jax.tree.map(np.array, after)
    for layer in (LAYERS, *OUTSIDE):
        after = jitted_write(after, np.int32(layer), *rows(len(slots)), np.arange(len(slots)))
        assert_same_bits(after, kept)


@pytest.mark.parametrize("name", KINDS)
def test_pages_out_of_range_are_nowhere(name):
    """Every function that takes page ids: what is outside reads as nothing and is written nowhere."""
    pages = full(name)
    ids = np.asarray([2, 6, *OUTSIDE, 5])
    real = np.asarray([True, False, False, False, False, True])
    k, v = jitted_gather(pages, 1, ids)
    want = jitted_gather(pages, 1, np.asarray([2, 5]))
    for side, some in zip((k, v), want, strict=True):
        side = np.asarray(side).reshape(len(ids), 4, KV_HEADS, HEAD_SIZE)
        assert np.isnan(side[~real]).all()
        np.testing.assert_array_equal(side[real], np.asarray(some).reshape(2, 4, KV_HEADS, HEAD_SIZE))
    for layer in (LAYERS, *OUTSIDE):
        assert np.isnan(jitted_gather(pages, np.int32(layer), ids)[0]).all()

    content = jitted_out(pages, ids)
    for whole, leaf in zip(_paged_bits(pages), bits(content), strict=True):
        assert not leaf[~real].any()
        np.testing.assert_array_equal(np.moveaxis(leaf[real], 0, 1), whole[:, [2, 5]])
    for there, back in (([0, 6, *OUTSIDE, 1], [0, 1]), ([-1, 6, *OUTSIDE, -6], [])):
        after = jitted_in(pages, np.asarray(there), content)
        for old, new in zip(_paged_bits(pages), _paged_bits(after), strict=True):
            want = old.copy()
            want[:, back] = old[:, [2, 5][: len(back)]]
            np.testing.assert_array_equal(new, want)

    src, dst = np.asarray([0, 1, 6, -1, *OUTSIDE, 2, 3, 4]), np.asarray([1, 0, 2, 3, *[4] * 3, 6, -1, -6])
    after = jitted_copy(pages, src, dst)
    for old, new in zip(_paged_bits(pages), _paged_bits(after), strict=True):
        want = old.copy()
        want[:, [1, 0]] = old[:, [0, 1]]
        np.testing.assert_array_equal(new, want)


def _paged_bits(pages) -> list[np.ndarray]:
    """Bits of the leaves that have pages; static scales have none."""
    return [leaf for leaf in bits(pages) if leaf.shape[1] == pages.layout.num_pages]


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.uint32, np.uint8])
def test_ids_of_other_integers(dtype):
    """An unsigned -1 is no page either."""
    pages = full("float32")
    missing = np.asarray(-1).astype(dtype)
    after = jitted_copy(pages, np.asarray([0, missing], dtype), np.asarray([1, 2], dtype))
    np.testing.assert_array_equal(after.k[:, 1], pages.k[:, 0])
    np.testing.assert_array_equal(after.k[:, 2:], pages.k[:, 2:])
    k, _ = jitted_gather(pages, 0, np.asarray([3, missing], dtype))
    np.testing.assert_array_equal(np.isnan(k).any((1, 2)), [False] * 4 + [True] * 4)
    np.testing.assert_array_equal(jitted_out(pages, np.asarray([missing], dtype)).k, 0 * pages.k[:, :1].swapaxes(0, 1))


@pytest.mark.parametrize("name", ["float32", "e4m3 per token"])
def test_nothing_to_do_is_nothing(name):
    """No token, no page: shapes of zero."""
    pages, none = full(name), np.zeros(0, np.int32)
    assert_same_bits(write(pages, 0, *rows(0), none), pages)
    assert_same_bits(copy_pages(pages, none, none), pages)
    content = swap_out(pages, none)
    assert content.k.shape == (0, LAYERS, KV_HEADS, 4, HEAD_SIZE)
    assert_same_bits(swap_in(pages, none, content), pages)
    assert gather(pages, 0, none)[0].shape == (0, KV_HEADS, HEAD_SIZE)


# --- moving ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_copies_read_all_sources_before_any_is_written(name):
    """A chain, a swap, one source for several, a page onto itself; padding between and behind."""
    pages = full(name, num_pages=8)
    src, dst = np.asarray([0, 1, -1, 2, 3, 3, 7, -1]), np.asarray([1, 2, 5, 0, 4, 5, 7, -1])
    after = jitted_copy(pages, src, dst)
    for old, new in zip(_paged_bits(pages), _paged_bits(after), strict=True):
        want = old.copy()
        want[:, [1, 2, 0, 4, 5, 7]] = old[:, [0, 1, 2, 3, 3, 7]]
        np.testing.assert_array_equal(new, want)


@pytest.mark.parametrize("name", KINDS)
def test_any_bits_move_unchanged(name):
    """Bytes that are no number that the format writes: NaN with any payload, infinities, negative zeros."""
    pages = empty(name, num_pages=4)
    draw = np.random.default_rng(0)

    def anything(leaf):
        if leaf.shape[1] != 4:
            return leaf
        return jnp.asarray(draw.integers(0, 256, leaf.nbytes, np.uint8).view(leaf.dtype).reshape(leaf.shape))

    pages = jax.tree.map(anything, pages)
    before = _paged_bits(pages)
    after = jitted_copy(pages, np.asarray([3, 0]), np.asarray([0, 3]))
    for old, new in zip(before, _paged_bits(after), strict=True):
        np.testing.assert_array_equal(new, old[:, [3, 1, 2, 0]])
    back = jitted_in(after, np.asarray([1, 2]), jitted_out(after, np.asarray([2, 1])))
    for old, new in zip(before, _paged_bits(back), strict=True):
        np.testing.assert_array_equal(new, old[:, [3, 2, 1, 0]])


# --- making and refusing --------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_those_of_the_arrays_and_every_leaf_is_its_own(name):
    pages = empty(name)
    leaves = jax.tree.leaves(pages)
    assert pages.layout.bytes == sum(leaf.nbytes for leaf in leaves)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    paged = sum(leaf.nbytes for leaf in leaves if leaf.shape[1] == 6)
    assert pages.layout.bytes_per_token == paged / pages.layout.num_slots


@pytest.mark.parametrize("name", FORMATS)
def test_a_fill_is_what_unwritten_slots_read_as(name):
    layout = layout_of(name)
    pages = init(layout, fill=-2.0, **static_scales(layout))
    got = np.asarray(jitted_gather(pages, 0, np.asarray([2, 5]))[1])
    np.testing.assert_allclose(got, -2.0, atol=2 / 7 if name == "int4 per head" else 0.02)
    leaves = jax.tree.leaves(pages)
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)


def test_a_fill_of_nan():
    for name in ("float32", "bfloat16", "e4m3", "int8 per token"):
        assert np.isnan(gather(init(layout_of(name), fill=float("nan")), 1, np.asarray([0]))[0]).all()
    with pytest.raises(ValueError, match="cannot hold a NaN fill"):
        init(layout_of("int8 per tensor"), fill=float("nan"), k_scale=1, v_scale=1)


@pytest.mark.parametrize("shape", [(), (1,), (LAYERS, 1)])
def test_static_scales_broadcast(shape):
    for name in ("e5m2 per head", "int8 per tensor"):
        layout = layout_of(name)
        given = np.full(shape if "head" in name else shape[:1] or (), 0.5, np.float32)
        pages = init(layout, k_scale=given, v_scale=2.0)
        assert pages.k_scale.shape == layout.scale_shape(layout.k_format)
        np.testing.assert_array_equal(pages.k_scale, 0.5)
        np.testing.assert_array_equal(pages.v_scale, 2.0)


@pytest.mark.parametrize(
    ("name", "scales", "message"),
    [
        ("float32", {"k_scale": 1.0}, "has no static scale; leave it out"),
        ("int8 per token", {"v_scale": 1.0}, "has no static scale; leave it out"),
        ("int8 per tensor", {"k_scale": 1.0}, "has a static scale: give v_scale"),
        ("int8 per tensor", {"k_scale": 0.0, "v_scale": 1.0}, "must be positive, finite and no subnormal, got"),
        ("int8 per tensor", {"k_scale": -1.0, "v_scale": 1.0}, "must be positive"),
        ("int8 per tensor", {"k_scale": float("nan"), "v_scale": 1.0}, "must be positive"),
        ("int8 per tensor", {"k_scale": float("inf"), "v_scale": 1.0}, "must be positive"),
        ("int8 per tensor", {"k_scale": 1e-40, "v_scale": 1.0}, "must be positive"),
        ("int4 per head", {"k_scale": [1.0] * 3, "v_scale": 1.0}, r"broadcast to \[2, 2\], got \(3,\)"),
    ],
)
def test_init_refuses(name, scales, message):
    with pytest.raises(ValueError, match=message):
        init(layout_of(name), **scales)


def test_shapes_that_do_not_fit_are_refused():
    pages = empty("bfloat16")
    k, v = rows(3)
    for given, message in (
        ((2, k, v, np.arange(3)), r"layer must lie in 0\.\.1, got 2"),
        ((-1, k, v, np.arange(3)), r"layer must lie in 0\.\.1, got -1"),
        ((0, k, None, np.arange(3)), "this pool stores values: give v, got None"),
        ((0, k, v, np.arange(4)), r"k must be \[T,K,D\] = \[4, 2, 8\] for this pool and its slots, got \[3, 2, 8\]"),
        ((0, k, v[:, :1], np.arange(3)), r"v must be \[T,K,D\] = \[3, 2, 8\]"),
        ((0, k, v, np.arange(3.0)), r"slots must be integers \[T\], got float32 \[3\]"),
        ((0, k, v, np.zeros((3, 1), int)), r"slots must be integers \[T\]|k must be"),
    ):
        with pytest.raises(ValueError, match=message):
            write(pages, *(jnp.asarray(x) if isinstance(x, np.ndarray) else x for x in given))
    with pytest.raises(ValueError, match=r"src and dst must both be \[C\], got \[2\] and \[3\]"):
        copy_pages(pages, np.arange(2), np.arange(3))
    content = swap_out(pages, np.arange(2))
    wrong = {
        "of 3 pages": (np.arange(3), content),
        "in float32": (np.arange(2), dataclasses.replace(content, v=content.v.astype(jnp.float32))),
        "without v": (np.arange(2), dataclasses.replace(content, v=None)),
    }
    for ids, given in wrong.values():
        with pytest.raises(
            ValueError, match=r"of the content must be bfloat16 \[[23], 2, 2, 4, 8\] for these ids, got"
        ):
            swap_in(pages, ids, given)
    with pytest.raises(ValueError, match="k_scale of the content must be float32"):
        swap_in(empty("int8 per token"), np.arange(2), dataclasses.replace(content, k=content.k.astype(jnp.int8)))
