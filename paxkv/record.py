"""Run directories: what a run was, where it ran, what came out; written atomically, never half.

One run is one directory ``<root>/<name>-<first 12 digits of the config's hash>``:

    config.json     the configuration and its hash (canonical JSON)
    env.json        versions and platform, no host names and no absolute paths
    steps.jsonl     one row per step       (with recording on)
    requests.jsonl  one row per request    (with recording on)
    summary.json    the results; written LAST: a run counts as complete when it exists

        absent ──first write──▶ started ──write_summary──▶ complete
                                  │  ▲
                             kill │  │ next run removes the leftovers and starts over
                                  ▼  │
                                 stale

Files appear under their final name by temporary file, fsync and ``os.replace``. Two processes that run the same
configuration each stream rows to private temporary files; whoever finishes first stands, the other adopts its
summary. That uses ``flock``; where the system has none, the last writer stands and leftovers stay until removed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import re
import secrets
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any

import numpy as np

import paxkv
from paxkv.config import require

try:
    import fcntl
except ImportError:  # Windows has no flock; see the module's docstring
    fcntl = None

FORMAT = 1
STEPS, REQUESTS = "steps.jsonl", "requests.jsonl"
_HASH_DIGITS = 12
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class RecordError(RuntimeError):
    """A run directory that cannot be written, or that belongs to another configuration."""


def plain(value: Any, where: str = "value") -> Any:
    """``value`` as JSON types: dataclasses become objects, tuples and arrays lists, numpy scalars Python numbers.

    Raises:
        ValueError: NaN or infinity (write None for "no value"), a key that is no string, or an unknown type.
            The message names the place, such as ``summary.latency.p99``.
    """
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        require(math.isfinite(value), f"{where} is {value}: JSON has no NaN or infinity; write None for 'no value'")
        return float(value)
    if isinstance(value, np.bool_):
        return bool(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        for key in value:
            require(isinstance(key, str), f"{where} has the key {key!r}: keys must be strings; use str(key)")
        return {key: plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return plain(value.tolist(), where)
    if isinstance(value, (list, tuple)):
        return [plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise ValueError(f"{where} is a {type(value).__name__}: records hold numbers, strings, lists and objects only")


def canonical_json(value: Any, where: str = "value") -> str:
    """One text for one value: sorted keys, no spaces, ASCII, shortest float that reads back equal.

    ``1`` and ``1.0`` are different texts on purpose. Raises what :func:`plain` raises.
    """
    return json.dumps(plain(value, where), sort_keys=True, separators=(",", ":"), allow_nan=False)


def config_hash(config: Any) -> str:
    """SHA-256 (64 hex digits) of the canonical JSON of a configuration; equal on every machine and Python."""
    return hashlib.sha256(canonical_json(config, "config").encode()).hexdigest()


def environment() -> dict[str, Any]:
    """Versions and platform of this process. No host name, user name or absolute path; nothing imports jax."""
    commit, dirty = _git_state(pathlib.Path(paxkv.__file__).parent)
    return {
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "paxkv": paxkv.__version__,
        "packages": {name: _version(name) for name in ("numpy", "jax", "jaxlib", "flax")},
        "git_commit": commit,
        "git_dirty": dirty,
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state(package_dir: pathlib.Path) -> tuple[str | None, bool | None]:
    # Only when the checkout is ours: an installed package may lie inside somebody else's repository.
    if not (package_dir.parent / ".git").exists():
        return None, None
    answers = []
    for arguments in (("rev-parse", "HEAD"), ("--no-optional-locks", "status", "--porcelain", "-uno")):
        try:
            done = subprocess.run(
                ["git", *arguments], cwd=package_dir, capture_output=True, text=True, timeout=10, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None, None
        answers.append(done.stdout.strip())
    return answers[0], bool(answers[1])


class RunDirectory:
    """The directory of one run. Nothing is written before the first ``append_*`` or :meth:`write_summary`.

        with RunDirectory(root, "fig02-orca_max", config, record=True) as run:
            if not run.complete:
                run.append_steps(rows)
                run.append_requests(rows)
                run.write_summary({...})
            summary = run.load_summary()

    Attributes:
        path: ``<root>/<name>-<12 digits of the hash>``.
        config: the configuration as JSON types.
        hash: :func:`config_hash` of it.
        record: whether a complete run must hold the rows of steps and requests.

    Raises:
        ValueError: a bad name, or a configuration that is not JSON.
        RecordError: on use, when the directory holds another configuration or cannot be written.
    """

    def __init__(self, root: str | os.PathLike[str], name: str, config: Any, *, record: bool = False) -> None:
        require(
            _NAME.fullmatch(name) is not None,
            f"a run's name is made of letters, digits, '.', '_' and '-', got {name!r}; rename the run",
        )
        self.name = name
        self.config = plain(config, "config")
        self.hash = config_hash(self.config)
        self.record = record
        self.path = pathlib.Path(root) / f"{name}-{self.hash[:_HASH_DIGITS]}"
        self._rows: dict[str, _RowFile] = {}
        self._failed = False

    @property
    def complete(self) -> bool:
        """Whether a valid summary of this configuration (and its rows, with ``record``) is there."""
        document = self._read_summary()
        return document is not None and self._suffices(document)

    def load_summary(self) -> dict[str, Any]:
        """The results that :meth:`write_summary` stored. ``RecordError`` where the run is not complete."""
        document = self._read_summary()
        if document is None:
            raise RecordError(f"{self.path} holds no valid summary.json: the run is not complete; run it again")
        return document["summary"]

    def append_steps(self, rows: Iterable[Any]) -> None:
        """Adds rows (mappings or dataclasses) to ``steps.jsonl``; they appear there with the summary."""
        self._append(STEPS, rows)

    def append_requests(self, rows: Iterable[Any]) -> None:
        """Adds rows to ``requests.jsonl``; they appear there with the summary."""
        self._append(REQUESTS, rows)

    def write_summary(self, summary: Mapping[str, Any]) -> dict[str, Any]:
        """Completes the run and returns the summary that stands: another process's, if that one was faster.

        Raises:
            ValueError: NaN in the summary, or ``record`` without any call of ``append_steps``/``append_requests``.
            RecordError: the directory cannot be written; what this process had written is removed.
        """
        self._check_usable()
        for file in (STEPS, REQUESTS) if self.record else ():
            require(
                file in self._rows,
                f"{self.path}: record=True but no row was ever appended to {file}; call append_* (an empty list "
                "counts) or build RunDirectory with record=False",
            )
        body = plain(summary, "summary")
        with self._writing(), self._locked():
            standing = self._read_summary()
            if standing is not None and self._suffices(standing):
                self._drop_rows()
                return standing["summary"]
            self._write("env.json", environment())
            rows = {file: writer.publish(self.path / file) for file, writer in sorted(self._rows.items())}
            self._rows.clear()
            document = {"format": FORMAT, "config_hash": self.hash, "rows": rows, "summary": body}
            _sync_directory(self.path)  # rows and configuration are on disk before the summary says so
            self._write("summary.json", document)
            _sync_directory(self.path)
        return body

    def discard(self) -> None:
        """Gives up a run in flight: removes this object's temporary files, keeps what is complete."""
        self._drop_rows()

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.discard()

    # -- reading ------------------------------------------------------------------------------------------------

    def _read_summary(self) -> dict[str, Any] | None:
        self._check_config()
        document = _read_json(self.path / "summary.json")
        if not isinstance(document, dict) or not isinstance(document.get("summary"), dict):
            return None
        self._check_hash("summary.json", document.get("config_hash"))
        return document

    def _suffices(self, document: dict[str, Any]) -> bool:
        if not self.record:
            return True
        rows = document.get("rows", {})
        return all(file in rows and (self.path / file).is_file() for file in (STEPS, REQUESTS))

    def _check_config(self) -> None:
        document = _read_json(self.path / "config.json")
        if not isinstance(document, dict) or "config" not in document:
            return  # absent or cut off by a kill: the next write replaces it
        self._check_hash("config.json", config_hash(document["config"]))

    def _check_hash(self, file: str, found: Any) -> None:
        if found != self.hash:
            raise RecordError(
                f"{self.path / file} belongs to configuration {found}, this run is {self.hash}: two configurations "
                "are never mixed in one directory; move that directory away or choose another name"
            )

    # -- writing ------------------------------------------------------------------------------------------------

    def _append(self, file: str, rows: Iterable[Any]) -> None:
        with self._writing():
            if file not in self._rows:
                with self._locked():
                    self._rows[file] = _RowFile(self.path, file)
            self._rows[file].append(rows)

    def _check_usable(self) -> None:
        if self._failed:  # rows of this object are gone: going on would record a run with a hole in it
            raise RecordError(f"an earlier write to {self.path} failed; start the run again with a new RunDirectory")

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Turns what the file system refuses into one clear error, and leaves nothing half-written."""
        self._check_usable()
        try:
            yield
        except BaseException as error:
            self._failed = True
            self._drop_rows()
            with contextlib.suppress(OSError):
                self.path.rmdir()  # succeeds only on an empty directory, that is, one nobody has used
            if isinstance(error, OSError):
                raise RecordError(_explain(error, self.path)) from error
            raise

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.mkdir(parents=True, exist_ok=True)
        with _directory_lock(self.path):
            self._read_summary()  # refuses another configuration's directory
            _remove_leftovers(self.path)
            if _read_json(self.path / "config.json") is None:
                self._write(
                    "config.json",
                    {"format": FORMAT, "name": self.name, "config_hash": self.hash, "config": self.config},
                )
            yield

    def _write(self, file: str, document: Any) -> None:
        text = json.dumps(plain(document, file), sort_keys=True, indent=2, allow_nan=False) + "\n"
        write_atomically(self.path / file, text)

    def _drop_rows(self) -> None:
        for writer in self._rows.values():
            writer.drop()
        self._rows.clear()


class _RowFile:
    """Rows on their way to a ``.jsonl`` file: a private temporary file, locked while its owner lives."""

    def __init__(self, directory: pathlib.Path, file: str) -> None:
        self._path = _temporary(directory / file)
        self._stream: IO[bytes] = open(self._path, "xb")  # noqa: SIM115 (closed by publish or drop)
        _try_lock(self._stream.fileno())
        self._digest = hashlib.sha256()
        self._count = 0

    def append(self, rows: Iterable[Any]) -> None:
        for row in rows:
            line = (canonical_json(row, f"row {self._count}") + "\n").encode()
            self._stream.write(line)
            self._digest.update(line)
            self._count += 1

    def publish(self, target: pathlib.Path) -> dict[str, Any]:
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        os.replace(self._path, target)
        return {"count": self._count, "sha256": self._digest.hexdigest()}

    def drop(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.close()  # a full disk refuses the buffered rows here; they are being dropped anyway
        with contextlib.suppress(OSError):
            self._path.unlink()


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Writes ``text`` under ``path`` in one visible step, or raises ``OSError`` and leaves the old file alone."""
    temporary = _temporary(path)
    try:
        with open(temporary, "xb") as stream:
            stream.write(text.encode())
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _temporary(path: pathlib.Path) -> pathlib.Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


def _remove_leftovers(directory: pathlib.Path) -> None:
    """Removes temporary files whose owner is dead: their lock is free (called under the directory's lock)."""
    for path in directory.glob(".*.tmp"):
        with contextlib.suppress(OSError), open(path, "rb") as stream:
            if _try_lock(stream.fileno()):
                path.unlink()


def _try_lock(descriptor: int) -> bool:
    if fcntl is None:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def _directory_lock(directory: pathlib.Path) -> Iterator[None]:
    if fcntl is None:
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot lock a directory
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sync_directory(directory: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # not every system can fsync a directory; the replace itself is atomic
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read_json(path: pathlib.Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: not JSON, or not UTF-8
        return None


_ADVICE = {
    errno.ENOSPC: "no space left on the device; free some or give another directory",
    errno.EDQUOT: "the disk quota is used up; free some space or give another directory",
    errno.EFBIG: "the file would exceed the size limit; raise the limit or record less",
    errno.EACCES: "no permission to write there; change the permission or give another directory",
    errno.EPERM: "no permission to write there; change the permission or give another directory",
    errno.EROFS: "the file system is read-only; give another directory",
    errno.ENOTDIR: "a part of the path is a file, not a directory; give another directory",
    errno.EEXIST: "a file has the name of the run directory; move it away or give another directory",
}


def _explain(error: OSError, path: pathlib.Path) -> str:
    advice = _ADVICE.get(error.errno or 0, f"{error.strerror or error}; give another directory")
    return f"cannot write the run directory {path}: {advice}. Nothing half-written was left there."
