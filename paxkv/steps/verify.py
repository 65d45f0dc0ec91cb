"""Speculative decoding: how many draft tokens the model accepts, and the token that follows them.

A step computes logits at the positions of ``k`` draft tokens and one more. Two rules give output with exactly the
distribution of sampling token by token:

- :func:`verify`, for drafts that were not sampled (an n-gram proposal, a greedy draft model): each position is sampled
  as :func:`paxkv.steps.sample.sample` samples it, with its own key, and a draft is accepted if it is the token that
  came out. The chance of that is the draft's probability, which no exact rule can beat for such drafts, and the output
  is, token for token, the one without speculation.
- :func:`verify_sampled`, for drafts sampled from probabilities ``q``: rejection sampling (Leviathan et al., 2023,
  algorithm 1). A draft is accepted with probability ``min(1, p / q)``; at the first that is not, the token is drawn
  from the part of ``p`` that exceeds ``q``.

A row with fewer drafts pads them with -1, which no token equals: its run ends there with an ordinary token.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from paxkv.sampling import Variant
from paxkv.steps.sample import (
    LANES,
    WEIGHT_BITS,
    SampleInputs,
    argmax,
    clean,
    draw,
    kept_weights,
    penalise,
    position_keys,
    row_mass,
    sample,
    uniforms,
)

# Streams of random numbers beside the one that draws a position's token: indices that no token reaches.
_ACCEPT, _RESIDUAL = 0xFFFFFFFF, 0xFFFFFFFE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Verified:
    """What came of the drafts; k drafts per row.

    Attributes:
        accepted: [R] drafts accepted, 0..k.
        tokens: [R, k + 1] the accepted drafts, then one token of the model, then -1.
    """

    accepted: Int32[Array, " R"]
    tokens: Int32[Array, "R k+1"]


def verify(
    logits: Float32[Array, "R k+1 V"], drafts: Int32[Array, "R k"], inputs: SampleInputs, *, variant: Variant
) -> Verified:
    """Accepts drafts that are the tokens the model would have chosen.

    Args:
        logits: at the last known token and at each draft.
        drafts: proposed tokens, padded with -1.
        inputs: per row, as for the first of the ``k + 1`` positions. ``ban_ids`` hold for all of them: a proposal must
            not reach past ``min_tokens``.
        variant: see :func:`paxkv.steps.sample.sample`.

    Raises:
        ValueError: shapes that do not belong together, or what :func:`sample` refuses.
    """
    _check(logits, drafts)
    num_rows, width, vocab = logits.shape
    inputs = _per_position(inputs, drafts)
    sampled = sample(logits.reshape(num_rows * width, vocab), inputs, variant=variant).tokens
    sampled = sampled.reshape(num_rows, width)
    return _run(drafts == sampled[:, :-1], sampled)


def verify_sampled(
    logits: Float32[Array, "R k+1 V"],
    drafts: Int32[Array, "R k"],
    draft_probs: Float32[Array, "R k V"],
    inputs: SampleInputs,
    *,
    variant: Variant,
) -> Verified:
    """Accepts drafts by rejection sampling.

    The draft model may use the same keys for its own draws: the numbers used here are others, except at positions
    that it did not draft.

    Args:
        logits: at the last known token and at each draft.
        drafts: sampled from ``draft_probs``, padded with -1.
        draft_probs: the distribution that each draft was sampled from, after temperature and filters.
        inputs: as in :func:`verify`. Greedy rows (temperature 0) accept the most likely token only.
        variant: ``sample`` or ``full``; for ``greedy`` use :func:`verify`.

    Raises:
        ValueError: shapes that do not belong together, or the greedy variant.
    """
    _check(logits, drafts)
    num_rows, width, vocab = logits.shape
    if variant not in ("sample", "full"):
        raise ValueError(f"rejection sampling has the variants sample and full, got {variant!r}; use verify()")
    if draft_probs.shape != (num_rows, width - 1, vocab):
        raise ValueError(
            f"draft_probs must have a distribution per draft, {(num_rows, width - 1, vocab)}, got {draft_probs.shape}"
        )
    inputs = _per_position(inputs, drafts)
    scores = clean(logits.astype(jnp.float32).reshape(num_rows * width, vocab))
    if variant == "full":
        scores = penalise(scores, inputs)
    greedy = inputs.temperature == 0
    best = argmax(scores)
    weights = kept_weights(scores, inputs)
    keys = position_keys(inputs.seeds, inputs.positions)

    def stream(name: int) -> Array:
        return jax.vmap(lambda key: jax.random.fold_in(key, jnp.uint32(name)))(keys)

    # The last position has no draft: a distribution of zeros leaves its token to the model.
    q = jnp.pad(draft_probs, ((0, 0), (0, 1), (0, -vocab % LANES))).reshape(weights.shape)
    p = weights.astype(jnp.float32) / jnp.maximum(row_mass(weights), 1.0)[:, None, None]
    proposed = jnp.pad(drafts, ((0, 0), (0, 1)), constant_values=-1).reshape(-1)

    def at_draft(probs: Float32[Array, "rows lanes C"]) -> Float32[Array, " rows"]:
        flat = probs.reshape(probs.shape[0], -1)
        return jnp.take_along_axis(flat, jnp.maximum(proposed, 0)[:, None], axis=1)[:, 0]

    accept = uniforms(stream(_ACCEPT), 1)[:, 0] * at_draft(q) < at_draft(p)
    accept = jnp.where(greedy, proposed == best, accept & (proposed >= 0))

    excess = jnp.maximum(p - q, 0.0)
    most = excess.max((1, 2), keepdims=True)
    residual = jnp.round(excess / jnp.where(most > 0, most, 1.0) * 2.0**WEIGHT_BITS).astype(jnp.int32)
    # Where p is q nothing is rejected but by rounding; the model's own distribution is then as good.
    residual = jnp.where(most > 0, residual, weights)
    fresh = draw(weights, keys)
    corrected = jnp.where(proposed >= 0, draw(residual, stream(_RESIDUAL)), fresh)
    tokens = jnp.where(greedy, best, jnp.where(accept, proposed, corrected)).reshape(num_rows, width)
    return _run(accept.reshape(num_rows, width)[:, :-1], tokens)


def _check(logits: Array, drafts: Array) -> None:
    if logits.ndim != 3 or drafts.shape != (logits.shape[0], logits.shape[1] - 1):
        raise ValueError(
            f"verification needs logits [R, k+1, V] and drafts [R, k], got {logits.shape} and {drafts.shape}"
        )


def _run(matches: Array, tokens: Int32[Array, "R k+1"]) -> Verified:
    """The run of matches from the left, and the token that ends it."""
    accepted = jnp.cumprod(matches.astype(jnp.int32), axis=1).sum(1, dtype=jnp.int32)
    return Verified(accepted, jnp.where(jnp.arange(tokens.shape[1]) <= accepted[:, None], tokens, -1))


def _per_position(inputs: SampleInputs, drafts: Int32[Array, "R k"]) -> SampleInputs:
    """Inputs of R * (k + 1) rows: positions count on, histories grow by the drafts before each position."""
    num_rows, k = drafts.shape
    width = k + 1
    offsets = jnp.tile(jnp.arange(width, dtype=jnp.int32), num_rows)
    inputs = jax.tree.map(lambda x: jnp.repeat(x, width, axis=0), inputs)
    if inputs.positions is not None:
        inputs = dataclasses.replace(inputs, positions=inputs.positions + offsets)
    if inputs.history is not None:
        before = jnp.where(jnp.arange(k) < offsets[:, None], jnp.repeat(drafts, width, axis=0), -1)
        # Their place in the history does not matter, as long as they lie behind the prompt: penalties only count.
        inputs = dataclasses.replace(inputs, history=jnp.concatenate([inputs.history, before], axis=1))
    return inputs
