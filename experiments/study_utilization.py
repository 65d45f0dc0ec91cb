r"""Beyond the paper: how much of the device memory should the engine use, under steady and under bursty load?

Claim 9: `memory_utilization` 0.90 by default; 0.95 packs more under steady load; 0.80 saves bursts from crashing.

    python -m experiments.reproduce --preset=paper --only=study_utilization [--traces=DIR]     (10 seconds)

OPT-13B on one A100-40GB, ShareGPT; Poisson arrivals and gamma arrivals with a coefficient of variation of 4. Expected:
no number of the paper. The first half should hold (a larger pool serves the same load with less waiting). A smaller
pool cannot help a burst inside the pool: requests wait or are preempted, none is lost. What a smaller share does guard
against lies outside the pool (peak activations, other processes) and is not simulated.
"""

from __future__ import annotations

from experiments.context import Context, Preset
from experiments.figure import Chapter, Figure, Panel, Series, Table
from experiments.finding import Finding, graded
from experiments.run import Summary
from experiments.setting import Setting

UTILIZATIONS = (0.80, 0.90, 0.95)
RATES = (1.0, 1.5, 1.8)
SMOKE_RATES = (1.0, 1.5)
SECONDS, WARM_UP = 1800.0, 300.0
LOADS = {"steady": ("poisson", 1.0), "bursty": ("gamma", 4.0)}


def rates_of(preset: Preset) -> tuple[float, ...]:
    """Smoke leaves out the highest rate."""
    return SMOKE_RATES if preset == "smoke" else RATES


def setting_at(load: str, rate: float, utilization: float) -> Setting:
    """One run: pool shares are averaged after the warm-up."""
    arrivals, burstiness = LOADS[load]
    return Setting(
        "paged",
        "opt-13b",
        "sharegpt",
        rate,
        SECONDS,
        arrivals=arrivals,  # type: ignore[arg-type]
        burstiness=burstiness,
        utilization=utilization,
        windows=((WARM_UP, SECONDS),),
    )


def settings(preset: Preset) -> list[Setting]:
    return [setting_at(load, rate, u) for load in LOADS for rate in rates_of(preset) for u in UTILIZATIONS]


def lost(run: Summary) -> int:
    """Requests that were neither finished nor refused: what a crash would leave behind."""
    return run["requests"] - run["finished"] - run["rejected"]


def finding(context: Context) -> Finding:
    """Claim 9, from the highest rate of the preset and from the counts of all bursty runs."""
    top = rates_of(context.preset)[-1]
    steady = {u: context.summaries([setting_at("steady", top, u)])[0] for u in UTILIZATIONS}
    bursty = {u: context.summaries([setting_at("bursty", top, u)])[0] for u in UTILIZATIONS}
    lost_at = {u: sum(lost(context.summaries([setting_at("bursty", rate, u)])[0]) for rate in rates_of(context.preset))
               for u in UTILIZATIONS}  # fmt: skip
    packs = steady[0.95]["normalised_latency_s"] < steady[0.90]["normalised_latency_s"]
    saves = lost_at[0.95] > lost_at[0.80] or bursty[0.80]["ttft_s"]["p99"] < bursty[0.95]["ttft_s"]["p99"]
    latency = " / ".join(f"{steady[u]['normalised_latency_s']:.3f}" for u in UTILIZATIONS)
    waiting = " / ".join(f"{bursty[u]['ttft_s']['p99']:.0f}" for u in UTILIZATIONS)
    preempted = " / ".join(f"{bursty[u]['preemption_rate']:.2f}" for u in UTILIZATIONS)
    return Finding(
        9,
        graded([packs, saves]),
        f"at 0.80 / 0.90 / 0.95 and {top:g} req/s: steady {latency} s/token; bursty p99 time to first token {waiting} "
        f"s, {preempted} preemptions per request, {sum(lost_at.values())} requests lost at any share: a burst waits, "
        "it does not crash, and the smaller pool makes it wait longer. Memory outside the pool is not simulated",
        "steady: lower latency at 0.95 than at 0.90; bursty: at 0.80 fewer requests lost, or a shorter p99 wait, than "
        "at 0.95",
        "study_utilization",
    )


COLUMNS = (
    "arrivals",
    "req/s",
    "memory_utilization",
    "pages",
    "latency, s/token",
    "p99 time to first token, s",
    "p99 time per token, s",
    "mean batch",
    "pool utilisation, %",
    "preemptions per request",
    "refused",
    "lost",
)


def _row(load: str, setting: Setting, run: Summary) -> tuple:
    window = run["windows"][0]
    return (
        load, setting.rate, setting.utilization, run["num_pages"], run["normalised_latency_s"],
        run["ttft_s"]["p99"], run["tpot_s"]["p99"], window["mean_groups"], window["utilisation"],
        run["preemption_rate"], run["rejected"], lost(run),
    )  # fmt: skip


def chapter(context: Context) -> Chapter:
    rates = rates_of(context.preset)
    rows, panels = [], []
    for load in LOADS:
        series = []
        for u in UTILIZATIONS:
            runs = context.summaries([setting_at(load, rate, u) for rate in rates])
            name = f"memory_utilization {u:g}"
            series.append(Series(name, "paxkv", rates, tuple(run["normalised_latency_s"] for run in runs), system=name))
        panels.append(
            Panel(f"{load} arrivals", "request rate (req/s)", "normalised latency (s/token)", "line", tuple(series),
                  yscale="log")
        )  # fmt: skip
        for rate in rates:
            for u in UTILIZATIONS:
                setting = setting_at(load, rate, u)
                rows.append(_row(load, setting, context.summaries([setting])[0]))
    figure = Figure(
        "study_utilization",
        "How much of the memory to use, under steady and bursty load",
        "A larger pool packs more; a smaller one does not save a burst, which waits instead of crashing.",
        "python -m experiments.reproduce --preset=paper --only=study_utilization",
        tuple(panels),
        ("Beyond the paper: nothing here is held against it.",),
    )
    answer = finding(context)
    table = Table(
        f"memory_utilization, OPT-13B, {context.workload('sharegpt')}, {SECONDS:g} s",
        COLUMNS,
        tuple(rows),
        f"Bursty: gamma gaps with a coefficient of variation of {LOADS['bursty'][1]:g}. Claim 9: {answer.verdict} "
        f"({answer.rule}).",
    )
    return Chapter("study_utilization", figure, tables=(table,))
