"""Speculation changes no distribution, and where drafts are not sampled no token."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.steps.sample import SampleInputs, sample
from paxkv.steps.verify import verify, verify_sampled
from tests.steps.sampling_cases import assert_distributed, exact, inputs, logits_of

run = jax.jit(verify, static_argnames="variant")
run_sampled = jax.jit(verify_sampled, static_argnames="variant")
sampled = jax.jit(sample, static_argnames="variant")
V = 40


def logits_for(rows: int, k: int, seed: int = 1, spread: float = 1.5) -> np.ndarray:
    return logits_of(rows * (k + 1), V, seed, spread).reshape(rows, k + 1, V)


def one_by_one(logits: np.ndarray, given: SampleInputs, variant: str) -> np.ndarray:
    """[R, k + 1] tokens sampled position by position, each drawn one known to the next."""
    rows, width, _ = logits.shape
    tokens = np.full((rows, width), -1, np.int32)
    for at in range(width):
        now = given
        if variant != "greedy":
            now = dataclasses.replace(given, positions=given.positions + at)
        if variant == "full":
            now = dataclasses.replace(now, history=np.concatenate([given.history, tokens], axis=1))
        tokens[:, at] = sampled(logits[:, at], now, variant=variant).tokens
    return tokens


@pytest.mark.parametrize(("k", "variant"), [(4, "greedy"), (4, "sample"), (4, "full"), (1, "sample")])
def test_tokens_are_those_without_speculation(k, variant):
    """Whatever is proposed: all right, right up to some place, all wrong, fewer than k, none."""
    rows = 48
    logits = logits_for(rows, k)
    given = inputs(rows, temperature=np.where(np.arange(rows) % 4 == 0, 0, 0.9), top_k=np.arange(rows) % 3 * 9)
    if variant == "greedy":
        given = SampleInputs()
    if variant == "full":
        history = np.random.default_rng(0).integers(0, V, (rows, 6))
        given = dataclasses.replace(
            given,
            history=history.astype(np.int32),
            prompt_lens=np.full(rows, 4, np.int32),
            repetition=np.full(rows, 1.3, np.float32),
            frequency=np.full(rows, 0.8, np.float32),
            presence=np.full(rows, 0.5, np.float32),
        )
    want = one_by_one(logits, given, variant)
    right = np.arange(rows) % (k + 2)  # how many drafts of each row are right; the last kind has too few drafts
    drafts = np.where(np.arange(k) < right[:, None], want[:, :k], (want[:, :k] + 1) % V).astype(np.int32)
    short = right == k + 1
    drafts[short, k // 2 :] = -1
    right = np.where(short, k // 2, right)
    found = run(logits, drafts, given, variant=variant)
    np.testing.assert_array_equal(found.accepted, right)
    np.testing.assert_array_equal(found.tokens, np.where(np.arange(k + 1) <= right[:, None], want, -1))


@pytest.mark.parametrize("rule", ["plain", "sampled"])
def test_distribution(rule):
    """The first tokens are distributed as without speculation, and acceptance is as likely as theory says."""
    rows, k = 1 << 14, 2
    rng = np.random.default_rng(2)
    table = logits_of(k + 1, V, seed=4, spread=1.0)
    values = {"temperature": 0.8, "top_k": 12}
    p = np.stack([exact(row, **values) for row in table])
    q = np.stack([exact(row, 1.0, 20) for row in logits_of(k, V, seed=6, spread=1.0) * 0.7 + table[:k] * 0.5])
    logits = jnp.broadcast_to(table, (rows, k + 1, V))
    given = inputs(rows, **values)
    if rule == "plain":
        drafts = np.tile(q.argmax(1).astype(np.int32), (rows, 1))
        found = run(logits, drafts, given, variant="sample")
        chance = p[0, drafts[0, 0]]
    else:
        drafts = np.stack([rng.choice(V, rows, p=row) for row in q], axis=1).astype(np.int32)
        probs = jnp.broadcast_to(q.astype(np.float32), (rows, k, V))
        found = run_sampled(logits, drafts, probs, given, variant="sample")
        chance = np.minimum(p[0], q[0]).sum()
    tokens, accepted = np.asarray(found.tokens), np.asarray(found.accepted)
    assert_distributed(tokens[:, 0], p[0])
    assert_distributed((accepted > 0).astype(int), np.asarray([1 - chance, chance]))
    went_on = accepted > 0
    assert_distributed(tokens[went_on, 1], p[1])
    assert_distributed(tokens[accepted > 1, 2], p[2])


def test_a_draft_of_the_models_own_distribution_is_always_accepted():
    rows, k = 64, 3
    logits = logits_for(rows, k)
    given = inputs(rows)
    probs = np.asarray(jax.nn.softmax(logits[:, :k], axis=-1))
    drafts = one_by_one(logits, inputs(rows, seed=9), "sample")[:, :k]
    found = run_sampled(logits, drafts, probs, given, variant="sample")
    assert np.asarray(found.accepted).mean() > k - 0.01
    np.testing.assert_array_equal(np.asarray(found.tokens)[:, :k][found.accepted == k], drafts[found.accepted == k])


def test_sampled_drafts_edges():
    """Greedy rows, rows without drafts, drafts that the model excludes."""
    rows, k = 6, 2
    logits = logits_for(rows, k, spread=3.0)
    best = logits.argmax(-1).astype(np.int32)
    given = inputs(rows, temperature=[0, 0, 1, 1, 1, 1], top_k=[0, 0, 0, 0, 1, 1])
    drafts = best[:, :k].copy()
    drafts[1] = (drafts[1] + 1) % V
    drafts[2] = -1
    drafts[3, 1] = -1
    drafts[5] = (drafts[5] + 1) % V
    probs = np.full((rows, k, V), 1 / V, np.float32)
    found = run_sampled(logits, drafts, probs, given, variant="full")
    accepted, tokens = np.asarray(found.accepted), np.asarray(found.tokens)
    assert accepted.tolist()[:3] == [2, 0, 0] and accepted[3] <= 1 and accepted.tolist()[4:] == [2, 0]
    assert tokens[0].tolist() == best[0].tolist() and tokens[1].tolist() == [best[1, 0], -1, -1]
    assert tokens[4].tolist() == best[4].tolist() and tokens[5].tolist() == [best[5, 0], -1, -1]
    # A row without drafts draws what it would have drawn without speculation.
    assert tokens[2].tolist() == [one_by_one(logits, given, "full")[2, 0], -1, -1]


def test_a_token_does_not_depend_on_the_batch():
    rows, k = 64, 3
    logits, given = logits_for(rows, k), inputs(rows, top_p=0.9)
    drafts = logits[:, :k].argmax(-1).astype(np.int32)
    probs = np.asarray(jax.nn.softmax(logits[:, :k] * 0.5, axis=-1))
    whole = run_sampled(logits, drafts, probs, given, variant="sample")
    for row in (0, 17, 63):
        one = jax.tree.map(lambda x, at=row: x[at : at + 1], (logits, drafts, probs, given))
        alone = run_sampled(*one, variant="sample")
        np.testing.assert_array_equal(alone.tokens[0], whole.tokens[row])


def test_refuses():
    logits, given = logits_for(2, 3), inputs(2)
    with pytest.raises(ValueError, match=r"logits \[R, k\+1, V\] and drafts \[R, k\], got \(2, 4, 40\) and \(2, 4\)"):
        verify(logits, np.zeros((2, 4), np.int32), given, variant="sample")
    drafts = np.zeros((2, 3), np.int32)
    with pytest.raises(ValueError, match=r"a distribution per draft, \(2, 3, 40\), got \(2, 4, 40\)"):
        verify_sampled(logits, drafts, np.zeros((2, 4, V), np.float32), given, variant="sample")
    with pytest.raises(ValueError, match="got 'greedy'; use verify"):
        verify_sampled(logits, drafts, np.zeros((2, 3, V), np.float32), given, variant="greedy")
