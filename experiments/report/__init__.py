"""The report: each figure of the paper beside ours, on one page that is read from a run directory and runs nothing.

    python -m experiments.report --workdir=DIR [--out=report.html]

A run directory holds `chapters/*.json`, `verdict.json`, `calibration.json` and `environment.json`; what is missing is
listed on the page, what is corrupt is refused with the file's name.
"""

from __future__ import annotations

from experiments.report.load import ReportError, Run, load_run
from experiments.report.page import write_report
from experiments.report.score import Score, markdown_table, scores

__all__ = ["ReportError", "Run", "Score", "load_run", "markdown_table", "scores", "write_report"]
