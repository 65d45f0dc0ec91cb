"""Devices that are not here: what makes traced code be for one, and the interpreters that kernels run in instead."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator

import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

OLD = jax.__version_info__ < (0, 11, 2)
new_jax = pytest.mark.skipif(OLD, reason="the kernels need jax 0.11.2")  # those in Mosaic GPU


@contextlib.contextmanager
def tpu_interpreter() -> Iterator[None]:
    """Runs Mosaic TPU kernels in the interpreter, where a race or an access out of bounds fails."""
    try:
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True, out_of_bounds_reads="raise")):
            yield
    except Exception:
        pltpu.reset_tpu_interpret_mode_state()
        raise


def gpu_interpreter() -> contextlib.AbstractContextManager:
    """Runs Mosaic GPU kernels in the interpreter, where a race fails."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    raises = {"on_race": "raise"} if "on_race" in inspect.signature(plgpu.InterpretGPUParams).parameters else {}
    return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True, **raises))
