"""The engine of these tests: pages of 16 tokens, 16 of them, so that every file compiles the same few steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest

from paxkv.engine import Engine
from paxkv.testing.tiny_engine import tiny_dense, tiny_engine


def sixteen(*, limits: Mapping | None = None, **options) -> Engine:
    shapes = {"max_num_batched_tokens": 32, "max_model_len": 96, **(limits or {})}
    return tiny_engine(limits=shapes, **{"page_size": 16, "num_pages": 16, **options})


@pytest.fixture(scope="module")
def make() -> Callable[..., Engine]:
    """Makes an engine; arguments as :func:`paxkv.testing.tiny_engine.tiny_engine`."""
    return sixteen


@pytest.fixture(scope="module")
def engine(make) -> Engine:
    """One that a file's tests share: each leaves it empty."""
    return make()


@pytest.fixture(scope="session")
def prompt() -> Callable[..., list[int]]:
    """(length, seed) → token ids."""
    return lambda length, seed=0: np.random.default_rng(np.hstack([length, seed])).integers(0, 256, length).tolist()


@pytest.fixture(scope="session")
def dense():
    """(prompt, sampling, index, end ids) → the token ids of a model without pages."""

    def answer(ids, params, index=0, end_ids=()) -> tuple[int, ...]:
        return tiny_dense().generate(ids, params, index=index, end_ids=end_ids).token_ids

    return answer
