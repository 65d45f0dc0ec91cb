"""Prompts found in the cache: what may be shared, what must be computed, and when a page is there."""

from __future__ import annotations

import pytest

from paxkv.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)


def run(engine) -> list:
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


@pytest.fixture
def engine(make):
    return make(prefix_caching=True)


@pytest.mark.parametrize("length", [16, 31, 32, 33, 48])
def test_whole_prompt_cached(engine, prompt, dense, length):
    """One token at least is computed, for its logits; a third run finds as much as the second (public fault B09)."""
    ids = prompt(length)
    runs = [engine.generate([ids], GREEDY)[0] for _ in range(3)]
    assert {run.token_ids for run in runs} == {dense(ids, GREEDY)}
    assert [run.cached_tokens for run in runs] == [0, (length - 1) // 16 * 16, (length - 1) // 16 * 16]


def test_keys_are_complete(engine, prompt, dense):
    """Tokens, adapter and salt all tell pages apart, and an adapter is not a salt of the same name (B10)."""
    ids = prompt(33)
    names = [(None, None), ("X", None), (None, "X"), ("Y@1", None), ("Y@2", None)]
    for round_ in range(2):
        for adapter, salt in names:
            engine.add_request(ids, GREEDY, adapter=adapter, salt=salt)
            output = [output for output in run(engine) if output.finished][0]
            assert output.token_ids == dense(ids, GREEDY)
            assert output.cached_tokens == (32 if round_ else 0)


def test_a_page_is_found_behind_its_own_parent_only(engine, prompt):
    first, second, other = prompt(16), prompt(16, seed=1), prompt(16, seed=2)
    engine.generate([[*first, *second, 1]], GREEDY)
    (output,) = engine.generate([[*other, *second, 1]], GREEDY)
    assert output.cached_tokens == 0


def test_a_recycled_page_is_forgotten(make, prompt, dense):
    """Another request's pages have taken the place of the first one's (B11)."""
    engine = make(prefix_caching=True)
    for seed in range(8):
        engine.generate([prompt(48, seed=seed)], GREEDY)
    (output,) = engine.generate([prompt(48, seed=0)], GREEDY)
    assert output.cached_tokens == 0
    assert output.token_ids == dense(prompt(48, seed=0), GREEDY)
    assert engine.memory.cache.evictions > 8


def test_nothing_is_offered_before_it_is_computed(make, prompt, dense):
    """Two equal prompts in the same step, and one whose forerunner was aborted half-way (B13)."""
    ids, want = prompt(64), dense(prompt(64), GREEDY)
    both = make(prefix_caching=True).generate([ids, ids], GREEDY)
    assert [output.token_ids for output in both] == [want, want]
    engine = make(prefix_caching=True)
    first = engine.add_request(ids, GREEDY)
    engine.step()
    assert engine.abort(first)
    (output,) = engine.generate([ids], GREEDY)
    assert output.cached_tokens == 32
    assert output.token_ids == want
