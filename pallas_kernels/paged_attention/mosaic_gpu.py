"""Paged attention for Hopper and Blackwell GPUs, in Pallas Mosaic GPU; needs jax 0.11.2 or later.

The host side: what the kernels can do, how a call is cut into tiles, and how often they are launched. On a machine
without a GPU they run in the interpreter.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention import gpu_chip, gpu_columns
from pallas_kernels.paged_attention.arguments import Call
from pallas_kernels.paged_attention.gpu_columns import Launch
from pallas_kernels.paged_attention.places import Places, locate

PLATFORM = "gpu"
SIZES = (64, 128, 256)
UNITS = {
    "bfloat16": "bfloat16",
    "float16": "float16",
    "float8_e4m3fn": "float16",
    "float8_e5m2": "float16",
    "int8": None,
}
"""What the tensor cores multiply for each dtype of pages, which holds it exactly; for int8 both do."""

SPLIT = 512
"""Slots that one program of a decoding row reads. The same in every batch, so that a row's bits are the same too."""
BLOCK = 64
NARROW = 32  # most columns of a tile of a decoding row
WIDE = 32  # columns of a tile of other rows, for heads of up to 128
STAGE_BYTES = 48 << 10  # of shared memory for the blocks in flight of a program; three programs fit on a core
MOST_TILES = 65535  # of a launch


def refuses(call: Call) -> str | None:
    """Why this implementation cannot do the call, or None."""
    reason = gpu_chip.refuses_mosaic()
    if reason is not None:
        return reason
    if call.tree_mask is not None:
        return "it has no tree masks"
    if call.v_pages is None:
        return "it reads values from pages of their own"
    if call.q.dtype.name not in ("bfloat16", "float16"):
        return f"the queries must be bfloat16 or float16, which tensor cores multiply; got {call.q.dtype.name}"
    for name, pages in (("k_pages", call.k_pages), ("v_pages", call.v_pages)):
        if pages.dtype.name not in UNITS:
            return f"{name} must be one of {', '.join(UNITS)}; got {pages.dtype.name}"
        if pages.shape[3] not in SIZES:
            return f"the head size must be one of {', '.join(map(str, SIZES))}; got {pages.shape[3]} in {name}"
    if call.page_size not in (8, 16, 32) and call.page_size % BLOCK:
        return f"the page size must be 8, 16, 32 or a multiple of {BLOCK}; got {call.page_size}"
    most = max(launch.count for launch in launches(call))
    if most > MOST_TILES:
        return f"one launch has at most {MOST_TILES} tiles; got {most}"
    return None


def attend(call: Call) -> tuple[jax.Array, jax.Array]:
    """Output [T,H,Dv] and natural log-sum-exp [T,H], both float32.

    Rows with few queries, whose keys several programs share, and rows with more are attended by a launch each.
    """
    places = locate(call)
    first, *others = launches(call)
    out, lse, _ = run(call, places, first)
    for launch in others:
        other, other_lse, chosen = run(call, places, launch)
        out = jnp.where(chosen[:, None, None], other, out)
        lse = jnp.where(chosen[:, None], other_lse, lse)
    return gpu_columns.finish(call, places, out, lse)


def launches(call: Call) -> tuple[Launch, ...]:
    """The launches of a call."""
    narrow = min(-(-call.group_size // 8) * 8, NARROW)
    wide = WIDE * 128 // max(128, call.q.shape[2], call.v_width)
    if call.q.dtype == jnp.float16 and units(call)[0] != jnp.float16:
        wide //= 2  # two terms of each query take the registers
    return gpu_columns.launches(call, narrow, wide, BLOCK, SPLIT)


def units(call: Call) -> tuple[jnp.dtype, jnp.dtype]:
    """What keys and values are multiplied as."""
    return tuple(jnp.dtype(UNITS[pages.dtype.name] or call.q.dtype) for pages in (call.k_pages, call.v_pages))


def run(call: Call, places: Places, launch: Launch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Output [T,H,Dv] and log-sum-exp [T,H] of a launch's rows, whatever for others, and which tokens are theirs."""
    # Pallas Mosaic GPU takes a while to import, and other platforms do without.
    from pallas_kernels.paged_attention import mosaic_merge, mosaic_tile

    size, page_size = call.q.shape[2], call.page_size
    k_pages, v_pages = call.k_pages, call.v_pages
    k_unit, v_unit = units(call)
    tiles = gpu_columns.cut(call, places, launch, k_unit if call.q.dtype == jnp.bfloat16 else call.q.dtype)
    query = terms(tiles.query, k_unit)
    block_bytes = BLOCK * (size * k_pages.dtype.itemsize + call.v_width * v_pages.dtype.itemsize)
    k_scaled, v_scaled = (
        gpu_columns.per_token(scale, pages) for scale, pages in ((call.k_scale, k_pages), (call.v_scale, v_pages))
    )
    shape = mosaic_tile.Shape(
        width=launch.width,
        terms=query.shape[2] // launch.width,
        block=BLOCK,
        split=launch.split,
        parts=launch.parts,
        stages=max(2, min(8, STAGE_BYTES // block_bytes)),
        size=size,
        v_size=call.v_width,
        page_size=page_size,
        num_pages=k_pages.shape[0],
        kv_heads=call.num_kv_heads,
        k_dtype=k_pages.dtype,
        v_dtype=v_pages.dtype,
        k_unit=k_unit,
        v_unit=v_unit,
        k_scaled=k_scaled,
        v_scaled=v_scaled,
        windowed=call.window is not None,
        sloped=call.alibi_slopes is not None,
        soft_cap=call.soft_cap,
        interpreted=gpu_chip.current() is None,
    )
    out, lse = mosaic_tile.attend(
        shape,
        launch.count,
        tiles.fields,
        call.block_tables,
        query,
        tiles.factor,
        tiles.slope,
        tiles.begin,
        tiles.stop,
        tiles.position,
        k_pages.reshape(-1, page_size, size),
        v_pages.reshape(-1, page_size, call.v_width),
        call.k_scale.reshape(-1, page_size) if k_scaled else None,
        call.v_scale.reshape(-1, page_size) if v_scaled else None,
    )
    if launch.parts > 1:
        out, lse = mosaic_merge.merge(out, lse, tiles.fields, launch.split, shape.interpreted)
    else:
        empty = tiles.fields[:, gpu_columns.LOW] >= tiles.fields[:, gpu_columns.HIGH]
        out = jnp.where(empty[:, None, None, None], 0.0, out[:, 0])
        lse = jnp.where(empty[:, None, None], -jnp.inf, lse[:, 0])
    return *gpu_columns.collect(call, tiles, jnp.swapaxes(out, 2, 3), lse), tiles.chosen


def terms(query: jax.Array, unit: jnp.dtype) -> jax.Array:
    """Queries [W,K,M,D] as the numbers in ``unit`` whose sum they are, [W,K,terms*M,D].

    A float16 is the sum of two bfloat16, exactly; all else is a single number.
    """
    if query.dtype == unit:
        return query
    query = query.astype(jnp.float32)
    # What a compiler may not take away, unlike a conversion there and back.
    high = lax.reduce_precision(query, exponent_bits=8, mantissa_bits=7)
    return jnp.concatenate([high, query - high], axis=2).astype(unit)
