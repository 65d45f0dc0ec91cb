r"""Figure 2: what the KV memory holds, by system (OPT-13B, ShareGPT).

Claim: only 20.4% to 38.2% of the KV memory of existing systems holds token states, against 96.3% when paged
(paper section 1).

    python -m experiments.reproduce --only=fig02 [--traces=DIR]                   (seconds)
    python -m experiments.reproduce --preset=live --only=fig02 [--traces=DIR]     (4 minutes, the real engine)

Expected: every bar of the Orcas within 0.6 points, and paging's true split 96.3 tokens, 97.9 allocated, 1.65 slack.
The published bar of vLLM draws half of its free memory as "reservation" and half as "internal"; that is not repeated.
Live: shown beside the paper, since lengths and pool are scaled to the device, and equal to the simulator's shares.
"""

from __future__ import annotations

from experiments import paper
from experiments.context import Context, Preset
from experiments.figure import Chapter, Figure, Panel, Series, judge
from experiments.live.checks import exact_rows, workload_name
from experiments.live.setting import saturated
from experiments.live.tables import busy, shares_table
from experiments.setting import Setting

RATE, SECONDS, WINDOW = 4.0, 900.0, (300.0, 900.0)
TOLERANCE = 0.6
SYSTEMS = ("orca_max", "orca_pow2", "orca_oracle", "paged")
SEGMENTS = paper.FIG02_SEGMENTS


def settings(preset: Preset) -> list[Setting]:
    return [Setting(system, "opt-13b", "sharegpt", RATE, SECONDS, windows=(WINDOW,)) for system in SYSTEMS]  # type: ignore[arg-type]


def segments(shares: dict[str, float]) -> tuple[float, float, float, float]:
    """Our six shares in the paper's four: what is neither live, reserved nor internal is "external and others"."""
    live = shares["live"] + shares["shared"]
    return live, shares["reserved"], shares["internal"], shares["external"] + shares["free"]


def printed_bars() -> dict[str, tuple[float, float, float, float]]:
    """The paper's bars; for paging the true split (tokens, none reserved, slack, free) instead of the drawn one."""
    bars = {bar.system: (bar.token_states, bar.reservation, bar.internal, bar.external) for bar in paper.FIG02}
    true = paper.FIG02_PAGED
    bars["paged"] = (true.token_states, 0.0, true.slack, 100.0 - true.allocated)
    return bars


def chapter(context: Context) -> Chapter:
    if context.preset == "live":
        return live_chapter(context)
    workload = context.workload("sharegpt")
    rows, ours = [], {}
    for setting, summary in zip(settings(context.preset), context.summaries(settings(context.preset)), strict=True):
        shares = summary["windows"][0]["shares"]
        ours[setting.system] = shares
        if setting.system == "paged":
            allocated = 100.0 - shares["free"]
            split = (
                ("token states", paper.FIG02_PAGED.token_states, shares["live"] + shares["shared"]),
                ("allocated", paper.FIG02_PAGED.allocated, allocated),
                ("slack in last pages", paper.FIG02_PAGED.slack, shares["internal"]),
            )
            for name, printed, value in split:
                rows.append(
                    judge("fig02", "paged", f"{name}, % of the pool", workload, printed, value,
                          context.tolerance(TOLERANCE), "absolute", note="the true split behind the drawn bar")
                )  # fmt: skip
            continue
        for name, value in zip(SEGMENTS, segments(shares), strict=True):
            printed = printed_bars()[setting.system][SEGMENTS.index(name)]
            rows.append(
                judge("fig02", setting.system, f"{name}, % of the pool", workload, printed, value,
                      context.tolerance(TOLERANCE), "absolute")
            )  # fmt: skip
    drawing = Figure(
        "fig02",
        "What the KV memory holds (figure 2)",
        "Existing systems keep 20% to 38% of the KV memory for tokens; paging keeps 96%.",
        "python -m experiments.reproduce --only=fig02",
        (bars_panel("KV memory by use", ours),),
        ("Paging is drawn by its true split (tokens, slack in last pages, free), see the module's docstring.",),
    )
    return Chapter("fig02", drawing, tuple(rows))


def bars_panel(title: str, ours: dict[str, dict[str, float]]) -> Panel:
    """The paper's bars beside ours, from the shares of each system."""
    series = []
    for source in ("paper", "paxkv"):
        for index, name in enumerate(SEGMENTS):
            heights = [(segments(ours[s]) if source == "paxkv" else printed_bars()[s])[index] for s in SYSTEMS]
            series.append(Series(name, source, tuple(range(len(SYSTEMS))), tuple(heights), system=name))  # type: ignore[arg-type]
    labels = tuple(paper.label(system) for system in SYSTEMS)
    return Panel(title, "", "% of the pool", "stacked", tuple(series), ylim=(0, 100), xticklabels=labels)


def live_chapter(context: Context) -> Chapter:
    """The same bars from the real engine, over the steps in which requests wait for memory."""
    session = context.live
    chosen = saturated(session.size)
    runs = dict(zip((setting.system for setting in chosen), session.run(chosen), strict=True))
    shares = {system: busy(run)["shares"] for system, run in runs.items()}
    workload = workload_name(session, chosen[0])
    rows = exact_rows(session, "live_fig02", "saturated", chosen)
    for system in SYSTEMS:
        for name, printed, value in zip(SEGMENTS, printed_bars()[system], segments(shares[system]), strict=True):
            rows.append(
                judge("live_fig02", system, f"{name}, % of the pool", workload, printed, value, TOLERANCE, "absolute",
                      tested=False)
            )  # fmt: skip
    drawing = Figure(
        "live_fig02",
        "What the KV memory holds, live (figure 2)",
        "Existing systems keep 20% to 38% of the KV memory for tokens; paging keeps 96%.",
        "python -m experiments.reproduce --preset=live --only=fig02",
        (bars_panel("KV memory by use, real engine", shares),),
        (
            "Mean over the steps in which requests wait. A page of 16 tokens is a larger part of a scaled request than "
            "of the paper's, so more of it is slack.",
        ),
    )
    table = shares_table([(paper.label(s.system), runs[s.system], session.predict(s)) for s in chosen])
    return Chapter("live_fig02", drawing, tuple(rows), (table,))
