"""What every runner does around its engine: read the job, wait for "pass", time one pass, print one JSON line.

Runs in the interpreter of whichever engine is measured, so it imports the standard library only. A runner is started
as ``python run_X.py JOB.json`` and stays alive between passes, so that engines can take turns without loading again::

    driver:  start ──▶         "pass\\n" ──▶            "pass\\n" ──▶          close
    runner:        ◀── "ready"           ◀── figures             ◀── figures        exit

What libraries print goes to standard error; standard output carries the protocol alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass(frozen=True)
class Job:
    """What to run.

    Attributes:
        model: folder in Hugging Face form.
        gguf: the same weights as a GGUF file.
        prompts: token ids of each request.
        outputs: tokens that each request generates, greedily and without an end token.
        cores: the processor cores to stay on.
        max_len: longest sequence, prompt and output together.
        max_num_seqs: sequences that may run together.
        max_num_batched_tokens: tokens of a step, where the engine has such a limit.
    """

    model: str
    gguf: str
    prompts: list[list[int]]
    outputs: list[int]
    cores: list[int]
    max_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    @property
    def threads(self) -> int:
        """Threads that the engine may use: one on each core."""
        return len(self.cores)


def start() -> Job:
    """Reads the job named on the command line and takes its cores. Call it before importing the engine."""
    with open(sys.argv[1], encoding="utf-8") as stream:
        job = Job(**json.load(stream))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, job.cores)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(job.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return job


def digest(value: Any) -> str:
    """SHA-256 of a value's JSON."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def serve(job: Job, version: str, generate: Callable[[], list[list[int]]], extra: Callable[[], dict] = dict) -> None:
    """Answers the driver until it closes the pipe.

    Args:
        job: as :func:`start` gave it.
        version: of the engine.
        generate: serves all requests of the job; returns the output ids of each, in order.
        extra: further figures of the pass before.
    """
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(message: dict) -> None:
        channel.write(json.dumps(message) + "\n")
        channel.flush()

    say({"ready": True, "version": version})
    for line in sys.stdin:
        if line.strip() != "pass":
            break
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = [[int(token) for token in ids] for ids in generate()]
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        tokens = sum(map(len, outputs))
        say(
            {
                "version": version,
                "seconds": wall,
                "cpu_seconds": cpu,
                "output_tokens": tokens,
                "tokens_per_s": tokens / wall,
                "tokens_per_cpu_s": tokens / cpu,
                "outputs_sha256": digest(outputs),
                "request_digests": [digest(ids)[:12] for ids in outputs],
                **extra(),
            }
        )
