r"""Beyond the paper: do whole prefills make running requests stutter, and what do chunks change?

Claim 13: prefill is bound by compute, decode by memory bandwidth.
Claim 14: whole prefills make other users' tokens stutter; chunked prefill stops that and adds up to 50% throughput.

    python -m experiments.reproduce --preset=paper --only=study_chunked [--traces=DIR]     (15 seconds)

OPT-13B on one A100-40GB. Prompts get steps of their own (`prompts_only`), join the decodes whole (`mixed`, the paper),
or are cut to what a token budget leaves (`chunked`). Loads: chat prompts of up to 1,024 tokens below and past the knee,
and prompts of about 512 tokens with short answers past it. Expected: no number of the paper. The gain comes from the
roofline: up to some 130 tokens a step compute while the weights are read, for nothing; a chunk fills that room.
"""

from __future__ import annotations

import dataclasses

from experiments import fig17
from experiments.context import Context, Preset
from experiments.figure import Chapter, Figure, Panel, Series, Table
from experiments.finding import Finding, graded
from experiments.kept import Result, kept
from experiments.roofline import Roofline, Step
from experiments.setting import Setting, build_cost
from experiments.token_gaps import Trial, measure
from paxkv.config import OPT_13B
from paxkv.sim import hardware
from paxkv.sizing import LLAMA_3_8B

SECONDS, WARM_UP = 600.0, 150.0
WHOLE_BUDGET = 2560
CALM, FULL, LONG = "chat, below the knee", "chat, past the knee", "prompts of 512, answers of 128, past the knee"
RATES = {CALM: 0.6, FULL: 2.0, LONG: 6.0}
LONG_LENGTHS = ("lognormal(512, 0.5)", "lognormal(128, 0.5)")
WAYS = (
    ("prompts_only", WHOLE_BUDGET),
    ("mixed", WHOLE_BUDGET),
    ("chunked", 512),
    ("chunked", 256),
    ("chunked", 128),
)

STUTTER = 3.0
"""A gap of the 99.9th percentile this many times the median is a stutter."""
SMOOTH = 1.5
CLAIMED_GAIN = 0.50
NEAR = 0.05


def loads_of(preset: Preset) -> tuple[str, ...]:
    """Smoke leaves out the chat load past the knee."""
    return (CALM, LONG) if preset == "smoke" else (CALM, FULL, LONG)


def settings(preset: Preset) -> list[Setting]:
    return []  # trials are measured token by token, which plain runs do not do


def trial_at(load: str, step_kind: str, budget: int) -> Trial:
    """The trial behind one row."""
    chat = {} if load == LONG else {"new_probability": fig17.NEW_PROBABILITY}
    setting = Setting(
        "paged",
        "opt-13b",
        "sharegpt" if load == LONG else "chat",
        RATES[load],
        SECONDS,
        step_kind=step_kind,  # type: ignore[arg-type]
        windows=((WARM_UP, SECONDS),),
        **chat,  # type: ignore[arg-type]
    )
    return Trial(setting, budget, LONG_LENGTHS if load == LONG else None)


def measured(context: Context, load: str, step_kind: str, budget: int) -> Result:
    """One trial's result, kept as a run."""
    trial = trial_at(load, step_kind, budget)
    config = {"trial": dataclasses.asdict(trial), "calibration": context.calibration.to_dict()}
    name = f"gaps-{step_kind}-{budget}-{trial.setting.rate:g}rps"
    return kept(context, name, config, lambda: measure(trial, context.calibration, context.traces))


def gain(context: Context, load: str, step_kind: str, budget: int) -> float:
    """Throughput over that of prompts in steps of their own, less one."""
    whole = measured(context, load, *WAYS[0])["tokens_per_s"]
    return measured(context, load, step_kind, budget)["tokens_per_s"] / whole - 1


def finding_chunks(context: Context) -> Finding:
    """Claim 14."""
    calm = {way: measured(context, CALM, *way)["gaps_s"] for way in WAYS}
    ratio = {way: gaps["p999"] / gaps["p50"] for way, gaps in calm.items()}
    smoothest = min((way for way in WAYS if way[0] == "chunked"), key=lambda way: ratio[way])
    past = [load for load in loads_of(context.preset) if load != CALM]
    gains = {(load, way): gain(context, load, *way) for load in past for way in WAYS if way[0] == "chunked"}
    (best_load, best_way), best = max(gains.items(), key=lambda item: item[1])
    over_mixed = (1 + best) / (1 + gain(context, best_load, *WAYS[1])) - 1
    tests = [
        min(ratio[WAYS[0]], ratio[WAYS[1]]) >= STUTTER,
        ratio[smoothest] <= SMOOTH,
        best >= CLAIMED_GAIN - NEAR,
    ]
    return Finding(
        14,
        graded(tests),
        f"{CALM}, 99.9th percentile of the gaps over their median: {ratio[WAYS[0]]:.1f} with prompts in steps of "
        f"their own, {ratio[WAYS[1]]:.1f} with whole prompts beside decodes, {ratio[smoothest]:.1f} in chunks "
        f"({smoothest[1]} tokens a step). Throughput past the knee: at best {best:+.0%} ({best_load}, {best_way[1]} "
        f"tokens a step; {over_mixed:+.0%} over whole prompts beside decodes)",
        f"whole prefills: 99.9th percentile at least {STUTTER:g} times the median; chunks: at most {SMOOTH:g} times; "
        f"best gain at least {CLAIMED_GAIN - NEAR:.0%}",
        "study_chunked",
    )


# -- claim 13 ----------------------------------------------------------------------------------------------------------

CONTEXT = 500
"""Tokens of a decode's context: the mean of a ShareGPT request is 499."""
PREFILLS = {"a full step of prompts": Step(WHOLE_BUDGET), "one ShareGPT prompt": Step(161)}
DECODES = {f"{batch} decodes": Step(0, batch, CONTEXT) for batch in (1, 32, 256)}


def rooflines(context: Context) -> list[tuple[str, str, Roofline]]:
    """(device, model, roofline): the calibrated A100 first, then the public peaks of every accelerator."""
    bare = Setting("paged", "opt-13b", "sharegpt", 1.0, 1.0, engine="bare")
    rows = [("a100-40gb, calibrated", OPT_13B.name, Roofline.of_cost(build_cost(bare, context.calibration)))]
    for shape in (OPT_13B, LLAMA_3_8B):
        rows += [(name, shape.name, Roofline.of(shape, device)) for name, device in hardware.DEVICES.items()]
    return rows


def finding_bounds(context: Context) -> Finding:
    """Claim 13."""
    lines = rooflines(context)
    full = [line.compute_over_memory(PREFILLS["a full step of prompts"]) > 1 for _, _, line in lines]
    short = [line.compute_over_memory(PREFILLS["one ShareGPT prompt"]) > 1 for _, _, line in lines]
    decode = [line.compute_over_memory(step) < 1 for _, _, line in lines for step in DECODES.values()]
    ridges = [line.ridge_tokens for _, _, line in lines]
    limits = [line.largest_ratio(CONTEXT) > 1 for _, _, line in lines]
    return Finding(
        13,
        graded([all(full), all(short), all(decode)]),
        f"a step of {WHOLE_BUDGET} prompt tokens is compute-bound in {sum(full)} of {len(full)} cases, a single "
        f"prompt of 161 in {sum(short)}: prefill needs {min(ridges):.0f} to {max(ridges):.0f} tokens a step. Decodes "
        f"are memory-bound in {sum(decode)} of {len(decode)} cases; as the batch grows without end, {sum(limits)} of "
        f"{len(limits)} become compute-bound",
        "compute over memory time above 1 for full and for single prompts, below 1 for 1, 32 and 256 decodes at a "
        f"context of {CONTEXT}, on every device, OPT-13B and Llama-3-8B",
        "study_chunked (roofline)",
    )


def roofline_table(context: Context) -> Table:
    """Time to compute over time to read, by device, model and step."""
    steps = {**PREFILLS, **DECODES}
    rows = [
        (device, model, line.ridge_tokens, *(line.compute_over_memory(step) for step in steps.values()),
         line.largest_ratio(CONTEXT))
        for device, model, line in rooflines(context)
    ]  # fmt: skip
    return Table(
        "Time to compute over time to read memory, by step (above 1: bound by compute)",
        ("device", "model", "ridge, tokens", *steps, "decodes without end"),
        tuple(rows),
        f"Public peaks of each device, no overheads; decodes have a context of {CONTEXT} tokens. A model spread over "
        "several devices has the same ratios. With few KV heads a decode reads so little that a large batch computes "
        "longer.",
    )


# -- the chapter -------------------------------------------------------------------------------------------------------


def gap_table(context: Context) -> Table:
    """Gaps and throughput of every load and way."""
    rows = []
    for load in loads_of(context.preset):
        for way in WAYS:
            found = measured(context, load, *way)
            gaps = found["gaps_s"]
            rows.append(
                (load, *way, *(1e3 * gaps[level] for level in ("p50", "p99", "p999")), gaps["p999"] / gaps["p50"],
                 found["tokens_per_s"], 100 * gain(context, load, *way), found["ttft_p99_s"], found["preemption_rate"])
            )  # fmt: skip
    return Table(
        f"Gaps between tokens and throughput, OPT-13B, {context.workload('chat turns')}",
        ("load", "step kind", "tokens a step", "gap p50, ms", "p99, ms", "p99.9, ms", "p99.9 / p50", "output tokens/s",
         "gain, %", "p99 time to first token, s", "preemptions per request"),
        tuple(rows),
        "Gain: throughput against prompts in steps of their own. Below the knee throughput is what arrives. Waits of "
        "preempted requests are gaps too. The gain holds what chunks save by fewer preemptions: a prompt in small "
        "pieces is admitted later and holds its pages for longer before it decodes.",
    )  # fmt: skip


def chapter(context: Context) -> Chapter:
    panels = []
    ticks = tuple({"prompts_only": "own step", "mixed": "whole"}.get(kind, str(budget)) for kind, budget in WAYS)
    places = tuple(float(index) for index in range(len(WAYS)))
    for title, unit, value in (
        ("99.9th percentile of the gaps", "ms", lambda found: 1e3 * found["gaps_s"]["p999"]),
        ("Throughput", "output tokens/s", lambda found: found["tokens_per_s"]),
    ):
        series = [
            Series(load, "paxkv", places, tuple(value(measured(context, load, *way)) for way in WAYS), system=load)
            for load in loads_of(context.preset)
        ]
        panels.append(
            Panel(title, "prompts: own step, whole, or chunks of", unit, "bar", tuple(series), xticklabels=ticks)
        )
    figure = Figure(
        "study_chunked",
        "Whole and chunked prefills",
        "Whole prefills make running requests wait for a prompt; chunks bound the wait and use idle arithmetic.",
        "python -m experiments.reproduce --preset=paper --only=study_chunked",
        tuple(panels),
        ("Beyond the paper: nothing here is held against it.",),
    )
    return Chapter("study_chunked", figure, tables=(gap_table(context), roofline_table(context)))
