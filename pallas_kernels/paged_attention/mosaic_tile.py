"""One tile of columns against a stretch of its row's keys, on the tensor cores of an NVIDIA GPU (Pallas Mosaic GPU).

Keys stand along the rows of every product and columns (query heads) along its columns, so that few columns waste
little: S^T = K Q^T is [block, width] and O^T = V^T P^T is [Dv, width]. Pages come by TMA, some blocks ahead. 16-bit
pages are read by the tensor cores as they lie; 8-bit pages are widened on the way through a 16-bit buffer.

    free --copy issued--> in flight --barrier--> full --read--> free        (one slot of the ring)
"""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_columns import HIGH, LOG2_E, LOW, ROW

LOWEST = -1e30  # start of the running maximum: finite, so that differences are
ACC = plgpu.Layout.MMA_ACC(jnp.float32)  # where a product's numbers are, over the threads
TINY = 1e-37  # smallest unit of values, a normal float32


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for.

    Attributes:
        width: columns of a tile, a multiple of 8.
        terms: numbers that a query's are the sums of.
        block: slots of a block, a multiple of 64.
        split: slots of a stretch, a multiple of ``block``.
        parts: stretches that a table can hold.
        stages: blocks in flight.
        size, v_size, page_size, num_pages, kv_heads: D, Dv, B, N, K.
        k_dtype, v_dtype: of the pages.
        k_unit, v_unit: what the tensor cores multiply, float16 or bfloat16.
        k_scaled, v_scaled: whether a scale per token lies beside the pages.
        windowed, sloped: whether columns have a first slot, and ALiBi slopes.
        soft_cap: bound of the logits, or None.
        interpreted: whether the kernel runs in the interpreter, which has no ``mma``.
    """

    width: int
    terms: int
    block: int
    split: int
    parts: int
    stages: int
    size: int
    v_size: int
    page_size: int
    num_pages: int
    kv_heads: int
    k_dtype: jnp.dtype
    v_dtype: jnp.dtype
    k_unit: jnp.dtype
    v_unit: jnp.dtype
    k_scaled: bool
    v_scaled: bool
    windowed: bool
    sloped: bool
    soft_cap: float | None
    interpreted: bool

    @property
    def pages_per_block(self) -> int:
        """Pages that a block is read from."""
        return max(1, self.block // self.page_size)

    @property
    def rows_per_copy(self) -> int:
        """Slots that one copy brings."""
        return min(self.block, self.page_size)

    @property
    def name(self) -> str:
        """Name of the kernel in profiles and dumps."""
        kinds = f"{self.k_dtype.name}{'_s' if self.k_scaled else ''}_{self.v_dtype.name}{'_s' if self.v_scaled else ''}"
        return f"paged_attention_{kinds}_w{self.width}_b{self.block}_p{self.page_size}"


def mma(shape: Shape, acc: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    """``acc + a @ b`` in float32; the interpreter knows dot_general only."""
    if shape.interpreted:
        return acc + lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return plgpu.mma(acc, a, b)


def wide_layout(rows: int, lanes: int) -> plgpu.Layout:
    """Eight neighbouring elements per thread, a warp over whole lines: reads and writes meet no bank conflict."""
    per_warp = 8 * 32 // lanes
    if per_warp == 1:
        return plgpu.Layout.TILED(plgpu.Tiling(((4, lanes), (8,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
    return plgpu.Layout.TILED(
        plgpu.Tiling(((4 * per_warp, lanes), (per_warp, lanes), (8,))),
        warp_dims=(-5,),
        lane_dims=(-3, -2),
        vector_dim=-1,
    )


def swizzled(shape: tuple[int, ...], dtype: jnp.dtype) -> pl.MemoryRef:
    """Shared memory whose lines of 16 bytes are permuted so that the tensor cores' loads meet no bank conflict."""
    line = min(128, shape[-1] * dtype.itemsize)
    if line < 32:
        return plgpu.SMEM(shape, dtype)
    tiling = plgpu.TilingTransform((8, line // dtype.itemsize))
    return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(line)))


def across(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """One number per column, over all rows."""
    return lax.broadcast_in_dim(x, shape, (1,))


def down(x: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """One number per row, over all columns."""
    return lax.broadcast_in_dim(x, shape, (0,))


def widen(side_ref, wide_ref, unit: jnp.dtype) -> None:
    """Writes 8-bit codes as 16-bit floats."""
    layout = wide_layout(*side_ref.shape)
    wide_ref[...] = plgpu.load(side_ref, layout=layout).astype(unit)


def blank(ref, first: jax.Array, low: jax.Array, high: jax.Array) -> None:
    """Zeroes the rows of a block whose slots are outside low..high: 0 times what they hold is not always 0."""
    values = plgpu.load(ref, layout=wide_layout(*ref.shape))
    slots = first + plgpu.broadcasted_iota(jnp.int32, ref.shape, 0)
    ref[...] = jnp.where((slots >= low) & (slots < high), values, jnp.zeros_like(values))


def body(
    shape: Shape,
    fields_ref,  # int32 [W,3]
    table_ref,  # int32 [S,P]
    q_ref,  # [W,K,terms*M,D]
    factor_ref,  # float32 [W,K,M]
    slope_ref,  # float32 [W,K,M]
    begin_ref,  # int32 [W,M]
    stop_ref,  # int32 [W,M]
    position_ref,  # int32 [W,M]
    k_ref,  # [N*K,B,D]
    v_ref,  # [N*K,B,Dv]
    k_scale_ref,  # float32 [N*K,B]
    v_scale_ref,  # float32 [N*K,B]
    out_ref,  # float32 [W,parts,K,Dv,M]
    lse_ref,  # float32 [W,parts,K,M]
    *,
    q_smem,
    k_smem,
    v_smem,
    k_scale_smem,
    v_scale_smem,
    wide_smem,
    p_smem,
    out_smem,
    lse_smem,
    q_barrier,
    k_barriers,
    v_barriers,
):
    tile, part, head = (lax.axis_index(name) for name in ("tile", "part", "head"))
    row, low, high = (fields_ref[tile, field] for field in (ROW, LOW, HIGH))
    block, width = shape.block, shape.width
    whole, out_whole = (block, width), (shape.v_size, width)
    begin = jnp.maximum(part * shape.split, low) // block
    end = lax.div(jnp.minimum((part + 1) * shape.split, high) + block - 1, block)
    first_page, last_page = lax.div(low, shape.page_size), lax.div(jnp.maximum(high, 1) - 1, shape.page_size)

    def start_copies(index: jax.Array, slot: jax.Array) -> None:
        # Of a page larger than a block, the block that is wanted: a product, so that its alignment shows.
        inside = lax.rem(index, max(1, shape.page_size // block)) * block if shape.page_size > block else 0
        for piece in range(shape.pages_per_block):
            place = index * block + piece * shape.rows_per_copy
            # A page that no column sees is replaced by a neighbour: its owner may have freed it.
            page = table_ref[row, jnp.clip(lax.div(place, shape.page_size), first_page, last_page)]
            page = jnp.clip(page, 0, shape.num_pages - 1) * shape.kv_heads + head
            source = pl.ds(inside, shape.rows_per_copy)
            target = pl.ds(piece * shape.rows_per_copy, shape.rows_per_copy)
            sides = (
                (k_ref, k_smem, k_scale_ref, k_scale_smem, shape.k_scaled, k_barriers),
                (v_ref, v_smem, v_scale_ref, v_scale_smem, shape.v_scaled, v_barriers),
            )
            for side_ref, side_smem, scale_ref, scale_smem, scaled, barriers in sides:
                barrier = barriers.at[slot]
                plgpu.copy_gmem_to_smem(side_ref.at[page, source], side_smem.at[slot, target], barrier)
                if scaled:
                    plgpu.copy_gmem_to_smem(scale_ref.at[page, source], scale_smem.at[slot, target], barrier)

    def vector(ref, *index) -> jax.Array:
        return plgpu.load(ref.at[index], layout=ACC.reduce(0), optimized=False)

    @pl.when(begin < end)
    def _something():
        plgpu.copy_gmem_to_smem(q_ref.at[tile, head], q_smem, q_barrier)
        lax.fori_loop(0, jnp.minimum(shape.stages, end - begin), lambda slot, _: start_copies(begin + slot, slot), None)
        factor, stop = vector(factor_ref, tile, head), vector(stop_ref, tile)
        start = vector(begin_ref, tile) if shape.windowed else None
        slope, position = (vector(slope_ref, tile, head), vector(position_ref, tile)) if shape.sloped else (None, None)
        plgpu.barrier_wait(q_barrier)
        queries = [q_smem.at[pl.ds(term * width, width)].T[...] for term in range(shape.terms)]

        def step(index, state):
            top, total, unit, out = state
            slot = lax.rem(index - begin, shape.stages)
            plgpu.barrier_wait(k_barriers.at[slot])
            keys_ref = k_smem.at[slot]
            if shape.k_dtype.itemsize == 1:
                keys_ref = wide_smem[shape.k_unit.name]
                widen(k_smem.at[slot], keys_ref, shape.k_unit)
            keys, logits = keys_ref[...], jnp.zeros(whole, jnp.float32)
            for query in queries:
                logits = mma(shape, logits, keys, query)
            if shape.k_scaled:
                logits *= down(plgpu.load(k_scale_smem.at[slot], layout=ACC.reduce(1)), whole)
            logits *= across(factor, whole)
            if shape.soft_cap is not None:
                bound = shape.soft_cap * LOG2_E
                logits = bound - (2 * bound) / (1.0 + jnp.exp2(logits))
            slots = index * block + plgpu.broadcasted_iota(jnp.int32, whole, 0)
            if shape.sloped:
                logits += across(slope, whole) * (slots - across(position, whole)).astype(jnp.float32)
            seen = slots < across(stop, whole)
            if shape.windowed:
                seen &= slots >= across(start, whole)
            logits = jnp.where(seen, logits, -jnp.inf)
            new_top = jnp.maximum(top, jnp.max(logits, axis=0))
            weights = jnp.exp2(logits - across(new_top, whole))
            shrink = jnp.exp2(top - new_top)
            total = total * shrink + jnp.sum(weights, axis=0)
            plgpu.barrier_wait(v_barriers.at[slot])
            if shape.v_scaled:
                # Weights times scales are kept at 1 or below, where float16 is precise, by a running unit.
                at = index * block + plgpu.broadcasted_iota(jnp.int32, (block,), 0)
                scales = jnp.where(
                    (at >= low) & (at < high), plgpu.load(v_scale_smem.at[slot], layout=ACC.reduce(1)), 0.0
                )
                new_unit = jnp.maximum(unit, jnp.max(jnp.abs(scales)))
                weights *= down(scales / new_unit, whole)
                shrink *= unit / new_unit
                unit = new_unit
            p_smem[...] = weights.astype(shape.v_unit)
            values_ref = v_smem.at[slot]
            if shape.v_dtype.itemsize == 1:
                values_ref = wide_smem[shape.v_unit.name]
                widen(v_smem.at[slot], values_ref, shape.v_unit)

            @pl.when((index * block < low) | ((index + 1) * block > high))
            def _blank():
                blank(values_ref, index * block, low, high)

            out = mma(shape, out * across(shrink, out_whole), values_ref.T[...], p_smem[...])

            @pl.when(index + shape.stages < end)
            def _refill():
                plgpu.commit_smem()
                start_copies(index + shape.stages, slot)

            return new_top, total, unit, out

        zeros = jnp.zeros((width,), jnp.float32)
        state = (zeros + LOWEST, zeros, jnp.float32(TINY), jnp.zeros(out_whole, jnp.float32))
        top, total, unit, out = lax.fori_loop(begin, end, step, state)
        some = jnp.where(total > 0, total, 1.0)
        out_smem[...] = out * across(unit / some if shape.v_scaled else 1.0 / some, out_whole)
        lse_smem[...] = jnp.where(total > 0, (top + jnp.log2(some)) * math.log(2), -jnp.inf)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_ref.at[tile, part, head])
        plgpu.copy_smem_to_gmem(lse_smem, lse_ref.at[tile, part, head])
        plgpu.wait_smem_to_gmem(0)


def scratch(shape: Shape) -> dict:
    """Shared memory and barriers of a program."""
    smem, stages, block = plgpu.SMEM, shape.stages, shape.block
    copies = [shape.pages_per_block * (1 + scaled) for scaled in (shape.k_scaled, shape.v_scaled)]
    sides = ((shape.k_dtype, shape.k_unit, shape.size), (shape.v_dtype, shape.v_unit, shape.v_size))
    wide = {unit.name: swizzled((block, size), unit) for dtype, unit, size in sides if dtype.itemsize == 1}
    ring = [(smem if dtype.itemsize == 1 else swizzled)((stages, block, size), dtype) for dtype, _, size in sides]
    return {
        "q_smem": swizzled((shape.terms * shape.width, shape.size), shape.k_unit),
        "k_smem": ring[0],
        "v_smem": ring[1],
        "k_scale_smem": smem((stages, block), jnp.float32) if shape.k_scaled else None,
        "v_scale_smem": smem((stages, block), jnp.float32) if shape.v_scaled else None,
        "wide_smem": wide,
        "p_smem": swizzled((block, shape.width), shape.v_unit),
        "out_smem": swizzled((shape.v_size, shape.width), jnp.dtype("float32")),
        "lse_smem": smem((shape.width,), jnp.float32),
        "q_barrier": plgpu.Barrier(),
        "k_barriers": plgpu.Barrier(num_arrivals=copies[0], num_barriers=stages),
        "v_barriers": plgpu.Barrier(num_arrivals=copies[1], num_barriers=stages),
    }


def attend(shape: Shape, count: int, *arrays: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Runs ``count`` tiles; arrays as the body takes them.

    Returns:
        Outputs float32 [W,parts,K,Dv,M] and natural log-sum-exp [W,parts,K,M], both undefined for stretches in
        which a tile sees nothing.
    """
    grid = (count, shape.parts, shape.kv_heads)
    kernel = plgpu.kernel(
        functools.partial(body, shape),
        out_type=(
            jax.ShapeDtypeStruct((*grid, shape.v_size, shape.width), jnp.float32),
            jax.ShapeDtypeStruct((*grid, shape.width), jnp.float32),
        ),
        grid=grid,
        grid_names=("tile", "part", "head"),
        scratch_types=scratch(shape),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=shape.name,
        interpret=plgpu.InterpretGPUParams() if shape.interpreted else False,
    )
    return kernel(*arrays)
