"""The README's Python runs as it stands, and prints what its comments say it prints."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re

import numpy as np
import pytest

README = pathlib.Path(__file__).resolve().parent.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text("utf-8"), re.DOTALL | re.MULTILINE)
REAL_MODEL = "known.find("
CACHE_ALONE = "from paxkv.cache.pages import"


def run(code: str) -> dict:
    """The names that the code leaves; a comment behind a ``print`` must be what that prints."""
    names, printed = {"__name__": "readme"}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(README), "exec"), names)
    for promised in re.findall(r"^ *print\(.*\)  # (.*)$", code, re.MULTILINE):
        assert promised in printed.getvalue().splitlines()
    return names


def test_the_examples_are_there():
    """A real model in ten lines or so, and the cache alone in somebody's own scan in twenty or so."""
    (real,) = (code for code in BLOCKS if REAL_MODEL in code)
    (alone,) = (code for code in BLOCKS if CACHE_ALONE in code)
    assert len(real.split("\n\n", 1)[1].splitlines()) <= 10
    assert len([line for line in alone.splitlines() if line.strip()]) <= 25
    assert re.search(r"print\(.*\)  # ", real)


@pytest.mark.parametrize("code", [code for code in BLOCKS if REAL_MODEL not in code])
def test_runs(code):
    names = run(code)
    if CACHE_ALONE in code:
        q, k, v = np.asarray(names["qkv"], np.float64).transpose(1, 2, 0, 3)  # [2, 12, 16]
        scores = q @ k.swapaxes(1, 2) / 4 + np.triu(np.full((12, 12), -np.inf), 1)
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        # Eight bits a number: each is off by at most 1/254 of its vector's largest.
        np.testing.assert_allclose(names["outputs"], (weights @ v).swapaxes(0, 1), atol=0.05)


@pytest.mark.parametrize("code", [code for code in BLOCKS if REAL_MODEL in code])
def test_a_real_model(request, code):
    if not request.config.getoption("real_model"):
        pytest.skip("takes some seconds and a model that pip has installed: --real-model runs it")
    run(code)
