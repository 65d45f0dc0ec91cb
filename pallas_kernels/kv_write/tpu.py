"""Writing keys and values on TPUs.

HBM is tiled: a copy moves whole tiles, and a tile holds 8 slots of 32 bits, 16 of 16 or 32 of 8. So the kernel reads
the tiles that a token's slot lies in, changes its rows of them, and writes them back. Tokens are sorted by slot
beforehand: those that share tiles are neighbours, so each unit of tiles is read and written once in a block of tokens,
and the units of a block are apart and can be in flight together.

    free --read started--> arriving --waited for, rows changed, write started--> leaving --waited for--> free
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.kv_write import tpu_kernel
from pallas_kernels.kv_write.arguments import Call, Side
from pallas_kernels.kv_write.tpu_kernel import Layout, Part, Target
from pallas_kernels.paged_attention import tpu_chip

PLATFORM = "tpu"
PAGE_DTYPES = ("float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8")
LANES = 128
MOST_TOKENS = 1 << 16  # whose slots fit in SMEM
BLOCK_BYTES = 1 << 20  # of a block's codes, about
DEPTH = 8  # units in flight, at most


def refuses(call: Call) -> str | None:
    """Why this implementation cannot do the call, or None."""
    if call.num_tokens > MOST_TOKENS:
        return f"at most {MOST_TOKENS} tokens have their slots in SMEM; got {call.num_tokens}"
    for side in call.sides:
        if side.fmt.dtype not in PAGE_DTYPES:
            return f"pages must be one of {', '.join(PAGE_DTYPES)}; got {side.fmt.dtype}"
        size = side.head_size
        if size % LANES and size not in (32, 64):
            return f"the head size must be 32, 64 or a multiple of {LANES}; got {size}"
        if call.page_size % fold_of(size):
            return f"pages of {call.page_size} slots of {size} do not fill rows of {LANES} lanes"
    chip = tpu_chip.current()
    if held(arrange(call, 2)) > chip.vmem_bytes // 2:
        return f"two units of {unit_of(call)} slots do not fit in half of the {chip.vmem_bytes >> 20} MiB of VMEM"
    return None


def write(call: Call) -> list[tuple[jax.Array, jax.Array | None]]:
    """Pages and scale of each side."""
    chip = tpu_chip.current()
    layout = next(x for x in (arrange(call, depth) for depth in range(DEPTH, 1, -1)) if held(x) <= chip.vmem_bytes // 2)
    limit = call.num_pages * call.page_size
    slots = jnp.where((call.slots >= 0) & (call.slots < limit), call.slots, limit)
    order = jnp.argsort(slots)
    pad = -call.num_tokens % layout.tokens
    slots = jnp.pad(slots[order], (0, pad), constant_values=limit)

    operands, targets = [], []
    for side, part in zip(call.sides, layout.parts, strict=True):
        rows = jnp.pad(side.rows[order], ((0, pad), (0, 0), (0, 0))).reshape(-1, side.head_size)
        operands.append(jnp.tile(rows, (1, part.fold)))
        if side.fmt.scale in ("tensor", "head"):
            scale = jnp.broadcast_to(side.scale[0, :, 0], (layout.kv_heads,))
            operands.append(jnp.tile(scale, layout.tokens)[:, None])
        targets += [side.pages.reshape(part.pages.shape), *(x.reshape(part.scales.shape) for x in side.scales)]
    results = iter(launch(layout, slots, operands, targets))
    return [
        (
            next(results).reshape(side.pages.shape),
            next(results).reshape(side.scale.shape) if side.scales else side.scale,
        )
        for side in call.sides
    ]


def launch(layout: Layout, slots: jax.Array, operands: list[jax.Array], targets: list[jax.Array]) -> list[jax.Array]:
    """The kernel over blocks of sorted tokens; ``targets`` are changed in place."""
    rows = layout.tokens * layout.kv_heads

    def block_of(x):
        """New rows come block by block; static scales, which have one column, stay."""
        moves = x.shape[0] != rows or x.shape[1] != 1
        return pl.BlockSpec((rows, x.shape[1]), lambda block, *_: (block if moves else 0, 0))

    anywhere = [pl.BlockSpec(memory_space=pl.ANY) for _ in targets]
    return pl.pallas_call(
        functools.partial(tpu_kernel.kernel, layout, len(operands), len(targets)),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in targets],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(slots.shape[0] // layout.tokens,),
            in_specs=[*map(block_of, operands), *anywhere],
            out_specs=anywhere,
            scratch_shapes=[
                *(pltpu.VMEM((rows, target.width), jnp.int32) for target in layout.targets),
                *(pltpu.VMEM((layout.depth, *target.ring), target.dtype) for target in layout.targets),
                pltpu.SMEM((layout.tokens + 1,), jnp.int32),
                pltpu.SemaphoreType.DMA((2, layout.depth)),
            ],
        ),
        input_output_aliases={1 + len(operands) + i: i for i in range(len(targets))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",),  # a unit may go on in the next block
            disable_bounds_checks=True,  # what is out of range was sorted out; the interpreter checks every access
            vmem_limit_bytes=tpu_chip.current().vmem_bytes * 15 // 16,
        ),
        name=f"kv_write_t{layout.tokens}_u{layout.unit}x{layout.depth}",
    )(slots, *operands, *targets)


def fold_of(size: int) -> int:
    """Slots that share a row of lanes."""
    return max(1, LANES // size)


def unit_of(call: Call) -> int:
    """Slots that are read and written together: whole tiles of every side, or else a page."""
    unit = max(32 // side.pages.dtype.itemsize * fold_of(side.head_size) for side in call.sides)
    return call.page_size if call.page_size % unit else unit


def arrange(call: Call, depth: int) -> Layout:
    """How the call lies in memory."""
    unit = unit_of(call)
    widest = max(max(side.head_size, LANES) for side in call.sides)
    blocks = min(-(-call.num_tokens // 32), max(1, BLOCK_BYTES // (128 * call.num_kv_heads * widest)))
    return Layout(
        tokens=32 * blocks,
        kv_heads=call.num_kv_heads,
        page_size=call.page_size,
        num_pages=call.num_pages,
        unit=unit,
        depth=depth,
        parts=tuple(part_of(call, side, unit) for side in call.sides),
    )


def part_of(call: Call, side: Side, unit: int) -> Part:
    """One side of a layout."""
    count, heads, page_size, size = side.pages.shape
    fold, dtype = fold_of(size), side.pages.dtype
    rows, tile = unit // fold, 32 // dtype.itemsize
    pages = Target(
        shape=(count, heads, page_size // fold, fold * size),
        ring=(heads, rows + -rows % tile, fold * size),
        dtype=dtype,
    )
    scales = None
    if side.scales:
        # Pages of few slots share rows of lanes, where they can.
        lanes = LANES if LANES % page_size == 0 and heads * page_size % LANES == 0 else page_size
        shape = heads * page_size // lanes, lanes
        scales = Target(shape=(count, *shape), ring=shape, dtype=jnp.dtype("float32"))
    return Part(fmt=side.fmt, fold=fold, pages=pages, scales=scales)


def held(layout: Layout) -> int:
    """Bytes of VMEM, about: buffers in flight, codes, and new rows twice."""
    rows = layout.tokens * layout.kv_heads
    ring = sum(layout.depth * target.ring_bytes for target in layout.targets)
    return ring + sum(rows * max(LANES, target.width) * (4 + 8) for target in layout.targets) + rows * LANES * 16
