"""Checks shared by the workload values and the readers.

Every check raises ``WorkloadError``; the message says the rule, the value seen and what to change.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import Any

import numpy as np

MAX_TOKENS = 2**31 - 1
"""Longest length that is taken for a number of tokens rather than for a mistake."""


class WorkloadError(ValueError):
    """A workload, a data set or a request trace that breaks a rule."""


def require(ok: bool, message: str) -> None:
    """Raise ``WorkloadError(message)`` unless ``ok``."""
    if not ok:
        raise WorkloadError(message)


def tokens_array(values: Any, field: str, *, least: int = 1) -> np.ndarray:
    """Return ``values`` as a read-only int64 array of token counts.

    Args:
        values: integers, shape [R]. Floats and booleans are refused rather than rounded.
        field: name for the error message.
        least: smallest count allowed.
    """
    if not isinstance(values, np.ndarray):
        require(isinstance(values, Iterable), f"{field} must be a flat list of integers, got {values!r}")
        values = list(values)
        odd = next((v for v in values if isinstance(v, bool | np.bool_)), None)
        require(odd is None, f"{field} must hold integers, got the boolean {odd!r}")
    try:
        raw = np.asarray(values) if len(values) else np.zeros(0, np.int64)
    except (ValueError, OverflowError) as error:
        raise WorkloadError(f"{field} must be a flat list of integers: {error}") from None
    require(raw.ndim == 1, f"{field} must have one dimension, got shape {raw.shape}")
    require(
        raw.dtype.kind in "iu",
        f"{field} must hold integers up to {MAX_TOKENS}, got values of type {raw.dtype}; convert them explicitly",
    )
    bad = np.flatnonzero((raw < least) | (raw > MAX_TOKENS))
    if bad.size:
        raise WorkloadError(f"{field}[{bad[0]}] must be in {least} .. {MAX_TOKENS}, got {int(raw[bad[0]])}")
    return frozen(raw.astype(np.int64))


def arrivals_array(values: Any, field: str = "arrival_s") -> np.ndarray:
    """Return ``values`` as a read-only float64 array of sorted, finite seconds >= 0, shape [R]."""
    try:
        raw = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise WorkloadError(f"{field} must be a flat list of seconds: {error}") from None
    require(raw.ndim == 1, f"{field} must have one dimension, got shape {raw.shape}")
    require(
        raw.dtype.kind in "iuf" or raw.size == 0,
        f"{field} must hold numbers of seconds, got values of type {raw.dtype}",
    )
    seconds = raw.astype(np.float64) + 0.0  # + 0.0 turns -0.0 into 0.0, so that equal times hash equally
    bad = np.flatnonzero(~np.isfinite(seconds) | (seconds < 0))
    if bad.size:
        raise WorkloadError(f"{field}[{bad[0]}] must be finite and zero or more, got {seconds[bad[0]]}")
    bad = np.flatnonzero(np.diff(seconds) < 0)
    if bad.size:
        i = int(bad[0]) + 1
        raise WorkloadError(
            f"{field} must not go back in time, got {seconds[i]} after {seconds[i - 1]} at index {i}; sort the requests"
        )
    return frozen(seconds)


def frozen(array: np.ndarray) -> np.ndarray:
    """Make ``array`` read-only and return it."""
    array.setflags(write=False)
    return array


def is_number(value: Any, kind: type = numbers.Real) -> bool:
    """Whether ``value`` is a number of ``kind``; booleans are none."""
    return isinstance(value, kind) and not isinstance(value, bool | np.bool_)


def positive_number(value: Any, field: str, unit: str) -> float:
    """Return ``value`` as a finite float above zero."""
    require(is_number(value), f"{field} must be a number of {unit}, got {value!r} of type {type(value).__name__}")
    require(math.isfinite(value) and value > 0, f"{field} must be finite and above zero ({unit}), got {value!r}")
    return float(value)


def share(value: Any, field: str) -> float:
    """Return ``value`` as a probability in [0, 1]."""
    require(is_number(value) and 0 <= value <= 1, f"{field} must be a probability in 0 .. 1, got {value!r}")
    return float(value)


def whole_number(value: Any, field: str, *, least: int = 0, most: int = MAX_TOKENS) -> int:
    """Return ``value`` as an int in ``least .. most``."""
    integer = is_number(value, numbers.Integral)
    require(integer, f"{field} must be an integer, got {value!r} of type {type(value).__name__}")
    require(least <= value <= most, f"{field} must be in {least} .. {most}, got {value}")
    return int(value)


def text(value: Any, field: str) -> str:
    """Return ``value`` if it is a non-empty string of one line."""
    ok = isinstance(value, str) and value.strip() != "" and "\n" not in value
    require(ok, f"{field} must be a non-empty string of one line, got {value!r}")
    return value
