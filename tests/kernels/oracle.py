"""Attention in numpy float64 over plain contiguous keys: what every implementation is measured against."""

from __future__ import annotations

import numpy as np


def attend(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    alibi_slopes: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    tree: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """One row: its n queries are the last n of its L tokens.

    Args:
        query: [n,H,D].
        keys, values: [L,K,D], [L,K,Dv].
        tree: which query sees which, bool [n,n], or None.

    Returns:
        Output [n,H,Dv] and natural log-sum-exp [n,H]; zeros and -inf where a query sees nothing.
    """
    count, heads, _ = query.shape
    length, kv_heads, _ = keys.shape
    cached = length - count
    out = np.zeros((count, heads, values.shape[2]))
    lse = np.full((count, heads), -np.inf)
    depth = np.arange(count) if tree is None else tree.sum(axis=1) - 1
    for i in range(count):
        here = cached + depth[i]
        seen, distances = [], []
        for j in range(length):
            there = j if j < cached else cached + depth[j - cached]
            if tree is not None and j >= cached:
                visible = tree[i, j - cached]
            else:
                visible = not causal or j <= cached + i
            if visible and (window is None or there > here - window):
                seen.append(j)
                distances.append(there - here)
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            logits = scale * (keys[seen, kv_head].astype(np.float64) @ query[i, head].astype(np.float64))
            if soft_cap is not None:
                logits = soft_cap * np.tanh(logits / soft_cap)
            if alibi_slopes is not None:
                logits = logits + float(alibi_slopes[head]) * np.array(distances)
            rows = values[seen, kv_head].astype(np.float64)
            if sinks is not None:
                logits = np.append(logits, float(sinks[head]))
                rows = np.append(rows, np.zeros((1, values.shape[2])), axis=0)
            if len(logits):
                top = logits.max()
                weights = np.exp(logits - top)
                out[i, head] = weights @ rows / weights.sum()
                lse[i, head] = top + np.log(weights.sum())
    return out, lse
