"""Readers of request traces: pairs of lengths, timestamped requests, Mooncake records.

Column rules (names are compared without case; exactly one name of a row must be there, or pass the name):

============  =====================================================================================
prompt        prompt, prompt_tokens, prompt_len, input_tokens, input_length, input_len, ContextTokens,
              num_prefill_tokens
output        output, output_tokens, output_len, output_length, GeneratedTokens, num_decode_tokens
arrival       arrival_s, arrived_at, timestamp
hash ids      hash_ids (.jsonl only)
============  =====================================================================================

Lengths are whole numbers of tokens, at least 1. Times are numbers (seconds unless ``time_unit`` says otherwise)
or dates with a time, sorted; the first request arrives at 0.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from paxkv.workload import validate
from paxkv.workload.table import Table, read_table
from paxkv.workload.validate import require
from paxkv.workload.workload import Lengths, Workload

PROMPT_NAMES = (
    "prompt",
    "prompt_tokens",
    "prompt_len",
    "input_tokens",
    "input_length",
    "input_len",
    "ContextTokens",
    "num_prefill_tokens",
)
OUTPUT_NAMES = ("output", "output_tokens", "output_len", "output_length", "GeneratedTokens", "num_decode_tokens")
ARRIVAL_NAMES = ("arrival_s", "arrived_at", "timestamp")
MOONCAKE_BLOCK = 512

TimeUnit = Literal["s", "ms", "us"]
_TICKS_PER_S = {"s": 1, "ms": 1000, "us": 1_000_000}


def read_lengths(
    path: str | os.PathLike,
    *,
    prompt: str | None = None,
    output: str | None = None,
    name: str | None = None,
    max_model_len: int | None = None,
) -> Lengths:
    """Read pairs of prompt and output lengths from a .csv or .jsonl file, in file order.

    Args:
        prompt, output: column names, where the rules above do not find them.
        name: name of the data set; by default the file's name up to its first dot.
        max_model_len: if given, a pair with prompt + output above it is an error.

    Raises:
        WorkloadError: names the file, the line, the value and the rule.
    """
    table = read_table(path)
    prompts, outputs = _lengths(table, prompt, output, max_model_len)
    return Lengths(name or _stem(table.path), prompts, outputs, f"real:{table.path.name}")


def read_timestamped(
    path: str | os.PathLike,
    *,
    arrival: str | None = None,
    prompt: str | None = None,
    output: str | None = None,
    time_unit: TimeUnit = "s",
    name: str | None = None,
    max_model_len: int | None = None,
) -> Workload:
    """Read requests with their own arrival times (Azure's public traces are of this kind).

    Args:
        time_unit: unit of a numeric time column; dates need none.
        arrival, prompt, output, name, max_model_len: as in ``read_lengths``.
    """
    require(time_unit in get_args(TimeUnit), f"time_unit must be one of {', '.join(_TICKS_PER_S)}, got {time_unit!r}")
    workload = _timestamped(read_table(path), arrival, prompt, output, _TICKS_PER_S[time_unit], max_model_len)
    return dataclasses.replace(workload, name=name or workload.name)


def _timestamped(
    table: Table,
    arrival: str | None = None,
    prompt: str | None = None,
    output: str | None = None,
    ticks_per_s: int = 1,
    max_model_len: int | None = None,
) -> Workload:
    column = table.find(arrival, ARRIVAL_NAMES, "arrival")
    prompts, outputs = _lengths(table, prompt, output, max_model_len)
    times = table.seconds(column, ticks_per_s=ticks_per_s)
    return Workload(_stem(table.path), times, prompts, outputs, f"real:{table.path.name}")


def read_mooncake(
    path: str | os.PathLike,
    *,
    hash_block: int = MOONCAKE_BLOCK,
    name: str | None = None,
    max_model_len: int | None = None,
) -> Workload:
    """Read Mooncake's records: timestamp in milliseconds, input_length, output_length, hash_ids.

    Args:
        hash_block: prompt tokens of one hash id; every started block has one.
    """
    block = validate.whole_number(hash_block, "hash_block", least=1)
    workload = _mooncake(read_table(path), block, max_model_len)
    return dataclasses.replace(workload, name=name or workload.name)


def _mooncake(table: Table, block: int, max_model_len: int | None) -> Workload:
    arrival, ids = table.find("timestamp", (), "arrival"), table.find("hash_ids", (), "hash id")
    prompts, outputs = _lengths(table, "input_length", "output_length", max_model_len)
    return Workload(
        _stem(table.path),
        table.seconds(arrival, ticks_per_s=_TICKS_PER_S["ms"]),
        prompts,
        outputs,
        f"real:{table.path.name}",
        hash_ids=table.hash_ids(ids, prompts, block),
        hash_block=block,
    )


def workload_from_trace(
    trace: Workload | str | os.PathLike,
    *,
    rate: float | None = None,
    duration_s: float | None = None,
    name: str | None = None,
    max_model_len: int | None = None,
) -> Workload:
    """Return a trace's requests at their own times, if asked for at another rate or for a shorter time.

    Args:
        trace: a workload, or a file: with ``hash_ids`` read as Mooncake's, else as a timestamped trace.
        rate: mean requests per second wanted; the gaps are all stretched by one factor. The mean rate of a
            trace is (requests - 1) / (last arrival - first arrival).
        duration_s: requests that arrive, after stretching, at or after this time are left out.
        name: name of the workload; by default the trace's.
        max_model_len: if given, a request with prompt + output above it is an error.
    """
    if isinstance(trace, Workload):
        workload = trace
    else:
        table = read_table(trace)
        if table.has("hash_ids"):
            workload = _mooncake(table, MOONCAKE_BLOCK, max_model_len)
        else:
            workload = _timestamped(table, max_model_len=max_model_len)
    times = workload.arrival_s - workload.arrival_s[0]
    notes = []
    if rate is not None:
        wanted = validate.positive_number(rate, "rate", "requests per second")
        require(
            times[-1] > 0,
            f"rate={rate} needs a trace that spans some time, got {len(times)} requests at one time",
        )
        times = times * ((len(times) - 1) / times[-1] / wanted)
        notes.append(f"stretched to {wanted:g}/s")
    count = len(times)
    if duration_s is not None:
        count = int(np.searchsorted(times, validate.positive_number(duration_s, "duration_s", "seconds")))
        notes.append(f"first {duration_s:g} s")
    workload = dataclasses.replace(
        workload,
        name=name or workload.name,
        arrival_s=times[:count],
        prompt_tokens=workload.prompt_tokens[:count],
        output_tokens=workload.output_tokens[:count],
        hash_ids=workload.hash_ids and workload.hash_ids[:count],
        source="; ".join([workload.source, *notes]),
    )
    return workload if max_model_len is None else workload.require_fit(max_model_len)


def _lengths(
    table: Table, prompt: str | None, output: str | None, max_model_len: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Read both length columns, and check them against the model's limit."""
    prompt_column = table.find(prompt, PROMPT_NAMES, "prompt")
    output_column = table.find(output, OUTPUT_NAMES, "output")
    prompts, outputs = table.integers(prompt_column), table.integers(output_column)
    if max_model_len is not None:
        limit = validate.whole_number(max_model_len, "max_model_len", least=2)
        over = np.flatnonzero(prompts + outputs > limit)
        if over.size:
            row = int(over[0])
            table.fail(
                row,
                f"{prompt_column} + {output_column} must be at most max_model_len={limit}, got {prompts[row]} + "
                f"{outputs[row]}; filter the trace or raise max_model_len",
            )
    return prompts, outputs


def _stem(path: Path) -> str:
    return path.name.partition(".")[0]
