"""From a ``config.json`` to a :class:`DecoderConfig`: one function for each family, with that family's own defaults.

What a family could have and this decoder has not is refused by name, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paxkv.config import require
from paxkv.models.architecture import DecoderConfig, Experts, LatentAttention
from paxkv.models.config_fields import Fields


def _common(f: Fields, *, max_positions: int, tied: bool) -> dict[str, Any]:
    """What the Llama-like families and most others spell alike."""
    heads = f.need("num_attention_heads")
    return dict(
        name=f.family,
        vocab_size=f.need("vocab_size"),
        hidden_size=f.need("hidden_size"),
        num_layers=f.need("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=f.get("num_key_value_heads", heads),
        head_size=f.get("head_dim", f.need("hidden_size") // heads),
        ffn_size=f.need("intermediate_size"),
        max_positions=f.get("max_position_embeddings", max_positions),
        dtype=f.dtype(),
        tied_head=f.get("tie_word_embeddings", tied),
    )


def _llama_like(f: Fields, *, max_positions: int, eps: float = 1e-6, tied: bool = False, **changes) -> DecoderConfig:
    fields = _common(f, max_positions=max_positions, tied=tied)
    fields.update(
        norm_eps=f.get("rms_norm_eps", eps), activation=f.activation("hidden_activation", "hidden_act", default="silu")
    )
    fields.update(changes)
    base = fields.pop("rope_base", None)
    fields["rope"] = f.rope(fields["head_size"], fields["max_positions"], base)
    return DecoderConfig(**fields)


def _llama(f: Fields) -> DecoderConfig:
    bias = f.get("attention_bias", False)
    return _llama_like(f, max_positions=2048, qkv_bias=bias, out_bias=bias, ffn_bias=f.get("mlp_bias", False))


def _mistral(f: Fields) -> DecoderConfig:
    # An absent key means the class's default, a null one no window.
    window = f.hf.get("sliding_window", 4096)
    windows = f.windows(f.need("num_hidden_layers"), window, lambda layer: True)
    return _llama_like(f, max_positions=131072, windows=windows)


def _qwen2(f: Fields) -> DecoderConfig:
    return _llama_like(f, max_positions=32768, qkv_bias=True, windows=_qwen_windows(f))


def _qwen3(f: Fields) -> DecoderConfig:
    bias = f.get("attention_bias", False)
    return _llama_like(
        f,
        max_positions=32768,
        head_size=f.get("head_dim", 128),
        qk_norm=True,
        qkv_bias=bias,
        out_bias=bias,
        windows=_qwen_windows(f),
    )


def _qwen_windows(f: Fields) -> tuple[int, ...]:
    # As with Mistral's: absent means the default, null no window.
    window = f.hf.get("sliding_window", 4096) if f.get("use_sliding_window", False) else None
    first = f.get("max_window_layers", 28)
    return f.windows(f.need("num_hidden_layers"), window, lambda layer: layer >= first)


def _gemma2(f: Fields) -> DecoderConfig:
    f.refuse("attention_bias", False, False)
    return _llama_like(
        f,
        max_positions=8192,
        tied=True,
        head_size=f.get("head_dim", 256),
        activation=f.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        norm_offset=1.0,
        residual="sandwich",
        embedding_scale=f.need("hidden_size") ** 0.5,
        softmax_scale=f.get("query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=f.hf.get("attn_logit_softcapping", 50.0),
        logit_soft_cap=f.hf.get("final_logit_softcapping", 30.0),
        windows=f.windows(f.need("num_hidden_layers"), f.hf.get("sliding_window", 4096), lambda layer: layer % 2 == 0),
    )


def _mixtral(f: Fields) -> DecoderConfig:
    experts = Experts(
        count=f.get("num_local_experts", 8),
        per_token=f.get("num_experts_per_tok", 2),
        ffn_size=f.need("intermediate_size"),
    )
    windows = f.windows(f.need("num_hidden_layers"), f.hf.get("sliding_window"), lambda layer: True)
    base = f.get("rope_theta", 1e6)
    return _llama_like(f, max_positions=131072, eps=1e-5, rope_base=base, experts=experts, windows=windows)


def _opt(f: Fields) -> DecoderConfig:
    f.refuse("layer_norm_elementwise_affine", True, True)
    pre, bias = f.get("do_layer_norm_before", True), f.get("enable_bias", True)
    hidden, heads = f.need("hidden_size"), f.need("num_attention_heads")
    embedding = f.get("word_embed_proj_dim", hidden)
    return DecoderConfig(
        name=f.family,
        vocab_size=f.need("vocab_size"),
        hidden_size=hidden,
        num_layers=f.need("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_size=hidden // heads,
        ffn_size=f.need("ffn_dim"),
        max_positions=f.get("max_position_embeddings", 2048),
        dtype=f.dtype(),
        norm="layer",
        residual="pre" if pre else "post",
        activation=f.activation("activation_function", default="relu"),
        gated=False,
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=bias,
        positions="learned",
        position_offset=2,
        embedding_size=None if embedding == hidden else embedding,
        tied_head=f.get("tie_word_embeddings", True),
        final_norm=pre and not f.get("_remove_final_layer_norm", False),
    )


def _gpt2(f: Fields) -> DecoderConfig:
    f.refuse("scale_attn_weights", True, True)
    f.refuse("scale_attn_by_inverse_layer_idx", False, False)
    f.refuse("add_cross_attention", False, False)
    hidden, heads = f.need("n_embd", "hidden_size"), f.need("n_head", "num_attention_heads")
    return DecoderConfig(
        name=f.family,
        vocab_size=f.need("vocab_size"),
        hidden_size=hidden,
        num_layers=f.need("n_layer", "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_size=hidden // heads,
        ffn_size=f.get("n_inner", 4 * hidden),
        max_positions=f.get("n_positions", f.get("max_position_embeddings", 1024)),
        dtype=f.dtype(),
        norm="layer",
        norm_eps=f.get("layer_norm_epsilon", 1e-5),
        activation=f.activation("activation_function", default="gelu_new"),
        gated=False,
        qkv_bias=True,
        out_bias=True,
        ffn_bias=True,
        positions="learned",
        tied_head=f.get("tie_word_embeddings", True),
    )


def _gpt_neox(f: Fields) -> DecoderConfig:
    fields = _common(f, max_positions=2048, tied=False)
    scaling = f.hf.get("rope_parameters") or {}
    share = scaling.get("partial_rotary_factor", f.get("partial_rotary_factor", f.get("rotary_pct", 0.25)))
    base = f.get("rope_theta", f.get("rotary_emb_base", 10000.0))
    bias = f.get("attention_bias", True)
    return DecoderConfig(
        **fields,
        norm="layer",
        norm_eps=f.get("layer_norm_eps", 1e-5),
        residual="parallel" if f.get("use_parallel_residual", True) else "pre",
        activation=f.activation("hidden_act", default="gelu"),
        gated=False,
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=True,
        rope=f.rope(int(fields["head_size"] * share), fields["max_positions"], base),
    )


def _falcon(f: Fields) -> DecoderConfig:
    hidden, heads = f.need("hidden_size"), f.need("num_attention_heads", "n_head")
    grouped, parallel = f.get("new_decoder_architecture", False), f.get("parallel_attn", True)
    if grouped:
        require(
            parallel, "falcon: new_decoder_architecture without parallel_attn is not supported; no such model is known"
        )
    kv_heads = 1 if f.get("multi_query", True) and not grouped else f.get("num_kv_heads", f.get("n_head_kv", heads))
    require(
        grouped or kv_heads in (1, heads),
        f"falcon: without new_decoder_architecture num_kv_heads must be num_attention_heads {heads}, got {kv_heads}",
    )
    norms = f.get("num_ln_in_parallel_attn", 2 if grouped else 1)
    max_positions = f.get("max_position_embeddings", 2048)
    alibi, bias = f.get("alibi", False), f.get("bias", False)
    return DecoderConfig(
        name=f.family,
        vocab_size=f.need("vocab_size"),
        hidden_size=hidden,
        num_layers=f.need("num_hidden_layers", "n_layer"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=hidden // heads,
        ffn_size=f.get("ffn_hidden_size", 4 * hidden),
        max_positions=max_positions,
        dtype=f.dtype(),
        norm="layer",
        norm_eps=f.get("layer_norm_epsilon", 1e-5),
        residual="parallel" if parallel else "pre",
        shared_norm=parallel and norms == 1,
        activation=f.activation("activation", default="gelu"),
        gated=False,
        qkv_bias=bias,
        out_bias=bias,
        ffn_bias=bias,
        positions="alibi" if alibi else "rope",
        rope=None if alibi else f.rope(hidden // heads, max_positions),
        tied_head=f.get("tie_word_embeddings", True),
    )


def _deepseek(f: Fields) -> DecoderConfig:
    third = f.family == "deepseek_v3"
    f.refuse("moe_layer_freq", 1, 1)
    mla = LatentAttention(
        kv_rank=f.need("kv_lora_rank"),
        nope_size=f.need("qk_nope_head_dim"),
        rope_size=f.need("qk_rope_head_dim"),
        v_size=f.need("v_head_dim"),
        q_rank=f.get("q_lora_rank", None),
    )
    bias = f.get("attention_bias", False)
    require(
        not bias or mla.q_rank is not None,
        f"{f.family}: attention_bias without q_lora_rank is not supported; no such model is known",
    )
    max_positions = f.get("max_position_embeddings", 4096 if third else 2048)
    rope = f.rope(mla.rope_size, max_positions, interleaved=f.get("rope_interleave", True))
    fields = _common(f, max_positions=max_positions, tied=False)
    fields.update(num_kv_heads=fields["num_heads"], head_size=mla.nope_size + mla.rope_size)
    return DecoderConfig(
        **fields,
        norm_eps=f.get("rms_norm_eps", 1e-6),
        activation=f.activation("hidden_act", default="silu"),
        qkv_bias=bias,
        out_bias=bias,
        rope=rope,
        mla=mla,
        experts=_deepseek_experts(f, third) if f.hf.get("n_routed_experts") else None,
    )


def _deepseek_experts(f: Fields, third: bool) -> Experts:
    method = f.get("topk_method", "noaux_tc" if third else "greedy")
    known = ("greedy", "group_limited_greedy", "noaux_tc")
    require(method in known, f"{f.family}: topk_method must be one of {', '.join(known)}, got {method!r}")
    grouped = method != "greedy"
    width = f.need("moe_intermediate_size")
    return Experts(
        count=f.need("n_routed_experts"),
        per_token=f.need("num_experts_per_tok"),
        ffn_size=width,
        shared_size=width * f.get("n_shared_experts", 0),
        scoring=f.get("scoring_func", "sigmoid" if third else "softmax"),
        normalise=f.get("norm_topk_prob", third),
        scaling=float(f.get("routed_scaling_factor", 2.5 if third else 1.0)),
        groups=f.get("n_group", 1) if grouped else 1,
        top_groups=f.get("topk_group", 1) if grouped else 1,
        group_top=2 if method == "noaux_tc" else 1,
        correction_bias=method == "noaux_tc",
        first_dense=f.get("first_k_dense_replace", 0),
    )


READERS: dict[str, Callable[[Fields], DecoderConfig]] = {
    "opt": _opt,
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gpt_neox": _gpt_neox,
    "falcon": _falcon,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
    "gemma2": _gemma2,
    "mixtral": _mixtral,
}
