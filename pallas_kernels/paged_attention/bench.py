"""What is timed on the device that is there: calls made from an ``ArgSpec``, on our kernels and on others'.

Every call is a function of one array that gives an array of the same shape, so that many of them can be chained on the
device, and the host's dispatch is not in the time. Candidates take turns, round by round: a ratio should compare times
of one round.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.paged_attention.arg_specs import ArgSpec

Arrays = dict[str, jax.Array]
Step = Callable[[jax.Array, Arrays], jax.Array]
Timed = Callable[[int], float]
"""Seconds that some calls take together."""
TILE = 64  # pages with content of their own; the others repeat it, which no kernel can tell


def make_arrays(spec: ArgSpec, seed: int = 0, shuffled: bool = True) -> Arrays:
    """The arrays of a call.

    Args:
        shuffled: pages of rows lie in the pool in random order, as in a server that has run for a while; False: one
            after the other.
    """
    rng = np.random.default_rng(seed)
    shapes = spec.shapes()
    lengths = np.array([length for _, length in spec.rows])
    queries = np.array([count for count, _ in spec.rows])
    blocks = -(-lengths // spec.page_size)
    pages = rng.permutation(spec.num_pages) if shuffled else np.arange(spec.num_pages)
    tables = np.zeros((len(lengths), spec.table_width), np.int32)
    ends = np.cumsum(blocks)
    for row, (count, end) in enumerate(zip(blocks, ends, strict=True)):
        tables[row, :count] = pages[end - count : end]
    found = {
        "block_tables": tables,
        "kv_lens": lengths.astype(np.int32),
        "query_starts": np.concatenate([[0], np.cumsum(queries)]).astype(np.int32),
    }
    if "tree_mask" in shapes:
        raise ValueError(f"tree: cannot be timed; {spec.name} has a tree mask")
    keys = iter(jax.random.split(jax.random.key(seed), len(shapes)))
    random = {name: fill(next(keys), shape) for name, shape in shapes.items() if name not in found}
    return {name: jnp.asarray(x) for name, x in found.items()} | random


def fill(key: jax.Array, shape: jax.ShapeDtypeStruct) -> jax.Array:
    """Random content: of a pool, or a few pages of it that are repeated."""
    first, *rest = shape.shape
    count = min(first, TILE) if len(rest) == 3 else first
    if jnp.issubdtype(shape.dtype, jnp.integer):
        info = jnp.iinfo(shape.dtype)
        tile = jax.random.randint(key, (count, *rest), info.min, info.max, jnp.int32).astype(shape.dtype)
    else:
        tile = jax.random.uniform(key, (count, *rest), jnp.float32, -1.0, 1.0).astype(shape.dtype)
    return tile if count == first else jnp.take(tile, jnp.arange(first) % count, axis=0)


def ours(spec: ArgSpec, implementation: str) -> Step:
    """A call of ``paged_attention``."""

    def step(q: jax.Array, arrays: Arrays) -> jax.Array:
        out = spec.call({**arrays, "q": q}, implementation)
        return out[0] if spec.lse else out

    return step


def contiguous(spec: ArgSpec) -> ArgSpec:
    """The same rows without paging: each has one page as long as itself.

    Raises:
        ValueError: rows of different lengths.
    """
    lengths = {length for _, length in spec.rows}
    if len(lengths) != 1:
        raise ValueError(f"rows: must have one length; got {sorted(lengths)} in {spec.name}")
    return dataclasses.replace(spec, name=f"{spec.name}_contiguous", page_size=lengths.pop())


def why_not_jax(spec: ArgSpec) -> str | None:
    """Why jax's own GPU op cannot do the call, or None."""
    if spec.max_query_len != 1 or len(set(spec.rows)) != 1:
        return "it decodes rows of one length"
    if spec.k.quantised or spec.k != spec.v or spec.window or spec.sinks or spec.alibi or spec.lse:
        return "it has neither windows, sinks, ALiBi slopes nor the log-sum-exp, and is compared on plain pages"
    return None if spec.table_width % 16 == 0 else "its tables must be a multiple of 16 pages wide"


def jax_op(spec: ArgSpec, arrays: Arrays, interpret: bool = False) -> tuple[Step, Arrays]:
    """A call of the paged attention that jax ships for GPUs, and the arrays in its order, [K,N,B,D]."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import paged_attention as theirs

    pages = {name: jnp.swapaxes(arrays[name], 0, 1) for name in ("k_pages", "v_pages")}
    kept = {name: arrays[name] for name in ("q", "block_tables", "kv_lens")}

    def step(q: jax.Array, arrays: Arrays) -> jax.Array:
        scaled = (q * spec.size**-0.5).astype(q.dtype)  # it has no scale of its own
        return theirs.paged_attention(
            scaled,
            arrays["k_pages"],
            arrays["v_pages"],
            arrays["block_tables"],
            arrays["kv_lens"],
            attn_logits_soft_cap=spec.soft_cap,
            interpret=interpret,
        ).astype(q.dtype)

    return step, kept | pages


def chained(step: Step) -> Callable[[Arrays, Any], jax.Array]:
    """``count`` calls, each on what the one before gave, as one program of (arrays, count)."""

    def run(arrays: Arrays, count: jax.Array) -> jax.Array:
        q = arrays["q"]
        return lax.fori_loop(0, count, lambda _, x: step(x, arrays).astype(x.dtype), q)

    return jax.jit(run)


def copy_step(x: jax.Array, arrays: Arrays) -> jax.Array:
    """Reads and writes an array once: what the memory of the device can do."""
    del arrays
    return x + 1


def timer(step: Step, arrays: Arrays) -> Timed:
    """Times chained calls of a step; compiled and warm when this returns."""
    run = chained(step)

    def timed(count: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(run(arrays, np.int32(count)))
        return time.perf_counter() - begin

    timed(1)
    return timed


def compete(timers: Mapping[str, Timed], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Seconds per call of each, a figure per round.

    Args:
        seconds: that a timing should take at least.
    """
    counts = {name: max(4, round(seconds / max(timed(1), 1e-6))) for name, timed in timers.items()}
    found: dict[str, list[float]] = {name: [] for name in timers}
    names = list(timers)
    for index in range(rounds):
        first = index % max(1, len(names))
        for name in names[first:] + names[:first]:  # nobody always comes after the same
            found[name].append(timers[name](counts[name]) / counts[name])
    return found
