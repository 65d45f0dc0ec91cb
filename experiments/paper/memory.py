"""The paper's memory results: table 1, figure 1 (right), 2 (waste), 11 (lengths), 13 (batch), 15 (sharing)."""

from __future__ import annotations

from dataclasses import dataclass

from experiments.paper.systems import Source


@dataclass(frozen=True)
class ModelRow:
    """A row of table 1: sizes in GB as printed, KV slots in thousands of tokens as printed (both are rounded)."""

    model: str
    gpus: str
    memory_gb: float
    parameters_gb: float
    kv_gb: float
    kv_slots_thousands: float


TABLE1 = (
    ModelRow("OPT-13B", "1x A100 40 GB", 40, 26, 12, 15.7),
    ModelRow("OPT-66B", "4x A100 40 GB", 160, 132, 21, 9.7),
    ModelRow("OPT-175B", "8x A100 80 GB", 640, 346, 264, 60.1),
)
TABLE1_SOURCE = Source("section 6.1, table 1", "A")


@dataclass(frozen=True)
class Figure1:
    """Figure 1, right: memory and throughput against batched requests, 13B on one A100 40 GB.

    Memory points are (batched requests, GB). The existing systems' line starts at the parameters and climbs by
    `existing_step_gb` per request, a full maximum length each; it ends at `existing_end`.
    """

    batch: tuple[int, ...]
    tokens_per_second: tuple[float, ...]
    existing_start: tuple[float, float]
    existing_step_gb: float
    existing_end: tuple[float, float]
    paged_memory: tuple[tuple[float, float], ...]
    source: Source


FIG01 = Figure1(
    batch=(4, 8, 12, 16, 20, 24, 28, 32, 36, 40),
    tokens_per_second=(146.9, 267.3, 378.9, 482.6, 577.1, 659.5, 740.8, 811.0, 881.8, 921.9),
    existing_start=(0, 26),
    existing_step_gb=1.6,
    existing_end=(8, 39),
    paged_memory=((5.8, 28), (17.6, 32), (29.9, 36), (38.4, 39)),
    source=Source("section 1, figure 1 (right)", "B"),
)


@dataclass(frozen=True)
class WasteBar:
    """One bar of figure 2 in percent of the KV pool."""

    system: str
    token_states: float
    reservation: float
    internal: float
    external: float

    @property
    def parts(self) -> tuple[float, float, float, float]:
        return self.token_states, self.reservation, self.internal, self.external


@dataclass(frozen=True)
class PagedSplit:
    """What the paper's own system really holds, in percent of the pool (figure 2's artifact).

    The drawing has no colour for memory that nobody holds and spreads it over the waste colours, so its three thin
    bands say nothing. Measured were the allocated share and the share that holds tokens; the rest follows from them.
    """

    token_states: float
    allocated: float
    slack: float

    @property
    def free(self) -> float:
        return 100.0 - self.allocated


FIG02 = (
    WasteBar("orca_max", 20.4, 13.3, 57.3, 8.9),
    WasteBar("orca_pow2", 26.8, 17.9, 13.6, 41.6),
    WasteBar("orca_oracle", 38.2, 25.2, 0.0, 36.6),
    WasteBar("paged", 96.3, 1.05, 1.04, 1.65),
)
"""As printed; the three waste segments of the last bar are as drawn, see `FIG02_PAGED` for what they mean."""
FIG02_PAGED = PagedSplit(token_states=96.26, allocated=97.91, slack=1.65)
FIG02_SEGMENTS = ("token states", "reservation", "internal fragmentation", "external fragmentation & others")
FIG02_SOURCE = Source("sections 1 and 6.2, figure 2", "A")


@dataclass(frozen=True)
class MeanLengths:
    """Mean lengths in tokens of a workload, figure 11's legend."""

    dataset: str
    prompt: float
    output: float


FIG11 = (MeanLengths("ShareGPT", 161.31, 337.99), MeanLengths("Alpaca", 19.31, 58.45))
FIG11_SOURCE = Source("section 6.1, figure 11", "A")


@dataclass(frozen=True)
class BatchedRequests:
    """Average number of requests in the running batch, by system (figure 13, OPT-13B)."""

    panel: str
    dataset: str
    rate: float
    orca_max: float
    orca_pow2: float
    orca_oracle: float
    paged: float

    def of(self, system: str) -> float:
        if system not in ("orca_max", "orca_pow2", "orca_oracle", "paged"):
            raise KeyError(f"figure 13 has no system {system!r}")
        return getattr(self, system)


FIG13 = (
    BatchedRequests("a", "ShareGPT", 2.0, 7.00, 9.81, 13.62, 30.42),
    BatchedRequests("b", "Alpaca", 30.0, 7.00, 43.24, 72.75, 132.44),
)
FIG13_SOURCE = Source("section 6.2, figure 13", "A")


@dataclass(frozen=True)
class SavedBySharing:
    """Memory saved by sharing in percent of the blocks that separate copies would take (figure 15, OPT-13B).

    `values` maps the number of sequences to the printed bar (Alpaca); `sharegpt` is the range that the text gives.
    """

    method: str
    values: tuple[tuple[int, float], ...]
    sharegpt: tuple[float, float]

    def at(self, width: int) -> float:
        return dict(self.values)[width]


FIG15 = (
    SavedBySharing("parallel", ((2, 6.09), (4, 8.53), (6, 9.79)), (16.2, 30.5)),
    SavedBySharing("beam", ((2, 37.56), (4, 53.13), (6, 55.16)), (44.3, 66.3)),
)
FIG15_SOURCE = Source("section 6.3, figure 15 and its text", "A")
