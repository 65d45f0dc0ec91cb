"""The tiny model says something: its greedy outputs vary, and differ with the prompt and the seed."""

from __future__ import annotations

import numpy as np
import pytest

from paxkv.models.weights import check_params
from paxkv.testing.tiny_model import tiny_config, tiny_params
from tests.models.session import Session


def greedy(seed: int, prompt: list[int], steps: int = 24) -> list[int]:
    session = Session(tiny_config(), tiny_params(seed), width=8, places=1)
    tokens = [int(session.step({"a": prompt})["a"][-1].argmax())]
    while len(tokens) < steps:
        tokens.append(int(session.step({"a": tokens[-1:]})["a"][-1].argmax()))
    return tokens


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_greedy_outputs_vary(seed):
    check_params(tiny_params(seed), tiny_config())
    first, second = greedy(seed, [72, 101, 108, 108, 111]), greedy(seed, [66, 121, 101])
    assert len(set(first)) >= 12 and len(set(second)) >= 12
    assert first != second
    assert first != greedy(seed + 10, [72, 101, 108, 108, 111])


def test_weights_are_those_of_the_seed():
    np.testing.assert_array_equal(tiny_params(3)["head"], tiny_params(3)["head"])
    assert (tiny_params(3)["head"] != tiny_params(4)["head"]).any()
