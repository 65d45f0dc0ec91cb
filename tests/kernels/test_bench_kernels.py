"""The benchmark of the kernels, as it is called: what it writes, prints and refuses."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

from pallas_kernels.paged_attention.arg_specs import ARG_SPECS

ROOT = pathlib.Path(__file__).resolve().parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the script."""
    command = [sys.executable, "-m", "scripts.bench_kernels", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


def test_a_run_and_its_tables(tmp_path):
    out = tmp_path / "new" / "run.json"
    options = ["--small", "--nofigure_18a", "--repeats=3", "--seconds=0.001", f"--out={out}"]
    done = bench("--specs=small_decode_1", "--implementations=xla,reference", *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    rows = {row["implementation"]: row for row in found["calls"]}
    assert set(rows) == {"xla", "reference"}
    assert set(found["left_out"]["small_decode_1"]) == {"jax's own", "torch sdpa"}
    times = [row["microseconds"] for row in found["calls"]]
    assert times == sorted(times)  # fastest first
    for row in rows.values():
        assert 0 < row["fastest"] <= row["microseconds"] and 0 < row["share_of_copy"]
        assert row["read_bytes"] == ARG_SPECS["small_decode_1"].read_bytes == 500 * 4 * 64 * 4 * 2
        assert row["difference"] < 1e-5
    assert {"platform", "kind", "small"} <= set(found["device"]) and found["environment"]["packages"]["jax"]
    again = bench(f"--table={out}")
    assert again.returncode == 0 and again.stdout.strip() in done.stdout
    assert again.stdout.count("| small_decode_1 |") == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--specs=small_decode_1,nothing"], "--specs=small_decode_1,nothing must name some of decode_8x1024"),
        (["--implementations=xla,mosaic_gpu"], "must be some of xla, reference on this device"),
        (["--table=nowhere.json"], "nowhere.json"),
        (["all"], "unexpected arguments: all"),
    ],
)
def test_what_cannot_be_done_is_said(arguments, words):
    done = bench(*arguments)
    assert done.returncode != 0 and words in done.stdout + done.stderr and "Traceback" not in done.stderr
