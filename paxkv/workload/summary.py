"""Statistics of length data sets: distances between two of them, and the compact forms that paxkv embeds.

``scripts/make_lengths.py`` derives the embedded file with this module; ``embedded.py`` turns it back into data.
"""

from __future__ import annotations

from statistics import NormalDist
from typing import Any

import numpy as np

from paxkv.workload.chat import Conversations
from paxkv.workload.workload import Lengths

PAIR_BINS = 32
TAIL_BINS = 4
ROUND_CLASSES = ((1, 1), (2, 2), (3, 3), (4, 6), (7, 12), (13, None))
"""Conversations are described apart by their number of rounds: long ones have far shorter replies."""
TURN_CLASSES = ((0, 0), (1, 2), (3, None))
SHIFT_BINS = 16
MAX_TURN_TOKENS = 8192
QUANTILE_GRID = tuple(
    sorted({*(i / 64 for i in range(65)), 0.005, 0.01, 0.0225, 0.97, 0.98, 0.99, 0.9925, 0.995, 0.9975, 0.999})
)
_TIE_SEED = 20230916


def ks_distance(first: np.ndarray, second: np.ndarray) -> float:
    """Kolmogorov-Smirnov distance: the largest gap between two empirical distribution functions."""
    at = np.union1d(first, second)
    below = [np.searchsorted(np.sort(values), at, side="right") / len(values) for values in (first, second)]
    return float(np.abs(below[0] - below[1]).max())


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Spearman's rank correlation, ties given their mean rank."""
    return _correlation(_mean_ranks(first), _mean_ranks(second))


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    return float(np.corrcoef(first, second)[0, 1])


def _mean_ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[inverse.reshape(-1)]


def compare(first: Lengths, second: Lengths) -> dict[str, float]:
    """Return the KS distances on both marginals and the sum, rank correlations and means of two data sets."""
    return {
        "ks_prompt": ks_distance(first.prompt, second.prompt),
        "ks_output": ks_distance(first.output, second.output),
        "ks_sum": ks_distance(first.prompt + first.output, second.prompt + second.output),
        "rank_first": rank_correlation(first.prompt, first.output),
        "rank_second": rank_correlation(second.prompt, second.output),
        "prompt_mean_first": float(first.prompt.mean()),
        "prompt_mean_second": float(second.prompt.mean()),
        "output_mean_first": float(first.output.mean()),
        "output_mean_second": float(second.output.mean()),
    }


def describe_pairs(lengths: Lengths, *, edge_total: int | None = None) -> dict[str, Any]:
    """Reduce pairs to two histograms and a table of how their ranks go together.

    Args:
        lengths: the pairs.
        edge_total: pairs with exactly this total are described apart, by their prompts, so that a data set
            can be rebuilt with and without them (the paper prints means over totals up to 2048 and runs on
            totals below).

    Returns:
        ``prompt`` and ``output``: {first, counts}, the number of pairs for each value from ``first`` on;
        ``joint``: the number of pairs by rank bin of the prompt (row) and of the output (column); ``edge``.
    """
    edge = np.zeros(len(lengths), bool)
    if edge_total is not None:
        edge = lengths.prompt + lengths.output == edge_total
    prompt, output = lengths.prompt[~edge], lengths.output[~edge]
    rows, columns = _rank_bins(prompt, PAIR_BINS), _rank_bins(output, PAIR_BINS)
    joint = np.zeros((PAIR_BINS + TAIL_BINS - 1,) * 2, np.int64)
    np.add.at(joint, (rows, columns), 1)
    described = {"prompt": _histogram(prompt), "output": _histogram(output), "joint": joint.tolist()}
    if edge_total is not None:
        described["edge"] = {"total": edge_total, "prompts": np.sort(lengths.prompt[edge]).tolist()}
    return described


def _histogram(values: np.ndarray) -> dict[str, Any]:
    first = int(values.min())
    return {"first": first, "counts": np.bincount(values - first).tolist()}


def _rank_bins(values: np.ndarray, bins: int) -> np.ndarray:
    """Rank bin of each value, ties in random order."""
    ties = np.random.RandomState(_TIE_SEED).permutation(len(values))
    sizes = rank_bin_sizes(len(values), bins)
    bin_of_rank = np.repeat(np.arange(len(sizes)), sizes)
    result = np.empty(len(values), np.int64)
    result[np.lexsort((ties, values))] = bin_of_rank
    return result


def rank_bin_sizes(count: int, bins: int) -> np.ndarray:
    """Sizes of the rank bins of ``count`` values: ``bins`` equal ones, the last cut again into ``TAIL_BINS``.

    The finer tail keeps apart prompts that leave the model's maximum little room for an output.
    """
    shares = np.append(np.arange(bins - 1), bins - 1 + np.arange(TAIL_BINS + 1) / TAIL_BINS) / bins
    return np.diff(np.rint(shares * count).astype(np.int64))


def describe_conversations(conversations: Conversations) -> dict[str, Any]:
    """Reduce conversations to rounds, turn-length quantiles per class, and how turns go together.

    Returns:
        ``rounds``: [[rounds, conversations], ...]; ``cells``: for each class of ``ROUND_CLASSES`` and of
        ``TURN_CLASSES`` the quantiles of human and reply turns on ``grid``, and ``shift``, the mean normal score
        of the reply for each rank bin of the human turn (the reply first rises with
        the question's length, then falls: a correlation would miss it); ``human`` and ``reply``: the constant,
        the decaying part and the decay per round of the turns' correlation within a conversation. Normal
        scores are taken within a cell.
    """
    rounds, counts = np.unique(conversations.rounds, return_counts=True)
    turn = turn_numbers(conversations.rounds)
    cells = []
    scores = {"human": np.zeros(len(turn)), "reply": np.zeros(len(turn))}
    for members in cell_members(conversations.rounds):
        cell: dict[str, Any] = {}
        for field in ("human", "reply"):
            values = np.minimum(getattr(conversations, field)[members], MAX_TURN_TOKENS)
            cell[field] = _quantiles(values)
            scores[field][members] = _normal_scores(values)
        bins = _rank_bins(scores["human"][members], SHIFT_BINS)
        means = np.bincount(bins, scores["reply"][members]) / np.bincount(bins)
        cell["shift"] = means.round(3).tolist()
        cells.append(cell)
    return {
        "rounds": [[int(r), int(c)] for r, c in zip(rounds, counts, strict=True)],
        "grid": list(QUANTILE_GRID),
        "cells": cells,
        "human": _decay(scores["human"], turn),
        "reply": _decay(scores["reply"], turn),
    }


def turn_numbers(rounds: np.ndarray) -> np.ndarray:
    """Number of each turn in its conversation, from 0, for conversations of these numbers of rounds."""
    ends = np.cumsum(rounds)
    return np.arange(ends[-1]) - np.repeat(ends - rounds, rounds)


def cell_members(rounds: np.ndarray) -> list[np.ndarray]:
    """Indices of the turns in each cell that has any: class of the conversation's rounds, class of the turn."""
    turn, total = turn_numbers(rounds), np.repeat(rounds, rounds)

    def within(values: np.ndarray, least: int, most: int | None) -> np.ndarray:
        return (values >= least) & (values <= (values.max() if most is None else most))

    cells = [np.flatnonzero(within(total, *r) & within(turn, *t)) for r in ROUND_CLASSES for t in TURN_CLASSES]
    return [members for members in cells if members.size]


def _quantiles(values: np.ndarray) -> list[int]:
    return np.quantile(values, QUANTILE_GRID, method="inverted_cdf").astype(int).tolist()


def _normal_scores(values: np.ndarray) -> np.ndarray:
    at = (_mean_ranks(values) - 0.5) / len(values)
    grid = np.linspace(0, 1, 2001)[1:-1]
    return np.interp(at, grid, [NormalDist().inv_cdf(p) for p in grid])


def _decay(scores: np.ndarray, turn: np.ndarray) -> list[float]:
    """Fit correlation(lag) = constant + part x decay**lag by least squares over lags 1 to 8."""
    lags = np.arange(1, 9)
    correlation = []
    for lag in lags:
        later = np.flatnonzero(turn >= lag)
        correlation.append(_correlation(scores[later], scores[later - lag]))
    best = None
    for decay in np.arange(0.05, 1.0, 0.05):
        columns = np.stack([np.ones(len(lags)), decay**lags], axis=1)
        (constant, part), *_ = np.linalg.lstsq(columns, np.array(correlation), rcond=None)
        error = float(((columns @ [constant, part] - correlation) ** 2).sum())
        if constant >= 0 and part >= 0 and constant + part <= 1 and (best is None or error < best[0]):
            best = (error, [round(float(v), 3) for v in (constant, part, decay)])
    if best is None:
        return [round(float(np.clip(np.mean(correlation), 0, 1)), 3), 0.0, 0.5]
    return best[1]
