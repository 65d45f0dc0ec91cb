"""Derive the embedded length statistics from a folder of traces, and print how good they are.

    python -m scripts.make_lengths --traces=DIR [--out=paxkv/workload/data/lengths.json] [--check]

The statistics are committed, the traces are not. ``--check`` writes nothing: it compares what the committed
statistics give with the traces. Takes a few seconds.
"""

from __future__ import annotations

import json
import pathlib

from absl import app, flags

from paxkv.workload import datasets, embedded, summary
from paxkv.workload.textfile import write_bytes_atomically

ROOT = pathlib.Path(__file__).resolve().parents[1]

_TRACES = flags.DEFINE_string("traces", None, "folder with the trace files", required=True)
_OUT = flags.DEFINE_string("out", str(ROOT / "paxkv/workload/data/lengths.json"), "file to write")
_CHECK = flags.DEFINE_bool("check", False, "only compare, write nothing")


def derive(traces: str) -> dict:
    """Return the statistics of every data set in the folder ``traces``."""
    result = {}
    for name in ("sharegpt", "alpaca", "wmt16"):
        pairs = datasets.real_lengths(name, traces, max_total_tokens=2048)
        result[name] = summary.describe_pairs(pairs, edge_total=2048 if name == "sharegpt" else None)
    result["sharegpt_turns"] = summary.describe_conversations(datasets.real_conversations(traces))
    return result


def compare_all(traces: str, described: dict) -> None:
    """Print a table of distances between the traces and what ``described`` rebuilds."""
    print(f"{'data set':<16}{'pairs':>8}{'KS prompt':>11}{'KS output':>11}{'KS sum':>9}{'rank':>16}{'means':>34}")
    for name in (*datasets.NAMES,):
        real = datasets.real_lengths(name, traces)
        if name == "sharegpt_turns":
            ours = embedded.expand_conversations(name, described[name]).as_requests()
        else:
            ours = embedded.expand_pairs(name, described[name]).with_total_at_most(datasets.PAPER_MAX_TOTAL)
        c = summary.compare(real, ours)
        means = (
            f"{c['prompt_mean_first']:.2f}/{c['output_mean_first']:.2f} "
            f"{c['prompt_mean_second']:.2f}/{c['output_mean_second']:.2f}"
        )
        print(
            f"{name:<16}{len(ours):>8}{c['ks_prompt']:>11.4f}{c['ks_output']:>11.4f}{c['ks_sum']:>9.4f}"
            f"{c['rank_first']:>8.3f}{c['rank_second']:>8.3f}{means:>34}"
        )


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    described = embedded.statistics_file() if _CHECK.value else derive(_TRACES.value)
    if not _CHECK.value:
        lines = [f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in described.items()]
        data = ("{\n" + ",\n".join(lines) + "\n}\n").encode()
        write_bytes_atomically(_OUT.value, data)
        print(f"wrote {_OUT.value}, {len(data)} bytes")
    compare_all(_TRACES.value, described)


if __name__ == "__main__":
    app.run(main)
