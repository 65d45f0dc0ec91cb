"""The devices that are compiled for, absent or not: a mesh of one of them, and the versions of what compiles."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from pallas_kernels import schedule


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What NVIDIA's data sheets and occupancy tables say of a GPU, as far as XLA's compiler asks.

    Attributes:
        name: the device kind.
        capability: compute capability, (major, minor).
        cores: streaming multiprocessors.
        shared: bytes of shared memory of a core; a block may take 1 KiB less.
        cache, memory: bytes of level 2 cache and of device memory.
        bandwidth: of the memory, bytes per second.
        clock: GHz.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    shared: int
    cache: int
    memory: int
    bandwidth: int
    clock: float

    def config(self) -> str:
        """The text form of XLA's ``GpuTargetConfigProto``."""
        major, minor = self.capability
        # "sm_90a": instructions that only this architecture has, TMA and wgmma among them.
        accelerated = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
        return f"""
            gpu_device_info {{
              cuda_compute_capability {{ major: {major} minor: {minor} {accelerated} }}
              name: "{self.name}" device_vendor: "NVIDIA Corporation"
              core_count: {self.cores} fpus_per_core: {64 if major == 8 else 128} clock_rate_ghz: {self.clock}
              threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
              thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
              block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
              shared_memory_per_block: 49152 shared_memory_per_block_optin: {self.shared - 1024}
              shared_memory_per_core: {self.shared}
              registers_per_core_limit: 65536 registers_per_block_limit: 65536
              l2_cache_size: {self.cache} device_memory_size: {self.memory} memory_bandwidth: {self.bandwidth}
              device_address_bits: 64 ecc_enabled: true
              driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
              dnn_version: "9.10.0"
            }}
            platform_name: "CUDA" device_description_str: "{self.name}"
            dnn_version_info {{ major: 9 minor: 10 }}
        """


GPUS = {
    "sm_80": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 164 << 10, 40 << 20, 80 << 30, 2039 * 10**9, 1.41),
    "sm_90a": Gpu("NVIDIA H200", (9, 0), 132, 228 << 10, 50 << 20, 141 * 10**9, 4800 * 10**9, 1.98),
    "sm_100a": Gpu("NVIDIA B200", (10, 0), 148, 228 << 10, 126 << 20, 180 * 10**9, 7700 * 10**9, 1.965),
}
TARGETS = (*schedule.TARGETS, *GPUS)
"""Their names: TPUs first."""

PACKAGES = {
    "tpu": ("jax", "jaxlib", "libtpu"),
    "gpu": ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cuda-nvcc"),
}
"""What decides a compiler's result."""


def platform(target: str) -> str:
    """``"tpu"`` or ``"gpu"``.

    Raises:
        ValueError: an unknown target.
    """
    if target not in TARGETS:
        raise ValueError(f"target: must be one of {', '.join(TARGETS)}; got {target!r}")
    return "gpu" if target in GPUS else "tpu"


def versions(target: str) -> dict[str, str]:
    """Versions of the packages that compile for the target.

    Raises:
        ModuleNotFoundError: one of them is not installed.
    """
    try:
        return {name: importlib.metadata.version(name) for name in PACKAGES[platform(target)]}
    except importlib.metadata.PackageNotFoundError as error:
        text = f"compiling for {target} needs {error.name}, which is not installed: pip install 'paxkv[aot]'"
        raise ModuleNotFoundError(text) from None


@functools.cache
def mesh(target: str) -> Mesh:
    """A mesh of one device of the target. One process should ask for one target: compilers keep state."""
    if platform(target) == "tpu":
        return schedule.mesh(target)
    jax.devices("cpu")  # finds the plugins
    topology = topologies.get_topology_desc(platform="cuda", target_config=GPUS[target].config(), topology="1x1x1")
    return Mesh(np.array(topology.devices[:1]), ("x",))


def abstract_mesh(kind: str, platform: str) -> contextlib.AbstractContextManager:
    """What makes traced code be for a device of this kind; nothing can be compiled in it, and no compiler is loaded."""
    device = AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    return jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), (AxisType.Auto,), abstract_device=device))
