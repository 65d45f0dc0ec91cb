"""Paged attention in Pallas Triton: for Ampere, the A100 of the paper, and wherever else that backend exists.

The host side: what the kernels can do, how a call is cut into tiles, and what is launched. On a machine without a GPU
the kernels run in the interpreter.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from pallas_kernels import platforms
from pallas_kernels.paged_attention import gpu_chip, places, triton_words
from pallas_kernels.paged_attention.arguments import Call

if TYPE_CHECKING:
    from pallas_kernels.paged_attention.triton_kernel import Shape

PLATFORM = "gpu"
SPLIT = 512
"""Slots that one program of a row with few queries reads: the same in every call, so that a row's bits are the same."""

WIDE = 64  # columns of a tile of a row with many queries
SPARE = 2**30  # first column of a tile that is not needed
MOST_SIZE = 256  # elements of a head
MOST_PROGRAMS = 2**16 - 1  # along the second and the third axis of a grid
CONVERTS_E4M3 = (8, 9)  # GPUs of this compute capability and later do so by themselves


@dataclasses.dataclass(frozen=True)
class Launch:
    """Which rows a launch attends, and in what tiles.

    Attributes:
        low, high: a row is attended if low <= its queries <= high.
        count: tiles that there can be.
        columns: columns of a tile.
        split: slots of a stretch, what one program reads of a row.
        parts: stretches that the tables can hold.
    """

    low: int
    high: int
    count: int
    columns: int
    split: int
    parts: int


def refuses(call: Call) -> str | None:
    """Why this implementation cannot do the call, or None."""
    if call.v_pages is None:
        return "it reads values from pages of their own"
    if call.q.dtype == jnp.float64:
        return "it computes in float32 and the queries are float64"
    for name, pages, size in (("k_pages", call.k_pages, call.q.shape[2]), ("v_pages", call.v_pages, call.v_width)):
        slots = pages.size // pages.shape[3]
        if slots >= 2**31:
            return f"{name} must have fewer than 2^31 slots, all heads together, to count them in 32 bits; got {slots}"
        if size > MOST_SIZE:
            return f"a head of {name} must fit in registers, at most {MOST_SIZE} elements; got {size}"
        if triton_words.in_pairs(pages) and pages.shape[3] % 2:
            return f"{name} of 2^31 to 2^32 bytes are read in pairs, so a head must have an even number of bytes"
    most = max(call.num_kv_heads, *(launch.parts for launch in launches(call)))
    if most > MOST_PROGRAMS:
        return f"a grid has at most {MOST_PROGRAMS} stretches of {SPLIT} slots, and KV heads; got {most}"
    return None


def launches(call: Call) -> list[Launch]:
    """One launch for rows with few queries, whose keys several programs share, and one for rows with more, if any can.

    A row has few queries if they fit in a narrow tile, or if it has one.
    """
    rows, tokens, group = call.block_tables.shape[0], call.q.shape[0], call.group_size
    capacity = call.block_tables.shape[1] * call.page_size
    longest = min(call.max_query_len or tokens, tokens)
    narrow = min(triton_words.power_of_two(group), WIDE)
    few = min(max(1, narrow // group), longest)
    columns = min(narrow, few * group)
    count = min(rows, tokens) * -(-few * group // columns)
    first = Launch(1, few, count, columns, SPLIT, -(-capacity // SPLIT))
    if longest == few:
        return [first]
    count = tokens * group // WIDE + min(rows, tokens // (few + 1))
    return [first, Launch(few + 1, tokens, count, WIDE, -(-capacity // SPLIT) * SPLIT, 1)]


def attend(call: Call) -> tuple[jax.Array, jax.Array]:
    """Output [T,H,Dv] in the dtype of the queries, and natural log-sum-exp [T,H] float32."""
    tokens, heads = call.q.shape[:2]
    lse = jnp.full((tokens, heads), -jnp.inf, jnp.float32)
    if call.sinks is not None:  # what a query sees that has no keys
        real = jnp.arange(tokens, dtype=jnp.int32) < call.query_starts[-1]
        lse = jnp.where(real[:, None], call.sinks, lse)
    results = jnp.zeros((tokens, heads, call.v_width), call.q.dtype), lse
    for launch in launches(call):
        results = run(call, launch, *results)
    return results


def run(call: Call, launch: Launch, out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attends the rows of a launch, and writes what their queries get into ``out`` and ``lse``."""
    # Other platforms do without Pallas Triton.
    from pallas_kernels.paged_attention import triton_kernel

    operands = {
        "tiles": cut(call, launch),
        "block_tables": call.block_tables,
        "kv_lens": call.kv_lens,
        "query_starts": call.query_starts,
        "q": call.q,
    }
    chip = gpu_chip.current()
    native = chip is not None and chip.capability >= CONVERTS_E4M3
    keys, operands["k"] = triton_words.view(call.k_pages, call.q.dtype, native)
    values, operands["v"] = triton_words.view(call.v_pages, call.q.dtype, native)
    optional = {
        "k_scale": None if call.k_scale is None else call.k_scale.reshape(-1),
        "v_scale": None if call.v_scale is None else call.v_scale.reshape(-1),
        "window": None if call.window is None else call.window.reshape(1),
        "alibi_slopes": call.alibi_slopes,
        "sinks": call.sinks,
        "tree_mask": call.tree_mask,
        "positions": None if call.tree_mask is None else places.locate(call).position,
    }
    operands |= {name: x for name, x in optional.items() if x is not None}
    small = max(keys.size, values.size) <= 128 and "float32" not in (keys.unit, values.unit)
    shape = triton_kernel.Shape(
        columns=launch.columns,
        block=64 if small else 32,
        split=launch.split,
        parts=launch.parts,
        tokens=call.q.shape[0],
        group=call.group_size,
        kv_heads=call.num_kv_heads,
        page_size=call.page_size,
        num_pages=call.k_pages.shape[0],
        keys=keys,
        values=values,
        k_scale=kind_of(call.k_scale),
        v_scale=kind_of(call.v_scale),
        scale=call.scale,
        causal=call.causal,
        soft_cap=call.soft_cap,
    )
    grid = (launch.count, launch.parts, call.num_kv_heads)
    if launch.parts == 1:
        return start(triton_kernel.attend, shape, grid, operands, {"out": out, "lse": lse})
    sizes = {"out": (launch.columns, call.v_width), "lse": (launch.columns,)}
    parts = {name: jax.ShapeDtypeStruct((*grid, *size), jnp.float32) for name, size in sizes.items()}
    of_parts = start(triton_kernel.attend, shape, grid, operands, parts)
    operands |= dict(zip(("part_out", "part_lse"), of_parts, strict=True))
    del operands["k"], operands["v"], operands["q"]
    grid = (launch.count, call.num_kv_heads)
    return start(triton_kernel.merge, shape, grid, operands, {"out": out, "lse": lse})


def start(body, shape: Shape, grid: tuple[int, ...], operands: dict, results: dict) -> tuple[jax.Array, jax.Array]:
    """Launches a kernel.

    Args:
        body: of ``triton_kernel``; gets ``shape`` and the refs of operands and results by name.
        results: arrays to write into, or shapes.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton as plt

    before = {f"{name}_before": x for name, x in results.items() if isinstance(x, jax.Array)}
    names = (*operands, *before, *results)

    def kernel(*refs):
        body(shape, dict(zip(names, refs, strict=True)))

    # Profiles and dumps show it.
    kernel.__name__ = f"paged_{body.__name__}_m{shape.width}_b{shape.block}_s{shape.parts}"
    return pl.pallas_call(
        kernel,
        out_shape=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in results.values()),
        grid=grid,
        input_output_aliases={len(operands) + index: index for index in range(len(before))},
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
        interpret=platforms.current() != "gpu",
        name=kernel.__name__,
    )(*operands.values(), *before.values())


def cut(call: Call, launch: Launch) -> jax.Array:
    """The tiles of a launch: row and first column, int32 [W,2]."""
    counts = call.query_starts[1:] - call.query_starts[:-1]
    columns = jnp.where((counts >= launch.low) & (counts <= launch.high), counts * call.group_size, 0)
    tiles = (columns + launch.columns - 1) // launch.columns
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    index = jnp.arange(launch.count, dtype=jnp.int32)
    row = jnp.sum(ends <= index[:, None], axis=1, dtype=jnp.int32)
    row = jnp.minimum(row, ends.shape[0] - 1)
    first = (index - (ends[row] - tiles[row])) * launch.columns
    return jnp.stack([row, jnp.where(index < ends[-1], first, SPARE)], axis=1)


def kind_of(scale: jax.Array | None) -> str:
    """What a scale differs by."""
    if scale is None:
        return "none"
    if scale.shape[0] * scale.shape[2] > 1:
        return "token"
    return "tensor" if scale.shape[1] == 1 else "head"
