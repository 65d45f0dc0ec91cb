"""A decoder small enough to run anywhere: random weights, made at run time, whose greedy outputs vary.

For tests, demonstrations and the smoke runs of experiments; no file is needed.
"""

from __future__ import annotations

import dataclasses

from paxkv.models.architecture import DecoderConfig
from paxkv.models.rotary import Rope
from paxkv.models.weights import Tree, init_params

HEAD_SIZE = 16


def tiny_config(**changes) -> DecoderConfig:
    """A Llama of three layers, grouped queries and 256 token ids, one for each byte; ``changes`` replace fields."""
    config = DecoderConfig(
        name="llama",
        vocab_size=256,
        hidden_size=64,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_size=HEAD_SIZE,
        ffn_size=128,
        max_positions=2048,
        rope=Rope(HEAD_SIZE),
    )
    return dataclasses.replace(config, **changes)


def tiny_params(seed: int = 0, config: DecoderConfig | None = None) -> Tree:
    """Weights of :func:`tiny_config` (or of ``config``) for a seed.

    The head is not tied and its scale does not matter to greedy choices, so outputs neither repeat the input nor
    collapse to one token.
    """
    return init_params(config or tiny_config(), seed)
