"""The kernel that writes rows into tiles of pages, see ``tpu``."""

from __future__ import annotations

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.pages import PageFormat, scale_for


@dataclasses.dataclass(frozen=True)
class Target:
    """An array in HBM that is written.

    Attributes:
        shape: as the kernel sees it: [N,K,rows,lanes] pages, [N,rows,lanes] scales.
        ring: of the buffer that holds a unit of it, in whole tiles.
        dtype: of both.
    """

    shape: tuple[int, ...]
    ring: tuple[int, ...]
    dtype: jnp.dtype

    @property
    def width(self) -> int:
        """Lanes of a row."""
        return self.shape[-1]

    @property
    def ring_bytes(self) -> int:
        """Of a buffer, in whole tiles."""
        *outer, rows, lanes = self.ring
        return math.prod(outer) * (rows + -rows % 8) * (lanes + -lanes % 128) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Part:
    """Keys or values.

    Attributes:
        fmt: how the pages store.
        fold: slots that share a row of lanes.
        pages: where the codes go.
        scales: where the scales per token go, or None.
    """

    fmt: PageFormat
    fold: int
    pages: Target
    scales: Target | None


@dataclasses.dataclass(frozen=True)
class Layout:
    """What the kernel is compiled for.

    Attributes:
        tokens: of a block, a multiple of 32.
        kv_heads, page_size, num_pages: K, B, N.
        unit: slots that are read and written together; divides the page size.
        depth: units in flight.
        parts: the sides of the call.
    """

    tokens: int
    kv_heads: int
    page_size: int
    num_pages: int
    unit: int
    depth: int
    parts: tuple[Part, ...]

    @property
    def targets(self) -> list[Target]:
        """Everything that is written: pages and scales, side by side."""
        return [target for part in self.parts for target in (part.pages, part.scales) if target is not None]


@dataclasses.dataclass(frozen=True)
class Stream:
    """A target with what is put into it.

    Attributes:
        hbm: the target.
        ring: buffers, [depth, ...].
        codes: the rows to store as the words that hold them, int32 [tokens * K, lanes].
        part: the side that it belongs to.
        scales: whether it is the side's scales.
    """

    hbm: object
    ring: object
    codes: object
    part: Part
    scales: bool


def kernel(layout: Layout, operands: int, targets: int, slots, *refs):
    """slots int32 [tokens]; then refs as ``tpu.launch`` hands them over.

    New rows [tokens * K, lanes] of each side, with static scales [tokens * K, 1]; targets, twice, the second time as
    outputs; codes, rings, first tokens of the units in SMEM, and semaphores.
    """
    given = iter(refs[:operands])
    outputs = refs[operands + targets : operands + 2 * targets]
    codes, rings = refs[operands + 2 * targets :][:targets], refs[operands + 3 * targets :][:targets]
    starts, sems = refs[operands + 4 * targets :]
    arrays = iter(zip(outputs, rings, codes, strict=True))
    pages, scales = [], []
    for part in layout.parts:
        rows = next(given)
        static = next(given) if part.fmt.scale in ("tensor", "head") else None
        pages.append(Stream(*next(arrays), part, scales=False))
        if part.scales is not None:
            scales.append(Stream(*next(arrays), part, scales=True))
        encode(part, rows, static, pages[-1].codes, scales[-1].codes if part.scales else None)
    first = pl.program_id(0) * layout.tokens
    sweep(layout, layout.unit, slots, first, starts, sems, pages)
    if scales:
        sweep(layout, layout.page_size, slots, first, starts, sems, scales)


# --- codes ----------------------------------------------------------------------------------------------------------


def encode(part: Part, rows, static, codes, scales) -> None:
    """Fills ``codes``, and ``scales`` where they are per token, from the new rows of a block."""
    x = rows[...].astype(jnp.float32)
    scale = None
    if scales is not None:
        largest = jnp.max(jnp.abs(x), axis=1, keepdims=True)
        lost = jnp.max(jnp.where(x != x, 1.0, 0.0), axis=1, keepdims=True)  # a maximum may pass over NaN
        scale = scale_for(jnp.where(lost > 0, jnp.nan, largest), part.fmt)
        scales[...] = jnp.broadcast_to(lax.bitcast_convert_type(scale, jnp.int32), scales.shape)
    elif static is not None:
        scale = static[...]
    codes[...] = words_of(x if scale is None else x / scale, part.fmt)


def words_of(x: jax.Array, fmt: PageFormat) -> jax.Array:
    """Words in which every part is the code of the element, int32; as ``pages.quantise`` has it, see there."""
    if fmt.dtype == "float32":
        return lax.bitcast_convert_type(x, jnp.int32)
    if fmt.dtype == "int8":
        x = jnp.where(x != x, 0.0, jnp.round(x))
        return (jnp.clip(x, -fmt.max_value - 1, fmt.max_value).astype(jnp.int32) & 0xFF) * 0x01010101
    saturated = jnp.clip(x, -fmt.max_value, fmt.max_value)
    if fmt.dtype == "bfloat16":
        kept = jnp.where(jnp.abs(x) == jnp.inf, x, jnp.where(x != x, x, saturated))
        word = lax.bitcast_convert_type(kept.astype(jnp.bfloat16).astype(jnp.float32), jnp.int32)
        return lax.shift_right_logical(word, 16) | word
    code = pltpu.bitcast(jnp.where(x != x, x, saturated).astype(fmt.storage_dtype), jnp.int8)
    return (code.astype(jnp.int32) & 0xFF) * 0x01010101


# --- units ----------------------------------------------------------------------------------------------------------


def sweep(layout: Layout, unit: int, slots, first, starts, sems, streams: list[Stream]) -> None:
    """Reads, changes and writes every unit that tokens of the block from ``first`` on lie in, several in flight."""
    depth = layout.depth
    count = find_units(layout, unit, slots, first, starts)

    def move(job, out: bool, start: bool):
        place = job % depth
        for stream in streams:
            hbm, buffer = slices(layout, unit, stream, slots[first + starts[job]], place)
            source, target = (buffer, hbm) if out else (hbm, buffer)
            copy = pltpu.make_async_copy(source, target, sems.at[int(out), place])
            copy.start() if start else copy.wait()

    def step(job, _):
        move(job, out=False, start=False)

        def change(token, _):
            for stream in streams:
                put(layout, unit, stream, slots[first + token], token, job % depth)

        lax.fori_loop(starts[job], starts[job + 1], change, None)
        move(job, out=True, start=True)
        following = job + depth - 1

        @pl.when(following < count)
        def _():
            pl.when(job > 0)(lambda: move(job - 1, out=True, start=False))
            move(following, out=False, start=True)

    for job in range(depth - 1):
        pl.when(job < count)(functools.partial(move, job, out=False, start=True))
    lax.fori_loop(0, count, step, None)
    lax.fori_loop(jnp.maximum(count - depth, 0), count, lambda job, _: move(job, out=True, start=False), None)


def find_units(layout: Layout, unit: int, slots, first, starts) -> jax.Array:
    """How many units the block's tokens lie in; ``starts`` gets the first token of each, and where the last ends."""
    limit = layout.num_pages * layout.page_size

    def look(token, state):
        count, last, real = state
        slot = slots[first + token]
        inside = slot < limit
        new = inside & (slot // unit != last)

        @pl.when(new)
        def _():
            starts[count] = token

        return count + new.astype(jnp.int32), jnp.where(new, slot // unit, last), real + inside.astype(jnp.int32)

    none = jnp.int32(0)
    count, _, real = lax.fori_loop(0, layout.tokens, look, (none, none - 1, none))
    starts[count] = real
    return count


def slices(layout: Layout, unit: int, stream: Stream, slot, place) -> tuple[object, object]:
    """Where the unit of a slot lies in HBM, and its buffer."""
    page, buffer = slot // layout.page_size, stream.ring.at[place]
    if stream.scales:
        return stream.hbm.at[page], buffer
    rows = unit // stream.part.fold
    buffer = buffer.at[:, pl.ds(0, rows)]
    if unit == layout.page_size:
        return stream.hbm.at[page], buffer
    first = pl.multiple_of(slot % layout.page_size // unit * rows, rows)
    return stream.hbm.at[page, :, pl.ds(first, rows)], buffer


def put(layout: Layout, unit: int, stream: Stream, slot, token, place) -> None:
    """Changes a token's rows in the buffer."""
    part, heads = stream.part, layout.kv_heads
    if stream.scales:
        buffer = stream.ring.at[place]
        lanes = part.scales.width
        for head in range(heads):
            at = head * layout.page_size + slot % layout.page_size
            merge(buffer, stream.codes[pl.ds(token * heads + head, 1)], at // lanes, at % lanes, 1)
        return
    offset = slot % unit
    row, width = offset // part.fold, part.pages.width // part.fold

    def one(head, _):
        code = stream.codes[pl.ds(token * heads + head, 1)]
        merge(stream.ring.at[place, head], code, row, offset % part.fold * width, width)

    lax.fori_loop(0, heads, one, None, unroll=heads <= 16)


def merge(buffer, code: jax.Array, row, lane, width: int) -> None:
    """Puts lanes [lane, lane + width) of a row of words into a row of the buffer, in its part of the words there."""
    old = pltpu.bitcast(buffer[...], jnp.int32)
    bits = buffer.dtype.itemsize * 8
    per_word = 32 // bits
    ones = jnp.int32((1 << bits) - 1 if bits < 32 else -1) << (row % per_word * bits)
    mask = jnp.where(lax.broadcasted_iota(jnp.int32, old.shape, 0) == row // per_word, ones, 0)
    if width < old.shape[1]:
        lanes = lax.broadcasted_iota(jnp.int32, old.shape, 1)
        mask = jnp.where((lanes >= lane) & (lanes < lane + width), mask, 0)
    buffer[...] = pltpu.bitcast((old & ~mask) | (code & mask), buffer.dtype)
