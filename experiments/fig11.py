r"""Figure 11: input and output length distributions of the two workloads.

Claim: ShareGPT's prompts are 8.4x and its outputs 5.8x as long as Alpaca's on average (paper section 6.1).

    python -m experiments.reproduce --only=fig11 [--traces=DIR]     (seconds; nothing is simulated)

Expected: the four printed means, to two decimals.
"""

from __future__ import annotations

import numpy as np

from experiments import paper
from experiments.context import Context, Preset
from experiments.figure import Chapter, Figure, Panel, Series, judge_printed
from experiments.setting import Setting
from paxkv.workload import Lengths, embedded_lengths, real_lengths

FIGURE_MAX_TOTAL = 2048
"""The figure keeps prompt + output up to 2048; the runs keep strictly less."""
BINS = 40


def settings(preset: Preset) -> list[Setting]:
    return []


def figure_lengths(dataset: str, traces: str | None) -> Lengths:
    """The data set under the figure's filter."""
    name = dataset.lower()
    if traces:
        return real_lengths(name, traces, max_total_tokens=FIGURE_MAX_TOTAL)
    return embedded_lengths(name, max_total_tokens=FIGURE_MAX_TOTAL)


def chapter(context: Context) -> Chapter:
    rows, panels = [], []
    for printed in paper.FIG11:
        lengths = figure_lengths(printed.dataset, context.traces)
        workload = context.workload(printed.dataset.lower())
        series = []
        for name, values, mean in (
            ("input", lengths.prompt, printed.prompt),
            ("output", lengths.output, printed.output),
        ):
            rows.append(
                judge_printed("fig11", printed.dataset, f"mean {name} tokens", workload, mean, float(values.mean()))
            )
            top = float(np.percentile(values, 99.5))
            counts, edges = np.histogram(values[values <= top], bins=BINS, range=(0.0, top))
            share = counts / (len(values) * np.diff(edges))
            label = f"{name}, mean {values.mean():.2f} (paper {mean:.2f})"
            series.append(Series(label, "paxkv", tuple(edges), tuple(share), system=name))
        panels.append(Panel(printed.dataset, "tokens", "density", "hist", tuple(series)))
    drawing = Figure(
        "fig11",
        "Input and output lengths (figure 11)",
        "ShareGPT has prompts 8.4x and outputs 5.8x as long as Alpaca's, and spreads wider.",
        "python -m experiments.reproduce --only=fig11",
        tuple(panels),
        ("The last half percent of the tail is not drawn.",),
    )
    return Chapter("fig11", drawing, tuple(rows))
