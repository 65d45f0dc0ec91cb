"""The checks that the ops share: an error names the argument, what was seen, and the rule, at trace time."""

from __future__ import annotations

import jax
import numpy as np


def require(kept: bool, name: str, value: object, rule: str) -> None:
    """Raises ValueError naming the argument, what was seen, and the rule, unless the rule is kept."""
    if not kept:
        raise ValueError(f"{name}: {rule}; got {value}")


def require_array(name: str, x: object, rank: int, dtypes: tuple[str, ...]) -> None:
    """Raises TypeError unless ``x`` is an array of one of ``dtypes``, ValueError unless it has ``rank`` axes."""
    if not isinstance(x, (jax.Array, np.ndarray)):
        raise TypeError(f"{name}: must be an array; got {type(x).__name__}")
    if x.dtype.name not in dtypes:
        raise TypeError(f"{name}: dtype must be one of {', '.join(dtypes)}; got {x.dtype.name}")
    require(x.ndim == rank, name, f"shape {tuple(x.shape)}", f"must have {rank} axes")


def require_shape(name: str, x: jax.Array, shape: tuple[int, ...], what: str) -> None:
    """Raises ValueError unless ``x`` has this shape; ``what`` says what the shape is."""
    require(tuple(x.shape) == tuple(shape), name, f"shape {tuple(x.shape)}", f"must be {what} = {tuple(shape)}")


def check_values(v_pages: object, k_pages: jax.Array) -> None:
    """Checks that the pages of values go with those of keys; each side's own rules are checked apart."""
    if not hasattr(v_pages, "shape"):
        raise TypeError(f"v_pages: must be an array; got {type(v_pages).__name__}")
    rule = f"must have the pages, heads and slots of k_pages, {tuple(k_pages.shape[:3])}"
    require(v_pages.shape[:3] == k_pages.shape[:3], "v_pages", f"shape {tuple(v_pages.shape)}", rule)
