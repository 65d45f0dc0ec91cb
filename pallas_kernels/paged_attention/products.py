"""Products of a tile's queries with a block of keys and values, in the forms that XLA turns into fast CPU code.

Libraries for matrix products pack their operands anew in each call, which costs more than the product itself where few
queries meet many keys. So few queries are multiplied and summed; the sums run over vectors of ``LANES`` elements.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

FEW = 8  # up to so many queries per KV head a product is a multiplication and a sum
LANES = 16  # float32 elements of the widest vectors of CPUs


def scores(query: jax.Array, keys: jax.Array) -> jax.Array:
    """Products of queries [K,Q,D], float32, and keys [K,C,D], of any dtype: [K,Q,C], float32."""
    keys = keys.astype(jnp.float32)
    if query.shape[1] > FEW or query.shape[2] % LANES:
        return dense_scores(query, keys)
    return lax.platform_dependent(query, keys, cpu=few_scores, default=dense_scores)


def mix(weights: jax.Array, values: jax.Array, used: jax.Array) -> jax.Array:
    """Sums of values [K,C,Dv], of any dtype, under weights [K,Q,C]: [K,Q,Dv], float32.

    Args:
        used: which values count, bool [C]. The others have no weight, but 0 times infinity is not 0.
    """

    def some(weights: jax.Array, values: jax.Array) -> jax.Array:
        return mix_all(weights, jnp.where(used[:, None], values.astype(jnp.float32), 0.0))

    return lax.cond(jnp.all(used), mix_all, some, weights, values)


def mix_all(weights: jax.Array, values: jax.Array) -> jax.Array:
    """The sums over all values."""
    values = values.astype(jnp.float32)
    if weights.shape[1] <= FEW:
        return jnp.sum(weights[..., None] * values[:, None, :, :], axis=2)
    return jnp.einsum("kqc,kcd->kqd", weights, values, precision="highest")


def largest(logits: jax.Array) -> jax.Array:
    """Maximum over the last axis."""
    return by_lanes(lax.max, jnp.max, -jnp.inf, logits)


def total(weights: jax.Array) -> jax.Array:
    """Sum over the last axis."""
    return by_lanes(lax.add, jnp.sum, 0.0, weights)


def dense_scores(query: jax.Array, keys: jax.Array) -> jax.Array:
    """A matrix product."""
    return jnp.einsum("kqd,kcd->kqc", query, keys, precision="highest")


def few_scores(query: jax.Array, keys: jax.Array) -> jax.Array:
    """A multiplication, a sum of whole vectors, and the sum of the vectors' lanes."""
    products = query[:, :, None, :] * keys[:, None, :, :]
    products = products.reshape(*products.shape[:3], -1, LANES)
    lanes = sum_apart(lax.add, 0.0, products, 3)
    return jnp.einsum("kqcl,l->kqc", lanes, jnp.ones(LANES, jnp.float32), precision="highest")


def by_lanes(op, whole, start: float, x: jax.Array) -> jax.Array:
    """A reduction of the last axis: over whole vectors first, where a CPU's vectors fit."""
    if x.shape[-1] % LANES or x.shape[-1] == LANES:
        return whole(x, axis=-1)

    def in_steps(x: jax.Array) -> jax.Array:
        return whole(sum_apart(op, start, x.reshape(*x.shape[:-1], -1, LANES), x.ndim - 1), axis=-1)

    return lax.platform_dependent(x, cpu=in_steps, default=functools.partial(whole, axis=-1))


def sum_apart(op, start: float, x: jax.Array, axis: int) -> jax.Array:
    """A reduction of one axis that XLA compiles itself: the barrier hides from a library that it could do it too."""
    return lax.reduce(x, np.float32(start), lambda a, b: lax.optimization_barrier(op(a, b)), (axis,))
