"""Where the queries of a step stand in their rows, and which keys each of them sees."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import tree
from pallas_kernels.paged_attention.arguments import Call


@dataclasses.dataclass(frozen=True)
class Places:
    """Row by row and token by token: int32 but for ``real``.

    Attributes:
        query_lens: queries of each row in this step, [S].
        cached: tokens of each row that were there before this step, [S].
        row: row of each token, [T]; any row for padding tokens.
        real: whether a token belongs to a row, bool [T].
        position: position of each token in its sequence, [T].
    """

    query_lens: jax.Array
    cached: jax.Array
    row: jax.Array
    real: jax.Array
    position: jax.Array


def locate(call: Call) -> Places:
    """The places of a call's queries: a row's n queries are its last n tokens."""
    tokens = jnp.arange(call.q.shape[0], dtype=jnp.int32)
    starts = call.query_starts
    query_lens = starts[1:] - starts[:-1]
    cached = call.kv_lens - query_lens
    row = jnp.sum(starts[1:] <= tokens[:, None], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, starts.shape[0] - 2)
    offset = tokens - starts[row] if call.tree_mask is None else tree.depth(call.tree_mask)
    return Places(query_lens, cached, row, tokens < starts[-1], cached[row] + offset)


def visible(
    call: Call, places: Places, row: jax.Array, tokens: jax.Array, slots: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Which keys of a row each of its queries sees.

    Args:
        row: the row, int32 scalar.
        tokens: the queries' token indices, int32 [Q].
        slots: the keys' places in the row, int32 [C]: block * B + offset.

    Returns:
        Whether query i sees key j, bool [Q,C], and the key's position minus the query's, int32 [Q,C].
    """
    last = places.position.shape[0] - 1
    queries = places.position[jnp.minimum(tokens, last)][:, None]
    keys = slots[None, :]
    seen = keys < call.kv_lens[row]
    if call.tree_mask is not None:
        index = slots - places.cached[row]  # which of this step's queries the key came with; negative: cached before
        in_tree = tree.bit(call.tree_mask[jnp.minimum(tokens, last)], index)
        seen &= (index < 0) | in_tree
        of_key = jnp.clip(call.query_starts[row] + index, 0, last)
        keys = jnp.where(index < 0, slots, places.position[of_key])[None, :]
    elif call.causal:
        seen &= keys <= queries
    distance = keys - queries
    if call.window is not None:
        seen &= (distance > -call.window) | (call.window < 1)
    return jnp.broadcast_to(seen, distance.shape), distance


def bend(call: Call, logits: jax.Array, slopes: jax.Array | None, distance: jax.Array) -> jax.Array:
    """Soft cap and ALiBi, in this order, on scaled logits.

    Args:
        logits: of any shape.
        slopes: the call's ALiBi slopes, and
        distance: key position minus query position, both shaped to broadcast against the logits.
    """
    if call.soft_cap is not None:
        logits = call.soft_cap * jnp.tanh(logits / call.soft_cap)
    if slopes is not None:
        logits += slopes * distance.astype(logits.dtype)
    return logits
