"""Compiles the kernels for TPUs and GPUs that need not be here, and holds what comes out against what is committed.

    python -m pallas_kernels.prove                            (the whole list; what is known already is not done again)
    python -m pallas_kernels.prove --ci                       (decoding for four targets; the others are lowered only)
    python -m pallas_kernels.prove --targets=v6e,sm_90a --ops=paged_attention
    python -m pallas_kernels.prove --write                    (commits the results: capabilities, gates, README)

Needs the compilers of absent devices, ``pip install -e '.[aot]'``. The exit status is 1 if a call that has to run
natively is refused or does not compile, or if the compiler's figures are worse than those committed.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import pathlib
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

from pallas_kernels.proof import committed, gates, runner, tables, targets
from pallas_kernels.proof.cases import OPS, Case, all_cases


class Progress:
    """Says on standard error how far it is: a bar on a terminal, else a line now and then."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.done = 0
        self.counts: dict[str, int] = {}
        self.begin = self.said = time.monotonic()
        self.lock = threading.Lock()
        self.terminal = sys.stderr.isatty()

    def __call__(self, case: Case, result: runner.Result) -> None:
        """One more case is done."""
        with self.lock:
            self.done += 1
            outcome = result["outcome"]
            self.counts[outcome] = self.counts.get(outcome, 0) + 1
            now = time.monotonic()
            if not self.terminal and now - self.said < 15 and self.done < self.total:
                return
            self.said = now
            full = 30 * self.done // self.total
            counts = ", ".join(f"{count} {name}" for name, count in self.counts.items())
            text = f"[{'#' * full}{'.' * (30 - full)}] {self.done}/{self.total} {now - self.begin:.0f} s: {counts}"
            line = f"\r{text} | {case.name}"[:160]
            print(
                line.ljust(160) if self.terminal else text,
                end="" if self.terminal else "\n",
                file=sys.stderr,
                flush=True,
            )
            if self.terminal and self.done == self.total:
                print(file=sys.stderr)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.prove", description=__doc__.split("\n\n")[0])
    folder = pathlib.Path(tempfile.gettempdir()) / "paxkv-prove"
    parser.add_argument("--ci", action="store_true", help="compile decoding for four targets, lower the others")
    parser.add_argument("--targets", default=",".join(targets.TARGETS), help="default: %(default)s")
    parser.add_argument("--ops", default=",".join(OPS), help="default: %(default)s")
    parser.add_argument("--only", default="*", help="a pattern of names of cases, as in a shell")
    parser.add_argument("--workdir", type=pathlib.Path, default=folder, help="where results are kept (%(default)s)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that a case may take")
    parser.add_argument("--write", action="store_true", help="commit results and gates, and the table in README.md")
    parser.add_argument("--list", action="store_true", help="print the names of the cases, and compile nothing")
    options = parser.parse_args(arguments)
    for name, known in (("targets", targets.TARGETS), ("ops", tuple(OPS))):
        chosen = getattr(options, name).split(",")
        unknown = [one for one in chosen if one not in known]
        if unknown:
            parser.error(f"--{name}: must be some of {', '.join(known)}; got {', '.join(unknown)}")
        setattr(options, name, chosen)
    if options.jobs < 1 or not options.limit > 0:  # a limit that is not a number, too
        parser.error("--jobs and --limit must be above 0")
    if options.write and options.ci:
        parser.error("--write: needs compiled results, and --ci lowers most; leave one of them out")
    return options


def choose(options: argparse.Namespace) -> tuple[list[Case], frozenset[str]]:
    """The cases asked for, and the names of those that are lowered only."""
    cases = [
        case
        for case in all_cases()
        if case.target in options.targets and case.op in options.ops and fnmatch.fnmatchcase(case.name, options.only)
    ]
    if not options.ci:
        return cases, frozenset()
    cases = [case for case in cases if case.ci != "nothing"]
    return cases, frozenset(case.name for case in cases if case.ci == "lower")


def main(arguments: Sequence[str]) -> int:
    """Runs the proof; returns the exit status."""
    options = parse(arguments)
    cases, lowered = choose(options)
    if not cases:
        print("no case fits --targets, --ops and --only", file=sys.stderr)
        return 2
    if options.list:
        print("\n".join(f"{case.name}{' (lowered only)' if case.name in lowered else ''}" for case in cases))
        return 0
    try:
        versions = {target: targets.versions(target) for target in {case.target for case in cases}}
        found = runner.run(cases, lowered, options.workdir, options.jobs, options.limit, versions, Progress(len(cases)))
    except (ModuleNotFoundError, ValueError) as error:  # a compiler, or a folder to write to
        print(error, file=sys.stderr)
        return 2
    failures = gates.missing(cases, found)
    worse, notes = gates.compare(cases, found, committed.read_gates(), versions)
    print(tables.summary(cases, found))
    for line in notes:
        print(f"note: {line}")
    if options.write:
        print(committed.write(cases, found, versions))
        worse = []  # the gates are these now, and the diff shows what changed
    for line in [*failures, *worse]:
        print(f"FAILED: {line}")
    return 1 if failures or worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
