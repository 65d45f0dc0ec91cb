"""Latent attention spelled out: paged attention's reference with values inside the keys."""

from pallas_kernels.paged_attention.reference import attend, refuses

__all__ = ["attend", "refuses"]
