"""The parts of a decoder layer that know nothing of the cache: projections, norms, activations, feed-forward.

Every product with a weight goes through :func:`linear`. Norms compute in float32 and return their input's dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from paxkv.models.architecture import DecoderConfig

ACTIVATE: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
}


def linear(
    x: Float[Array, "*rows inner"], kernel: Float[Array, "inner outer"], bias: Float[Array, " outer"] | None = None
) -> Float[Array, "*rows outer"]:
    """``x @ kernel + bias`` in x's dtype."""
    y = jax.lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))
    return y if bias is None else y + bias


def soft_cap(x: Float[Array, "*rows"], cap: float | None) -> Float[Array, "*rows"]:
    """Bounds x smoothly to (-cap, cap); None bounds nothing."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def rms_norm(
    x: Float[Array, "*rows width"], scale: Float[Array, " width"], eps: float, offset: float = 0.0
) -> Float[Array, "*rows width"]:
    """x over its root mean square, times (scale + offset) (Zhang and Sennrich 2019)."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * (scale.astype(jnp.float32) + offset)).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*rows width"], scale: Float[Array, " width"], bias: Float[Array, " width"], eps: float
) -> Float[Array, "*rows width"]:
    """x without its mean, over its standard deviation, times scale plus bias (Ba et al. 2016)."""
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


class Norm(nn.Module):
    """The norm of the config over the last axis."""

    config: DecoderConfig
    kind: str | None = None

    @nn.compact
    def __call__(self, x: Float[Array, "*rows width"]) -> Float[Array, "*rows width"]:
        config, width = self.config, (x.shape[-1],)
        scale = self.param("scale", nn.initializers.ones, width, config.dtype)
        if (self.kind or config.norm) == "rms":
            return rms_norm(x, scale, config.norm_eps, config.norm_offset)
        return layer_norm(x, scale, self.param("bias", nn.initializers.zeros, width, config.dtype), config.norm_eps)


class Linear(nn.Module):
    """A projection to ``width`` lanes."""

    config: DecoderConfig
    width: int
    bias: bool = False

    @nn.compact
    def __call__(self, x: Float[Array, "*rows inner"]) -> Float[Array, "*rows outer"]:
        dtype = self.config.dtype
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (x.shape[-1], self.width), dtype)
        bias = self.param("bias", nn.initializers.zeros, (self.width,), dtype) if self.bias else None
        return linear(x, kernel, bias)


def activate(hidden: Float[Array, "*rows width"], activation: str, gated: bool) -> Float[Array, "*rows _"]:
    """The activation; gated: of the first half of the lanes, times the second half."""
    if not gated:
        return ACTIVATE[activation](hidden)
    gate, up = jnp.split(hidden, 2, axis=-1)
    return ACTIVATE[activation](gate) * up


class FeedForward(nn.Module):
    """Two projections around an activation; a gate and its partner share one matrix, gate first."""

    config: DecoderConfig
    width: int

    @nn.compact
    def __call__(self, x: Float[Array, "T hidden"]) -> Float[Array, "T hidden"]:
        config = self.config
        name, lanes = ("gate_up", 2 * self.width) if config.gated else ("up", self.width)
        hidden = Linear(config, lanes, config.ffn_bias, name=name)(x)
        hidden = activate(hidden, config.activation, config.gated)
        return Linear(config, config.hidden_size, config.ffn_bias, name="down")(hidden)
