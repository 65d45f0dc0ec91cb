"""The arithmetic of the TPU kernel: queries into products, logits into weights, weights into results.

Everything is in float32 but the products' operands. Logits are in units of log 2, so that the exponential is exp2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.paged_attention.tpu_layout import LANES

LOWEST = -1e30  # start of the running maximum: finite, so that differences are
LOG2_E = 1.4426950408889634
BY_ROWS = (((1,), (1,)), ((), ()))  # x[i, c] y[j, c]
BY_COLUMNS = (((1,), (0,)), ((), ()))  # x[i, c] y[c, j]
DIGIT = 254.0  # what one int8 digit of a query is in units of the next
OFFSET, QUERY, SECOND, HEAD = range(4)
"""Facts about a row of logits: how many tokens its stream is behind the first, its query, whether its keys are in the
second of two runs, its KV head within the run. The first and the last are facts about columns, too (0 and 1 there)."""


def place_queries(layout, refs, side: jax.Array) -> None:
    """Writes the left operands of a job's first products: each query in the lanes of its own keys, zeros in the others.

    For int8 products a query becomes two int8 digits, which hold it to 2**-16 of its largest element.
    """
    for team in range(layout.teams):
        content = refs.q[side, :, team].astype(jnp.float32)  # [queries, fold * team heads, width]
        rows = []
        for half in range(layout.halves):
            for fold in range(layout.fold):
                x = content[:, fold * layout.team_heads : (fold + 1) * layout.team_heads]
                x = x.reshape(layout.lines, layout.width)
                zero = jnp.zeros_like(x)
                if layout.halves == 2:
                    x = jnp.concatenate([x, zero] if half == 0 else [zero, x], axis=1)
                elif layout.team_runs == 2:
                    second = refs.row_facts[SECOND, : layout.lines, :1] == 1
                    x = jnp.concatenate([jnp.where(second, zero, x), jnp.where(second, x, zero)], axis=1)
                rows.append(x)
        x = rows[0] if len(rows) == 1 else jnp.concatenate(rows, axis=0)
        if layout.digits == 0:
            refs.left[team] = x.astype(refs.left.dtype)
            continue
        peak = jnp.max(jnp.abs(x), axis=1, keepdims=True)
        peak = jnp.where(peak > 0, peak, 1.0)
        x = x * (127.0 / peak)
        high = jnp.round(x)
        low = jnp.round((x - high) * DIGIT)
        refs.left[team] = jnp.concatenate([high, low], axis=0).astype(jnp.int8)
        refs.gain[team] = refs.k_gain[team] * (peak / (127.0 * DIGIT))


def right_side(layout, ring, slot: jax.Array, part: int, team: int) -> jax.Array:
    """The rows of a part's keys, or values, for a team: [columns, sides * width]."""
    sides = []
    for half in range(layout.halves):
        first = (half * layout.parts + part) * layout.part_pages
        for run in range(team * layout.team_runs, (team + 1) * layout.team_runs):
            rows = slice(run * layout.run, (run + 1) * layout.run)
            x = ring[slot, first : first + layout.part_pages, rows, :]
            sides.append(x.reshape(layout.columns, layout.width))
    return sides[0] if len(sides) == 1 else jnp.concatenate(sides, axis=1)


def product(x: jax.Array, y: jax.Array, dims) -> jax.Array:
    """A matrix product in the cheapest way that is exact in its operands: int8 x int8, float32, or bfloat16 x any."""
    if x.dtype == jnp.int8:
        return lax.dot_general(x, y, dims, preferred_element_type=jnp.int32)
    if x.dtype == jnp.float32:
        y = y.astype(jnp.float32)
        return lax.dot_general(x, y, dims, precision="highest", preferred_element_type=jnp.float32)
    if y.dtype in (jnp.int8, jnp.float32):
        y = y.astype(jnp.bfloat16)
    return lax.dot_general(x, y, dims, preferred_element_type=jnp.float32)


def live_words(layout, dtype, first: jax.Array, start: jax.Array | None, end: jax.Array) -> jax.Array:
    """A mask for 32-bit words of a part's right side: ones where a token is one of start..end-1 (None: 0).

    A register holds 32 / bits consecutive rows in each of its words, so one AND clears what may be NaN, in any dtype.

    Args:
        first: the part's first token.

    Returns:
        int32 [columns / rows per word, sides * width].
    """
    pack = 4 // jnp.dtype(dtype).itemsize
    shape = (layout.part_pages, layout.run // pack, layout.width)
    slot = (lax.broadcasted_iota(jnp.int32, shape, 1) * pack) & (layout.slots - 1)
    token = lax.broadcasted_iota(jnp.int32, shape, 0) * layout.page_size + slot * layout.fold
    if layout.fold > 1:
        token += lax.broadcasted_iota(jnp.int32, shape, 2) >> (layout.size.bit_length() - 1)

    def below(limit):
        tokens = limit - token
        if layout.fold > 1:
            tokens = (tokens + layout.fold - 1) >> (layout.fold.bit_length() - 1)
        if pack == 1:
            return jnp.where(tokens > 0, -1, 0)
        if pack == 2:
            return jnp.where(tokens > 1, -1, jnp.where(tokens > 0, 0xFFFF, 0))
        return jnp.where(tokens > 3, -1, jnp.left_shift(1, jnp.clip(tokens, 0, 3) * 8) - 1)

    sides = []
    for half in range(layout.halves):
        shift = first + half * layout.half_tokens
        words = below(end - shift)
        if start is not None:
            words &= ~below(start - shift)
        sides += [words.reshape(layout.columns // pack, layout.width)] * layout.team_runs
    return sides[0] if len(sides) == 1 else jnp.concatenate(sides, axis=1)


def keep(x: jax.Array, words: jax.Array | None) -> jax.Array:
    """``x`` with zeros where the mask has none."""
    return x if words is None else pltpu.bitcast(pltpu.bitcast(x, jnp.int32) & words, x.dtype)


def column_tiles(layout) -> list[slice]:
    """The columns of logits, a register wide at a time."""
    return [slice(low, min(low + LANES, layout.columns)) for low in range(0, layout.columns, LANES)]


def largest(tiles: list[jax.Array]) -> jax.Array:
    """The largest logit of each row, [height, 1]."""
    full = [x for x in tiles if x.shape == tiles[0].shape]
    rest = [jnp.max(x, axis=1, keepdims=True) for x in tiles[len(full) :]]  # a last one may be narrower
    return functools.reduce(jnp.maximum, [jnp.max(functools.reduce(jnp.maximum, full), axis=1, keepdims=True), *rest])


def add_tiles(tiles: list[jax.Array]) -> jax.Array:
    """The sum of the tiles, lane by lane, on 128 lanes; their sum over lanes is left to the end."""
    padded = [jnp.pad(x, ((0, 0), (0, LANES - x.shape[1]))) if x.shape[1] < LANES else x for x in tiles]
    return functools.reduce(jnp.add, padded)


def widen(x: jax.Array, width: int) -> jax.Array:
    """A value per row that fills 128 lanes, on ``width`` lanes."""
    return x[:, :width] if width <= LANES else jnp.concatenate([x] * (width // LANES), axis=1)


def arrange_scales(layout, ring, slot: jax.Array, target) -> None:
    """Moves a block's scales per token from rows of a page each, [K * B] along the lanes, to rows of 128 columns each.

    With C pages to 128 columns, row i of the target takes its lanes, a C-th from each, from pages C i to C i + C - 1.
    """
    per_tile = LANES // layout.run
    shape = (layout.block_tiles, LANES)
    lane = lax.broadcasted_iota(jnp.int32, shape, 1)
    column = lane & (layout.run - 1)
    slot_bits = layout.slots.bit_length() - 1
    within = (column >> slot_bits) * layout.page_size + (column & (layout.slots - 1)) * layout.fold
    for run in range(layout.kv_heads // layout.mixed):
        row, base = divmod(run * layout.run * layout.fold, LANES)
        rows = [
            ring[slot, pl.ds(i * layout.scale_rows + row, layout.block_tiles, stride=per_tile * layout.scale_rows), :]
            for i in range(per_tile)
        ]
        for fold in range(layout.fold):
            picked = [jnp.take_along_axis(x, base + within + fold, axis=1) for x in rows]
            result = picked[0]
            for i in range(1, per_tile):
                result = jnp.where(lane >= i * layout.run, picked[i], result)
            target[run, fold] = result


def token_scale(layout, refs, side: str, slot: jax.Array, part: int, team: int, tile: slice) -> jax.Array:
    """The scales of a tile's tokens, one for each logit."""
    ring, arranged = getattr(refs, f"{side}_scale_ring"), getattr(refs, f"{side}_scales")

    def row(half, fold, side):
        """float32 [1, columns of the tile]"""
        if not layout.scale_rows:
            place = (half * layout.fold + fold) * layout.team_runs + side
            return ring[slot, team, part, place : place + 1, tile]
        run = team * layout.team_runs + side
        of_block = ((half * layout.parts + part) * layout.columns + tile.start) // LANES
        if arranged is not None:
            return arranged[run, fold, of_block : of_block + 1, :]
        page, of_run = divmod(of_block, layout.run_tiles)
        place = page * layout.scale_rows + run * layout.run_tiles + of_run
        return ring[slot, place : place + 1, :]

    streams = []
    for half in range(layout.halves):
        for fold in range(layout.fold):
            x = row(half, fold, 0)
            if layout.team_runs == 2:
                second = refs.row_facts[SECOND, : layout.lines, : x.shape[1]] == 1
                x = jnp.where(second, row(half, fold, 1), x)
            streams.append(jnp.broadcast_to(x, (layout.lines, x.shape[1])))
    return streams[0] if len(streams) == 1 else jnp.concatenate(streams, axis=0)


class Bounds(NamedTuple):
    """Which columns of a part each row of logits sees: those above ``lower``, if that is not None, up to ``upper``.

    Both are int32 [height, 128], the same in all lanes.
    """

    upper: jax.Array
    lower: jax.Array | None


def find_bounds(layout, options, refs, first: jax.Array, job) -> Bounds:
    """The bounds of a part that starts at token ``first``."""
    offset = first + refs.row_facts[OFFSET]
    query = job.at + refs.row_facts[QUERY]
    upper = (query if options.causal else job.end - 1) - offset
    if not options.window:
        return Bounds(upper, None)
    window = refs.window[0]
    return Bounds(upper, jnp.where(window < 1, -1, query - window) - offset)


def bend(layout, options, refs, x: jax.Array, slot, part: int, team: int, tile: slice, bounds: Bounds | None, away):
    """Logits of a tile, as they go into the softmax: scales per token, soft cap, ALiBi, what is not seen.

    Args:
        bounds: what is seen, or None if all is.
        away: position of column 0 minus that of the query, for ALiBi.
    """
    lanes = slice(0, tile.stop - tile.start)
    if refs.k_scale_ring is not None:
        x = x * token_scale(layout, refs, "k", slot, part, team, tile)
    if options.soft_cap is not None:
        x = jnp.tanh(x) * (options.soft_cap * LOG2_E)
    column = refs.column_facts[0, :, tile]
    if options.alibi:
        x = x + refs.slopes[team, :, lanes] * (column + away[:, lanes]).astype(jnp.float32)
    seen = []
    if bounds is not None:
        seen.append(column <= bounds.upper[:, lanes])
        if bounds.lower is not None:
            seen.append(column > bounds.lower[:, lanes])
    if layout.mixed > 1:
        seen.append(refs.column_facts[1, :, tile] == refs.row_facts[HEAD, :, lanes])
    return jnp.where(functools.reduce(jnp.logical_and, seen), x, -jnp.inf) if seen else x


def own_lanes(layout, refs, x: jax.Array) -> jax.Array:
    """Of a product's results, [height, sides * width], the lanes of the values that each row is about."""
    if layout.sides == 1:
        return x
    low, high = x[:, : layout.width], x[:, layout.width :]
    if layout.halves == 2:
        middle = layout.height // 2
        return jnp.concatenate([low[:middle], high[middle:]], axis=0)
    return jnp.where(refs.row_facts[SECOND, :, :1] == 1, high, low)


def attend_block(layout, options, refs, slot, block, job, masked: bool, pieces: list[Callable[[], None]]) -> None:
    """Adds a block to the running softmax of every team, and calls the pieces in between.

    The program order is already that of a pipeline, since the compiler keeps close to it: the logits of a step are
    multiplied while the softmax of the step before waits for its own results.

    Args:
        masked: whether some token of the block is not seen by some query.
    """
    for ring, arranged in ((refs.k_scale_ring, refs.k_scales), (refs.v_scale_ring, refs.v_scales)):
        if arranged is not None:
            arrange_scales(layout, ring, slot, arranged)
    facts = [find_facts(layout, options, refs, block, part, job, masked) for part in range(layout.parts)]
    steps = [(part, team) for part in range(layout.parts) for team in range(layout.teams)]

    def multiply(i):
        part, team = steps[i]
        keys = keep(right_side(layout, refs.k_ring, slot, part, team), facts[part].k_words)
        refs.logits[i & 1] = product(refs.left[team], keys, BY_ROWS)

    multiply(0)
    for i, (part, team) in enumerate(steps):
        if i + 1 < len(steps):
            multiply(i + 1)
        for piece in pieces[-(-len(pieces) * i // len(steps)) : -(-len(pieces) * (i + 1) // len(steps))]:
            piece()
        absorb(layout, options, refs, slot, part, team, refs.logits[i & 1], facts[part])


class Facts(NamedTuple):
    """What the teams of a part share.

    Attributes:
        bounds: what is seen, None: all.
        away: int32 [height, 128]: position of column 0 minus that of the query; None without ALiBi.
        k_words, v_words: masks of live keys and values; None: all are.
    """

    bounds: Bounds | None
    away: jax.Array | None
    k_words: jax.Array | None
    v_words: jax.Array | None


def find_facts(layout, options, refs, block, part: int, job, masked: bool) -> Facts:
    """The facts of a part of a block."""
    first = block * layout.block_tokens + part * layout.part_pages * layout.page_size
    away = None
    if options.alibi:
        away = first + refs.row_facts[OFFSET] - job.at - refs.row_facts[QUERY]
    if not masked:
        return Facts(None, away, None, None)
    start = job.start if options.window else None
    k_words, v_words = None, live_words(layout, refs.v_ring.dtype, first, start, job.end)
    if layout.streams > 1 and refs.k_ring.dtype != jnp.int8:
        # A dead token's NaN would meet the zeros that the queries of another stream have in its lanes.
        k_words = live_words(layout, refs.k_ring.dtype, first, start, job.end)
    return Facts(find_bounds(layout, options, refs, first, job), away, k_words, v_words)


def absorb(layout, options, refs, slot, part: int, team: int, logits: jax.Array, facts: Facts) -> None:
    """Adds a part of a block to the running softmax of one team, given its raw logits."""
    gain = refs.k_gain[team]
    if layout.digits:
        logits = (logits[: layout.height] * int(DIGIT) + logits[layout.height :]).astype(jnp.float32)
        gain = refs.gain[team]
    tiles = []
    for tile in column_tiles(layout):
        x = logits[:, tile] * gain[:, : tile.stop - tile.start]
        tiles.append(bend(layout, options, refs, x, slot, part, team, tile, facts.bounds, facts.away))
    top = refs.top[team]
    new_top = jnp.maximum(top, jnp.broadcast_to(largest(tiles), top.shape))
    shrink = jnp.exp2(top - new_top)
    weights = [jnp.exp2(x - new_top[:, : x.shape[1]]) for x in tiles]
    refs.top[team] = new_top
    refs.total[team] = refs.total[team] * shrink + add_tiles(weights)
    if refs.v_scale_ring is not None:
        for i, tile in enumerate(column_tiles(layout)):
            scale = token_scale(layout, refs, "v", slot, part, team, tile)
            if facts.bounds is not None or layout.mixed > 1:  # the scale of a dead token may be anything
                scale = jnp.where(weights[i] > 0, scale, 0.0)
            weights[i] = weights[i] * scale
    x = weights[0] if len(weights) == 1 else jnp.concatenate(weights, axis=1)
    x = x.astype(jnp.float32 if refs.left.dtype == jnp.float32 else jnp.bfloat16)
    values = keep(right_side(layout, refs.v_ring, slot, part, team), facts.v_words)
    more = own_lanes(layout, refs, product(x, values, BY_COLUMNS))
    refs.acc[team] = refs.acc[team] * widen(shrink, layout.width) + more


def finish(layout, options, refs, side: jax.Array) -> None:
    """Joins the streams of every team and writes a job's results and log-sum-exp."""
    lines = [slice(i * layout.lines, (i + 1) * layout.lines) for i in range(layout.streams)]
    for team in range(layout.teams):
        top = functools.reduce(jnp.maximum, [refs.top[team, rows] for rows in lines])
        if options.sinks:
            top = jnp.maximum(top, refs.sinks[team])
        total = jnp.exp2(refs.sinks[team] - top) if options.sinks else jnp.zeros_like(top)
        result = jnp.zeros((layout.lines, layout.size), jnp.float32)
        for stream, rows in enumerate(lines):
            weight = jnp.exp2(refs.top[team, rows] - top)
            total += weight * jnp.sum(refs.total[team, rows], axis=1, keepdims=True)
            lane = stream % layout.fold * layout.size
            result += (refs.acc[team, rows] * widen(weight, layout.width))[:, lane : lane + layout.size]
        safe = jnp.where(total > 0, total, 1.0)
        result = result * widen(refs.v_gain[team] / safe, layout.size)
        shape = (layout.queries, layout.team_heads)
        refs.out[side, :, team] = result.reshape(*shape, layout.size).astype(refs.out.dtype)
        lse = jnp.where(total > 0, (top + jnp.log2(safe)) * (1 / LOG2_E), -jnp.inf).reshape(*shape, LANES)
        # From a head per row to a head per lane.
        own = lax.broadcasted_iota(jnp.int32, lse.shape, 1) == lax.broadcasted_iota(jnp.int32, lse.shape, 2)
        refs.lse[side, :, team] = jnp.sum(jnp.where(own, lse, 0.0), axis=1)
