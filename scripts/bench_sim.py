"""How fast the simulator is: one run, repeated, as JSON.

    python -m scripts.bench_sim                                    (about 15 s)
    python -m scripts.bench_sim --traces=DIR --repeats=9
    python -m scripts.bench_sim --system=orca_max --dataset=alpaca --rate=8 --duration=900

The default is one hour of ShareGPT at 2 req/s on OPT-13B, paged: about 75,800 steps, 149,500 pages appended while
decoding and 7,750 preemptions (on the real trace), in at most 2 s on one core. A first run, not timed, loads the
lengths and counts the appended pages; the timed runs include drawing the workload and condensing the result.
"""

from __future__ import annotations

import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, get_args

from absl import app, flags

from experiments import calibration as calibrations
from experiments.calibration import Calibration
from experiments.run import execute
from experiments.setting import (
    Setting,
    System,
    build_cost,
    build_memory,
    build_requests,
    build_workload_of,
    scheduler_config,
)
from paxkv.sched.memory import Memory
from paxkv.sched.scheduler import Scheduler
from paxkv.sim.simulate import SimResult, Window, simulate

_SYSTEM = flags.DEFINE_enum("system", "paged", get_args(System), "memory manager")
_MODEL = flags.DEFINE_string("model", "opt-13b", "model, with the devices that the paper ran it on")
_DATASET = flags.DEFINE_enum("dataset", "sharegpt", ["sharegpt", "alpaca"], "lengths")
_RATE = flags.DEFINE_float("rate", 2.0, "requests per second", lower_bound=0.001)
_DURATION = flags.DEFINE_float("duration", 3600.0, "seconds of arrivals", lower_bound=0.1)
_SEED = flags.DEFINE_integer("seed", 0, "seed of the workload")
_TRACES = flags.DEFINE_string("traces", None, "folder of real traces; without it, embedded length statistics")
_REPEATS = flags.DEFINE_integer("repeats", 5, "timed runs", lower_bound=1)


class PageCounter:
    """Counts the pages that a memory gives to decoding sequences, as these calls take them from the pool."""

    CALLS = ("grow", "append", "advance")

    def __init__(self, memory: Memory) -> None:
        self.pages = 0
        self._memory = memory
        for name in self.CALLS:
            setattr(memory, name, self._counted(getattr(memory, name)))

    def _counted(self, call: Callable) -> Callable:
        def counted(*arguments):
            before = self._memory.num_free_pages
            answer = call(*arguments)
            self.pages += before - self._memory.num_free_pages
            return answer

        return counted


def count(setting: Setting, calibration: Calibration, traces: str | None) -> tuple[SimResult, int, int]:
    """Runs the setting once; returns the result, the plans made and the pages appended."""
    memory = build_memory(setting)
    pages = PageCounter(memory)
    plans = 0

    def on_step(*_: object) -> None:
        nonlocal plans
        plans += 1

    result = simulate(
        build_requests(setting, build_workload_of(setting, traces)),
        Scheduler(scheduler_config(setting), memory),
        build_cost(setting, calibration),
        windows=[Window(0.0, setting.duration_s)],
        on_step=on_step,
    )
    return result, plans, pages.pages


def peak_rss_bytes() -> int:
    """The most memory that this process ever held; getrusage counts KiB, on macOS bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def measure(setting: Setting, calibration: Calibration, traces: str | None, repeats: int) -> dict[str, Any]:
    """What the run is, how long it takes, and its rates by the median time."""
    result, plans, pages = count(setting, calibration, traces)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        summary, again = execute(setting, calibration, traces)
        seconds.append(time.perf_counter() - start)
        assert (again.steps, again.tokens, again.end_s) == (result.steps, result.tokens, result.end_s)
    tokens = int((result.output_tokens * setting.num_seqs).sum())
    median = statistics.median(seconds)
    return {
        "run": setting.name,
        "workload": "real" if traces else "embedded",
        "workload_hash": summary["workload_hash"],
        "simulated_s": result.end_s,
        "requests": summary["requests"],
        "rejected": summary["rejected"],
        "output_tokens": tokens,
        "steps": result.steps,
        "plans": plans,
        "preemptions": summary["preemptions"],
        "page_appends": pages,
        "repeats": repeats,
        "seconds_median": median,
        "seconds_min": min(seconds),
        "requests_per_s": summary["requests"] / median,
        "tokens_per_s": tokens / median,
        "steps_per_s": result.steps / median,
        "plans_per_s": plans / median,
        "peak_rss_bytes": peak_rss_bytes(),
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "machine": platform.machine(),
    }


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    try:
        engine = "static" if _SYSTEM.value == "static" else "serving"
        setting = Setting(
            _SYSTEM.value,  # type: ignore[arg-type]
            _MODEL.value,
            _DATASET.value,
            _RATE.value,
            _DURATION.value,
            engine=engine,
            seed=_SEED.value,
        )
        calibration, _ = calibrations.load()
        figures = measure(setting, calibration, _TRACES.value, _REPEATS.value)
    except (ValueError, FileNotFoundError) as error:
        raise app.UsageError(str(error)) from error
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    app.run(main)
