"""Data sets rebuilt from the statistics in ``data/lengths.json``, so that nothing has to be downloaded.

The file holds no trace: histograms, rank tables and quantiles that ``scripts/make_lengths.py`` derived from the
public traces. What is rebuilt has the traces' marginal distributions and dependence, not their pairs or order.
"""

from __future__ import annotations

import functools
import importlib.resources
import json
from typing import Any

import numpy as np

from paxkv.workload.chat import Conversations
from paxkv.workload.summary import MAX_TURN_TOKENS, PAIR_BINS, SHIFT_BINS, cell_members, rank_bin_sizes
from paxkv.workload.validate import require
from paxkv.workload.workload import Lengths

__all__ = ["MAX_TURN_TOKENS", "rebuild_conversations", "rebuild_pairs", "statistics_file"]

_SEED = 2023


@functools.cache
def statistics_file() -> dict[str, Any]:
    """Return the embedded statistics, one entry per data set."""
    file = importlib.resources.files("paxkv.workload") / "data" / "lengths.json"
    return json.loads(file.read_text("utf-8"))


@functools.cache
def rebuild_pairs(name: str) -> Lengths:
    """Rebuild ``sharegpt``, ``alpaca`` or ``wmt16`` from its histograms and rank table.

    The histograms, and so the means, are met exactly, the rank table up to the few pairs that had to be
    moved because their total reached the edge.
    """
    return expand_pairs(name, statistics_file()[name])


def expand_pairs(name: str, described: dict[str, Any]) -> Lengths:
    """Invert ``summary.describe_pairs``: same counts, random within the cells of the table."""
    rng = np.random.RandomState(_SEED)
    joint = np.array(described["joint"])
    prompt, output = (_sorted_values(described[field]) for field in ("prompt", "output"))
    # Each rank bin of outputs is dealt, in random order, to the rows of the table; then each row's share
    # is put in random order against the row's prompts.
    starts = np.cumsum(rank_bin_sizes(len(output), PAIR_BINS))[:-1]
    columns = [rng.permutation(part) for part in np.split(output, starts)]
    used = np.zeros(len(joint), np.int64)
    paired = []
    for row in joint:
        share = [column[at : at + n] for column, at, n in zip(columns, used, row, strict=True)]
        paired.append(rng.permutation(np.concatenate(share)))
        used += row
    output = np.concatenate(paired)
    edge = described.get("edge")
    if edge is not None:
        _keep_below(prompt, output, edge["total"])
        prompts = np.array(edge["prompts"], np.int64)
        prompt = np.concatenate([prompt, prompts])
        output = np.concatenate([output, edge["total"] - prompts])
    order = rng.permutation(len(prompt))
    return Lengths(name, prompt[order], output[order], f"embedded:{name}")


def _sorted_values(histogram: dict[str, Any]) -> np.ndarray:
    counts = np.array(histogram["counts"], np.int64)
    return np.repeat(np.arange(len(counts)) + histogram["first"], counts)


def _keep_below(prompt: np.ndarray, output: np.ndarray, total: int) -> None:
    """Swap outputs, in place, until every pair stays below ``total``; prompts are sorted.

    A pair that is too long takes the longest output it can from a pair that can take its own.
    """
    for i in np.flatnonzero(prompt + output >= total)[::-1]:
        allowed = (output < total - prompt[i]) & (prompt + output[i] < total)
        require(
            bool(allowed.any()), f"no pair can take the output {output[i]} of a prompt of {prompt[i]} below {total}"
        )
        partner = int(np.argmax(np.where(allowed, output, -1)))
        output[i], output[partner] = output[partner], output[i]


@functools.cache
def rebuild_conversations() -> Conversations:
    """Rebuild ``sharegpt_turns`` from its rounds, turn quantiles and correlations."""
    return expand_conversations("sharegpt_turns", statistics_file()["sharegpt_turns"])


def expand_conversations(name: str, described: dict[str, Any]) -> Conversations:
    """Invert ``summary.describe_conversations``.

    Every turn gets a normal score, correlated within its conversation as described; within a cell, the k-th
    smallest score gets the k-th smallest length.
    """
    rng = np.random.RandomState(_SEED)
    rounds = np.repeat(*np.array(described["rounds"]).T)
    rng.shuffle(rounds)
    cells = list(zip(described["cells"], cell_members(rounds), strict=True))
    human = _scores(rounds, described["human"], np.zeros(int(rounds.sum())), rng)
    shift = np.zeros(len(human))
    for cell, members in cells:
        means = np.repeat(cell["shift"], rank_bin_sizes(len(members), SHIFT_BINS))
        shift[members[np.argsort(human[members], kind="stable")]] = means
    reply = _scores(rounds, described["reply"], shift, rng)
    lengths = {}
    for field, scores in (("human", human), ("reply", reply)):
        lengths[field] = np.zeros(len(scores), np.int64)
        for cell, members in cells:
            middles = (np.arange(len(members)) + 0.5) / len(members)
            logs = np.interp(middles, described["grid"], np.log1p(cell[field]))
            lengths[field][members[np.argsort(scores[members], kind="stable")]] = np.rint(np.expm1(logs))
    offsets = np.concatenate([[0], np.cumsum(rounds)])
    return Conversations(name, lengths["human"], lengths["reply"], offsets, f"embedded:{name}")


def _scores(rounds: np.ndarray, decay: list[float], shift: np.ndarray, rng: np.random.RandomState) -> np.ndarray:
    """Draw normal scores with the means ``shift``; what the correlation within a conversation leaves is noise.

    At distance d within a conversation the correlation is constant + part x decay**d.
    """
    constant, part, rho = decay
    common = np.repeat(rng.standard_normal(len(rounds)), rounds)
    fresh, noise = rng.standard_normal((2, len(shift)))
    drift = np.empty(len(shift))
    first = set((np.cumsum(rounds) - rounds).tolist())
    now = 0.0
    for i, shock in enumerate(fresh.tolist()):
        now = shock if i in first else rho * now + (1 - rho**2) ** 0.5 * shock
        drift[i] = now
    own = max(0.0, 1 - constant - part - float(np.var(shift)))
    return np.sqrt(constant) * common + np.sqrt(part) * drift + shift + np.sqrt(own) * noise
