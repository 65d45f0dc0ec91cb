"""The model of the live runs, seeded or from a checkpoint, and the limits of the device that it runs on."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from experiments.live.setting import SIZES, LiveSize, checkpoint_size
from paxkv.compat import stacks_layers, usable_cores
from paxkv.models.architecture import DecoderConfig
from paxkv.models.checkpoint import load
from paxkv.models.rotary import Rope
from paxkv.models.weights import init_params

MATRIX = 2048
READ_BYTES = 2**28
REPEATS = 7


@dataclasses.dataclass(frozen=True)
class LiveModel:
    """A model on the device: architecture, weights and the seconds that making them took."""

    config: DecoderConfig
    params: Any
    build_s: float

    def facts(self) -> dict[str, float]:
        """Number and bytes of the weights that a step reads (of the embedding it looks up its tokens alone)."""
        untied = [leaf for name, leaf in self.params.items() if name != "embedding" or self.config.tied_head]
        leaves = jax.tree.leaves(untied)
        return {
            "weights": sum(leaf.size for leaf in leaves),
            "weight_bytes": sum(leaf.nbytes for leaf in leaves),
            "build_s": self.build_s,
        }


def seeded_model(size: LiveSize, seed: int = 0) -> LiveModel:
    """A random Llama of a size; one seed gives the same weights on every machine."""
    begin = time.perf_counter()
    shape = size.shape
    config = DecoderConfig(
        "llama",
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_size=shape.head_size,
        ffn_size=shape.ffn_size,
        max_positions=shape.max_positions,
        rope=Rope(shape.head_size),
        scan_layers=stacks_layers(),
    )
    params = jax.block_until_ready(init_params(config, seed))
    return LiveModel(config, params, time.perf_counter() - begin)


def load_model(path: Path, progress: Callable[[float, float, str], None]) -> LiveModel:
    """The model of a checkpoint, in float32 on a CPU and as it is stored elsewhere.

    Args:
        path: whatever :func:`paxkv.models.checkpoint.load` reads.

    Raises:
        OSError, ValueError, ImportError: see there.
    """
    begin = time.perf_counter()
    config, params = load(
        path,
        dtype="float32" if on_cpu() else None,
        progress=lambda done, total: progress(done, total, f"loading {path.name}"),
    )
    return LiveModel(config, jax.block_until_ready(params), time.perf_counter() - begin)


def size_of_checkpoint(path: Path, model: LiveModel) -> LiveSize:
    """What to run with a checkpoint. It is known by a digest of all of its files.

    Raises:
        OSError: a file cannot be read.
        ValueError: positions that end too early.
    """
    digest = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
    config = model.config
    name = "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in path.resolve().name)
    return checkpoint_size(name, config.shape, config.max_length, digest.hexdigest()[:16], on_cpu=on_cpu())


def first_device() -> jax.Device:
    """The device that everything runs on. What jax says about backends that are not there is of no use to a reader."""
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.WARNING)
    return jax.devices()[0]


def on_cpu() -> bool:
    """Whether the device is the host."""
    return first_device().platform == "cpu"


def device_name() -> str:
    """The platform and kind of the device, such as `gpu NVIDIA H200` or `cpu, 2 cores`."""
    device = first_device()
    if device.platform == "cpu":
        return f"cpu, {usable_cores()} cores"
    return f"{device.platform} {device.device_kind}"


def default_size() -> LiveSize:
    """The size of the embedded model for the device that is there."""
    return SIZES["desktop" if on_cpu() else "accelerator"]


@functools.cache
def device_limits() -> dict[str, float]:
    """What the device does at best, measured: float32 FLOP/s of a large product, bytes/s of a long sum."""
    square = jnp.ones((MATRIX, MATRIX), jnp.float32)
    long = jnp.ones(READ_BYTES // 4, jnp.float32)
    return {
        "flops_per_s": 2 * MATRIX**3 / _fastest(jax.jit(jnp.matmul), square, square),
        "bytes_per_s": READ_BYTES / _fastest(jax.jit(jnp.sum), long),
    }


def _fastest(function, *arrays) -> float:
    jax.block_until_ready(function(*arrays))
    times = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(function(*arrays))
        times.append(time.perf_counter() - begin)
    return min(times)
