"""A feed-forward layer of experts: routing, and the two ways to compute it.

Nothing is dropped and no expert has a capacity, so what a token gets does not depend on what else is in the step.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from paxkv.models.architecture import DecoderConfig, Experts
from paxkv.models.layers import FeedForward, activate, linear


def route(
    logits: Float32[Array, "T experts"], bias: Float32[Array, " experts"] | None, experts: Experts
) -> tuple[Int32[Array, "T picked"], Float32[Array, "T picked"]]:
    """Which experts each token uses, and their weights.

    Args:
        logits: of the router, float32.
        bias: correction of the scores, for picking alone (DeepSeek-V3, section 2.1.2), or None.
        experts: the rules.

    Sources: Mixtral (Jiang et al. 2024), section 2.1; DeepSeek-V2, section 2.1.3; DeepSeek-V3, section 2.1.2.
    """
    scores = jax.nn.softmax(logits, axis=-1) if experts.scoring == "softmax" else jax.nn.sigmoid(logits)
    rank = scores if bias is None else scores + bias
    if experts.groups > 1:
        grouped = rank.reshape(-1, experts.groups, experts.count // experts.groups)
        best = jnp.sum(jax.lax.top_k(grouped, experts.group_top)[0], axis=-1)
        chosen = jax.lax.top_k(best, experts.top_groups)[1]
        kept = jnp.any(chosen[:, :, None] == jnp.arange(experts.groups), axis=1)
        rank = jnp.where(kept[:, :, None], grouped, -jnp.inf).reshape(rank.shape)
    picked = jax.lax.top_k(rank, experts.per_token)[1]
    weights = jnp.take_along_axis(scores, picked, axis=-1)
    if experts.normalise:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return picked, weights * experts.scaling


def by_expert(
    x: Float[Array, "T hidden"],
    gate_up: Float[Array, "experts hidden lanes"],
    down: Float[Array, "experts width hidden"],
    picked: Int32[Array, "T picked"],
    weights: Float32[Array, "T picked"],
    activation: str,
) -> Float32[Array, "T hidden"]:
    """Expert after expert over all tokens; one that no token picked is not read. For few tokens, and for the CPU."""

    def add(index, total):
        share = jnp.sum(jnp.where(picked == index, weights, 0.0), axis=-1)

        def compute(total):
            hidden = activate(linear(x, gate_up[index]), activation, gated=True)
            part = linear(hidden, down[index]).astype(jnp.float32)
            # Chosen, not multiplied by 0: a token that does not use the expert keeps its bits.
            return jnp.where((share > 0)[:, None], total + part * share[:, None], total)

        return jax.lax.cond(jnp.any(picked == index), compute, lambda total: total, total)

    return jax.lax.fori_loop(0, gate_up.shape[0], add, jnp.zeros(x.shape, jnp.float32))


def by_token(
    x: Float[Array, "T hidden"],
    gate_up: Float[Array, "experts hidden lanes"],
    down: Float[Array, "experts width hidden"],
    picked: Int32[Array, "T picked"],
    weights: Float32[Array, "T picked"],
    activation: str,
) -> Float32[Array, "T hidden"]:
    """Token copies sorted by expert, one ragged product for all experts. For accelerators."""
    per_token = picked.shape[1]
    order = jnp.argsort(picked.reshape(-1), stable=True)
    sizes = jnp.bincount(picked.reshape(-1), length=gate_up.shape[0]).astype(jnp.int32)
    hidden = activate(jax.lax.ragged_dot(x[order // per_token], gate_up, sizes), activation, gated=True)
    part = jax.lax.ragged_dot(hidden, down, sizes).astype(jnp.float32)
    part = part[jnp.argsort(order)].reshape(*picked.shape, -1)
    return jnp.sum(part * weights[:, :, None], axis=1)


class ExpertLayer(nn.Module):
    """Routed experts, and the shared ones that every token uses."""

    config: DecoderConfig

    @nn.compact
    def __call__(self, x: Float[Array, "T hidden"]) -> Float[Array, "T hidden"]:
        config, experts = self.config, self.config.experts
        init, dtype = nn.initializers.lecun_normal(batch_axis=0), config.dtype
        shape = (experts.count, config.hidden_size, 2 * experts.ffn_size)
        router = self.param("router", nn.initializers.lecun_normal(), shape[1::-1], dtype)
        gate_up = self.param("gate_up", init, shape, dtype)
        down = self.param("down", init, (experts.count, experts.ffn_size, config.hidden_size), dtype)
        bias = None
        if experts.correction_bias:
            bias = self.param("correction_bias", nn.initializers.zeros, (experts.count,), jnp.float32)
        logits = linear(x.astype(jnp.float32), router.astype(jnp.float32))
        picked, weights = route(logits, bias, experts)
        arguments = (x, gate_up, down, picked, weights)
        y = jax.lax.platform_dependent(
            *arguments,
            cpu=lambda *a: by_expert(*a, config.activation),
            default=lambda *a: by_token(*a, config.activation),
        ).astype(x.dtype)
        if experts.shared_size:
            y = y + FeedForward(config, experts.shared_size, name="shared")(x)
        return y
