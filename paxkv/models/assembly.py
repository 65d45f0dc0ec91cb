"""A decoder's weights put together from a checkpoint's arrays, each copied once to where it lies in the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import jax
import numpy as np

from paxkv.config import require
from paxkv.models.architecture import DecoderConfig
from paxkv.models.families import tensor_map
from paxkv.models.weights import Path, Tree, own_place, unflatten, weight_specs

Progress = Callable[[int, int], None]
"""Called with (steps done, steps in all) after each step of something long."""
_ALIGNMENT = 64  # bytes


def assemble(config: DecoderConfig, read: Callable[[str], np.ndarray], progress: Progress | None = None) -> Tree:
    """The weights made of a checkpoint's tensors, in the config's form (stacked or unrolled) and dtype.

    Args:
        read: a tensor by the name that the family's tensor map has for it; called once for each weight it is part of.
        progress: called after each weight of the unrolled form.

    Raises:
        ValueError: a tensor of another shape, or a number that is too large for the dtype.
    """
    rules = {rule.path: rule for rule in tensor_map(config)}

    def fill(path: Path, weight: np.ndarray) -> None:
        rule = rules[path]
        require(rule.shape == weight.shape, f"weight {'/'.join(path)}: {weight.shape} needed, {rule.shape} made")
        with np.errstate(over="ignore"):  # told below, by name
            for source, name in enumerate(rule.sources):
                rule.put(weight, source, read(name))
        check_range(f"tensor {' or '.join(rule.sources)}", weight)

    return build(config, rules, fill, progress)


def build(
    config: DecoderConfig,
    paths: Iterable[Path],
    fill: Callable[[Path, np.ndarray], None],
    progress: Progress | None = None,
) -> Tree:
    """The weights, in the config's form and dtype, from those of the unrolled form one by one.

    Beside what is done, no more than the weight in work and what ``fill`` needs are in memory.

    Args:
        paths: of all weights of the unrolled form.
        fill: writes the weight of a path into an array of its shape.
        progress: called after each.
    """
    specs, places = weight_specs(config), _by_place(config, paths)
    differ = sorted("/".join(place) for place in specs.keys() ^ places.keys())
    require(not differ, f"{config.name}: weights must be those of the decoder; missing or of no use are {differ}")
    total, done, flat = sum(map(len, places.values())), 0, {}
    for place, parts in places.items():
        whole = _empty(specs[place].shape, specs[place].dtype)
        for path, index in parts:
            fill(path, whole if index is None else whole[index])
            done += 1
            if progress is not None:
                progress(done, total)
        flat[place] = jax.device_put(whole)
    return unflatten(flat)


def check_range(name: str, weight: np.ndarray) -> None:
    """Refuses a float16 weight with numbers that its dtype does not hold."""
    if weight.dtype == np.float16 and not np.isfinite(weight).all():
        raise ValueError(
            f"{name}: a number is not finite in float16, whose largest is 65504; load as bfloat16 or float32"
        )


def _by_place(config: DecoderConfig, paths: Iterable[Path]) -> dict[Path, list[tuple[Path, int | None]]]:
    """The unrolled weights that make up each weight of the config's form, in order."""
    places: dict[Path, list[tuple[Path, int | None]]] = {}
    for path in paths:
        place, index = own_place(config, path)
        places.setdefault(place, []).append((path, index))
    return places


def _empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Room for an array at an address that JAX's CPU arrays can have too: there it becomes one without a copy."""
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    return room[start : start + size].view(dtype).reshape(shape)
