"""A checked call of kv_write: every rule that shapes, dtypes and formats must keep, at trace time."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arguments import require, require_array, require_shape
from pallas_kernels.pages import BITS, PageFormat

ROW_DTYPES = ("float32", "bfloat16", "float16")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Side:
    """Keys or values: where they go, and what they are.

    Attributes:
        pages: [N,K,B,D] in the storage dtype of ``fmt``; the last axis is D/2 for packed int4.
        scale: float32 as ``fmt`` has it: None, [1,1,1], [1,K,1], or [N,K,B], which the call fills too.
        rows: the new ones, [T,K,D].
        fmt: how the pages store them.
    """

    pages: jax.Array
    scale: jax.Array | None
    rows: jax.Array
    fmt: PageFormat = dataclasses.field(metadata=dict(static=True))

    @property
    def head_size(self) -> int:
        """D."""
        return self.rows.shape[2]

    @property
    def scales(self) -> tuple[jax.Array, ...]:
        """The scale that the call fills, if there is one."""
        return (self.scale,) if self.fmt.scale == "token" else ()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Call:
    """What an implementation gets: arrays that fit together.

    Attributes:
        sides: the keys, and the values unless there are none.
        slots: int32 [T], n * B + offset; outside [0, N * B) for a token that is dropped.
    """

    sides: tuple[Side, ...]
    slots: jax.Array

    @property
    def num_pages(self) -> int:
        """N."""
        return self.sides[0].pages.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """K."""
        return self.sides[0].pages.shape[1]

    @property
    def page_size(self) -> int:
        """B."""
        return self.sides[0].pages.shape[2]

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.slots.shape[0]


def check_slots(slots: object) -> jax.Array:
    """Where the tokens go."""
    require_array("slots", slots, 1, ("int32",))
    return jnp.asarray(slots)


def check_side(name: str, rows: object, pages: object, scale: object, fmt: object, tokens: int) -> Side:
    """Checks keys or values against their pages; ``name`` is ``k`` or ``v``."""
    if not isinstance(fmt, PageFormat):
        raise TypeError(f"{name}_format: must be a PageFormat; got {type(fmt).__name__}")
    require_array(f"{name}_pages", pages, 4, tuple(dtype if dtype != "int4" else "uint8" for dtype in BITS))
    seen = f"shape {tuple(pages.shape)}"
    require(min(pages.shape) > 0, f"{name}_pages", seen, "no axis may be empty")
    stored = fmt.storage_dtype
    require(pages.dtype == stored, f"{name}_pages", pages.dtype.name, f"{fmt} is stored as {stored.name}")
    count, kv_heads, page_size, width = pages.shape
    most = np.iinfo(np.int32).max
    require(count * page_size <= most, f"{name}_pages", seen, f"slots N * B must be at most {most}, to fit in int32")
    require_array(name, rows, 3, ROW_DTYPES)
    require_shape(name, rows, (tokens, kv_heads, width * (2 if fmt.packed else 1)), "[T,K,D] for these slots and pages")
    shape = fmt.scale_shape(count, kv_heads, page_size)
    if shape is None:
        require(scale is None, f"{name}_scale", "one", f"{fmt} takes no scale")
    else:
        require(scale is not None, f"{name}_scale", None, f"{fmt} needs a scale of shape {shape}")
        require_array(f"{name}_scale", scale, 3, ("float32",))
        require_shape(f"{name}_scale", scale, shape, f"the shape that {fmt} has")
    pages, rows = jnp.asarray(pages), jnp.asarray(rows)
    return Side(pages, None if scale is None else jnp.asarray(scale), rows, fmt)


def check_no_values(**given: object) -> None:
    """Checks that nothing is given for values that the pages do not hold."""
    for name, x in given.items():
        require(x is None, name, f"{type(x).__name__}", "must be None where v_pages is")
