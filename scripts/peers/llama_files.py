"""A random Llama as files that every engine reads: a Hugging Face folder, and the same weights as GGUF.

One seed gives the same bytes everywhere. Weights are wide enough that greedy outputs depend on the prompt. The
vocabulary is made up (requests are token ids): token i is spelled ``t<i>``.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import numpy as np

SPREAD = 0.06  # standard deviation of every matrix
ALIGNMENT = 32  # of tensors in a GGUF file, its default

GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclasses.dataclass(frozen=True)
class LlamaShape:
    """Sizes of the model; the default has 32.0 million weights."""

    vocab_size: int = 8192
    hidden_size: int = 512
    ffn_size: int = 1408
    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int = 4
    head_size: int = 64
    max_positions: int = 2048
    norm_eps: float = 1e-5
    rope_base: float = 10000.0

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes as Hugging Face has them: projections are [out, in]."""
        hidden, ffn = self.hidden_size, self.ffn_size
        queries, keys = self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        yield "model.embed_tokens.weight", (self.vocab_size, hidden)
        for layer in range(self.num_layers):
            at = f"model.layers.{layer}."
            yield at + "input_layernorm.weight", (hidden,)
            yield at + "self_attn.q_proj.weight", (queries, hidden)
            yield at + "self_attn.k_proj.weight", (keys, hidden)
            yield at + "self_attn.v_proj.weight", (keys, hidden)
            yield at + "self_attn.o_proj.weight", (hidden, queries)
            yield at + "post_attention_layernorm.weight", (hidden,)
            yield at + "mlp.gate_proj.weight", (ffn, hidden)
            yield at + "mlp.up_proj.weight", (ffn, hidden)
            yield at + "mlp.down_proj.weight", (hidden, ffn)
        yield "model.norm.weight", (hidden,)
        yield "lm_head.weight", (self.vocab_size, hidden)

    def hf_config(self) -> dict[str, Any]:
        """What config.json says."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.ffn_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_size,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_base,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "torch_dtype": "float32",
        }


def make_weights(shape: LlamaShape, seed: int = 0) -> dict[str, np.ndarray]:
    """Float32 weights by Hugging Face name."""
    rng = np.random.default_rng(seed)
    return {
        name: np.ones(size, np.float32)
        if len(size) == 1
        else (rng.standard_normal(size, np.float32) * np.float32(SPREAD))
        for name, size in shape.tensors()
    }


def write_hf(folder: pathlib.Path, shape: LlamaShape, weights: Mapping[str, np.ndarray]) -> None:
    """Writes config.json and model.safetensors: the length of a JSON header, the header, the tensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape.hf_config(), indent=2) + "\n")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in weights.items():
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [end, end + value.nbytes]}
        end += value.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for value in weights.values():
            stream.write(np.ascontiguousarray(value, "<f4").data)


def write_gguf(path: pathlib.Path, shape: LlamaShape, weights: Mapping[str, np.ndarray]) -> None:
    """Writes a GGUF file, version 3: metadata, tensor table, aligned tensors."""
    tensors = dict(_gguf_tensors(shape, weights))
    metadata = _gguf_metadata(shape)
    with open(path, "wb") as stream:
        stream.write(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
        for key, value in metadata.items():
            stream.write(_text(key) + _value(value))
        offset = 0
        for name, value in tensors.items():
            sizes = value.shape[::-1]  # innermost first
            stream.write(_text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, 0, offset))
            offset += value.nbytes + -value.nbytes % ALIGNMENT
        _align(stream)
        for value in tensors.values():
            stream.write(np.ascontiguousarray(value, "<f4").data)
            _align(stream)


def _gguf_metadata(shape: LlamaShape) -> dict[str, Any]:
    size = shape.vocab_size
    return {
        "general.architecture": "llama",
        "general.file_type": 0,
        "llama.context_length": shape.max_positions,
        "llama.embedding_length": shape.hidden_size,
        "llama.block_count": shape.num_layers,
        "llama.feed_forward_length": shape.ffn_size,
        "llama.attention.head_count": shape.num_heads,
        "llama.attention.head_count_kv": shape.num_kv_heads,
        "llama.attention.layer_norm_rms_epsilon": shape.norm_eps,
        "llama.rope.dimension_count": shape.head_size,
        "llama.rope.freq_base": shape.rope_base,
        "llama.vocab_size": size,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(3, size))],
        "tokenizer.ggml.scores": [0.0] * size,
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [1] * (size - 3), np.int32),  # unknown, control, normal
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _gguf_tensors(shape: LlamaShape, weights: Mapping[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    yield "token_embd.weight", weights["model.embed_tokens.weight"]
    for layer in range(shape.num_layers):
        for theirs, ours in GGUF_NAMES.items():
            value = weights[f"model.layers.{layer}.{theirs}.weight"]
            if ours in ("attn_q", "attn_k"):
                value = _interleave(value, shape.head_size)
            yield f"blk.{layer}.{ours}.weight", value
    yield "output_norm.weight", weights["model.norm.weight"]
    yield "output.weight", weights["lm_head.weight"]


def _interleave(value: np.ndarray, head_size: int) -> np.ndarray:
    """Rows of each head from Hugging Face's order (first halves, second halves) to GGUF's (pairs)."""
    halves = value.reshape(-1, 2, head_size // 2, value.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _value(value: Any) -> bytes:
    """A metadata value with its type before it: uint32, float32, text, or a list of one of those or of int32."""
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", 9, 5, len(value)) + value.astype("<i4").tobytes()
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    return struct.pack("<IIQ", 9, 6, len(value)) + np.asarray(value, "<f4").tobytes()


def _align(stream: BinaryIO) -> None:
    stream.write(bytes(-stream.tell() % ALIGNMENT))
