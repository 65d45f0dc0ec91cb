"""One colour and one marker per system, in every picture; paper = dashed and hollow, paxkv = solid and filled.

The five systems take the Okabe-Ito colours, which stay apart for colour-blind readers, and differ in marker as well.
Where both points agree the filled dot sits in the hollow ring.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from experiments.figure import Series
from experiments.paper import FIG02_SEGMENTS, SYSTEMS, label

NEUTRAL = "#44505c"
GUIDE = "#9aa4ae"
PASS, MISS, SHOWN = "#1b7f4d", "#b3261e", "#66707a"

COLORS = {
    "static": "#8f5f9f",
    "orca_max": "#d55e00",
    "orca_pow2": "#dc9a00",
    "orca_oracle": "#009e73",
    "paged": "#0072b2",
}
MARKERS = {"static": "v", "orca_max": "D", "orca_pow2": "^", "orca_oracle": "s", "paged": "o"}

_SEGMENTS = ("#0072b2", "#dc9a00", "#d55e00", "#8f5f9f", "#c9d1d8")
_NAMED = {
    **dict(zip(FIG02_SEGMENTS, _SEGMENTS, strict=False)),
    **dict(zip(("token_states", "reservation", "internal", "external", "free"), _SEGMENTS, strict=True)),
    "tokens": _SEGMENTS[0],
    "live": _SEGMENTS[0],
    "slack": _SEGMENTS[2],
    "recompute": "#0072b2",
    "swap": "#d55e00",
    "swap_in": "#dc9a00",
    "swap_out": "#8f5f9f",
    "swap_in_out": "#d55e00",
    "ShareGPT": "#0072b2",
    "Alpaca": "#d55e00",
    "prompt": "#0072b2",
    "output": "#d55e00",
}
_SPARE_COLORS = ("#56b4e9", "#8c510a", "#35978f", "#c51b7d", "#4d4d4d", "#7f7fbf")
_SPARE_MARKERS = ("o", "s", "^", "D", "v", "P", "X")

PAPER_LINE = {"linestyle": (0, (4, 2)), "linewidth": 1.1, "markersize": 6.5, "markeredgewidth": 1.1}
OUR_LINE = {"linestyle": "-", "linewidth": 1.6, "markersize": 3.6, "markeredgewidth": 0.0}


def identity(series: Series) -> str:
    """What a series is about, whoever measured it: its system, else its label without the source."""
    name = series.system or series.label.replace("(paper)", "").replace("(paxkv)", "").strip()
    return "" if name.lower() in ("paper", "paxkv", "ours") else name


def display(series: Series) -> str:
    """The name in the legend, shared by the paper's series and ours."""
    if series.system == "paged":
        return "paged (paper: vLLM)"
    if series.system in SYSTEMS:
        return label(series.system)
    return series.label.replace("(paper)", "").replace("(paxkv)", "").strip()


@dataclass(frozen=True)
class Look:
    color: str
    marker: str


def looks(identities: Iterable[str]) -> dict[str, Look]:
    """A look for every identity of a figure, the spare ones in order of appearance."""
    known: dict[str, Look] = {}
    spare = 0
    for name in identities:
        if name in known:
            continue
        color = COLORS.get(name) or _NAMED.get(name) or (NEUTRAL if not name else None)
        if color is None:
            color = _SPARE_COLORS[spare % len(_SPARE_COLORS)]
            spare += 1
        known[name] = Look(color, MARKERS.get(name) or _SPARE_MARKERS[len(known) % len(_SPARE_MARKERS)])
    return known
