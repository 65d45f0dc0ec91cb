r"""Beyond the paper: three health metrics of a pool (prefix hit rate, utilisation, preemption rate), run by run.

Claim 23: healthy pools run at 80% to 90% utilisation with a preemption rate near zero.

    python -m experiments.reproduce --preset=paper --only=study_health [--traces=DIR]     (other figures' runs)

Every run belongs to a figure and is read back. Expected: no number of the paper. A run is called healthy when its
normalised latency stays at or below 0.2 s/token, one of the levels at which the paper's curves are read.
"""

from __future__ import annotations

import dataclasses

from experiments import fig02, fig12, fig15, fig16, fig17, fig19, paper
from experiments.context import Context, Preset
from experiments.figure import Chapter, Figure, Panel, Series, Table
from experiments.finding import Finding, graded
from experiments.setting import Setting

BAND = (80.0, 90.0)
NEAR_ZERO = 0.02
"""Preemptions per served request that count as "near zero"."""
HEALTHY_S = 0.2


@dataclasses.dataclass(frozen=True)
class Health:
    """One run's metrics: percent of the pool, preemptions per served request, share of prompt tokens found."""

    name: str
    setting: Setting
    hit_rate: float | None
    utilisation: float
    preemption_rate: float
    latency_s: float

    @property
    def healthy(self) -> bool:
        return self.latency_s <= HEALTHY_S

    @property
    def in_band(self) -> bool:
        return BAND[0] <= self.utilisation <= BAND[1]


def subjects(preset: Preset) -> list[tuple[str, Setting]]:
    """(name, run) of each representative run, most of them curves of figure 12."""
    rows = [("figure 2, past the knee", s) for s in fig02.settings(preset) if s.system == "paged"]
    for panel in fig12.panels_of(preset):
        model, dataset = fig12.PANELS[panel]
        rows += [(f"figure 12{panel}, {model}, {dataset}", s) for s in fig12.panel_settings(panel, "paged")]
    rows += [("figure 12a, for contrast", s) for s in fig12.panel_settings("a", "orca_oracle")]
    if preset == "paper":
        rows += [
            (f"figure 15, {m} of {w}", fig15.setting_of(m, w, "alpaca")) for m in ("parallel", "beam") for w in (4,)
        ]
        for panel, shots in (("a", 1), ("b", 5)):
            rows += [(f"figure 16{panel}, {shots}-shot prefix", s) for s in fig16.panel_settings(panel, "paged")]
        rows += [("figure 17, chat without kept history", s) for s in fig17.settings_of("paged")]
        rows += [("figure 19b, swapping", s) for s in fig19.block_settings("swap") if s.page_size == 16]
    return rows


def settings(preset: Preset) -> list[Setting]:
    return [setting for _, setting in subjects(preset)]


def healths(context: Context) -> list[Health]:
    """The metrics of every run."""
    named = subjects(context.preset)
    runs = context.summaries([setting for _, setting in named])
    return [
        Health(name, setting, run["prefix_hit_rate"], run["windows"][0]["utilisation"], run["preemption_rate"],
               run["normalised_latency_s"])
        for (name, setting), run in zip(named, runs, strict=True)
    ]  # fmt: skip


def finding(context: Context) -> Finding:
    """Claim 23: do the paged runs with 80% to 90% of the pool in use preempt next to nobody?"""
    paged = [health for health in healths(context) if health.setting.system == "paged"]
    band = [health for health in paged if health.in_band]
    rates = sorted(health.preemption_rate for health in band)
    span = f", with {rates[0]:.2f} to {rates[-1]:.2f} preemptions per request" if band else ""
    quiet = [health for health in paged if health.preemption_rate <= NEAR_ZERO and health.healthy]
    fullest = max(quiet, key=lambda health: health.utilisation, default=None)
    words = "none is" if fullest is None else f"the fullest uses {fullest.utilisation:.0f}% ({fullest.name})"
    return Finding(
        23,
        graded(health.preemption_rate <= NEAR_ZERO and health.healthy for health in band),
        f"{len(band)} of {len(paged)} paged runs use {BAND[0]:g}% to {BAND[1]:g}% of the pool{span}. Of the healthy "
        f"runs with at most {NEAR_ZERO:g} {words}: what a pool bears depends on how many requests share it and how "
        "long their answers grow",
        f"every paged run in the band has at most {NEAR_ZERO:g} preemptions per request and at most "
        f"{HEALTHY_S:g} s/token",
        "study_health",
    )


def chapter(context: Context) -> Chapter:
    found = healths(context)
    rows = [
        (h.name, paper.label(h.setting.system), h.setting.rate,
         None if h.hit_rate is None else 100 * h.hit_rate, h.utilisation, h.preemption_rate, h.latency_s, h.healthy)
        for h in found
    ]  # fmt: skip
    answer = finding(context)
    table = Table(
        "Health of the pool, run by run",
        ("run", "system", "req/s", "prefix hit rate, %", "pool utilisation, %", "preemptions per request",
         "latency, s/token", "healthy"),
        tuple(rows),
        f"Hit rate: none where no prefix is cached. Healthy: at most {HEALTHY_S:g} s/token. Claim 23: {answer.verdict} "
        f"({answer.rule}).",
    )  # fmt: skip
    curves = [
        name for name in dict.fromkeys(h.name for h in found) if name.startswith("figure 12") and "contrast" not in name
    ]
    series = []
    for name in curves:
        points = sorted((h.utilisation, h.preemption_rate) for h in found if h.name == name)
        x, y = zip(*points, strict=True)
        series.append(Series(name, "paxkv", x, y, system=name))
    figure = Figure(
        "study_health",
        "Health of the pool: utilisation against preemptions",
        "Preemptions begin well before the pool is full, the sooner the fewer requests share it.",
        "python -m experiments.reproduce --preset=paper --only=study_health",
        (Panel("Paged curves of figure 12", "pool utilisation (%)", "preemptions per request", "line", tuple(series)),),
        ("Beyond the paper: nothing here is held against it.",),
    )
    return Chapter("study_health", figure, tables=(table,))
