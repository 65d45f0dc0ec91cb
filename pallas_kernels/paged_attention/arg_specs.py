"""Named calls of paged attention, as data: what the compilers are asked to prove, benchmarks time and tuners tune."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.arguments import require
from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.pages import PageFormat

Rows = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class ArgSpec:
    """The shapes, dtypes and options of one call.

    Attributes:
        name: unique.
        rows: (queries in this step, tokens in all) of each row.
        heads, kv_heads, size: H, K, D.
        page_size: B.
        query: dtype of the queries.
        k, v: how keys and values are stored.
        causal, lse: options of the call; ``lse`` asks for the log-sum-exp too.
        window: keys that a query sees, or None; ``soft_cap``: of the logits, or None.
        sinks, alibi, tree: whether the call has attention sinks, ALiBi slopes, a tree mask.

    Raises:
        ValueError: no row, a row with more queries than tokens, or query heads that the KV heads do not divide.
    """

    name: str
    rows: Rows
    heads: int = 32
    kv_heads: int = 8
    size: int = 128
    page_size: int = 128
    query: str = "bfloat16"
    k: PageFormat = PageFormat("bfloat16")
    v: PageFormat = PageFormat("bfloat16")
    causal: bool = True
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    tree: bool = False
    lse: bool = False

    donated = ()

    def __post_init__(self) -> None:
        require(len(self.rows) > 0, "rows", "none", f"{self.name} must have a row")
        for queries, length in self.rows:
            seen = f"{queries} of {length} in {self.name}"
            require(0 <= queries <= length, "rows", seen, "a row's queries must be among its tokens")
        seen = f"{self.heads} and {self.kv_heads} in {self.name}"
        require(self.heads % self.kv_heads == 0, "heads", seen, "must be a multiple of kv_heads")

    @property
    def num_tokens(self) -> int:
        """T, without padding."""
        return sum(queries for queries, _ in self.rows)

    @property
    def max_query_len(self) -> int:
        """The largest number of queries of a row."""
        return max(queries for queries, _ in self.rows)

    @property
    def num_pages(self) -> int:
        """Pages that the rows hold together."""
        return sum(-(-length // self.page_size) for _, length in self.rows)

    @property
    def table_width(self) -> int:
        """P: pages of the longest row."""
        return max(-(-length // self.page_size) for _, length in self.rows)

    @property
    def read_bytes(self) -> int:
        """Bytes of keys, values and scales that a call has to read: those that a query sees, once."""
        tokens = sum(self.seen(queries, length) for queries, length in self.rows)
        bits = sum(fmt.bits * self.size + (32 if fmt.scale == "token" else 0) for fmt in (self.k, self.v))
        return tokens * self.kv_heads * bits // 8

    def seen(self, queries: int, length: int) -> int:
        """Keys of a row that some query of it sees."""
        if queries == 0 or self.window is None:
            return length if queries else 0
        return min(length, self.window + queries - 1)

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Every array of the call by its name in ``paged_attention``; the pool holds the rows and no page more."""
        pool = (self.num_pages, self.kv_heads, self.page_size)
        rows, tokens = len(self.rows), self.num_tokens
        found: dict[str, tuple[tuple[int, ...] | None, Any]] = {
            "q": ((tokens, self.heads, self.size), self.query),
            "k_pages": ((*pool, self.k.width(self.size)), self.k.storage_dtype),
            "v_pages": ((*pool, self.v.width(self.size)), self.v.storage_dtype),
            "block_tables": ((rows, self.table_width), "int32"),
            "kv_lens": ((rows,), "int32"),
            "query_starts": ((rows + 1,), "int32"),
            "k_scale": (self.k.scale_shape(*pool), "float32"),
            "v_scale": (self.v.scale_shape(*pool), "float32"),
            "sinks": ((self.heads,) if self.sinks else None, "float32"),
            "alibi_slopes": ((self.heads,) if self.alibi else None, "float32"),
            "tree_mask": ((tokens, -(-self.max_query_len // 32)) if self.tree else None, "uint32"),
        }
        return {
            name: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
            for name, (shape, dtype) in found.items()
            if shape is not None
        }

    def options(self) -> dict[str, Any]:
        """Every other argument of the call; decoding promises that rows have one query."""
        return {
            "causal": self.causal,
            "window": self.window,
            "soft_cap": self.soft_cap,
            "return_lse": self.lse,
            "max_query_len": 1 if self.max_query_len == 1 else None,
        }

    def call(self, arrays: dict[str, Any], implementation: str | None) -> Any:
        """Makes the call."""
        return paged_attention(**arrays, **self.options(), implementation=implementation)


def even(count: int, low: int, high: int) -> Rows:
    """Decode rows of ``count`` lengths evenly spread over low..high."""
    return tuple((1, low + (high - low) * index // max(count - 1, 1)) for index in range(count))


DECODE = tuple(
    ArgSpec(f"decode_{count}x{length}", ((1, length),) * count)
    for count in (8, 64, 256)
    for length in (1024, 4096, 16384)
)
PREFILL = (ArgSpec("prefill_2048", ((2048, 2048),)), ArgSpec("chunk_512_of_4096", ((512, 4096),)))
MIXED = (
    ArgSpec("mixed", (*even(62, 128, 4096), (512, 1024), (256, 256))),
    ArgSpec("verify_64x5", ((5, 1024),) * 64),
)
FIGURE_18A = tuple(
    ArgSpec(f"figure_18a_{count}x{length}", ((1, length),) * count, heads=40, kv_heads=40, page_size=16)
    for count in (8, 32)
    for length in (64, 128, 256)
)
"""The points of the paper's figure 18a, in the heads of the model that it measures, OPT-13B."""


def small(spec: ArgSpec) -> ArgSpec:
    """The same call with a small model's heads, in float32, for CPUs."""
    plain = PageFormat("float32")
    return dataclasses.replace(spec, heads=8, kv_heads=4, size=64, page_size=16, query="float32", k=plain, v=plain)


SMALL = tuple(
    small(spec)
    for spec in (
        ArgSpec("small_decode_1", ((1, 500),)),
        ArgSpec("small_decode_8", even(8, 10, 1000)),
        ArgSpec("small_decode_32", even(32, 10, 1000)),
        ArgSpec("small_prefill_256", ((256, 256),)),
        ArgSpec("small_mixed", (*even(30, 10, 1000), (100, 300), (50, 50))),
    )
)

ARG_SPECS = {spec.name: spec for spec in (*DECODE, *PREFILL, *MIXED, *FIGURE_18A, *SMALL)}
