"""Writing keys and values in plain XLA: the path of CPUs, and everybody's fallback."""

from __future__ import annotations

import jax

from pallas_kernels.kv_write.arguments import Call
from pallas_kernels.kv_write.reference import quantised
from pallas_kernels.rows import store


def refuses(call: Call) -> str | None:
    """Why this implementation cannot do the call, or None."""
    del call
    return None


def write(call: Call) -> list[tuple[jax.Array, jax.Array | None]]:
    """Pages and scale of each side."""
    results = []
    for side in call.sides:
        rows, scale = quantised(side)
        stored = store(side.pages, rows, call.slots)
        results.append((stored, side.scale if scale is None else store(side.scale, scale, call.slots)))
    return results
