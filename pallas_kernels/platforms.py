"""What is traced now will run on: the platform of the mesh in use, whose devices may be absent, or the machine's."""

from __future__ import annotations

import jax


def current() -> str:
    """``"tpu"``, ``"gpu"`` or ``"cpu"``."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    platform = jax.default_backend() if device is None else device.platform
    return "gpu" if platform in ("cuda", "rocm") else platform
