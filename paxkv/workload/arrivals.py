"""Arrivals, and workloads built from a data set and an arrival process.

The paper's data sets have no timestamps, so its experiments draw Poisson arrivals (section 6.1); the artifact
draws them per slot of 10 ms. All randomness comes from generators whose streams are frozen by their makers
(NumPy's legacy ``RandomState`` and Python's ``random.Random``), so that one seed gives one workload everywhere.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Literal, get_args

import numpy as np

from paxkv.workload import validate
from paxkv.workload.validate import WorkloadError, require
from paxkv.workload.workload import Lengths, Workload

ArrivalProcess = Literal["slots", "poisson", "gamma", "all_at_once"]

SLOTS_PER_S = 100
"""Slots of the artifact's generator: 10 ms each."""
MAX_REQUESTS = 10_000_000
MAX_SLOTS = 10_000_000
MAX_SEED = 2**32 - 1
MIN_BURSTINESS, MAX_BURSTINESS = 0.001, 100.0
_TICKS_PER_S = 1_000_000


def arrival_times(
    rate: float,
    duration_s: float,
    *,
    arrivals: ArrivalProcess = "slots",
    seed: int = 0,
    burstiness: float = 1.0,
) -> np.ndarray:
    """Draw arrival times in ``[0, duration_s)``, float64 [R], sorted, in seconds.

    Args:
        rate: mean requests per second.
        duration_s: length of the trace in seconds.
        arrivals: ``slots``: a Poisson count per slot of 10 ms, all of a slot at the slot's start (the paper's
            artifact); ``poisson``: exponential gaps; ``gamma``: gamma gaps; ``all_at_once``: round(rate x
            duration) requests at time 0.
        seed: 0 .. 2**32 - 1.
        burstiness: only for ``gamma``: the coefficient of variation of the gaps (standard deviation over
            mean). 1 is Poisson, larger is burstier. The gamma shape, which some benchmarks call burstiness,
            is 1 / burstiness**2.

    Raises:
        WorkloadError: a value out of range, more than ``MAX_REQUESTS`` expected, or no arrival at all.
    """
    rate = validate.positive_number(rate, "rate", "requests per second")
    duration_s = validate.positive_number(duration_s, "duration_s", "seconds")
    seed = validate.whole_number(seed, "seed", most=MAX_SEED)
    burstiness = validate.positive_number(burstiness, "burstiness", "standard deviation of the gaps over their mean")
    require(
        MIN_BURSTINESS <= burstiness <= MAX_BURSTINESS,
        f"burstiness must be in {MIN_BURSTINESS} .. {MAX_BURSTINESS}, got {burstiness}; 1 is Poisson",
    )
    require(
        arrivals in get_args(ArrivalProcess),
        f"arrivals must be one of {', '.join(get_args(ArrivalProcess))}, got {arrivals!r}",
    )
    require(
        arrivals == "gamma" or burstiness == 1,
        f"burstiness={burstiness} has no meaning for arrivals={arrivals!r}; use arrivals='gamma'",
    )
    require(
        rate * duration_s <= MAX_REQUESTS,
        f"rate x duration_s must be at most {MAX_REQUESTS} requests, got {rate} x {duration_s}; lower one of them",
    )
    if arrivals == "all_at_once":
        times = np.zeros(round(rate * duration_s))
    elif arrivals == "slots":
        times = _slot_times(rate, duration_s, seed)
    else:
        times = _gap_times(rate, duration_s, seed, 1.0 if arrivals == "poisson" else burstiness)
    require(
        len(times) > 0,
        f"no request arrives at rate={rate} in duration_s={duration_s} with seed={seed}; "
        "raise the rate or the duration, or take another seed",
    )
    return times


def _slot_times(rate: float, duration_s: float, seed: int) -> np.ndarray:
    """Arrivals at the starts of 10 ms slots, as the paper's artifact draws them."""
    slots = math.floor(duration_s * SLOTS_PER_S + 1e-9)
    require(
        1 <= slots <= MAX_SLOTS,
        f"arrivals='slots' needs a duration of 0.01 to {MAX_SLOTS / SLOTS_PER_S:.0f} s, got {duration_s}; "
        "use arrivals='poisson'",
    )
    counts = np.random.RandomState(seed).poisson(rate * 0.01, size=slots)
    return np.repeat(np.arange(slots) * 0.01, counts)


def _gap_times(rate: float, duration_s: float, seed: int, burstiness: float) -> np.ndarray:
    """Arrivals after independent gamma gaps of mean ``1 / rate``; the first comes one gap after 0.

    Gaps are whole microseconds, and summed as such: mathematics libraries differ in the last bit of a
    logarithm, and a workload must not.
    """
    shape = burstiness**-2
    random_state = np.random.RandomState(seed)
    end = round(duration_s * _TICKS_PER_S)
    chunk = 1024 + int(rate * duration_s)
    pieces: list[np.ndarray] = []
    now = drawn = 0
    while now < end:
        gaps = random_state.standard_gamma(shape, size=chunk) * (_TICKS_PER_S / (rate * shape))
        # A gap beyond the end says no more than "after the end"; cut it, so that sums stay in range.
        ticks = now + np.cumsum(np.rint(np.minimum(gaps, end)).astype(np.int64))
        pieces.append(ticks[ticks < end])
        now = int(ticks[-1])
        drawn += len(pieces[-1])
        require(
            drawn <= 2 * MAX_REQUESTS,
            f"too many requests: over {2 * MAX_REQUESTS} arrive at rate={rate}, burstiness={burstiness} "
            f"in {duration_s} s; lower the rate, the duration or the burstiness",
        )
    return np.concatenate(pieces) / _TICKS_PER_S


def build_workload(
    lengths: Lengths,
    rate: float,
    duration_s: float,
    *,
    arrivals: ArrivalProcess = "slots",
    seed: int = 0,
    burstiness: float = 1.0,
    name: str | None = None,
    max_model_len: int | None = None,
) -> Workload:
    """Build a workload as the paper's artifact does: draw arrivals, then take and shuffle lengths.

    Of the R arrivals' lengths, the first R pairs in file order are taken (the list is repeated if it is
    short) and shuffled once, with Python's generator seeded with ``seed``. See ``arrival_times`` for the
    other arguments.

    Args:
        lengths: the data set.
        name: name of the workload; by default made of the data set's name, rate, process and seed.
        max_model_len: if given, raise unless prompt + output of every request fits.
    """
    _require_lengths(lengths)
    times = arrival_times(rate, duration_s, arrivals=arrivals, seed=seed, burstiness=burstiness)
    order = [i % len(lengths) for i in range(len(times))]
    random.Random(int(seed)).shuffle(order)
    picked = np.array(order)
    process = f"gamma(cv={burstiness:g})" if arrivals == "gamma" else arrivals
    workload = Workload(
        name=name or f"{lengths.name}-{rate:g}rps-{duration_s:g}s-{process}-seed{seed}",
        arrival_s=times,
        prompt_tokens=lengths.prompt[picked],
        output_tokens=lengths.output[picked],
        source=f"{lengths.source}; arrivals {process}, rate {rate:g}/s, {duration_s:g} s, seed {seed}",
    )
    return workload if max_model_len is None else workload.require_fit(max_model_len)


def translation_workload(
    lengths: Lengths,
    rate: float,
    duration_s: float,
    *,
    prefix_tokens: int,
    seed: int = 0,
    arrivals: ArrivalProcess = "slots",
    max_total_tokens: int = 2047,
) -> Workload:
    """Build the shared-prefix translation workload of figure 16.

    A prompt is the shared prefix (80 tokens with one example, 341 with five) and the source sentence; the
    output is as long as the reference translation. Requests over ``max_total_tokens`` are left out.
    """
    _require_lengths(lengths)
    prefix = validate.whole_number(prefix_tokens, "prefix_tokens")
    prompts = dataclasses.replace(lengths, prompt=lengths.prompt + prefix).with_total_at_most(max_total_tokens)
    workload = build_workload(prompts, rate, duration_s, arrivals=arrivals, seed=seed)
    return dataclasses.replace(
        workload,
        name=f"{lengths.name}+{prefix}-{rate:g}rps-{duration_s:g}s-seed{seed}",
        prefix_tokens=prefix,
        source=f"{workload.source}; shared prefix {prefix} tokens",
    )


def _require_lengths(lengths: object) -> None:
    if not isinstance(lengths, Lengths):
        raise WorkloadError(f"lengths must be a Lengths value (see load_lengths), got {type(lengths).__name__}")
