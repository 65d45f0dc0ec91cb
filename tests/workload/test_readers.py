"""Readers of traces: column rules, and an error with file, line, value and rule for everything bad."""

from __future__ import annotations

import gzip
import json
import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.workload import (
    Workload,
    WorkloadError,
    read_lengths,
    read_mooncake,
    read_timestamped,
    workload_from_trace,
)


@pytest.fixture
def write(tmp_path):
    """Write a file of this name and content (text or bytes; gzipped if the name says so); return its path."""

    def write(name: str, content: str | bytes):
        data = content.encode() if isinstance(content, str) else content
        path = tmp_path / name
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") and isinstance(content, str) else data)
        return path

    return write


def refused(path, line: int | None, rule: str, read=read_lengths, **options) -> None:
    """Check that reading ``path`` fails with the file, the line and the rule."""
    where = f"{path}: " if line is None else f"{path}, line {line}: "
    with pytest.raises(WorkloadError) as error:
        read(path, **options)
    message = str(error.value)
    assert message.startswith(where), message
    assert re.search(rule, message), message


# -- what is read --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("pairs.csv", "prompt,output\n5,6\n7,8\n"),
        ("pairs.csv.gz", "prompt,output\n5,6\n7,8\n"),
        ("pairs.csv", "\ufeffprompt,output\r\n5,6\r\n\r\n7,8"),
        ("pairs.csv", 'id, Output_Len ,input_tokens\na,"6",5\n"b,c\nd",8, 7\n'),
        ("pairs.csv", "TIMESTAMP,ContextTokens,GeneratedTokens\nx,5,6\ny,7,8\n"),
        ("pairs.jsonl", '{"prompt_tokens": 5, "output_tokens": 6}\n\n{"output_tokens": 8, "prompt_tokens": 7}\n'),
        ("pairs.jsonl.gz", '{"input_length": 5, "output_length": 6, "x": []}\n{"input_length": 7, "output_length": 8}'),
    ],
)
def test_pairs(write, name, content):
    lengths = read_lengths(write(name, content))
    assert (lengths.prompt.tolist(), lengths.output.tolist()) == ([5, 7], [6, 8])
    assert (lengths.name, lengths.source) == ("pairs", f"real:{name}")


def test_columns_by_name(write):
    path = write("alpaca.csv", "prompt_opt,output_opt,prompt,output\n1,2,3,4\n")
    assert read_lengths(path).prompt.tolist() == [3]
    lengths = read_lengths(path, prompt="prompt_opt", output="OUTPUT_OPT", name="opt")
    assert (lengths.prompt.tolist(), lengths.output.tolist(), lengths.name) == ([1], [2], "opt")


def test_gzip_members_and_padding(write):
    parts = [gzip.compress(part) for part in (b"prompt,output\n5,", b"6\n", b"7,8\n")]
    assert len(read_lengths(write("pairs.csv.gz", b"".join(parts) + b"\0" * 512))) == 2
    assert len(read_lengths(write("named_plain.csv", parts[0] + parts[1]))) == 1  # the content decides


@pytest.mark.parametrize(
    ("times", "options", "expected"),
    [
        (["0", "0.25", "0.25", "1e1"], {}, [0, 0.25, 0.25, 10]),
        (["100.5", "101", "101.5", "103"], {}, [0, 0.5, 1, 2.5]),
        (["1000", "1500", "1501", "2000"], {"time_unit": "ms"}, [0, 0.5, 0.501, 1]),
        (["0", "1", "2", "1500000"], {"time_unit": "us"}, [0, 1e-6, 2e-6, 1.5]),
        (
            ["2023-11-16 23:59:59.2500000", "2023-11-16 23:59:59.75", "2023-11-17 00:00:00", "2023-11-17 00:01:00"],
            {},
            [0, 0.5, 0.75, 60.75],
        ),
        (["2024-05-10T00:00:00Z"] * 2 + ["2024-05-10T02:00:01+02:00"] * 2, {}, [0, 0, 1, 1]),
    ],
)
def test_times(write, times, options, expected):
    rows = "".join(f"{time},5,6\n" for time in times)
    workload = read_timestamped(write("trace.csv", "timestamp,prompt,output\n" + rows), **options)
    assert workload.arrival_s.tolist() == expected
    assert workload.source == "real:trace.csv"


def test_mooncake(write):
    records = [
        {"timestamp": 1000, "input_length": 513, "output_length": 3, "hash_ids": [0, 1]},
        {"timestamp": 4000, "input_length": 512, "output_length": 4, "hash_ids": [0]},
    ]
    path = write("mooncake.jsonl.gz", "\n".join(map(json.dumps, records)))
    workload = read_mooncake(path)
    assert workload.arrival_s.tolist() == [0, 3]
    assert (workload.hash_ids, workload.hash_block) == (((0, 1), (0,)), 512)
    assert workload_from_trace(path) == workload
    refused(path, 1, "one id per 256 prompt tokens, 3 for a prompt of 513, got 2", read_mooncake, hash_block=256)


def check_mooncake(traces, name, rows, span_s, ideal_hits, distinct, total):
    workload = read_mooncake(traces / f"mooncake_{name}.jsonl.gz")
    assert len(workload) == rows
    assert workload.arrival_s[-1] == pytest.approx(span_s, abs=0.6)
    seen: set[int] = set()
    hits = blocks = 0
    for ids in workload.hash_ids:
        blocks += len(ids)
        hits += next((i for i, block in enumerate(ids) if block not in seen), len(ids))
        seen.update(ids)
    assert (len(seen), blocks) == (distinct, total)
    assert hits / blocks == pytest.approx(ideal_hits, abs=5e-5)


def test_mooncake_facts_real(shared_data):
    """Twin: test_mooncake."""
    check_mooncake(shared_data / "traces", "conversation", 12_031, 3537, 0.3664, 182_790, 288_500)
    check_mooncake(shared_data / "traces", "synthetic", 3_993, 1022, 0.6396, 43_924, 121_877)


def test_azure_facts_real(shared_data):
    """Twin: test_times."""
    for name, rows, rate, variation in (("conv", 19_366, 5.53, 1.09), ("code", 8_819, 2.57, 13.2)):
        workload = read_timestamped(shared_data / "traces" / f"azure2023_{name}.csv.gz")
        gaps = np.diff(workload.arrival_s)
        assert len(workload) == rows
        assert 1 / gaps.mean() == pytest.approx(rate, abs=0.005)
        assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.005)


# -- what is refused -----------------------------------------------------------------------------------------------

HEADER = "prompt,output\n5,6\n"


@pytest.mark.parametrize(
    ("content", "line", "rule"),
    [
        (
            "prompt,tokens\n5,6\n",
            1,
            r"output column must be named .*num_decode_tokens, got the columns 'prompt', 'tokens'",
        ),
        ("5,6\n7,8\n", 1, "prompt column must be named"),
        ("\n\nprompt,tokens\n5,6\n", 3, "output column must be named"),
        ("prompt,input_len,output\n5,6,7\n", 1, "only one prompt column is allowed, got prompt, input_len"),
        ("prompt,Prompt,output\n5,6,7\n", 1, "column names must differ, got 'prompt' twice"),
        ("prompt,output\n", 1, "at least one row below its header"),
        (HEADER + "7,-8\n", 3, "output must be a whole number in 1 .. 2147483647, got '-8'"),
        (HEADER + "0,8\n", 3, "prompt must be a whole number in 1 .. 2147483647, got '0'"),
        (HEADER + "nan,8\n", 3, "prompt must be a whole number .* got 'nan'"),
        (HEADER + "7.0,8\n", 3, "prompt must be a whole number .* got '7.0'"),
        (HEADER + "1e3,8\n", 3, "got '1e3'"),
        (HEADER + "1_000,8\n", 3, "got '1_000'"),
        (HEADER + "+7,8\n", 3, r"got '\+7'"),
        (HEADER + "seven,8\n", 3, "got 'seven'"),
        (HEADER + "True,8\n", 3, "got 'True'"),
        (HEADER + "٣,8\n", 3, "got '٣'"),
        (HEADER + "²,8\n", 3, "got '²'"),
        (HEADER + ",8\n", 3, "got ''"),
        (HEADER + "2147483648,8\n", 3, "got '2147483648'"),
        (HEADER + "9" * 5000 + ",8\n", 3, "prompt must be a whole number"),
        (HEADER + "\n\n7,8\n7,x\n", 6, "output must be a whole number .* got 'x'"),
        (HEADER + '"7\n",8\n', 4, r"got '7\\n'"),
        (HEADER + "7\n", 3, r"every row must have 2 cells as the header has, got \['7'\]"),
        (HEADER + "7,8,9\n", 3, "every row must have 2 cells"),
        (HEADER + '7,"8\n', 3, "the line must be valid CSV: unexpected end of data"),
        ("", 1, "the file must not be empty, got 0 bytes"),
        ("\n  \n", 1, "the file must not be empty"),
    ],
)
def test_bad_csv(write, content, line, rule):
    refused(write("pairs.csv", content), line, rule)
    refused(write("pairs.csv.gz", content), line, rule)


RECORD = '{"prompt": 5, "output": 6}\n'


@pytest.mark.parametrize(
    ("content", "line", "rule"),
    [
        (RECORD + '{"prompt": 5}\n', 2, "every record needs the field 'output', this one has none"),
        ('{"prompt": 5}\n' + RECORD, 1, "output column must be named"),
        (RECORD + '\n{"prompt": 5, "output": 0}\n', 3, "output must be a whole number .* got 0"),
        (RECORD + '{"prompt": true, "output": 6}\n', 2, "prompt must be a whole number .* got True"),
        (RECORD + '{"prompt": 5.0, "output": 6}\n', 2, "got 5.0"),
        (RECORD + '{"prompt": "5", "output": 6}\n', 2, "got '5'"),
        ('{"prompt": "5", "output": 6}\n' + RECORD, 1, r"got .5.$"),
        (RECORD + '{"prompt": null, "output": 6}\n', 2, "got None"),
        (RECORD + '{"prompt": [5], "output": 6}\n', 2, r"got \[5\]"),
        (RECORD + '{"prompt": 1e400, "output": 6}\n', 2, "got inf"),
        (RECORD + '{"prompt": ' + str(10**40) + ', "output": 6}\n', 2, "got an integer of 133 bits"),
        (RECORD + '{"prompt": NaN, "output": 6}\n', 2, "must be a JSON object: numbers must be finite, got NaN"),
        (RECORD + '{"prompt": ' + "9" * 5000 + ', "output": 6}\n', 2, "the line must be a JSON object"),
        (RECORD + "[5, 6]\n", 2, r"the line must be a JSON object, got '\[5, 6\]'"),
        (RECORD + '{"prompt": 5, "out', 2, "the line must be a JSON object: "),
        (RECORD + "[" * 100_000 + "\n", 2, "the line must be a JSON object: "),
        ("\n", 1, "the file must not be empty"),
    ],
)
def test_bad_jsonl(write, content, line, rule):
    refused(write("pairs.jsonl", content), line, rule)


@pytest.mark.parametrize("read", [read_lengths, read_timestamped, read_mooncake, workload_from_trace])
def test_files_that_are_no_traces(write, tmp_path, read):
    trap = pickle.dumps([(5, 6)])
    for name in ("pairs.pkl", "pairs.pickle", "pairs.pkl.gz", "pairs.csv.pkl", "pairs.npz", "pairs.PKL"):
        refused(write(name, trap), None, "pickles and binary arrays are never read", read)
    refused(tmp_path / "none.csv", None, "the file must be readable: No such file", read)
    refused(tmp_path, None, "the file must be readable: Is a directory", read)
    refused(write("pairs.txt", HEADER), None, "must be named .csv, .csv.gz, .jsonl or .jsonl.gz", read)
    refused(write("pairs.csv", b"prompt,output\n5,6\n\xff\xfe,7\n"), 3, "text must be UTF-8, got the bytes ff fe", read)
    refused(write("pickled.csv", trap), 1, ".", read)  # a pickle under another name is text that breaks a rule


def test_damaged_gzip(write):
    data = gzip.compress(("prompt,output\n" + "".join(f"{i},{i * 7}\n" for i in range(1, 60_000))).encode())
    path = write("pairs.csv.gz", data[: len(data) // 2])
    with pytest.raises(WorkloadError, match="gzip data must be whole: it is truncated") as error:
        read_lengths(path)
    line = int(re.search(r"csv.gz, line (\d+): ", str(error.value))[1])
    assert 10_000 < line < 50_000
    refused(write("pairs.csv.gz", data[:-4]), 60_001, "gzip data must be whole: it is truncated")
    flipped = bytearray(data)
    flipped[-6] ^= 1  # in the checksum
    with pytest.raises(WorkloadError, match="gzip data must be whole: it is damaged .*incorrect data check"):
        read_lengths(write("pairs.csv.gz", bytes(flipped)))
    refused(write("pairs.csv.gz", data[:5]), 1, "gzip data must be whole: it is truncated")
    refused(write("pairs.csv.gz", HEADER.encode()), None, "a .gz file must start with the bytes 1f 8b, got 70 72")
    refused(write("pairs.csv.gz", b""), 1, "the file must not be empty, got 0 bytes")


TRACE = "arrival_s,prompt,output\n0,5,6\n1.5,7,8\n"


@pytest.mark.parametrize(
    ("content", "line", "rule"),
    [
        ("when,prompt,output\n0,5,6\n", 1, "arrival column must be named arrival_s or arrived_at or timestamp"),
        (TRACE + "1.25,9,9\n", 4, "arrival_s must not go back in time, got '1.25' after '1.5'; sort the rows"),
        (TRACE + "nan,9,9\n", 4, "arrival_s must be a finite number, zero or more, got 'nan'"),
        (TRACE + "inf,9,9\n", 4, "got 'inf'"),
        (TRACE + "1e999,9,9\n", 4, "got '1e999'"),
        (TRACE + "-1,9,9\n", 4, "got '-1'"),
        (TRACE + "soon,9,9\n", 4, "got 'soon'"),
        (TRACE + ",9,9\n", 4, "got ''"),
        (TRACE + "2023-11-16 18:15:46,9,9\n", 4, "got '2023-11-16 18:15:46'"),
        (TRACE + "2,9,0\n", 4, "output must be a whole number .* got '0'"),
        (
            "timestamp,prompt,output\n2023-11-16 18:15:46,5,6\n7,5,6\n",
            3,
            "a date with a time, like the first row, got '7'",
        ),
        ("timestamp,prompt,output\n2023-11-16 18:15:46,5,6\n2023-11-16 18:15:45,5,6\n", 3, "must not go back in time"),
        ("timestamp,prompt,output\n2023-13-16 18:15:46,5,6\n", 2, "must be a date with a time"),
        ("timestamp,prompt,output\n2023-11-16 18:15,5,6\n2023-11-16T18:16Z,5,6\n", 3, "must be a date with a time"),
    ],
)
def test_bad_times(write, content, line, rule):
    refused(write("trace.csv", content), line, rule, read_timestamped)


def test_bad_times_in_jsonl(write):
    path = write(
        "trace.jsonl", '{"timestamp": 1, "prompt": 5, "output": 6}\n{"timestamp": true, "prompt": 5, "output": 6}'
    )
    refused(path, 2, "timestamp must be a finite number, zero or more, got True", read_timestamped)
    with pytest.raises(WorkloadError, match="time_unit must be one of s, ms, us, got 'min'"):
        read_timestamped(path, time_unit="min")


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"hash_ids": [1]}, "hash_ids must hold one id per 512 prompt tokens, 2 for a prompt of 600, got 1"),
        ({"hash_ids": [1, -2]}, r"hash_ids must be a list of whole numbers .* got \[1, -2\]"),
        ({"hash_ids": [1, 2.0]}, "hash_ids must be a list of whole numbers"),
        ({"hash_ids": [1, True]}, "hash_ids must be a list of whole numbers"),
        ({"hash_ids": [1, 2**63]}, "hash_ids must be a list of whole numbers"),
        ({"hash_ids": "12"}, "hash_ids must be a list of whole numbers"),
        ({"timestamp": -1}, "timestamp must be a finite number, zero or more, got -1"),
        ({"input_length": 0}, "input_length must be a whole number"),
        ({"output_length": None}, "output_length must be a whole number .* got None"),
    ],
)
def test_bad_mooncake(write, change, rule):
    record = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
    path = write("mooncake.jsonl", json.dumps(record) + "\n" + json.dumps(record | change) + "\n")
    refused(path, 2, rule, read_mooncake)


@pytest.mark.parametrize("column", ["timestamp", "input_length", "output_length", "hash_ids"])
def test_missing_mooncake_fields(write, column):
    record = {"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
    without = {key: value for key, value in record.items() if key != column}
    refused(write("m.jsonl", json.dumps(without)), 1, f"column must be named {column}, got the columns", read_mooncake)
    path = write("m.jsonl", json.dumps(record) + "\n" + json.dumps(without))
    refused(path, 2, f"every record needs the field '{column}'", read_mooncake)


def test_longer_than_the_model(write):
    path = write("pairs.csv", HEADER + "1024,1024\n1024,1025\n")
    assert len(read_lengths(path, max_model_len=2049)) == 3
    rule = r"prompt \+ output must be at most max_model_len=2048, got 1024 \+ 1025; filter the trace or raise"
    refused(path, 4, rule, max_model_len=2048)
    trace = write("trace.csv", TRACE + "2,3000,1\n")
    for read in (read_timestamped, workload_from_trace):
        refused(trace, 4, r"max_model_len=2048, got 3000 \+ 1", read, max_model_len=2048)
    with pytest.raises(WorkloadError, match="max_model_len must be an integer, got '2048'"):
        read_lengths(path, max_model_len="2048")


@given(cells=st.lists(st.text(max_size=8), min_size=2, max_size=2))
def test_a_cell_is_a_number_or_an_error(cells, tmp_path_factory):
    path = tmp_path_factory.mktemp("cells") / "pairs.csv"
    path.write_text("prompt,output\n5,6\n" + ",".join(cells) + "\n", encoding="utf-8", newline="")
    try:
        lengths = read_lengths(path)
    except WorkloadError as error:
        assert str(error).startswith(str(path))
    else:
        assert all(re.fullmatch("[0-9]+", cell.strip(' "\r\n')) for cell in cells) or len(lengths) == 1


# -- a trace as a workload -----------------------------------------------------------------------------------------

TIMED = Workload("t", [2.0, 3.0, 3.0, 6.0], [5, 6, 7, 8], [1, 2, 3, 4], "test", 0, ((1,), (2,), (3,), (4,)), 512)


def test_own_times():
    workload = workload_from_trace(TIMED)
    assert workload.arrival_s.tolist() == [0, 1, 1, 4]
    assert workload.hash_ids == TIMED.hash_ids


def test_stretched_and_cut():
    # three gaps in 4 s: 0.75 requests per second; at 3 per second everything is four times as fast
    faster = workload_from_trace(TIMED, rate=3, name="fast")
    assert faster.arrival_s.tolist() == [0, 0.25, 0.25, 1]
    assert (faster.name, faster.source) == ("fast", "test; stretched to 3/s")
    cut = workload_from_trace(TIMED, rate=3, duration_s=1)
    assert cut.arrival_s.tolist() == [0, 0.25, 0.25]
    assert (cut.prompt_tokens.tolist(), cut.hash_ids) == ([5, 6, 7], ((1,), (2,), (3,)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rate": 0}, "rate must be finite and above zero"),
        ({"rate": float("nan")}, "rate must be finite and above zero"),
        ({"duration_s": 0}, "duration_s must be finite and above zero"),
        ({"max_model_len": 11}, r"max_model_len=11, but request 3 of 't' has 8 \+ 4"),
        ({"trace": Workload("t", [1.0, 1.0], [1, 1], [1, 1], "test"), "rate": 2}, "got 2 requests at one time"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(WorkloadError, match=message):
        workload_from_trace(**({"trace": TIMED} | arguments))
