r"""Fits the step-time model once, on points that the report names.

    python -m experiments.calibrate --traces=DIR        (about 10 minutes on two cores)

In this order, each from the points it names and from nothing else:

1. the bare step of OPT-13B, from figure 1 (right): time = intercept + slope * batch;
2. the arithmetic rate and the swap costs, from figure 19a;
3. the serving overhead per request and the cost of reading a page, from the paged curves of figures 12a and 12d
   and the ShareGPT curve of figure 18b;
4. the floors of OPT-66B and OPT-175B, from the low-load points of figures 12b, c, e, f;
5. FasterTransformer's floors, from its own low-load points in figure 12.

A low-load point is a plotted one at no more than half of the curve's rate at 0.5 s/token. Every other number of the
report is a prediction.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from absl import app, flags
from scipy import optimize

from experiments import fig18, paper
from experiments.calibration import DRAWN_SHARE, PATH, Calibration
from experiments.fig12 import panel_settings
from experiments.run import Runner
from experiments.setting import DEVICES, Setting
from paxkv.config import MODELS, OPT_13B
from paxkv.record import write_atomically
from paxkv.sim import hardware

TRACES = flags.DEFINE_string("traces", None, "folder of the real traces", required=True)
WORKDIR = flags.DEFINE_string("workdir", "runs/calibrate", "folder for the runs")

SERVING_EVALUATIONS = 18
"""Trials of the two-parameter fit; near the minimum the error wobbles by 5%, as one preemption leads to others."""

START = Calibration(0.2e-3, 0.1e-3, 3e-9, 200e12, 12e9, 13e9, 3e-6, 2e-6, {"opt-13b": 9e-3}, {})
PAGE_TOKENS = 16
Point = dict[str, Any]


def relative_fit(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Intercept and slope that minimise the relative errors of y."""
    matrix = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    intercept, slope = np.linalg.lstsq(matrix, np.ones_like(x), rcond=None)[0]
    return float(intercept), float(slope)


def fit_bare(calibration: Calibration, points: list[Point]) -> Calibration:
    """Figure 1 (right): the intercept is floor and weights, the slope everything that a sequence costs."""
    batch, rate = np.array(paper.FIG01.batch, float), np.array(paper.FIG01.tokens_per_second, float)
    step = batch / rate
    intercept, slope = relative_fit(batch, step)
    weights = OPT_13B.num_params * OPT_13B.weight_bytes / hardware.A100_40GB.memory_bytes_per_s
    for size, seconds in zip(batch, step, strict=True):
        points.append(_point("bare step", "fig01", f"batch {size:g}", seconds, intercept + slope * size, "s"))
    calibration = dataclasses.replace(calibration, floors_s={"opt-13b": intercept - weights})
    return bare_without_reads(calibration, slope, 0.0)


def bare_without_reads(calibration: Calibration, slope: float, page_read_s: float) -> Calibration:
    """Splits figure 1's slope: what is left after reading a request's keys and values, bytes and pages."""
    tokens = mean_request_tokens()
    heads = OPT_13B.num_layers * OPT_13B.num_kv_heads
    reads = tokens * OPT_13B.kv_bytes_per_token / hardware.A100_40GB.memory_bytes_per_s
    reads += tokens / PAGE_TOKENS * heads * page_read_s
    return dataclasses.replace(calibration, bare_sequence_s=slope - reads, page_read_s=page_read_s)


def fit_microbenchmarks(calibration: Calibration, points: list[Point]) -> Calibration:
    """Figure 19a: recomputing 256 tokens, and moving them in blocks of each size."""
    tokens, layers = paper.FIG19A_TOKENS, OPT_13B.num_layers
    blocks = np.array(paper.BLOCK_SIZES, float)
    recompute = np.array(paper.FIG19A["recompute"].values, float) * 1e-3
    raw = float(recompute.mean()) / DRAWN_SHARE
    compute = raw - calibration.floors_s["opt-13b"] - calibration.bare_sequence_s
    flops = 2 * OPT_13B.num_params * tokens / compute
    for block, seconds in zip(blocks, recompute, strict=True):
        points.append(_point("arithmetic rate", "fig19a", f"recompute, block {block:g}", seconds, raw * 0.9, "s"))
    copies = 2 * layers * tokens / blocks
    moved = tokens * OPT_13B.kv_bytes_per_token
    fitted = {}
    for way in ("swap_in", "swap_out"):
        seconds = np.array(paper.FIG19A[way].values, float) * 1e-3
        intercept, slope = relative_fit(copies, seconds)
        fitted[f"{way}_bytes_per_s"] = moved / intercept
        fitted[f"{way}_copy_s"] = slope
        for block, time, count in zip(blocks, seconds, copies, strict=True):
            points.append(_point("swap", "fig19a", f"{way}, block {block:g}", time, intercept + slope * count, "s"))
    return dataclasses.replace(calibration, flops_per_s=flops, **fitted)


SERVING_LEVELS = {"a": (0.1, 0.2, 0.5), "d": (0.1, 0.5)}
SERVING_NAME = "serving overhead and page read"


def serving_points(calibration: Calibration, traces: str, workdir: str) -> tuple[list[Point], list[float]]:
    """The points of the serving fit under a trial calibration, and their errors in units of their weight.

    A rate counts as off by one when it is off by 3%, a latency of figure 18b when it is off by a factor e^0.5: beyond
    the knee a latency says little about the step.
    """
    grids = {panel: panel_settings(panel, "paged") for panel in SERVING_LEVELS}
    blocks = fig18.block_settings("ShareGPT")
    points, errors = [], []
    with Runner(workdir, calibration, traces) as runner:
        runner.run([s for settings in grids.values() for s in settings] + blocks)
        for panel, settings in grids.items():
            latency = [run["normalised_latency_s"] for run in runner.run(settings)]
            crossings = paper.FIG12.panel(panel).curve("paged").crossings
            for level in SERVING_LEVELS[panel]:
                found = paper.read_knee([s.rate for s in settings], latency, level) or settings[-1].rate
                errors.append(math.log(found / crossings[level]) / 0.03)
                setting = f"paged, {level} s/token"
                points.append(_point(SERVING_NAME, f"fig12{panel}", setting, crossings[level], found, "req/s"))
        for setting, run, seconds in zip(blocks, runner.run(blocks), paper.FIG18B["ShareGPT"].values, strict=True):
            latency_s = run["normalised_latency_s"]
            errors.append(math.log(latency_s / seconds) / 0.5)
            place = f"ShareGPT, block {setting.page_size}"
            points.append(_point(SERVING_NAME, "fig18b", place, seconds, latency_s, "s/token"))
    return points, errors


def fit_serving(calibration: Calibration, points: list[Point], traces: str, workdir: str) -> Calibration:
    """Figures 12a, 12d (paged) and 18b (ShareGPT): overhead per request and cost of a page read, together."""
    slope = calibration.bare_sequence_s + mean_request_tokens() * (
        OPT_13B.kv_bytes_per_token / hardware.A100_40GB.memory_bytes_per_s
    )
    heads = OPT_13B.num_layers * OPT_13B.num_kv_heads

    def trial(values: Sequence[float]) -> Calibration:
        bare = bare_without_reads(calibration, slope, abs(values[1]) * 1e-6 / heads)
        return dataclasses.replace(bare, serving_group_s=abs(values[0]) * 1e-3)

    def error(values: Sequence[float]) -> float:
        total = sum(e * e for e in serving_points(trial(values), traces, workdir)[1])
        print(f"overhead {values[0]:.4f} ms, page {values[1]:.3f} us: {total:.2f}", flush=True)
        return total

    options = {"maxfev": SERVING_EVALUATIONS, "initial_simplex": [(0.20, 3.0), (0.23, 3.0), (0.20, 4.5)]}
    found = optimize.minimize(error, (0.20, 3.0), method="Nelder-Mead", options=options)
    best = trial(found.x)
    points += serving_points(best, traces, workdir)[0]
    return best


def mean_request_tokens() -> float:
    """Mean length of figure 1's requests: the slope of its memory curve over the bytes of a token."""
    memory = np.array(paper.FIG01.paged_memory, float)
    return 1e9 * float(np.polyfit(memory[:, 0], memory[:, 1], 1)[0]) / OPT_13B.kv_bytes_per_token


def low_load(panels: str, systems: Sequence[str]) -> list[tuple[str, Setting, float]]:
    """Plotted points at no more than half of a curve's rate at 0.5 s/token."""
    chosen = []
    for panel in panels:
        for system in systems:
            curve = paper.FIG12.panel(panel).curve(system)
            for setting in panel_settings(panel, system):
                latency = dict(curve.points).get(setting.rate)
                if latency is not None and setting.rate <= 0.5 * curve.crossings[0.5]:
                    chosen.append((panel, setting, latency))
    return chosen


def fit_floor(
    calibration: Calibration,
    points: list[Point],
    name: str,
    chosen: list[tuple[str, Setting, float]],
    place: Callable[[Calibration, float], Calibration],
    traces: str,
    workdir: str,
) -> Calibration:
    """One floor from low-load points: the value with the least squared relative error."""
    final: list[Point] = []

    def error(floor_ms: float) -> float:
        with Runner(workdir, place(calibration, floor_ms * 1e-3), traces) as runner:
            runs = runner.run([setting for _, setting, _ in chosen])
        final[:] = [
            _point(
                name,
                f"fig12{panel}",
                f"{setting.system}, {setting.rate:g} req/s",
                latency,
                run["normalised_latency_s"],
                "s/token",
            )
            for (panel, setting, latency), run in zip(chosen, runs, strict=True)
        ]
        return sum(math.log(point["fitted"] / point["paper"]) ** 2 for point in final)

    found = optimize.minimize_scalar(error, bounds=(0.0, 80.0), method="bounded", options={"xatol": 0.05})
    error(float(found.x))
    points += final
    print(f"{name}: {found.x:.2f} ms, mean relative error {math.sqrt(found.fun / len(chosen)):.3f}", flush=True)
    return place(calibration, float(found.x) * 1e-3)


def _point(constant: str, figure: str, setting: str, printed: float, fitted: float, unit: str) -> Point:
    return {
        "constant": constant,
        "figure": figure,
        "setting": setting,
        "paper": printed,
        "fitted": float(fitted),
        "unit": unit,
    }


def calibrate(traces: str, workdir: str) -> tuple[Calibration, list[Point]]:
    """All fits in order; returns the constants and the points."""
    points: list[Point] = []
    calibration = fit_bare(START, points)
    calibration = fit_microbenchmarks(calibration, points)
    calibration = fit_serving(calibration, points, traces, workdir)
    orcas = ("orca_max", "orca_pow2", "orca_oracle", "paged")
    for model, panels in (("opt-66b", "be"), ("opt-175b", "cf")):

        def place(c: Calibration, floor: float, model: str = model) -> Calibration:
            return dataclasses.replace(c, floors_s={**c.floors_s, model: floor})

        calibration = fit_floor(
            calibration, points, f"floor of {model}", low_load(panels, orcas), place, traces, workdir
        )
    for model, panels in (("opt-13b", "ad"), ("opt-66b", "be"), ("opt-175b", "cf")):

        def place_static(c: Calibration, floor: float, model: str = model) -> Calibration:
            return dataclasses.replace(c, static_floors_s={**c.static_floors_s, model: floor})

        chosen = low_load(panels, ("static",))
        calibration = fit_floor(
            calibration, points, f"FasterTransformer floor of {model}", chosen, place_static, traces, workdir
        )
    return calibration, points


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    calibration, points = calibrate(TRACES.value, WORKDIR.value)
    document = {
        "command": "python -m experiments.calibrate --traces=DIR",
        "constants": calibration.to_dict(),
        "points": points,
        "models": {name: {"devices": DEVICES[name], "params": MODELS[name].num_params} for name in DEVICES},
    }
    write_atomically(PATH, json.dumps(document, indent=1, sort_keys=True) + "\n")
    print(f"wrote {PATH}")


if __name__ == "__main__":
    app.run(main)
