"""The comparison of schedules: what is counted, the committed run, and what is refused."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from pallas_kernels.schedule import SLOTS, Loop, Schedule
from scripts.readme import with_table

ROOT = pathlib.Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "experiments" / "reference" / "kernels" / "rpa_v3.json"


def loop(number: int, depth: int, parent: int, bundles: int, **slots: int) -> Loop:
    return Loop(number, depth, parent, bundles, dict.fromkeys(SLOTS, 0) | slots)


LOOPS = (
    loop(0, 0, 0, 100),
    loop(1, 1, 0, 300),
    loop(2, 2, 1, 20, fill=1),
    loop(3, 2, 1, 50, fill=2),
    loop(4, 3, 3, 400, matrix=8, spill=5),
)


def test_theirs_is_the_largest_loop_of_each_of_the_two_deepest_levels():
    from scripts.compare_rpa import count

    found = count(Schedule("RPAd", LOOPS, 1, 1), 1000)
    assert found == {"bundles_per_token": 0.45, "bundles": [400, 50], "fills_and_spills": 7}


def test_ours_is_the_loop_with_the_products():
    from scripts.compare_rpa import count

    found = count(Schedule("paged_attention_t800x2", LOOPS, 1, 1), None)
    assert found == {"bundles_per_token": 0.5, "bundles": [400], "fills_and_spills": 5}


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.compare_rpa", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)


def test_the_readme_shows_the_committed_run():
    run = json.loads(COMMITTED.read_text())
    assert {row["target"] for row in run["rows"]} == {"v5e", "v6e", "7x"}
    assert run["versions"]["tpu-inference"] and run["versions"]["libtpu"]
    assert not [row for row in run["rows"] if "refused" in row["ours"]]
    done = script("--table")
    assert done.returncode == 0, done.stderr
    readme = (ROOT / "README.md").read_text()
    assert with_table(readme, "rpa", done.stdout) == readme


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--wheel=nowhere"], "--wheel: must be a folder that holds tpu_inference/; got nowhere"),
        (["--table", "--out=nowhere.json"], "--out: must be a file that this script wrote; got nowhere.json"),
    ],
)
def test_what_cannot_be_done_is_said(arguments, words):
    done = script(*arguments)
    assert done.returncode != 0 and words in done.stdout + done.stderr and "Traceback" not in done.stderr
