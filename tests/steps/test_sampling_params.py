"""SamplingParams and the seeds of requests."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys

import pytest

from paxkv.sampling import SamplingParams, request_seed


@pytest.mark.parametrize(
    ("values", "variant"),
    [
        ({"temperature": 0}, "greedy"),
        ({"beam_width": 4}, "greedy"),
        ({}, "sample"),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, "sample"),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, "full"),
        ({"presence_penalty": -0.5}, "full"),
        ({"frequency_penalty": 0.5}, "full"),
        ({"logit_bias": {3: 1.0}}, "full"),
        ({"min_tokens": 1}, "full"),
    ],
)
def test_variant(values, variant):
    assert SamplingParams(**values).variant == variant


def test_needs_history():
    assert not SamplingParams(logit_bias={1: 2}, min_tokens=3).needs_history
    assert SamplingParams(frequency_penalty=0.1).needs_history


@pytest.mark.parametrize(
    ("values", "count"), [({}, 1), ({"n": 3}, 3), ({"n": 2, "best_of": 5}, 5), ({"n": 2, "beam_width": 4}, 4)]
)
def test_num_seqs(values, count):
    assert SamplingParams(**values).num_seqs == count


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, float("nan"), float("inf"), "1", None, True)),
        *(("top_k", value) for value in (-1, 1.5, None, True)),
        *(("top_p", value) for value in (0, -0.5, 1.01, float("nan"), "0.5")),
        *(("min_p", value) for value in (-0.1, 1.1, float("nan"))),
        *(("repetition_penalty", value) for value in (0, -1, float("inf"))),
        *((name, float("nan")) for name in ("presence_penalty", "frequency_penalty", "length_penalty")),
        *(("logit_bias", value) for value in ([1], {"1": 1.0}, {-1: 1.0}, {1: float("-inf")}, {1: "x"}, None)),
        *(("logprobs", value) for value in (-1, 1.0, True)),
        *(("seed", value) for value in (1.5, 1 << 63, "1")),
        *(("max_tokens", value) for value in (0, -1, 2.0, None)),
        *(("min_tokens", value) for value in (-1, 17)),
        *(("ignore_eos", value) for value in (1, None)),
        *(("stop", value) for value in ("text", ["text"], ("",), (1,))),
        *(("stop_ids", value) for value in (2, [2], (-1,), (1.0,), (True,))),
        *(("n", value) for value in (0, 1.0)),
        *(("best_of", value) for value in (0, "2")),
        *(("beam_width", value) for value in (1, 2.0)),
        ("early_stopping", "never"),
    ],
)
def test_refuses_a_value(field, value):
    with pytest.raises(ValueError, match=rf"SamplingParams\.{field} must .*; ") as error:
        SamplingParams(**{field: value})
    assert repr(value) in str(error.value) or str(value) in str(error.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"temperature": 0, "n": 2}, "greedy decoding gives every sequence the same tokens"),
        ({"temperature": 0, "best_of": 2}, "set n=1"),
        ({"n": 3, "best_of": 2}, "best_of must be at least n"),
        ({"n": 3, "beam_width": 2}, "at most beam_width"),
        ({"beam_width": 2, "best_of": 2}, "drop best_of"),
        ({"beam_width": 2, "top_k": 5}, "leave out top_k or beam_width"),
        ({"beam_width": 2, "temperature": 0.7}, "leave them out"),
        ({"beam_width": 2, "logit_bias": {1: 1.0}}, "leave them out"),
    ],
)
def test_refuses_a_combination(values, words):
    with pytest.raises(ValueError, match=words):
        SamplingParams(**values)


def test_is_a_value():
    bias = {3: 1.0}
    params = SamplingParams(logit_bias=bias)
    bias[4] = 2.0
    assert dict(params.logit_bias) == {3: 1.0}
    with pytest.raises(TypeError):
        params.logit_bias[5] = 1.0
    for twin in (SamplingParams(logit_bias={3: 1.0}), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert twin == params and hash(twin) == hash(params)
    assert params != SamplingParams()


def test_seeds_differ_by_each_argument():
    seeds = {
        request_seed(seed, prompt, index)
        for seed in (0, 1, -1, 1 << 40)
        for prompt in ((), (0,), (1, 2), (2, 1), (1, 2, 0))
        for index in range(4)
    }
    assert len(seeds) == 4 * 5 * 4
    assert all(0 <= word < 1 << 32 for seed in seeds for word in seed)


def test_seeds_are_the_same_in_another_process():
    code = "from paxkv.sampling import request_seed; print(request_seed(42, [5, 6, 7], 1))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {str(request_seed(42, [5, 6, 7], 1))} == {"(1729538622, 2969857166)"}
