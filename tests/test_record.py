"""Run directories: atomic, resumable, never of two configurations, clear errors, two writers, kill -9."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from paxkv import record
from paxkv.record import RecordError, RunDirectory, canonical_json, config_hash

CONFIG = {"system": "paged", "rate": 2.0, "seed": 0}
CONFIG_SHA = hashlib.sha256(b'{"rate":2.0,"seed":0,"system":"paged"}').hexdigest()
FINAL = ["config.json", "env.json", "requests.jsonl", "steps.jsonl", "summary.json"]


def files(path: pathlib.Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def recorded(root: pathlib.Path, config=CONFIG) -> RunDirectory:
    run = RunDirectory(root, "fig02", config, record=True)
    run.append_steps([{"step": 0, "live": 3}, {"step": 1, "live": 4}])
    run.append_requests([{"id": 7, "ttft_s": 0.5}])
    run.append_steps([{"step": 2, "live": 5}])
    return run


# -- canonical JSON ------------------------------------------------------------------------------------------------


def test_canonical_json_is_one_text_for_one_value():
    @dataclasses.dataclass(frozen=True)
    class Point:
        y: int
        x: tuple[float, ...]

    value = {"b": Point(1, (0.1, 1e-9)), "a": [None, True, np.float64(2.5), np.int64(3), np.bool_(False)], "é": "ü"}
    assert canonical_json(value) == ('{"a":[null,true,2.5,3,false],"b":{"x":[0.1,1e-09],"y":1},"\\u00e9":"\\u00fc"}')
    assert canonical_json({"array": np.array([[1, 2], [3, 4]])}) == '{"array":[[1,2],[3,4]]}'


def test_config_hash_is_fixed():
    assert config_hash(CONFIG) == CONFIG_SHA
    assert config_hash(dict(reversed(CONFIG.items()))) == CONFIG_SHA
    assert config_hash({**CONFIG, "rate": 2}) != CONFIG_SHA  # 2 and 2.0 are different configurations


def test_config_hash_does_not_depend_on_the_process():
    script = f"from paxkv.record import config_hash; print(config_hash({CONFIG!r}))"
    for seed in ("0", "1"):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "PYTHONPATH": str(pathlib.Path(record.__file__).parents[1]),
        }
        result = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True, timeout=60
        )
        assert result.stdout.strip() == CONFIG_SHA


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": {"b": [1.0, float("nan")]}}, r"value\.a\.b\[1\] is nan: JSON has no NaN.*write None"),
        ({"a": np.float32("inf")}, r"value\.a is inf"),
        ({1: 2}, "has the key 1: keys must be strings"),
        ({"a": {1, 2}}, r"value\.a is a set"),
        ({"a": pathlib.Path("x")}, r"value\.a is a PosixPath"),
        ({"a": np.array([np.nan])}, r"value\.a\[0\] is nan"),
    ],
)
def test_values_that_are_no_record_are_refused(value, message):
    with pytest.raises(ValueError, match=message):
        canonical_json(value)


# -- one run -------------------------------------------------------------------------------------------------------


def test_a_run_from_start_to_end(tmp_path):
    run = recorded(tmp_path)
    assert run.path == tmp_path / f"fig02-{CONFIG_SHA[:12]}"
    assert not run.complete
    assert not {"steps.jsonl", "requests.jsonl", "summary.json"} & set(files(run.path))  # nothing half-written shows
    assert run.write_summary({"waste": 0.04}) == {"waste": 0.04}
    assert files(run.path) == FINAL
    assert run.complete and run.load_summary() == {"waste": 0.04}
    assert (run.path / "steps.jsonl").read_text() == ('{"live":3,"step":0}\n{"live":4,"step":1}\n{"live":5,"step":2}\n')
    assert (run.path / "requests.jsonl").read_text() == '{"id":7,"ttft_s":0.5}\n'
    config = json.loads((run.path / "config.json").read_text())
    assert config == {"config": CONFIG, "config_hash": CONFIG_SHA, "format": 1, "name": "fig02"}
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["config_hash"] == CONFIG_SHA
    assert summary["rows"]["steps.jsonl"] == {
        "count": 3,
        "sha256": hashlib.sha256((run.path / "steps.jsonl").read_bytes()).hexdigest(),
    }


def test_without_recording_there_are_no_rows(tmp_path):
    run = RunDirectory(tmp_path, "fig02", CONFIG)
    run.write_summary({"waste": 0.04})
    assert files(run.path) == ["config.json", "env.json", "summary.json"]
    assert RunDirectory(tmp_path, "fig02", CONFIG).complete


def test_recording_asks_for_rows_that_an_earlier_run_did_not_keep(tmp_path):
    RunDirectory(tmp_path, "fig02", CONFIG).write_summary({"waste": 0.04})
    run = recorded(tmp_path)
    assert not run.complete
    assert run.write_summary({"waste": 0.05}) == {"waste": 0.05}
    assert files(run.path) == FINAL and run.complete
    assert RunDirectory(tmp_path, "fig02", CONFIG).load_summary() == {"waste": 0.05}


def test_recording_without_rows_is_refused(tmp_path):
    run = RunDirectory(tmp_path, "fig02", CONFIG, record=True)
    run.append_steps([])
    with pytest.raises(ValueError, match=r"no row was ever appended to requests\.jsonl"):
        run.write_summary({})
    run.append_requests([])
    run.write_summary({})
    assert run.complete and (run.path / "steps.jsonl").read_text() == ""


def test_a_complete_run_stands(tmp_path):
    recorded(tmp_path).write_summary({"waste": 0.04})
    again = recorded(tmp_path)
    assert again.complete
    assert again.write_summary({"waste": 0.99}) == {"waste": 0.04}
    assert files(again.path) == FINAL


def test_summary_of_an_unfinished_run_is_an_error(tmp_path):
    run = recorded(tmp_path)
    with pytest.raises(RecordError, match=r"no valid summary\.json: the run is not complete"):
        run.load_summary()
    run.discard()
    assert files(run.path) == ["config.json"]
    assert not RunDirectory(tmp_path / "nowhere", "fig02", CONFIG).complete


def test_leaving_the_with_block_gives_up_what_is_unfinished(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        with recorded(tmp_path) as run:
            assert len(files(run.path)) == 3
            raise KeyboardInterrupt
    assert files(run.path) == ["config.json"]
    with recorded(tmp_path) as run:
        run.write_summary({"waste": 0.04})
    assert files(run.path) == FINAL and run.complete


@pytest.mark.parametrize("name", ["", "a/b", "../up", ".hidden", "a b"])
def test_bad_names_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="a run's name is made of letters"):
        RunDirectory(tmp_path, name, CONFIG)


# -- never two configurations --------------------------------------------------------------------------------------


def test_configurations_have_directories_of_their_own(tmp_path):
    recorded(tmp_path).write_summary({"seed": 0})
    other = recorded(tmp_path, {**CONFIG, "seed": 1})
    assert not other.complete
    other.write_summary({"seed": 1})
    assert len(files(tmp_path)) == 2
    assert RunDirectory(tmp_path, "fig02", CONFIG).load_summary() == {"seed": 0}


@pytest.mark.parametrize("file", ["config.json", "summary.json"])
def test_a_directory_of_another_configuration_is_an_error_naming_both(tmp_path, file):
    recorded(tmp_path).write_summary({})
    run = RunDirectory(tmp_path, "fig02", CONFIG)
    other = {**CONFIG, "seed": 1}
    document = json.loads((run.path / file).read_text())
    document.update({"config": other, "config_hash": config_hash(other)})
    (run.path / file).write_text(json.dumps(document))
    for use in (
        lambda: run.complete,
        run.load_summary,
        lambda: RunDirectory(tmp_path, "fig02", CONFIG).append_steps([]),
    ):
        with pytest.raises(RecordError, match=rf"{config_hash(other)}, this run is {CONFIG_SHA}: .*never mixed"):
            use()


def test_a_config_file_that_was_edited_is_noticed_although_its_hash_was_not(tmp_path):
    recorded(tmp_path).write_summary({})
    run = RunDirectory(tmp_path, "fig02", CONFIG)
    text = (run.path / "config.json").read_text()
    assert '"seed": 0' in text
    (run.path / "config.json").write_text(text.replace('"seed": 0', '"seed": 5'))
    with pytest.raises(RecordError, match="never mixed"):
        _ = run.complete


# -- what a killed run leaves --------------------------------------------------------------------------------------


def test_leftovers_are_removed_and_files_cut_off_are_replaced(tmp_path):
    path = RunDirectory(tmp_path, "fig02", CONFIG).path
    path.mkdir()
    (path / "config.json").write_text('{"config": {"sys')
    (path / "summary.json").write_text("")
    (path / "steps.jsonl").write_text('{"step":0}\n{"st')
    (path / ".steps.jsonl.0123456789ab.tmp").write_text('{"step"')
    run = recorded(tmp_path)
    assert not run.complete
    run.write_summary({"waste": 0.04})
    assert files(path) == FINAL and run.complete
    assert len((path / "steps.jsonl").read_text().splitlines()) == 3


RUN = """
import pathlib, sys, time
from paxkv.record import RunDirectory
run = RunDirectory(pathlib.Path(sys.argv[1]), "fig02", {config!r}, record=True)
run.append_steps({{"step": i, "who": sys.argv[2]}} for i in range(5000))
run.append_requests([{{"who": sys.argv[2]}}])
print("written", flush=True)
sys.stdin.readline()
print(run.write_summary({{"who": sys.argv[2]}})["who"], flush=True)
"""


def start(root: pathlib.Path, who: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(record.__file__).parents[1])}
    command = [sys.executable, "-c", RUN.format(config=CONFIG), str(root), who]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None and process.stdout.readline() == "written\n"
    return process


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate("go\n", timeout=60)
    assert process.returncode == 0
    return output.strip()


def test_a_killed_run_is_cleaned_up_and_a_living_one_is_left_alone(tmp_path):
    living, killed = start(tmp_path, "living"), start(tmp_path, "killed")
    path = RunDirectory(tmp_path, "fig02", CONFIG).path
    assert len(list(path.glob(".*.tmp"))) == 4
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert not RunDirectory(tmp_path, "fig02", CONFIG).complete
    run = recorded(tmp_path)
    assert len(list(path.glob(".*.tmp"))) == 4  # two of the living process, two of this one
    assert finish(living) == "living"
    assert run.write_summary({"who": "late"}) == {"who": "living"}
    assert files(path) == FINAL


def test_two_processes_end_with_one_valid_run(tmp_path):
    both = [start(tmp_path, who) for who in ("a", "b")]
    for process in both:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = {finish(process) for process in both}
    assert len(answers) == 1 and answers < {"a", "b"}
    run = RunDirectory(tmp_path, "fig02", CONFIG, record=True)
    assert run.complete and run.load_summary()["who"] in answers
    assert files(run.path) == FINAL
    rows = [json.loads(line) for line in (run.path / "steps.jsonl").read_text().splitlines()]
    assert len(rows) == 5000 and {row["who"] for row in rows} == answers  # rows and summary of one process


# -- a file system that refuses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        (errno.ENOSPC, "no space left on the device"),
        (errno.EROFS, "the file system is read-only"),
        (errno.EACCES, "no permission to write there"),
    ],
)
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_refusals_name_path_and_rule_and_leave_nothing_half_written(tmp_path, monkeypatch, code, rule, call):
    run = recorded(tmp_path)
    real = getattr(os, call)
    calls = []

    def refuse(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 2:  # env.json is through; the first rows are refused
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    monkeypatch.setattr(os, call, refuse)
    with pytest.raises(RecordError, match=rf"{run.path}: {rule}.*Nothing half-written"):
        run.write_summary({"waste": 0.04})
    monkeypatch.undo()
    assert files(run.path) == ["config.json", "env.json"]
    with pytest.raises(RecordError, match="an earlier write to .* failed"):
        run.append_steps([{"step": 3}])  # rows were lost: going on would record a run with a hole
    fresh = recorded(tmp_path)
    assert fresh.write_summary({"waste": 0.04}) == {"waste": 0.04} and fresh.complete


def test_a_real_size_limit(tmp_path):
    pytest.importorskip("resource", reason="no file size limits on this system")
    script = f"""
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
from paxkv.record import RecordError, RunDirectory
run = RunDirectory({str(tmp_path)!r}, "fig02", {CONFIG!r})
try:
    run.append_steps({{"step": i, "text": "x" * 100}} for i in range(5000))
except RecordError as error:
    print(error)
"""
    environment = {**os.environ, "PYTHONPATH": str(pathlib.Path(record.__file__).parents[1])}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True, timeout=60
    )
    assert "the file would exceed the size limit" in result.stdout and str(tmp_path) in result.stdout
    assert files(RunDirectory(tmp_path, "fig02", CONFIG).path) == ["config.json"]


def test_a_root_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    run = RunDirectory(tmp_path / "file", "fig02", CONFIG)
    assert not run.complete
    with pytest.raises(RecordError, match="a part of the path is a file"):
        run.write_summary({})


def test_a_folder_that_cannot_be_created_is_not_left_behind(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    run = RunDirectory(tmp_path, "fig02", CONFIG)
    with pytest.raises(RecordError, match="no space left"):
        run.append_steps([{"step": 0}])
    assert files(tmp_path) == []


def test_a_bad_row_drops_the_run_in_flight(tmp_path):
    run = recorded(tmp_path)
    with pytest.raises(ValueError, match=r"row 3\.live is nan"):
        run.append_steps([{"step": 3, "live": float("nan")}])
    assert files(run.path) == ["config.json"]
    with pytest.raises(RecordError, match="start the run again"):
        run.write_summary({})


def test_a_bad_summary_leaves_the_run_open(tmp_path):
    run = recorded(tmp_path)
    with pytest.raises(ValueError, match=r"summary\.waste is inf"):
        run.write_summary({"waste": float("inf")})
    assert run.write_summary({"waste": None}) == {"waste": None}
    assert files(run.path) == FINAL


def test_an_atomic_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file.json"
    record.write_atomically(path, "old")

    def refuse(_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        record.write_atomically(path, "new")
    assert path.read_text() == "old" and files(tmp_path) == ["file.json"]


# -- environment ---------------------------------------------------------------------------------------------------


def test_environment_names_versions_and_no_place():
    found = record.environment()
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert found["packages"]["numpy"] == np.__version__
    assert set(found["packages"]) == {"numpy", "jax", "jaxlib", "flax"}
    assert found["paxkv"] == record.paxkv.__version__
    assert isinstance(found["cpu_count"], int)
    text = canonical_json(found)
    assert str(pathlib.Path.home()) not in text or str(pathlib.Path.home()) == "/"
    assert os.uname().nodename not in text
    assert "/" not in text


def test_environment_reads_the_commit_of_its_own_checkout_only(tmp_path):
    package = tmp_path / "site-packages" / "paxkv"
    package.mkdir(parents=True)
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(tmp_path)]
    for arguments in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "start"]):
        subprocess.run([*git, *arguments], check=True, timeout=60)
    assert record._git_state(package) == (None, None)  # installed inside somebody else's repository
    inside = tmp_path / "paxkv"
    inside.mkdir()
    commit, dirty = record._git_state(inside)
    assert commit is not None and len(commit) == 40 and int(commit, 16) > 0 and dirty is False


def test_the_clock_is_not_part_of_a_record(tmp_path):
    first = recorded(tmp_path / "a")
    first.write_summary({"waste": 0.04})
    time.sleep(0.01)
    second = recorded(tmp_path / "b")
    second.write_summary({"waste": 0.04})
    for file in FINAL:
        assert (first.path / file).read_bytes() == (second.path / file).read_bytes()
