"""Writing keys and values on Hopper and Blackwell GPUs, in Pallas Mosaic GPU; needs jax 0.11.2 or later.

One program per token and group of heads, all at once: it reads the new rows into registers, computes their scales,
quantises them there, and the TMA unit puts the codes where they belong. The program of a dropped token does nothing.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write.arguments import Call, Side
from pallas_kernels.paged_attention import gpu_chip

PLATFORM = "gpu"
PAGE_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")
SIZES = (64, 128, 256)
WARPS = 4  # of a program; each takes whole heads
GROUP = 4096  # elements of a group of heads, 32 registers of a thread
MOST_PROGRAMS = 65535  # along an axis of a launch


def refuses(call: Call) -> str | None:
    """Why this implementation cannot do the call, or None."""
    reason = gpu_chip.refuses_mosaic()
    if reason is not None:
        return reason
    if call.num_tokens > MOST_PROGRAMS:
        return f"one launch writes at most {MOST_PROGRAMS} tokens; got {call.num_tokens}"
    for side in call.sides:
        if side.fmt.dtype not in PAGE_DTYPES:
            return f"pages must be one of {', '.join(PAGE_DTYPES)}; got {side.fmt.dtype}"
        if side.head_size not in SIZES:
            return f"the head size must be one of {', '.join(map(str, SIZES))}; got {side.head_size}"
    return None


def write(call: Call) -> list[tuple[jax.Array, jax.Array | None]]:
    """Pages and scale of each side."""
    # Pallas Mosaic GPU takes a while to import, and other platforms do without.
    from pallas_kernels.kv_write import mosaic_kernel

    heads = call.num_kv_heads + -call.num_kv_heads % WARPS
    most = GROUP // max(side.head_size for side in call.sides)
    group = max(size for size in range(WARPS, max(most, WARPS) + 1, WARPS) if heads % size == 0)
    shape = mosaic_kernel.Shape(
        kv_heads=call.num_kv_heads,
        group=group,
        page_size=call.page_size,
        num_pages=call.num_pages,
        formats=tuple(side.fmt for side in call.sides),
        sizes=tuple(side.head_size for side in call.sides),
        interpreted=gpu_chip.current() is None,
    )
    new = [jnp.pad(side.rows, ((0, 0), (0, heads - call.num_kv_heads), (0, 0))) for side in call.sides]
    static = [static_scale(side, heads) for side in call.sides]
    changed = [(side.pages, *side.scales) for side in call.sides]
    written = mosaic_kernel.write(shape, call.slots, new, static, changed)
    return [
        (pages, scales[0] if scales else side.scale) for side, (pages, *scales) in zip(call.sides, written, strict=True)
    ]


def static_scale(side: Side, heads: int) -> jax.Array | None:
    """The static scale of each head, float32 [heads], ones behind those that there are; None without."""
    if side.fmt.scale not in ("tensor", "head"):
        return None
    kv_heads = side.rows.shape[1]
    each = jnp.broadcast_to(side.scale[0, :, 0], (kv_heads,))
    return jnp.pad(each, (0, heads - kv_heads), constant_values=1.0)
