"""Paged attention spelled out: one token at a time over its row's whole table. Slow, and differentiable everywhere."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels import pages
from pallas_kernels.paged_attention import places as places_of
from pallas_kernels.paged_attention.arguments import Call
from pallas_kernels.paged_attention.states import finish


def refuses(call: Call) -> str | None:
    """Why this implementation cannot do the call; None, since it can do any."""
    del call
    return None


def attend(call: Call) -> tuple[jax.Array, jax.Array]:
    """Attention with a dense softmax, computed in float64 for float64 queries and in float32 otherwise.

    Derivatives with respect to the queries, float pages, scales, slopes and sinks all exist.

    Returns:
        Output [T,H,Dv] in the dtype computed in, and the natural log-sum-exp [T,H].
    """
    dtype = jnp.float64 if call.q.dtype == jnp.float64 else jnp.float32
    places = places_of.locate(call)
    heads, groups = call.q.shape[1], call.group_size
    slots = jnp.arange(call.block_tables.shape[1] * call.page_size, dtype=jnp.int32)

    def one(token: jax.Array) -> tuple[jax.Array, jax.Array]:
        row = places.row[token]
        seen, distance = places_of.visible(call, places, row, token[None], slots)  # [1,C]
        used = seen[0] & places.real[token]
        keys = row_content(call.k_pages, call.k_scale, call.block_tables[row], dtype)  # [K,C,D]
        if call.v_pages is None:
            values = keys[..., : call.v_width]
        else:
            values = row_content(call.v_pages, call.v_scale, call.block_tables[row], dtype)
        # Slots that are not visible may hold anything; 0 times anything is not always 0.
        keys = jnp.repeat(jnp.where(used[:, None], keys, 0.0), groups, axis=0)  # [H,C,D]
        values = jnp.repeat(jnp.where(used[:, None], values, 0.0), groups, axis=0)  # [H,C,Dv]
        query = call.q[token].astype(dtype)  # [H,D]
        logits = call.scale * jnp.einsum("hd,hcd->hc", query, keys, precision="highest")
        slopes = None if call.alibi_slopes is None else call.alibi_slopes[:, None]
        logits = places_of.bend(call, logits, slopes, distance)
        sinks = jnp.full((heads,), -jnp.inf, dtype) if call.sinks is None else call.sinks.astype(dtype)
        sinks = jnp.where(places.real[token], sinks, -jnp.inf)
        top = jnp.maximum(jnp.max(jnp.where(used, logits, -jnp.inf), axis=1), sinks)
        top = jax.lax.stop_gradient(jnp.where(jnp.isneginf(top), 0.0, top))
        weights = jnp.where(used, jnp.exp(jnp.where(used, logits - top[:, None], 0.0)), 0.0)  # [H,C]
        total = jnp.sum(weights, axis=1) + jnp.exp(sinks - top)
        return finish(jnp.einsum("hc,hcd->hd", weights, values, precision="highest"), total, top)

    return jax.lax.map(one, jnp.arange(call.q.shape[0], dtype=jnp.int32))


def row_content(stored: jax.Array, scale: jax.Array | None, table: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """One side of a row's pages in order, dequantised, [K,P*B,D]."""
    ids = jnp.clip(table, 0, stored.shape[0] - 1)
    content = stored[ids]  # [P,K,B,D]
    content = (pages.unpack_int4(content) if stored.dtype == jnp.uint8 else content).astype(dtype)
    if scale is not None:
        content *= (scale[ids] if scale.shape[0] == stored.shape[0] else scale)[..., None].astype(dtype)
    return jnp.swapaxes(content, 0, 1).reshape(content.shape[1], -1, content.shape[3])
