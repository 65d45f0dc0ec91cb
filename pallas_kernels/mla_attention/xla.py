"""Latent attention in plain XLA: paged attention's loops, which read values as the leading lanes of the keys."""

from pallas_kernels.paged_attention.xla import attend, refuses

__all__ = ["attend", "refuses"]
