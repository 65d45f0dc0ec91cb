"""From a :class:`DecoderConfig` back to a ``config.json``: what :mod:`paxkv.models.hf_config` reads, written.

What is written is read again and held against the decoder it came from, so a choice that a family's ``config.json``
has no word for is refused and not lost.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from paxkv.config import require
from paxkv.models.architecture import DecoderConfig
from paxkv.models.families import from_hf_config
from paxkv.models.rotary import Rope

ARCHITECTURES = {
    "opt": "OPTForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gpt_neox": "GPTNeoXForCausalLM",
    "falcon": "FalconForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gemma2": "Gemma2ForCausalLM",
    "mixtral": "MixtralForCausalLM",
}
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}
_FACTORS = {
    "llama3": {"low": "low_freq_factor", "high": "high_freq_factor"},
    "yarn": {
        name: name for name in ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
    },
}


def to_hf_config(config: DecoderConfig) -> dict[str, Any]:
    """The ``config.json`` of the decoder.

    Raises:
        ValueError: a choice that the family's config.json cannot express; names the fields.
    """
    require(config.name in _WRITERS, f"family must be one of {', '.join(_WRITERS)}, got {config.name!r}")
    head = {"architectures": [ARCHITECTURES[config.name]], "model_type": config.name, "torch_dtype": config.dtype}
    hf = head | _WRITERS[config.name](config)
    if differ := differences(config, from_hf_config(hf)):
        raise ValueError(
            f"{config.name}: a config.json of this family cannot say {', '.join(differ)}; convert to Orbax instead"
        )
    return hf


def differences(config: DecoderConfig, other: DecoderConfig) -> list[str]:
    """Fields in which two decoders differ, those aside that are chosen when a model is run."""
    config, other = (
        dataclasses.replace(
            one,
            scan_layers=True,
            attention=None,
            rope=None if one.rope is None else dataclasses.replace(one.rope, length=None),
        )
        for one in (config, other)
    )
    return [
        f"{field.name}={getattr(config, field.name)!r}"
        for field in dataclasses.fields(config)
        if getattr(config, field.name) != getattr(other, field.name)
    ]


def _common(c: DecoderConfig) -> dict[str, Any]:
    return dict(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads,
        max_position_embeddings=c.max_positions,
        tie_word_embeddings=c.tied_head,
    )


def _rope(rope: Rope) -> dict[str, Any]:
    scaling: dict[str, Any] | None = None
    if rope.kind != "default":
        scaling = {"rope_type": rope.kind, "factor": rope.factor}
        if rope.kind != "linear":
            scaling["original_max_position_embeddings"] = rope.trained_length
        defaults = {field.name: field.default for field in dataclasses.fields(Rope)}
        for field, key in _FACTORS.get(rope.kind, {}).items():
            if rope.kind == "llama3" or getattr(rope, field) != defaults[field]:
                scaling[key] = getattr(rope, field)
    return {"rope_theta": rope.base, "rope_scaling": scaling}


def _llama_like(c: DecoderConfig, **family: Any) -> dict[str, Any]:
    common = _common(c) | dict(
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_size,
        intermediate_size=c.ffn_size,
        hidden_act=_ACTIVATIONS[c.activation],
        rms_norm_eps=c.norm_eps,
    )
    return common | _rope(c.rope) | family


def _llama(c: DecoderConfig) -> dict[str, Any]:
    return _llama_like(c, attention_bias=c.qkv_bias, mlp_bias=c.ffn_bias)


def _window(c: DecoderConfig) -> int | None:
    return max(c.windows, default=0) or None


def _layer_types(c: DecoderConfig) -> list[str]:
    return ["sliding_attention" if window else "full_attention" for window in c.windows or (0,) * c.num_layers]


def _mistral(c: DecoderConfig) -> dict[str, Any]:
    return _llama_like(c, sliding_window=_window(c))


def _qwen(c: DecoderConfig) -> dict[str, Any]:
    types = _layer_types(c)
    family: dict[str, Any] = dict(
        use_sliding_window=_window(c) is not None,
        sliding_window=_window(c),
        max_window_layers=types.index("sliding_attention") if _window(c) else c.num_layers,
        layer_types=types,
    )
    if c.name == "qwen3":
        family["attention_bias"] = c.qkv_bias
    return _llama_like(c, **family)


def _gemma2(c: DecoderConfig) -> dict[str, Any]:
    return _llama_like(
        c,
        hidden_activation=_ACTIVATIONS[c.activation],
        # The number whose root the scale is; most are whole.
        query_pre_attn_scalar=_whole(c.attention_scale**-2),
        attn_logit_softcapping=c.attention_soft_cap,
        final_logit_softcapping=c.logit_soft_cap,
        sliding_window=_window(c),
        layer_types=_layer_types(c),
        attention_bias=False,
    )


def _whole(number: float) -> float | int:
    return round(number) if abs(number - round(number)) < 1e-9 * number else number


def _mixtral(c: DecoderConfig) -> dict[str, Any]:
    return _llama_like(
        c,
        num_local_experts=c.experts.count,
        num_experts_per_tok=c.experts.per_token,
        sliding_window=_window(c),
    )


def _opt(c: DecoderConfig) -> dict[str, Any]:
    return _common(c) | dict(
        ffn_dim=c.ffn_size,
        word_embed_proj_dim=c.embedding_size or c.hidden_size,
        do_layer_norm_before=c.residual == "pre",
        enable_bias=c.qkv_bias,
        activation_function=_ACTIVATIONS[c.activation],
        _remove_final_layer_norm=c.residual == "pre" and not c.final_norm,
    )


def _gpt2(c: DecoderConfig) -> dict[str, Any]:
    return dict(
        vocab_size=c.vocab_size,
        n_embd=c.hidden_size,
        n_layer=c.num_layers,
        n_head=c.num_heads,
        n_positions=c.max_positions,
        n_inner=c.ffn_size,
        layer_norm_epsilon=c.norm_eps,
        activation_function={"gelu_tanh": "gelu_new"}.get(c.activation, c.activation),
        tie_word_embeddings=c.tied_head,
    )


def _gpt_neox(c: DecoderConfig) -> dict[str, Any]:
    rope = _rope(c.rope)
    return _common(c) | dict(
        intermediate_size=c.ffn_size,
        rotary_pct=c.rope.size / c.head_size,
        rotary_emb_base=rope["rope_theta"],
        rope_scaling=rope["rope_scaling"],
        layer_norm_eps=c.norm_eps,
        use_parallel_residual=c.residual == "parallel",
        attention_bias=c.qkv_bias,
        hidden_act=_ACTIVATIONS[c.activation],
    )


def _falcon(c: DecoderConfig) -> dict[str, Any]:
    parallel = c.residual == "parallel"
    grouped = c.num_kv_heads not in (1, c.num_heads) or (parallel and not c.shared_norm)
    family = dict(
        ffn_hidden_size=c.ffn_size,
        layer_norm_epsilon=c.norm_eps,
        new_decoder_architecture=grouped,
        multi_query=c.num_kv_heads == 1,
        parallel_attn=parallel,
        bias=c.qkv_bias,
        alibi=c.positions == "alibi",
        activation=_ACTIVATIONS[c.activation],
    )
    if grouped:
        family |= dict(num_kv_heads=c.num_kv_heads, num_ln_in_parallel_attn=1 if c.shared_norm else 2)
    return _common(c) | family | ({} if c.rope is None else _rope(c.rope))


def _deepseek(c: DecoderConfig) -> dict[str, Any]:
    mla = c.mla
    family: dict[str, Any] = dict(
        num_key_value_heads=c.num_heads,
        intermediate_size=c.ffn_size,
        hidden_act=_ACTIVATIONS[c.activation],
        rms_norm_eps=c.norm_eps,
        attention_bias=c.qkv_bias,
        kv_lora_rank=mla.kv_rank,
        q_lora_rank=mla.q_rank,
        qk_nope_head_dim=mla.nope_size,
        qk_rope_head_dim=mla.rope_size,
        v_head_dim=mla.v_size,
        rope_interleave=c.rope.interleaved,
        moe_layer_freq=1,
    )
    experts = c.experts
    if experts is not None:
        method = "group_limited_greedy" if experts.groups > 1 else "greedy"
        family |= dict(
            n_routed_experts=experts.count,
            num_experts_per_tok=experts.per_token,
            moe_intermediate_size=experts.ffn_size,
            n_shared_experts=experts.shared_size // experts.ffn_size,
            scoring_func=experts.scoring,
            norm_topk_prob=experts.normalise,
            routed_scaling_factor=experts.scaling,
            n_group=experts.groups,
            topk_group=experts.top_groups,
            topk_method="noaux_tc" if experts.correction_bias else method,
            first_k_dense_replace=experts.first_dense,
        )
    return _common(c) | _rope(c.rope) | family


_WRITERS: dict[str, Callable[[DecoderConfig], dict[str, Any]]] = {
    "opt": _opt,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "gpt_neox": _gpt_neox,
    "falcon": _falcon,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
    "gemma2": _gemma2,
    "mixtral": _mixtral,
}
