"""Speculation step by step over real pages: greedy output whatever is proposed, and nothing of what was rejected stays.

The engine does not speculate yet. These tests do, with the parts it will use: a step over the last token and the
drafts, :func:`paxkv.steps.verify.verify`, and the pages, from which the rejected tokens are not cleared: the next
step writes over them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import numpy as np
import pytest

from paxkv.sched.propose import propose
from paxkv.steps.sample import SampleInputs
from paxkv.steps.verify import verify
from paxkv.testing.tiny_model import tiny_config, tiny_params
from tests.models.session import Session

TOKENS, WIDTH = 64, 8
PROMPT = [72, 101, 108, 108, 111]
check = jax.jit(verify, static_argnames="variant")


@functools.cache
def params():
    return tiny_params()


def session() -> Session:
    return Session(tiny_config(), params(), page_size=8, width=WIDTH)


def feed(pages: Session, ids: list[int]) -> np.ndarray:
    """[V] logits behind ``ids``, given in pieces that fit."""
    for begin in range(0, len(ids), WIDTH):
        logits = pages.step({"a": ids[begin : begin + WIDTH]})["a"]
    return logits[-1]


@functools.cache
def greedy(prompt: tuple[int, ...]) -> list[int]:
    """Token by token."""
    pages = session()
    tokens = [int(feed(pages, list(prompt)).argmax())]
    while len(tokens) < TOKENS:
        tokens.append(int(pages.step({"a": tokens[-1:]})["a"][-1].argmax()))
    return tokens


Drafter = Callable[[list[int], int], list[int]]


def speculate(prompt: list[int], k: int, draft: Drafter, tokens: int) -> tuple[list[int], list[int], Session]:
    """The output, the drafts accepted in each step, and the pages. ``draft`` gets all known tokens."""
    pages, accepted = session(), []
    ids = [*prompt, int(feed(pages, prompt).argmax())]
    limit = len(prompt) + tokens
    while len(ids) < limit:
        drafts = draft(ids, min(k, limit - len(ids) - 1))
        logits = np.full((1, k + 1, tiny_config().vocab_size), np.nan, np.float32)
        got = pages.step({"a": [ids[-1], *drafts]})["a"]
        logits[0, : len(got)], logits[0, len(got) :] = got, got[-1]
        given = np.full((1, k), -1, np.int32)
        given[0, : len(drafts)] = drafts
        found = check(logits, given, SampleInputs(), variant="greedy")
        count = int(found.accepted[0])
        ids += np.asarray(found.tokens[0, : count + 1]).tolist()
        pages.lengths["a"] = len(ids) - 1  # what is behind it stays in the pages and is nobody's
        accepted.append(count)
    return ids[len(prompt) :], accepted, pages


def same(ids: list[int], count: int) -> list[int]:
    """A draft model with the target's weights."""
    done = len(ids) - len(PROMPT)
    return greedy(tuple(PROMPT))[done : done + count]


def wrong(ids: list[int], count: int) -> list[int]:
    return [(token + 1) % 256 for token in same(ids, count)]


def by_chance(ids: list[int], count: int) -> list[int]:
    """Right, wrong, or fewer than asked for."""
    draw = np.random.default_rng(len(ids))
    drafts = [token if draw.random() < 0.6 else int(draw.integers(256)) for token in same(ids, count)]
    return drafts[: draw.integers(0, count + 1)]


@pytest.mark.parametrize("draft", [same, wrong, by_chance])
@pytest.mark.parametrize("k", [1, 3, 5])
def test_greedy_output(k, draft):
    """Public fault B20: the target's own weights lose no proposal, however many steps; others change no token."""
    output, accepted, pages = speculate(PROMPT, k, draft, TOKENS)
    assert output == greedy(tuple(PROMPT))
    if draft is same:
        assert all(count == k for count in accepted[:-1])
        assert abs(len(accepted) - -(-TOKENS // (k + 1))) <= 1
    if draft is wrong:
        assert accepted == [0] * (TOKENS - 1)
    if draft is by_chance:
        assert 0 < sum(accepted) < TOKENS - len(accepted)
    # Every slot that counts holds an accepted token: what follows is what fresh pages give.
    assert pages.lengths["a"] == len(PROMPT) + TOKENS - 1
    after = [output[-1], 7, 8]
    fresh = session()
    feed(fresh, [*PROMPT, *output[:-1]])
    want = fresh.step({"a": after})["a"]
    np.testing.assert_allclose(pages.step({"a": after})["a"], want, rtol=0, atol=1e-5 * np.abs(want).max())


@pytest.mark.parametrize("tokens", [1, 2, 3, 40])
def test_prompt_lookup_keeps_the_limit(tokens):
    """Public fault B21: no proposal and no output past the limit; the output is plain greedy's."""
    proposed = []

    def lookup(ids: list[int], count: int) -> list[int]:
        found = list(propose(ids, 3, n=1, limit=len(PROMPT) + tokens))
        assert len(found) <= count
        proposed.append(found)
        return found

    output, accepted, _ = speculate(PROMPT, 3, lookup, tokens)
    assert output == greedy(tuple(PROMPT))[:tokens]
    assert len(accepted) + sum(accepted) == tokens - 1
    assert any(proposed) == (tokens == 40)
