"""Sizes of the TPU kernel's blocks: what fits, and what to take.

Two floors, in cycles per KV token of a row that decodes with 32 query heads over 8 KV heads of 128. Memory: the keys
and values of a token over what HBM brings in a cycle. Instructions: the operations of the kind that fills its slots
most, over the slots (512 tokens a block, pages of 128). The schedule lies between: products and sums over lanes have
latencies, which teams hide for each other.

                 v5e bf16   e4m3   int8   v6e bf16   e4m3   int8   7x bf16   e4m3   int8
    memory            7.5    3.7    3.7        4.4    2.2    2.2       2.4    1.2    1.2
    instructions     0.48   0.50   0.76       0.35   0.40   0.23      0.35   0.18   0.32
    bound by       matrix vector vector       load vector vector      load   load vector
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from pallas_kernels.paged_attention import tpu_chip, tpu_tuned
from pallas_kernels.paged_attention.arguments import Call
from pallas_kernels.paged_attention.tpu_chip import Chip
from pallas_kernels.paged_attention.tpu_layout import LANES, Layout, sublanes

Buffers = dict[str, tuple[tuple[int, ...], jnp.dtype]]


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Sizes of a launch; powers of two.

    Attributes:
        queries: queries of a job; 1 is for rows that decode.
        tokens: tokens of a block.
        depth: blocks in the ring, at least 2; with 3 and more the copies never wait for the arithmetic.
        parts: pieces that a block is attended in, as far as it has pages for them; 0 leaves that to ``count_parts``.

    Raises:
        ValueError: a size is not a power of two, or the depth below 2.
    """

    queries: int
    tokens: int
    depth: int
    parts: int = 0

    def __post_init__(self) -> None:
        for name in ("queries", "tokens", "parts"):
            value = getattr(self, name)
            if value < (0 if name == "parts" else 1) or value & (value - 1):
                raise ValueError(f"Blocks.{name}: must be a power of two; got {value}")
        if self.depth < 2:
            raise ValueError(
                f"Blocks.depth: must be at least 2, one block attended and one in flight; got {self.depth}"
            )


HEIGHT = 128
"""Rows of logits to aim at: as many as still fit in registers with a register of columns."""

SMALL_PAGE = 32 << 10
"""Bytes of a page of keys up to which a copy costs more to issue than to do, so that joining it to others pays."""

JOINED = 8
"""Pages, at most, that come in one copy."""

MOST_PAGES = 32 * JOINED
"""Pages of a block: which of their groups are neighbours is told by the bits of a word."""


def default(call: Call, several: bool) -> Blocks:
    """Sizes found by ``pallas_kernels.tune`` for the chip and calls like this one, or else by rule.

    They must not depend on how many rows a call has or how long its tables are: a row's bits depend on its blocks.

    Args:
        several: for rows with several queries.
    """
    plain = rule(call, several)
    if call.q.dtype != jnp.bfloat16:  # nothing has been tuned for these
        return plain
    found = tpu_tuned.nearest(kind_of(call, several), tpu_tuned.read(tpu_chip.current().name))
    if found is None:
        return plain
    return Blocks(**{**found, "queries": clip_queries(call, found["queries"])})


def kind_of(call: Call, several: bool) -> tpu_tuned.Kind:
    """What of a call decides which blocks are good."""
    k = "/token" if token_scaled(call.k_pages, call.k_scale) else ""
    v = "/token" if token_scaled(call.v_pages, call.v_scale) else ""
    return tpu_tuned.Kind(
        several=several,
        k=f"{call.k_pages.dtype.name}{k}",
        v=f"{call.v_pages.dtype.name}{v}",
        page_size=call.page_size,
        size=call.q.shape[2],
        heads=call.q.shape[1],
        kv_heads=call.num_kv_heads,
    )


def rule(call: Call, several: bool) -> Blocks:
    """Sizes that do well on every generation. ``several``: for rows with several queries."""
    if not several:
        return Blocks(queries=1, tokens=512, depth=4)
    return Blocks(queries=clip_queries(call, 16), tokens=512, depth=3)


def clip_queries(call: Call, queries: int) -> int:
    """No more than the power of two that holds what a row may have."""
    return queries if call.max_query_len is None else min(queries, 1 << (call.max_query_len - 1).bit_length())


def arrange(call: Call, blocks: Blocks, chip: Chip) -> Layout:
    """The layout of a call in blocks of these sizes or, where they do not fit, of smaller ones.

    Raises:
        ValueError: nothing fits; says what is short of what.
    """
    budget = chip.vmem_bytes * 3 // 4  # the rest is for what the compiler keeps there itself
    while True:
        layout = lay_out(call, blocks, chip)
        need = sum(padded_bytes(*buffer) for buffer in buffers(call, layout).values())
        if need <= budget:
            return layout
        if blocks.depth > 2:
            blocks = dataclasses.replace(blocks, depth=blocks.depth - 1)
        elif layout.pages > layout.halves:
            blocks = dataclasses.replace(blocks, tokens=layout.block_tokens // 2)
        elif blocks.queries > 2:
            blocks = dataclasses.replace(blocks, queries=blocks.queries // 2)
        else:
            raise ValueError(
                f"two blocks of {layout.block_tokens} tokens need {need >> 20} MiB of VMEM, and {chip.name} has "
                f"{budget >> 20} MiB for them; take smaller pages or shard the KV heads"
            )


def lay_out(call: Call, blocks: Blocks, chip: Chip) -> Layout:
    """The layout of a call in blocks of these sizes, whether or not they fit."""
    heads, size = call.q.shape[1:]
    kv_heads, page_size = call.num_kv_heads, call.page_size
    fold = max(LANES, size) // size
    slots = page_size // fold
    register = max(sublanes(call.k_pages.dtype), sublanes(call.v_pages.dtype))
    divisors = (x for x in range(1, kv_heads + 1) if kv_heads % x == 0)
    mixed = next((x for x in divisors if x * slots % register == 0), kv_heads)
    runs = kv_heads // mixed
    # A unit 128 wide gains nothing from a second side but fuller registers of logits, which many queries fill anyway.
    sides = 2 if size <= LANES and (chip.mxu > LANES or blocks.queries == 1) else 1
    if runs % 2 and runs > 1:
        sides = 1
    halves = 2 if sides == 2 and runs == 1 else 1
    pages = max(min(blocks.tokens // page_size, MOST_PAGES), halves)
    group = heads // kv_heads
    lines = group * mixed * (sides // halves) * fold * halves
    queries = blocks.queries
    while queries > 2 and queries * lines > HEIGHT:
        queries //= 2
    columns = pages // halves * slots * mixed
    parts = count_parts(-(-queries * lines // 8), columns, pages // halves, blocks.parts)
    page_bytes = slots * kv_heads * max(LANES, size) * max(call.k_pages.dtype.itemsize, call.v_pages.dtype.itemsize)
    joined = min(pages, JOINED) if page_bytes <= SMALL_PAGE else 1
    int8 = call.k_pages.dtype == jnp.int8 and call.q.dtype == jnp.bfloat16 and chip.multiplies_int8
    return Layout(
        heads=heads,
        kv_heads=kv_heads,
        size=size,
        page_size=page_size,
        mixed=mixed,
        sides=sides,
        halves=halves,
        queries=queries,
        pages=pages,
        parts=parts,
        joined=joined,
        depth=blocks.depth,
        digits=2 if int8 else 0,
    )


def count_parts(height: int, columns: int, pages: int, wanted: int) -> int:
    """Pieces of a block whose logits, ``height`` registers by ``columns``, are in registers together.

    Args:
        pages: of a block or of each half, which parts divide.
        wanted: as many if possible; 0: until a part takes half of the registers.
    """
    parts = 1
    while parts < wanted if wanted else height * (columns // LANES) // parts > 32:
        if columns // parts <= LANES or pages % (2 * parts):
            break
        parts *= 2
    return parts


def token_scaled(pages, scale) -> bool:
    """Whether a side has a scale per token and head."""
    return scale is not None and scale.shape == pages.shape[:3] and scale.size > pages.shape[1]


def buffers(call: Call, layout: Layout) -> Buffers:
    """The kernel's scratch in VMEM: shape and dtype of each buffer, in the order of ``Refs``."""
    lay, f32 = layout, jnp.dtype("float32")
    ring = (lay.depth, lay.pages, lay.page_rows, lay.width)
    precise = call.q.dtype != jnp.bfloat16
    left = jnp.int8 if lay.digits else jnp.float32 if precise else jnp.bfloat16
    stored = f32 if precise else call.q.dtype
    found = {
        "k_ring": (ring, call.k_pages.dtype),
        "v_ring": (ring, call.v_pages.dtype),
        "q": ((2, lay.queries, lay.teams, lay.fold * lay.team_heads, lay.width), stored),
        "out": ((2, lay.queries, lay.teams, lay.team_heads, lay.size), stored),
        "lse": ((2, lay.queries, lay.teams, LANES), f32),
        "left": ((lay.teams, max(1, lay.digits) * lay.height, lay.sides * lay.width), jnp.dtype(left)),
        "gain": ((lay.teams, lay.height, LANES), f32),
        "logits": ((2, max(1, lay.digits) * lay.height, lay.columns), jnp.dtype("int32") if lay.digits else f32),
        "top": ((lay.teams, lay.height, LANES), f32),
        "total": ((lay.teams, lay.height, LANES), f32),
        "acc": ((lay.teams, lay.height, lay.width), f32),
    }
    scales = (lay.depth, lay.teams, lay.parts, lay.streams * lay.team_runs, lay.columns)
    if lay.scale_rows:
        scales = (lay.depth, lay.pages * lay.scale_rows, LANES)
    for side, pages, scale in (("k", call.k_pages, call.k_scale), ("v", call.v_pages, call.v_scale)):
        if token_scaled(pages, scale):
            found[f"{side}_scale_ring"] = (scales, f32)
            if lay.scale_rows and not lay.run_tiles:
                found[f"{side}_scales"] = ((lay.kv_heads // lay.mixed, lay.fold, lay.block_tiles, LANES), f32)
    return found


def padded_bytes(shape: tuple[int, ...], dtype) -> int:
    """What an array takes in VMEM, whose tiles are registers."""
    *major, rows, lanes = shape
    rows += -rows % sublanes(dtype)
    lanes += -lanes % LANES
    size = rows * lanes * jnp.dtype(dtype).itemsize
    for x in major:
        size *= x
    return size
