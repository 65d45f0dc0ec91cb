"""Logits equal to Hugging Face transformers', for a tiny checkpoint of every family (``scripts/make_parity.py``)."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

from paxkv.models.checkpoint import load
from paxkv.models.families import FAMILIES, from_hf_config
from paxkv.models.rotary import KINDS
from tests.models.session import Session

HERE = pathlib.Path(__file__).resolve().parent
FIXTURES = sorted(path.parent.name for path in HERE.glob("*/reference.json"))
TOLERANCE = 1e-4  # absolute, float32
LARGEST = 200_000  # bytes of one fixture


def read(name: str, file: str) -> dict:
    return json.loads((HERE / name / file).read_text())


def test_fixtures_have_every_family_and_scaling_and_reach_past_windows_and_trained_lengths():
    assert {read(name, "config.json")["model_type"] for name in FIXTURES} == set(FAMILIES)
    configs = {name: from_hf_config(read(name, "config.json")) for name in FIXTURES}
    assert {config.rope.kind for config in configs.values() if config.rope} == set(KINDS)
    windowed = 0
    for name, config in configs.items():
        reference = read(name, "reference.json")
        length = len(reference["tokens"])
        assert 1 < reference["prompt_tokens"] < length - 1, name
        if config.rope and config.rope.kind not in ("default", "linear"):  # these two act at every length
            assert config.rope.trained_length < length, name
        if any(config.windows):
            windowed += 1
            assert max(config.windows) < reference["prompt_tokens"], name
    assert windowed >= 2


@pytest.mark.parametrize("name", FIXTURES)
def test_a_fixture_is_small_and_says_what_made_it(name):
    assert sum(path.stat().st_size for path in (HERE / name).iterdir()) <= LARGEST
    assert set(read(name, "reference.json")["made_with"]) == {"python", "torch", "transformers", "safetensors"}


@pytest.mark.parametrize("name", FIXTURES)
def test_logits_are_those_of_transformers(name):
    # Layers one by one; tests/models/test_families.py holds stacked ones against these, for every family.
    reference = read(name, "reference.json")
    tokens, prompt = reference["tokens"], reference["prompt_tokens"]
    want = np.load(HERE / name / "logits.npy")
    config, params = load(HERE / name, dtype="float32", scan_layers=False)
    session = Session(config.at_length(len(tokens)), params, width=prompt)
    got = [session.step({"a": tokens[:prompt]})["a"]]
    # From here on steps are one token wide: the decode path.
    session.width = 1
    got += [session.step({"a": [token]})["a"] for token in tokens[prompt:]]
    logits = np.concatenate(got)
    assert logits.shape == want.shape
    # A NaN compares as no excess, so finite first.
    assert np.isfinite(logits).all()
    excess = np.abs(logits - want)
    assert excess[:prompt].max() <= TOLERANCE
    assert excess[prompt:].max() <= TOLERANCE
