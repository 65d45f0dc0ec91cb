"""What the PagedAttention paper (Kwon et al., SOSP 2023) reports, as typed, frozen data: no number of ours stands here.

Every group names its `Source`: the paper's section and figure, and whether the number is printed there or was decoded
from the drawing. Units stand in the docstrings; rates are requests per second, latencies seconds per output token.
"""

from __future__ import annotations

from experiments.paper.ablation import (
    BLOCK_SIZES,
    FIG18A,
    FIG18A_SOURCE,
    FIG18B,
    FIG18B_CLAIMED_BEST,
    FIG18B_RATES,
    FIG18B_SOURCE,
    FIG19A,
    FIG19A_RATIO,
    FIG19A_SOURCE,
    FIG19A_TOKENS,
    FIG19B,
    FIG19B_RATE,
    FIG19B_SOURCE,
    ByBlockSize,
    KernelLatency,
)
from experiments.paper.basic_sampling import FIG12
from experiments.paper.claims import BATCHED_CLAIMS, TEXT_CLAIMS, TEXT_CLAIMS_SOURCE, TextClaim
from experiments.paper.curves import PLOT_LIMIT, Curve, LatencyFigure, LatencyPanel, Ratio, read_knee
from experiments.paper.memory import (
    FIG01,
    FIG02,
    FIG02_PAGED,
    FIG02_SEGMENTS,
    FIG02_SOURCE,
    FIG11,
    FIG11_SOURCE,
    FIG13,
    FIG13_SOURCE,
    FIG15,
    FIG15_SOURCE,
    TABLE1,
    TABLE1_SOURCE,
)
from experiments.paper.serving import FIG14, FIG16, FIG17, LATENCY_FIGURES, PREFIX_TOKENS, reading_grid
from experiments.paper.systems import SYSTEMS, Source, label

FIGURES = ("fig01", "fig02", "fig11", "fig12", "fig13", "fig14", "fig15", "fig16", "fig17", "fig18", "fig19")
"""The figures of the paper that a full run answers, by chapter id."""

__all__ = [
    "BATCHED_CLAIMS",
    "BLOCK_SIZES",
    "FIG01",
    "FIG02",
    "FIG02_PAGED",
    "FIG02_SEGMENTS",
    "FIG02_SOURCE",
    "FIG11",
    "FIG11_SOURCE",
    "FIG12",
    "FIG13",
    "FIG13_SOURCE",
    "FIG14",
    "FIG15",
    "FIG15_SOURCE",
    "FIG16",
    "FIG17",
    "FIG18A",
    "FIG18A_SOURCE",
    "FIG18B",
    "FIG18B_CLAIMED_BEST",
    "FIG18B_RATES",
    "FIG18B_SOURCE",
    "FIG19A",
    "FIG19A_RATIO",
    "FIG19A_SOURCE",
    "FIG19A_TOKENS",
    "FIG19B",
    "FIG19B_RATE",
    "FIG19B_SOURCE",
    "FIGURES",
    "LATENCY_FIGURES",
    "PLOT_LIMIT",
    "PREFIX_TOKENS",
    "SYSTEMS",
    "TABLE1",
    "TABLE1_SOURCE",
    "TEXT_CLAIMS",
    "TEXT_CLAIMS_SOURCE",
    "ByBlockSize",
    "Curve",
    "KernelLatency",
    "LatencyFigure",
    "LatencyPanel",
    "Ratio",
    "Source",
    "TextClaim",
    "label",
    "read_knee",
    "reading_grid",
]
