"""The step times of the device that is there: timed on steps of known content, before and apart from any run.

Timed are decodes at some batch sizes and contexts, prompts at some lengths, and both in one step. Constants of the
simulator are fitted to those points once. What a workload then costs is a prediction.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from scipy import optimize

from experiments.live.setting import PAGE_SIZE, SPECIAL_IDS, LiveSetting, LiveSize
from paxkv.config import require
from paxkv.sim.cost_model import CostModel

Point = dict[str, Any]
"""Of one step: decodes, prompts, tokens, sequences, context_tokens, seconds; and plans, how many were timed."""

OUTPUT_TOKENS = 41
"""Of each timed request: a first token with its prompt, then five dispatches of eight steps."""
SHORT_PROMPT = 15
LONG_SHARE = 0.8
"""Of the pool that the long contexts fill."""
PROMPTS = (16, 48, 96, 192, 384, 768, 1536)
JOINS = 4
ROUNDS = 3
"""Times that every batch is served: the first compiles, the others count."""
KNEES = tuple(range(1, 17)) + tuple(range(18, 33, 2)) + tuple(range(36, 257, 4))
"""Tokens of a step at which computing them takes as long as reading the weights, to choose from."""


@dataclasses.dataclass(frozen=True)
class Clock:
    """The device's step times.

    Attributes:
        cost: what the simulator is given.
        points: the timed steps behind it.
        limits: `flops_per_s` and `bytes_per_s` of the device, measured.
        model: `weights` and `weight_bytes` that a step reads, and `build_s`.
    """

    cost: CostModel
    points: list[Point]
    limits: dict[str, float]
    model: dict[str, float]

    def step_s(self, point: Point) -> float:
        """What the fit says about a step."""
        cost = self.cost
        return (
            cost.floor_s
            + max(cost.weights_s, cost.token_s * point["tokens"])
            + cost.sequence_s * point["sequences"]
            + cost.kv_token_s * point["context_tokens"]
        )

    def decode_s(self, rows: float, context_tokens: float) -> float:
        """What the fit says about a decode step."""
        return self.step_s({"tokens": rows, "sequences": rows, "context_tokens": context_tokens})

    def decodes(self) -> list[Point]:
        """The timed decode steps of the batches that were asked for, in their order."""
        return [point for point in self.points if not point["prompts"] and point["plans"] >= 4]

    def table(self) -> list[dict[str, Any]]:
        """Constants, then each point with what the fit says about it, as rows for the report; times in seconds."""
        constants = [
            {"constant": name, "fitted": value} for name, value in dataclasses.asdict(self.cost).items() if value
        ]
        points = [
            {
                "step": f"{point['decodes']} decodes, {point['prompts']} prompts",
                "tokens": point["tokens"],
                "context": round(point["context_tokens"]),
                "timed": point["seconds"],
                "fitted": self.step_s(point),
                "plans": point["plans"],
            }
            for point in self.points
        ]
        return constants + points


def fit_cost(points: Sequence[Point], page_s: float = 0.0) -> CostModel:
    """Floor, weights, token, sequence and context costs that minimise the points' relative errors.

    Args:
        points: timed steps.
        page_s: reading one page at the device's bandwidth. Swapping or copying it reads and writes it once.

    A step takes floor + max(weights, tokens * token) + sequences * sequence + context * kv. With the knee k = weights /
    token given, that is linear in costs of zero or more; the best k is found by trying.

    Raises:
        ValueError: fewer than four points.
    """
    require(len(points) >= 4, f"the fit has four costs and a knee, so it needs four points, got {len(points)}")
    tokens, sequences, context, seconds = (
        np.array([point[name] for point in points], float)
        for name in ("tokens", "sequences", "context_tokens", "seconds")
    )

    def fit(knee: int) -> tuple[float, int, np.ndarray]:
        columns = np.stack([np.ones_like(tokens), np.maximum(knee, tokens), sequences, context], axis=1)
        costs, residual = optimize.nnls(columns / seconds[:, None], np.ones_like(seconds))
        return float(residual), knee, costs

    _, knee, (floor, token, sequence, kv) = min((fit(knee) for knee in KNEES), key=lambda found: found[0])
    return CostModel(
        floor_s=float(floor), weights_s=float(knee * token), token_s=float(token), sequence_s=float(sequence),
        kv_token_s=float(kv), page_copy_s=2 * page_s, swap_out_page_s=2 * page_s, swap_in_page_s=2 * page_s,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Batch:
    """Requests that are timed together.

    Attributes:
        rows: requests that decode together.
        prompt: tokens of each one's prompt.
        output: tokens that each generates.
        joins: requests of `joining_prompt` tokens and one output that join them, one at a time.
        turns: times that the batch is served one after the other.
    """

    rows: int
    prompt: int
    output: int = OUTPUT_TOKENS
    joins: int = 0
    joining_prompt: int = 48
    turns: int = 1


def batches(size: LiveSize) -> Iterator[Batch]:
    """What is timed at a size."""
    longest = size.max_model_len - OUTPUT_TOKENS
    slots = LONG_SHARE * size.num_pages * PAGE_SIZE
    for rows in size.batches:
        # Every prompt must find room beside the others, so that all decode together.
        room = int(slots / rows) - OUTPUT_TOKENS
        if room < 1:
            continue
        short, long = min(SHORT_PROMPT, room), min(room, longest)
        yield Batch(rows, short)
        if long >= 4 * short:
            yield Batch(rows, long)
        if rows < size.max_num_seqs and Batch.joining_prompt + rows <= size.max_num_batched_tokens:
            yield Batch(rows, short, joins=JOINS)
    for tokens in PROMPTS:
        if tokens <= min(size.max_num_batched_tokens, longest):
            yield Batch(1, tokens, output=1, turns=3)


def time_steps(size: LiveSize, model: Any, progress: Callable[[float, float, str], None]) -> list[Point]:
    """The timed steps of a model on this device, as points."""
    todo = list(batches(size))
    served: dict[Batch, list[list[dict[str, Any]]]] = {batch: [] for batch in todo}
    for turn in range(ROUNDS):
        for index, batch in enumerate(todo):
            what = "timing" if turn else "compiling"
            progress(turn * len(todo) + index, ROUNDS * len(todo), f"{what} steps of {batch.rows} x {batch.prompt}")
            served[batch].append(serve_batch(size, model, batch))
    return [point for rounds in served.values() for point in points_of(rounds[1:])]


def serve_batch(size: LiveSize, model: Any, batch: Batch) -> list[dict[str, Any]]:
    """Serves a batch; returns a row per dispatched plan (see :class:`experiments.live.serve.PoolWatch`)."""
    from experiments.live.serve import PoolWatch, open_engine, sampling_of

    setting = LiveSetting("paged", size, "sharegpt", 1)
    draw = np.random.RandomState(0)
    watch = PoolWatch(batch.turns * (batch.rows + batch.joins))
    decoding, joining = sampling_of(setting, batch.output), sampling_of(setting, 1)

    def prompt(tokens: int) -> list[int]:
        return draw.randint(SPECIAL_IDS, size.shape.vocab_size, tokens).tolist()

    with open_engine(setting, model, watch) as engine:
        for _ in range(batch.turns):
            for _ in range(batch.rows):
                engine.add_request(prompt(batch.prompt), decoding)
            joins = batch.joins
            while engine.has_work:
                engine.step()
                if joins and watch.steps and watch.steps[-1]["decodes"] == batch.rows:
                    engine.add_request(prompt(batch.joining_prompt), joining)
                    joins -= 1
    return watch.steps


def points_of(rounds: Sequence[Sequence[dict[str, Any]]]) -> list[Point]:
    """Steps of equal content as one point with their median time.

    Args:
        rounds: rows per dispatched plan, in order. Plans overlap, so a plan's time is counted from the end of the one
            before.
    """
    seen: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
    for steps in rounds:
        before = float("-inf")
        for row in steps:
            seconds = (row["end_s"] - max(row["start_s"], before)) / row["steps"]
            before = row["end_s"]
            context = row["context_tokens"] + row["decodes"] * (row["steps"] - 1) / 2
            key = (row["decodes"], row["prefills"], row["prefill_tokens"])
            seen.setdefault(key, []).append((seconds, context))
    return [
        {
            "decodes": decodes,
            "prompts": prompts,
            "tokens": decodes + prompt_tokens,
            "sequences": decodes + prompts,
            "context_tokens": statistics.fmean(context for _, context in found),
            "seconds": statistics.median(seconds for seconds, _ in found),
            "plans": len(found),
        }
        for (decodes, prompts, prompt_tokens), found in seen.items()
    ]
