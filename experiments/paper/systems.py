"""The systems that the paper compares, their names in every file of the project, and where each number comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SYSTEMS = ("static", "orca_max", "orca_pow2", "orca_oracle", "paged")
"""The paper's order, worst first; figures, tables and legends keep it."""

_OURS = {
    "static": "FasterTransformer",
    "orca_max": "Orca (Max)",
    "orca_pow2": "Orca (Pow2)",
    "orca_oracle": "Orca (Oracle)",
    "paged": "paged",
}


def label(system: str, source: Literal["paper", "paxkv"] = "paxkv") -> str:
    """The name a reader sees: our paged system stands beside the paper's vLLM, the baselines keep their names."""
    if source == "paxkv":
        return _OURS.get(system, system)
    return f"{'vLLM' if system == 'paged' else _OURS.get(system, system)} (paper)"


@dataclass(frozen=True)
class Source:
    """Where a group of numbers was read.

    `confidence` is "A" for what the paper prints in its text or on a figure, "B" for what was decoded from the vector
    drawing of a figure or read in the authors' artifact.
    """

    where: str
    confidence: Literal["A", "B"]

    def __str__(self) -> str:
        how = "printed" if self.confidence == "A" else "decoded from the drawing or the artifact"
        return f"{self.where} ({how})"
