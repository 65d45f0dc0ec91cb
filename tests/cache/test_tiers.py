"""The host pool: what comes back is what was there, however far the device has run ahead."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.pages import PageFormat
from paxkv.cache.layout import PageLayout
from paxkv.cache.pages import PageContent, init, swap_in, swap_out, write
from paxkv.cache.tiers import HostPool
from tests.cache.pools import KINDS, assert_same_bits, bits, empty, full, layout_of

REPETITIONS = 200
NUM_PAGES, PAGE_SIZE = 6, 16


@pytest.mark.parametrize("name", KINDS)
def test_out_and_in_keeps_every_bit(name):
    pages, host = full(name), HostPool(layout_of(name), 4)
    ids, there = np.asarray([4, 1, -1]), np.asarray([2, 0, -1])
    host.put(there, swap_out(pages, ids))
    back = swap_in(empty(name), ids, jax.device_put(host.get(there)))
    for old, new in zip(bits(pages), bits(back), strict=True):
        if old.shape[1] == 6:
            np.testing.assert_array_equal(new[:, [4, 1]], old[:, [4, 1]])
            np.testing.assert_array_equal(new[:, [0, 2, 3, 5]], bits_of_empty(name, new)[:, [0, 2, 3, 5]])


def bits_of_empty(name: str, like: np.ndarray) -> np.ndarray:
    return next(leaf for leaf in bits(empty(name)) if leaf.shape == like.shape)


@functools.partial(jax.jit, donate_argnums=0, static_argnames="work")
def fill_page(pages, page, number, *, work: int):
    """A step that takes a while and then fills one page with ``number``, in every layer."""
    square = jnp.full((96, 96), number / 96, jnp.float32)
    for _ in range(work):
        square = square @ jnp.eye(96, dtype=jnp.float32)
    value = square[0, 0] * 96
    shape = (PAGE_SIZE, pages.layout.num_kv_heads, pages.layout.head_size)
    slots = page * PAGE_SIZE + jnp.arange(PAGE_SIZE)
    for layer in range(pages.layout.num_layers):
        pages = write(pages, layer, jnp.full(shape, value + layer), jnp.full(shape, -value - layer), slots)
    return pages


take, put = jax.jit(swap_out), jax.jit(swap_in, donate_argnums=0)


@pytest.mark.parametrize("max_pending", [1, 4, REPETITIONS])
@pytest.mark.parametrize("fmt", [PageFormat("bfloat16"), PageFormat("int8", "token")], ids=str)
def test_what_leaves_is_what_was_computed(fmt, max_pending):
    """A page goes to the host right behind the step that fills it; the next steps overwrite it at once, and nobody
    waits (public fault B19). The same, waiting after every dispatch, gives the same bytes, 200 times over.

    Host pages are few, so that each is overwritten while earlier transfers of it may still be under way; and pages
    come back in the middle of it, into a device page that is overwritten in its turn.
    """
    want, got = (run_ahead(fmt, max_pending, wait) for wait in (True, False))
    assert len(want) == REPETITIONS // 2
    for one, other in zip(got, want, strict=True):
        assert_same_bits(one, other)


def run_ahead(fmt: PageFormat, max_pending: int, wait: bool) -> list[PageContent]:
    """What was restored, in order. All choices are drawn beforehand, so both runs make the same ones."""
    draw = np.random.default_rng(7)
    layout = PageLayout(2, NUM_PAGES, PAGE_SIZE, 2, 32, k_format=fmt)
    pages, host = init(layout), HostPool(layout, 5, max_pending=max_pending)
    held: dict[int, int] = {}  # host page → the number in it
    restored, numbers = [], []

    def settled(value):
        return jax.block_until_ready(value) if wait else value

    for repetition in range(REPETITIONS):
        number, page, there = float(repetition + 1), int(draw.integers(NUM_PAGES)), int(draw.integers(5))
        pages = settled(fill_page(pages, page, number, work=8))
        host.put([there], settled(take(pages, np.asarray([page]))))
        held[there] = repetition + 1
        pages = settled(fill_page(pages, page, -number, work=1))
        if repetition % 2:
            source, target = draw.choice(sorted(held)), int(draw.integers(NUM_PAGES))
            pages = settled(put(pages, np.asarray([target]), jax.device_put(host.get([source]))))
            restored.append(settled(take(pages, np.asarray([target]))))
            numbers.append(held[int(source)])
            pages = settled(fill_page(pages, target, 0.0, work=1))
    firsts = [float(content.k[0, 0, 0, 0, 0]) for content in jax.device_get(restored)]
    scales = [1.0 if fmt.scale == "none" else float(c.k_scale[0, 0, 0, 0]) for c in jax.device_get(restored)]
    np.testing.assert_allclose(np.multiply(firsts, scales), numbers, rtol=2**-7)
    return jax.device_get(restored)


def test_what_was_fetched_is_nobody_elses():
    """``get`` gives a copy: the host page may be filled anew before the way back is done."""
    host = HostPool(layout_of("float32"), 2)
    content = jax.device_get(swap_out(full("float32"), np.asarray([3])))
    host.put([1], content)
    on_its_way = jax.device_put(host.get([1]))
    host.put([1], jax.tree.map(np.zeros_like, content))
    host.settle()
    assert_same_bits(on_its_way, content)
    assert not host.get([1]).k.any()


def test_what_was_given_may_change_afterwards():
    """``put`` of numpy arrays takes them as they are now."""
    host = HostPool(layout_of("float32"), 2)
    content = jax.tree.map(np.array, swap_out(full("float32"), np.asarray([3])))
    want = jax.tree.map(np.copy, content)
    host.put([0], content)
    content.k[:] = 0
    assert_same_bits(host.get([0]), want)


def test_padding_is_dropped_and_reads_as_zeros():
    host = HostPool(layout_of("int8 per token"), 3)
    host.put([-1, 2, -1], swap_out(full("int8 per token"), np.asarray([0, 1, 2])))
    found = host.get([-1, 2])
    assert not found.k[0].any() and not found.v_scale[0].any()
    assert found.k[1].any() and found.v_scale[1].all()


def test_bytes_are_those_of_the_pages():
    for name in KINDS:
        layout = layout_of(name)
        per_page = sum(side.page_bytes for side in layout.sizing)
        assert HostPool(layout, 5).bytes == 5 * per_page
    assert HostPool(layout, 0).bytes == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda host, content: host.get([1]), "host page 1 holds nothing: put content into it first"),
        (lambda host, content: host.get([3]), r"host ids are a list in -1\.\.2, got \[3\]"),
        (lambda host, content: host.put([-2], content), r"host ids are a list in -1\.\.2, got \[-2\]"),
        (lambda host, content: host.put([[0]], content), r"host ids are a list in -1\.\.2"),
        (lambda host, content: host.put([0, 1], content), r"k of the content must be bfloat16 \[2, 2, 2, 4, 8\]"),
        (lambda host, content: host.put([0], jax.tree.map(np.float32, content)), "got float32"),
        (lambda host, content: host.put([1, 1], jax.tree.map(lambda x: np.repeat(x, 2, 0), content)), "once at a time"),
        (lambda host, content: HostPool(layout_of("float32"), -1), "a host pool has 0 pages or more, got -1"),
        (lambda host, content: HostPool(layout_of("float32"), 1, max_pending=0), "max_pending must be at least 1"),
    ],
)
def test_refuses(call, message):
    host = HostPool(layout_of("bfloat16"), 3)
    content = jax.device_get(swap_out(full("bfloat16"), np.asarray([0])))
    host.put([0], content)
    with pytest.raises(ValueError, match=message):
        call(host, content)
    assert_same_bits(host.get([0]), content)
