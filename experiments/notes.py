"""Why rows miss: what was tried and what is believed to be the cause. Read only when a row misses.

A note explains, it never excuses: the row stays red, the number stays ours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from experiments.figure import VerdictRow

NOTES: tuple[tuple[str, str, str, str], ...] = (
    (
        "fig02",
        "orca_oracle",
        "",
        "about 900 requests pass through the window, and the true output lengths of the few that run decide the bar: "
        "six seeds give 37.6 to 38.5 (mean 37.9). Nothing of this bar is fitted.",
    ),
    (
        "fig14",
        "paged/",
        "beam",
        "Orca's copies cost only their bytes in the model and its beams lose too little; see the notes on its rates. "
        "The paper's own Orca (Oracle) falls by a quarter to a third from parallel sampling to beams of the same width "
        "and memory.",
    ),
    (
        "fig14",
        "orca",
        "beam",
        "a beam that takes another's place copies its whole table, priced by bytes over bandwidth, as section 5.1 "
        "says that copies are fused. The paper's curves look like a call per page, layer and side: at figure 19a's "
        "1.9 us a call our paged rate for width 6 would be 7.0 req/s (paper 7.02) and Oracle's 2.3 (paper 3.16).",
    ),
    (
        "fig14",
        "",
        "",
        "which part of the step goes with requests and which with sequences is not visible in figures 12a and 12d, "
        "where both are one; here the serving loop's part is per request and the bare step's per sequence. With all "
        "of it per request paged comes within 6% for n = 2 and 6, and Orca (Oracle) 18% to 30% too high.",
    ),
    (
        "fig15",
        "paged",
        "beam",
        "the trace has no scores, so beams draw their parents uniformly, without a parameter. That lets beams "
        "coalesce faster than a language model's do, and more is shared. Keeping all parents in about three of four "
        "steps would give the paper's Alpaca bars within 2 points, but would be a constant fitted to this figure.",
    ),
    (
        "fig16",
        "paged",
        "panel a",
        "figure 1 gives a bare step per sequence of 412 tokens; how much of it goes with the context is not in the "
        "paper. Contexts of 126 tokens depend on that split most: with the page reads left in the part that does "
        "not grow, this rate falls to 48.5 req/s, and the five-example panel misses by a third instead.",
    ),
    (
        "fig16",
        "paged/orca_oracle",
        "panel a",
        "follows from the paged rate of this panel, see its note; the rate of Orca (Oracle) is within 2%.",
    ),
    (
        "fig17",
        "paged",
        "",
        "the artifact's conversations are not public; of the public ones that stand in, 30% of the prompts reach 1024 "
        "tokens instead of most. Shorter prompts leave room between the three reservations, so Orca (Max) falls behind "
        "the other two, which the paper's prompts do not show.",
    ),
    (
        "fig18",
        "paged",
        "Alpaca",
        "one cost per page read cannot give the paper's curve at both ends: its kernel reads a block with one warp, so "
        "large blocks run out of parallelism, which the model leaves out. Sizes of 64 and up are therefore too good.",
    ),
    (
        "fig18",
        "paged",
        "ShareGPT",
        "the rate of this curve is not in the paper; at 2.01 req/s the system stands at its knee, where a small "
        "difference in the step doubles the latency.",
    ),
    (
        "fig19",
        "paged",
        "(b)",
        "the rate stands at the knee, where 4% of rate change latency by a factor of two; figure 18b draws the same "
        "runs (recompute) 10 to 30% higher than this figure. Latencies at 0.1 s/token cross within 3% of the paper's "
        "rate in figure 12a.",
    ),
)
"""(figure, beginning of the system, part of the setting, note)."""


def explained(rows: Iterable[VerdictRow]) -> tuple[VerdictRow, ...]:
    """The rows, each miss with the first note that fits it (after its own)."""
    return tuple(_explained(row) for row in rows)


def _explained(row: VerdictRow) -> VerdictRow:
    if row.passed is not False:
        return row
    for figure, system, part, note in NOTES:
        if row.figure == figure and row.system.startswith(system) and part in row.setting:
            return dataclasses.replace(row, note="; ".join(filter(None, (row.note, note))))
    return row
