"""Beam search on the host: which candidates live on, which are finished, when the search is over.

The device reports, for each beam, the most likely next tokens and their log-probabilities. Each step ranks all of
them together. The best that do not end become the next beams; an ending one among the best ``width`` is set aside as
finished. The rules are those of Hugging Face transformers, which the paper's authors also started from:

- a score is the summed log-probability divided by the generated length (its end token counted) to the power
  ``length_penalty``; at most ``width`` finished sequences are kept;
- the search ends when ``width`` sequences are finished and either ``early_stopping`` is set or no beam scores better
  now than the worst of them; and at the length limit, where the beams count as finished too.

Beams have slots. A beam that continues a surviving parent stands in the parent's slot, laid out as
:func:`paxkv.sched.beam.place` does it, so that its block table stays where it is (paper section 4.4). If there are not
``width`` candidates that go on (a tiny vocabulary, many end tokens), the slots left over hold dead beams: their
log-probability is minus infinity, they are never finished, and candidates of theirs come last.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from paxkv.config import require
from paxkv.sched.beam import place


@dataclasses.dataclass(frozen=True)
class BeamSequence:
    """One sequence of a search.

    Attributes:
        token_ids: the output, its end token included.
        logprob: sum of its tokens' log-probabilities.
        score: what it is ranked by.
        ended: whether it ended with an end token; otherwise the limit, or nothing yet, stopped it.
    """

    token_ids: tuple[int, ...]
    logprob: float
    score: float
    ended: bool


class BeamSearch:
    """The state of one search.

    Args:
        width: beams, at least 1.
        end_ids: tokens that end a sequence.
        length_penalty: power of the length; above 0 favours long sequences, since log-probabilities are negative.
        early_stopping: whether ``width`` finished sequences end the search at once.
        max_tokens: most tokens of a sequence.

    Attributes:
        done: whether the search is over.
        finished: the finished sequences, best first.

    Raises:
        ValueError: a width or limit below 1.
    """

    def __init__(
        self,
        width: int,
        end_ids: Sequence[int],
        *,
        length_penalty: float = 1.0,
        early_stopping: bool = False,
        max_tokens: int,
    ) -> None:
        require(width >= 1, f"a beam search needs a width of at least 1, got {width!r}; use greedy decoding instead")
        require(max_tokens >= 1, f"a beam search needs max_tokens of at least 1, got {max_tokens!r}; raise it")
        self.width = width
        self.end_ids = frozenset(end_ids)
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.max_tokens = max_tokens
        self.done = False
        self.finished: list[BeamSequence] = []
        self._tokens: list[tuple[int, ...]] = [()]
        self._logprobs: list[float] = [0.0]

    def first(self, top_ids: Sequence[int], top_logprobs: Sequence[float]) -> tuple[tuple[int, ...], bool]:
        """The beams' first tokens.

        Args:
            top_ids: [2 * width] most likely tokens after the prompt, most likely first. (Any number of at least 1 will
                do; with less than ``width`` plus the number of end ids a beam may be dead.)
            top_logprobs: [2 * width] theirs.

        Returns:
            A token per slot, and whether the search is over.

        Raises:
            ValueError: it was called before.
        """
        require(
            self._tokens == [()] and not self.done,
            f"the first tokens of a search are chosen once, got beams of {len(self._tokens[0])} tokens; call step()",
        )
        _, tokens, done = self._choose(np.asarray(top_ids)[None], np.asarray(top_logprobs)[None])
        return tokens, done

    def step(
        self, top_ids: Sequence[Sequence[int]], top_logprobs: Sequence[Sequence[float]]
    ) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """The beams' next tokens.

        Args:
            top_ids: [width, 2 * width] most likely tokens after each beam, by slot, most likely first.
            top_logprobs: [width, 2 * width] theirs.

        Returns:
            The parent of each slot, its token, and whether the search is over.

        Raises:
            ValueError: the search has not begun or is over, or there are not ``width`` rows.
        """
        require(self._tokens != [()], "a search begins with the tokens after the prompt, got step(); call first()")
        require(not self.done, f"the search is over after {len(self._tokens[0])} tokens; call best()")
        require(
            len(top_ids) == self.width,
            f"a step needs a row of candidates for each of {self.width} beams, got {len(top_ids)}; give them by slot",
        )
        return self._choose(np.asarray(top_ids), np.asarray(top_logprobs))

    def best(self, n: int) -> tuple[BeamSequence, ...]:
        """The ``n`` best sequences, best first: the finished ones and, until the search is over, the beams as they are.
        Fewer if so few exist.

        Raises:
            ValueError: more are wanted than the search has beams.
        """
        require(1 <= n <= self.width, f"a search of width {self.width} has 1 to {self.width} results, got n={n}")
        open_beams = [] if self.done or self._tokens == [()] else self._live()
        return tuple(sorted([*self.finished, *open_beams], key=lambda found: -found.score)[:n])

    def _choose(self, ids: np.ndarray, logprobs: np.ndarray) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        per_row = ids.shape[1]
        totals = (np.asarray(self._logprobs)[:, None] + logprobs.astype(np.float64)).ravel()
        # A stable order: of equal candidates the one of the lower slot, then the one reported first.
        chosen: list[tuple[int, int, float]] = []
        for rank, index in enumerate(np.argsort(-totals, kind="stable")):
            parent, token, total = int(index) // per_row, int(ids.ravel()[index]), float(totals[index])
            if token not in self.end_ids:
                chosen.append((parent, token, total))
                if len(chosen) == self.width:
                    break
            elif rank < self.width and total > -math.inf:
                self._finish((*self._tokens[parent], token), total, ended=True)
        chosen += [(0, int(ids[0, 0]), -math.inf)] * (self.width - len(chosen))
        parents = _settled([parent for parent, _, _ in chosen], self.width) if len(ids) > 1 else (0,) * self.width
        waiting: dict[int, list[tuple[int, float]]] = {}
        for parent, token, total in reversed(chosen):
            waiting.setdefault(parent, []).append((token, total))
        picked = [waiting[parent].pop() for parent in parents]
        self._tokens = [(*self._tokens[p], token) for p, (token, _) in zip(parents, picked, strict=True)]
        self._logprobs = [total for _, total in picked]
        self.done = self._is_over()
        return parents, tuple(token for token, _ in picked), self.done

    def _is_over(self) -> bool:
        if len(self._tokens[0]) >= self.max_tokens:
            for beam in self._live():
                self._finish(beam.token_ids, beam.logprob, ended=False)
            return True
        scores = [beam.score for beam in self._live()]
        if not scores or len(self.finished) < self.width:
            return not scores
        return self.early_stopping or self.finished[-1].score >= max(scores)

    def _live(self) -> list[BeamSequence]:
        beams = zip(self._tokens, self._logprobs, strict=True)
        return [self._scored(ids, total, ended=False) for ids, total in beams if total > -math.inf]

    def _scored(self, token_ids: tuple[int, ...], logprob: float, *, ended: bool) -> BeamSequence:
        return BeamSequence(token_ids, logprob, logprob / len(token_ids) ** self.length_penalty, ended)

    def _finish(self, token_ids: tuple[int, ...], logprob: float, *, ended: bool) -> None:
        self.finished.append(self._scored(token_ids, logprob, ended=ended))
        self.finished.sort(key=lambda found: -found.score)  # stable: of equal scores the one found first stays ahead
        del self.finished[self.width :]


def _settled(parents: Sequence[int], width: int) -> tuple[int, ...]:
    """A layout that :func:`place` leaves as it is.

    The scheduler places the parents that it is given, and its slots must be ours. ``place`` keeps survivors where they
    are but may permute the rest of a layout that it made itself (from width 4 on), so it is applied until it does not.
    """
    layout = place(parents, width)
    while (again := place(layout, width)) != layout:
        layout = again
    return layout
