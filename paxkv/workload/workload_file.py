"""The file of a workload: JSON lines, a header and then one object per request.

    {"format": "paxkv-workload", "version": 1, "name": ..., "source": ..., "requests": 2, "prefix_tokens": 0,
     "hash_block": 0, "content_hash": "..."}
    {"arrival_s": 0.01, "prompt_tokens": 21, "output_tokens": 518}
    {"arrival_s": 0.37, "prompt_tokens": 8, "output_tokens": 66}

Requests have ``hash_ids`` too where ``hash_block`` is not 0. Times are written with every digit they need, so
that a workload read back has the same content hash; the reader checks it.
"""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

from paxkv.workload.table import Table, read_table
from paxkv.workload.textfile import fail, write_bytes_atomically
from paxkv.workload.validate import WorkloadError
from paxkv.workload.workload import Workload

FORMAT = "paxkv-workload"
VERSION = 1
_HEADER = {
    "format": str,
    "version": int,
    "name": str,
    "source": str,
    "requests": int,
    "prefix_tokens": int,
    "hash_block": int,
    "content_hash": str,
}


def write_workload(workload: Workload, path: str | os.PathLike) -> None:
    """Write ``workload`` to a .jsonl or .jsonl.gz file, whole or not at all.

    Raises:
        WorkloadError: another ending, or the file cannot be written.
    """
    path = Path(path)
    if not path.name.endswith((".jsonl", ".jsonl.gz")):
        fail(path, None, f"a workload file must be named .jsonl or .jsonl.gz, got {path.name!r}")
    header = {
        "format": FORMAT,
        "version": VERSION,
        "name": workload.name,
        "source": workload.source,
        "requests": len(workload),
        "prefix_tokens": workload.prefix_tokens,
        "hash_block": workload.hash_block,
        "content_hash": workload.content_hash,
    }
    columns = [workload.arrival_s.tolist(), workload.prompt_tokens.tolist(), workload.output_tokens.tolist()]
    keys = ["arrival_s", "prompt_tokens", "output_tokens"]
    if workload.hash_ids is not None:
        columns.append(list(workload.hash_ids))
        keys.append("hash_ids")
    lines = [json.dumps(header)]
    lines += [json.dumps(dict(zip(keys, request, strict=True))) for request in zip(*columns, strict=True)]
    data = ("\n".join(lines) + "\n").encode()
    write_bytes_atomically(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def read_workload(path: str | os.PathLike) -> Workload:
    """Read a file of ``write_workload`` and check every value and the content hash.

    Raises:
        WorkloadError: names the file, the line, the value and the rule.
    """
    table = read_table(path)
    path = table.path
    header = _header(table)
    requests = table.without_first()
    if header["requests"] != requests.rows:
        fail(
            path, 1, f"requests must be the number of lines below the header, {requests.rows}, got {header['requests']}"
        )
    times = requests.seconds("arrival_s", from_first=False)
    prompts, outputs = requests.integers("prompt_tokens"), requests.integers("output_tokens")
    block = header["hash_block"]
    ids = requests.hash_ids("hash_ids", prompts, block) if block else None
    try:
        workload = Workload(
            header["name"], times, prompts, outputs, header["source"], header["prefix_tokens"], ids, block
        )
    except WorkloadError as error:
        # The columns were checked above, so what is left to be wrong is in the header.
        fail(path, 1, str(error))
    if workload.content_hash != header["content_hash"]:
        fail(
            path,
            1,
            f"content_hash must be that of the requests, {workload.content_hash}, got {header['content_hash']}; "
            "the file was changed after it was written",
        )
    return workload


def _header(table: Table) -> dict[str, Any]:
    """Return the first record, checked to be a header this version reads."""
    if "format" not in table.names:
        table.fail(0, f"a workload file must start with a header with format={FORMAT!r}, got the keys {table.names}")
    header = table.first_record()
    if header["format"] != FORMAT or header.get("version") != VERSION:
        table.fail(
            0,
            f"the header must have format={FORMAT!r} and version={VERSION}, got {header['format']!r} and "
            f"{header.get('version')!r}; write the file again with this version of paxkv",
        )
    for key, kind in _HEADER.items():
        value = header.get(key)
        if type(value) is not kind or (isinstance(value, int) and value < 0):
            wanted = "a whole number, zero or more" if kind is int else "a string"
            table.fail(0, f"the header needs {key} as {wanted}, got {value!r}")
    return header
