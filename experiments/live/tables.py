"""Tables of live runs: measured beside predicted, and what the pool holds."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.figure import Table
from experiments.live.prediction import Summary
from experiments.live.session import LiveSession
from experiments.live.setting import LiveSetting

MEASURED = (
    "run", "tokens/s", "while requests wait", "mean batch", "live tokens, % of the pool", "preemptions", "s/token",
    "TTFT p50, s", "TPOT p50, ms", "TPOT p99, ms", "digest of all tokens",
)  # fmt: skip
PREDICTED = (
    "predicted: tokens/s", "while requests wait", "s/token", "TTFT p50, s", "TPOT p50, ms", "measured / predicted time",
)  # fmt: skip
PARTS = ("live", "shared", "reserved", "internal", "external", "free")


def comparison(
    session: LiveSession, title: str, settings: Sequence[LiveSetting], names: Sequence[str], note: str = ""
) -> Table:
    """A row for each run, with what the simulator predicts where steps were timed. Equal tokens have equal digests.

    Batch and pool are means over the steps in which requests wait; over all steps where they arrive over time.
    """
    rows = []
    for name, setting, run in zip(names, settings, session.run(settings), strict=True):
        pool = busy(run) if setting.rate is None else run["all"]
        row = [
            name,
            run["tokens_per_s"],
            run["full_tokens_per_s"],
            pool["mean_groups"],
            pool["shares"]["live"] + pool["shares"]["shared"],
            run["preemptions"],
            run["normalised_latency_s"],
            run["ttft_s"]["p50"],
            _ms(run["tpot_s"]["p50"]),
            _ms(run["tpot_s"]["p99"]),
            run["tokens_hash"],
        ]
        if session.timed:
            predicted = session.predict(setting)
            row += [
                predicted["tokens_per_s"],
                predicted["full_tokens_per_s"],
                predicted["normalised_latency_s"],
                predicted["ttft_s"]["p50"],
                _ms(predicted["tpot_s"]["p50"]),
                run["seconds"] / predicted["seconds"],
            ]
        rows.append(tuple(row))
    tokens = f"{run['prompt_tokens']:,} prompt and {run['output_tokens']:,} output tokens"
    note = f"Each serves {run['requests']} requests with {tokens}. {note}".strip()
    return Table(title, MEASURED + (PREDICTED if session.timed else ()), tuple(rows), note)


def busy(run: Summary) -> Summary:
    """What the pool held while requests waited, or over the whole run where none ever did."""
    return run["full"] or run["all"]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def shares_table(rows: Sequence[tuple[str, Summary, Summary]]) -> Table:
    """(name, run, prediction) of each system: the pool by use, in percent."""
    body = []
    for name, run, predicted in rows:
        body.append((name, "measured", *(busy(run)["shares"][part] for part in PARTS)))
        body.append((name, "predicted", *(busy(predicted)["shares"][part] for part in PARTS)))
    return Table("The pool by use, % of its slots, while requests wait", ("system", "", *PARTS), tuple(body))
