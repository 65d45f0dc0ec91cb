"""Every family: paged = dense, in chunks = whole, beside others = alone, stacked layers = unrolled."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.cache.pages import init
from paxkv.cache.rows import Rows
from paxkv.models.decoder import Decoder
from paxkv.models.families import FAMILIES, canonical_name, from_hf_config, tensor_map
from paxkv.models.weights import check_params, flatten, init_params, stack_layers, unflatten, unstack_layers
from tests.models.checkpoints import HF, LLAMA, config_of, params_of, tensors_of
from tests.models.oracle import Oracle
from tests.models.session import Session

TOKENS = np.random.default_rng(3).integers(0, 40, 14).tolist()
OTHERS = np.random.default_rng(4).integers(0, 40, 14).tolist()


def assert_close(got: np.ndarray, want: np.ndarray, tolerance: float = 1e-5) -> None:
    """Within a share of the largest logit, the ladder's measure."""
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()


def test_every_family_has_a_checkpoint():
    assert {hf["model_type"] for hf in HF.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", HF)
def test_a_family_computes_what_its_reference_does(name):
    config = config_of(name)
    oracle = Oracle(HF[name], tensors_of(name))
    want = oracle.logits(TOKENS)
    unrolled, stacked = params_of(name, stacked=False), params_of(name, stacked=True)
    check_params(stacked, config)
    whole = Session(dataclasses.replace(config, scan_layers=False), unrolled, page_size=4, width=14)
    whole = whole.step({"a": TOKENS})["a"]
    assert_close(whole, want)
    # Stacked layers, other pages, a chunk, a chunk beside two others, then one token at a time beside one other.
    session = Session(config, stacked, page_size=3, width=12, places=3)
    parts = [session.step({"a": TOKENS[:5]})["a"]]
    parts.append(session.step({"b": OTHERS[:3], "a": TOKENS[5:10], "c": OTHERS[5:7]})["a"])
    for i in range(10, 14):
        step = session.step({"b": [OTHERS[i - 7]], "a": [TOKENS[i]]})
        parts.append(step["a"])
    assert_close(np.concatenate(parts), want)
    assert_close(np.concatenate(parts), whole)
    assert_close(step["b"], oracle.logits(OTHERS[:7])[-1:])


@pytest.mark.parametrize("name", ["llama", "opt_350m", "deepseek_v3", "gemma2"])
def test_one_token_steps_take_the_decode_path(name):
    config, params = config_of(name), params_of(name, stacked=True)
    session = Session(config, params, width=2, places=2)
    parts = [session.step({"a": [a], "b": [b]})["a"] for a, b in zip(TOKENS, OTHERS, strict=True)]
    assert_close(np.concatenate(parts), Oracle(HF[name], tensors_of(name)).logits(TOKENS))


@pytest.mark.parametrize("name", ["llama", "deepseek_v2"])
def test_bfloat16_stays_near(name):
    config = dataclasses.replace(config_of(name), dtype="bfloat16")
    exact = {
        path: jnp.float32 if path[-1] == "correction_bias" else jnp.bfloat16
        for path in flatten(params_of(name, stacked=True))
    }
    params = {path: value.astype(exact[path]) for path, value in flatten(params_of(name, stacked=True)).items()}
    logits = Session(config, unflatten(params), width=14).step({"a": TOKENS})["a"]
    assert logits.dtype == np.float32
    assert_close(logits, Oracle(HF[name], tensors_of(name)).logits(TOKENS), 0.15)


def test_logits_only_where_wanted():
    config, params = config_of("llama"), params_of("llama", stacked=True)
    session = Session(config, params, width=14)
    every = session.step({"a": TOKENS})["a"]
    rows = Rows(jnp.asarray([[2, 0, 1, 3]]), jnp.asarray([14]), jnp.asarray([0, 14]), jnp.asarray(_slots([2, 0, 1, 3])))
    some, _ = Decoder(config).apply(
        {"params": params},
        jnp.asarray(TOKENS),
        jnp.arange(14),
        init(config.cache_layout(4, 4)),
        rows,
        jnp.asarray([13, 0, 13]),
    )
    np.testing.assert_allclose(some, every[[13, 0, 13]], atol=1e-5)


def _slots(table: list[int]) -> list[int]:
    return [table[p // 4] * 4 + p % 4 for p in range(14)]


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_stacking_turns_back(name):
    config, unrolled = config_of(name), params_of(name, stacked=False)
    back = flatten(unstack_layers(stack_layers(unrolled, config), config))
    flat = flatten(unrolled)
    assert set(back) == set(flat)
    assert all(np.array_equal(back[path], flat[path]) for path in flat)


@pytest.mark.parametrize("name", HF)
def test_rules_turn_back(name):
    tensors = tensors_of(name)
    back = {source: np.full_like(tensor, np.nan) for source, tensor in tensors.items()}
    for rule in tensor_map(config_of(name)):
        weight = rule([tensors[source] for source in rule.sources])
        for number, source in enumerate(rule.sources):
            rule.take(weight, number, back[source])
    for source, tensor in tensors.items():
        np.testing.assert_array_equal(back[source], tensor, err_msg=source)


def test_random_weights_do_not_depend_on_stacking():
    config = config_of("deepseek_v3")
    stacked = init_params(config, 5)
    unrolled = init_params(dataclasses.replace(config, scan_layers=False), 5)
    for path, value in flatten(stack_layers(unrolled, config)).items():
        np.testing.assert_array_equal(flatten(stacked)[path], value)
    assert not np.array_equal(stacked["embedding"], init_params(config, 6)["embedding"])


# --- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        ({"model_type": "mamba"}, "model_type must be one of opt, llama.*got 'mamba'"),
        (
            LLAMA | {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
            "must be a language model",
        ),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"} | {"model_type": "llama"}, "must have hidden_size"),
        (LLAMA | {"model_type": "llama", "hidden_act": "swoosh"}, "activation must be one of.*swoosh"),
        (LLAMA | {"model_type": "llama", "num_key_value_heads": 3}, "multiple of KV heads, got 4 and 3"),
        (LLAMA | {"model_type": "llama", "quantization_config": {"bits": 4}}, "must not be quantised"),
        (LLAMA | {"model_type": "qwen3", "layer_types": ["chunked_attention"] * 2}, "layer_types must name"),
        (
            HF["gpt2"] | {"scale_attn_by_inverse_layer_idx": True},
            "scale_attn_by_inverse_layer_idx=True is not supported",
        ),
        (HF["deepseek_v3"] | {"topk_method": "dice"}, "topk_method must be one of.*dice"),
        (HF["deepseek_v3"] | {"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported"),
        (HF["deepseek_v3"] | {"num_experts_per_tok": 5}, "between 1 and 4 experts, got 5"),
    ],
)
def test_configs_that_cannot_be_served_are_named(hf, message):
    with pytest.raises(ValueError, match=message):
        from_hf_config(hf)


def test_a_misshapen_tensor_is_named():
    rule = next(
        rule for rule in tensor_map(config_of("llama")) if rule.path == ("layers_0", "attention", "qkv", "kernel")
    )
    tensors = [np.zeros(shape, np.float32) for shape in rule.shapes]
    tensors[1] = tensors[1][:-1]
    with pytest.raises(
        ValueError, match=r"model\.layers\.0\.self_attn\.k_proj\.weight: expected \[16, 32\].*found \[15, 32\]"
    ):
        rule(tensors)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda p: p["layers"]["ffn"].pop("down"),
            r"layers/ffn/down/kernel is missing: expected float32 \[2, 24, 32\]",
        ),
        (lambda p: p.update(head=p["head"][:-1]), r"head: expected float32 \[32, 40\], found float32 \[31, 40\]"),
        (lambda p: p.update(head=p["head"].astype(jnp.bfloat16)), r"head: expected float32.*found bfloat16"),
        (lambda p: p.update(extra=jnp.ones(3)), "extra is of no use"),
    ],
)
def test_weights_that_do_not_fit_are_named(change, message):
    params = params_of("llama", stacked=True)
    change(params)
    with pytest.raises(ValueError, match=message):
        check_params(params, config_of("llama"))


def test_a_missing_weight_is_never_made_up():
    config, params = config_of("llama"), params_of("llama", stacked=True)
    del params["final_norm"]
    with pytest.raises(Exception, match="scale.*final_norm"):
        Session(config, params, width=14).step({"a": TOKENS})


def test_pages_of_another_model_are_refused():
    session = Session(config_of("llama"), params_of("llama", stacked=True))
    session.pages = Session(config_of("qwen3"), None).pages
    with pytest.raises(ValueError, match="head_size 8 for this llama, got 16"):
        session.step({"a": TOKENS})


def test_names_of_other_exports_are_understood():
    gpt2, neox, opt = config_of("gpt2"), config_of("gpt_neox"), config_of("opt")
    assert canonical_name(gpt2, "h.0.attn.c_attn.bias") == "transformer.h.0.attn.c_attn.bias"
    assert canonical_name(gpt2, "h.0.attn.bias") is None
    assert canonical_name(neox, "gpt_neox.layers.1.attention.bias") is None
    assert canonical_name(neox, "gpt_neox.layers.1.attention.dense.bias") == "gpt_neox.layers.1.attention.dense.bias"
    assert canonical_name(opt, "decoder.layers.0.fc1.weight") == "model.decoder.layers.0.fc1.weight"
    assert canonical_name(config_of("falcon_40b"), "transformer.h.0.ln_attn.bias") == "transformer.h.0.ln_attn.bias"
    assert canonical_name(config_of("llama"), "model.layers.0.self_attn.rotary_emb.inv_freq") is None
    assert canonical_name(config_of("deepseek_v3"), "model.layers.3.eh_proj.weight") is None
    for name in HF:
        config = config_of(name)
        for rule in tensor_map(config):
            assert all(canonical_name(config, source) == source for source in rule.sources)


@pytest.mark.parametrize(("tied", "stored"), [(True, True), (True, False), (False, True), (False, False)])
def test_tied_flag_and_stored_head(tied, stored):
    # A tied model has no head of its own, and a stored one is of no use to it; an untied one needs its own.
    config = from_hf_config(LLAMA | {"model_type": "llama", "tie_word_embeddings": tied})
    rules = {rule.path: rule for rule in tensor_map(config)}
    tensors = tensors_of("llama")
    if not stored:
        del tensors["lm_head.weight"]
    used = {name: tensor for name, tensor in tensors.items() if canonical_name(config, name) == name}
    flat = {
        path: jnp.asarray(rule([used[source] for source in rule.sources]))
        for path, rule in rules.items()
        if all(source in used for source in rule.sources)
    }
    params = stack_layers(unflatten(flat), config)
    if not tied and not stored:
        with pytest.raises(ValueError, match="weight head is missing"):
            check_params(params, config)
        return
    check_params(params, config)
    logits = Session(config, params, width=14).step({"a": TOKENS})["a"]
    assert_close(logits, Oracle(LLAMA | {"model_type": "llama", "tie_word_embeddings": tied}, tensors).logits(TOKENS))
