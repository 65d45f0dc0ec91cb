"""Text files, plain or gzipped, read whole, with errors that name the file and the line."""

from __future__ import annotations

import contextlib
import os
import zlib
from pathlib import Path
from typing import NoReturn

from paxkv.workload.validate import WorkloadError

_GZIP_MAGIC = b"\x1f\x8b"
_PICKLE_SUFFIXES = {".pkl", ".pickle", ".pk", ".joblib", ".pt", ".pth", ".npy", ".npz"}


def fail(path: str | os.PathLike, line: int | None, message: str) -> NoReturn:
    """Raise ``WorkloadError`` for a line (counted from 1) of a file, or for the file as a whole."""
    where = os.fspath(path) if line is None else f"{os.fspath(path)}, line {line}"
    raise WorkloadError(f"{where}: {message}")


def read_text(path: str | os.PathLike) -> str:
    """Return the text of a UTF-8 file, decompressed if it is gzipped.

    Raises:
        WorkloadError: no such file, a pickle, not UTF-8, truncated or corrupt gzip, nothing inside.
    """
    path = Path(path)
    # Reading a pickle runs whatever code it holds, so a file that may be one is refused before it is opened.
    if _PICKLE_SUFFIXES & {suffix.lower() for suffix in path.suffixes}:
        fail(path, None, f"pickles and binary arrays are never read, got {path.name!r}; convert it to .csv or .jsonl")
    try:
        data = path.read_bytes()
    except OSError as error:
        fail(path, None, f"the file must be readable: {error.strerror or error}")
    if data[:2] == _GZIP_MAGIC:
        data = _gunzip(path, data)
    elif path.suffix == ".gz" and data:
        fail(
            path, None, f"a .gz file must start with the bytes 1f 8b, got {data[:2].hex(' ')}; compress it or rename it"
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        fail(path, line, f"text must be UTF-8, got the bytes {data[error.start : error.start + 4].hex(' ')}")
    if not text.strip():
        fail(path, 1, f"the file must not be empty, got {len(data)} bytes without text")
    return text


def _gunzip(path: Path, data: bytes) -> bytes:
    """Decompress one or several gzip members; say how far it got if the data ends early or is damaged."""
    parts: list[bytes] = []

    def broken(why: str) -> NoReturn:
        good = b"".join(parts)
        fail(
            path,
            good.count(b"\n") + 1,
            f"gzip data must be whole: {why} after {len(good)} decompressed bytes; fetch the file again",
        )

    while data:
        member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        try:
            # Fed in pieces, so that what came before the damage is known.
            for start in range(0, len(data), 1 << 16):
                parts.append(member.decompress(data[start : start + (1 << 16)]))
                if member.eof:
                    data = member.unused_data + data[start + (1 << 16) :]
                    break
        except zlib.error as error:
            broken(f"it is damaged ({error})")
        if not member.eof:
            broken("it is truncated, the end-of-stream mark is missing")
        data = data.lstrip(b"\0")  # zero padding after the last member is allowed, as gzip does
    return b"".join(parts)


def write_bytes_atomically(path: str | os.PathLike, data: bytes) -> None:
    """Write ``data`` to a neighbour of ``path`` and rename it, so that no reader sees half a file."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        fail(path, None, f"the file must be writable: {error.strerror or error}")
    finally:
        with contextlib.suppress(OSError):  # gone already if all went well
            temporary.unlink()
