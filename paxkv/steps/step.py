"""The jitted step: sampled tokens back in, the model over the pages, the next tokens out.

Two functions cover every plan. :func:`mixed_step` runs any rows once. :func:`decode_steps` runs rows of one token for
several steps in one dispatch: each step's tokens feed the next, and the slot of each is looked up in the block table,
whose pages the host has given for the whole run. The pool and the sampled tokens are donated; neither is copied.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from paxkv.cache.pages import KVPages
from paxkv.cache.rows import Rows
from paxkv.models.decoder import Decoder, DecoderConfig
from paxkv.steps.inputs import StepInputs
from paxkv.steps.sample import Sampled, sample


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutputs:
    """What a dispatch gives back, per step run.

    Attributes:
        tokens: [steps, R] sampled ids.
        logprobs: [steps, R] their log-probabilities under the model's own distribution, or None.
        top_ids, top_logprobs: [steps, R, top], or None.
    """

    tokens: Int32[Array, "steps R"]
    logprobs: Float32[Array, "steps R"] | None = None
    top_ids: Int32[Array, "steps R top"] | None = None
    top_logprobs: Float32[Array, "steps R top"] | None = None


def _outputs(sampled: Sampled, top: int) -> StepOutputs:
    if not top:
        return StepOutputs(sampled.tokens)
    return StepOutputs(sampled.tokens, sampled.logprobs, sampled.top_ids, sampled.top_logprobs)


def mixed_step(
    config: DecoderConfig,
    params,
    pages: KVPages,
    newest: Int32[Array, " places"],
    inputs: StepInputs,
    *,
    variant: str,
    top: int,
) -> tuple[KVPages, Int32[Array, " places"], StepOutputs]:
    """Any rows, one step.

    Args:
        newest: the sampled tokens that stay on the device, by place.
        variant, top: see :class:`paxkv.steps.inputs.StepKey`.
    """
    tokens = jnp.where(inputs.tokens < 0, newest[inputs.places], inputs.tokens)
    logits, pages = Decoder(config).apply(
        {"params": params}, tokens, inputs.positions, pages, inputs.rows, inputs.sample_rows
    )
    sampled = sample(logits, inputs.sampling, variant=variant, top_logprobs=top)
    newest = newest.at[inputs.sample_places].set(sampled.tokens, mode="drop")
    return pages, newest, jax.tree.map(lambda x: x[None], _outputs(sampled, top))


def decode_steps(
    config: DecoderConfig,
    params,
    pages: KVPages,
    newest: Int32[Array, " places"],
    inputs: StepInputs,
    *,
    variant: str,
    top: int,
    max_steps: int,
) -> tuple[KVPages, Int32[Array, " places"], StepOutputs]:
    """Rows of one token, ``inputs.num_steps`` steps; outputs have room for ``max_steps``."""
    page_size = pages.layout.page_size
    rows, live = inputs.rows, inputs.rows.kv_lens > 0
    first = jnp.where(inputs.tokens < 0, newest[inputs.places], inputs.tokens)

    def once(step, tokens, pages):
        positions = inputs.positions + step
        page = jnp.take_along_axis(rows.block_tables, (positions // page_size)[:, None], axis=1)[:, 0]
        slots = jnp.where(live, page * page_size + positions % page_size, -1)
        at = Rows(
            block_tables=rows.block_tables,
            kv_lens=jnp.where(live, rows.kv_lens + step, 0),
            query_starts=rows.query_starts,
            slots=slots,
            max_query_len=1,
        )
        logits, pages = Decoder(config).apply({"params": params}, tokens, positions, pages, at, None)
        sampling = inputs.sampling
        if sampling.positions is not None:
            sampling = dataclasses.replace(sampling, positions=sampling.positions + step)
        return sample(logits, sampling, variant=variant, top_logprobs=top), pages

    def body(carry):
        step, tokens, pages, outputs = carry
        sampled, pages = once(step, tokens, pages)
        outputs = jax.tree.map(lambda all_, one: all_.at[step].set(one), outputs, _outputs(sampled, top))
        return step + 1, sampled.tokens, pages, outputs

    num_rows = first.shape[0]
    room = StepOutputs(jnp.zeros((max_steps, num_rows), jnp.int32))
    if top:
        room = StepOutputs(
            room.tokens,
            jnp.zeros((max_steps, num_rows), jnp.float32),
            jnp.zeros((max_steps, num_rows, top), jnp.int32),
            jnp.zeros((max_steps, num_rows, top), jnp.float32),
        )
    if max_steps == 1:
        sampled, pages = once(0, first, pages)
        tokens, outputs = sampled.tokens, jax.tree.map(lambda x: x[None], _outputs(sampled, top))
    else:
        carry = (jnp.int32(0), first, pages, room)
        _, tokens, pages, outputs = jax.lax.while_loop(lambda c: c[0] < inputs.num_steps, body, carry)
    newest = newest.at[inputs.sample_places].set(tokens, mode="drop")
    return pages, newest, outputs
