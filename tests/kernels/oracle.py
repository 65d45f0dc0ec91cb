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
        seen = []
        for j in range(length):
            there = j if j < cached else cached + depth[j - cached]
            if tree is not None and j >= cached:
                visible = tree[i, j - cached]
            else:
                visible = not causal or j <= cached + i
            if visible and (window is None or there > here - window):
                seen.append((j, there - here))
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            logits = []
            for j, distance in seen:
                logit = scale * float(np.dot(query[i, head].astype(np.float64), keys[j, kv_head].astype(np.float64)))
                if soft_cap is not None:
                    logit = soft_cap * np.tanh(logit / soft_cap)
                if alibi_slopes is not None:
                    logit += float(alibi_slopes[head]) * distance
                logits.append(logit)
            rows = [values[j, kv_head].astype(np.float64) for j, _ in seen]
            if sinks is not None:
                logits.append(float(sinks[head]))
                rows.append(np.zeros(values.shape[2]))
            if logits:
                top = max(logits)
                weights = np.exp(np.array(logits) - top)
                out[i, head] = weights @ np.array(rows) / weights.sum()
                lse[i, head] = top + np.log(weights.sum())
    return out, lse
