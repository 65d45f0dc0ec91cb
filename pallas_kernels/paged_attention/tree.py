"""Tree masks: which of a row's queries see which, one bit each, for the verification of draft trees."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt32


def pack_tree_mask(mask: Bool[np.ndarray, "T M"]) -> UInt32[np.ndarray, "T W"]:
    """Packs a boolean mask into the words that ``paged_attention`` takes.

    Args:
        mask: mask[t, j] says whether token t sees the j-th query of its own row, bool [T,M] on the host.

    Returns:
        uint32 [T, ceil(M/32)]: bit ``j % 32`` of word ``j // 32``.

    Raises:
        ValueError: the mask does not have two axes.
    """
    mask = np.asarray(mask, dtype=bool)
    if mask.ndim != 2:
        raise ValueError(f"mask: must have 2 axes, [T, queries of the row]; got shape {mask.shape}")
    words = -(-max(mask.shape[1], 1) // 32)
    padded = np.zeros((mask.shape[0], words, 32), dtype=np.uint32)
    padded.reshape(mask.shape[0], -1)[:, : mask.shape[1]] = mask
    return np.bitwise_or.reduce(padded << np.arange(32, dtype=np.uint32), axis=2)


def depth(tree_mask: UInt32[Array, "T W"]) -> jax.Array:
    """How far below the cached tokens each token stands, int32 [T]: the number of its ancestors.

    Two branches of a tree hold tokens of the same position, so a token's slot does not tell its position; the number
    of queries that it sees, itself included, does.
    """
    return jnp.sum(jax.lax.population_count(tree_mask).astype(jnp.int32), axis=1) - 1


def bit(words: UInt32[Array, "Q W"], index: jax.Array) -> jax.Array:
    """Bit ``index[c]`` of each row of words, bool [Q,C]; False outside the words."""
    column = jnp.clip(index >> 5, 0, words.shape[1] - 1)
    picked = jnp.take(words, column, axis=1, mode="clip") >> (index & 31).astype(jnp.uint32)
    return (picked & 1).astype(bool) & (index >= 0) & (index < words.shape[1] * 32)
