"""Sampling on the device: what is kept, with what probability it is drawn, and that a row is its own world."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paxkv.sampling import request_seed
from paxkv.steps.sample import SampleInputs, draw, kept_weights, penalise, position_keys, sample, uniforms
from tests.steps.sampling_cases import assert_distributed, exact, inputs, logits_of

keep = jax.jit(kept_weights)
penalised = jax.jit(penalise)
INF = float("inf")
R, V = 64, 97
"""The shape of most tests, so that they share what they compile."""


@functools.partial(jax.jit, static_argnames="variant")
def run(scores, given_inputs, *, variant):
    return sample(scores, given_inputs, variant=variant, top_logprobs=min(5, scores.shape[1]))


def filled(scores, width: int) -> np.ndarray:
    """[1, width] the scores, and tokens that cannot be behind them."""
    return np.float32([[*scores, *[-INF] * (width - len(scores))]])


def kept(scores: np.ndarray, given_inputs: SampleInputs) -> np.ndarray:
    """[R, V] weights in the order of ids."""
    return np.asarray(keep(scores, given_inputs)).reshape(len(scores), -1)[:, : scores.shape[1]]


# --- which tokens are kept ----------------------------------------------------------------------


@given(
    st.integers(0, 10_000),
    st.sampled_from([1, 0.3, 4]),
    st.sampled_from([0, 1, 2, 7, 40, 69, 70, 1000]),
    st.sampled_from([1, 1e-9, 0.1, 0.5, 0.9, 0.999, 1 - 2**-24]),
    st.sampled_from([0, 0.01, 0.5, 1]),
)
def test_filters_against_a_sort(seed, temperature, top_k, top_p, min_p):
    scores = logits_of(4, 70, seed)
    got = kept(scores, inputs(4, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    for row in range(4):
        probs = exact(scores[row], temperature, top_k, top_p, min_p)
        # Tokens that weigh less than the resolution are not drawn; and those within rounding of a limit may go
        # either way, which fixed seeds show does not happen here.
        visible = exact(scores[row], temperature) * 2.0**25 / exact(scores[row], temperature).max() >= 0.5
        np.testing.assert_array_equal(got[row] > 0, (probs > 0) & visible)
        np.testing.assert_allclose(got[row] / got[row].sum(), probs, atol=1e-6)


@pytest.mark.parametrize(
    ("scores", "values", "ids"),
    [
        ([1, 3, 3, 3, 2], {"top_k": 2}, [1, 2]),  # of equal ones the lowest ids
        ([3, 1, 3, 3, 3], {"top_k": 1}, [0]),
        ([0, 0, 0, 0], {"top_k": 3}, [0, 1, 2]),
        ([0, 0, 0, 0], {"top_p": 0.5}, [0, 1]),
        ([0, 0, 0, 0], {"top_p": 0.51}, [0, 1, 2]),
        ([0, 0, 0, 0], {"top_p": 1e-30}, [0]),
        ([0, 0, 0, 0], {"top_p": 1e-45}, [0]),
        ([0, 0, 0, 0], {"top_p": 1}, [0, 1, 2, 3]),
        ([1, 2, 3], {"top_k": 3}, [0, 1, 2]),
        ([1, 2, 3], {"top_k": 2**31 - 1}, [0, 1, 2]),
        ([-INF, 2, -INF, -INF], {"top_k": 3, "top_p": 0.9}, [1]),
        ([-INF, -INF], {}, []),
        ([0, np.log(2), np.log(4)], {"top_p": 0.57}, [2]),  # 4 of 7 is 0.571
        ([0, np.log(2), np.log(4)], {"top_p": 0.58}, [1, 2]),
        ([0, np.log(2), np.log(4)], {"top_k": 2, "top_p": 0.66}, [2]),  # 4 of 6: top_p sees what top_k left
        ([0, np.log(2), np.log(4)], {"min_p": 0.51}, [2]),
        ([0, np.log(2), np.log(4)], {"min_p": 0.49}, [1, 2]),
        ([0, np.log(2), np.log(4)], {"min_p": 0.49, "temperature": 2}, [0, 1, 2]),  # the temperature comes first
    ],
)
def test_filter_edges(scores, values, ids):
    got = kept(filled(scores, 5), inputs(1, **values))
    assert np.flatnonzero(got[0]).tolist() == ids


def test_filters_leave_unfiltered_rows_alone():
    scores = logits_of(4, 70)
    mixed = kept(scores, inputs(4, top_k=[0, 5, 0, 0], top_p=[1, 1, 0.5, 1]))
    plain = kept(scores, inputs(4))
    np.testing.assert_array_equal(mixed[::3], plain[::3])
    assert (mixed[1] > 0).sum() == 5 and 0 < (mixed[2] > 0).sum() < 70


# --- with what probability ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocab", "values"),
    [
        (5, {}),
        (33, {"temperature": 0.5}),
        (512, {"temperature": 1.3}),
        (512, {"top_k": 9}),
        (512, {"top_p": 0.8}),
        (512, {"temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.02}),
    ],
)
def test_distribution(vocab, values):
    scores = logits_of(1, vocab, seed=vocab, spread=1.5)
    rows = 1 << 14
    found = run(jnp.broadcast_to(scores, (rows, vocab)), inputs(rows, seed=vocab, **values), variant="sample")
    assert_distributed(np.asarray(found.tokens), exact(scores[0], **values))


def test_distribution_along_one_request():
    """One seed, many positions: the numbers of a request are as good as those of many."""
    scores = logits_of(1, 33, spread=1.0)
    rows = 1 << 14
    one = dataclasses.replace(inputs(rows), seeds=np.tile(np.uint32([[7, 9]]), (rows, 1)))
    found = np.asarray(run(jnp.broadcast_to(scores, (rows, 33)), one, variant="sample").tokens)
    assert_distributed(found, exact(scores[0]))
    pairs = found[:-1] * 33 + found[1:]
    assert_distributed(pairs, np.outer(exact(scores[0]), exact(scores[0])).ravel())


def test_a_large_flat_vocabulary_is_drawn_evenly():
    rows, vocab = 1 << 10, 152_064
    weights = jnp.broadcast_to(jnp.int32(1 << 25), (1, 32, vocab // 32))
    keys = position_keys(jnp.zeros((rows, 2), jnp.uint32), jnp.arange(rows, dtype=jnp.int32))
    tokens = np.concatenate([jax.jit(draw)(weights, keys[row : row + 1]) for row in range(rows)])
    assert_distributed(tokens * 16 // vocab, np.full(16, 1 / 16))
    assert_distributed(tokens % 16, np.full(16, 1 / 16))


def test_uniforms():
    keys = position_keys(jnp.asarray([[1, 2]], jnp.uint32), jnp.asarray([3], jnp.int32))
    numbers = np.asarray(uniforms(keys, 1 << 16))[0]
    assert 0 < numbers.min() and numbers.max() < 1
    assert_distributed((numbers * 64).astype(int), np.full(64, 1 / 64))
    np.testing.assert_array_equal(np.asarray(uniforms(keys, 5))[0], numbers[:5])


# --- a row is its own world ---------------------------------------------------------------------


def every_kind(rows: int = R, vocab: int = V) -> tuple[np.ndarray, SampleInputs]:
    """Rows of all kinds in turn: greedy, plain, filtered, penalised."""
    rng = np.random.default_rng(5)
    kind = np.arange(rows) % 5
    return logits_of(rows, vocab), inputs(
        rows,
        temperature=np.where(kind == 0, 0, 0.8),
        top_k=np.where(kind == 2, 20, 0),
        top_p=np.where(kind == 3, 0.9, 1),
        min_p=np.where(kind == 3, 0.01, 0),
        repetition=np.where(kind == 4, 1.2, 1),
        presence=np.where(kind == 4, 0.3, 0),
        frequency=np.where(kind == 4, 0.1, 0),
        history=np.where(np.arange(30) < 25, rng.integers(0, vocab, (rows, 30)), -1),
        prompt_lens=10,
    )


@functools.cache
def whole(vocab: int):
    return jax.device_get(run(*every_kind(R, vocab), variant="full"))


def assert_same_rows(found, rows, want) -> None:
    """The same tokens, and log-probabilities within the rounding of one sum of floats."""
    for name in ("tokens", "top_ids"):
        np.testing.assert_array_equal(np.asarray(getattr(found, name)), getattr(want, name)[rows], err_msg=name)
    for name in ("logprobs", "top_logprobs"):
        np.testing.assert_allclose(np.asarray(getattr(found, name)), getattr(want, name)[rows], rtol=0, atol=1e-6)


@pytest.mark.parametrize(("rows", "vocab", "padding"), [(1, V, 0), (2, V, 5), (33, V, 0), (3, 4096, 0)])
def test_a_token_does_not_depend_on_the_batch(rows, vocab, padding):
    """Fewer rows, in another order, and rows of zeros behind."""
    picked = np.random.default_rng(rows).permutation(R)[:rows]
    few = jax.tree.map(lambda x: np.pad(x[picked], ((0, padding), *[(0, 0)] * (x.ndim - 1))), every_kind(R, vocab))
    found = run(*few, variant="full")
    assert_same_rows(jax.tree.map(lambda x: x[:rows], found), picked, whole(vocab))


def test_a_token_does_not_depend_on_the_variant():
    scores, given_inputs = every_kind()
    plain = np.flatnonzero(np.arange(R) % 5 != 4)
    sampled = run(scores, given_inputs, variant="sample")
    assert_same_rows(jax.tree.map(lambda x: x[plain], sampled), plain, whole(V))
    greedy = np.flatnonzero(np.arange(R) % 5 == 0)
    cheap = run(scores, SampleInputs(), variant="greedy")
    assert_same_rows(jax.tree.map(lambda x: x[greedy], cheap), greedy, whole(V))


def test_flags_of_the_generators_change_nothing():
    scores, given_inputs = every_kind()
    want = np.asarray(run(scores, given_inputs, variant="sample").tokens)
    with jax.threefry_partitionable(False), jax.default_prng_impl("rbg"):
        again = jax.jit(lambda *args: sample(*args, variant="sample").tokens)
        np.testing.assert_array_equal(again(scores, given_inputs), want)


def test_seeds_of_one_request_and_of_two_prompts():
    """B17: four samples of one seed differ, a second run gives the same, another prompt draws other numbers."""
    flat = np.zeros((R, V), np.float32)

    def tokens(prompt, index):
        seeds = np.tile(np.asarray([request_seed(42, prompt, index)], np.uint32), (R, 1))
        return tuple(np.asarray(run(flat, dataclasses.replace(inputs(R), seeds=seeds), variant="sample").tokens))

    runs = [tokens((1, 2, 3), index) for index in range(4)]
    assert len(set(runs)) == 4
    assert runs == [tokens((1, 2, 3), index) for index in range(4)]
    other = tokens((1, 2, 4), 0)
    assert sum(a == b for a, b in zip(runs[0], other, strict=True)) < 6  # one in 97 by chance


# --- greedy, odd logits, penalties --------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "token", "logprob"),
    [
        ([1, 3, 3, 2], 1, 3 - np.log(np.exp([1, 3, 3, 2]).sum())),
        ([np.nan, 1, np.nan], 1, 0),
        ([np.nan] * 3, 0, -INF),
        ([-INF] * 3, 0, -INF),
        ([-INF, -5, -INF], 1, 0),
        ([0, INF, INF], 1, -np.log(2)),
        ([INF, np.nan, 3], 0, 0),
        ([0.0, -0.0], 0, -np.log(2)),
    ],
)
@pytest.mark.parametrize("variant", ["greedy", "sample", "full"])
def test_odd_logits(scores, token, logprob, variant):
    found = run(filled(scores, 4), inputs(1, temperature=0), variant=variant)
    assert found.tokens.tolist() == [token] == found.top_ids[0, :1].tolist()
    np.testing.assert_allclose(found.logprobs, [logprob], rtol=1e-6)
    np.testing.assert_allclose(found.top_logprobs[0, :1], [logprob], rtol=1e-6)


def test_a_vocabulary_of_one():
    found = run(np.float32([[7]]), SampleInputs(), variant="greedy")
    assert (found.tokens.tolist(), found.top_ids.tolist(), found.logprobs.tolist()) == ([0], [[0]], [0])


@pytest.mark.parametrize("scores", [[np.nan], [-INF], [np.nan, INF], [3e38, -3e38]])
def test_odd_logits_are_sampled_within_the_vocabulary(scores):
    logits = np.resize(np.float32(scores), (R, V + 1))[:, :V]  # each row begins anew, since V + 1 is even
    tokens = np.asarray(run(logits, inputs(R, top_k=3, top_p=0.9), variant="sample").tokens)
    best = np.flatnonzero(np.isin(logits[0], np.float32([INF, 3e38])))
    assert set(tokens) <= set(best[:3] if best.size else [0])  # top_k is 3


@pytest.mark.parametrize("temperature", [1e-45, 1e-39, 1e-30, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature):
    scores = logits_of(R, V)
    found = run(scores, inputs(R, temperature=temperature), variant="sample")
    assert found.tokens.tolist() == scores.argmax(1).tolist()


def test_logprobs_are_the_models_own():
    scores, found = every_kind()[0], whole(V)
    exact_logits = scores.astype(np.float64)
    want = exact_logits - np.log(np.exp(exact_logits).sum(1, keepdims=True))
    np.testing.assert_allclose(found.logprobs, want[np.arange(R), found.tokens], rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(found.top_ids, np.argsort(-scores, axis=1, kind="stable")[:, :5])
    np.testing.assert_allclose(found.top_logprobs, -np.sort(-want, axis=1)[:, :5], rtol=1e-5, atol=1e-6)


def naive_penalties(logits, history, prompt_len, repetition, presence, frequency, bias, bans):
    logits = logits.astype(np.float64).copy()
    for token, value in bias.items():
        logits[token] += value
    for token in set(history):
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token in set(history[prompt_len:]):
        logits[token] -= frequency * history[prompt_len:].count(token) + presence
    logits[list(bans)] = -INF
    return logits


def test_penalties_against_a_naive_count():
    rng = np.random.default_rng(3)
    for case in range(20):
        history = rng.integers(0, 12, rng.integers(0, 15)).tolist()
        prompt_len = int(rng.integers(0, len(history) + 1))
        repetition, presence, frequency = rng.uniform(0.5, 2), rng.normal(), rng.normal()
        bias = {int(token): float(rng.normal()) for token in rng.choice(20, 3, replace=False)}
        bans = rng.choice(20, 2, replace=False).tolist()
        logits = logits_of(1, 20, seed=case)
        given_inputs = inputs(
            1,
            temperature=0,
            repetition=repetition,
            presence=presence,
            frequency=frequency,
            history=[history + [-1] * (16 - len(history))],
            prompt_lens=prompt_len,
            bias_ids=[[*bias, -1]],
            bias_values=[[*bias.values(), 99.0]],
            ban_ids=[[*bans, -1, -1]],
        )
        want = naive_penalties(logits[0], history, prompt_len, repetition, presence, frequency, bias, bans)
        found = run(logits, given_inputs, variant="full")
        assert found.tokens.tolist() == [want.argmax()]
        sampled = kept(np.asarray(want[None], np.float32), given_inputs)
        direct = np.asarray(keep(penalised(logits, given_inputs), given_inputs)).reshape(1, -1)[:, :20]
        np.testing.assert_allclose(direct / direct.sum(), sampled / sampled.sum(), atol=1e-6)


def test_refuses():
    scores = logits_of(2, 10)
    with pytest.raises(ValueError, match="greedy, sample, full, got 'beam'"):
        sample(scores, inputs(2), variant="beam")
    with pytest.raises(ValueError, match="got None for seeds"):
        sample(scores, dataclasses.replace(inputs(2), seeds=None), variant="sample")
    with pytest.raises(ValueError, match="in 0..V=10, got 11"):
        sample(scores, inputs(2), variant="greedy", top_logprobs=11)
