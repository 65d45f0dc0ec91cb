"""A decoder's weights put together from a checkpoint's tensors, each copied once to where it lies in the end."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import numpy as np

from paxkv.config import require
from paxkv.models.architecture import DecoderConfig
from paxkv.models.families import TensorRule, tensor_map
from paxkv.models.weights import Path, Tree, stacked_place, unflatten, weight_specs

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all) after each step of something long."""
_ALIGNMENT = 64  # bytes


def assemble(config: DecoderConfig, read: Callable[[str], np.ndarray], progress: Progress | None = None) -> Tree:
    """The weights, in the config's form (stacked or unrolled) and dtype.

    Beside what is done, no more than the weight in work and one tensor are in memory.

    Args:
        read: a tensor by the name that the family's tensor map has for it; read once for each weight it is part of.
        progress: called after each weight of the unrolled form.

    Raises:
        ValueError: a tensor of another shape, or a number that is too large for the dtype.
    """
    specs, places = weight_specs(config), _by_place(config)
    total, done, flat = sum(map(len, places.values())), 0, {}
    differ = sorted("/".join(place) for place in specs.keys() ^ places.keys())
    require(not differ, f"{config.name}: tensor map and decoder must have the same weights, one lacks {differ}")
    for place, rules in places.items():
        whole = _empty(specs[place].shape, specs[place].dtype)
        for rule, index in rules:
            _fill(whole if index is None else whole[index], rule, read)
            done += 1
            if progress is not None:
                progress(done, total)
        flat[place] = jax.device_put(whole)
    return unflatten(flat)


def _by_place(config: DecoderConfig) -> dict[Path, list[tuple[TensorRule, int | None]]]:
    """The rules of each weight of the config's form, those of one stack beside each other."""
    places: dict[Path, list[tuple[TensorRule, int | None]]] = {}
    for rule in tensor_map(config):
        place, index = stacked_place(config, rule.path) if config.scan_layers else (rule.path, None)
        places.setdefault(place, []).append((rule, index))
    return places


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Room for an array at an address that JAX's CPU arrays can have too: there it becomes one without a copy."""
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + size].view(dtype).reshape(shape)


def _fill(weight: np.ndarray, rule: TensorRule, read: Callable[[str], np.ndarray]) -> None:
    with np.errstate(over="ignore"):  # told below, by name
        for source, name in enumerate(rule.sources):
            rule.put(weight, source, read(name))
    if weight.dtype == np.float16 and not np.isfinite(weight).all():
        raise ValueError(
            f"tensor {' or '.join(rule.sources)}: a number is not finite in float16, whose largest is 65504; "
            "load as bfloat16 or float32"
        )
