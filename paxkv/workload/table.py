"""Tables of numbers from .csv and .jsonl files (plain or gzipped), checked cell by cell.

A .csv file has a header row; a .jsonl file has one object per line. Column names are compared without case.
Blank lines are skipped. Nothing is rounded or guessed: a cell that breaks its column's rule is an error.
"""

from __future__ import annotations

import csv
import datetime
import io
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from paxkv.workload.textfile import fail, read_text
from paxkv.workload.validate import MAX_TOKENS, WorkloadError
from paxkv.workload.workload import MAX_HASH_ID

_DECIMAL = re.compile(r"[0-9]+(\.[0-9]*)?([eE][+-]?[0-9]+)?", re.ASCII)
_MISSING = object()


class Table:
    """Named columns of one file; see ``read_table``.

    Attributes:
        path: the file, for messages.
        names: column names in file order (of a .jsonl file, the keys of its first record).
        rows: number of records.
        text: whether cells are text to be parsed (.csv) or decoded values (.jsonl).
        header_line: the line of the names.
    """

    def __init__(
        self,
        path: Path,
        names: list[str],
        rows: int,
        column: Callable[[str], list[Any]],
        line_of: Callable[[int], int],
        *,
        text: bool,
        header_line: int,
    ):
        self.path, self.names, self.rows = path, names, rows
        self.text, self.header_line = text, header_line
        self._column, self._line_of = column, line_of

    def fail(self, row: int, message: str) -> NoReturn:
        """Raise ``WorkloadError`` for record ``row``, naming its line."""
        fail(self.path, self._line_of(row), message)

    def find(self, wanted: str | None, known: tuple[str, ...], role: str) -> str:
        """Return the name of the column that holds ``role``.

        Args:
            wanted: the name the caller asks for; None looks for the ``known`` names, of which exactly one
                must be there.
        """
        lower = {name.lower(): name for name in self.names}
        candidates = known if wanted is None else (wanted,)
        found = [lower[name.lower()] for name in candidates if name.lower() in lower]
        if len(found) == 1:
            return found[0]
        if found:
            rule, got, change = (
                f"only one {role} column is allowed",
                ", ".join(found),
                "pass the name of the one to use",
            )
        else:
            rule = f"the {role} column must be named {' or '.join(candidates)}"
            got, change = f"the columns {', '.join(map(repr, self.names))}", "rename it or pass its name"
        fail(self.path, self.header_line, f"{rule}, got {got}; {change}")

    def has(self, name: str) -> bool:
        """Whether the first record or the header has the column ``name``."""
        return name.lower() in (other.lower() for other in self.names)

    def first_record(self) -> dict[str, Any]:
        """Return the first record as a mapping from names to values."""
        return {name: self._column(name)[0] for name in self.names}

    def without_first(self) -> Table:
        """Return the records below the first, whose names they need not share."""
        if self.rows < 2:
            self.fail(0, "the file must hold at least one record below the header, got none")
        return Table(
            self.path,
            [],
            self.rows - 1,
            lambda name: self._column(name)[1:],
            lambda row: self._line_of(row + 1),
            text=self.text,
            header_line=self.header_line,
        )

    def values(self, name: str) -> list[Any]:
        """Return a column as it stands: strings of a .csv file, decoded values of a .jsonl file."""
        values = self._column(name)
        if any(value is _MISSING for value in values):
            row = next(i for i, v in enumerate(values) if v is _MISSING)
            self.fail(row, f"every record needs the field {name!r}, this one has none")
        return values

    def integers(self, name: str, *, least: int = 1) -> np.ndarray:
        """Return a column of whole numbers ``least .. MAX_TOKENS``, int64 [rows]."""
        values = self.values(name)
        if _all_digits(values) if self.text else _all_ints(values):
            numbers = np.array(list(map(int, values)), dtype=np.int64)
            if numbers.min() >= least and numbers.max() <= MAX_TOKENS:
                return numbers
        # Slow path: say which cell it is.
        for row, value in enumerate(values):
            whole = _all_digits([value]) if self.text else _all_ints([value])
            if not (whole and least <= int(value) <= MAX_TOKENS):
                self.fail(row, f"{name} must be a whole number in {least} .. {MAX_TOKENS}, got {_short(value)}")
        raise AssertionError("the fast and the slow check of a column disagree")

    def seconds(self, name: str, *, ticks_per_s: int = 1, from_first: bool = True) -> np.ndarray:
        """Return a column of times in seconds, float64 [rows].

        A cell is a number, zero or more, or a date with a time (``2023-11-16 18:15:46.68``), the same kind
        in all rows. Times must not go back.

        Args:
            ticks_per_s: unit of numbers.
            from_first: count from the first row, so that it is 0 (always so for dates).
        """
        values = self.values(name)
        dates = isinstance(values[0], str) and ":" in values[0]
        parse = _date_seconds if dates else _text_seconds if self.text else _number_seconds
        times: list[float] = []
        for row, value in enumerate(values):
            try:
                time = parse(value, values[0])
            except (ValueError, TypeError) as error:
                kind = "a date with a time, like the first row" if dates else "a finite number, zero or more"
                self.fail(row, f"{name} must be {kind}, got {_short(value)} ({error})")
            if times and time < times[-1]:
                self.fail(
                    row, f"{name} must not go back in time, got {value!r} after {values[row - 1]!r}; sort the rows"
                )
            times.append(time)
        return (np.array(times) - (times[0] if from_first else 0)) / ticks_per_s

    def hash_ids(self, name: str, prompts: np.ndarray, block: int) -> tuple[tuple[int, ...], ...]:
        """Return a column of id lists, one id per started block of ``block`` tokens of each of ``prompts``."""
        values = self.values(name)
        for row, (ids, length) in enumerate(zip(values, prompts.tolist(), strict=True)):
            if not isinstance(ids, list) or any(type(i) is not int or not 0 <= i <= MAX_HASH_ID for i in ids):
                self.fail(row, f"{name} must be a list of whole numbers in 0 .. 2**63 - 1, got {str(ids)[:60]}")
            if len(ids) != -(-length // block):
                self.fail(
                    row,
                    f"{name} must hold one id per {block} prompt tokens, {-(-length // block)} for a prompt of "
                    f"{length}, got {len(ids)}",
                )
        return tuple(map(tuple, values))


def _all_digits(cells: list[str]) -> bool:
    return "".join(cells).isascii() and all(map(str.isdigit, cells)) and max(map(len, cells)) <= 18


def _all_ints(values: list[Any]) -> bool:
    return all(type(value) is int and abs(value) < 10**18 for value in values)


def _short(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= 10**40:
        return f"an integer of {value.bit_length()} bits"
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _text_seconds(value: str, first: str) -> float:
    if _DECIMAL.fullmatch(value) is None:
        raise ValueError("not a plain decimal number")
    return _number_seconds(float(value), first)


def _number_seconds(value: Any, first: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError(f"a {type(value).__name__}")
    if not 0 <= value <= 1e15:
        raise ValueError("outside 0 .. 1e15")
    return float(value)


def _date_seconds(value: Any, first: Any) -> float:
    """Seconds from the date ``first`` to the date ``value``."""
    return (datetime.datetime.fromisoformat(value) - datetime.datetime.fromisoformat(first)).total_seconds()


def read_table(path: str | os.PathLike) -> Table:
    """Read a .csv, .csv.gz, .jsonl or .jsonl.gz file.

    Raises:
        WorkloadError: the name has none of these endings, or what ``read_text`` refuses, no header, no
            records, a row of another width than the header, a line that is no JSON object.
    """
    path = Path(path)
    kind = path.name.removesuffix(".gz").rpartition(".")[2].lower()
    if kind not in ("csv", "jsonl"):
        # read_text first: it has a better message for a pickle and for a missing file.
        read_text(path)
        fail(path, None, f"a trace must be named .csv, .csv.gz, .jsonl or .jsonl.gz, got {path.name!r}")
    text = read_text(path)
    return _csv_table(path, text) if kind == "csv" else _jsonl_table(path, text)


def _csv_table(path: Path, text: str) -> Table:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    try:
        rows = [row for row in reader if row]
    except csv.Error as error:
        fail(path, reader.line_num, f"the line must be valid CSV: {error}")

    def line_of(row: int) -> int:
        again = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
        lines = (again.line_num for cells in again if cells)
        return next(line for i, line in enumerate(lines) if i == row + 1)

    header, *records = rows
    header = [name.strip() for name in header]
    lower = [name.lower() for name in header]
    twice = next((name for name in lower if lower.count(name) > 1), None)
    if twice is not None:
        fail(path, line_of(-1), f"column names must differ, got {twice!r} twice")
    if not records:
        fail(path, line_of(-1), f"the file must hold at least one row below its header, got the header {header} only")
    width = len(header)
    if set(map(len, records)) != {width}:
        row = next(i for i, cells in enumerate(records) if len(cells) != width)
        fail(path, line_of(row), f"every row must have {width} cells as the header has, got {records[row]}")
    at = {name: i for i, name in enumerate(header)}

    def column(name: str) -> list[str]:
        return [cells[at[name]] for cells in records]

    return Table(path, header, len(records), column, line_of, text=True, header_line=line_of(-1))


def _jsonl_table(path: Path, text: str) -> Table:
    records: list[dict[str, Any]] = []
    lines: list[int] = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        records.append(decode_object(path, number, line))
        lines.append(number)
    names = list(records[0])

    def column(name: str) -> list[Any]:
        return [record.get(name, _MISSING) for record in records]

    return Table(path, names, len(records), column, lines.__getitem__, text=False, header_line=lines[0])


def decode_object(path: str | os.PathLike, line: int, text: str) -> dict[str, Any]:
    """Decode one line as a JSON object; NaN and Infinity, which are not JSON, are refused."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        fail(path, line, f"the line must be a JSON object: {error}; got {text[:60]!r}")
    if not isinstance(value, dict):
        fail(path, line, f"the line must be a JSON object, got {text[:60]!r}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise WorkloadError(f"numbers must be finite, got {name}")
