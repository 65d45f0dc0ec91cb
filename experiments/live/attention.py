"""Figure 18a in our own kernel, on the device that is there: attention over pages against a contiguous cache.

The same call twice: with pages of 16 in random order, and with each row in one page as long as itself.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from experiments.paper.ablation import FIG18A
from pallas_kernels import implementations, platforms
from pallas_kernels.paged_attention import bench
from pallas_kernels.paged_attention.api import IMPLEMENTATIONS
from pallas_kernels.paged_attention.arg_specs import FIGURE_18A, ArgSpec, small

Point = dict[str, Any]
"""Of the figure: batch, context, implementation, paged_us, contiguous_us, overhead, overhead_in_the_paper."""


def names_here() -> list[str]:
    """Our implementations for this device, best first, without the one that only spells the rules out."""
    return [name for name in implementations.here(IMPLEMENTATIONS) if name != "reference"]


def measure_figure(
    names: Sequence[str], *, is_small: bool | None = None, rounds: int = 15, seconds: float = 0.05, seed: int = 0
) -> list[Point]:
    """The six points, each in the fastest implementation that can do both calls.

    Args:
        names: of implementations to try.
        is_small: with a small model's heads, in float32; None: on a CPU.
        rounds: in which the two calls take turns.
        seconds: that a timing should take at least.

    Raises:
        ValueError: none of the implementations can do the calls.
    """
    is_small = platforms.current() == "cpu" if is_small is None else is_small
    found = []
    for spec, printed in zip(FIGURE_18A, FIG18A, strict=True):
        name, paged, contiguous = measure_point(small(spec) if is_small else spec, names, rounds, seconds, seed)
        found.append(
            {
                "batch": printed.batch,
                "context": printed.context,
                "implementation": name,
                "paged_us": 1e6 * statistics.median(paged),
                "contiguous_us": 1e6 * statistics.median(contiguous),
                "overhead": statistics.median(one / other for one, other in zip(paged, contiguous, strict=True)) - 1,
                "overhead_in_the_paper": printed.overhead,
            }
        )
    return found


def measure_point(
    spec: ArgSpec, names: Sequence[str], rounds: int, seconds: float, seed: int
) -> tuple[str, list[float], list[float]]:
    """The fastest implementation, and its seconds by round over pages and over a contiguous cache."""
    whole = bench.contiguous(spec)
    timers: dict[str, bench.Timed] = {}
    for name in names:
        try:
            both = {
                f"{name} paged": bench.timer(bench.ours(spec, name), bench.make_arrays(spec, seed)),
                name: bench.timer(bench.ours(whole, name), bench.make_arrays(whole, seed, shuffled=False)),
            }
        except ValueError:  # refused
            continue
        timers |= both
    if not timers:
        raise ValueError(f"names: must hold an implementation that can do {spec.name}; got {', '.join(names)}")
    found = bench.compete(timers, rounds, seconds)
    best = min((name for name in names if name in found), key=lambda name: statistics.median(found[f"{name} paged"]))
    return best, found[f"{best} paged"], found[best]
