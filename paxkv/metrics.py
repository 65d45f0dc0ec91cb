"""What is measured: latencies of requests, counters of the run, health of the pool. Pure functions and values.

Definitions (all times in seconds, on one clock):

* arrival: when the request was DUE, not when a worker picked it up.
* TTFT: first token - arrival.
* ITL: the gaps between successive tokens of one sequence; the wait for the first token is no gap.
* TPOT: (last - first) / (tokens - 1); a request of one token has none, and is left out of means.
* end to end: last token - arrival.
* normalised latency (paper section 6.1): mean over requests of (finish - arrival) / output tokens.

Failed requests enter no latency figure; they are counted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paxkv.config import require

Floats = NDArray[np.float64]

# -- one request ---------------------------------------------------------------------------------------------------


def ttft(arrival_s: float, token_times_s: Sequence[float]) -> float:
    """Time to first token. Raises ``ValueError`` without tokens, or for tokens before the arrival or out of order."""
    _check_times(arrival_s, token_times_s)
    return token_times_s[0] - arrival_s


def tpot(token_times_s: Sequence[float]) -> float | None:
    """Time per output token after the first; None for a single token."""
    _check_times(token_times_s[0] if len(token_times_s) else 0.0, token_times_s)
    if len(token_times_s) == 1:
        return None
    return (token_times_s[-1] - token_times_s[0]) / (len(token_times_s) - 1)


def itl(token_times_s: Sequence[float]) -> tuple[float, ...]:
    """Inter-token latencies: one fewer than tokens."""
    _check_times(token_times_s[0] if len(token_times_s) else 0.0, token_times_s)
    return tuple(after - before for before, after in zip(token_times_s, token_times_s[1:], strict=False))


def end_to_end(arrival_s: float, token_times_s: Sequence[float]) -> float:
    """Time from arrival to the last token."""
    _check_times(arrival_s, token_times_s)
    return token_times_s[-1] - arrival_s


def _check_times(arrival_s: float, token_times_s: Sequence[float]) -> None:
    require(
        len(token_times_s) > 0,
        "a latency needs at least one output token, got none; count the request as failed, or leave it out",
    )
    # A comparison with NaN is false, so this refuses NaN too.
    require(
        token_times_s[0] >= arrival_s,
        f"the first token must not come before the arrival, got token at {token_times_s[0]} and arrival at "
        f"{arrival_s}; take both from one clock, and the arrival from when the request was due",
    )
    for before, after in zip(token_times_s, token_times_s[1:], strict=False):
        require(after >= before, f"token times must not decrease, got {after} after {before}")


# -- many requests -------------------------------------------------------------------------------------------------


def ttfts(arrival_s: ArrayLike, first_token_s: ArrayLike) -> Floats:
    """TTFT of each request."""
    arrival, first = _columns(arrival_s=arrival_s, first_token_s=first_token_s)
    return _not_negative(first - arrival, "first_token_s - arrival_s")


def tpots(first_token_s: ArrayLike, last_token_s: ArrayLike, output_tokens: ArrayLike) -> Floats:
    """TPOT of each request; NaN where it has one token (``percentiles`` and ``mean`` leave NaN out)."""
    first, last, tokens = _columns(first_token_s=first_token_s, last_token_s=last_token_s, output_tokens=output_tokens)
    _check_tokens(tokens)
    gaps = np.where(tokens > 1, tokens - 1, np.nan)
    return _not_negative(last - first, "last_token_s - first_token_s") / gaps


def end_to_ends(arrival_s: ArrayLike, finish_s: ArrayLike) -> Floats:
    """End-to-end latency of each request."""
    arrival, finish = _columns(arrival_s=arrival_s, finish_s=finish_s)
    return _not_negative(finish - arrival, "finish_s - arrival_s")


def normalised_latencies(arrival_s: ArrayLike, finish_s: ArrayLike, output_tokens: ArrayLike) -> Floats:
    """(finish - arrival) / output tokens of each entry, s/token (paper section 6.1).

    The artifact counts one entry per sequence, and its finish is the end of the whole group.
    """
    arrival, finish, tokens = _columns(arrival_s=arrival_s, finish_s=finish_s, output_tokens=output_tokens)
    _check_tokens(tokens)
    return _not_negative(finish - arrival, "finish_s - arrival_s") / tokens


def mean(values: ArrayLike, failed: ArrayLike | None = None) -> float | None:
    """Mean of the values of requests that did not fail, NaN left out; None where nothing is left."""
    kept = _kept(values, failed)
    return float(kept.mean()) if kept.size else None


def percentiles(
    values: ArrayLike, ranks: Sequence[float] = (50, 90, 95, 99), failed: ArrayLike | None = None
) -> dict[str, float | None]:
    """``{"p50": ..., ...}`` over the requests that did not fail, NaN left out, linear between ranks.

    None for every rank where nothing is left. Raises ``ValueError`` for a rank outside [0, 100].
    """
    for rank in ranks:
        require(0 <= rank <= 100, f"a percentile's rank lies in [0, 100], got {rank!r}; use 99 for the 99th")
    kept = _kept(values, failed)
    found = np.percentile(kept, list(ranks)) if kept.size and len(ranks) else [None] * len(ranks)
    return {f"p{rank:g}": None if value is None else float(value) for rank, value in zip(ranks, found, strict=True)}


@dataclasses.dataclass(frozen=True)
class LatencySummary:
    """Latencies of a run. Percentiles by name (``p50``...), None where no request qualifies.

    Attributes:
        finished, failed: numbers of requests; only the finished ones enter the rest.
        normalised_latency_s: the paper's metric, s/token.
        ttft_s, tpot_s, end_to_end_s: percentiles and ``mean``.
    """

    finished: int
    failed: int
    normalised_latency_s: float | None
    ttft_s: dict[str, float | None]
    tpot_s: dict[str, float | None]
    end_to_end_s: dict[str, float | None]


def summarise(
    arrival_s: ArrayLike,
    first_token_s: ArrayLike,
    finish_s: ArrayLike,
    output_tokens: ArrayLike,
    failed: ArrayLike | None = None,
) -> LatencySummary:
    """The latencies of all requests at once; the columns of failed requests may hold anything."""
    columns = _columns(arrival_s=arrival_s, first=first_token_s, finish_s=finish_s, output_tokens=output_tokens)
    lost = _mask(failed, columns[0].size)
    arrival, first, finish, tokens = (column[~lost] for column in columns)
    normalised = normalised_latencies(arrival, finish, tokens)
    series = (ttfts(arrival, first), tpots(first, finish, tokens), end_to_ends(arrival, finish))
    ttft_s, tpot_s, end_to_end_s = ({"mean": mean(values), **percentiles(values)} for values in series)
    return LatencySummary(arrival.size, int(lost.sum()), mean(normalised), ttft_s, tpot_s, end_to_end_s)


def time_weighted_mean(values: ArrayLike, durations_s: ArrayLike) -> float | None:
    """Mean of a step function: each value weighs as long as it lasted; None where no time passed."""
    value, duration = _columns(values=values, durations_s=durations_s)
    _not_negative(duration, "durations_s")
    total = float(duration.sum())
    return float(value @ duration) / total if total > 0 else None


def _columns(**columns: ArrayLike) -> tuple[Floats, ...]:
    arrays = {name: np.asarray(column, np.float64) for name, column in columns.items()}
    shapes = {name: array.shape for name, array in arrays.items()}
    require(
        len(set(shapes.values())) == 1 and all(len(shape) == 1 for shape in shapes.values()),
        f"the columns must be of one dimension and equally long, got {shapes}",
    )
    return tuple(arrays.values())


def _not_negative(array: Floats, name: str) -> Floats:
    bad = np.flatnonzero(~(array >= 0))  # catches NaN, too
    require(
        bad.size == 0,
        f"{name} must not be negative or NaN, got {array[bad[:1]]} at row {bad[:1]}, {bad.size} such rows; "
        "mark failed requests as failed and take all times from one clock",
    )
    return array


def _check_tokens(tokens: Floats) -> None:
    bad = np.flatnonzero(~(tokens >= 1))
    require(
        bad.size == 0,
        f"output_tokens must be at least 1, got {tokens[bad[:1]]} at row {bad[:1]}; mark such a request as failed",
    )


def _mask(failed: ArrayLike | None, size: int) -> NDArray[np.bool_]:
    lost = np.zeros(size, bool) if failed is None else np.asarray(failed, bool)
    require(lost.shape == (size,), f"failed needs one entry for each of {size} requests, got shape {lost.shape}")
    return lost


def _kept(values: ArrayLike, failed: ArrayLike | None) -> Floats:
    (column,) = _columns(values=values)
    column = column[~_mask(failed, column.size)]
    return column[~np.isnan(column)]


# -- counters and health -------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Counters:
    """What has happened so far. A value: each method returns a later one, and no counter ever decreases.

    Attributes:
        prefix_queries, prefix_hits: prompt tokens looked up, found. Counted when a request is ADMITTED, once: neither
            the retries of a waiting request nor the return of a preempted one count (B32).
        preemptions: groups put out.
        recomputed_tokens: tokens computed again after a preemption.
        swapped_out_pages, swapped_in_pages: pages copied to and from the host pool.
        finished, failed: requests that ended, one way or the other.
    """

    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    recomputed_tokens: int = 0
    swapped_out_pages: int = 0
    swapped_in_pages: int = 0
    finished: int = 0
    failed: int = 0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            require(
                isinstance(value, int) and value >= 0,
                f"Counters.{field.name} is a whole number of at least 0, got {value!r}; counters never decrease",
            )
        require(
            self.prefix_hits <= self.prefix_queries,
            f"prefix_hits cannot exceed prefix_queries, got {self.prefix_hits} of {self.prefix_queries}; "
            "count both in tokens, at admission",
        )

    def add(self, **increments: int) -> Counters:
        """A later value. Raises ``ValueError`` for a negative increment or a counter that does not exist."""
        for name, increment in increments.items():
            require(
                name in Counters.__dataclass_fields__,
                f"no counter {name!r}; there are {', '.join(Counters.__dataclass_fields__)}",
            )
            require(
                isinstance(increment, int) and increment >= 0,
                f"counters never decrease: the increment of {name} must be a whole number of at least 0, got "
                f"{increment!r}",
            )
        return dataclasses.replace(self, **{name: getattr(self, name) + more for name, more in increments.items()})

    def admit(self, prompt_tokens: int, hit_tokens: int = 0) -> Counters:
        """A request was admitted for the first time, ``hit_tokens`` of its prompt found in the cache."""
        return self.add(prefix_queries=prompt_tokens, prefix_hits=hit_tokens)

    def resume(self, recomputed_tokens: int) -> Counters:
        """A preempted request came back and computes so many tokens again; no prefix query."""
        return self.add(recomputed_tokens=recomputed_tokens)

    def since(self, earlier: Counters) -> Counters:
        """What happened after ``earlier``, such as the end of a warm-up. ``ValueError`` if that is the later one."""
        return Counters(**{name: getattr(self, name) - getattr(earlier, name) for name in self.__dataclass_fields__})


@dataclasses.dataclass(frozen=True)
class Health:
    """The three figures that tell a healthy pool (claim 23: 80-90% utilisation, preemption rate near zero).

    Attributes:
        prefix_hit_rate: prompt tokens found in the cache, of those looked up; None before the first lookup.
        pool_utilisation: time-weighted mean share of device pages in use; None where no time passed.
        preemption_rate: preemptions per finished request; None before the first has finished.
    """

    prefix_hit_rate: float | None
    pool_utilisation: float | None
    preemption_rate: float | None

    @classmethod
    def of(cls, counters: Counters, pool_utilisation: float | None) -> Health:
        """Raises ``ValueError`` for a utilisation outside [0, 1]."""
        require(
            pool_utilisation is None or (math.isfinite(pool_utilisation) and 0 <= pool_utilisation <= 1),
            f"pool_utilisation is a share in [0, 1], got {pool_utilisation!r}; divide used pages by all pages",
        )
        return cls(
            counters.prefix_hits / counters.prefix_queries if counters.prefix_queries else None,
            pool_utilisation,
            counters.preemptions / counters.finished if counters.finished else None,
        )
