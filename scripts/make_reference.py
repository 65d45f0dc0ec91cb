r"""Refreshes what is committed of the results: reference verdicts, the README's picture and its tables.

    python -m scripts.make_reference --smoke=runs/smoke --paper=runs/paper --live=runs/live

Takes `verdict.json` of finished runs of `experiments.reproduce` and nothing else; a flag left out keeps what is
committed. The picture and a table are then made from the committed paper verdict, the other table from the live one.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from experiments import paper
from experiments.plots.overview import write_overview
from experiments.report import load_run, markdown_table
from scripts.readme import put_table

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "experiments" / "reference"
SMOKE = flags.DEFINE_string("smoke", None, "workdir of a finished smoke run on the embedded statistics")
PAPER = flags.DEFINE_string("paper", None, "workdir of a finished paper run on the real traces")
LIVE = flags.DEFINE_string("live", None, "workdir of a finished live run on the real traces")


def results_table() -> str:
    """The README's table, from the committed paper verdict."""
    return markdown_table(load_run(REFERENCE / "paper"))


def live_table() -> str:
    """The systems on one pool, from the committed live verdict: what was measured and predicted."""
    run = load_run(REFERENCE / "live")
    found: dict[str, dict[str, float | None]] = {}
    for row in run.rows:
        if row.figure == "study_live" and row.setting.startswith("output tokens/s"):
            found.setdefault(row.system, {})[row.setting.removeprefix("output tokens/s")] = row.ours
    columns = {"tokens/s": ", measured", "predicted": ", predicted"}
    columns |= {f"{name}, while requests wait": f" while requests wait{place}" for name, place in columns.items()}
    lines = [f"| system | {' | '.join(columns)} |", "|---" + "|---:" * len(columns) + "|"]
    for system, speeds in found.items():
        lines.append(f"| {paper.label(system)} | {' | '.join(f'{speeds[key]:.0f}' for key in columns.values())} |")
    ratios = [
        f"{row.ours:.2f} ({paper.label(row.system.removeprefix('paged/'))}; the paper's request rates: {row.paper:.2f})"
        for row in run.rows
        if row.system.startswith("paged/") and row.setting.startswith("ratio of tokens/s (")
    ]
    where = f"{run.meta['model']} on {run.meta['device']}, {run.meta['workload']}"
    return "\n".join(
        [*lines, "", f"Paging's tokens/s over those of others: {', '.join(ratios)}. {where.capitalize()}."]
    )


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    for name, workdir in (("smoke", SMOKE.value), ("paper", PAPER.value), ("live", LIVE.value)):
        if workdir is not None:
            target = REFERENCE / name / "verdict.json"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(workdir) / "verdict.json", target)
            print(f"wrote {target.relative_to(ROOT)}")
    write_overview(REFERENCE / "paper" / "verdict.json", REFERENCE / "overview.svg")
    put_table("results", results_table())
    put_table("live", live_table())
    print("wrote the README's picture and tables")


if __name__ == "__main__":
    app.run(main)
