r"""Beyond the paper: which page size and which maximum length suit this trace on this memory?

OPT-13B on one A100-40GB, ShareGPT and Alpaca, pages of 1 to 256 tokens, `max_model_len` 512, 1024 and 2048, at the
rates of figure 18b, where the pool is full and waste costs batch. Small pages are slow to read, large ones leave slots
empty at the end of every sequence; a short maximum length refuses prompts and cuts answers.

    python -m experiments.reproduce --preset=paper --only=study_page_size [--traces=DIR]     (half a minute)

Expected: no number of the paper; its default is 16 tokens. The recommendation is computed from the runs by two rules:
of the page sizes within 10% of the lowest latency, the smallest (it leaves the fewest slots empty); of the maximum
lengths, the shortest that refuses or cuts at most one request in a thousand. Claim 2 (pages of 16 or 32 leave little
waste) is judged from the same runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from experiments import fig02, fig18, paper
from experiments.context import Context, Preset
from experiments.figure import Chapter, Figure, Panel, Series, Table
from experiments.finding import Finding, graded
from experiments.run import Summary
from experiments.setting import Setting, build_workload_of

MAX_LENGTHS = (512, 1024, 2048)
FULL_LENGTH = 2048
NEAR_BEST = 1.10
"""A page size within this factor of the lowest latency is as good as the best: preemptions scatter by a few percent."""
UNSERVED_SHARE = 0.001
LITTLE_WASTE = 4.0
"""Percent of the allocated slots that may stand empty for "little waste" (claim 2)."""
CLAIMED_PAGES = (16, 32)


def datasets_of(preset: Preset) -> tuple[str, ...]:
    """Smoke looks at ShareGPT alone."""
    return ("sharegpt",) if preset == "smoke" else ("sharegpt", "alpaca")


def setting_at(dataset: str, page_size: int, max_len: int = FULL_LENGTH, system: str = "paged") -> Setting:
    """The run behind one cell. At the full length it is the run of figure 18b."""
    rate = fig18.RATES[{"sharegpt": "ShareGPT", "alpaca": "Alpaca"}[dataset]]
    return Setting(
        system,  # type: ignore[arg-type]
        "opt-13b",
        dataset,
        rate,
        fig18.SECONDS,
        page_size=page_size,
        max_model_len=max_len,
    )


def grid(preset: Preset, dataset: str) -> list[Setting]:
    """Paged runs: every page size at the full length, and at shorter ones (smoke: at pages of 16 only)."""
    runs = []
    for max_len in MAX_LENGTHS:
        whole = preset == "paper" or max_len == FULL_LENGTH
        runs += [setting_at(dataset, page, max_len) for page in (paper.BLOCK_SIZES if whole else (16,))]
    return runs


def reserved(dataset: str) -> list[Setting]:
    """For contrast: a system that reserves the maximum length, at each maximum length."""
    return [setting_at(dataset, 16, max_len, "orca_max") for max_len in MAX_LENGTHS]


def settings(preset: Preset) -> list[Setting]:
    return [s for dataset in datasets_of(preset) for s in grid(preset, dataset) + reserved(dataset)]


@dataclasses.dataclass(frozen=True)
class Unserved:
    """Requests of a workload that a maximum length turns away, and answers that it cuts short."""

    refused: int
    cut: int
    requests: int

    @property
    def share(self) -> float:
        return (self.refused + self.cut) / self.requests


def unserved(context: Context, setting: Setting) -> Unserved:
    """Counted on the workload itself, so that a test can hold the run's refusals against it."""
    workload = build_workload_of(setting, context.traces)
    prompt, limit = workload.prompt_tokens, setting.max_model_len
    refused = prompt >= limit
    cut = ~refused & (prompt + workload.output_tokens > limit)
    return Unserved(int(refused.sum()), int(cut.sum()), len(workload))


def empty_share(run: Summary) -> float:
    """Slots of allocated pages that hold no token, percent of the allocated slots."""
    shares = run["windows"][0]["shares"]
    return 100.0 * shares["internal"] / (100.0 - shares["free"])


def recommend_page(runs: Sequence[Summary]) -> int:
    """The smallest page size within `NEAR_BEST` of the lowest latency."""
    lowest = min(run["normalised_latency_s"] for run in runs)
    return min(run["page_size"] for run in runs if run["normalised_latency_s"] <= NEAR_BEST * lowest)


def recommend_length(context: Context, dataset: str) -> tuple[int, Unserved]:
    """The shortest maximum length that refuses or cuts at most `UNSERVED_SHARE` of the requests, else the longest."""
    counts = {max_len: unserved(context, setting_at(dataset, 16, max_len)) for max_len in MAX_LENGTHS}
    good = [max_len for max_len, count in counts.items() if count.share <= UNSERVED_SHARE]
    chosen = min(good, default=max(MAX_LENGTHS))
    return chosen, counts[chosen]


def finding(context: Context) -> Finding:
    """Claim 2: waste of pages of 16 and 32 tokens, and how many times less it is than with reservation."""
    empty = {}
    for dataset in datasets_of(context.preset):
        for page in CLAIMED_PAGES:
            run = context.summaries([setting_at(dataset, page)])[0]
            empty[dataset, page] = empty_share(run)
    bars = dict(zip(fig02.SYSTEMS, context.summaries(fig02.settings(context.preset)), strict=True))
    waste = {system: 100.0 - _live(run) for system, run in bars.items()}
    divided = waste["orca_max"] / waste["paged"]
    tests = [share <= LITTLE_WASTE for share in empty.values()] + [divided >= 5.0]
    listed = ", ".join(f"{dataset} pages of {page}: {share:.1f}%" for (dataset, page), share in empty.items())
    return Finding(
        2,
        graded(tests),
        f"empty slots of allocated pages: {listed}. All waste of the pool divided by {divided:.0f} against reservation "
        f"of the maximum ({waste['orca_max']:.1f}% to {waste['paged']:.1f}%)",
        f"at most {LITTLE_WASTE:g}% of allocated slots empty, in every case, and waste divided by at least 5",
        "study_page_size (rates of figure 18b), fig02",
    )


def _live(run: Summary) -> float:
    shares = run["windows"][0]["shares"]
    return shares["live"] + shares["shared"]


def _run_row(run: Summary) -> tuple[float, ...]:
    window = run["windows"][0]
    return (
        run["normalised_latency_s"],
        run["output_tokens_per_s"],
        window["mean_groups"],
        _live(run),
        empty_share(run),
        window["shares"]["free"],
        run["preemption_rate"],
    )


RUN_COLUMNS = (
    "latency, s/token",
    "output tokens/s",
    "mean batch",
    "tokens, % of pool",
    "empty, % of allocated",
    "free, % of pool",
    "preemptions per request",
)


def page_table(context: Context, dataset: str) -> Table:
    """Every page size at the full length."""
    runs = context.summaries([setting_at(dataset, page) for page in paper.BLOCK_SIZES])
    chosen = recommend_page(runs)
    rows = [
        (run["page_size"], run["num_pages"], *_run_row(run), run["page_size"] == chosen) for run in runs
    ]  # fmt: skip
    rate = setting_at(dataset, 16).rate
    return Table(
        f"Page size, {context.workload(dataset)} at {rate:g} req/s, maximum length {FULL_LENGTH}",
        ("page size", "pages", *RUN_COLUMNS, "recommended"),
        tuple(rows),
        f"Recommended: the smallest page size within {NEAR_BEST - 1:.0%} of the lowest latency.",
    )


def length_table(context: Context, dataset: str) -> Table:
    """Every maximum length at pages of 16, paged and with reservation of the maximum."""
    chosen, _ = recommend_length(context, dataset)
    rows = []
    for system in ("paged", "orca_max"):
        for max_len in MAX_LENGTHS:
            setting = setting_at(dataset, 16, max_len, system)
            count, run = unserved(context, setting), context.summaries([setting])[0]
            window = run["windows"][0]
            rows.append(
                (paper.label(system), max_len, 100 * count.refused / count.requests, 100 * count.cut / count.requests,
                 run["normalised_latency_s"], run["output_tokens_per_s"], window["mean_groups"], _live(run),
                 system == "paged" and max_len == chosen)
            )  # fmt: skip
    return Table(
        f"Maximum length, {context.workload(dataset)}, pages of 16",
        ("system", "max_model_len", "refused, %", "answers cut, %", "latency, s/token", "output tokens/s", "mean batch",
         "tokens, % of pool", "recommended"),
        tuple(rows),
        "A shorter maximum serves less work, so its latency is not that of the same service. Paging takes pages as "
        "tokens come, so a longer maximum costs it nothing by itself; a reservation of the maximum pays for every "
        f"token of it. Recommended: the shortest that refuses or cuts at most {UNSERVED_SHARE:.1%} of the requests.",
    )  # fmt: skip


def recommendation_table(context: Context) -> Table:
    """One row per data set, computed from the runs."""
    rows = []
    for dataset in datasets_of(context.preset):
        runs = context.summaries([setting_at(dataset, page) for page in paper.BLOCK_SIZES])
        page = recommend_page(runs)
        best = min(runs, key=lambda run: run["normalised_latency_s"])
        run = next(run for run in runs if run["page_size"] == page)
        max_len, count = recommend_length(context, dataset)
        why = (
            f"{run['normalised_latency_s']:.3f} s/token (lowest: {best['normalised_latency_s']:.3f} at "
            f"{best['page_size']}), {empty_share(run):.1f}% of allocated slots empty; "
            f"{100 * count.share:.2f}% of requests refused or cut"
        )
        rows.append((context.workload(dataset), run["num_pages"], page, max_len, why))
    return Table(
        "Recommendation for OPT-13B on one A100-40GB",
        ("workload", "pages at that size", "page size", "maximum length", "why"),
        tuple(rows),
    )


def drawing(context: Context) -> Figure:
    """Latency and empty slots against page size, one line per maximum length."""
    panels = []
    for dataset in datasets_of(context.preset):
        latency, empty = [], []
        for max_len in MAX_LENGTHS:
            cells = [s for s in grid(context.preset, dataset) if s.max_model_len == max_len]
            runs, x = context.summaries(cells), tuple(float(s.page_size) for s in cells)
            name = f"maximum length {max_len}"
            latency.append(Series(name, "paxkv", x, tuple(run["normalised_latency_s"] for run in runs), system=name))
            empty.append(Series(name, "paxkv", x, tuple(empty_share(run) for run in runs), system=name))
        panels.append(
            Panel(f"{dataset}: latency", "page size (tokens)", "normalised latency (s/token)", "line", tuple(latency),
                  "log2", "log")
        )  # fmt: skip
        panels.append(
            Panel(f"{dataset}: empty slots", "page size (tokens)", "% of allocated slots", "line", tuple(empty), "log2")
        )
    return Figure(
        "study_page_size",
        "Which page size and maximum length suit this trace on this memory",
        "Small pages are slow to read, large ones leave slots empty; the maximum length decides who is served.",
        "python -m experiments.reproduce --preset=paper --only=study_page_size",
        tuple(panels),
        ("Beyond the paper: nothing here is held against it.",),
    )


def chapter(context: Context) -> Chapter:
    tables = [recommendation_table(context)]
    for dataset in datasets_of(context.preset):
        tables += [page_table(context, dataset), length_table(context, dataset)]
    return Chapter("study_page_size", drawing(context), tables=tuple(tables))
