"""What differs between JAX releases and backends, in one place."""

from __future__ import annotations

import os

import jax


def stacks_layers() -> bool:
    """Whether weights are stacked [L, ...] unless asked otherwise: not on a CPU, where a scan over layers copies each
    layer's weights in every step.
    """
    return jax.default_backend() != "cpu"


def step_compiler_options(dtype: str = "float32") -> dict[str, str | int] | None:
    """Compiler options of a jitted step, for the default backend; None where the defaults are best.

    On a CPU, XLA hands every dot to a library that packs the weights anew in each call, which costs more than the dot
    itself at the batch sizes of decoding on one core. For float32 only its reductions are kept there, and dots go to
    Eigen, which reads weights [in, out] as they lie; of smaller floats Eigen's dots are the slower ones, by up to four
    times. On two cores the library served 5% more tokens a second (one comparison, 32 requests); more were not tried.
    Vectors of 512 bits pay where the CPU has them and change nothing where it has not.

    Args:
        dtype: of the weights, by name.
    """
    if jax.default_backend() != "cpu":
        return None
    options: dict[str, str | int] = {"xla_cpu_prefer_vector_width": 512}
    if dtype == "float32" and usable_cores() == 1:
        options["xla_cpu_experimental_ynn_fusion_type"] = "LIBRARY_FUSION_TYPE_REDUCE"
    return options


def usable_cores() -> int:
    """Cores that this process may use, for each of which XLA makes a thread on a CPU."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
