"""Engines against each other: each in its own process and interpreter, on the same cores, taking turns."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any

from scripts.peers.runners.session import Job

RUNNERS = pathlib.Path(__file__).resolve().parent / "runners"
OURS = "paxkv"
PACKAGES = {
    "vllm": "vllm",
    "transformers": "transformers",
    "levanter": "levanter",
    "llamacpp": "llama_cpp",
    "xllamacpp": "xllamacpp",
}
"""Peer to the package that its interpreter must be able to import."""
NEED_GGUF = {"llamacpp", "xllamacpp"}
SETTLE_S = 0.3
"""Pause before a pass: idle threads of the engine before it stop spinning."""
ENOUGH_S = 60.0
"""An engine whose timed passes took this long together has had enough of them."""


class RunnerError(RuntimeError):
    """A runner that ended or answered nothing; the message holds the end of what it printed."""


def find_interpreters(peers: Sequence[str], given: Sequence[str]) -> dict[str, str]:
    """Each peer that is installed and the interpreter that has it: this one, or the first of those given.

    Raises:
        ValueError: an interpreter that cannot be run.
    """
    code = f"from importlib.util import find_spec; print(*[p for p, m in {PACKAGES!r}.items() if find_spec(m)])"
    found: dict[str, str] = {}
    for python in (sys.executable, *given):
        try:
            answer = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ValueError(f"--pythons: {python} cannot be run ({error}); give paths of interpreters") from error
        for peer in answer.stdout.split():
            found.setdefault(peer, python)
    return {peer: found[peer] for peer in peers if peer in found}


class Runner:
    """One engine, alive between passes.

    Args:
        name: ``paxkv`` or a peer.
        interpreter: Python that has it.
        job: a file that holds a :class:`Job`.
        log: file that takes what it prints.

    Attributes:
        version: of the engine.
        start_s: seconds until it was ready.
    """

    def __init__(self, name: str, interpreter: str, job: pathlib.Path, log: pathlib.Path) -> None:
        self.name, self._log = name, log
        command = [interpreter, str(RUNNERS / f"run_{name}.py"), str(job)]
        begin = time.perf_counter()
        # The interpreter is another one: what this one's environment says about packages does not hold there.
        clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        with open(log, "wb") as stream:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                cwd=log.parent,
                env=clean,
            )
        try:
            self.version = str(self._answer()["version"])
        except BaseException:
            self.close()
            raise
        self.start_s = time.perf_counter() - begin

    def run_pass(self) -> dict[str, Any]:
        """Serves all requests once; returns the figures."""
        time.sleep(SETTLE_S)
        stdin: IO[str] = self._process.stdin  # type: ignore[assignment]
        try:
            stdin.write("pass\n")
            stdin.flush()
        except BrokenPipeError as error:
            raise RunnerError(self._explain()) from error
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise RunnerError(self._explain())
        return json.loads(line)

    def _explain(self) -> str:
        self._process.wait()
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-12:])
        return f"{self.name} ended with exit status {self._process.returncode}:\n{tail}"


@dataclasses.dataclass(frozen=True)
class Entry:
    """What an engine did in a contest.

    Attributes:
        version: of the engine.
        start_s: seconds from starting its process until it was ready.
        warm: figures of the first pass, which compiles.
        passes: figures of the timed passes, in order.
    """

    version: str
    start_s: float
    warm: dict[str, Any]
    passes: list[dict[str, Any]]


def compete(
    interpreters: Mapping[str, str], job: Job, folder: pathlib.Path, *, repeats: int
) -> tuple[dict[str, Entry], dict[str, str]]:
    """Runs one warm pass of each engine, then up to ``repeats`` rounds in which each runs one pass.

    Args:
        interpreters: engine to interpreter, in the order of a round.
        folder: takes the job and the logs.

    Returns:
        The entries, and engines that failed with the reason. Whoever fails is left out from there on.
    """
    path = folder / f"job-{job.threads}.json"
    path.write_text(json.dumps(dataclasses.asdict(job)))
    runners: dict[str, Runner] = {}
    warm: dict[str, dict[str, Any]] = {}
    passes: dict[str, list[dict[str, Any]]] = collections.defaultdict(list)
    failed: dict[str, str] = {}

    def drop(name: str, error: RunnerError) -> None:
        failed[name] = str(error)
        if name in runners:
            runners.pop(name).close()

    try:
        for name, interpreter in interpreters.items():
            try:
                runners[name] = Runner(name, interpreter, path, folder / f"{name}-{job.threads}.log")
                warm[name] = runners[name].run_pass()
            except RunnerError as error:
                drop(name, error)
        for _ in range(repeats):
            for name in list(runners):
                if sum(one["seconds"] for one in passes[name]) > ENOUGH_S:
                    continue
                try:
                    passes[name].append(runners[name].run_pass())
                except RunnerError as error:
                    drop(name, error)
        entries = {
            name: Entry(runner.version, runner.start_s, warm[name], passes[name]) for name, runner in runners.items()
        }
    finally:
        for runner in runners.values():
            runner.close()
    return entries, failed


def summarise(entries: Mapping[str, Entry]) -> list[dict[str, Any]]:
    """One row for each engine: medians over passes, and our rate as a multiple of its, pass by pass of the same round.

    ``equal`` counts requests whose output ids are those of paxkv, in the worst pass.
    """
    ours = entries.get(OURS)
    rows = []
    for name, entry in entries.items():
        row: dict[str, Any] = {"engine": name, "version": entry.version, "passes": len(entry.passes)}
        row |= {"start_s": entry.start_s, "warm_s": entry.warm["seconds"]}
        for figure in ("tokens_per_s", "tokens_per_cpu_s"):
            values = [one[figure] for one in entry.passes]
            row[figure] = statistics.median(values)
            row[f"{figure}_least"], row[f"{figure}_most"] = min(values), max(values)
        row["outputs_sha256"] = sorted({one["outputs_sha256"] for one in (entry.warm, *entry.passes)})
        if ours is not None:
            row["ratio"] = _ratio(ours, entry, "tokens_per_s")
            row["cpu_ratio"] = _ratio(ours, entry, "tokens_per_cpu_s")
            row["equal"] = min(
                sum(a == b for a, b in zip(ours.warm["request_digests"], one["request_digests"], strict=True))
                for one in (entry.warm, *entry.passes)
            )
        rows.append(row)
    return rows


def _ratio(ours: Entry, theirs: Entry, figure: str) -> float:
    """Median over the rounds that both ran of our rate over theirs."""
    rounds = zip(ours.passes, theirs.passes, strict=False)
    return statistics.median(our[figure] / their[figure] for our, their in rounds)


def cores_now() -> list[int]:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def take_cores(cores: Sequence[int]) -> None:
    """Keeps this process on the cores given, where the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
