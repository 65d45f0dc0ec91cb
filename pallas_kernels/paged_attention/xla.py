"""Paged attention in plain XLA: the path of CPUs, and everybody's fallback.

Rows with one query go through tiles of one query, the others through wider ones; a mixed call runs both loops. Their
trips are counted from the lengths at run time: the cost follows what the rows hold and not how wide their tables are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import tiles
from pallas_kernels.paged_attention.arguments import Call
from pallas_kernels.paged_attention.places import locate

TILE = 64  # queries of a tile
SMALL_TILE = 16  # queries of a tile where no row has more


def refuses(call: Call) -> str | None:
    """Why this implementation cannot do the call, or None."""
    if call.q.dtype == jnp.float64:
        return "it computes in float32 and the queries are float64"
    if call.k_pages.shape[0] * call.num_kv_heads > np.iinfo(np.int32).max:
        return f"it counts heads of pages in int32 and the pool has {call.k_pages.shape[0] * call.num_kv_heads}"
    return None


def attend(call: Call) -> tuple[jax.Array, jax.Array]:
    """Output [T,H,Dv] and natural log-sum-exp [T,H], both float32."""
    places = locate(call)
    alone = places.query_lens == 1
    out, lse = tiles.attend(call, places, alone, 1)
    if call.max_query_len != 1:
        small = call.max_query_len is not None and call.max_query_len <= SMALL_TILE
        many, many_lse = tiles.attend(call, places, places.query_lens > 1, SMALL_TILE if small else TILE)
        alone = alone[places.row]
        out = jnp.where(alone[:, None, None], out, many)
        lse = jnp.where(alone[:, None], lse, many_lse)
    real = places.real[:, None]
    return jnp.where(real[:, :, None], out, 0.0), jnp.where(real, lse, -jnp.inf)
