r"""Live on this machine: the systems of the paper through the real engine, beside what the simulator predicts.

Claim: in a pool of seven longest sequences, paging serves at least 2x the tokens/s of Orca (Max) and 1.3x those of
Orca (Oracle) on ShareGPT lengths (the paper's figure 12a: 3.7x and 1.8x in request rate), and every system gives the
very same tokens.

    python -m experiments.reproduce --preset=live [--traces=DIR] [--model=PATH]      (10 minutes on two cores)
    python -m experiments.reproduce --only=study_live                                (a tiny model: seconds)

Expected: both ratios, from one run. Where the timed steps say that more rows cannot be that much faster on the device,
because arithmetic already binds the smaller batch, the ratio is not reached and the table says so. Exactly: equal
tokens; 7.00 requests in Orca (Max)'s batch while requests wait; the simulator's decisions, so that steps, batches,
preemptions and shares of the pool are equal. Only time is predicted, within 25%.
"""

from __future__ import annotations

import statistics

from experiments import paper
from experiments.context import Context, Preset
from experiments.figure import Chapter, Figure, Panel, Series, Table, VerdictRow, judge, judge_printed
from experiments.live.checks import exact_rows, workload_name
from experiments.live.prediction import Summary
from experiments.live.session import LiveSession
from experiments.live.setting import LONGEST_SEQUENCES, PAGE_SIZE, LiveSetting, saturated
from experiments.live.tables import busy, comparison
from experiments.setting import Setting

EXPECTED = (("orca_max", 2.0), ("orca_oracle", 1.3))
"""System and how many times its tokens per second paging serves at least."""
TIME_TOLERANCE = 0.25
SMOKE_SYSTEMS = ("orca_max", "orca_oracle", "paged")
"""Static batches have a pool of another form, for which every step would be compiled once more."""
ID = "study_live"


def settings(preset: Preset) -> list[Setting]:
    return []


def chapter(context: Context) -> Chapter | None:
    if context.preset == "paper":
        return None
    session = context.live
    chosen = saturated(session.size)
    if not session.timed:
        chosen = [setting for setting in chosen if setting.system in SMOKE_SYSTEMS]
    runs = dict(zip((setting.system for setting in chosen), session.run(chosen), strict=True))
    names = tuple(map(paper.label, runs))
    title = f"{workload_name(session, chosen[0])}, all requests there from the start"
    tables = [comparison(session, title, chosen, names)]
    if session.timed:
        tables = [expectations(session, chosen, runs), *tables, steps_table(session)]
    drawing = Figure(
        ID,
        f"The systems on one pool ({session.device}, {session.size.shape.name})",
        f"In a pool of {LONGEST_SEQUENCES} longest sequences, paging serves at least 2x the tokens of Orca (Max) and "
        "1.3x those of Orca (Oracle), and all systems give the same tokens.",
        f"python -m experiments.reproduce --preset={context.preset} --only={ID}",
        panels(session, chosen, runs),
        ("Measured: the real engine. Predicted: the simulator, on step times of this device that were timed apart.",),
    )
    return Chapter(ID, drawing, rows(session, chosen, runs), (*tables, machine(session, runs)))


def rows(session: LiveSession, chosen: list[LiveSetting], runs: dict[str, Summary]) -> tuple[VerdictRow, ...]:
    """What must hold exactly and, where steps were timed, the speeds beside the paper's."""
    workload = workload_name(session, chosen[0])
    found = exact_rows(session, ID, "saturated", chosen)
    batch = runs["orca_max"]["full"]["mean_groups"]
    found.append(
        judge_printed(ID, "orca_max", "mean batched requests while requests wait", workload, LONGEST_SEQUENCES, batch)
    )
    if session.timed:
        for setting in chosen:
            for what, run in (("measured", runs[setting.system]), ("predicted", session.predict(setting))):
                for when, speed in SPEEDS:
                    place = f"output tokens/s{when}, {what}"
                    found.append(judge(ID, setting.system, place, workload, None, speed(run), 0.0))
        for system, _ in EXPECTED:
            for when, speed in SPEEDS:
                place = f"ratio of tokens/s{when} (paper: of rates at 0.5 s/token)"
                printed, ours = printed_ratio(system), speed(runs["paged"]) / speed(runs[system])
                found.append(judge(ID, f"paged/{system}", place, workload, printed, ours, 0.15, tested=False))
    return tuple(found)


def whole(run: Summary) -> float:
    """Tokens per second of the whole run."""
    return run["tokens_per_s"]


def sustained(run: Summary) -> float:
    """Tokens per second while requests wait for memory: without the drain at the end, when memory limits nobody."""
    return run["full_tokens_per_s"] or run["tokens_per_s"]


SPEEDS = (("", whole), (" while requests wait", sustained))
"""Two ways to count; the expectations are of whole runs."""


def printed_ratio(system: str) -> float:
    """The paper's ratio of request rates at 0.5 s/token, paged over ``system`` (figure 12a)."""
    panel = paper.FIG12.panel("a")
    return panel.curve("paged").crossings[0.5] / panel.curve(system).crossings[0.5]


def expectations(session: LiveSession, chosen: list[LiveSetting], runs: dict[str, Summary]) -> Table:
    """What was expected of the device's time and whether it holds."""
    body = [speed_verdict(session, chosen, runs, system, factor) for system, factor in EXPECTED]
    off = {s.system: runs[s.system]["seconds"] / session.predict(s)["seconds"] - 1 for s in chosen}
    worst = max(off, key=lambda system: abs(off[system]))
    text = f"median {statistics.median(map(abs, off.values())):.0%}, worst {off[worst]:+.0%} ({paper.label(worst)})"
    verdict = "holds" if abs(off[worst]) <= TIME_TOLERANCE else "miss"
    body.append(("the simulator predicts each run's time", f"within {TIME_TOLERANCE:.0%}", text, verdict))
    return Table("What was expected", ("what", "expected", "found", "verdict"), tuple(body))


def speed_verdict(
    session: LiveSession, chosen: list[LiveSetting], runs: dict[str, Summary], system: str, factor: float
) -> tuple[str, str, str, str]:
    """Whether paging is `factor` times as fast; if not, whether the device's timed steps allow it to be."""
    ratio, waiting = (speed(runs["paged"]) / speed(runs[system]) for speed in (whole, sustained))
    text = f"{ratio:.2f}x, {waiting:.2f}x while requests wait (paper's rates: {printed_ratio(system):.2f}x)"
    verdict = "holds" if ratio >= factor else "refuted"
    if ratio < factor:
        predicted = {setting.system: whole(session.predict(setting)) for setting in chosen}
        limit = predicted["paged"] / predicted[system]
        (few, few_s), (many, many_s) = (decode_step(session, runs[name]) for name in (system, "paged"))
        text += (
            f"; by the timed steps {limit:.2f}x: on this device a step of {few:.0f} rows takes {1e3 * few_s:.1f} ms "
            f"and one of {many:.0f} {1e3 * many_s:.1f} ms"
        )
        verdict = "conditional" if limit < factor else "refuted"
    return f"paged against {paper.label(system)}, tokens/s", f"{factor:g}x or more", text, verdict


def decode_step(session: LiveSession, run: Summary) -> tuple[float, float]:
    """Rows of a run's mean decode step while requests wait, and its seconds by the device's timed steps."""
    pool = busy(run)
    slots = run["num_pages"] * run["page_size"]
    context = slots * (pool["shares"]["live"] + pool["shares"]["shared"]) / 100
    return pool["mean_groups"], session.clock.decode_s(pool["mean_groups"], context)


def panels(session: LiveSession, chosen: list[LiveSetting], runs: dict[str, Summary]) -> tuple[Panel, ...]:
    """Tokens per second and batch of each system; the decode step against its rows."""
    places = tuple(range(len(runs)))
    labels = tuple(map(paper.label, runs))
    predicted = [session.predict(setting) for setting in chosen]
    drawn = []
    for title, unit, value, is_time in (
        ("Output tokens per second", "tokens/s", whole, True),
        ("Mean batched requests", "requests", lambda run: busy(run)["mean_groups"], False),
    ):
        series = [Series("measured", "paxkv", places, tuple(map(value, runs.values())), system="measured")]
        if session.timed or not is_time:
            series.append(Series("predicted", "paxkv", places, tuple(map(value, predicted)), system="predicted"))
        drawn.append(Panel(title, "", unit, "bar", tuple(series), xticklabels=labels))
    if session.timed:
        clock = session.clock
        points = sorted(short_decodes(session), key=lambda point: point["decodes"])
        x = tuple(point["decodes"] for point in points)
        timed = tuple(1e3 * point["seconds"] for point in points)
        fitted = tuple(1e3 * clock.step_s(point) for point in points)
        series = (
            Series("timed", "paxkv", x, timed, system="measured", style="points"),
            Series("fitted", "paxkv", x, fitted, system="predicted", style="plain"),
        )
        drawn.append(
            Panel("A decode step by its rows", "rows", "ms", "line", series, ylim=(0, 1.1 * max(timed + fitted)))
        )
    return tuple(drawn)


def short_decodes(session: LiveSession) -> list[dict]:
    """The timed decode step of each batch size at its shortest context."""
    shortest: dict[int, dict] = {}
    for point in session.clock.decodes():
        known = shortest.get(point["decodes"])
        if known is None or point["context_tokens"] < known["context_tokens"]:
            shortest[point["decodes"]] = point
    return list(shortest.values())


def steps_table(session: LiveSession) -> Table:
    """The timed decode steps: what they took, what the fit says, and how near they come to the device's limits."""
    clock = session.clock
    columns = ("rows", "context", "ms", "fitted ms", "tokens/s", "of the bandwidth", "of the arithmetic")
    body = []
    for point in clock.decodes():
        seconds = point["seconds"]
        body.append(
            (
                point["decodes"],
                round(point["context_tokens"]),
                1e3 * seconds,
                1e3 * clock.step_s(point),
                point["tokens"] / seconds,
                f"{clock.model['weight_bytes'] / seconds / clock.limits['bytes_per_s']:.0%}",
                f"{2 * clock.model['weights'] * point['tokens'] / seconds / clock.limits['flops_per_s']:.0%}",
            )
        )
    cost = clock.cost
    knee = cost.weights_s / cost.token_s if cost.token_s else 0.0
    note = (
        f"Fitted: floor {1e3 * cost.floor_s:.2f} ms, weights {1e3 * cost.weights_s:.2f} ms, "
        f"token {1e6 * cost.token_s:.0f} us, sequence {1e6 * cost.sequence_s:.0f} us, context "
        f"{1e9 * cost.kv_token_s:.0f} ns per token. From {knee:.0f} tokens on a step costs more with each token. The "
        f"device's best: {clock.limits['flops_per_s'] / 1e9:.0f} GFLOP/s (float32 product of 2048 x 2048) and "
        f"{clock.limits['bytes_per_s'] / 1e9:.0f} GB/s (a long sum); of it, reading the weights once and multiplying "
        "by them take the shares shown."
    )
    return Table("Timed decode steps", columns, tuple(body), note)


def machine(session: LiveSession, runs: dict[str, Summary]) -> Table:
    """The device, the model and what came before the clock."""
    size, config = session.size, session.size.shape
    kind = "random weights from a seed" if size.weights == "seeded" else f"checkpoint {size.weights}"
    pool_bytes = size.num_pages * PAGE_SIZE * config.kv_bytes_per_token
    facts = [
        ("device", session.device),
        ("model", f"{config.name}: {kind}, {config.num_layers} layers of {config.hidden_size}"),
        (
            "pool",
            f"{size.num_pages} pages of {PAGE_SIZE} tokens: {LONGEST_SEQUENCES} sequences of {size.max_model_len}, "
            f"{pool_bytes / 2**20:.1f} MiB",
        ),
        (
            "limits",
            f"{size.max_num_seqs} sequences, {size.max_num_batched_tokens} tokens a step, "
            f"{size.max_horizon} decode steps a dispatch",
        ),
        ("warm-up and compiling, all systems", f"{sum(run['warm_up_s'] for run in runs.values()):.0f} s, apart"),
        (
            "host's own work, of the runs' time",
            f"{sum(run['host_s'] for run in runs.values()) / sum(run['seconds'] for run in runs.values()):.1%}",
        ),
    ]
    if session.timed:
        model = session.clock.model
        read = f"{model['weights'] / 1e6:.1f} million, {model['weight_bytes'] / 1e6:.0f} MB"
        facts[2:2] = [("weights read by a step", read), ("making the weights", f"{model['build_s']:.1f} s")]
    return Table("This machine", ("what", "value"), tuple(facts))
