"""Joining the stretches of a decoding row, in the order of its keys, so that its bits depend on nothing else."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.paged_attention.gpu_columns import HIGH, LOW
from pallas_kernels.paged_attention.mosaic_tile import ACC, LOWEST, across, swizzled


def body(split: int, fields_ref, out_ref, lse_ref, joint_ref, joint_lse_ref, *, out_smem, lse_smem):
    """fields int32 [W,3]; out float32 [W,parts,K,Dv,M] and lse [W,parts,K,M]; joint [W,K,Dv,M] and [W,K,M]."""
    tile, head = lax.axis_index("tile"), lax.axis_index("head")
    low, high = fields_ref[tile, LOW], fields_ref[tile, HIGH]
    whole = out_smem.shape
    begin, end = lax.div(low, split), lax.div(high + split - 1, split)

    def step(part, state):
        top, total, out = state
        lse = plgpu.load(lse_ref.at[tile, part, head], layout=ACC.reduce(0), optimized=False)
        new_top = jnp.maximum(top, lse)
        shrink, weight = jnp.exp(top - new_top), jnp.exp(lse - new_top)
        part_out = plgpu.load(out_ref.at[tile, part, head], layout=ACC, optimized=False)
        out = out * across(shrink, whole) + part_out * across(weight, whole)
        return new_top, total * shrink + weight, out

    none = jnp.zeros((whole[1],), jnp.float32)
    state = plgpu.layout_cast(none + LOWEST, ACC.reduce(0)), none, jnp.zeros(whole, jnp.float32)
    top, total, out = lax.fori_loop(begin, jnp.where(low < high, end, begin), step, state)
    some = jnp.where(total > 0, total, 1.0)
    out_smem[...] = out * across(1.0 / some, whole)
    lse_smem[...] = jnp.where(total > 0, top + jnp.log(some), -jnp.inf)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(out_smem, joint_ref.at[tile, head])
    plgpu.copy_smem_to_gmem(lse_smem, joint_lse_ref.at[tile, head])
    plgpu.wait_smem_to_gmem(0)


def merge(
    out: jax.Array, lse: jax.Array, fields: jax.Array, split: int, interpreted: bool
) -> tuple[jax.Array, jax.Array]:
    """Joins the parts of each tile.

    Args:
        out: float32 [W,parts,K,Dv,M], and
        lse: natural log-sum-exp [W,parts,K,M], both undefined for stretches in which a tile sees nothing.
        fields: of the tiles, int32 [W,3].
        split: slots of a stretch.

    Returns:
        [W,K,Dv,M] and [W,K,M]; zeros and -inf for a tile that sees nothing.
    """
    count, _, kv_heads, v_size, width = out.shape
    float32 = jnp.dtype("float32")
    kernel = plgpu.kernel(
        functools.partial(body, split),
        out_type=(
            jax.ShapeDtypeStruct((count, kv_heads, v_size, width), float32),
            jax.ShapeDtypeStruct((count, kv_heads, width), float32),
        ),
        grid=(count, kv_heads),
        grid_names=("tile", "head"),
        scratch_types={"out_smem": swizzled((v_size, width), float32), "lse_smem": plgpu.SMEM((width,), float32)},
        kernel_name=f"paged_attention_merge_w{width}",
        interpret=plgpu.InterpretGPUParams() if interpreted else False,
    )
    return kernel(fields, out, lse)
