r"""Figure 16: translation with a shared prefix of one or five examples (LLaMA-13B, WMT16 En-De).

Claim: sharing the prefix's pages gives 1.67x (80 tokens) and 3.58x (341 tokens) the rate of Orca (Oracle)
(section 6.4).

    python -m experiments.reproduce --preset=paper --only=fig16 [--traces=DIR]     (3 minutes)
    python -m experiments.reproduce --preset=live --only=fig16 [--traces=DIR]      (3 minutes, the real engine)

Expected: ratios 1.69 and 3.54 (as drawn, at 0.5 s/token) and the rates within 10%. Decoding is greedy, so it runs on
the bare step without the serving overhead of sampling. The prefix is found by content: only whole pages of it hit
(5 of 5 pages, 21 of 21.3). Live: paging with the prefix cache ahead of Oracle, the same tokens from all.
"""

from __future__ import annotations

from experiments import paper
from experiments.context import Context, Preset
from experiments.curves import answer_panel
from experiments.figure import Chapter, Figure, Panel, Series, judge
from experiments.live.checks import exact_rows, workload_name
from experiments.live.setting import LiveSetting, LiveSize
from experiments.live.tables import comparison
from experiments.setting import Setting

SECONDS = 1200.0
SYSTEMS = ("orca_oracle", "paged")
TOLERANCE = 0.10


def panel_settings(panel: str, system: str) -> list[Setting]:
    """The runs of one curve."""
    return [
        Setting(system, "llama-13b", "wmt16", rate, SECONDS, engine="bare", prefix_tokens=paper.PREFIX_TOKENS[panel])  # type: ignore[arg-type]
        for rate in paper.reading_grid("fig16", panel, system)
    ]


def settings(preset: Preset) -> list[Setting]:
    if preset == "smoke":
        return []
    return [s for panel in "ab" for system in SYSTEMS for s in panel_settings(panel, system)]


def chapter(context: Context) -> Chapter | None:
    if context.preset == "live":
        return live_chapter(context)
    if context.preset == "smoke":
        return None
    answers = [
        answer_panel(
            context,
            "fig16",
            paper.FIG16.panel(key),
            SYSTEMS,
            lambda system, key=key: panel_settings(key, system),
            tolerance=TOLERANCE,
            ratio_tolerance=TOLERANCE,
        )
        for key in "ab"
    ]
    drawing = Figure(
        "fig16",
        "A shared prefix (figure 16)",
        "The longer the shared prefix, the larger the gain from storing it once.",
        "python -m experiments.reproduce --preset=paper --only=fig16",
        tuple(answer.panel for answer in answers),
    )
    return Chapter("fig16", drawing, tuple(row for answer in answers for row in answer.rows))


LIVE_KINDS = (("orca_oracle", False), ("paged", False), ("paged", True))
"""System and whether it finds pages by content."""


def live_settings(size: LiveSize, panel: str) -> list[LiveSetting]:
    """A panel in the real engine, all requests there from the start."""
    return [
        LiveSetting(
            system, size, "wmt16", max(1, size.requests // 4),  # type: ignore[arg-type]
            prefix_tokens=paper.PREFIX_TOKENS[panel], prefix_caching=cached,
        )
        for system, cached in LIVE_KINDS
    ]  # fmt: skip


def live_chapter(context: Context) -> Chapter:
    """Tokens per second without sharing, with paging alone, and with the prefix stored once."""
    session = context.live
    names = tuple(f"{paper.label(system)}{', prefix cache' if cached else ''}" for system, cached in LIVE_KINDS)
    rows, tables, panels = [], [], []
    for key in "ab":
        chosen = live_settings(session.size, key)
        runs, predicted = session.run(chosen), [session.predict(setting) for setting in chosen]
        prefix = f"prefix of {paper.PREFIX_TOKENS[key]} tokens"
        rows += exact_rows(session, "live_fig16", prefix, chosen)
        speeds = [run["tokens_per_s"] for run in runs]
        curves = paper.FIG16.panel(key)
        printed = curves.curve("paged").crossings[0.5] / curves.curve("orca_oracle").crossings[0.5]
        rows.append(
            judge("live_fig16", "paged/orca_oracle", f"{prefix}: ratio of tokens/s (paper: of rates at 0.5 s/token)",
                  workload_name(session, chosen[0]), printed, speeds[-1] / speeds[0], TOLERANCE, tested=False)
        )  # fmt: skip
        panels.append(
            Panel(prefix, "", "output tokens/s", "bar",
                  (Series("measured", "paxkv", (0, 1, 2), tuple(speeds), system="measured"),
                   Series("predicted", "paxkv", (0, 1, 2), tuple(p["tokens_per_s"] for p in predicted),
                          system="predicted")),
                  xticklabels=names)
        )  # fmt: skip
        hits = runs[-1]["prefix_hit_rate"]
        note = f"Prompt tokens found in the cache: {hits:.0%}." if hits is not None else ""
        tables.append(comparison(session, prefix, chosen, names, note))
    drawing = Figure(
        "live_fig16",
        "A shared prefix, live (figure 16)",
        "The longer the shared prefix, the larger the gain from storing it once.",
        "python -m experiments.reproduce --preset=live --only=fig16",
        tuple(panels),
        ("Orca (Oracle), paging without a prefix cache, and paging with one. All requests are there from the start.",),
    )
    return Chapter("live_fig16", drawing, tuple(rows), tuple(tables))
