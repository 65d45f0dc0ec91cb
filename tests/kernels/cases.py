"""One case base for every implementation: rows, options and page formats in, arguments and the right answer out."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import pages
from pallas_kernels.paged_attention.api import pack_tree_mask
from tests.kernels import oracle


@dataclasses.dataclass(frozen=True)
class Case:
    """A call to make.

    Attributes:
        rows: (queries in this step, tokens in all) of each row.
        heads, kv_heads, size, v_size, page_size: H, K, D, Dv, B.
        k_format, v_format: (dtype, scale kind).
        options: options of the call, handed to the oracle too (but for ``max_query_len``, which changes no answer).
        tree: use random draft trees for rows with several queries.
        padding: tokens behind the last row.
        spare: table columns more than the longest row needs.
        pages: pages of the pool; None for three more than the rows hold.
        filler: what unused slots and unowned pages hold (float pages; others hold their largest code).
        v_filler: the same for the values, if it is not the keys'.
        given: instead of random numbers, what lane 0 of every query, of the key at position t and of the value at
            position t holds; all other lanes hold 0.
    """

    rows: tuple[tuple[int, int], ...]
    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    v_size: int | None = None
    page_size: int = 4
    k_format: tuple[str, str] = ("float32", "none")
    v_format: tuple[str, str] = ("float32", "none")
    query_dtype: str = "float32"
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    tree: bool = False
    padding: int = 3
    spare: int = 2
    pages: int | None = None
    filler: float = float("nan")
    v_filler: float | None = None
    given: tuple[float, tuple[float, ...], tuple[float, ...]] | None = None
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Built:
    """Arguments of ``paged_attention`` and the oracle's answer to them.

    Attributes:
        arguments: the positional ones.
        options: the named ones; arrays are jax's, all else is static.
        out, lse: the right answers, float64 [T,H,Dv] and [T,H].
    """

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    out: np.ndarray
    lse: np.ndarray


def random_tree(rng: np.random.Generator, count: int) -> np.ndarray:
    """Who sees whom in a draft tree whose nodes come after their parents, bool [count,count]."""
    mask = np.eye(count, dtype=bool)
    for node in range(1, count):
        mask[node] |= mask[rng.integers(0, node)]
    return mask


quantise = jax.jit(pages.quantise, static_argnames="fmt")
unpack_int4 = jax.jit(pages.unpack_int4)
dynamic_scale = jax.jit(pages.dynamic_scale, static_argnames="fmt")


def stored_side(
    rng: np.random.Generator, content: np.ndarray, kind: tuple[str, str]
) -> tuple[jnp.ndarray, jnp.ndarray | None, np.ndarray]:
    """Quantises page content [N,K,B,D]: codes, scale, and in float64 what they stand for."""
    fmt = pages.PageFormat(*kind)
    scale = None
    if fmt.scale == "token":
        scale = dynamic_scale(content, fmt=fmt)
    elif fmt.scale != "none":
        shape = fmt.scale_shape(*content.shape[:3])
        scale = jnp.asarray(rng.uniform(0.5, 1.5, shape) * 3.0 / fmt.max_value, jnp.float32)
    codes = quantise(content, fmt=fmt, scale=scale)
    plain = np.asarray(unpack_int4(codes) if fmt.packed else codes).astype(np.float64)
    return codes, scale, plain if scale is None else plain * np.asarray(scale, np.float64)[..., None]


def spoil(codes: jnp.ndarray, used: np.ndarray, filler: float) -> jnp.ndarray:
    """Overwrites the slots [N,B] that no row uses."""
    codes = np.asarray(codes)
    worst = filler if jnp.issubdtype(codes.dtype, jnp.floating) else jnp.iinfo(codes.dtype).max
    with np.errstate(over="ignore"):  # 1e30 is infinity in float16
        worst = np.asarray(worst, np.float32).astype(codes.dtype)
    return jnp.asarray(np.where(used[:, None, :, None], codes, worst))


def build(case: Case) -> Built:
    """Lays the rows out over pages in random order and asks the oracle."""
    rng = np.random.default_rng(case.seed)
    slots, v_size = case.page_size, case.v_size or case.size
    lengths = np.array([length for _, length in case.rows], np.int32)
    blocks = -(-lengths // slots)
    width = int(blocks.max(initial=0)) + case.spare
    num_pages = int(blocks.sum()) + 3 if case.pages is None else case.pages
    order = rng.permutation(num_pages)
    tables = rng.choice(np.array([-1, 0, num_pages - 1, num_pages + 5]), size=(len(case.rows), max(width, 1)))
    used = np.zeros((num_pages, slots), bool)
    taken = 0
    for row, length in enumerate(lengths):
        tables[row, : blocks[row]] = order[taken : taken + blocks[row]]
        taken += blocks[row]
        used[tables[row, : blocks[row]]] = (np.arange(blocks[row] * slots) < length).reshape(-1, slots)

    content = rng.normal(size=(2, num_pages, case.kv_heads, slots, max(case.size, v_size))).astype(np.float32)
    if case.given is not None:
        content[:] = 0.0
        for side, numbers in enumerate(case.given[1:]):
            for row, length in enumerate(lengths):
                at = np.arange(length)
                content[side, tables[row, at // slots], :, at % slots, 0] = np.asarray(numbers)[at, None]
    k_codes, k_scale, keys = stored_side(rng, content[0, ..., : case.size], case.k_format)
    v_codes, v_scale, values = stored_side(rng, content[1, ..., :v_size], case.v_format)
    v_filler = case.filler if case.v_filler is None else case.v_filler
    k_codes, v_codes = spoil(k_codes, used, case.filler), spoil(v_codes, used, v_filler)
    if case.k_format[1] == "token":
        k_scale = jnp.asarray(np.where(used[:, None, :], k_scale, np.float32(case.filler)))
    if case.v_format[1] == "token":
        v_scale = jnp.asarray(np.where(used[:, None, :], v_scale, np.float32(v_filler)))

    counts = [count for count, _ in case.rows]
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    total = int(starts[-1]) + case.padding
    query = rng.normal(size=(total, case.heads, case.size)).astype(np.float32)
    if case.given is not None:
        query[:] = 0.0
        query[:, :, 0] = case.given[0]
    query = jnp.asarray(query, case.query_dtype)
    out = np.zeros((total, case.heads, v_size))
    lse = np.full((total, case.heads), -np.inf)
    mask = np.zeros((total, max([*counts, 1])), bool)
    asked = {"scale": case.size**-0.5, **case.options}
    asked.pop("max_query_len", None)
    for row, (count, length) in enumerate(case.rows):
        span = slice(starts[row], starts[row + 1])
        table = tables[row, : blocks[row]]
        tree = random_tree(rng, count) if case.tree else None
        if tree is not None:
            mask[span, :count] = tree
        flat = [np.swapaxes(x[table], 1, 2).reshape(-1, case.kv_heads, x.shape[3])[:length] for x in (keys, values)]
        plain = np.asarray(query[span].astype(jnp.float32))
        out[span], lse[span] = oracle.attend(plain, *flat, tree=tree, **asked)
    kwargs = {name: jnp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in case.options.items()}
    if case.tree:
        kwargs["tree_mask"] = jnp.asarray(pack_tree_mask(mask))
    arguments = (query, k_codes, v_codes, jnp.asarray(tables, jnp.int32), jnp.asarray(lengths), jnp.asarray(starts))
    return Built(arguments, {**kwargs, "k_scale": k_scale, "v_scale": v_scale}, out, lse)


def select(
    built: Built, parts: list[tuple[int, int, int]], rows: int | None = None, tokens: int | None = None
) -> Built:
    """The same pages asked by other queries.

    Args:
        built: what to take from; without a draft tree unless every part is a whole row.
        parts: (row, first query, queries) of each row of the new call, which ends with its last query.
        rows, tokens: S and T of the new call, those of the old one by default; the rest is padding.
    """
    query, k_pages, v_pages, tables, lengths, starts = built.arguments
    tables, lengths, starts = np.asarray(tables), np.asarray(lengths), np.asarray(starts)
    rows, tokens = rows or len(lengths), tokens or query.shape[0]
    chosen = [starts[row] + np.arange(first, first + count) for row, first, count in parts]
    index = np.concatenate([*chosen, np.zeros(0, np.int64)])
    new_tables = np.full((rows, tables.shape[1]), -1, np.int32)
    new_lengths, new_starts = np.zeros(rows, np.int32), np.full(rows + 1, len(index), np.int32)
    new_starts[0] = 0
    for at, (row, first, count) in enumerate(parts):
        new_tables[at] = tables[row]
        new_lengths[at] = lengths[row] - (starts[row + 1] - starts[row]) + first + count
        new_starts[at + 1] = new_starts[at] + count
    padding = [(0, tokens - len(index)), (0, 0), (0, 0)]
    new_query = np.pad(np.asarray(query.astype(jnp.float32))[index], padding, constant_values=np.nan)
    options = dict(built.options)
    if "tree_mask" in options:
        options["tree_mask"] = jnp.asarray(np.pad(np.asarray(options["tree_mask"])[index], padding[:2]))
    return Built(
        (
            jnp.asarray(new_query, query.dtype),
            k_pages,
            v_pages,
            *map(jnp.asarray, (new_tables, new_lengths, new_starts)),
        ),
        options,
        np.pad(built.out[index], padding),
        np.pad(built.lse[index], padding[:2], constant_values=-np.inf),
    )


MIXED = ((1, 9), (5, 5), (3, 8), (1, 1), (0, 0), (7, 30), (1, 70), (2, 2), (1, 0))
"""Decode, prefill, chunk, verification, an empty row, a row without keys: one call."""

DECODE = ((1, 9), (0, 0), (1, 1), (1, 128), (1, 300), (1, 0), (1, 64), (0, 5), (1, 129))
"""One query a row at most."""


def slopes(heads: int) -> np.ndarray:
    """Some ALiBi slopes, one per head."""
    return (0.5 ** (1 + np.arange(heads) % 8)).astype(np.float32)


def sinks(heads: int) -> np.ndarray:
    """Some sink logits, one per head."""
    return np.linspace(-2.0, 3.0, heads, dtype=np.float32)


OPTIONS: dict[str, Case] = {
    "plain": Case(MIXED),
    "not causal": Case(MIXED, options={"causal": False}),
    "window 1": Case(MIXED, options={"window": 1}),
    "window 4": Case(MIXED, options={"window": 4}),
    "window 33": Case(MIXED, options={"window": 33}),
    "soft cap": Case(MIXED, options={"soft_cap": 0.7}),
    "alibi": Case(MIXED, options={"alibi_slopes": slopes(4)}),
    "sinks": Case(MIXED, options={"sinks": sinks(4)}),
    "scale": Case(MIXED, options={"scale": 0.9}),
    "tree": Case(MIXED, tree=True),
    "tree, window, alibi": Case(MIXED, tree=True, options={"window": 6, "alibi_slopes": slopes(4)}),
    "wide tree": Case(((40, 50), (33, 33), (1, 3)), tree=True),
    "all": Case(MIXED, tree=True, options={"window": 9, "soft_cap": 1.1, "alibi_slopes": slopes(4), "sinks": sinks(4)}),
    "multi-query": Case(MIXED, heads=5, kv_heads=1),
    "multi-head": Case(MIXED, heads=3, kv_heads=3),
    "12 heads over 4": Case(MIXED, heads=12, kv_heads=4),
    "28 heads over 4": Case(MIXED, heads=28, kv_heads=4),
    "71 heads over 1": Case(((1, 9), (3, 8)), heads=71, kv_heads=1),
    "values wider": Case(MIXED, size=8, v_size=24),
    "values narrower": Case(MIXED, size=24, v_size=8),
    "bfloat16 queries": Case(
        MIXED, query_dtype="bfloat16", k_format=("bfloat16", "none"), v_format=("bfloat16", "none")
    ),
    "float16 queries": Case(MIXED, query_dtype="float16", k_format=("float16", "none"), v_format=("float16", "none")),
    "no padding": Case(MIXED, padding=0, spare=0),
    "a long prompt": Case(((200, 200), (1, 150), (70, 213)), size=8),
}
"""Every option alone and together, over the same rows."""

FILLERS = (0.0, 1e30, float("inf"), float("nan"))
SIZES = (64, 80, 96, 128, 192, 256)
PAGE_SIZES = (1, 2, 3, 8, 16, 64, 128, 256)
FORMATS = (
    ("float32", "none"),
    ("bfloat16", "none"),
    ("float16", "none"),
    ("float8_e4m3fn", "none"),
    ("float8_e4m3fn", "tensor"),
    ("float8_e5m2", "head"),
    ("float8_e4m3fn", "token"),
    ("int8", "tensor"),
    ("int8", "head"),
    ("int8", "token"),
    ("int4", "tensor"),
    ("int4", "head"),
    ("int4", "token"),
)


def edge_rows(page_size: int) -> tuple[tuple[int, int], ...]:
    """Lengths 0, 1, B-1, B, B+1 and 2B, each decoding and in a chunk of up to three queries."""
    lengths = sorted({0, 1, page_size - 1, page_size, page_size + 1, 2 * page_size})
    return tuple((count, length) for length in lengths for count in (1, min(3, length)) if count)
