r"""Runs the paper's memory and throughput figures and writes the report.

    python -m experiments.reproduce                                        (smoke: a subset, about a minute)
    python -m experiments.reproduce --preset=paper --traces=DIR            (everything, on real traces)
    python -m experiments.reproduce --preset=paper --only=fig02,fig12      (some figures)

Writes into --workdir: `runs/` (one directory per simulated run), `chapters/`, `verdict.json`, `calibration.json`,
`environment.json` and `report.html`. A second call resumes: complete runs are read, not repeated. Exit status 0 when
the run completed; with --strict, 1 when a tested row misses without a note that explains it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from absl import app, flags
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from experiments import calibration as calibrations
from experiments.context import Context, Preset
from experiments.figure import Chapter
from experiments.notes import explained
from experiments.report import ReportError, write_report
from experiments.run import Runner
from paxkv.record import environment, write_atomically

EXPERIMENTS = (
    "fig01",
    "fig02",
    "fig11",
    "fig12",
    "fig13",
    "fig14",
    "fig15",
    "fig16",
    "fig17",
    "fig18",
    "fig19",
    "text_claims",
    "claims",
    "study_seeds",
    "study_page_size",
    "study_utilization",
    "study_health",
    "study_prefix",
    "study_chunked",
)
"""Modules of this package in the order of the report."""

PRESET = flags.DEFINE_enum("preset", "smoke", ["smoke", "paper"], "smoke: a subset in a minute; paper: everything")
ONLY = flags.DEFINE_list("only", [], f"experiments to run, of {', '.join(EXPERIMENTS)}")
TRACES = flags.DEFINE_string("traces", None, "folder of real traces; without it, embedded length statistics")
WORKDIR = flags.DEFINE_string("workdir", "runs/{preset}", "where results go; {preset} is filled in")
PROCESSES = flags.DEFINE_integer("processes", None, "worker processes (default: the machine's cores)", lower_bound=1)
RECORD = flags.DEFINE_bool("record", False, "also write rows per step and per request")
STRICT = flags.DEFINE_bool("strict", False, "exit 1 when a tested row misses without a note")


def chosen(only: Sequence[str]) -> list[str]:
    """The experiments to run, in the report's order. Raises ``ValueError`` for a name that does not exist."""
    unknown = sorted(set(only) - set(EXPERIMENTS))
    if unknown:
        raise ValueError(f"--only names {', '.join(unknown)}; known: {', '.join(EXPERIMENTS)}")
    return [name for name in EXPERIMENTS if not only or name in only]


@contextlib.contextmanager
def progress_bar(console: Console) -> Iterator[Progress]:
    """A bar with what runs, elapsed time and time left."""
    columns = (
        TextColumn("{task.fields[phase]}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        yield progress


def run_chapters(context: Context, names: Sequence[str], workdir: Path, progress: Progress) -> list[Chapter]:
    """Executes all runs known beforehand in one batch, then each experiment's chapter with what it still needs."""
    task = progress.add_task("", phase="runs", total=1.0)

    def show(done: float, total: float, label: str) -> None:
        progress.update(task, completed=done, total=total, description=label)

    modules = {name: importlib.import_module(f"experiments.{name}") for name in names}
    context.runner.progress = show
    context.runner.run([s for module in modules.values() for s in module.settings(context.preset)])
    chapters = []
    for name, module in modules.items():
        progress.reset(task, total=1.0, phase=name, description="")
        chapter = module.chapter(context)
        if chapter is not None:
            chapter = dataclasses.replace(chapter, rows=explained(chapter.rows))
            chapter.save(workdir / "chapters" / f"{chapter.id}.json")
            chapters.append(chapter)
    return chapters


def reproduce(
    preset: Preset,
    workdir: Path,
    *,
    traces: str | None = None,
    only: Sequence[str] = (),
    processes: int | None = None,
    record: bool = False,
    console: Console | None = None,
) -> tuple[Path, list[Chapter]]:
    """Runs a preset and writes everything; returns the report's path and the chapters.

    Raises:
        ValueError: an unknown experiment, or a traces folder that does not exist.
    """
    names = chosen(only)
    if traces is not None and not Path(traces).is_dir():
        raise ValueError(
            f"--traces must be a folder with the trace files, got {traces!r}; leave it out to use statistics"
        )
    console = console or Console(stderr=True)
    constants, points = calibrations.load()
    (workdir / "chapters").mkdir(parents=True, exist_ok=True)
    for stale in (workdir / "chapters").glob("*.json"):
        stale.unlink()
    started = time.monotonic()
    with Runner(workdir / "runs", constants, traces, processes=processes, record=record) as runner:
        context = Context(runner, preset, traces, constants, points)
        with progress_bar(console) as progress:
            chapters = run_chapters(context, names, workdir, progress)
        hashes = runner.workload_hashes()
    rows = [row.to_dict() for chapter in chapters for row in chapter.rows]
    meta = {
        "preset": preset,
        "workload": "real traces" if traces else "embedded length statistics",
        "command": f"python -m experiments.reproduce --preset={preset}" + (" --traces=DIR" if traces else ""),
        "chapters": [chapter.id for chapter in chapters],
        "titles": {c.id: c.figure.title if c.figure else c.title for c in chapters},
    }
    _write(workdir / "verdict.json", {"meta": meta, "rows": rows})
    _write(workdir / "calibration.json", calibrations.table(constants, points))
    _write(workdir / "environment.json", {"environment": environment(), "workloads": hashes})
    report = write_report(workdir)
    console.print(f"{len(runner)} runs in {time.monotonic() - started:.0f} s")
    return report, chapters


def _write(path: Path, document: dict | list) -> None:
    write_atomically(path, json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    preset: Preset = PRESET.value  # type: ignore[assignment]
    workdir = Path(WORKDIR.value.format(preset=preset))
    try:
        report, chapters = reproduce(
            preset, workdir, traces=TRACES.value, only=ONLY.value, processes=PROCESSES.value, record=RECORD.value
        )
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    except (RuntimeError, ReportError, OSError) as error:  # a failed run, a full disk, a folder that cannot be written
        sys.exit(f"reproduce stopped: {error}\ncomplete runs are kept; the same command goes on from there")
    rows = [row for chapter in chapters for row in chapter.rows]
    missed = [row for row in rows if row.passed is False]
    tested = sum(row.passed is not None for row in rows)
    print(f"{tested - len(missed)} of {tested} tested rows within tolerance, {len(missed)} missed")
    print(f"report: {report.resolve()}")
    if preset == "smoke":
        print("for every figure: python -m experiments.reproduce --preset=paper [--traces=DIR]")
    if STRICT.value and any(not row.note for row in missed):
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
