"""The kernel that quantises new rows and writes them into pages on NVIDIA GPUs, see ``mosaic_gpu``."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.pages import PageFormat, scale_for


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for.

    Attributes:
        kv_heads, page_size, num_pages: K, B, N.
        group: heads of a program, a multiple of 4.
        formats, sizes: of each side, its format and head size.
        interpreted: whether it runs in the interpreter.
    """

    kv_heads: int
    group: int
    page_size: int
    num_pages: int
    formats: tuple[PageFormat, ...]
    sizes: tuple[int, ...]
    interpreted: bool

    @property
    def name(self) -> str:
        """Name of the kernel in profiles and dumps."""
        kinds = [fmt.dtype + (f"_{fmt.scale}" if fmt.quantised else "") for fmt in self.formats]
        return f"kv_write_{'_'.join(kinds)}_g{self.group}_p{self.page_size}"


def heads_to_warps(size: int) -> plgpu.Layout:
    """A head of ``size`` to a warp, neighbouring elements to a thread."""
    tiling = plgpu.Tiling(((4, size), (size // 32,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def body(shape: Shape, slots_ref, new_refs, static_refs, changed_refs, *, codes, scales):
    """slots int32 [T]; of each side, new rows [T,heads,D], static scales float32 [heads] or None, and what is changed:

    pages [N,K,B,D] and scales float32 [N,K,B] if there is one per token; heads are K up to a multiple of the group.
    ``codes`` [G,D] and ``scales`` float32 [G] of each side are in shared memory.
    """
    token, first = lax.axis_index("token"), lax.axis_index("group") * shape.group
    slot = slots_ref[token]
    count = jnp.minimum(shape.group, shape.kv_heads - first)

    @pl.when((slot >= 0) & (slot < shape.num_pages * shape.page_size))
    def _():
        page, offset = lax.div(slot, shape.page_size), lax.rem(slot, shape.page_size)
        for side, fmt in enumerate(shape.formats):
            layout, heads = heads_to_warps(shape.sizes[side]), pl.ds(first, shape.group)
            x = plgpu.load(new_refs[side].at[token, heads], layout=layout, optimized=False)
            scale = None
            if fmt.scale == "token":
                scale = scale_for(largest_of(x.astype(jnp.float32)), fmt)
                scales[side][...] = scale
            elif fmt.quantised:
                scale = plgpu.load(static_refs[side].at[heads], layout=layout.reduce(1), optimized=False)
            codes[side][...] = codes_of(x, fmt, scale)
        plgpu.commit_smem()
        for side, fmt in enumerate(shape.formats):
            put(shape, first, codes[side], changed_refs[side][0], page, offset)
            if fmt.scale == "token":

                def one(head, _, side=side):
                    changed_refs[side][1][page, first + head, offset] = scales[side][head]

                lax.fori_loop(0, count, one, None)
        plgpu.wait_smem_to_gmem(0)


def put(shape: Shape, first: jax.Array, codes, pages_ref, page: jax.Array, offset: jax.Array) -> None:
    """Starts the copy of a group's heads; the last group may hold fewer."""
    rest = shape.kv_heads % shape.group
    whole = first + shape.group <= shape.kv_heads

    def copy(count):
        target = pages_ref.at[page, pl.ds(first, count), offset]
        plgpu.copy_smem_to_gmem(codes.at[pl.ds(0, count)], target)

    if not rest:
        copy(shape.group)
    elif shape.kv_heads < shape.group:
        copy(rest)
    else:
        pl.when(whole)(lambda: copy(shape.group))
        pl.when(~whole)(lambda: copy(rest))


def largest_of(x: jax.Array) -> jax.Array:
    """The largest magnitude of each row, NaN if one is: a maximum may pass over it."""
    lost = jnp.max(jnp.where(x != x, 1.0, 0.0), axis=1)
    return jnp.where(lost > 0, jnp.nan, jnp.max(jnp.abs(x), axis=1))


def codes_of(x: jax.Array, fmt: PageFormat, scale: jax.Array | None) -> jax.Array:
    """Rows [G,D] as they are stored, with scales [G] or none; as ``pages.quantise`` has it, see there."""
    if x.dtype == fmt.storage_dtype:
        return x
    x = x.astype(jnp.float32)
    if scale is not None:
        x = x / lax.broadcast_in_dim(scale, x.shape, (0,))
    if fmt.dtype == "int8":
        x = jnp.where(x != x, 0.0, jnp.round(x))
        return jnp.clip(x, -fmt.max_value - 1, fmt.max_value).astype(jnp.int32).astype(jnp.int8)
    if fmt.dtype == "float32":
        return x
    kept = x != x
    if fmt.bits == 16:
        kept |= jnp.abs(x) == jnp.inf
    return jnp.where(kept, x, jnp.clip(x, -fmt.max_value, fmt.max_value)).astype(fmt.storage_dtype)


def write(
    shape: Shape,
    slots: jax.Array,
    new: list[jax.Array],
    static: list[jax.Array | None],
    changed: list[tuple[jax.Array, ...]],
) -> list[tuple[jax.Array, ...]]:
    """Runs the kernel on arrays as the body takes them; returns ``changed``, changed in place."""
    sides = zip(shape.sizes, shape.formats, strict=True)
    shared = [plgpu.SMEM((shape.group, size), fmt.storage_dtype) for size, fmt in sides]
    scales = [plgpu.SMEM((shape.group,), jnp.float32) if len(arrays) > 1 else None for arrays in changed]
    kernel = plgpu.kernel(
        functools.partial(body, shape),
        grid=(slots.shape[0], -(-shape.kv_heads // shape.group)),
        grid_names=("token", "group"),
        scratch_types={"codes": shared, "scales": scales},
        kernel_name=shape.name,
        interpret=plgpu.InterpretGPUParams() if shape.interpreted else False,
    )
    return pl.run_state(lambda refs: kernel(slots, new, static, refs))(changed)
