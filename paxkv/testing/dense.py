"""A decoder as the textbook has it, in float64 numpy: no cache, no pages, no batch.

The whole sequence is computed again for every token. It shares no line with :mod:`paxkv.models` and reads only its
parameters, so what the paged engine generates can be held against it. Llama's family: RMS norms, rotary positions,
grouped queries, a gated feed-forward layer (Touvron et al. 2023). Random choices are
those of :mod:`paxkv.steps.sample`, one row at a time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence

import jax
import numpy as np
from numpy.typing import NDArray

from paxkv.config import require
from paxkv.models.decoder import DecoderConfig
from paxkv.models.rotary import Rope
from paxkv.sampling import SamplingParams, request_seed
from paxkv.steps.sample import SampleInputs, sample

Floats = NDArray[np.float64]

PLAIN = {"norm": "rms", "residual": "pre", "activation": "silu", "gated": True, "positions": "rope", "mla": None}
PLAIN |= {"qkv_bias": False, "out_bias": False, "ffn_bias": False, "qk_norm": False, "experts": None, "windows": ()}
PLAIN |= {"norm_offset": 0.0, "embedding_size": None, "embedding_scale": 1.0, "softmax_scale": None, "final_norm": True}
PLAIN |= {"attention_soft_cap": None, "logit_soft_cap": None, "scan_layers": True}
"""What a config must say to be of the family."""


def matmul(a: Floats, b: Floats) -> Floats:
    """a [T,E] by b [E,F], without BLAS: its threads stand in each other's way where tests run side by side."""
    return np.einsum("te,ef->tf", a, b)


def rms_norm(x: Floats, weight: Floats, eps: float) -> Floats:
    """[..., E] scaled to a root mean square of 1, then by ``weight`` [E]."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: Floats, rope: Rope) -> Floats:
    """Rotary positions: x [T,H,D] at 0 to T-1. Of the first R lanes i turns with i + R/2, or 2i with 2i + 1."""
    pairs = np.arange(rope.size // 2)
    low, high = (2 * pairs, 2 * pairs + 1) if rope.interleaved else (pairs, pairs + rope.size // 2)
    angle = np.arange(len(x))[:, None, None] * rope.base ** (-2 * pairs / rope.size)  # [T, 1, R/2]
    cos, sin, turned = np.cos(angle), np.sin(angle), x.copy()
    turned[..., low] = x[..., low] * cos - x[..., high] * sin
    turned[..., high] = x[..., high] * cos + x[..., low] * sin
    return turned


def attend(q: Floats, k: Floats, v: Floats) -> Floats:
    """Causal attention of q [T,H,D] over k and v [T,K,D]; each key head serves H/K query heads in a row."""
    tokens, heads, size = q.shape
    future = np.triu(np.full((tokens, tokens), -np.inf), 1)
    out = np.empty_like(q)
    for head in range(heads):
        shared = head // (heads // k.shape[1])
        scores = matmul(q[:, head], k[:, shared].T) / np.sqrt(size) + future
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = matmul(weights, v[:, shared]) / weights.sum(axis=1, keepdims=True)
    return out


def log_softmax(logits: Floats) -> Floats:
    """[..., V] log-probabilities."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one sequence generates.

    Attributes:
        token_ids: the output, an end token included.
        logits: [tokens, V] of the model, from which each was chosen.
        reason: ``stop`` or ``length``.
    """

    token_ids: tuple[int, ...]
    logits: Floats
    reason: str


class DenseModel:
    """One model of Llama's family.

    Args:
        config: the architecture.
        params: as :class:`paxkv.models.decoder.Decoder` takes them, layers stacked.

    Raises:
        ValueError: a model of another family.
    """

    def __init__(self, config: DecoderConfig, params: Mapping) -> None:
        other = {name: value for name, want in PLAIN.items() if (value := getattr(config, name)) != want}
        require(
            not other and config.rope is not None and config.rope.kind == "default",
            f"only Llama's family with stacked layers can be computed densely, got {other or config}",
        )
        self.config = config
        self.weights = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), dict(params))
        self._known: dict[tuple[int, ...], Floats] = {}

    def logits(self, ids: Sequence[int]) -> Floats:
        """[T,V] logits of what follows each of the tokens."""
        config, weights, tokens = self.config, self.weights, len(ids)
        x = weights["embedding"][np.asarray(ids)]
        for layer in range(config.num_layers):
            at = jax.tree.map(lambda leaf, layer=layer: leaf[layer], weights["layers"])
            normed = rms_norm(x, at["attention_norm"]["scale"], config.norm_eps)
            heads = matmul(normed, at["attention"]["qkv"]["kernel"]).reshape(tokens, -1, config.head_size)
            q, k, v = np.split(heads, [config.num_heads, config.num_heads + config.num_kv_heads], axis=1)
            attended = attend(rotate(q, config.rope), rotate(k, config.rope), v)
            x = x + matmul(attended.reshape(tokens, -1), at["attention"]["out"]["kernel"])
            normed = rms_norm(x, at["ffn_norm"]["scale"], config.norm_eps)
            gate, up = np.split(matmul(normed, at["ffn"]["gate_up"]["kernel"]), 2, axis=1)
            x = x + matmul(gate / (1 + np.exp(-gate)) * up, at["ffn"]["down"]["kernel"])
        x = rms_norm(x, weights["final_norm"]["scale"], config.norm_eps)
        return matmul(x, weights["embedding"].T if config.tied_head else weights["head"])

    def next_logits(self, ids: Sequence[int]) -> Floats:
        """[V] logits of the token after ``ids``."""
        key = tuple(ids)
        if key not in self._known:
            self._known[key] = self.logits(ids)[-1]
        return self._known[key]

    def generate(
        self, prompt: Sequence[int], params: SamplingParams, *, index: int = 0, end_ids: Collection[int] = ()
    ) -> Answer:
        """What sequence number ``index`` of a request generates.

        Args:
            prompt: token ids.
            params: ``max_tokens`` counts in full; stop texts are not looked at.
            index: which of the request's sequences.
            end_ids: of the model.
        """
        ends = set(params.stop_ids) | (set() if params.ignore_eos else set(end_ids))
        ids, rows, reason = list(prompt), [], "length"
        while len(rows) < params.max_tokens:
            rows.append(self.next_logits(ids))
            banned = ends if len(rows) <= params.min_tokens else set()
            ids.append(choose(rows[-1], params, ids, len(prompt), index, sorted(banned)))
            if ids[-1] in ends:
                reason = "stop"
                break
        return Answer(tuple(ids[len(prompt) :]), np.stack(rows), reason)


@functools.partial(jax.jit, static_argnames="variant")
def _sample(logits, inputs: SampleInputs, variant: str):
    return sample(logits, inputs, variant=variant).tokens[0]


def choose(
    logits: Floats, params: SamplingParams, ids: Sequence[int], prompt_len: int, index: int, banned: Sequence[int]
) -> int:
    """The token that follows ``ids``, of which the first ``prompt_len`` are the prompt."""
    require(params.greedy or params.seed is not None, "a sampled answer can be told only with a seed; give one")
    if params.variant == "greedy":
        return int(np.argmax(logits))
    history = np.full((1, 128 * (len(ids) // 128 + 1)), -1, np.int32)
    history[0, : len(ids)] = ids
    bans = np.full((1, max(8, len(banned))), -1, np.int32)
    bans[0, : len(banned)] = banned
    bias = params.logit_bias
    inputs = SampleInputs(
        temperature=np.float32([params.temperature]),
        top_k=np.int32([params.top_k]),
        top_p=np.float32([params.top_p]),
        min_p=np.float32([params.min_p]),
        seeds=np.uint32([request_seed(params.seed or 0, ids[:prompt_len], index)]),
        positions=np.int32([len(ids)]),
        repetition=np.float32([params.repetition_penalty]),
        presence=np.float32([params.presence_penalty]),
        frequency=np.float32([params.frequency_penalty]),
        history=history,
        prompt_lens=np.int32([prompt_len]),
        bias_ids=np.int32([[*bias] or [-1]]),
        bias_values=np.float32([[*bias.values()] or [0]]),
        ban_ids=bans,
    )
    return int(_sample(logits[None].astype(np.float32), inputs, params.variant))
