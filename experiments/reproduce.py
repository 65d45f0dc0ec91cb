r"""Runs the paper's memory and throughput figures and writes the report.

    python -m experiments.reproduce                                        (smoke: a subset, about a minute)
    python -m experiments.reproduce --preset=paper --traces=DIR            (everything, on real traces)
    python -m experiments.reproduce --preset=paper --only=fig02,fig12      (some figures)
    python -m experiments.reproduce --preset=live                          (the real engine on the device that is there)
    python -m experiments.reproduce --preset=live --model=PATH             (with a checkpoint instead of random weights)

Writes into --workdir: `runs/` (one directory per simulated run), `live/` (one per run of the real engine), `chapters/`,
`verdict.json`, `calibration.json`, `environment.json` and `report.html`. A second call resumes: complete runs are read,
not repeated. Exit status 0 when the run completed; with --strict, and always with --preset=live, 1 when a tested row
misses without a note that explains it.
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
from experiments.live.session import LiveSession
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
    "study_live",
)
"""Modules of this package in the order of the report."""
LIVE = ("study_live", "fig02", "fig12", "fig13", "fig14", "fig15", "fig16", "fig18")
"""Those that have a live preset, in the order in which they run."""

PRESET = flags.DEFINE_enum(
    "preset",
    "smoke",
    ["smoke", "paper", "live"],
    "smoke: a subset in a minute; paper: everything, simulated; live: the real engine on the device that is there",
)
ONLY = flags.DEFINE_list("only", [], f"experiments to run, of {', '.join(EXPERIMENTS)}")
TRACES = flags.DEFINE_string("traces", None, "folder of real traces; without it, embedded length statistics")
WORKDIR = flags.DEFINE_string("workdir", "runs/{preset}", "where results go; {preset} is filled in")
PROCESSES = flags.DEFINE_integer("processes", None, "worker processes (default: the machine's cores)", lower_bound=1)
MODEL = flags.DEFINE_string("model", None, "checkpoint of the preset live: path or known name; none: random weights")
RECORD = flags.DEFINE_bool("record", False, "also write rows per step and per request")
STRICT = flags.DEFINE_bool("strict", False, "exit 1 when a tested row misses without a note")


def chosen(only: Sequence[str], preset: Preset = "smoke") -> list[str]:
    """The experiments to run, in their order. Raises ``ValueError`` for a name that the preset does not have."""
    names = LIVE if preset == "live" else EXPERIMENTS
    unknown = sorted(set(only) - set(names))
    if unknown:
        raise ValueError(f"--only names {', '.join(unknown)}; known to the preset {preset}: {', '.join(names)}")
    return [name for name in names if not only or name in only]


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
    if context.live_session is not None:
        context.live_session.progress = show
    if context.preset != "live":
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


def live_session(
    preset: Preset, workdir: Path, traces: str | None, model: str | None, record: bool
) -> LiveSession | None:
    """What runs the real engine: at any size for the preset live, a tiny one without timing for smoke."""
    root = workdir / "live"
    if preset == "live":
        return LiveSession(root, checkpoint=model, traces=traces, record=record)
    if preset == "smoke":
        return LiveSession(root, "tiny", traces=traces, record=record, timed=False)
    return None


def reproduce(
    preset: Preset,
    workdir: Path,
    *,
    traces: str | None = None,
    only: Sequence[str] = (),
    processes: int | None = None,
    record: bool = False,
    model: str | None = None,
    console: Console | None = None,
) -> tuple[Path, list[Chapter]]:
    """Runs a preset and writes everything; returns the report's path and the chapters.

    Raises:
        ValueError: an unknown experiment, a traces folder that does not exist, or a model for a preset that runs none.
        RuntimeError, OSError, ImportError: a run failed, or the model cannot be loaded.
    """
    names = chosen(only, preset)
    if model is not None and preset != "live":
        raise ValueError(f"--model is for --preset=live, the preset {preset} runs no checkpoint; got {model!r}")
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
        session = live_session(preset, workdir, traces, model, record)
        context = Context(runner, preset, traces, constants, points, session)
        with progress_bar(console) as progress:
            chapters = run_chapters(context, names, workdir, progress)
        hashes = runner.workload_hashes() | (session.workload_hashes() if session else {})
    rows = [row.to_dict() for chapter in chapters for row in chapter.rows]
    meta = {
        "preset": preset,
        "workload": "real traces" if traces else "embedded length statistics",
        "command": f"python -m experiments.reproduce --preset={preset}" + (" --traces=DIR" if traces else ""),
        "chapters": [chapter.id for chapter in chapters],
        "titles": {c.id: c.figure.title if c.figure else c.title for c in chapters},
    }
    timed = session is not None and session.timed
    if timed:
        meta |= {"device": session.device, "model": session.size.shape.name}
    _write(workdir / "verdict.json", {"meta": meta, "rows": rows})
    _write(workdir / "calibration.json", session.clock.table() if timed else calibrations.table(constants, points))
    _write(workdir / "environment.json", {"environment": environment(), "workloads": hashes})
    report = write_report(workdir)
    runs = len(runner) + (len(session) if session else 0)
    console.print(f"{runs} runs in {time.monotonic() - started:.0f} s")
    return report, chapters


def expectations(chapters: Sequence[Chapter]) -> list[str]:
    """What the chapter on the systems' speed says about its expectations, a line for each."""
    tables = [table for chapter in chapters if chapter.id == "study_live" for table in chapter.tables]
    return [f"{row[3]}: {row[0]}: {row[2]}" for table in tables if "verdict" in table.columns for row in table.rows]


def _write(path: Path, document: dict | list) -> None:
    write_atomically(path, json.dumps(document, indent=1, sort_keys=True, allow_nan=False) + "\n")


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    preset: Preset = PRESET.value  # type: ignore[assignment]
    workdir = Path(WORKDIR.value.format(preset=preset))
    try:
        report, chapters = reproduce(
            preset,
            workdir,
            traces=TRACES.value,
            only=ONLY.value,
            processes=PROCESSES.value,
            record=RECORD.value,
            model=MODEL.value,
        )
    except ValueError as error:
        raise app.UsageError(str(error)) from error
    # A failed run, a full disk, a folder that cannot be written, a model that cannot be loaded.
    except (RuntimeError, ReportError, OSError, ImportError) as error:
        sys.exit(f"reproduce stopped: {error}\ncomplete runs are kept; the same command goes on from there")
    rows = [row for chapter in chapters for row in chapter.rows]
    missed = [row for row in rows if row.passed is False]
    tested = sum(row.passed is not None for row in rows)
    print(f"{tested - len(missed)} of {tested} tested rows within tolerance, {len(missed)} missed")
    print(f"report: {report.resolve()}")
    for line in expectations(chapters):
        print(line)
    if preset == "smoke":
        print("for every figure: python -m experiments.reproduce --preset=paper [--traces=DIR]")
    # What is tested of live runs holds exactly, so a miss there is an error of the program.
    if (STRICT.value or preset == "live") and any(not row.note for row in missed):
        sys.exit(1)


if __name__ == "__main__":
    app.run(main)
