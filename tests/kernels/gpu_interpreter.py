"""Where Mosaic GPU kernels are tested: the GPU interpreter, and code that is traced for an absent GPU."""

from __future__ import annotations

import contextlib
import inspect

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

OLD = jax.__version_info__ < (0, 11, 2)
new_jax = pytest.mark.skipif(OLD, reason="the kernels need jax 0.11.2")


def mesh(kind: str) -> contextlib.AbstractContextManager:
    """What makes traced code be for a GPU of this kind."""
    device = AbstractDevice(device_kind=kind, num_cores=1, platform="gpu")
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device))


def interpreter() -> contextlib.AbstractContextManager:
    """Runs kernels in the interpreter, where a race fails."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    raises = {"on_race": "raise"} if "on_race" in inspect.signature(plgpu.InterpretGPUParams).parameters else {}
    return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True, **raises))
