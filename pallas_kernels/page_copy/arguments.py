"""A checked call of page_copy: every rule that shapes and dtypes must keep, at trace time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arguments import require, require_array, require_shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Call:
    """What an implementation gets: arrays that fit together.

    Attributes:
        pool: arrays [L,N,...] of any dtypes: keys, values, scales per token.
        sources: int32 [C], pages that are read; for ``put``, the places in the content, 0 to C - 1.
        destinations: int32 [C], pages that are written; for ``take``, the places in the result, 0 to C - 1.
        content: for ``put``, arrays [C,L,...], else none.
        kind: what is done.
    """

    pool: tuple[jax.Array, ...]
    sources: jax.Array
    destinations: jax.Array
    content: tuple[jax.Array, ...]
    kind: Literal["copy", "take", "put"] = dataclasses.field(metadata=dict(static=True))

    @property
    def num_layers(self) -> int:
        """L."""
        return self.pool[0].shape[0]

    @property
    def num_pages(self) -> int:
        """N."""
        return self.pool[0].shape[1]

    @property
    def count(self) -> int:
        """C."""
        return self.sources.shape[0]


def check_pool(pool: object) -> tuple[jax.Array, ...]:
    """The arrays of a pool."""
    if not isinstance(pool, Sequence):
        raise TypeError(f"pool: must be a list or tuple of arrays; got {type(pool).__name__}")
    require(len(pool) > 0, "pool", "no array", "must have at least one")
    for i, x in enumerate(pool):
        if not isinstance(x, (jax.Array, np.ndarray)):
            raise TypeError(f"pool[{i}]: must be an array; got {type(x).__name__}")
        seen = f"shape {tuple(x.shape)}"
        require(x.ndim >= 3 and min(x.shape) > 0, f"pool[{i}]", seen, "must be [L,N,...] without an empty axis")
        shape = tuple(pool[0].shape[:2])
        require(x.shape[:2] == shape, f"pool[{i}]", seen, f"must have the layers and pages of pool[0], {shape}")
    return tuple(map(jnp.asarray, pool))


def check_ids(name: str, ids: object) -> jax.Array:
    """Page ids."""
    require_array(name, ids, 1, ("int32",))
    return jnp.asarray(ids)


def check_content(content: object, pool: tuple[jax.Array, ...], count: int) -> tuple[jax.Array, ...]:
    """What is put into the pages of a pool."""
    if not isinstance(content, Sequence):
        raise TypeError(f"content: must be a list or tuple of arrays; got {type(content).__name__}")
    require(len(content) == len(pool), "content", f"{len(content)} arrays", f"must have one for each of {len(pool)}")
    for i, (x, pages) in enumerate(zip(content, pool, strict=True)):
        require_array(f"content[{i}]", x, pages.ndim, (pages.dtype.name,))
        want = (count, pages.shape[0], *pages.shape[2:])
        require_shape(f"content[{i}]", x, want, "[C,L,...] for these ids and pages")
    return tuple(map(jnp.asarray, content))
