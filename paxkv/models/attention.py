"""Attention of one layer: projections, positions, the write into the pages, and the paged kernel.

The pool of all layers is one array; a layer's kernel sees all of it through block tables moved to the layer's pages,
so no step cuts the pool into layers.
"""

from __future__ import annotations

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int32

from pallas_kernels.mla_attention.api import mla_attention
from pallas_kernels.paged_attention.api import paged_attention
from paxkv.cache.pages import KVPages, write
from paxkv.cache.rows import Rows
from paxkv.models.architecture import DecoderConfig
from paxkv.models.layers import Linear, Norm
from paxkv.models.rotary import rotate


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Step:
    """What every layer of a step shares.

    Attributes:
        rows: which pages the step reads and writes.
        cos, sin: rotary angles of the tokens, or None.
    """

    rows: Rows
    cos: Float32[Array, "T _"] | None
    sin: Float32[Array, "T _"] | None


def alibi_slopes(num_heads: int, head_size: int) -> np.ndarray:
    """ALiBi slopes as Falcon uses them: Press et al. 2022, and divided by sqrt(head size) like the logits they join.

    Heads past the largest power of two take the odd slopes of twice as many heads.
    """
    power = 2 ** math.floor(math.log2(num_heads))
    first = [2.0 ** (-8.0 * (head + 1) / power) for head in range(power)]
    rest = [2.0 ** (-4.0 * (2 * head + 1) / power) for head in range(num_heads - power)]
    return np.asarray(first + rest, np.float32) / np.float32(math.sqrt(head_size))


def all_layers(pool: Array) -> Array:
    """[L,N,...] as [L*N,...]; moves nothing."""
    return pool.reshape(-1, *pool.shape[2:])


def layer_table(tables: Int32[Array, "S P"], layer: int | Int[Array, ""], num_pages: int) -> Int32[Array, "S P"]:
    """Block tables into the pool of all layers. Entries that are no page stay so."""
    valid = (tables >= 0) & (tables < num_pages)
    return jnp.where(valid, tables + layer * num_pages, -1)


def layer_scale(scale: Float32[Array, "L _ _ _"] | None, layer: int | Int[Array, ""], kind: str) -> Array | None:
    """What the kernel takes as scale: those of all tokens in the pool, or the layer's own static one."""
    if scale is None:
        return None
    return all_layers(scale) if kind == "token" else scale[layer]


class Attention(nn.Module):
    """Multi-head attention with grouped queries; q, k and v come from one matrix, in this order, head by head."""

    config: DecoderConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "T hidden"], pages: KVPages, step: Step, layer: int | Int[Array, ""], window: int | Array
    ) -> tuple[Float[Array, "T hidden"], KVPages]:
        config, rows = self.config, step.rows
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
        qkv = Linear(config, (heads + 2 * kv_heads) * size, config.qkv_bias, name="qkv")(x)
        qkv = qkv.reshape(-1, heads + 2 * kv_heads, size)
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        if config.qk_norm:
            q, k = Norm(config, name="q_norm")(q), Norm(config, name="k_norm")(k)
        if config.rope is not None:
            q = rotate(q, step.cos, step.sin, interleaved=config.rope.interleaved)
            k = rotate(k, step.cos, step.sin, interleaved=config.rope.interleaved)
        pages = write(pages, layer, k, v, rows.slots)
        num_pages = pages.k.shape[1]
        slopes = alibi_slopes(heads, size) if config.positions == "alibi" else None
        out = paged_attention(
            q,
            all_layers(pages.k),
            all_layers(pages.v),
            layer_table(rows.block_tables, layer, num_pages),
            rows.kv_lens,
            rows.query_starts,
            k_scale=layer_scale(pages.k_scale, layer, pages.layout.k_format.scale),
            v_scale=layer_scale(pages.v_scale, layer, pages.layout.v_format.scale),
            scale=config.attention_scale,
            window=None if isinstance(window, int) and window == 0 else window,
            soft_cap=config.attention_soft_cap,
            alibi_slopes=slopes,
            max_query_len=rows.max_query_len,
            implementation=config.attention,
        )
        out = Linear(config, config.hidden_size, config.out_bias, name="out")(out.reshape(-1, heads * size))
        return out, pages


class LatentAttentionLayer(nn.Module):
    """Multi-head latent attention over cached latents, absorbed: keys and values are never expanded.

    The up-projection of the keys is applied to the queries, that of the values to the output (DeepSeek-V2, section
    2.1.2). The cache holds the normed latent and the rotated shared key of each token.
    """

    config: DecoderConfig

    @nn.compact
    def __call__(
        self, x: Float[Array, "T hidden"], pages: KVPages, step: Step, layer: int | Int[Array, ""], window: int | Array
    ) -> tuple[Float[Array, "T hidden"], KVPages]:
        config, mla, rows = self.config, self.config.mla, step.rows
        heads, q_size = config.num_heads, mla.nope_size + mla.rope_size
        # One matrix for both compressions: queries (or, uncompressed, all their heads) first, then latent and key.
        q_width = mla.q_rank or heads * q_size
        down = Linear(config, q_width + mla.cached_size, config.qkv_bias, name="down")(x)
        q, latent, key = jnp.split(down, [q_width, q_width + mla.kv_rank], axis=-1)
        if mla.q_rank:
            q = Linear(config, heads * q_size, name="q_up")(Norm(config, name="q_norm")(q))
        q = q.reshape(-1, heads, q_size)
        latent = Norm(config, name="kv_norm")(latent)
        turn = dict(interleaved=config.rope.interleaved)
        key = rotate(key[:, None, :], step.cos, step.sin, **turn)
        cached = jnp.concatenate([latent[:, None, :], key], axis=-1)
        pages = write(pages, layer, cached, None, rows.slots)

        init = nn.initializers.lecun_normal(batch_axis=0)
        k_up = self.param("k_up", init, (heads, mla.nope_size, mla.kv_rank), config.dtype)
        v_up = self.param("v_up", init, (heads, mla.kv_rank, mla.v_size), config.dtype)
        q_latent = jnp.einsum("thd,hdc->thc", q[..., : mla.nope_size], k_up)
        q_key = rotate(q[..., mla.nope_size :], step.cos, step.sin, **turn)
        out = mla_attention(
            jnp.concatenate([q_latent, q_key], axis=-1),
            all_layers(pages.k),
            layer_table(rows.block_tables, layer, pages.k.shape[1]),
            rows.kv_lens,
            rows.query_starts,
            v_width=mla.kv_rank,
            scale=config.attention_scale,
            k_scale=layer_scale(pages.k_scale, layer, pages.layout.k_format.scale),
            max_query_len=rows.max_query_len,
            implementation=config.attention,
        )
        out = jnp.einsum("thc,hcd->thd", out, v_up).reshape(-1, heads * mla.v_size)
        return Linear(config, config.hidden_size, config.out_bias, name="out")(out), pages
