"""Beam search over a function: no slots, no parents, no cache; every beam is a list of ids, computed anew each step.

The rules are those of :mod:`paxkv.steps.beam`: of each beam the ``2 * width`` most likely tokens compete; the best
``width`` candidates that do not end live on; those that end count as finished if they are among the best ``width`` of
all. Nothing else is shared with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from paxkv.testing.dense import log_softmax


@dataclasses.dataclass(frozen=True)
class Beam:
    """One sequence: its output, its summed log-probability, and what it is ranked by."""

    token_ids: tuple[int, ...]
    logprob: float
    score: float


def naive_beam(
    next_logits: Callable[[Sequence[int]], NDArray[np.float64]],
    prompt: Sequence[int],
    width: int,
    max_tokens: int,
    *,
    end_ids: Collection[int] = (),
    length_penalty: float = 1.0,
    early_stopping: bool = False,
) -> list[Beam]:
    """At most ``width`` sequences, best first.

    Args:
        next_logits: ids → [V] logits of the token that follows.
        prompt: token ids.
        width: beams.
        max_tokens: most tokens of a sequence.
        end_ids: tokens that end one.
        length_penalty: a score is the log-probability divided by the length to this power.
        early_stopping: whether ``width`` finished sequences end the search.
    """

    def beam(ids: tuple[int, ...], logprob: float) -> Beam:
        return Beam(ids, logprob, logprob / len(ids) ** length_penalty)

    def score(one: Beam) -> float:
        return one.score

    live, finished = [Beam((), 0.0, 0.0)], []
    for length in range(1, max_tokens + 1):
        candidates = []
        for parent in live:
            logprobs = log_softmax(next_logits([*prompt, *parent.token_ids]))
            for token in np.argsort(-logprobs, kind="stable")[: 2 * width].tolist():
                candidates.append(beam((*parent.token_ids, token), parent.logprob + float(logprobs[token])))
        candidates.sort(key=lambda one: -one.logprob)
        finished += [one for one in candidates[:width] if one.token_ids[-1] in end_ids]
        live = [one for one in candidates if one.token_ids[-1] not in end_ids][:width]
        if length == max_tokens:
            finished += live
        finished = sorted(finished, key=lambda one: -one.score)[:width]
        if not live or (len(finished) == width and (early_stopping or finished[-1].score >= max(map(score, live)))):
            break
    return finished
