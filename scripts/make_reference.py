r"""Refreshes what is committed of the results: reference verdicts, the README's picture and its table.

    python -m scripts.make_reference --smoke=runs/smoke --paper=runs/paper --live=runs/live

Takes `verdict.json` of finished runs of `experiments.reproduce` and nothing else; a flag left out keeps what is
committed. The picture and the table are then made from the committed paper verdict.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from experiments.plots.overview import write_overview
from experiments.report import load_run, markdown_table

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "experiments" / "reference"
BEGIN, END = "<!-- results -->", "<!-- /results -->"

SMOKE = flags.DEFINE_string("smoke", None, "workdir of a finished smoke run on the embedded statistics")
PAPER = flags.DEFINE_string("paper", None, "workdir of a finished paper run on the real traces")
LIVE = flags.DEFINE_string("live", None, "workdir of a finished live run on the real traces")


def with_table(readme: str, table: str) -> str:
    """The README's text with the table between its markers.

    Raises:
        ValueError: the markers are not there, once each.
    """
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md must hold {BEGIN} and {END} once each; put them where the table belongs")
    head, rest = readme.split(BEGIN)
    return f"{head}{BEGIN}\n{table.strip()}\n{END}{rest.split(END)[1]}"


def results_table() -> str:
    """The README's table, from the committed paper verdict."""
    return markdown_table(load_run(REFERENCE / "paper"))


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
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text(), results_table()))
    print("wrote the README's picture and table")


if __name__ == "__main__":
    app.run(main)
