"""Named calls of the other ops, as data, in the form of ``paged_attention.arg_specs.ArgSpec``."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.kv_write.api import kv_write
from pallas_kernels.mla_attention.api import mla_attention
from pallas_kernels.page_copy.api import copy_pages, put_pages, take_pages
from pallas_kernels.pages import PageFormat

Shape = jax.ShapeDtypeStruct


@dataclasses.dataclass(frozen=True)
class WriteSpec:
    """A call of ``kv_write``.

    Attributes:
        name: unique.
        tokens, kv_heads, size, page_size: T, K, D, B.
        k, v: how keys and values are stored.
        num_pages: N.
    """

    name: str
    tokens: int = 64
    kv_heads: int = 8
    size: int = 128
    page_size: int = 128
    k: PageFormat = PageFormat("bfloat16")
    v: PageFormat = PageFormat("bfloat16")
    num_pages: int = 512

    donated = ("k_pages", "v_pages", "k_scale", "v_scale")

    def shapes(self) -> dict[str, Shape]:
        """Every array of the call by its name."""
        pool = (self.num_pages, self.kv_heads, self.page_size)
        row = Shape((self.tokens, self.kv_heads, self.size), jnp.bfloat16)
        found = {"k": row, "v": row, "slots": Shape((self.tokens,), jnp.int32)}
        for name, fmt in (("k", self.k), ("v", self.v)):
            found[f"{name}_pages"] = Shape((*pool, fmt.width(self.size)), fmt.storage_dtype)
            if fmt.quantised:
                found[f"{name}_scale"] = Shape(fmt.scale_shape(*pool), jnp.float32)
        return found

    def call(self, arrays: dict[str, Any], implementation: str | None) -> Any:
        """Makes the call."""
        return kv_write(**arrays, k_format=self.k, v_format=self.v, implementation=implementation)


@dataclasses.dataclass(frozen=True)
class CopySpec:
    """A call of ``page_copy``: a pool of keys and values, with scales per token where pages are of 8 bits.

    Attributes:
        name: unique.
        kind: ``copy``, ``take`` or ``put``.
        count, layers, num_pages, kv_heads, page_size, size: C, L, N, K, B, D.
        dtypes: of keys and values.
    """

    name: str
    kind: Literal["copy", "take", "put"] = "copy"
    count: int = 16
    layers: int = 4
    num_pages: int = 128
    kv_heads: int = 8
    page_size: int = 128
    size: int = 128
    dtypes: tuple[str, str] = ("bfloat16", "bfloat16")

    @property
    def donated(self) -> tuple[str, ...]:
        """The pool, unless it is only read."""
        return () if self.kind == "take" else ("pool",)

    def shapes(self) -> dict[str, Any]:
        """Every argument of the call by its name."""
        pool = []
        for dtype in map(jnp.dtype, self.dtypes):
            tokens = (self.layers, self.num_pages, self.kv_heads, self.page_size)
            pool += [Shape((*tokens, self.size), dtype)]
            pool += [Shape(tokens, jnp.float32)] if dtype.itemsize == 1 else []
        ids = Shape((self.count,), jnp.int32)
        if self.kind == "copy":
            return {"pool": pool, "sources": ids, "destinations": ids}
        content = [Shape((self.count, x.shape[0], *x.shape[2:]), x.dtype) for x in pool]
        return {"pool": pool, "ids": ids} | ({"content": content} if self.kind == "put" else {})

    def call(self, arrays: dict[str, Any], implementation: str | None) -> Any:
        """Makes the call."""
        function = {"copy": copy_pages, "take": take_pages, "put": put_pages}[self.kind]
        return function(**arrays, implementation=implementation)


@dataclasses.dataclass(frozen=True)
class LatentSpec:
    """A call of ``mla_attention`` in DeepSeek's shapes.

    Attributes:
        name: unique.
        rows: (queries in this step, tokens in all) of each row.
        fmt: how latents are stored.
        heads, width, v_width, page_size: H, C, lanes that are values, B.
    """

    name: str
    rows: tuple[tuple[int, int], ...]
    fmt: PageFormat = PageFormat("bfloat16")
    heads: int = 16
    width: int = 576
    v_width: int = 512
    page_size: int = 64

    donated = ()

    def shapes(self) -> dict[str, Shape]:
        """Every array of the call by its name."""
        blocks = [-(-length // self.page_size) for _, length in self.rows]
        pool = (sum(blocks), 1, self.page_size)
        found = {
            "q": Shape((sum(queries for queries, _ in self.rows), self.heads, self.width), jnp.bfloat16),
            "pages": Shape((*pool, self.fmt.width(self.width)), self.fmt.storage_dtype),
            "block_tables": Shape((len(blocks), max(blocks)), jnp.int32),
            "kv_lens": Shape((len(blocks),), jnp.int32),
            "query_starts": Shape((len(blocks) + 1,), jnp.int32),
        }
        if self.fmt.quantised:
            found["k_scale"] = Shape(self.fmt.scale_shape(*pool), jnp.float32)
        return found

    def call(self, arrays: dict[str, Any], implementation: str | None) -> Any:
        """Makes the call."""
        most = max(queries for queries, _ in self.rows)
        options = {"v_width": self.v_width, "scale": 192**-0.5, "max_query_len": 1 if most == 1 else None}
        return mla_attention(**arrays, **options, implementation=implementation)
