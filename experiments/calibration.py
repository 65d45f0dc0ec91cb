"""The constants of the step-time model that no data sheet gives, with the points that fixed them.

They are fitted once, by `python -m experiments.calibrate`, which writes `experiments/reference/calibration.json`.
Nothing else in the project holds a copy.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

DRAWN_SHARE = 0.9
"""The artifact's plot of figure 19a draws recompute times times 0.9."""

PATH = Path(__file__).parent / "reference" / "calibration.json"


@dataclasses.dataclass(frozen=True)
class Calibration:
    """Fitted constants, in seconds, bytes/s and FLOP/s.

    Attributes:
        bare_sequence_s: a sequence's share of a bare model step, besides reading its keys and values.
        serving_group_s: what the paper's serving loop adds per request: it schedules and samples group by group.
        page_read_s: what reading a page of one head in one layer costs besides its bytes.
        flops_per_s: effective arithmetic rate of one A100.
        swap_in_bytes_per_s, swap_out_bytes_per_s: host link.
        swap_in_copy_s, swap_out_copy_s: cost of one copy call.
        floors_s: what every step costs, by model (the iteration-level systems).
        static_floors_s: the same for FasterTransformer, another engine.
    """

    bare_sequence_s: float
    serving_group_s: float
    page_read_s: float
    flops_per_s: float
    swap_in_bytes_per_s: float
    swap_out_bytes_per_s: float
    swap_in_copy_s: float
    swap_out_copy_s: float
    floors_s: dict[str, float]
    static_floors_s: dict[str, float]

    def floor_s(self, model: str, *, static: bool = False) -> float:
        """The floor of a step for `model`. LLaMA-13B runs in OPT-13B's engine and takes its floor."""
        floors = self.static_floors_s if static else self.floors_s
        return floors["opt-13b" if model == "llama-13b" else model]

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def load(path: Path = PATH) -> tuple[Calibration, list[dict[str, Any]]]:
    """The committed calibration and the points that it rests on.

    Raises:
        FileNotFoundError: it was never made; the message says how.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing; make it with: python -m experiments.calibrate")
    document = json.loads(path.read_text())
    return Calibration(**document["constants"]), document["points"]


def table(calibration: Calibration, points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Constants and points as rows for the report."""
    rows = []
    for name, value in calibration.to_dict().items():
        for key, number in value.items() if isinstance(value, dict) else [("", value)]:
            rows.append(
                {"constant": f"{name} {key}".strip(), "figure": "", "setting": "fitted value", "fitted": number}
            )
    return rows + points
