"""Reads the files of llama2.c (Karpathy 2023): small trained Llamas, for tests where one is at hand.

A file is seven int32 (width, feed-forward width, layers, heads, KV heads, vocabulary, positions), then float32 arrays,
matrices [out,in]. A vocabulary above 0 says that the head is the embedding. Rotary pairs are lanes (2i, 2i+1).
"""

from __future__ import annotations

import os
import pathlib

import jax.numpy as jnp
import numpy as np

from paxkv.config import require
from paxkv.models.architecture import DecoderConfig
from paxkv.models.rotary import Rope
from paxkv.models.weights import Tree


def read(path: str | os.PathLike[str]) -> tuple[DecoderConfig, Tree]:
    """The model of a ``.bin`` file.

    Raises:
        ValueError: the file is shorter than its header says.
    """
    data = pathlib.Path(path).read_bytes()
    width, ffn, layers, heads, kv_heads, vocab, positions = np.frombuffer(data, "<i4", 7).tolist()
    size, tied, vocab = width // heads, vocab > 0, abs(vocab)
    shapes = {
        "embedding": (vocab, width),
        "attention_norm": (layers, width),
        "q": (layers, heads * size, width),
        "k": (layers, kv_heads * size, width),
        "v": (layers, kv_heads * size, width),
        "out": (layers, width, heads * size),
        "ffn_norm": (layers, width),
        "gate": (layers, ffn, width),
        "down": (layers, width, ffn),
        "up": (layers, ffn, width),
        "final_norm": (width,),
        "tables": (2, positions, size // 2),
    }
    if not tied:
        shapes["head"] = (vocab, width)
    floats = np.frombuffer(data, "<f4", offset=28)
    needed = sum(int(np.prod(shape)) for shape in shapes.values())
    require(floats.size >= needed, f"{path} must hold {needed} weights, it has {floats.size}; fetch it again")
    arrays, begin = {}, 0
    for name, shape in shapes.items():
        end = begin + int(np.prod(shape))
        arrays[name], begin = floats[begin:end].reshape(shape), end

    def kernel(*names: str):
        """[L, in, out] of matrices [L, out, in] side by side."""
        return {"kernel": jnp.asarray(np.concatenate([arrays[name] for name in names], axis=1).swapaxes(1, 2))}

    params = {
        "embedding": jnp.asarray(arrays["embedding"]),
        "layers": {
            "attention_norm": {"scale": jnp.asarray(arrays["attention_norm"])},
            "attention": {"qkv": kernel("q", "k", "v"), "out": kernel("out")},
            "ffn_norm": {"scale": jnp.asarray(arrays["ffn_norm"])},
            "ffn": {"gate_up": kernel("gate", "up"), "down": kernel("down")},
        },
        "final_norm": {"scale": jnp.asarray(arrays["final_norm"])},
    }
    if not tied:
        params["head"] = jnp.asarray(arrays["head"].T)
    config = DecoderConfig(
        name="llama",
        vocab_size=vocab,
        hidden_size=width,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=size,
        ffn_size=ffn,
        max_positions=positions,
        rope=Rope(size, interleaved=True),
        tied_head=tied,
    )
    return config, params
