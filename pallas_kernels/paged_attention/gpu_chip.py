"""Which GPU a kernel is built for."""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels import platforms

# What the device kinds of a mesh say; the machine's own devices tell it themselves.
CAPABILITIES = {
    "A100": (8, 0),
    "A10": (8, 6),
    "L4": (8, 9),
    "H100": (9, 0),
    "H200": (9, 0),
    "H20": (9, 0),
    "H800": (9, 0),
    "B200": (10, 0),
    "B100": (10, 0),
    "B300": (10, 3),
}

# Major capabilities that kernels in Mosaic GPU are built for: Hopper and the Blackwell of data centres, whose cores
# have 227 KiB of shared memory.
MOSAIC = (9, 10)


@dataclasses.dataclass(frozen=True)
class Chip:
    """A GPU, as far as the kernels ask.

    Attributes:
        name: the device kind.
        capability: NVIDIA's compute capability, (major, minor); (0, 0) where it is unknown, as of other makers' GPUs.
    """

    name: str
    capability: tuple[int, int]


def current() -> Chip | None:
    """The GPU that what is traced now is meant for: that of the mesh in use, which may be absent, or the machine's.

    None on other platforms, where kernels run in the interpreter.
    """
    if platforms.current() != "gpu":
        return None
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return Chip(device.device_kind, named(device.device_kind))
    device = jax.local_devices(backend="gpu")[0]
    capability = getattr(device, "compute_capability", "")
    major, _, minor = capability.partition(".")
    known = major.isdigit() and minor.isdigit()
    return Chip(device.device_kind, (int(major), int(minor)) if known else named(device.device_kind))


def refuses_mosaic() -> str | None:
    """Why no kernel in Mosaic GPU can be built here, or None."""
    if jax.__version_info__ < (0, 11, 2):
        return f"it needs jax 0.11.2 or later; this is {jax.__version__}"
    chip = current()
    if chip is not None and chip.capability[0] not in MOSAIC:
        return f"it is built for compute capabilities {' and '.join(map(str, MOSAIC))}; this is {chip.name}"
    return None


def named(kind: str) -> tuple[int, int]:
    """The compute capability of a device kind, such as "NVIDIA H200"; (0, 0) for an unknown one."""
    words = kind.replace("-", " ").split()
    return next(
        (CAPABILITIES[word.removeprefix("G")] for word in words if word.removeprefix("G") in CAPABILITIES), (0, 0)
    )
