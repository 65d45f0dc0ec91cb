"""The tree of a decoder's weights: what it must be, random values for it, and its stacked and unrolled forms."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from paxkv.cache.pages import init as init_pages
from paxkv.cache.rows import Rows
from paxkv.models.architecture import DecoderConfig
from paxkv.models.decoder import Decoder

Tree = dict[str, Any]
Path = tuple[str, ...]


def weight_specs(config: DecoderConfig) -> dict[Path, jax.ShapeDtypeStruct]:
    """Path, shape and dtype of every weight, in the config's own form (stacked or unrolled). Allocates nothing."""

    def make() -> Tree:
        one = jnp.zeros(1, jnp.int32)
        rows = Rows(one[None], one, jnp.zeros(2, jnp.int32), one, 1)
        pages = init_pages(config.cache_layout(1, 1))
        return Decoder(config).init(jax.random.key(0), one, one, pages, rows)["params"]

    return flatten(jax.eval_shape(make))


def flatten(tree: Mapping[str, Any], above: Path = ()) -> dict[Path, Any]:
    """The leaves of nested dicts by path."""
    flat: dict[Path, Any] = {}
    for name, value in tree.items():
        flat.update(flatten(value, (*above, name)) if isinstance(value, Mapping) else {(*above, name): value})
    return flat


def unflatten(flat: Mapping[Path, Any]) -> Tree:
    """Nested dicts of the leaves."""
    tree: Tree = {}
    for path, value in flat.items():
        at = tree
        for name in path[:-1]:
            at = at.setdefault(name, {})
        at[path[-1]] = value
    return tree


def check_params(params: Mapping[str, Any], config: DecoderConfig) -> None:
    """Refuses weights that are not exactly what the config needs.

    Raises:
        ValueError: a weight that is missing, of another shape or dtype, or of no use; names it, what was expected and
            what was found.
    """
    want, got = weight_specs(config), flatten(params)
    for path, spec in want.items():
        name, expected = "/".join(path), f"{spec.dtype.name} {list(spec.shape)}"
        if path not in got:
            raise ValueError(f"weight {name} is missing: expected {expected}")
        found = got[path]
        if tuple(found.shape) != spec.shape or found.dtype != spec.dtype:
            raise ValueError(f"weight {name}: expected {expected}, found {found.dtype.name} {list(found.shape)}")
    for path in got:
        if path not in want:
            raise ValueError(
                f"weight {'/'.join(path)} is of no use to this {config.name} with "
                f"{'stacked' if config.scan_layers else 'unrolled'} layers and tied_head={config.tied_head}"
            )


def init_params(config: DecoderConfig, key: jax.Array | int) -> Tree:
    """Random weights, the same for a config whether its layers are stacked or not.

    Projections are normal with variance 1 / inputs, norm weights near 1 and biases near 0 but not there, so that a
    weight that is not used, or used twice, shows.

    Args:
        key: a JAX key, or a seed.
    """
    unrolled = dataclasses.replace(config, scan_layers=False)
    seed = [key] if isinstance(key, int) else np.asarray(jax.random.key_data(key)).tolist()
    rng = np.random.default_rng(seed)
    flat = {}
    for path, spec in sorted(weight_specs(unrolled).items()):
        values = rng.standard_normal(spec.shape, np.float32)
        if path[-1] == "scale":
            values = 1.0 - config.norm_offset + 0.1 * values
        elif path[-1] in ("bias", "correction_bias"):
            values = 0.05 * values
        elif path[-1] in ("embedding", "positions"):
            values = values / (config.embedding_scale if path[-1] == "embedding" else 1.0)
        else:
            values = values / math.sqrt(spec.shape[-2])
        flat[path] = jnp.asarray(values.astype(spec.dtype))
    params = unflatten(flat)
    return stack_layers(params, config) if config.scan_layers else params


def stacked_place(config: DecoderConfig, path: Path) -> tuple[Path, int | None]:
    """Where an unrolled weight lies in the stacked form: (path, index along its first axis or None)."""
    top, _, number = path[0].rpartition("_")
    if top != "layers" or not number.isdigit():
        return path, None
    layer = int(number)
    for name, first, end, _ in config.runs:
        if first <= layer < end:
            return (name, *path[1:]), layer - first
    raise ValueError(f"{path[0]} is no layer of a {config.name} of {config.num_layers} layers")


def own_place(config: DecoderConfig, path: Path) -> tuple[Path, int | None]:
    """Where an unrolled weight lies in the config's own form: (path, index along its first axis or None)."""
    return stacked_place(config, path) if config.scan_layers else (path, None)


def unrolled_weight(config: DecoderConfig, flat: Mapping[Path, Any], path: Path) -> Any:
    """The weight of the unrolled form at ``path``, of weights in the config's own form: of numpy arrays a view."""
    place, index = own_place(config, path)
    return flat[place] if index is None else flat[place][index]


def stack_layers(params: Mapping[str, Any], config: DecoderConfig) -> Tree:
    """Unrolled weights (``layers_{i}``) to stacked ones. Copies them."""
    flat: dict[Path, Any] = {}
    stacks: dict[Path, dict[int, Any]] = {}
    for path, value in flatten(params).items():
        place, index = stacked_place(config, path)
        if index is None:
            flat[place] = value
        else:
            stacks.setdefault(place, {})[index] = value
    for place, parts in stacks.items():
        flat[place] = jnp.stack([parts[index] for index in sorted(parts)])
    return unflatten(flat)


def unstack_layers(params: Mapping[str, Any], config: DecoderConfig) -> Tree:
    """Stacked weights to unrolled ones (``layers_{i}``). Copies them."""
    runs = {name: (first, end) for name, first, end, _ in config.runs}
    flat: dict[Path, Any] = {}
    for path, value in flatten(params).items():
        if path[0] not in runs:
            flat[path] = value
            continue
        first, end = runs[path[0]]
        for layer in range(first, end):
            flat[(f"layers_{layer}", *path[1:])] = value[layer - first]
    return unflatten(flat)
