"""A tiny checkpoint of every family: its ``config.json`` and random tensors under the names of real checkpoints."""

from __future__ import annotations

import zlib
from typing import Any

import jax.numpy as jnp
import numpy as np

from paxkv.models.architecture import DecoderConfig
from paxkv.models.families import from_hf_config, tensor_map
from paxkv.models.weights import Tree, flatten, stack_layers, unflatten

SIZES = dict(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64)
LLAMA = SIZES | dict(num_key_value_heads=2, intermediate_size=24, rms_norm_eps=1e-5, head_dim=8)
MLA = dict(kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=12, v_head_dim=10, first_k_dense_replace=1)
DEEPSEEK = SIZES | MLA | dict(intermediate_size=24, moe_intermediate_size=12, n_routed_experts=8, num_experts_per_tok=3)
DEEPSEEK |= dict(num_hidden_layers=3)
FALCON = SIZES | dict(ffn_hidden_size=24, bias=False)


def _scaling(kind: str, **options: Any) -> dict[str, Any]:
    return dict(rope_scaling=dict(rope_type=kind, factor=4.0, **options))


HF: dict[str, dict[str, Any]] = {
    "opt": SIZES | dict(model_type="opt", ffn_dim=24),
    "opt_350m": SIZES | dict(model_type="opt", ffn_dim=24, do_layer_norm_before=False, word_embed_proj_dim=16),
    "llama": LLAMA | dict(model_type="llama"),
    # Tied, with biases, and heads wider than hidden / heads.
    "llama_tied": LLAMA
    | dict(model_type="llama", tie_word_embeddings=True, attention_bias=True, mlp_bias=True, head_dim=16),
    "llama3": LLAMA
    | dict(model_type="llama", head_dim=16)
    | _scaling("llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    "mistral": LLAMA | dict(model_type="mistral", sliding_window=5),
    "qwen2": LLAMA | dict(model_type="qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1),
    "qwen3": LLAMA | dict(model_type="qwen3", head_dim=16),
    "gpt_neox": SIZES | dict(model_type="gpt_neox", intermediate_size=24, rotary_pct=0.25),
    "gpt_neox_sequential": SIZES
    | dict(
        model_type="gpt_neox", intermediate_size=24, rotary_pct=0.5, use_parallel_residual=False, hidden_act="gelu_fast"
    ),
    "falcon_7b": FALCON | dict(model_type="falcon"),
    "falcon_40b": FALCON | dict(model_type="falcon", new_decoder_architecture=True, num_kv_heads=2),
    "falcon_rw": FALCON
    | dict(model_type="falcon", num_attention_heads=4, multi_query=False, alibi=True, parallel_attn=False, bias=True),
    "deepseek_v2": DEEPSEEK
    | dict(model_type="deepseek_v2", q_lora_rank=20, n_shared_experts=2, topk_method="group_limited_greedy")
    | dict(n_group=4, topk_group=2, routed_scaling_factor=2.0, norm_topk_prob=False)
    | _scaling("yarn", mscale=0.7, mscale_all_dim=0.5, original_max_position_embeddings=16),
    "deepseek_v2_lite": DEEPSEEK
    | dict(model_type="deepseek_v2", q_lora_rank=None, n_shared_experts=1, topk_method="greedy", norm_topk_prob=False),
    "deepseek_v3": DEEPSEEK
    | dict(model_type="deepseek_v3", q_lora_rank=20, n_shared_experts=1, n_group=4, topk_group=2)
    | dict(routed_scaling_factor=2.5, norm_topk_prob=True),
    "gpt2": dict(model_type="gpt2", vocab_size=40, n_embd=32, n_layer=2, n_head=4, n_positions=64, n_inner=24),
    "gemma2": LLAMA
    | dict(model_type="gemma2", head_dim=16, query_pre_attn_scalar=24, sliding_window=4, attn_logit_softcapping=2.0)
    | dict(final_logit_softcapping=3.0),
    "mixtral": LLAMA | dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2),
}
"""Every option that changes the arithmetic is on in one of them."""


def config_of(name: str) -> DecoderConfig:
    """The decoder of a checkpoint."""
    return from_hf_config(HF[name])


def tensors_of(name: str) -> dict[str, np.ndarray]:
    """Its tensors, float32, none of them zero or one: a weight that is not used or used twice shows."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    tensors = {}
    for rule in tensor_map(config_of(name)):
        for source, shape in zip(rule.sources, rule.shapes, strict=True):
            if source not in tensors:
                values = rng.standard_normal(shape, np.float32)
                norm = len(shape) == 1 and source.endswith("weight")
                tensors[source] = 1 + 0.2 * values if norm else 0.3 * values
    return tensors


def params_of(name: str, *, stacked: bool) -> Tree:
    """Its weights in our form."""
    tensors = tensors_of(name)
    flat = {
        rule.path: jnp.asarray(rule([tensors[source] for source in rule.sources]))
        for rule in tensor_map(config_of(name))
    }
    params = unflatten(flat)
    return stack_layers(params, config_of(name)) if stacked else params


def assert_same(params: Tree, want: Tree) -> None:
    """The same weights, of the same dtypes, bit for bit."""
    got, expected = flatten(params), flatten(want)
    assert got.keys() == expected.keys()
    for path, value in expected.items():
        assert got[path].dtype == value.dtype, path
        np.testing.assert_array_equal(np.asarray(got[path]), np.asarray(value), err_msg="/".join(path))
