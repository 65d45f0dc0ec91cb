"""Beam search against an oracle that keeps whole sequences, and the slots that the scheduler will use."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.sched.beam import place
from paxkv.steps.beam import BeamSearch


class Table:
    """A toy model: the next token's log-probabilities are drawn anew for each sequence of tokens."""

    def __init__(self, vocab: int, seed: int) -> None:
        self.vocab, self.seed = vocab, seed

    def logprobs(self, tokens) -> np.ndarray:
        scores = np.random.default_rng([self.seed, len(tokens), *tokens]).normal(size=self.vocab) * 2
        return (scores - np.log(np.exp(scores).sum())).astype(np.float32)

    def top(self, tokens, count: int) -> tuple[np.ndarray, np.ndarray]:
        logprobs = self.logprobs(tokens)
        ids = np.argsort(-logprobs, kind="stable")[:count]
        return ids, logprobs[ids]


def oracle(table: Table, width: int, end_ids, penalty: float, early: bool, max_tokens: int):
    """Beam search by its definition: whole sequences in a list, every score computed again from the model."""

    def total(tokens):
        return sum(float(table.logprobs(tokens[:at])[token]) for at, token in enumerate(tokens))

    def score(tokens):
        return total(tokens) / len(tokens) ** penalty

    beams, finished = [()], []
    for length in range(1, max_tokens + 1):
        candidates = [(*beam, token) for beam in beams for token in range(table.vocab)]
        candidates.sort(key=lambda tokens: -total(tokens))
        ending = [tokens for tokens in candidates[:width] if tokens[-1] in end_ids]
        finished = sorted(finished + ending, key=lambda tokens: -score(tokens))[:width]
        beams = [tokens for tokens in candidates if tokens[-1] not in end_ids][:width]
        if length == max_tokens:
            finished = sorted(finished + beams, key=lambda tokens: -score(tokens))[:width]
            break
        if len(finished) == width and (early or score(finished[-1]) >= max(map(score, beams))):
            break
    return [(tokens, score(tokens)) for tokens in finished], length


def search(table: Table, width: int, end_ids, penalty: float, early: bool, max_tokens: int):
    """Runs a BeamSearch as an engine does; slots move as the scheduler moves them."""
    beam = BeamSearch(width, end_ids, length_penalty=penalty, early_stopping=early, max_tokens=max_tokens)
    tokens, done = beam.first(*table.top((), 2 * width))
    slots = [(token,) for token in tokens]
    while not done:
        tops = [table.top(slot, 2 * width) for slot in slots]
        parents, tokens, done = beam.step(*zip(*tops, strict=True))
        assert place(parents, width) == parents  # the scheduler's slots are the search's
        slots = [(*slots[parent], token) for parent, token in zip(parents, tokens, strict=True)]
    return beam, len(slots[0])


@given(
    seed=st.integers(0, 10_000),
    width=st.integers(1, 6),
    num_ends=st.integers(0, 2),
    penalty=st.sampled_from([0.0, 1.0, 2.0, -0.5]),
    early=st.booleans(),
    max_tokens=st.integers(1, 7),
)
def test_oracle(seed, width, num_ends, penalty, early, max_tokens):
    table = Table(max(9, 2 * width), seed)
    end_ids = tuple(range(num_ends))
    want, steps = oracle(table, width, end_ids, penalty, early, max_tokens)
    beam, found_steps = search(table, width, end_ids, penalty, early, max_tokens)
    found = beam.best(width)
    assert [sequence.token_ids for sequence in found] == [tokens for tokens, _ in want]
    np.testing.assert_allclose([sequence.score for sequence in found], [score for _, score in want], rtol=1e-5)
    assert [sequence.ended for sequence in found] == [tokens[-1] in end_ids for tokens, _ in want]
    assert found_steps == steps
    assert beam.best(1) == found[:1]


def test_wide_enough_is_exhaustive():
    """A width that holds every prefix finds the most likely sequence."""
    table = Table(4, 3)
    beam, _ = search(table, 16, (), 0.0, False, 3)
    every = itertools.product(range(4), repeat=3)
    best = max(every, key=lambda ids: sum(table.logprobs(ids[:at])[token] for at, token in enumerate(ids)))
    assert beam.best(1)[0].token_ids == best


@given(st.integers(2, 24).flatmap(lambda n: st.lists(st.integers(0, n - 1), min_size=n, max_size=n)))
def test_the_scheduler_keeps_our_slots(choice):
    """For any parents: survivors stay, each child is where its token is, and placing again changes nothing."""
    width = len(choice)
    beam = BeamSearch(width, (), max_tokens=3)
    beam.first(range(width), [0.0] * width)
    ids = [[1000 * parent + rank for rank in range(width)] for parent in range(width)]
    scores = np.full((width, width), -100.0)
    for parent in range(width):
        scores[parent, : choice.count(parent)] = 0.0
    parents, tokens, _ = beam.step(ids, scores)
    assert sorted(parents) == sorted(choice)
    assert all(parents[parent] == parent for parent in parents)
    assert place(parents, width) == parents
    assert [token // 1000 for token in tokens] == list(parents)
    assert len(set(tokens)) == width


def test_ties_go_to_the_lower_slot():
    beam = BeamSearch(2, (), max_tokens=5)
    assert beam.first([5, 6, 7, 8], [-1.0] * 4) == ((5, 6), False)
    assert beam.step([[1, 2, 3, 4], [1, 2, 3, 4]], np.full((2, 4), -1.0)) == ((0, 0), (1, 2), False)


def test_an_end_outside_the_width_is_not_finished():
    beam = BeamSearch(2, (9,), max_tokens=5)
    beam.first([1, 2, 9, 3], [-1.0, -2.0, -3.0, -4.0])
    assert beam.finished == []
    beam = BeamSearch(2, (8, 9), max_tokens=5)
    beam.first([9, 1, 8, 2], [-1.0, -2.0, -3.0, -4.0])  # 8 comes before the second beam, and third of all
    assert [found.token_ids for found in beam.finished] == [(9,)]


@pytest.mark.parametrize("early", [True, False])
def test_early_stopping(early):
    """Two sequences are finished; a beam still scores better than the worse of them."""
    beam = BeamSearch(2, (9,), length_penalty=2.0, early_stopping=early, max_tokens=9)
    assert beam.first([1, 9, 2, 3], [-0.9, -1.0, -1.1, -5.0]) == ((1, 2), False)
    assert beam.step([[9, 1, 2, 3], [1, 2, 3, 4]], [[-0.1, -0.2, -5.0, -5.0], [-5.0] * 4])[2] is early
    assert [found.score for found in beam.finished] == pytest.approx([-0.25, -1.0])


def test_no_beam_can_win():
    beam = BeamSearch(2, (8, 9), max_tokens=9)
    assert beam.first([9, 8, 1, 2], [-1.0, -1.1, -1.2, -1.3])[1]


def test_too_few_candidates_leave_dead_beams():
    beam = BeamSearch(3, (0, 1), max_tokens=2)
    tokens, done = beam.first([0, 1, 2], [-1.0, -2.0, -3.0])
    assert len(tokens) == 3 and tokens[0] == 2 and not done
    assert [found.token_ids for found in beam.best(3)] == [(0,), (1,), (2,)]
    parents, _, done = beam.step([[5, 6, 7]] * 3, [[-1.0, -2.0, -3.0]] * 3)
    assert parents == (0, 0, 0) and done
    assert all(found.logprob > -math.inf for found in beam.best(3))
    beam = BeamSearch(2, (0, 1), max_tokens=9)
    assert beam.first([0, 1], [-1.0, -2.0])[1]  # every beam is dead: it is over


def test_refuses():
    with pytest.raises(ValueError, match="width of at least 1, got 0"):
        BeamSearch(0, (), max_tokens=3)
    with pytest.raises(ValueError, match="max_tokens of at least 1, got 0"):
        BeamSearch(2, (), max_tokens=0)
    beam = BeamSearch(2, (), max_tokens=2)
    with pytest.raises(ValueError, match="call first"):
        beam.step([[1, 2]] * 2, [[-1, -2]] * 2)
    beam.first([1, 2, 3, 4], [-1, -2, -3, -4])
    with pytest.raises(ValueError, match="call step"):
        beam.first([1, 2, 3, 4], [-1, -2, -3, -4])
    with pytest.raises(ValueError, match="each of 2 beams, got 3"):
        beam.step([[1, 2]] * 3, [[-1, -2]] * 3)
    with pytest.raises(ValueError, match="1 to 2 results, got n=3"):
        beam.best(3)
    assert beam.step([[1, 2]] * 2, [[-1, -2]] * 2)[2]
    with pytest.raises(ValueError, match="the search is over after 2 tokens"):
        beam.step([[1, 2]] * 2, [[-1, -2]] * 2)
