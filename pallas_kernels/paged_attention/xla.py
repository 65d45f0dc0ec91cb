"""Paged attention in plain XLA: the path of CPUs, and everybody's fallback.

Two loops over query tiles share a call: one over the rows with one query, in tiles of one, and one over the rows with
more, in wide tiles. Both are counted from the lengths at run time, so the cost follows what the rows hold and not how
wide their tables are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention import tiles
from pallas_kernels.paged_attention.arguments import Call
from pallas_kernels.paged_attention.places import locate


def refuses(call: Call) -> str | None:
    """Why this implementation cannot do the call, or None."""
    if call.q.dtype == jnp.float64:
        return "it computes in float32 and the queries are float64"
    return None


def attend(call: Call) -> tuple[jax.Array, jax.Array]:
    """Output [T,H,Dv] and natural log-sum-exp [T,H], both float32."""
    places = locate(call)
    alone = places.query_lens == 1
    out, lse = tiles.attend(call, places, alone, 1)
    if call.max_query_len != 1:
        many, many_lse = tiles.attend(call, places, places.query_lens > 1, 64)
        alone = alone[places.row]
        out = jnp.where(alone[:, None, None], out, many)
        lse = jnp.where(alone[:, None], lse, many_lse)
    real = places.real[:, None]
    return jnp.where(real[:, :, None], out, 0.0), jnp.where(real, lse, -jnp.inf)
