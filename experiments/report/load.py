"""Reads a run directory: what is there, what is missing, and a clear error for what cannot be read."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.figure import Chapter, VerdictRow
from experiments.paper import FIGURES


class ReportError(Exception):
    """A run directory that cannot be reported on; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Run:
    """A run directory's content. `missing` says in sentences what a complete one would have beside it."""

    chapters: tuple[Chapter, ...]
    rows: tuple[VerdictRow, ...]
    meta: dict[str, Any]
    calibration: tuple[dict[str, Any], ...]
    environment: dict[str, Any]
    missing: tuple[str, ...]

    def title(self, figure: str) -> str:
        """The title of the chapter with this id, or the id where there is no chapter."""
        for chapter in self.chapters:
            if chapter.id == figure:
                return chapter.figure.title if chapter.figure else chapter.title or chapter.id
        return self.meta.get("titles", {}).get(figure, figure)


def load_run(workdir: Path | str) -> Run:
    """Everything in `workdir` that the report needs.

    Raises:
        ReportError: there is nothing to report, or a file is corrupt.
    """
    workdir = Path(workdir)
    if not workdir.is_dir():
        raise ReportError(f"{workdir} is not a directory; name the run directory with --workdir")
    chapters = tuple(sorted(map(_load_chapter, (workdir / "chapters").glob("*.json")), key=lambda c: natural(c.id)))
    verdict = workdir / "verdict.json"
    if not chapters and not verdict.exists():
        raise ReportError(f"{workdir} holds no run: neither chapters/*.json nor verdict.json is there")
    missing = []
    if not verdict.exists():
        missing.append("verdict.json: the rows below are taken from the chapters that are there.")
        meta, rows = {}, tuple(row for chapter in chapters for row in chapter.rows)
    else:
        meta, rows = load_verdict(verdict)
        listed = {row.without_note() for row in map(_Comparable, rows)}
        for chapter in chapters:
            stale = sum(row.without_note() not in listed for row in map(_Comparable, chapter.rows))
            if stale:
                missing.append(f"verdict.json lacks {stale} row(s) of chapters/{chapter.id}.json as they stand there.")
    have = {chapter.id for chapter in chapters}
    expected = meta.get("chapters") or FIGURES
    missing += [f"chapters/{name}.json: this figure was not run." for name in expected if name not in have]
    calibration = _read(workdir / "calibration.json", list)
    environment = _read(workdir / "environment.json", dict)
    if calibration is None:
        missing.append("calibration.json: which constants were fitted, and on which points, is unknown.")
    elif not all(isinstance(point, dict) for point in calibration):
        raise ReportError(f"{workdir / 'calibration.json'}: must be a list of objects, one per calibrated point")
    if environment is None:
        missing.append("environment.json: versions and workload hashes are unknown.")
    return Run(chapters, rows, meta, tuple(calibration or ()), environment or {}, tuple(missing))


@dataclass(frozen=True)
class _Comparable:
    """A row to compare between two files; a note may be added to verdict.json afterwards, a number may not."""

    row: VerdictRow

    def without_note(self) -> tuple[Any, ...]:
        return tuple(value for key, value in sorted(self.row.to_dict().items()) if key != "note")


def natural(name: str) -> tuple[Any, ...]:
    """Sorts fig2 before fig10, and the figures of the paper before other chapters."""
    parts = tuple((0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", name) if part)
    return (not name.startswith("fig"), parts)


def _load_chapter(path: Path) -> Chapter:
    values = _read(path, dict)
    try:
        chapter = Chapter.from_dict(values or {})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ReportError(f"{path}: not a chapter ({type(error).__name__}: {error}); run this figure again") from error
    if chapter.id != path.stem:
        raise ReportError(f"{path}: holds the chapter {chapter.id!r}; a chapter's file is named by its id")
    return chapter


def load_verdict(path: Path) -> tuple[dict[str, Any], tuple[VerdictRow, ...]]:
    """The meta object and the rows of a verdict.json, in the order of the figures."""
    values = _read(path, dict)
    if values is None:
        raise ReportError(f"{path}: no such file")
    rows, meta = values.get("rows"), values.get("meta", {})
    if not isinstance(rows, list) or not isinstance(meta, dict):
        raise ReportError(f'{path}: must be {{"rows": [...], "meta": {{...}}}}')
    loaded = []
    for number, row in enumerate(rows):
        try:
            loaded.append(VerdictRow.from_dict(row))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ReportError(f"{path}: row {number} is not a verdict row ({error})") from error
    return meta, tuple(sorted(loaded, key=lambda row: natural(row.figure)))


def _read(path: Path, kind: type) -> Any:
    """The file's JSON value, None where there is no file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: not JSON ({error}); the file is damaged, run this part again") from error
    except OSError as error:
        raise ReportError(f"{path}: cannot be read ({error})") from error
    if not isinstance(value, kind):
        raise ReportError(f"{path}: must hold a JSON {'object' if kind is dict else 'array'}")
    return value
