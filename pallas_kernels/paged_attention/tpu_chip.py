"""Which TPU a kernel is built for, and what of it decides how."""

from __future__ import annotations

import dataclasses

from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import platforms


@dataclasses.dataclass(frozen=True)
class Chip:
    """One core, as far as the kernels ask.

    Attributes:
        name: as in ``schedule.TARGETS``: v5e, 7x.
        generation: 4 to 7.
        vmem_bytes, smem_bytes: capacities.
        mxu: rows and columns of a matrix unit, 128 or 256.
        multiplies_int8: whether matrix units take int8.
        bandwidth: of its HBM, bytes per second.
    """

    name: str
    generation: int
    vmem_bytes: int
    smem_bytes: int
    mxu: int
    multiplies_int8: bool
    bandwidth: int


DEFAULT = Chip("v6e", 6, 128 << 20, 1 << 20, 256, True, 1640 * 10**9)
"""What the interpreter plays on a machine without a TPU, unless a mesh names another."""


def current() -> Chip:
    """The chip of the mesh in use, or of the machine."""
    if platforms.current() != "tpu":
        return DEFAULT
    info = pltpu.get_tpu_info()
    return Chip(
        name=str(info.chip_version),
        generation=info.generation,
        vmem_bytes=info.vmem_capacity_bytes,
        smem_bytes=info.smem_capacity_bytes,
        mxu=info.mxu_column_size,
        multiplies_int8=info.int8_ops_per_second > 0,
        bandwidth=info.mem_bw_bytes_per_second,
    )
