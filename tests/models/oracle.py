"""Each family as its paper and reference code have it: float64 numpy over checkpoint tensors, no cache, one sequence.

It reads ``config.json`` and the checkpoint's own names, and shares no line with :mod:`paxkv.models`: neither the
reading of configs, nor the layout of weights, nor the absorbed form of latent attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray


class Oracle:
    """The logits of a checkpoint.

    Args:
        hf: its config.json.
        tensors: by name.
    """

    def __init__(self, hf: Mapping[str, Any], tensors: Mapping[str, Array]) -> None:
        self.hf = hf
        self.tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
        self.heads = hf.get("num_attention_heads", hf.get("n_head"))

    def logits(self, tokens: Array) -> Array:
        """[T,V]."""
        family = self.hf["model_type"]
        forward = {"opt": self.opt, "gpt2": self.gpt2, "gpt_neox": self.gpt_neox, "falcon": self.falcon}
        return forward.get(family, self.llama_like)(np.asarray(tokens))

    # --- pieces -------------------------------------------------------------------------------------------------------

    def linear(self, name: str, x: Array) -> Array:
        y = x @ self.tensors[f"{name}.weight"].T
        bias = self.tensors.get(f"{name}.bias")
        return y if bias is None else y + bias

    def layer_norm(self, name: str, x: Array) -> Array:
        x = x - x.mean(-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        return x * self.tensors[f"{name}.weight"] + self.tensors[f"{name}.bias"]

    def rms_norm(self, name: str, x: Array) -> Array:
        eps = self.hf.get("rms_norm_eps", 1e-6)
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)
        return x * (self.tensors[f"{name}.weight"] + (self.hf["model_type"] == "gemma2"))

    def split_heads(self, x: Array, heads: int) -> Array:
        return x.reshape(len(x), heads, -1)

    def frequencies(self, size: int) -> tuple[Array, float]:
        """Angle per position of each pair, and what sine and cosine are multiplied by."""
        plain = 10000.0 ** -(np.arange(0, size, 2) / size)
        if self.hf["model_type"] == "mixtral":
            plain = 1e6 ** -(np.arange(0, size, 2) / size)
        scaling = self.hf.get("rope_scaling")
        if scaling is None:
            return plain, 1.0
        trained, factor = scaling["original_max_position_embeddings"], scaling["factor"]
        out = plain.copy()
        if scaling["rope_type"] == "llama3":
            for i, frequency in enumerate(plain):
                length = 2 * math.pi / frequency
                if length > trained / 1.0:
                    out[i] = frequency / factor
                elif length > trained / 4.0:
                    smooth = (trained / length - 1.0) / (4.0 - 1.0)
                    out[i] = (1 - smooth) * frequency / factor + smooth * frequency
            return out, 1.0
        assert scaling["rope_type"] == "yarn"
        turns_at = [size * math.log(trained / (b * 2 * math.pi)) / (2 * math.log(10000.0)) for b in (32, 1)]
        low, high = max(math.floor(turns_at[0]), 0), min(math.ceil(turns_at[1]), size - 1)
        for i, frequency in enumerate(plain):
            ramp = min(max((i - low) / max(high - low, 0.001), 0.0), 1.0)
            out[i] = frequency / factor * ramp + frequency * (1 - ramp)
        temper = [0.1 * scaling[key] * math.log(factor) + 1 for key in ("mscale", "mscale_all_dim")]
        return out, temper[0] / temper[1]

    def rotate(self, x: Array, size: int, *, interleaved: bool = False) -> Array:
        """[T,H,D] turned pair by pair, as complex numbers."""
        frequencies, amplitude = self.frequencies(size)
        turn = amplitude * np.exp(1j * np.arange(len(x))[:, None] * frequencies)[:, None]
        first = np.arange(0, size, 2) if interleaved else np.arange(size // 2)
        second = first + (1 if interleaved else size // 2)
        turned = (x[..., first] + 1j * x[..., second]) * turn
        out = x.copy()
        out[..., first], out[..., second] = turned.real, turned.imag
        return out

    def attend(self, q: Array, k: Array, v: Array, scale: float, window=None, cap=None, slopes=None) -> Array:
        """[T,H*Dv], query after query, head after head."""
        tokens, heads, _ = q.shape
        out = np.zeros((tokens, heads, v.shape[2]))
        for head in range(heads):
            key_head = head // (heads // k.shape[1])
            for t in range(tokens):
                first = 0 if not window else max(0, t - window + 1)
                logits = k[first : t + 1, key_head] @ q[t, head] * scale
                if slopes is not None:
                    logits = logits + slopes[head] * (np.arange(first, t + 1) - t)
                if cap:
                    logits = cap * np.tanh(logits / cap)
                weights = np.exp(logits - logits.max())
                out[t, head] = weights / weights.sum() @ v[first : t + 1, key_head]
        return out.reshape(tokens, -1)

    def activation(self, x: Array) -> Array:
        default = dict(opt="relu", gpt2="gelu_new", gpt_neox="gelu", falcon="gelu", gemma2="gelu_pytorch_tanh")
        name = self.hf.get("hidden_act", default.get(self.hf["model_type"], "silu"))
        if name == "relu":
            return np.maximum(x, 0)
        if name == "silu":
            return x / (1 + np.exp(-x))
        if name == "gelu":
            return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    # --- families -----------------------------------------------------------------------------------------------------

    def opt(self, tokens: Array) -> Array:
        root, pre = "model.decoder", self.hf.get("do_layer_norm_before", True)
        embedding = self.tensors[f"{root}.embed_tokens.weight"]
        x = embedding[tokens]
        if not pre:
            x = self.linear(f"{root}.project_in", x)
        x = x + self.tensors[f"{root}.embed_positions.weight"][np.arange(len(tokens)) + 2]
        for i in range(self.hf["num_hidden_layers"]):
            name = f"{root}.layers.{i}"
            y = self.layer_norm(f"{name}.self_attn_layer_norm", x) if pre else x
            q, k, v = (self.split_heads(self.linear(f"{name}.self_attn.{p}_proj", y), self.heads) for p in "qkv")
            x = x + self.linear(f"{name}.self_attn.out_proj", self.attend(q, k, v, q.shape[2] ** -0.5))
            x = x if pre else self.layer_norm(f"{name}.self_attn_layer_norm", x)
            y = self.layer_norm(f"{name}.final_layer_norm", x) if pre else x
            x = x + self.linear(f"{name}.fc2", self.activation(self.linear(f"{name}.fc1", y)))
            x = x if pre else self.layer_norm(f"{name}.final_layer_norm", x)
        x = self.layer_norm(f"{root}.final_layer_norm", x) if pre else self.linear(f"{root}.project_out", x)
        return x @ embedding.T

    def gpt2(self, tokens: Array) -> Array:
        t = self.tensors
        embedding = t["transformer.wte.weight"]
        x = embedding[tokens] + t["transformer.wpe.weight"][: len(tokens)]

        def conv(name: str, x: Array) -> Array:
            return x @ t[f"{name}.weight"] + t[f"{name}.bias"]

        for i in range(self.hf["n_layer"]):
            name = f"transformer.h.{i}"
            qkv = np.split(conv(f"{name}.attn.c_attn", self.layer_norm(f"{name}.ln_1", x)), 3, axis=-1)
            q, k, v = (self.split_heads(part, self.heads) for part in qkv)
            x = x + conv(f"{name}.attn.c_proj", self.attend(q, k, v, q.shape[2] ** -0.5))
            y = self.activation(conv(f"{name}.mlp.c_fc", self.layer_norm(f"{name}.ln_2", x)))
            x = x + conv(f"{name}.mlp.c_proj", y)
        return self.layer_norm("transformer.ln_f", x) @ embedding.T

    def gpt_neox(self, tokens: Array) -> Array:
        x = self.tensors["gpt_neox.embed_in.weight"][tokens]
        size = self.hf["hidden_size"] // self.heads
        for i in range(self.hf["num_hidden_layers"]):
            name = f"gpt_neox.layers.{i}"
            y = self.linear(f"{name}.attention.query_key_value", self.layer_norm(f"{name}.input_layernorm", x))
            y = y.reshape(len(x), self.heads, 3, size)
            turned = int(size * self.hf["rotary_pct"])
            q, k, v = self.rotate(y[:, :, 0], turned), self.rotate(y[:, :, 1], turned), y[:, :, 2]
            attended = self.linear(f"{name}.attention.dense", self.attend(q, k, v, size**-0.5))
            base = x if self.hf.get("use_parallel_residual", True) else x + attended
            y = self.linear(f"{name}.mlp.dense_h_to_4h", self.layer_norm(f"{name}.post_attention_layernorm", base))
            x = x + attended + self.linear(f"{name}.mlp.dense_4h_to_h", self.activation(y))
        return self.linear("embed_out", self.layer_norm("gpt_neox.final_layer_norm", x))

    def falcon(self, tokens: Array) -> Array:
        hf, embedding = self.hf, self.tensors["transformer.word_embeddings.weight"]
        x, heads, size = embedding[tokens], self.heads, hf["hidden_size"] // self.heads
        grouped, parallel = hf.get("new_decoder_architecture", False), hf.get("parallel_attn", True)
        slopes = [2.0 ** (-8 * (h + 1) / heads) / math.sqrt(size) for h in range(heads)] if hf.get("alibi") else None
        for i in range(hf["num_hidden_layers"]):
            name = f"transformer.h.{i}"
            normed = self.layer_norm(f"{name}.{'ln_attn' if grouped else 'input_layernorm'}", x)
            y = self.linear(f"{name}.self_attention.query_key_value", normed)
            if grouped:
                y = y.reshape(len(x), hf["num_kv_heads"], heads // hf["num_kv_heads"] + 2, size)
                q, k, v = y[:, :, :-2].reshape(len(x), heads, size), y[:, :, -2], y[:, :, -1]
            elif hf.get("multi_query", True):
                y = y.reshape(len(x), heads + 2, size)
                q, k, v = y[:, :-2], y[:, -2:-1], y[:, -1:]
            else:
                y = y.reshape(len(x), heads, 3, size)
                q, k, v = y[:, :, 0], y[:, :, 1], y[:, :, 2]
            if slopes is None:
                q, k = self.rotate(q, size), self.rotate(k, size)
            attended = self.linear(f"{name}.self_attention.dense", self.attend(q, k, v, size**-0.5, slopes=slopes))
            if grouped:
                normed = self.layer_norm(f"{name}.ln_mlp", x)
            elif not parallel:
                normed = self.layer_norm(f"{name}.post_attention_layernorm", x + attended)
            y = self.activation(self.linear(f"{name}.mlp.dense_h_to_4h", normed))
            x = x + attended + self.linear(f"{name}.mlp.dense_4h_to_h", y)
        return self.layer_norm("transformer.ln_f", x) @ embedding.T

    def llama_like(self, tokens: Array) -> Array:
        hf, family = self.hf, self.hf["model_type"]
        embedding = self.tensors["model.embed_tokens.weight"]
        x = embedding[tokens] * (math.sqrt(hf["hidden_size"]) if family == "gemma2" else 1.0)
        for i in range(hf["num_hidden_layers"]):
            name = f"model.layers.{i}"
            attend = self.latent if family.startswith("deepseek") else self.grouped
            y = attend(f"{name}.self_attn", self.rms_norm(f"{name}.input_layernorm", x), i)
            if family == "gemma2":
                x = x + self.rms_norm(f"{name}.post_attention_layernorm", y)
                y = self.gated(f"{name}.mlp", self.rms_norm(f"{name}.pre_feedforward_layernorm", x))
                x = x + self.rms_norm(f"{name}.post_feedforward_layernorm", y)
                continue
            x = x + y
            y = self.rms_norm(f"{name}.post_attention_layernorm", x)
            x = x + np.stack([self.feed(name, row, i) for row in y])
        x = self.rms_norm("model.norm", x)
        tied = hf.get("tie_word_embeddings", family == "gemma2")
        logits = x @ embedding.T if tied else self.linear("lm_head", x)
        cap = hf.get("final_logit_softcapping")
        return cap * np.tanh(logits / cap) if cap else logits

    def grouped(self, name: str, x: Array, layer: int) -> Array:
        hf, family, size = self.hf, self.hf["model_type"], self.hf["head_dim"]
        q = self.split_heads(self.linear(f"{name}.q_proj", x), self.heads)
        k, v = (self.split_heads(self.linear(f"{name}.{p}_proj", x), hf["num_key_value_heads"]) for p in "kv")
        assert q.shape[2] == size
        if family == "qwen3":
            q, k = self.rms_norm(f"{name}.q_norm", q), self.rms_norm(f"{name}.k_norm", k)
        q, k = self.rotate(q, size), self.rotate(k, size)
        slides = {"mistral": True, "gemma2": layer in (0, 2, 4), "qwen2": layer >= hf.get("max_window_layers", 0)}
        window = hf["sliding_window"] if slides.get(family) else None
        scale = 24**-0.5 if family == "gemma2" else size**-0.5
        out = self.attend(q, k, v, scale, window=window, cap=hf.get("attn_logit_softcapping"))
        return self.linear(f"{name}.o_proj", out)

    def latent(self, name: str, x: Array, layer: int) -> Array:
        """Latent attention expanded: every head gets keys and values of its own."""
        hf, heads = self.hf, self.heads
        nope, rope, rank = hf["qk_nope_head_dim"], hf["qk_rope_head_dim"], hf["kv_lora_rank"]
        if hf["q_lora_rank"]:
            q = self.rms_norm(f"{name}.q_a_layernorm", self.linear(f"{name}.q_a_proj", x))
            q = self.linear(f"{name}.q_b_proj", q)
        else:
            q = self.linear(f"{name}.q_proj", x)
        q = self.split_heads(q, heads)
        down = self.linear(f"{name}.kv_a_proj_with_mqa", x)
        up = self.linear(f"{name}.kv_b_proj", self.rms_norm(f"{name}.kv_a_layernorm", down[:, :rank]))
        up = self.split_heads(up, heads)
        key = self.rotate(down[:, None, rank:], rope, interleaved=True)
        k = np.concatenate([up[..., :nope], np.repeat(key, heads, axis=1)], axis=-1)
        q = np.concatenate([q[..., :nope], self.rotate(q[..., nope:], rope, interleaved=True)], axis=-1)
        scale, scaling = (nope + rope) ** -0.5, hf.get("rope_scaling")
        if scaling:
            scale *= (0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1) ** 2
        return self.linear(f"{name}.o_proj", self.attend(q, k, up[..., nope:], scale))

    def gated(self, name: str, x: Array, parts=("gate_proj", "up_proj", "down_proj")) -> Array:
        gate, up, down = (f"{name}.{part}" for part in parts)
        return self.linear(down, self.activation(self.linear(gate, x)) * self.linear(up, x))

    def feed(self, name: str, x: Array, layer: int) -> Array:
        """One token's feed-forward."""
        hf, family = self.hf, self.hf["model_type"]
        if family == "mixtral":
            logits = self.tensors[f"{name}.block_sparse_moe.gate.weight"] @ x
            picked = sorted(range(len(logits)), key=lambda e: -logits[e])[: hf["num_experts_per_tok"]]
            weights = np.exp(logits[picked]) / np.exp(logits[picked]).sum()
            parts = ("w1", "w3", "w2")
            experts = [self.gated(f"{name}.block_sparse_moe.experts.{e}", x, parts) for e in picked]
            return sum(w * y for w, y in zip(weights, experts, strict=True))
        if not family.startswith("deepseek") or layer < hf["first_k_dense_replace"]:
            return self.gated(f"{name}.mlp", x)
        y = self.gated(f"{name}.mlp.shared_experts", x)
        for expert, weight in self.pick(f"{name}.mlp.gate", x).items():
            y = y + weight * self.gated(f"{name}.mlp.experts.{expert}", x)
        return y

    def pick(self, name: str, x: Array) -> dict[int, float]:
        """DeepSeek's routing of one token: weight by expert."""
        hf, logits = self.hf, self.tensors[f"{name}.weight"] @ x
        third = hf["model_type"] == "deepseek_v3"
        scores = 1 / (1 + np.exp(-logits)) if third else np.exp(logits) / np.exp(logits).sum()
        rank = scores + self.tensors[f"{name}.e_score_correction_bias"] if third else scores
        allowed = set(range(len(rank)))
        if hf.get("n_group", 1) > 1:
            groups = np.array_split(np.arange(len(rank)), hf["n_group"])
            merit = [sum(sorted(rank[g])[-2:]) if third else max(rank[g]) for g in groups]
            best = sorted(range(len(groups)), key=lambda g: -merit[g])[: hf["topk_group"]]
            allowed = {int(e) for g in best for e in groups[g]}
        picked = sorted(allowed, key=lambda e: -rank[e])[: hf["num_experts_per_tok"]]
        total = sum(scores[e] for e in picked) if hf["norm_topk_prob"] else 1.0
        return {e: scores[e] / total * hf.get("routed_scaling_factor", 1.0) for e in picked}
