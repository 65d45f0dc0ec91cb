r"""Figure 12: normalised latency against request rate, five systems, three models, two data sets.

Claim: paging sustains 1.7x to 2.7x the request rate of Orca (Oracle), 2.7x to 8x of Orca (Max) and up to 22x of
FasterTransformer at similar latency (paper section 6.2).

    python -m experiments.reproduce --preset=paper --only=fig12 [--traces=DIR]     (about 10 minutes on two cores)
    python -m experiments.reproduce --preset=live --only=fig12 [--traces=DIR]      (6 minutes, panel a, the real engine)

Expected: the rate at 0.5 s/token within 10% in panels a, b, d, e and 15% in c, f; ratios of paged to Oracle and to
Max within 15%. The paged curves of a and d, and the low-load points of the others, are calibration points.
Live: the same order of systems, equal tokens; latencies beside the simulator's.
"""

from __future__ import annotations

from experiments import paper
from experiments.context import Context, Preset
from experiments.curves import answer_panel
from experiments.figure import Chapter, Figure, Panel, Series
from experiments.live.checks import exact_rows
from experiments.live.session import LiveSession
from experiments.live.setting import SYSTEMS as LIVE_SYSTEMS
from experiments.live.setting import LiveSetting, saturated
from experiments.live.tables import comparison
from experiments.setting import Setting

PANELS = {
    "a": ("opt-13b", "sharegpt"),
    "b": ("opt-66b", "sharegpt"),
    "c": ("opt-175b", "sharegpt"),
    "d": ("opt-13b", "alpaca"),
    "e": ("opt-66b", "alpaca"),
    "f": ("opt-175b", "alpaca"),
}
SYSTEMS = ("static", "orca_max", "orca_pow2", "orca_oracle", "paged")


def trace_seconds(model: str, system: str) -> float:
    """Length of the trace: an hour, a quarter of one for OPT-175B except FasterTransformer (sections 2 and 6.1)."""
    return 900.0 if model == "opt-175b" and system != "static" else 3600.0


def setting_at(panel: str, system: str, rate: float, seed: int = 0) -> Setting:
    """The run behind one point of a curve."""
    model, dataset = PANELS[panel]
    return Setting(
        system,  # type: ignore[arg-type]
        model,
        dataset,
        rate,
        trace_seconds(model, system),
        engine="static" if system == "static" else "serving",
        seed=seed,
    )


def panel_settings(panel: str, system: str, seed: int = 0) -> list[Setting]:
    """The runs of one curve, at the rates at which the paper's curve is read."""
    return [setting_at(panel, system, rate, seed) for rate in paper.reading_grid("fig12", panel, system)]


TOLERANCES = {"a": 0.10, "b": 0.10, "c": 0.15, "d": 0.10, "e": 0.10, "f": 0.15}
RATIO_TOLERANCE = 0.15
CALIBRATED = {("a", "paged"), ("d", "paged")}
SMOKE_PANELS = "a"


def panels_of(preset: Preset) -> str:
    """The panels that a preset runs."""
    return SMOKE_PANELS if preset == "smoke" else "abcdef"


def settings(preset: Preset) -> list[Setting]:
    return [s for panel in panels_of(preset) for system in SYSTEMS for s in panel_settings(panel, system)]


def chapter(context: Context) -> Chapter:
    if context.preset == "live":
        return live_chapter(context)
    panels = [paper.FIG12.panel(key) for key in panels_of(context.preset)]
    answers = [
        answer_panel(
            context,
            "fig12",
            panel,
            SYSTEMS,
            lambda system, key=panel.key: panel_settings(key, system),
            tolerance=TOLERANCES[panel.key],
            ratio_tolerance=RATIO_TOLERANCE,
            ratios=("orca_oracle", "orca_max"),
            calibrated={system for key, system in CALIBRATED if key == panel.key},
        )
        for panel in panels
    ]
    drawing = Figure(
        "fig12",
        "Normalised latency against request rate (figure 12)",
        "Paging sustains a higher request rate than contiguous reservation at the same latency.",
        "python -m experiments.reproduce --preset=paper --only=fig12",
        tuple(answer.panel for answer in answers),
        ("Dashed and hollow: the paper's points. Solid: ours, at the same rates.",),
    )
    return Chapter("fig12", drawing, tuple(row for answer in answers for row in answer.rows))


LIVE_SHARES = (0.3, 0.6, 0.9)
"""Request rates as shares of what the paged engine serves when saturated."""
LIVE_SECONDS = 8.0


def live_settings(session: LiveSession) -> list[list[LiveSetting]]:
    """Panel (a) on the real clock, by rate: Poisson arrivals at rates that follow from the saturated paged run."""
    paged = saturated(session.size)[-1]
    (run,) = session.run([paged])
    rates = [float(f"{share * run['requests'] / run['seconds']:.2g}") for share in LIVE_SHARES]
    return [
        [
            LiveSetting(system, session.size, "sharegpt", max(1, round(rate * LIVE_SECONDS)), rate)
            for system in LIVE_SYSTEMS
        ]
        for rate in rates
    ]


def live_chapter(context: Context) -> Chapter:
    """Latency against request rate, measured and predicted."""
    session = context.live
    by_rate = live_settings(session)
    rates = tuple(chosen[0].rate or 0.0 for chosen in by_rate)
    rows, series, tables = [], [], []
    for rate, chosen in zip(rates, by_rate, strict=True):
        rows += exact_rows(session, "live_fig12", f"{rate:g} req/s", chosen)
        tables.append(comparison(session, f"{rate:g} req/s", chosen, [paper.label(s.system) for s in chosen]))
    for column, system in enumerate(LIVE_SYSTEMS):
        mine = [chosen[column] for chosen in by_rate]
        # Dashed and hollow is here the prediction, where the other figures have the paper.
        for source, found in (("paxkv", session.run(mine)), ("paper", map(session.predict, mine))):
            y = tuple(run["normalised_latency_s"] for run in found)
            name = paper.label(system) + (", predicted" if source == "paper" else "")
            series.append(Series(name, source, rates, y, system=system))  # type: ignore[arg-type]
    drawing = Figure(
        "live_fig12",
        "Normalised latency against request rate, live (figure 12a)",
        "Paging sustains a higher request rate than contiguous reservation at the same latency.",
        "python -m experiments.reproduce --preset=live --only=fig12",
        (
            Panel(
                f"{session.size.shape.name}, ShareGPT", "request rate (req/s)", "normalised latency (s/token)", "line",
                tuple(series),
            ),
        ),
        (
            f"Poisson arrivals for {LIVE_SECONDS:g} s on the real clock, latencies until the last request is served. "
            "Solid: measured. Dashed and hollow: predicted by the simulator on this device's step times.",
        ),
    )  # fmt: skip
    return Chapter("live_fig12", drawing, tuple(rows), tuple(tables))
