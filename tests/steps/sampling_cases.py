"""What tests of sampling share: neutral inputs, probabilities by sorting, and a test of goodness of fit."""

from __future__ import annotations

import numpy as np

from paxkv.steps.sample import SampleInputs


def inputs(rows: int, seed: int = 0, **values) -> SampleInputs:
    """Neutral values for every field, those named replaced; scalars hold for all rows."""
    fields = {
        "temperature": (1.0, np.float32),
        "top_k": (0, np.int32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "positions": (np.arange(rows), np.int32),
        "repetition": (1.0, np.float32),
        "presence": (0.0, np.float32),
        "frequency": (0.0, np.float32),
        "prompt_lens": (0, np.int32),
    }
    arrays = {
        name: np.broadcast_to(np.asarray(values.pop(name, default), dtype), (rows,)).copy()
        for name, (default, dtype) in fields.items()
    }
    arrays["seeds"] = np.random.default_rng(seed).integers(0, 2**32, (rows, 2), np.uint32)
    for name, dtype in (("history", np.int32), ("bias_ids", np.int32), ("ban_ids", np.int32)):
        arrays[name] = np.full((rows, 4), -1, dtype)
    arrays["bias_values"] = np.zeros((rows, 4), np.float32)
    for name, value in values.items():
        arrays[name] = np.asarray(value, arrays[name].dtype)
    return SampleInputs(**arrays)


def logits_of(rows: int, vocab: int, seed: int = 1, spread: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, vocab)).astype(np.float32) * spread


def exact(scores: np.ndarray, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """[V] probabilities by sorting, in float64."""
    scores = scores.astype(np.float64)
    weights = np.exp((scores - scores.max()) / temperature)
    order = np.argsort(-scores, kind="stable")
    if top_k:
        weights[order[top_k:]] = 0
    if top_p < 1:
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= np.float32(top_p) * weights.sum()]] = 0
    weights[weights < np.float32(min_p)] = 0
    return weights / weights.sum()


def chi_square_bound(degrees: int) -> float:
    """What chi-square exceeds with a probability of about 1e-5 (Wilson and Hilferty's approximation)."""
    part = 2 / (9 * degrees)
    return degrees * (1 - part + 4.26 * part**0.5) ** 3


def assert_distributed(tokens: np.ndarray, probs: np.ndarray) -> None:
    """Tokens follow ``probs``: none impossible, and chi-square over those expected at least 5 times, rest pooled."""
    counts = np.bincount(tokens, minlength=len(probs))
    assert not counts[probs == 0].any()
    expected = probs * len(tokens)
    often = expected >= 5
    expected = np.append(expected[often], expected[~often].sum())
    counts = np.append(counts[often], counts[~often].sum())
    expected, counts = expected[expected > 0], counts[expected > 0]
    assert len(expected) > 1
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < chi_square_bound(len(expected) - 1)
