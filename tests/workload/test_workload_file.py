"""Workload files: what is written is read back to the same hash, and nothing else is accepted."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.workload import Workload, WorkloadError, build_workload, embedded_lengths, read_workload, write_workload

PLAIN = Workload("w", [0.1, 1 / 3, 2.0], [3, 2, 700], [1, 9, 4], "test", prefix_tokens=2)
HASHED = dataclasses.replace(PLAIN, hash_ids=((7,), (2**63 - 1,), (7, 8)), hash_block=512)


@pytest.mark.parametrize("name", ["w.jsonl", "w.jsonl.gz"])
@pytest.mark.parametrize("workload", [PLAIN, HASHED])
def test_round_trip(tmp_path, name, workload):
    write_workload(workload, tmp_path / name)
    back = read_workload(tmp_path / name)
    assert back.content_hash == workload.content_hash
    for field in dataclasses.fields(Workload):
        ours, theirs = getattr(workload, field.name), getattr(back, field.name)
        assert (ours.tolist() == theirs.tolist()) if hasattr(ours, "tolist") else (ours == theirs)
    assert os.listdir(tmp_path) == [name]


def test_the_file_is_readable_by_others(tmp_path):
    write_workload(PLAIN, tmp_path / "w.jsonl")
    header, *requests = map(json.loads, (tmp_path / "w.jsonl").read_text().splitlines())
    assert header == {
        "format": "paxkv-workload",
        "version": 1,
        "name": "w",
        "source": "test",
        "requests": 3,
        "prefix_tokens": 2,
        "hash_block": 0,
        "content_hash": PLAIN.content_hash,
    }
    assert requests[1] == {"arrival_s": 1 / 3, "prompt_tokens": 2, "output_tokens": 9}


def test_files_are_the_same_each_time(tmp_path):
    for name in ("a.jsonl.gz", "b.jsonl.gz"):
        write_workload(HASHED, tmp_path / name)
    assert (tmp_path / "a.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


def test_a_real_size(tmp_path):
    workload = build_workload(embedded_lengths("sharegpt"), 2, 3600)
    write_workload(workload, tmp_path / "w.jsonl.gz")
    assert read_workload(tmp_path / "w.jsonl.gz").content_hash == workload.content_hash


def edited(header: dict | None = None, request: dict | None = None, drop: str | None = None) -> list[dict]:
    """The lines of ``HASHED``'s file with changes to the header, to the second request, or one key less there."""
    lines = [
        {
            "format": "paxkv-workload",
            "version": 1,
            "name": "w",
            "source": "test",
            "requests": 3,
            "prefix_tokens": 2,
            "hash_block": 512,
            "content_hash": HASHED.content_hash,
        }
    ]
    for i in range(3):
        lines.append(
            {
                "arrival_s": float(HASHED.arrival_s[i]),
                "prompt_tokens": int(HASHED.prompt_tokens[i]),
                "output_tokens": int(HASHED.output_tokens[i]),
                "hash_ids": list(HASHED.hash_ids[i]),
            }
        )
    lines[0].update(header or {})
    lines[2].update(request or {})
    lines[2].pop(drop, None)
    return lines


def write_lines(path, lines: list[dict]):
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def test_the_lines_unchanged_are_fine(tmp_path):
    assert read_workload(write_lines(tmp_path / "w.jsonl", edited())) == HASHED


@pytest.mark.parametrize(
    ("lines", "line", "rule"),
    [
        (edited({"version": 2}), 1, "must have format='paxkv-workload' and version=1, got 'paxkv-workload' and 2"),
        (edited({"format": "x"}), 1, "got 'x' and 1"),
        (edited({"requests": 4}), 1, "requests must be the number of lines below the header, 3, got 4"),
        (edited({"requests": True}), 1, "header needs requests as a whole number, zero or more, got True"),
        (edited({"prefix_tokens": -1}), 1, "header needs prefix_tokens as a whole number, zero or more, got -1"),
        (edited({"prefix_tokens": 3}), 1, "a shared prefix must fit in every prompt"),
        (edited({"prefix_tokens": 1}), 1, "content_hash must be that of the requests"),
        (edited({"name": 5}), 1, "header needs name as a string, got 5"),
        (edited({"name": "  "}), 1, "Workload.name must be a non-empty string"),
        (
            edited({"hash_block": 256}),
            4,
            "hash_ids must hold one id per 256 prompt tokens, 3 for a prompt of 700, got 2",
        ),
        (edited({"hash_block": 0}), 1, "content_hash must be that of the requests"),
        (edited({"content_hash": "0" * 64}), 1, "content_hash must be that of the requests, [0-9a-f]{64}, got 0000"),
        (edited({"content_hash": None}), 1, "header needs content_hash as a string, got None"),
        (edited(request={"output_tokens": 10}), 1, "the file was changed after it was written"),
        (edited(request={"output_tokens": 0}), 3, "output_tokens must be a whole number in 1 .* got 0"),
        (edited(request={"prompt_tokens": 2.0}), 3, "prompt_tokens must be a whole number in 1 .* got 2.0"),
        (edited(request={"arrival_s": 5}), 4, "arrival_s must not go back in time, got 2.0 after 5"),
        (edited(request={"arrival_s": -1}), 3, "arrival_s must be a finite number, zero or more, got -1"),
        (edited(request={"arrival_s": "1"}), 3, "arrival_s must be a finite number, zero or more, got '1'"),
        (edited(request={"hash_ids": [7, 8]}), 3, "hash_ids must hold one id per 512"),
        (edited(drop="arrival_s"), 3, "every record needs the field 'arrival_s'"),
        (edited(drop="hash_ids"), 3, "every record needs the field 'hash_ids'"),
        (edited()[:1], 1, "at least one record below the header"),
        (edited()[1:], 1, "must start with a header with format='paxkv-workload', got the keys"),
    ],
)
def test_changed_files_are_refused(tmp_path, lines, line, rule):
    path = write_lines(tmp_path / "w.jsonl", lines)
    with pytest.raises(WorkloadError, match=rule) as error:
        read_workload(path)
    assert str(error.value).startswith(f"{path}, line {line}: ")


def test_truncated_files_are_refused(tmp_path):
    write_workload(HASHED, tmp_path / "w.jsonl.gz")
    data = (tmp_path / "w.jsonl.gz").read_bytes()
    (tmp_path / "w.jsonl.gz").write_bytes(data[:-20])
    with pytest.raises(WorkloadError, match="gzip data must be whole"):
        read_workload(tmp_path / "w.jsonl.gz")
    text = gzip.decompress(data).decode()
    (tmp_path / "w.jsonl").write_text(text[: text.rindex('{"arrival_s"')])
    with pytest.raises(WorkloadError, match="requests must be the number of lines below the header, 2, got 3"):
        read_workload(tmp_path / "w.jsonl")


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    write_workload(PLAIN, tmp_path / "w.jsonl")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WorkloadError, match="w.jsonl: the file must be writable: No space left"):
        write_workload(HASHED, tmp_path / "w.jsonl")
    assert read_workload(tmp_path / "w.jsonl") == PLAIN
    assert os.listdir(tmp_path) == ["w.jsonl"]


def test_bad_paths_are_refused(tmp_path):
    with pytest.raises(WorkloadError, match="must be named .jsonl or .jsonl.gz, got 'w.csv'"):
        write_workload(PLAIN, tmp_path / "w.csv")
    with pytest.raises(WorkloadError, match="the file must be writable: No such file"):
        write_workload(PLAIN, tmp_path / "none" / "w.jsonl")
    (tmp_path / "pairs.csv").write_text("prompt,output\n5,6\n")
    with pytest.raises(WorkloadError, match="must start with a header"):
        read_workload(tmp_path / "pairs.csv")


@given(times=st.lists(st.floats(0, 1e15), min_size=1, max_size=10))
def test_any_time_survives(times, tmp_path_factory):
    workload = Workload("w", sorted(times), [1] * len(times), [1] * len(times), "test")
    path = tmp_path_factory.mktemp("times") / "w.jsonl"
    write_workload(workload, path)
    assert read_workload(path).content_hash == workload.content_hash
