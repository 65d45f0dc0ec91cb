"""Shapes and bytes of a pool, and what no pool can be."""

from __future__ import annotations

import pytest

from pallas_kernels.pages import PageFormat
from paxkv.cache.layout import PageLayout
from paxkv.sizing import KVLayout

FP8 = PageFormat("float8_e4m3fn")


def layout(**changes) -> PageLayout:
    sizes = {"num_layers": 3, "num_pages": 5, "page_size": 16, "num_kv_heads": 2, "head_size": 64}
    return PageLayout(**{**sizes, **changes})


def test_values_are_as_the_keys_unless_said_otherwise():
    plain = layout(k_format=FP8)
    assert (plain.v_head_size, plain.v_format, plain.num_slots) == (64, FP8, 80)
    apart = layout(k_format=FP8, v_head_size=128, v_format=PageFormat("int4", "token"))
    assert apart.sides == (("k", 64, FP8), ("v", 128, PageFormat("int4", "token")))
    assert apart.data_shape(128, apart.v_format) == (3, 5, 2, 16, 64)  # two to a byte
    latent = layout(num_kv_heads=1, head_size=576, v_head_size=0)
    assert (latent.has_values, latent.v_format, len(latent.sides)) == (False, None, 1)


@pytest.mark.parametrize(
    ("fmt", "shape"),
    [
        (FP8, None),
        (PageFormat("int8", "tensor"), (3, 1, 1, 1)),
        (PageFormat("int8", "head"), (3, 1, 2, 1)),
        (PageFormat("int8", "token"), (3, 5, 2, 16)),
    ],
)
def test_scales(fmt, shape):
    assert layout().scale_shape(fmt) == shape


@pytest.mark.parametrize(
    ("dtype", "scale", "bits", "scales"),
    [
        ("float32", "none", 32, "none"),
        ("bfloat16", "none", 16, "none"),
        ("float8_e5m2", "head", 8, "head"),
        ("int8", "token", 8, "token_head"),
        ("int4", "token", 4, "token_head"),
    ],
)
def test_bytes_are_what_sizing_says(dtype, scale, bits, scales):
    """One formula for the table that is printed and for the pool that is made (B22)."""
    ours = layout(k_format=PageFormat(dtype, scale))
    whole = KVLayout(3, 2, 64, 16, bits=bits, scales=scales)
    assert ours.bytes == 5 * whole.page_bytes + whole.fixed_bytes
    assert ours.bytes_per_token == whole.bytes_per_token


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "PageLayout.num_layers must be an integer of at least 1, got 0"),
        ({"num_pages": 2.0}, "PageLayout.num_pages must be an integer of at least 1, got 2.0"),
        ({"page_size": True}, "PageLayout.page_size must be an integer of at least 1, got True"),
        ({"v_head_size": -1}, "PageLayout.v_head_size must be an integer of at least 0, got -1"),
        ({"k_format": "int8"}, "PageLayout.k_format must be a PageFormat, got 'int8'; write PageFormat"),
        ({"v_head_size": 0, "v_format": FP8}, "v_format must be None without values"),
        ({"k_format": PageFormat("int4", "token"), "head_size": 63}, "int4 pages need an even head size, got 63"),
        ({"num_pages": 1 << 27}, r"fewer than 2\^31 token slots \(ids are int32\), got 2147483648"),
        ({"num_pages": 1 << 30, "page_size": 1}, r"fewer than 2\^31 pages over all layers .* got 3221225472"),
    ],
)
def test_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        layout(**changes)


@pytest.mark.parametrize(
    ("dtype", "scale", "message"),
    [
        ("float64", "none", "PageFormat.dtype must be one of float32, .*, got 'float64'"),
        ("int8", "channel", "PageFormat.scale must be one of none, tensor, head, token, got 'channel'"),
        ("int8", "none", "int8 pages need a scale, got 'none'"),
        ("bfloat16", "token", "bfloat16 pages take no scale, got 'token'"),
    ],
)
def test_formats_that_are_refused(dtype, scale, message):
    with pytest.raises(ValueError, match=message):
        PageFormat(dtype, scale)
