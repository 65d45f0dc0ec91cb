"""The two scripts, run as a user runs them."""

from __future__ import annotations

import gzip
import importlib.util
import json
import subprocess
import sys

import pytest

from paxkv.workload import build_workload, chat_workload, embedded_conversations, embedded_lengths, read_workload

if importlib.util.find_spec("absl") is None:
    pytest.skip("the scripts need absl-py", allow_module_level=True)


def run(root, script: str, *flags: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"scripts.{script}", *map(str, flags)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)


def made(root, *flags: object) -> str:
    """Run make_workload, which must succeed, and return what it printed."""
    result = run(root, "make_workload", *flags)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_a_data_set(repo_root, tmp_path):
    path = tmp_path / "w.jsonl.gz"
    printed = made(repo_root, "--dataset=alpaca", "--rate=2", "--duration=300", "--seed=5", f"--out={path}")
    workload = read_workload(path)
    assert workload == build_workload(embedded_lengths("alpaca"), 2, 300, seed=5)
    assert workload.content_hash in printed
    assert f"wrote         {path}" in printed
    table = {line.split()[0]: line.split()[1:] for line in printed.splitlines() if line.startswith("  ")}
    assert table["prompt"][0] == f"{workload.prompt_tokens.mean():.2f}"
    assert int(table["sum"][-1]) == workload.max_total_tokens
    again = made(repo_root, "--input", path, "--format=workload")
    assert workload.content_hash in again


def test_chat(repo_root):
    printed = made(repo_root, "--dataset=sharegpt_turns", "--rate=0.5", "--new_probability=0.3", "--name=talk")
    workload = chat_workload(embedded_conversations(), 0.5, 3600, new_probability=0.3)
    assert workload.content_hash in printed
    assert "name          talk\n" in printed


def test_files_of_every_kind(repo_root, tmp_path):
    (tmp_path / "pairs.csv").write_text("a,b\n5,6\n7,8\n")
    printed = made(
        *(repo_root, f"--input={tmp_path}/pairs.csv", "--format=lengths", "--prompt_column=a", "--output_column=b"),
        *("--rate=3", "--duration=20", "--arrivals=gamma", "--burstiness=2"),
    )
    assert "source        real:pairs.csv; arrivals gamma(cv=2)" in printed
    trace = "arrival_s,prompt,output\n" + "".join(f"{i},5,6\n" for i in range(11))
    (tmp_path / "trace.csv.gz").write_bytes(gzip.compress(trace.encode()))
    printed = made(repo_root, f"--input={tmp_path}/trace.csv.gz", "--format=trace", "--rate=2", "--duration=4")
    assert "requests      8, first at 0.000 s, last at 3.500 s" in printed
    record = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}
    (tmp_path / "m.jsonl").write_text(json.dumps(record))
    assert "blocks of 512 tokens" in made(repo_root, f"--input={tmp_path}/m.jsonl", "--format=mooncake")


def test_distribution_and_prefix(repo_root):
    printed = made(
        *(repo_root, "--prompt=uniform(1,20)", "--output=fixed(30)", "--rate=5", "--duration=60"),
        "--prefix_tokens=100",
    )
    assert "prefix        100 tokens shared by all prompts" in printed
    assert "distribution:prompt uniform(1,20), output fixed(30), seed 0" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "pass one of --dataset, --input (with --format) or --prompt (with --output)"),
        (["--dataset=alpaca", "--prompt=fixed(3)"], "pass one of --dataset"),
        (["--dataset=alpaca"], "--rate is needed"),
        (["--dataset=alpaca", "--rate=0"], "rate must be finite and above zero (requests per second), got 0.0"),
        (["--dataset=alpaca", "--rate=1", "--new_probability=0.5"], "leave out: --new_probability"),
        (["--dataset=alpaca", "--rate=1", "--burstiness=2"], "burstiness=2.0 has no meaning for arrivals='slots'"),
        (["--dataset=alpaca", "--rate=1", "--traces=none"], "none/alpaca_52k.csv.gz: the file must be readable"),
        (["--input=none.csv", "--format=trace", "--seed=3"], "leave out: --seed"),
        (["--input=none.csv"], "--input needs --format"),
        (["--input=none.json", "--format=sharegpt", "--rate=1"], "--format=sharegpt needs --tokenizer"),
        (["--prompt=fixed(3)", "--rate=1"], "--prompt needs --output"),
    ],
)
def test_misuse_is_one_line(repo_root, flags, message):
    result = run(repo_root, "make_workload", *flags)
    assert result.returncode == 1
    assert result.stderr.startswith("make_workload: ")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_the_embedded_file_is_what_the_traces_give(repo_root, tmp_path, shared_data):
    """Twin: test_datasets.test_rebuilding_inverts_describing."""
    path = tmp_path / "lengths.json"
    result = run(repo_root, "make_lengths", f"--traces={shared_data / 'traces'}", f"--out={path}")
    assert result.returncode == 0, result.stderr
    assert path.read_bytes() == (repo_root / "paxkv/workload/data/lengths.json").read_bytes()
    assert "sharegpt_turns" in result.stdout
