"""The smoke preset, run again, gives the committed numbers."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from experiments.report import load_run, markdown_table
from experiments.reproduce import reproduce
from scripts.make_reference import live_table

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "experiments" / "reference" / "smoke" / "verdict.json"


@pytest.fixture(scope="module")
def rerun(tmp_path_factory: pytest.TempPathFactory) -> dict:
    workdir = tmp_path_factory.mktemp("smoke")
    reproduce("smoke", workdir, processes=1, console=Console(quiet=True))
    return json.loads((workdir / "verdict.json").read_text())


def test_smoke_gives_the_committed_rows(rerun: dict) -> None:
    """Every row: the same place, verdict and note, and numbers equal to nine digits (libm may differ in the last)."""
    committed = json.loads(REFERENCE.read_text())
    assert len(rerun["rows"]) == len(committed["rows"]) > 50
    for ours, theirs in zip(rerun["rows"], committed["rows"], strict=True):
        numbers = ("paper", "ours", "rel_err")
        assert {k: v for k, v in ours.items() if k not in numbers} == {
            k: v for k, v in theirs.items() if k not in numbers
        }
        for key in numbers:
            assert ours[key] == (None if theirs[key] is None else pytest.approx(theirs[key], rel=1e-9, abs=1e-9))


def test_smoke_meets_its_tolerances(rerun: dict) -> None:
    """A tested row of the smoke preset misses only with a note that explains it."""
    unexplained = [row for row in rerun["rows"] if row["pass"] is False and not row["note"]]
    assert not unexplained


def test_readme_shows_the_committed_results() -> None:
    """The table is what `scripts.make_reference` makes of the committed verdict, whose misses are all explained."""
    paper = load_run(ROOT / "experiments" / "reference" / "paper")
    assert markdown_table(paper).strip() in (ROOT / "README.md").read_text()
    assert not [row for row in paper.rows if row.passed is False and not row.note]


def test_readme_shows_the_committed_live_run() -> None:
    """The table is what `scripts.make_reference` makes of the committed verdict, in which all that is tested holds."""
    live = load_run(ROOT / "experiments" / "reference" / "live")
    assert live_table() in (ROOT / "README.md").read_text()
    assert [row for row in live.rows if row.passed] and not [row for row in live.rows if row.passed is False]
