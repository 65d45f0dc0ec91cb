"""The paper's ablations: figure 18 (attention kernel, block size) and 19 (recompute against swap)."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.paper.frozen import FrozenMap
from experiments.paper.systems import Source

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


@dataclass(frozen=True)
class KernelLatency:
    """Attention kernel time in microseconds (figure 18a)."""

    batch: int
    context: int
    paged_us: float
    fastertransformer_us: float

    @property
    def overhead(self) -> float:
        """How much longer the paged kernel takes, as a fraction."""
        return self.paged_us / self.fastertransformer_us - 1


@dataclass(frozen=True)
class ByBlockSize:
    """One value per entry of `BLOCK_SIZES`."""

    name: str
    unit: str
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.values) != len(BLOCK_SIZES):
            raise ValueError(f"{self.name}: one value per block size {BLOCK_SIZES}, got {len(self.values)}")

    def at(self, block_size: int) -> float:
        return self.values[BLOCK_SIZES.index(block_size)]

    @property
    def best(self) -> int:
        """The block size with the smallest value."""
        return min(BLOCK_SIZES, key=self.at)


FIG18A = (
    KernelLatency(8, 64, 31.5, 21.9),
    KernelLatency(8, 128, 43.6, 34.9),
    KernelLatency(8, 256, 84.3, 62.3),
    KernelLatency(32, 64, 77.1, 61.4),
    KernelLatency(32, 128, 127.1, 106.7),
    KernelLatency(32, 256, 235.3, 194.5),
)
FIG18A_SOURCE = Source("section 7.1, figure 18a", "B")

FIG18B = FrozenMap.of(
    {
        "ShareGPT": ByBlockSize("ShareGPT", "s/token", (2.301, 1.945, 1.976, 0.568, 0.085, 0.069, 0.086, 0.159, 1.356)),
        "Alpaca": ByBlockSize("Alpaca", "s/token", (3.624, 1.897, 2.117, 0.725, 0.594, 0.532, 1.897, 4.804, 18.25)),
    }
)
"""End-to-end normalised latency by block size, OPT-13B at one request rate."""
FIG18B_RATES = FrozenMap.of({"ShareGPT": None, "Alpaca": 30.1})
"""Request rates in req/s: the paper names neither; Alpaca's is the artifact's, ShareGPT's is unknown."""
FIG18B_CLAIMED_BEST = FrozenMap.of({"ShareGPT": (16, 32, 64, 128), "Alpaca": (16, 32)})
"""The block sizes that the text of section 7.2 calls best."""
FIG18B_SOURCE = Source("section 7.2, figure 18b", "B")

FIG19A = FrozenMap.of(
    {
        "recompute": ByBlockSize("recompute", "ms", (36.3, 37.5, 36.9, 38.8, 38.6, 39.0, 38.3, 38.4, 39.1)),
        "swap_in": ByBlockSize("swap in", "ms", (82.0, 53.6, 35.1, 26.0, 21.6, 19.3, 18.2, 17.6, 17.3)),
        "swap_out": ByBlockSize("swap out", "ms", (55.5, 35.6, 25.9, 21.1, 18.5, 17.3, 16.7, 16.3, 16.1)),
        "swap_in_out": ByBlockSize("swap in + out", "ms", (137.4, 89.3, 61.0, 47.1, 40.1, 36.6, 34.9, 33.9, 33.4)),
    }
)
"""Time to recover 256 tokens of OPT-13B in one sequence. The artifact scales recompute by 0.9 before drawing."""
FIG19A_RATIO = ByBlockSize("recompute / swap in + out", "", (0.26, 0.42, 0.61, 0.82, 0.96, 1.07, 1.10, 1.13, 1.17))
FIG19A_TOKENS = 256
FIG19A_SOURCE = Source("section 7.3, figure 19a; set-up from the artifact", "B")

FIG19B = FrozenMap.of(
    {
        "recompute": ByBlockSize(
            "recompute", "s/token", (2.011, 1.638, 1.616, 0.510, 0.073, 0.063, 0.067, 0.169, 1.119)
        ),
        "swap": ByBlockSize("swap", "s/token", (2.564, 1.966, 1.791, 0.552, 0.072, 0.059, 0.064, 0.120, 0.663)),
    }
)
"""End-to-end normalised latency, OPT-13B on ShareGPT."""
FIG19B_RATE = 2.01
"""Request rate in req/s, from the artifact."""
FIG19B_SOURCE = Source("section 7.3, figure 19b; rate from the artifact", "B")
