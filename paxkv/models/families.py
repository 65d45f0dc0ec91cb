"""The families: how each one's ``config.json`` is read, and what its tensors are called.

A family is a value of :class:`DecoderConfig` and a table of names; no family has code in the decoder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from paxkv.config import require
from paxkv.models.architecture import DecoderConfig
from paxkv.models.config_fields import Fields
from paxkv.models.hf_config import READERS
from paxkv.models.tensor_rules import RuleList, TensorRule, group_order

__all__ = ["FAMILIES", "TensorRule", "canonical_name", "from_hf_config", "tensor_map"]

FAMILIES = tuple(READERS)
"""The values of ``model_type`` that can be loaded."""


def from_hf_config(hf: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a ``config.json`` describes.

    Raises:
        ValueError: an architecture, a rope scaling or an option that is not supported, or a key that is missing.
    """
    family, architectures = hf.get("model_type"), hf.get("architectures") or ()
    require(
        family in READERS,
        f"model_type must be one of {', '.join(FAMILIES)}, got {family!r} (architectures {list(architectures)}); "
        "another family needs a reader and a tensor map in paxkv/models",
    )
    for architecture in architectures:
        require(
            "For" not in architecture or architecture.endswith("ForCausalLM"),
            f"{family}: architecture must be a language model (...ForCausalLM), got {architecture}",
        )
    require(
        not hf.get("quantization_config"),
        f"{family}: weights must not be quantised, got quantization_config {hf.get('quantization_config')}; "
        "convert the checkpoint to bfloat16 first",
    )
    return READERS[family](Fields(hf))


def tensor_map(config: DecoderConfig) -> list[TensorRule]:
    """A rule for every weight of the decoder (unrolled form), from the names its family's checkpoints use.

    Raises:
        ValueError: the config's family has no tensor map.
    """
    require(config.name in _MAPS, f"no tensor map for {config.name!r}; there are {', '.join(_MAPS)}")
    rules = RuleList(config)
    _MAPS[config.name](rules)
    return rules.rules


# Buffers and heads that checkpoints carry along and no weight is made of.
_BUFFERS = re.compile(r"(rotary_emb\.inv_freq|\.(attn|attention)\.(masked_)?bias)$")
_ROOTS = {
    "opt": ("model.decoder.", ("decoder.",)),
    "gpt2": ("transformer.", ("",)),
    "gpt_neox": ("gpt_neox.", ("",)),
    "falcon": ("transformer.", ("",)),
}
_HEADS = {"gpt_neox": "embed_out.weight"}


def canonical_name(config: DecoderConfig, name: str) -> str | None:
    """The name by which :func:`tensor_map` calls a checkpoint's tensor, or None for one that is known to be of no use.

    Checkpoints of a bare model lack the first part of each name. Of no use are buffers of old exports, the stored
    head of a model whose head is tied to its embedding, and layers past the last one (DeepSeek-V3 predicts
    several tokens with them).
    """
    head = _HEADS.get(config.name, "lm_head.weight")
    if name == head or name == "lm_head.weight":
        return None if config.tied_head else head
    root, shorter = _ROOTS.get(config.name, ("model.", ("",)))
    # GPT-2's causal mask is called attn.bias like a bias; GPT-NeoX's too. Their real biases have other names.
    if _BUFFERS.search(name):
        return None
    if not name.startswith(root):
        prefix = next((p for p in shorter if name.startswith(p)), None)
        name = name if prefix is None else root + name[len(prefix) :]
    layer = re.match(re.escape(root) + r"(?:layers|h)\.(\d+)\.", name)
    return None if layer and int(layer[1]) >= config.num_layers and config.name == "deepseek_v3" else name


def _attention(rules: RuleList, ours: str, theirs: str, out: str = "o_proj") -> None:
    """q, k, v and the output, each a tensor of its own."""
    c = rules.config
    q, kv = c.num_heads * c.head_size, c.num_kv_heads * c.head_size
    parts = [(f"{theirs}.q_proj", q), (f"{theirs}.k_proj", kv), (f"{theirs}.v_proj", kv)]
    rules.linear((ours, "attention", "qkv"), parts, c.hidden_size, c.qkv_bias)
    rules.linear((ours, "attention", "out"), [(f"{theirs}.{out}", c.hidden_size)], q, c.out_bias)
    if c.qk_norm:
        rules.norm((ours, "attention", "q_norm"), f"{theirs}.q_norm", c.head_size)
        rules.norm((ours, "attention", "k_norm"), f"{theirs}.k_norm", c.head_size)


def _fused_attention(rules: RuleList, ours: str, theirs: str) -> None:
    """q, k and v fused by KV head, and the output called ``dense``."""
    c = rules.config
    q, group = c.num_heads * c.head_size, c.num_heads // c.num_kv_heads
    rows = q + 2 * c.num_kv_heads * c.head_size
    rules.linear(
        (ours, "attention", "qkv"),
        [(f"{theirs}.query_key_value", rows)],
        c.hidden_size,
        c.qkv_bias,
        order=group_order(c.num_kv_heads, group, c.head_size),
    )
    rules.linear((ours, "attention", "out"), [(f"{theirs}.dense", c.hidden_size)], q, c.out_bias)


def _gated_ffn(rules: RuleList, path: tuple[str, ...], theirs: str, width: int) -> None:
    c = rules.config
    parts = [(f"{theirs}.gate_proj", width), (f"{theirs}.up_proj", width)]
    rules.linear((*path, "gate_up"), parts, c.hidden_size, c.ffn_bias)
    rules.linear((*path, "down"), [(f"{theirs}.down_proj", c.hidden_size)], width, c.ffn_bias)


def _plain_ffn(rules: RuleList, ours: str, up: str, down: str, **options) -> None:
    c = rules.config
    rules.linear((ours, "ffn", "up"), [(up, c.ffn_size)], c.hidden_size, c.ffn_bias, **options)
    rules.linear((ours, "ffn", "down"), [(down, c.hidden_size)], c.ffn_size, c.ffn_bias, **options)


def _llama_like(rules: RuleList) -> None:
    c = rules.config
    rules.same(("embedding",), "model.embed_tokens.weight", (c.vocab_size, c.hidden_size))
    rules.norm(("final_norm",), "model.norm", c.hidden_size)
    rules.head("lm_head.weight")
    norms = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    if c.residual == "sandwich":
        norms = {
            "attention_norm": "input_layernorm",
            "attention_post_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "ffn_post_norm": "post_feedforward_layernorm",
        }
    for i in range(c.num_layers):
        ours, theirs = f"layers_{i}", f"model.layers.{i}"
        for our_norm, their_norm in norms.items():
            rules.norm((ours, our_norm), f"{theirs}.{their_norm}", c.hidden_size)
        if c.mla:
            _latent_attention(rules, ours, f"{theirs}.self_attn")
        else:
            _attention(rules, ours, f"{theirs}.self_attn")
        if c.name == "mixtral":
            _mixtral_experts(rules, ours, f"{theirs}.block_sparse_moe")
        elif c.experts and i >= c.experts.first_dense:
            _deepseek_experts(rules, ours, f"{theirs}.mlp")
        else:
            _gated_ffn(rules, (ours, "ffn"), f"{theirs}.mlp", c.ffn_size)


def _mixtral_experts(rules: RuleList, ours: str, theirs: str) -> None:
    _router(rules, ours, theirs)
    rules.experts((ours, "ffn"), lambda e, part: f"{theirs}.experts.{e}.{part}.weight", "w1", "w3", "w2")


def _router(rules: RuleList, ours: str, theirs: str) -> None:
    c = rules.config
    rules.turned((ours, "ffn", "router"), f"{theirs}.gate.weight", (c.experts.count, c.hidden_size))


def _deepseek_experts(rules: RuleList, ours: str, theirs: str) -> None:
    c = rules.config
    _router(rules, ours, theirs)
    if c.experts.correction_bias:
        rules.same((ours, "ffn", "correction_bias"), f"{theirs}.gate.e_score_correction_bias", (c.experts.count,))
    rules.experts(
        (ours, "ffn"), lambda e, part: f"{theirs}.experts.{e}.{part}.weight", "gate_proj", "up_proj", "down_proj"
    )
    if c.experts.shared_size:
        _gated_ffn(rules, (ours, "ffn", "shared"), f"{theirs}.shared_experts", c.experts.shared_size)


def _latent_attention(rules: RuleList, ours: str, theirs: str) -> None:
    c, mla = rules.config, rules.config.mla
    heads, hidden, path = c.num_heads, c.hidden_size, (ours, "attention")
    q = heads * (mla.nope_size + mla.rope_size)
    first = (f"{theirs}.q_a_proj", mla.q_rank) if mla.q_rank else (f"{theirs}.q_proj", q)
    rules.linear((*path, "down"), [first, (f"{theirs}.kv_a_proj_with_mqa", mla.cached_size)], hidden, c.qkv_bias)
    if mla.q_rank:
        rules.norm((*path, "q_norm"), f"{theirs}.q_a_layernorm", mla.q_rank)
        rules.linear((*path, "q_up"), [(f"{theirs}.q_b_proj", q)], mla.q_rank)
    rules.norm((*path, "kv_norm"), f"{theirs}.kv_a_layernorm", mla.kv_rank)
    shape = (heads * (mla.nope_size + mla.v_size), mla.kv_rank)
    source = [f"{theirs}.kv_b_proj.weight"]

    def by_head(tensor: np.ndarray) -> np.ndarray:
        return tensor.reshape(heads, mla.nope_size + mla.v_size, mla.kv_rank)

    rules.add(
        (*path, "k_up"),
        (heads, mla.nope_size, mla.kv_rank),
        source,
        [shape],
        lambda weight, _, tensor: [(weight, by_head(tensor)[:, : mla.nope_size])],
    )
    rules.add(
        (*path, "v_up"),
        (heads, mla.kv_rank, mla.v_size),
        source,
        [shape],
        lambda weight, _, tensor: [(weight, by_head(tensor)[:, mla.nope_size :].swapaxes(1, 2))],
    )
    rules.linear((*path, "out"), [(f"{theirs}.o_proj", hidden)], heads * mla.v_size, c.out_bias)


def _opt(rules: RuleList) -> None:
    c, root = rules.config, "model.decoder"
    embedding = c.embedding_size or c.hidden_size
    rules.same(("embedding",), f"{root}.embed_tokens.weight", (c.vocab_size, embedding))
    rows = c.max_positions + c.position_offset
    rules.same(("positions",), f"{root}.embed_positions.weight", (rows, c.hidden_size))
    if c.embedding_size:
        rules.linear(("embedding_in",), [(f"{root}.project_in", c.hidden_size)], embedding)
        rules.linear(("embedding_out",), [(f"{root}.project_out", embedding)], c.hidden_size)
    if c.final_norm:
        rules.norm(("final_norm",), f"{root}.final_layer_norm", c.hidden_size)
    rules.head("lm_head.weight")
    for i in range(c.num_layers):
        ours, theirs = f"layers_{i}", f"{root}.layers.{i}"
        rules.norm((ours, "attention_norm"), f"{theirs}.self_attn_layer_norm", c.hidden_size)
        rules.norm((ours, "ffn_norm"), f"{theirs}.final_layer_norm", c.hidden_size)
        _attention(rules, ours, f"{theirs}.self_attn", out="out_proj")
        _plain_ffn(rules, ours, f"{theirs}.fc1", f"{theirs}.fc2")


def _gpt2(rules: RuleList) -> None:
    c = rules.config
    rules.same(("embedding",), "transformer.wte.weight", (c.vocab_size, c.hidden_size))
    rules.same(("positions",), "transformer.wpe.weight", (c.max_positions, c.hidden_size))
    rules.norm(("final_norm",), "transformer.ln_f", c.hidden_size)
    rules.head("lm_head.weight")
    for i in range(c.num_layers):
        ours, theirs, stored = f"layers_{i}", f"transformer.h.{i}", dict(transposed=False)
        rules.norm((ours, "attention_norm"), f"{theirs}.ln_1", c.hidden_size)
        rules.norm((ours, "ffn_norm"), f"{theirs}.ln_2", c.hidden_size)
        qkv = [(f"{theirs}.attn.c_attn", 3 * c.hidden_size)]
        rules.linear((ours, "attention", "qkv"), qkv, c.hidden_size, c.qkv_bias, **stored)
        out = [(f"{theirs}.attn.c_proj", c.hidden_size)]
        rules.linear((ours, "attention", "out"), out, c.hidden_size, c.out_bias, **stored)
        _plain_ffn(rules, ours, f"{theirs}.mlp.c_fc", f"{theirs}.mlp.c_proj", **stored)


def _gpt_neox(rules: RuleList) -> None:
    c = rules.config
    rules.same(("embedding",), "gpt_neox.embed_in.weight", (c.vocab_size, c.hidden_size))
    rules.norm(("final_norm",), "gpt_neox.final_layer_norm", c.hidden_size)
    rules.head("embed_out.weight")
    for i in range(c.num_layers):
        ours, theirs = f"layers_{i}", f"gpt_neox.layers.{i}"
        rules.norm((ours, "attention_norm"), f"{theirs}.input_layernorm", c.hidden_size)
        rules.norm((ours, "ffn_norm"), f"{theirs}.post_attention_layernorm", c.hidden_size)
        _fused_attention(rules, ours, f"{theirs}.attention")
        _plain_ffn(rules, ours, f"{theirs}.mlp.dense_h_to_4h", f"{theirs}.mlp.dense_4h_to_h")


def _falcon(rules: RuleList) -> None:
    c = rules.config
    rules.same(("embedding",), "transformer.word_embeddings.weight", (c.vocab_size, c.hidden_size))
    rules.norm(("final_norm",), "transformer.ln_f", c.hidden_size)
    rules.head("lm_head.weight")
    if c.residual == "pre":
        norms = {"attention_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    elif c.shared_norm:
        norms = {"attention_norm": "input_layernorm"}
    else:
        norms = {"attention_norm": "ln_attn", "ffn_norm": "ln_mlp"}
    for i in range(c.num_layers):
        ours, theirs = f"layers_{i}", f"transformer.h.{i}"
        for our_norm, their_norm in norms.items():
            rules.norm((ours, our_norm), f"{theirs}.{their_norm}", c.hidden_size)
        _fused_attention(rules, ours, f"{theirs}.self_attention")
        _plain_ffn(rules, ours, f"{theirs}.mlp.dense_h_to_4h", f"{theirs}.mlp.dense_4h_to_h")


_MAPS: dict[str, Callable[[RuleList], None]] = {
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma2", "mixtral", "deepseek_v2", "deepseek_v3"), _llama_like
    ),
    "opt": _opt,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "falcon": _falcon,
}
