"""A random Llama as files that every engine reads: a Hugging Face folder, and the same weights as GGUF.

One seed gives the same bytes everywhere. Weights are wide enough that greedy outputs depend on the prompt. The
vocabulary is made up (requests are token ids): token i is spelled ``t<i>``.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from paxkv.models.gguf_file import stored_name
from paxkv.models.hf_folder import CONFIG, WEIGHTS

SPREAD = 0.06  # standard deviation of every matrix


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
    """Writes config.json and model.safetensors."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(shape.hf_config(), indent=2) + "\n")
    save_file(dict(weights), folder / WEIGHTS, metadata={"format": "pt"})


def write_gguf(path: pathlib.Path, shape: LlamaShape, weights: Mapping[str, np.ndarray]) -> None:
    """Writes the same weights as GGUF, in float32.

    Raises:
        ImportError: the package ``gguf`` is missing.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(shape.max_positions)
    writer.add_embedding_length(shape.hidden_size)
    writer.add_block_count(shape.num_layers)
    writer.add_feed_forward_length(shape.ffn_size)
    writer.add_head_count(shape.num_heads)
    writer.add_head_count_kv(shape.num_kv_heads)
    writer.add_layer_norm_rms_eps(shape.norm_eps)
    writer.add_rope_dimension_count(shape.head_size)
    writer.add_rope_freq_base(shape.rope_base)
    writer.add_vocab_size(shape.vocab_size)
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(len(kinds), shape.vocab_size))])
    writer.add_token_scores([0.0] * shape.vocab_size)
    writer.add_token_types(kinds + [gguf.TokenType.NORMAL] * (shape.vocab_size - len(kinds)))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in weights.items():
        turned = name.endswith(("q_proj.weight", "k_proj.weight"))
        writer.add_tensor(stored_name(name), _interleave(value, shape.head_size) if turned else value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleave(value: np.ndarray, head_size: int) -> np.ndarray:
    """Rows of each head from Hugging Face's order (first halves, second halves) to GGUF's (pairs)."""
    halves = value.reshape(-1, 2, head_size // 2, value.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)
