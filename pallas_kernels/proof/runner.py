"""Runs cases in worker processes: several at once, each result kept, past aborts and past cases that take too long."""

from __future__ import annotations

import collections
import concurrent.futures
import hashlib
import json
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pallas_kernels.proof import sources, targets, worker
from pallas_kernels.proof.cases import Case

Result = dict[str, Any]
Report = Callable[[Case, Result], None]
COMMAND = (sys.executable, "-m", "pallas_kernels.proof.worker")
PLAIN = "plain"
START_S = 120  # until a worker has imported everything and says that it begins a case


class Results:
    """Results in a folder, a file for each case, under a hash of all that decides it."""

    def __init__(self, folder: pathlib.Path, versions: Mapping[str, Mapping[str, str]]) -> None:
        self.folder = folder
        self.versions = versions
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ValueError(f"--workdir: must be a folder that can be written; {folder}: {error.strerror}") from None

    def path(self, case: Case, lower_only: bool) -> pathlib.Path:
        """Where the result of a case is, for the sources and compilers as they are now."""
        facts = [case.name, repr(case.spec), case.gated, lower_only, self.versions[case.target]]
        facts += [sources.fingerprint(case.op, case.implementation), sources.own_fingerprint()]
        return self.folder / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()}.json"

    def get(self, case: Case, lower_only: bool) -> Result | None:
        """The result of a case, if it is there."""
        path = self.path(case, lower_only)
        return json.loads(path.read_text()) if path.is_file() else None

    def put(self, case: Case, lower_only: bool, result: Result) -> None:
        """Keeps a result."""
        keep(self.path(case, lower_only), result)


def keep(path: pathlib.Path, result: Mapping[str, Any]) -> None:
    """Writes a result, whole or not at all."""
    partial = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
    partial.write_text(json.dumps(result))
    partial.replace(path)


def run(
    cases: Sequence[Case],
    lowered: frozenset[str],
    folder: pathlib.Path,
    jobs: int,
    limit_s: float,
    versions: Mapping[str, Mapping[str, str]],
    report: Report,
    command: Sequence[str] = COMMAND,
) -> dict[str, Result]:
    """Results of all cases by name.

    Args:
        lowered: names of cases that are lowered only.
        folder: what is known already, and where results are kept.
        jobs: processes at a time.
        limit_s: the most that one case may take.
        versions: of the compilers of each target.
        report: told of each case as it is done, from any thread.
        command: starts a worker; the target and the folder for dumps follow.

    Raises:
        ValueError: ``folder`` cannot be written.
    """
    kept = Results(folder, versions)
    found: dict[str, Result] = {}
    groups: dict[tuple[str, str], list[Case]] = collections.defaultdict(list)
    for case in cases:
        known = kept.get(case, case.name in lowered)
        if known is None:
            groups[group_of(case, lowered)].append(case)
        else:
            found[case.name] = known
            report(case, known)

    def finish(case: Case, result: Result) -> None:
        if result["outcome"] != "late":  # the next try may have a quieter machine
            kept.put(case, case.name in lowered, result)
        found[case.name] = result
        report(case, result)

    work = sorted(groups.items(), key=lambda item: -len(item[1]))
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        running = [
            pool.submit(work_off, group, lowered, kind != PLAIN, limit_s, finish, command) for (_, kind), group in work
        ]
        for one in running:
            one.result()
    return found


def group_of(case: Case, lowered: frozenset[str]) -> tuple[str, str]:
    """What the cases of a process have in common: the target, and whether its compiler writes down what it does."""
    if not case.gated or case.name in lowered:
        return case.target, PLAIN
    # A GPU's kernels are not written down again when a later case has them too.
    return case.target, case.name if targets.platform(case.target) == "gpu" else "dumps"


def work_off(
    group: Sequence[Case],
    lowered: frozenset[str],
    dumped: bool,
    limit_s: float,
    finish: Report,
    command: Sequence[str],
) -> None:
    """All cases of a group, which have one target, with a new worker after one that died."""
    left = list(group)
    with tempfile.TemporaryDirectory(prefix="prove-") as dumps:
        while left:
            for path in pathlib.Path(dumps).iterdir():
                path.unlink()
            with Worker(command, left, lowered, pathlib.Path(dumps) if dumped else None) as process:
                while left:
                    result = process.next(limit_s)
                    finish(left.pop(0), result)
                    if result["outcome"] in ("aborted", "late"):
                        break


class Worker:
    """A process that compiles cases of one target in order."""

    def __init__(
        self, command: Sequence[str], cases: Sequence[Case], lowered: frozenset[str], dumps: pathlib.Path | None
    ) -> None:
        target = cases[0].target
        self.errors = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            [*command, target, str(dumps or "-")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=worker.environment(target, dumps),
            cwd=sources.PACKAGE.parent,
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        names = "".join(f"{'-' if case.name in lowered else ''}{case.name}\n" for case in cases)
        self.thread = threading.Thread(target=self.converse, args=(names,), daemon=True)
        self.thread.start()

    def converse(self, names: str) -> None:
        """Hands the names over, and passes on each line that comes back, None at the end."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(names)
            self.process.stdin.close()
        except BrokenPipeError:
            pass  # it died; the end of its output says so
        with self.process.stdout as output:
            for line in output:
                self.lines.put(line)
        self.lines.put(None)

    def next(self, limit_s: float) -> Result:
        """The result of the next case; ``aborted`` if the process ended, ``late`` if it took longer than allowed."""
        begin = time.monotonic()
        end = begin + START_S
        while True:
            try:
                line = self.lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                return {"outcome": "late", "why": f"not done after {limit_s:.0f} s", "seconds": limit_s}
            if line is None:
                code = self.process.wait()
                why = f"the compiler ended the process ({code}): {self.last_words()}"
                return {"outcome": "aborted", "why": why, "seconds": round(time.monotonic() - begin, 1)}
            if not line.startswith('{"case": '):
                continue  # something else that writes to standard output
            result = json.loads(line)
            if "outcome" in result:
                del result["case"]
                return result
            end = time.monotonic() + limit_s  # it begins now

    def last_words(self) -> str:
        """The first line of the process's last complaint."""
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        fatal = [line for line in lines if "LLVM ERROR" in line or "Check failed" in line or "Error" in line]
        return worker.first_line((fatal or lines or ["no word"])[-1])

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.thread.join()
        self.errors.close()
