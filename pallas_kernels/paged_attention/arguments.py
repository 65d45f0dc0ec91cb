"""A checked call of paged attention: every rule that shapes, dtypes and options must keep, at trace time."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arguments import require, require_array

QUERY_DTYPES = ("float32", "bfloat16", "float16", "float64")
FLOAT_PAGES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
CODED_PAGES = ("int8", "uint8")  # uint8 is int4, two to a byte along the head; both mean nothing without a scale


@dataclasses.dataclass(frozen=True)
class Call:
    """What an implementation gets: arrays that fit together and options with nothing left to default.

    Attributes:
        q: queries, [T,H,D].
        k_pages: keys, [N,K,B,D] ([N,K,B,D/2] packed int4).
        v_pages: values, [N,K,B,Dv], or None where the values are the first ``v_width`` lanes of the keys.
        block_tables, kv_lens, query_starts: int32 [S,P], [S], [S+1].
        v_width: head size of the output, Dv.
        k_scale, v_scale: float32 [1,1,1], [1,K,1] or [N,K,B], or None for 1.
        scale: factor of the logits.
        causal: whether a query sees only keys at its own position and before.
        window: int32 scalar array or None; a value below 1 means no window.
        soft_cap: bound of the logits, or None.
        alibi_slopes, sinks: float32 [H], or None.
        tree_mask: uint32 [T,M], or None.
        max_query_len: a bound on every row's queries, or None.
    """

    q: jax.Array
    k_pages: jax.Array
    v_pages: jax.Array | None
    block_tables: jax.Array
    kv_lens: jax.Array
    query_starts: jax.Array
    v_width: int
    k_scale: jax.Array | None
    v_scale: jax.Array | None
    scale: float
    causal: bool
    window: jax.Array | None
    soft_cap: float | None
    alibi_slopes: jax.Array | None
    sinks: jax.Array | None
    tree_mask: jax.Array | None
    max_query_len: int | None

    @property
    def page_size(self) -> int:
        """Token slots of a page, B."""
        return self.k_pages.shape[2]

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.k_pages.shape[1]

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.q.shape[1] // self.k_pages.shape[1]


def head_size(pages: jax.Array) -> int:
    """The head size that stored pages hold: their last axis, doubled for packed int4."""
    return pages.shape[3] * (2 if pages.dtype == jnp.uint8 else 1)


def check_pages(name: str, pages: jax.Array, scale: jax.Array | None, scale_name: str) -> None:
    """Checks one side's pages and their scale."""
    require_array(name, pages, 4, (*FLOAT_PAGES, *CODED_PAGES))
    require(min(pages.shape) > 0, name, f"shape {tuple(pages.shape)}", "no axis may be empty")
    if scale is None:
        rule = f"{pages.dtype.name} pages store codes, so {scale_name} must be given"
        require(pages.dtype.name not in CODED_PAGES, scale_name, None, rule)
        return
    require_array(scale_name, scale, 3, ("float32",))
    n, k, b, _ = pages.shape
    allowed = ((1, 1, 1), (1, k, 1), (n, k, b))
    require(tuple(scale.shape) in allowed, scale_name, f"shape {tuple(scale.shape)}", f"shape must be one of {allowed}")


def check_rows(q: jax.Array, block_tables: jax.Array, kv_lens: jax.Array, query_starts: jax.Array) -> None:
    """Checks the queries and the arrays that say which row each belongs to."""
    require_array("q", q, 3, QUERY_DTYPES)
    require(min(q.shape) > 0, "q", f"shape {tuple(q.shape)}", "no axis may be empty")
    require_array("block_tables", block_tables, 2, ("int32",))
    require_array("kv_lens", kv_lens, 1, ("int32",))
    require_array("query_starts", query_starts, 1, ("int32",))
    rows = block_tables.shape[0]
    require(min(block_tables.shape) > 0, "block_tables", f"shape {tuple(block_tables.shape)}", "no axis may be empty")
    require(kv_lens.shape[0] == rows, "kv_lens", f"{kv_lens.shape[0]} rows", f"block_tables has {rows} rows")
    starts = query_starts.shape[0]
    require(starts == rows + 1, "query_starts", f"length {starts}", f"must have one more entry than the {rows} rows")


def check_heads(q: jax.Array, k_pages: jax.Array, name: str = "k_pages") -> None:
    """Checks that query and key heads fit; ``name`` is what the caller calls the keys."""
    heads, kv_heads = q.shape[1], k_pages.shape[1]
    require(heads % kv_heads == 0, "q", f"{heads} heads", f"heads must be a multiple of the {kv_heads} KV heads")
    if k_pages.dtype == jnp.uint8:
        require(q.shape[2] % 2 == 0, name, f"head size {q.shape[2]}", "packed int4 needs an even head size")
    size = head_size(k_pages)
    require(size == q.shape[2], name, f"head size {size}", f"must be that of the queries, {q.shape[2]}")


def check_number(name: str, value: object, rule: str, low: float = -math.inf) -> float:
    """``value`` as a float if it is a finite number above ``low``; TypeError or ValueError otherwise."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise TypeError(f"{name}: must be a number known at trace time; got {type(value).__name__}")
    require(math.isfinite(value) and value > low, name, value, rule)
    return float(value)


def check_flag(name: str, value: object) -> bool:
    """``value`` if it is a bool, TypeError otherwise."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: must be True or False; got {type(value).__name__}")
    return bool(value)


def check_window(window: object, causal: bool) -> jax.Array | None:
    """The window as an int32 scalar array, or None."""
    if window is None:
        return None
    require(causal, "window", window, "a sliding window needs causal=True")
    if isinstance(window, (int, np.integer)) and not isinstance(window, bool):
        rule = "must be at least 1 (the query itself counts); None means no window"
        require(window >= 1, "window", window, rule)
        return jnp.int32(min(int(window), np.iinfo(np.int32).max))
    require_array("window", window, 0, ("int32",))
    return jnp.asarray(window)


def check_per_head(name: str, x: jax.Array | None, heads: int) -> jax.Array | None:
    """One float32 number per query head, or None."""
    if x is None:
        return None
    require_array(name, x, 1, ("float32",))
    require(x.shape[0] == heads, name, f"length {x.shape[0]}", f"must have one entry per query head, {heads}")
    return jnp.asarray(x)


def check_tree_mask(tree_mask: jax.Array | None, tokens: int, causal: bool) -> jax.Array | None:
    """The bit-packed tree mask, or None."""
    if tree_mask is None:
        return None
    require_array("tree_mask", tree_mask, 2, ("uint32",))
    shape = f"shape {tuple(tree_mask.shape)}"
    require(tree_mask.shape[0] == tokens, "tree_mask", shape, f"must have one row of words per token, {tokens}")
    require(tree_mask.shape[1] > 0, "tree_mask", shape, "needs at least one word per token")
    require(causal, "tree_mask", shape, "a tree mask needs causal=True, whose order it refines")
    return jnp.asarray(tree_mask)


def check_max_query_len(value: int | None) -> int | None:
    """The static bound on a row's queries, or None."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(f"max_query_len: must be a Python int or None; got {type(value).__name__}")
    require(value >= 1, "max_query_len", value, "must be at least 1")
    return int(value)


def check_width(v_width: int, size: int) -> int:
    """How many lanes of a latent are values."""
    if isinstance(v_width, bool) or not isinstance(v_width, (int, np.integer)):
        raise TypeError(f"v_width: must be a Python int; got {type(v_width).__name__}")
    require(1 <= v_width <= size, "v_width", v_width, f"must lie in 1..{size}, the lanes of a latent")
    return int(v_width)


def check_tables(block_tables: np.ndarray, kv_lens: np.ndarray, num_pages: int, page_size: int) -> None:
    """Refuses block tables that would read outside the pool: for debugging, on the host, before a launch.

    A kernel clamps page ids, so a wrong one reads another sequence's keys without any error.

    Args:
        block_tables: page ids, int [S,P] (numpy).
        kv_lens: tokens of each row, int [S] (numpy).
        num_pages: pages that exist, N.
        page_size: slots of a page, B.

    Raises:
        ValueError: a length is negative or longer than its table, or an entry that a length reaches is not a page.
    """
    block_tables, kv_lens = np.asarray(block_tables), np.asarray(kv_lens)
    capacity = block_tables.shape[1] * page_size
    for row in np.flatnonzero((kv_lens < 0) | (kv_lens > capacity))[:1]:
        rule = f"must lie in 0..{capacity}, what {block_tables.shape[1]} pages of {page_size} hold"
        require(False, f"kv_lens[{row}]", int(kv_lens[row]), rule)
    used = np.arange(block_tables.shape[1])[None, :] * page_size < kv_lens[:, None]
    wrong = used & ((block_tables < 0) | (block_tables >= num_pages))
    for row, column in np.argwhere(wrong)[:1]:
        rule = f"a used entry must be a page id in 0..{num_pages - 1}"
        require(False, f"block_tables[{row}, {column}]", int(block_tables[row, column]), rule)
