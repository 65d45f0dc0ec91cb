"""One tile of columns against a stretch of its row's keys, and the merge of stretches, in Pallas Triton.

A column is one query head of one query. A row of n queries has n * G columns per KV head, query by query, and a tile
holds neighbouring columns of one row. The slots of a block are gathered straight from their pages; what no column of
the tile sees is not read at all.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.paged_attention import triton_words
from pallas_kernels.paged_attention.triton_words import Words

LOG2_E = math.log2(math.e)
LOWEST = -1e30  # start of the running maximum: finite, so that differences are
TINY = 1e-37  # smallest unit of values, a normal float32
NEVER = 2**30  # a window that holds every key

Refs = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a kernel is compiled for.

    Attributes:
        columns: columns of a tile.
        block: slots of a block, a power of two from 16.
        split: slots of a stretch, a multiple of ``block``.
        parts: stretches that a table can hold.
        tokens, group, kv_heads, page_size, num_pages: T, H/K, K, B, N.
        keys, values: how pages are read.
        k_scale, v_scale: what a scale differs by: "token", "head", "tensor", or "none".
        scale, causal, soft_cap: options of the call.
    """

    columns: int
    block: int
    split: int
    parts: int
    tokens: int
    group: int
    kv_heads: int
    page_size: int
    num_pages: int
    keys: Words
    values: Words
    k_scale: str
    v_scale: str
    scale: float
    causal: bool
    soft_cap: float | None

    @property
    def width(self) -> int:
        """Columns in registers: a power of two, and no fewer than a product takes."""
        return triton_words.power_of_two(self.columns)


@dataclasses.dataclass(frozen=True)
class Tile:
    """The columns of a tile, [M] but for the scalars ``row``, ``cached``, ``start``, ``low`` and ``high``.

    Attributes:
        row: their row, whose first query is token ``start``, behind ``cached`` keys of earlier steps.
        used: whether there is such a column.
        place: column of the tile.
        token, head: where it is in [T,H]; outside if there is none.
        position: of its query.
        begin, stop: slots that it sees: begin <= slot < stop (in a draft tree, slots that it may see).
        low, high: slots that any of them sees.
    """

    row: jax.Array
    cached: jax.Array
    start: jax.Array
    used: jax.Array
    place: jax.Array
    token: jax.Array
    head: jax.Array
    position: jax.Array
    begin: jax.Array
    stop: jax.Array
    low: jax.Array
    high: jax.Array


def locate(shape: Shape, refs: Refs, tile: jax.Array, kv_head: jax.Array) -> Tile:
    """The columns of a tile under a KV head."""
    row, first = refs["tiles"][tile, 0], refs["tiles"][tile, 1]
    start, kv_len = refs["query_starts"][row], refs["kv_lens"][row]
    count = refs["query_starts"][row + 1] - start
    cached = kv_len - count
    place = jnp.arange(shape.width, dtype=jnp.int32)
    column = first + place
    query = lax.div(column, shape.group)
    used = (place < shape.columns) & (query < count)
    # Masks keep all else from memory; in the interpreter, which writes old values back there, it has to lie outside.
    token = jnp.where(used, start + query, shape.tokens)
    position = cached + query
    stop = jnp.minimum(position + 1, kv_len) if shape.causal else kv_len + jnp.zeros_like(position)
    if "tree_mask" in refs:
        position = plt.load(refs["positions"].at[token], mask=used, other=0)
        stop = kv_len + jnp.zeros_like(position)
    begin = jnp.zeros_like(position)
    if "window" in refs:
        window = refs["window"][0]
        window = jnp.where(window < 1, NEVER, jnp.minimum(window, NEVER))
        begin = jnp.maximum(position + 1 - window, 0)
    stop = jnp.where(used, stop, 0)
    low = jnp.min(jnp.where(used, begin, NEVER))
    # A length that its table cannot hold is an error of the caller's, but nothing outside the table is read.
    high = jnp.minimum(jnp.max(stop), refs["block_tables"].shape[1] * shape.page_size)
    head = kv_head * shape.group + lax.rem(column, shape.group)
    return Tile(row, cached, start, used, place, token, head, position, begin, stop, low, high)


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """``a @ b`` in float32; float32 operands are multiplied as such and not rounded to fewer digits."""
    precision = "highest" if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def elements(side: Words, index: int) -> jax.Array:
    """Which elements of a head the words of a plane hold, int32 [lanes]."""
    return jnp.arange(side.lanes, dtype=jnp.int32) * side.planes + index


def read(side: Words, ref: jax.Array, rows: jax.Array, inside: jax.Array) -> list[jax.Array]:
    """Rows of the pages as planes [rows,lanes]; zeros for rows that are not inside."""
    lane = jnp.arange(side.lanes, dtype=jnp.int32)
    mask = inside[:, None] & (lane < side.count)[None, :]
    words = plt.load(ref.at[rows[:, None], lane[None, :]], mask=mask, other=0)
    return [triton_words.plane(side, words, index) for index in range(side.planes)]


def read_query(shape: Shape, refs: Refs, tile: Tile) -> tuple[list[jax.Array], jax.Array]:
    """The queries as planes [M,lanes] in the unit of the keys, and what their logits are multiplied by, [M].

    float16 has fewer exponents than bfloat16, so such queries are brought near 1 by a power of two per column.
    """
    side, unit = shape.keys, jnp.dtype(shape.keys.unit)
    planes = []
    for index in range(side.planes):
        element = elements(side, index)
        mask = tile.used[:, None] & (element < side.size)[None, :]
        where = refs["q"].at[tile.token[:, None], tile.head[:, None], element[None, :]]
        planes.append(plt.load(where, mask=mask, other=0))
    factor = jnp.full((shape.width,), shape.scale, jnp.float32)
    if unit == jnp.float16 and planes[0].dtype != jnp.float16:
        planes = [x.astype(jnp.float32) for x in planes]
        largest = jnp.zeros((shape.width,), jnp.float32)
        for x in planes:
            largest = jnp.maximum(largest, jnp.max(jnp.abs(x), axis=1))
        # The power of two below the largest, and its inverse, from the bits of the exponent.
        exponent = lax.bitcast_convert_type(largest, jnp.int32) >> 23
        exponent = jnp.minimum(jnp.maximum(exponent, 1), 253)
        planes = [x * lax.bitcast_convert_type((254 - exponent) << 23, jnp.float32)[:, None] for x in planes]
        factor *= lax.bitcast_convert_type(exponent << 23, jnp.float32)
    return [x.astype(unit) for x in planes], factor


def scale_of(ref: jax.Array, kind: str, kv_head: jax.Array) -> jax.Array:
    """A scale that does not differ by token."""
    return ref[kv_head if kind == "head" else 0]


def visible(refs: Refs, tile: Tile, slots: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether each column sees each slot, bool [M,C], and the key's position minus the query's, int32 [M,C]."""
    slots = slots[None, :]
    seen = slots < tile.stop[:, None]
    if "tree_mask" not in refs:
        return seen & (slots >= tile.begin[:, None]), slots - tile.position[:, None]
    words = refs["tree_mask"].shape[1]
    index = slots - tile.cached  # which of this step's queries the key came with; negative: cached before
    new = seen & (index >= 0) & (index < 32 * words)
    bits = plt.load(refs["tree_mask"].at[tile.token[:, None], jnp.where(new, index >> 5, 0)], mask=new, other=0)
    own = (bits >> jnp.where(new, index & 31, 0).astype(jnp.uint32)) & 1
    key = plt.load(refs["positions"].at[jnp.where(new, tile.start + index, 0)], mask=new, other=0)
    key = jnp.where(new, key, slots)
    seen &= (index < 0) | (new & (own == 1))
    return seen & (key >= tile.begin[:, None]), key - tile.position[:, None]


def attend(shape: Shape, refs: Refs) -> None:
    """Kernel: one tile against one stretch, under one KV head."""
    index, part, kv_head = (pl.program_id(axis) for axis in range(3))
    tile = locate(shape, refs, index, kv_head)
    first = lax.div(jnp.maximum(part * shape.split, tile.low), shape.block)
    end = lax.div(jnp.minimum((part + 1) * shape.split, tile.high) + shape.block - 1, shape.block)

    @pl.when(first < end)
    def _():
        step = stepper(shape, refs, tile, kv_head)
        zeros = jnp.zeros((shape.width,), jnp.float32)
        outs = [jnp.zeros((shape.width, shape.values.lanes), jnp.float32)] * shape.values.planes
        state = (zeros + LOWEST, zeros, jnp.float32(TINY), outs)
        top, total, unit, outs = lax.fori_loop(first, end, step, state)
        if shape.v_scale == "token":
            outs = [out * unit for out in outs]
        lse, outs = normalise(top, total, outs)
        if shape.parts == 1:
            finish(shape, refs, tile, kv_head, lse, outs)
        else:
            plt.store(refs["lse"].at[index, part, kv_head, tile.place], lse, mask=tile.used)
            for plane, out in enumerate(outs):
                where, mask = place(shape, tile, plane)
                plt.store(refs["out"].at[index, part, kv_head, *where], out, mask=mask)


def stepper(shape: Shape, refs: Refs, tile: Tile, kv_head: jax.Array) -> Callable:
    """What the loop over blocks does with a block and (maximum, total, unit of values, outputs)."""
    query, factor = read_query(shape, refs, tile)
    if shape.k_scale in ("head", "tensor"):
        factor *= scale_of(refs["k_scale"], shape.k_scale, kv_head)
    bend = "alibi_slopes" in refs or shape.soft_cap is not None
    if not bend:
        factor *= LOG2_E
    slope = None
    if "alibi_slopes" in refs:
        slope = plt.load(refs["alibi_slopes"].at[tile.head], mask=tile.used, other=0.0)[:, None]

    def step(block: jax.Array, state: tuple) -> tuple:
        top, total, unit, outs = state
        slots = block * shape.block + jnp.arange(shape.block, dtype=jnp.int32)
        inside = (slots >= tile.low) & (slots < tile.high)
        page = plt.load(refs["block_tables"].at[tile.row, lax.div(slots, shape.page_size)], mask=inside, other=0)
        page = jnp.minimum(jnp.maximum(page, 0), shape.num_pages - 1)
        rows = (page * shape.kv_heads + kv_head) * shape.page_size + lax.rem(slots, shape.page_size)
        keys = read(shape.keys, refs["k"], rows, inside)
        logits = sum(product(q, k.T) for q, k in zip(query, keys, strict=True))  # [M,C]
        if shape.k_scale == "token":
            logits *= plt.load(refs["k_scale"].at[rows], mask=inside, other=0.0)[None, :]
        logits *= factor[:, None]
        seen, distance = visible(refs, tile, slots)
        if shape.soft_cap is not None:
            logits = shape.soft_cap * jnp.tanh(logits / shape.soft_cap)
        if slope is not None:
            logits += slope * distance.astype(jnp.float32)
        if bend:
            logits *= LOG2_E
        logits = jnp.where(seen, logits, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(logits, axis=1))
        weights = jnp.exp2(logits - new_top[:, None])
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + jnp.sum(weights, axis=1)
        if shape.v_scale == "token":
            # Weights times scales are kept at 1 or below, where float16 is precise, by a running unit.
            scales = plt.load(refs["v_scale"].at[rows], mask=inside, other=0.0)
            new_unit = jnp.maximum(unit, jnp.max(jnp.abs(scales)))
            weights *= (scales / new_unit)[None, :]
            shrink *= unit / new_unit
            unit = new_unit
        weights = weights.astype(shape.values.unit)
        values = read(shape.values, refs["v"], rows, inside)
        outs = [out * shrink[:, None] + product(weights, v) for out, v in zip(outs, values, strict=True)]
        return new_top, total, unit, outs

    return step


def place(shape: Shape, tile: Tile, plane: int) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Where a plane [M,lanes] of outputs is in a tile [M,Dv], and which of it is there."""
    element = elements(shape.values, plane)
    mask = tile.used[:, None] & (element < shape.values.size)[None, :]
    return (tile.place[:, None], element[None, :]), mask


def normalise(top: jax.Array, total: jax.Array, outs: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
    """The log-sum-exp to the base 2, [M], and outputs of a softmax in progress; -inf and zeros where nothing is seen.

    Args:
        top: maximum of the logits to the base 2, [M], ``total`` of the weights under it, and
        outs: sums of weight times value, planes [M,lanes].
    """
    some = jnp.where(total > 0, total, 1.0)
    lse = jnp.where(total > 0, top + jnp.log2(some), -jnp.inf)
    return lse, [out / some[:, None] for out in outs]


def finish(shape: Shape, refs: Refs, tile: Tile, kv_head: jax.Array, lse: jax.Array, outs: list[jax.Array]) -> None:
    """Writes what ``normalise`` gave for a whole row, with its sinks and with a scale of values that is not per token.

    A row that needs one stretch gets the same bits with and without a merge.
    """
    gain = jnp.ones_like(lse)
    if "sinks" in refs:
        sink = plt.load(refs["sinks"].at[tile.head], mask=tile.used, other=0.0) * LOG2_E
        top = jnp.maximum(lse, sink)
        joint = top + jnp.log2(jnp.exp2(lse - top) + jnp.exp2(sink - top))
        gain, lse = jnp.exp2(lse - joint), joint
    plt.store(refs["lse"].at[tile.token, tile.head], lse / LOG2_E, mask=tile.used)
    if shape.v_scale in ("head", "tensor"):
        gain *= scale_of(refs["v_scale"], shape.v_scale, kv_head)
    for plane, out in enumerate(outs):
        (_, element), mask = place(shape, tile, plane)
        where = refs["out"].at[tile.token[:, None], tile.head[:, None], element]
        plt.store(where, (out * gain[:, None]).astype(refs["out"].dtype), mask=mask)


def merge(shape: Shape, refs: Refs) -> None:
    """Kernel: joins the stretches of one tile under one KV head, in the order of its keys, so that bits are its own."""
    index, kv_head = pl.program_id(0), pl.program_id(1)
    tile = locate(shape, refs, index, kv_head)
    first, end = lax.div(tile.low, shape.split), lax.div(tile.high + shape.split - 1, shape.split)

    @pl.when(tile.low < tile.high)
    def _():
        def step(part: jax.Array, state: tuple) -> tuple:
            top, total, outs = state
            lse = plt.load(refs["part_lse"].at[index, part, kv_head, tile.place], mask=tile.used, other=-jnp.inf)
            new_top = jnp.maximum(top, lse)
            shrink, weight = jnp.exp2(top - new_top), jnp.exp2(lse - new_top)
            joint = []
            for plane, out in enumerate(outs):
                where, mask = place(shape, tile, plane)
                of_part = plt.load(refs["part_out"].at[index, part, kv_head, *where], mask=mask, other=0.0)
                joint.append(out * shrink[:, None] + of_part * weight[:, None])
            return new_top, total * shrink + weight, joint

        zeros = jnp.zeros((shape.width,), jnp.float32)
        outs = [jnp.zeros((shape.width, shape.values.lanes), jnp.float32)] * shape.values.planes
        top, total, outs = lax.fori_loop(first, end, step, (zeros + LOWEST, zeros, outs))
        finish(shape, refs, tile, kv_head, *normalise(top, total, outs))
