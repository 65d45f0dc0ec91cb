"""Writes report.html from a run directory: `python -m experiments.report --workdir=DIR`. Takes a few seconds."""

from __future__ import annotations

import sys
from pathlib import Path

from absl import app, flags

from experiments.report import ReportError, load_run, markdown_table, write_report

_WORKDIR = flags.DEFINE_string("workdir", None, "The run directory to read.", required=True)
_OUT = flags.DEFINE_string("out", "report.html", "Name of the page, inside the run directory unless absolute.")
_MARKDOWN = flags.DEFINE_bool("markdown", False, "Print the results table in Markdown instead of writing the page.")


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"no arguments expected, got {' '.join(argv[1:])}")
    try:
        if _MARKDOWN.value:
            print(markdown_table(load_run(Path(_WORKDIR.value))))
        else:
            print(write_report(Path(_WORKDIR.value), _OUT.value))
    except ReportError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    app.run(main)
