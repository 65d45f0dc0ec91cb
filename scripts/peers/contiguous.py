"""The Llama of paxkv over a contiguous cache: what a decode step costs without pages.

Rows of equal length, keys and values [L,S,K,C,D] in place, attention over the whole of C with a mask: the textbook
form. It shares weights, norms, rotation, feed-forward and compiler options with :mod:`paxkv.models`; only the cache and
the attention differ, and its greedy outputs must be the engine's.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from paxkv.compat import step_compiler_options
from paxkv.models.decoder import DecoderConfig
from paxkv.models.layers import activate, linear, rms_norm
from paxkv.models.rotary import angles, rotate
from paxkv.steps.sample import SampleInputs, sample

STEPS = 8  # decode steps of a dispatch, as the engine has it

Cache = list[tuple[Array, Array]]  # of each layer: keys and values [S,K,C,D]


def attend(q: Array, k: Array, v: Array, first: Int32[Array, ""]) -> Array:
    """q [S,Q,H,D], the queries from position ``first`` on, over k and v [S,K,C,D]: [S,Q,H*D]."""
    rows, queries, heads, size = q.shape
    kv_heads, length = k.shape[1], k.shape[2]
    grouped = q.reshape(rows, queries, kv_heads, heads // kv_heads, size)
    scores = jnp.einsum("sqkgd,skcd->skgqc", grouped, k) / math.sqrt(size)
    seen = jnp.arange(length) <= first + jnp.arange(queries)[:, None]
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("skgqc,skcd->sqkgd", weights, v).reshape(rows, queries, heads * size)


def forward(
    config: DecoderConfig, params: Any, cache: Cache, tokens: Int32[Array, "S Q"], first: Int32[Array, ""]
) -> tuple[Int32[Array, " S"], Cache]:
    """Writes the tokens at positions ``first`` on; returns the likeliest next token of each row."""
    rows, queries = tokens.shape
    heads, kv_heads, size, eps = config.num_heads, config.num_kv_heads, config.head_size, config.norm_eps
    positions = jnp.tile(first + jnp.arange(queries), rows)
    cos, sin = angles(config.rope, positions)
    x = jnp.take(params["embedding"], tokens.reshape(-1), axis=0, mode="clip")
    written = []
    for index, (keys, values) in enumerate(cache):
        layer = params[f"layers_{index}"]
        qkv = linear(rms_norm(x, layer["attention_norm"]["scale"], eps), layer["attention"]["qkv"]["kernel"])
        qkv = qkv.reshape(-1, heads + 2 * kv_heads, size)
        q, k, v = jnp.split(qkv, [heads, heads + kv_heads], axis=1)
        q, k = (rotate(part, cos, sin, interleaved=False) for part in (q, k))
        k, v = (part.reshape(rows, queries, kv_heads, size).swapaxes(1, 2) for part in (k, v))
        keys = jax.lax.dynamic_update_slice(keys, k, (0, 0, first, 0))
        values = jax.lax.dynamic_update_slice(values, v, (0, 0, first, 0))
        written.append((keys, values))
        attended = attend(q.reshape(rows, queries, heads, size), keys, values, first).reshape(rows * queries, -1)
        x = x + linear(attended, layer["attention"]["out"]["kernel"])
        hidden = linear(rms_norm(x, layer["ffn_norm"]["scale"], eps), layer["ffn"]["gate_up"]["kernel"])
        x = x + linear(activate(hidden, config.activation, config.gated), layer["ffn"]["down"]["kernel"])
    last = x.reshape(rows, queries, -1)[:, -1]
    logits = linear(rms_norm(last, params["final_norm"]["scale"], eps), params["head"])
    return sample(logits, SampleInputs(), variant="greedy").tokens, written


class ContiguousDecoder:
    """Greedy decoding of rows of equal length.

    Args:
        config: a Llama with unrolled layers and a head of its own.
        params: its weights.
        rows: sequences.
        length: positions of the cache of each.
    """

    def __init__(self, config: DecoderConfig, params: Any, rows: int, length: int) -> None:
        if config.scan_layers or config.tied_head:
            raise ValueError("the contiguous decoder takes unrolled layers and a head of its own")
        self._params = params
        shape = (rows, config.num_kv_heads, length, config.head_size)
        self._cache: Cache = [
            (jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)) for _ in range(config.num_layers)
        ]
        jit = functools.partial(jax.jit, donate_argnums=(1,), compiler_options=step_compiler_options(config.dtype))

        @jit
        def prefill(params, cache, tokens, row):
            # A row at a time: the scores of a whole prompt against itself are held at once.
            empty = [tuple(jnp.zeros((1, *side.shape[1:]), side.dtype) for side in layer) for layer in cache]
            newest, one = forward(config, params, empty, tokens, jnp.int32(0))
            place = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=row, axis=0)
            return newest, [tuple(map(place, layer, new)) for layer, new in zip(cache, one, strict=True)]

        @jit
        def decode(params, cache, newest, first):
            def one(step, state):
                newest, cache, outputs = state
                newest, cache = forward(config, params, cache, newest[:, None], first + step)
                return newest, cache, outputs.at[step].set(newest)

            outputs = jnp.zeros((STEPS, rows), jnp.int32)
            return jax.lax.fori_loop(0, STEPS, one, (newest, cache, outputs))

        self._prefill, self._decode = prefill, decode

    def prefill(self, tokens: Int32[Array, "S Q"]) -> Int32[Array, " S"]:
        """Computes the prompts; returns each row's first output token."""
        newest = []
        for row in range(tokens.shape[0]):
            token, self._cache = self._prefill(self._params, self._cache, tokens[row : row + 1], row)
            newest.append(token)
        return jnp.concatenate(newest)

    def decode(self, newest: Int32[Array, " S"], first: int) -> tuple[Int32[Array, " S"], Int32[Array, "steps S"]]:
        """STEPS more tokens of each row, whose newest token stands at position ``first``; the last one and all."""
        newest, self._cache, outputs = self._decode(self._params, self._cache, newest, first)
        return newest, outputs
