"""Write the parity fixtures: per model family a tiny random checkpoint and the logits transformers gives it.

    python3.11 -m venv /tmp/hf && /tmp/hf/bin/pip install torch==2.13.0 transformers==5.24.0 safetensors accelerate
    /tmp/hf/bin/python scripts/make_parity.py [--out tests/parity] [--only llama,opt] [--check]

Needs CPU torch and Hugging Face transformers, which nothing else of this repository does, so this file imports nothing
of it. Takes about a minute. ``--check`` writes nothing: it makes everything again and compares with what is committed.

Each fixture is a folder as the hub would hold it: a config.json in the hub's own spelling and model.safetensors (one of
them in shards). Beside them lie ``reference.json`` (token ids, how many of them are the prompt, the versions that made
it) and ``logits.npy`` (float32 [tokens, vocabulary]). The first rows are the prompt's, the others come from decoding
one token at a time with transformers' own cache, checked against one forward pass over all tokens. (Where rotary
frequencies grow with the sequence, transformers' cached keys keep old ones and the two differ: there the forward pass
over all tokens is the reference.) Weights are random in the storage type, every norm and bias too, so that a skipped or
swapped one shows; computing is in float32. ``matters`` lists changes of the config that must change the logits: a
fixture that would not notice a missing window or scaling is refused here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import platform
import tempfile
import warnings
import zlib
from typing import Any

import numpy as np
import safetensors
import torch
import transformers

MAX_BYTES = 200_000
MATTERS = 1e-2  # a config change that counts moves some logit by more than this


@dataclasses.dataclass(frozen=True)
class Fixture:
    """One fixture.

    Attributes:
        config: what config.json holds.
        dtype: storage type of the weights.
        prompt, steps: tokens of the prompt and of the decoding after it.
        shard_bytes: largest file, to get a sharded checkpoint.
        grows: rotary frequencies grow with the sequence, so the reference is one forward pass, not cached decoding.
        attention: transformers' implementation, ``eager`` or ``sdpa``.
        matters: changes of ``config`` that must change the logits (None removes a key).
    """

    config: dict[str, Any]
    dtype: torch.dtype = torch.float16
    prompt: int = 40
    steps: int = 6
    shard_bytes: int | None = None
    grows: bool = False
    attention: str = "eager"
    matters: tuple[dict[str, Any], ...] = ()


# fmt: off
OPT = dict(
    architectures=["OPTForCausalLM"], model_type="opt", vocab_size=67, hidden_size=32, ffn_dim=56, num_hidden_layers=3,
    num_attention_heads=4, max_position_embeddings=64, word_embed_proj_dim=32, do_layer_norm_before=True,
    activation_function="relu", bos_token_id=2, eos_token_id=2, pad_token_id=1, dropout=0.1, torch_dtype="float16",
)
LLAMA = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", vocab_size=67, hidden_size=36, intermediate_size=56,
    num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=16, hidden_act="silu",
    max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=False,
    attention_bias=False, mlp_bias=False, bos_token_id=1, eos_token_id=2, torch_dtype="float16",
)
NEOX = dict(
    architectures=["GPTNeoXForCausalLM"], model_type="gpt_neox", vocab_size=67, hidden_size=64, intermediate_size=96,
    num_hidden_layers=2, num_attention_heads=4, rotary_pct=0.25, rotary_emb_base=10000, hidden_act="gelu",
    max_position_embeddings=64, layer_norm_eps=1e-5, use_parallel_residual=True, tie_word_embeddings=False,
    bos_token_id=0, eos_token_id=0, torch_dtype="float16",
)
FALCON = dict(
    architectures=["FalconForCausalLM"], model_type="falcon", vocab_size=67, hidden_size=48, num_hidden_layers=2,
    num_attention_heads=6, layer_norm_epsilon=1e-5, bias=False, alibi=False, new_decoder_architecture=False,
    multi_query=True, parallel_attn=True, bos_token_id=11, eos_token_id=11, torch_dtype="bfloat16",
)
YARN = dict(
    type="yarn", factor=8.0, original_max_position_embeddings=16, beta_fast=32, beta_slow=1, mscale=0.707,
    mscale_all_dim=0.5,
)
DEEPSEEK = dict(
    vocab_size=67, hidden_size=32, intermediate_size=48, moe_intermediate_size=12, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=12, qk_rope_head_dim=8,
    v_head_dim=10, n_routed_experts=8, num_experts_per_tok=3, first_k_dense_replace=1, moe_layer_freq=1,
    hidden_act="silu", rms_norm_eps=1e-6, rope_theta=10000.0, attention_bias=False, tie_word_embeddings=False,
    bos_token_id=0, eos_token_id=1, torch_dtype="bfloat16",
)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    """``config`` less ``keys``."""
    return {key: value for key, value in config.items() if key not in keys}


FIXTURES: dict[str, Fixture] = {
    "opt": Fixture(OPT),
    # Norm after the addition, and an embedding narrower than the model, as in OPT-350M; no norm at the end.
    "opt_350m": Fixture(
        OPT | dict(do_layer_norm_before=False, word_embed_proj_dim=20, torch_dtype="float32"), torch.float32,
    ),
    "llama": Fixture(LLAMA | dict(torch_dtype="bfloat16"), torch.bfloat16),
    "llama_llama3": Fixture(
        LLAMA | dict(
            max_position_embeddings=256, tie_word_embeddings=True,
            rope_scaling=dict(
                rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        ),
        matters=({"rope_scaling": None},),
    ),
    # The older key "type", and biases everywhere.
    "llama_linear": Fixture(
        LLAMA | dict(attention_bias=True, mlp_bias=True, rope_scaling=dict(type="linear", factor=4.0)),
        matters=({"rope_scaling": None},),
    ),
    # All tokens together fill trained length times factor.
    "llama_dynamic": Fixture(
        LLAMA | dict(max_position_embeddings=16, rope_scaling=dict(type="dynamic", factor=2.0)),
        prompt=26, steps=6, grows=True, matters=({"rope_scaling": None},),
    ),
    # The newer spelling, rope_parameters, as transformers 5 writes it.
    "llama_yarn": Fixture(
        without(LLAMA, "rope_theta", "torch_dtype") | dict(
            dtype="float16", max_position_embeddings=64,
            rope_parameters=dict(
                rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16, beta_fast=4.0,
                beta_slow=1.0,
            ),
        ),
        matters=({"rope_parameters": dict(rope_type="default", rope_theta=10000.0)},),
    ),
    "mistral": Fixture(
        without(LLAMA, "attention_bias", "mlp_bias") | dict(
            architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=12, num_hidden_layers=3,
        ),
        matters=({"sliding_window": None}, {"sliding_window": 11}, {"sliding_window": 13}),
    ),
    # Qwen2 keeps a sliding_window that use_sliding_window turns off.
    "qwen2": Fixture(
        without(LLAMA, "attention_bias", "mlp_bias", "head_dim") | dict(
            architectures=["Qwen2ForCausalLM"], model_type="qwen2", tie_word_embeddings=True, rope_theta=1000000.0,
            rms_norm_eps=1e-6, use_sliding_window=False, sliding_window=8, max_window_layers=1, torch_dtype="bfloat16",
        ),
        torch.bfloat16, matters=({"use_sliding_window": True},),
    ),
    "qwen3": Fixture(
        without(LLAMA, "mlp_bias") | dict(
            architectures=["Qwen3ForCausalLM"], model_type="qwen3", rope_theta=1000000.0, rms_norm_eps=1e-6,
            use_sliding_window=False, sliding_window=None, max_window_layers=2, torch_dtype="bfloat16",
        ),
        torch.bfloat16,
    ),
    "gpt_neox": Fixture(NEOX, matters=({"use_parallel_residual": False}, {"rotary_pct": 0.5})),
    "gpt_neox_sequential": Fixture(NEOX | dict(use_parallel_residual=False, rotary_pct=1.0)),
    # One norm, one K and V head, tied head.
    "falcon_7b": Fixture(FALCON, torch.bfloat16),
    # Two norms, grouped heads, fused projection in groups.
    "falcon_40b": Fixture(FALCON | dict(new_decoder_architecture=True, num_kv_heads=2), torch.bfloat16),
    # Falcon-RW: ALiBi, sequential, biases. transformers rounds slopes to bfloat16; those of eight heads are exact. Its
    # eager attention adds ALiBi twice, to the mask and to the scores; sdpa adds it once, as the model's own code does.
    "falcon_rw": Fixture(
        FALCON | dict(alibi=True, multi_query=False, parallel_attn=False, bias=True, num_attention_heads=8),
        torch.bfloat16, attention="sdpa", matters=({"alibi": False},),
    ),
    "deepseek_v2": Fixture(
        DEEPSEEK | dict(
            architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", q_lora_rank=14, n_shared_experts=2,
            n_group=4, topk_group=2, topk_method="group_limited_greedy", scoring_func="softmax", norm_topk_prob=False,
            routed_scaling_factor=1.5, max_position_embeddings=128, rope_scaling=YARN,
        ),
        torch.bfloat16, matters=({"rope_scaling": None}, {"topk_group": 4}),
    ),
    # As DeepSeek-V2-Lite: no low-rank query, no groups.
    "deepseek_v2_lite": Fixture(
        DEEPSEEK | dict(
            architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", q_lora_rank=None, n_shared_experts=1,
            n_group=1, topk_group=1, topk_method="greedy", scoring_func="softmax", norm_topk_prob=False,
            routed_scaling_factor=1.0, max_position_embeddings=128, rope_scaling=None,
        ),
        torch.bfloat16,
    ),
    "deepseek_v3": Fixture(
        DEEPSEEK | dict(
            architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", q_lora_rank=14, n_shared_experts=1,
            n_group=4, topk_group=2, topk_method="noaux_tc", scoring_func="sigmoid", norm_topk_prob=True,
            routed_scaling_factor=2.5, max_position_embeddings=128, num_nextn_predict_layers=0,
            rope_scaling=YARN | dict(mscale=1.0, mscale_all_dim=1.0),
        ),
        torch.bfloat16, matters=({"rope_scaling": None}, {"topk_group": 4}, {"norm_topk_prob": False}),
    ),
    "gpt2": Fixture(
        dict(
            architectures=["GPT2LMHeadModel"], model_type="gpt2", vocab_size=67, n_embd=36, n_layer=3, n_head=4,
            n_positions=64, n_ctx=64, n_inner=None, activation_function="gelu_new", layer_norm_epsilon=1e-5,
            bos_token_id=0, eos_token_id=0,
        ),
    ),
    "gemma2": Fixture(
        dict(
            architectures=["Gemma2ForCausalLM"], model_type="gemma2", vocab_size=67, hidden_size=32,
            intermediate_size=56, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=12,
            hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", max_position_embeddings=64,
            rms_norm_eps=1e-6, rope_theta=10000.0, query_pre_attn_scalar=20, sliding_window=12,
            attn_logit_softcapping=5.0, final_logit_softcapping=4.0, attention_bias=False, bos_token_id=2,
            eos_token_id=1, pad_token_id=0, torch_dtype="bfloat16",
        ),
        torch.bfloat16,
        matters=(
            {"sliding_window": 11}, {"sliding_window": 13}, {"attn_logit_softcapping": None},
            {"final_logit_softcapping": None}, {"query_pre_attn_scalar": 12},
        ),
    ),
    "mixtral": Fixture(
        without(LLAMA, "attention_bias", "mlp_bias") | dict(
            architectures=["MixtralForCausalLM"], model_type="mixtral", intermediate_size=20, num_local_experts=4,
            num_experts_per_tok=2, sliding_window=None, rope_theta=1000000.0, torch_dtype="bfloat16",
        ),
        torch.bfloat16, shard_bytes=20_000, matters=({"num_experts_per_tok": 1},),
    ),
}
# fmt: on


def fill(model: torch.nn.Module, seed: int, dtype: torch.dtype) -> None:
    """Draw every weight and every stored buffer of ``model`` at random, rounded to ``dtype``."""
    generator = torch.Generator().manual_seed(seed)
    zero_centred = model.config.model_type == "gemma2"  # its norms multiply by one plus the weight
    stored = model.state_dict(keep_vars=True)
    seen = set()
    for name, tensor in sorted(stored.items()):
        if tensor.data_ptr() in seen:
            continue  # a tied head
        seen.add(tensor.data_ptr())
        noise = torch.randn(tensor.shape, generator=generator)
        leaf = name.rsplit(".", 2)[-2] if name.endswith((".weight", ".bias")) else name
        if tensor.dim() == 1 and name.endswith(".weight"):
            value = 0.3 * noise if zero_centred else 1 + 0.3 * noise
        elif tensor.dim() == 1:
            value = 0.3 * noise
        elif "embed" in leaf or leaf in ("wte", "wpe"):
            value = 0.6 * noise
        else:
            fan_in = tensor.shape[0] if type(model).__name__.startswith("GPT2") else tensor.shape[-1]
            value = 1.3 * noise / fan_in**0.5
        with torch.no_grad():
            tensor.copy_(value.to(dtype).float())


def build(folder: pathlib.Path, attention: str, changes: dict[str, Any] | None = None) -> torch.nn.Module:
    """The model of ``folder`` in float32 with its weights, its config.json changed by ``changes``."""
    written = json.loads((folder / "config.json").read_text())
    for key, value in (changes or {}).items():
        written.pop(key, None)
        if value is not None:
            written[key] = value
    with tempfile.TemporaryDirectory() as place:
        (pathlib.Path(place) / "config.json").write_text(json.dumps(written))
        config = transformers.AutoConfig.from_pretrained(place)
    if changes and any(value is None for value in changes.values()):
        for key in changes:  # a removed key must not come back as the class's default
            if key in ("sliding_window", "attn_logit_softcapping", "final_logit_softcapping"):
                setattr(config, key, None)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation=attention
    ).eval()


@torch.no_grad()
def decode(model: torch.nn.Module, tokens: torch.Tensor, prompt: int) -> torch.Tensor:
    """Logits [tokens, vocabulary]: the prompt at once, then one token at a time through the model's own cache."""
    out = model(tokens[None, :prompt], use_cache=True)
    rows, cache = [out.logits[0]], out.past_key_values
    for position in range(prompt, len(tokens)):
        out = model(tokens[None, position : position + 1], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        rows.append(out.logits[0])
    return torch.cat(rows)


def distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """The largest difference of two arrays of logits."""
    return (first - second).abs().max().item()


def make(name: str, fixture: Fixture, folder: pathlib.Path) -> str:
    """Write the fixture ``name`` into ``folder`` and return a line that describes it.

    Raises:
        RuntimeError: the folder is too large, transformers disagrees with itself, or a change that must matter does
            not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.iterdir():
        if stale.suffix in (".safetensors", ".npy", ".json"):
            stale.unlink()
    seed = zlib.crc32(name.encode())
    config = folder / "config.json"
    config.write_text(json.dumps(fixture.config, indent=1) + "\n")

    fresh = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(folder), dtype=torch.float32, attn_implementation="eager"
    )
    fill(fresh, seed, fixture.dtype)
    kwargs = {} if fixture.shard_bytes is None else {"max_shard_size": fixture.shard_bytes}
    fresh.to(fixture.dtype).save_pretrained(folder, **kwargs)
    (folder / "generation_config.json").unlink(missing_ok=True)
    config.write_text(json.dumps(fixture.config, indent=1) + "\n")  # as the hub spells it, not as save_pretrained does

    generator = torch.Generator().manual_seed(seed + 1)
    tokens = torch.randint(3, fixture.config["vocab_size"], (fixture.prompt + fixture.steps,), generator=generator)
    model = build(folder, fixture.attention)
    logits = decode(model, tokens, fixture.prompt)
    with torch.no_grad():
        whole = model(tokens[None], use_cache=False).logits[0]
    if fixture.grows:
        logits = whole
    itself = distance(logits, whole)
    if itself > 2e-5:
        raise RuntimeError(f"{name}: decoding and one forward pass of transformers differ by {itself:.1e}")
    if not 0.5 < logits.abs().max() < 60:
        raise RuntimeError(
            f"{name}: the largest logit is {logits.abs().max():.1f}; a tolerance of 1e-4 means little there"
        )
    moved = []
    for changes in fixture.matters:
        moved.append(distance(decode(build(folder, fixture.attention, changes), tokens, fixture.prompt), logits))
        if moved[-1] < MATTERS:
            raise RuntimeError(f"{name}: {changes} changes no logit by more than {moved[-1]:.1e}")

    np.save(folder / "logits.npy", logits.numpy())
    reference = dict(
        tokens=tokens.tolist(),
        prompt_tokens=fixture.prompt,
        one_forward_pass_differs_by=itself,
        made_with=dict(
            python=platform.python_version(),
            torch=torch.__version__,
            transformers=transformers.__version__,
            safetensors=safetensors.__version__,
        ),
    )
    (folder / "reference.json").write_text(json.dumps(reference) + "\n")
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > MAX_BYTES:
        raise RuntimeError(f"{name}: {size} bytes, at most {MAX_BYTES} are allowed; make it smaller")
    return (
        f"{name:<20}{size:>8} bytes  largest logit {logits.abs().max():6.2f}  itself {itself:.1e}  "
        f"moved {[round(x, 3) for x in moved]}"
    )


def compare(name: str, committed: pathlib.Path, fresh: pathlib.Path) -> str | None:
    """What differs between two folders of one fixture, or None: weights to the bit, logits to 1e-5."""
    for path in sorted(fresh.iterdir()):
        twin = committed / path.name
        if not twin.is_file():
            return f"{name}: {path.name} is not committed"
        if path.name == "logits.npy":
            gap = float(np.abs(np.load(path) - np.load(twin)).max())
            if gap > 1e-5:
                return f"{name}: logits differ by {gap:.1e}"
        elif path.name == "reference.json":
            if json.loads(path.read_text())["tokens"] != json.loads(twin.read_text())["tokens"]:
                return f"{name}: other tokens"
        elif path.read_bytes() != twin.read_bytes():
            return f"{name}: {path.name} differs"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    root = pathlib.Path(__file__).resolve().parents[1]
    parser.add_argument("--out", type=pathlib.Path, default=root / "tests" / "parity", help="folder of the fixtures")
    parser.add_argument("--only", default="", help="names of fixtures, separated by commas")
    parser.add_argument("--check", action="store_true", help="write nothing, compare with what is there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # names that transformers will rename
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    names = args.only.split(",") if args.only else list(FIXTURES)
    if unknown := set(names) - set(FIXTURES):
        parser.error(f"no fixture named {sorted(unknown)}; there are {sorted(FIXTURES)}")
    failed = []
    for name in names:
        if args.check:
            with tempfile.TemporaryDirectory() as place:
                make(name, FIXTURES[name], pathlib.Path(place))
                problem = compare(name, args.out / name, pathlib.Path(place))
            print(problem or f"{name}: the same", flush=True)
            failed += [name] if problem else []
        else:
            print(make(name, FIXTURES[name], args.out / name), flush=True)
    if failed:
        raise SystemExit(f"differs: {failed}")


if __name__ == "__main__":
    main()
