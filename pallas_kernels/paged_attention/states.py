"""Joining attention over parts of the keys: every part's output with its log-sum-exp is enough."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def merge_states(
    outs: Float[Array, "parts T H D"], lses: Float[Array, "parts T H"]
) -> tuple[Float[Array, "T H D"], Float[Array, "T H"]]:
    """Joins attention outputs over disjoint sets of keys into the output over their union.

    A part without visible keys has an lse of -inf and counts for nothing; where all parts are so, the output is 0 and
    the lse -inf. Attention sinks belong into one part only.

    Args:
        outs: outputs of the parts, of any float dtype.
        lses: natural log-sum-exp of the parts' logits, float32.

    Returns:
        The joint output in ``outs``' dtype and the joint lse, float32.

    Raises:
        ValueError: the shapes do not fit.
    """
    outs, lses = jnp.asarray(outs), jnp.asarray(lses)
    if outs.ndim != 4 or lses.shape != outs.shape[:3] or outs.shape[0] == 0:
        raise ValueError(
            f"outs, lses: shapes must be [parts,T,H,D] and [parts,T,H] with at least one part; "
            f"got {tuple(outs.shape)} and {tuple(lses.shape)}"
        )
    lses = lses.astype(jnp.float32)
    top = jnp.max(lses, axis=0)
    base = jnp.where(jnp.isneginf(top), 0.0, top)
    weights = jnp.exp(lses - base)
    total = jnp.sum(weights, axis=0)
    # A part of weight 0 may hold anything, so it is dropped and not multiplied by 0.
    terms = jnp.where(weights[..., None] > 0, weights[..., None] * outs.astype(jnp.float32), 0.0)
    out = jnp.sum(terms, axis=0) / jnp.where(total > 0, total, 1.0)[..., None]
    return out.astype(outs.dtype), jnp.where(total > 0, base + jnp.log(jnp.where(total > 0, total, 1.0)), -jnp.inf)


def finish(out: jax.Array, total: jax.Array, top: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Normalises a softmax in progress.

    Args:
        out: sum of weight times value, [...,D] float32.
        total: sum of weights, [...]; 0 where nothing was visible.
        top: what was subtracted from the logits before the exponential, [...].

    Returns:
        The output, zeros where nothing was visible, and the natural log-sum-exp, -inf there.
    """
    seen = total > 0
    safe = jnp.where(seen, total, 1.0)
    out = jnp.where(seen[..., None], out / safe[..., None], 0.0)
    return out, jnp.where(seen, top + jnp.log(safe), -jnp.inf)
