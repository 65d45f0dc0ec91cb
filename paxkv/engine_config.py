"""Choices of an engine, and how large a pool the device has room for."""

from __future__ import annotations

import dataclasses
import os
import pathlib

import jax

from pallas_kernels.pages import PageFormat
from paxkv import sizing
from paxkv.config import CacheConfig, EvictionOrder, SchedulerConfig, require
from paxkv.models.architecture import DTYPES, DecoderConfig


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Choices of an engine.

    Attributes:
        scheduler: limits; ``max_horizon`` is the most decode steps of one dispatch.
        page_size: token positions of a page.
        num_pages: device pages; None takes what ``memory_utilization`` leaves, at most what the limits can use.
        memory_utilization: share of the device's total memory for weights, activations and pages. What others hold of
            that share is not counted on.
        num_host_pages: pages of the host pool; 0 recomputes instead of swapping.
        watermark, prefix_caching, eviction: see :class:`paxkv.config.CacheConfig`.
        k_format, v_format: how keys and values are stored; None stores the model's dtype.
        overlap: whether the host plans the next step before it has read the tokens of this one.
        max_logprobs: most of the likeliest tokens that a request can ask for; twice the widest beam search.
        implementation: of paged attention; None picks the best for the device.
        compile_cache: folder where compiled steps are kept between processes.
    """

    scheduler: SchedulerConfig = dataclasses.field(default_factory=lambda: SchedulerConfig(max_horizon=8))
    page_size: int = 16
    num_pages: int | None = None
    memory_utilization: float = 0.9
    num_host_pages: int = 0
    watermark: float = 0.01
    prefix_caching: bool = False
    eviction: EvictionOrder = "lru"
    k_format: PageFormat | None = None
    v_format: PageFormat | None = None
    overlap: bool = True
    max_logprobs: int = 16
    implementation: str | None = None
    compile_cache: str | None = None

    def __post_init__(self) -> None:
        require(
            0 < self.memory_utilization <= 1,
            f"EngineConfig.memory_utilization is a share in (0, 1], got {self.memory_utilization!r}; 0.9 means 90%",
        )
        require(
            isinstance(self.max_logprobs, int) and self.max_logprobs >= 1,
            f"EngineConfig.max_logprobs must be a whole number of at least 1, got {self.max_logprobs!r}",
        )
        self.cache(self.num_pages if self.num_pages is not None else 1)

    def cache(self, num_pages: int) -> CacheConfig:
        """The cache configuration for a pool of ``num_pages``."""
        return CacheConfig(
            num_pages, self.page_size, self.num_host_pages, self.watermark, self.prefix_caching, self.eviction
        )


def pool_pages(model: DecoderConfig, params, config: EngineConfig) -> int:
    """Pages that the config gives, or that fit the device, at most what ``max_num_seqs`` sequences of
    ``max_model_len`` can fill.

    Raises:
        ValueError: the device has no room for one page beside weights and activations.
    """
    if config.num_pages is not None:
        return config.num_pages
    limits = config.scheduler
    useful = limits.max_num_seqs * -(-limits.max_model_len // config.page_size)
    one, two = (model.cache_layout(n, config.page_size, config.k_format, config.v_format).bytes for n in (1, 2))
    page_bytes, fixed = two - one, 2 * one - two  # scales that all pages share
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    activations = sizing.activation_bytes(model.shape, limits.max_num_batched_tokens, element_bytes=DTYPES[model.dtype])
    total, free = device_memory()
    left = min(int(total * config.memory_utilization) - weights, free) - activations - fixed
    require(
        left >= page_bytes,
        f"{config.memory_utilization:.0%} of the device's {total} bytes, of which {free} are free, must hold {weights} "
        f"bytes of weights (loaded already), {activations} of activations and one page of {page_bytes}; raise "
        "memory_utilization, lower max_num_batched_tokens, or give num_pages",
    )
    return min(useful, left // page_bytes)


def device_memory() -> tuple[int, int]:
    """(total, free) bytes of the device: as it reports them, or the host's for a CPU."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        total = int(stats["bytes_limit"])
        return total, total - int(stats.get("bytes_in_use", 0))
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    host = pathlib.Path("/proc/meminfo")
    lines = dict(line.split(":") for line in host.read_text("ascii").splitlines()) if host.exists() else {}
    free = lines.get("MemAvailable", "").split()
    return total, min(total, int(free[0]) * 1024) if free else total
