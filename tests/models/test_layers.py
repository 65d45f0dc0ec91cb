"""Norms, projections, fused layouts, head sizes and experts, each against numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention.api import paged_attention
from pallas_kernels.pages import PageFormat
from paxkv.models.architecture import Experts
from paxkv.models.attention import alibi_slopes
from paxkv.models.experts import by_expert, by_token, route
from paxkv.models.families import from_hf_config, tensor_map
from paxkv.models.layers import layer_norm, linear, rms_norm, soft_cap
from paxkv.models.tensor_rules import group_order
from paxkv.models.weights import weight_specs
from tests.models.checkpoints import HF, LLAMA, config_of


def test_rms_norm():
    got = rms_norm(jnp.asarray([[3.0, 4.0]]), jnp.ones(2), 0.0)
    np.testing.assert_allclose(got, [[0.8485281, 1.1313708]], rtol=1e-6)
    got = rms_norm(jnp.asarray([[3.0, 4.0]]), jnp.asarray([0.0, 1.0]), 0.0, offset=1.0)
    np.testing.assert_allclose(got, [[0.8485281, 2.2627417]], rtol=1e-6)


def test_layer_norm():
    got = layer_norm(jnp.asarray([[1.0, 3.0]]), jnp.asarray([2.0, 2.0]), jnp.asarray([0.5, 0.0]), 0.0)
    np.testing.assert_allclose(got, [[-1.5, 2.0]], rtol=1e-6)


def test_norms_compute_in_float32():
    # 300 squared times 256 lanes leaves bfloat16 without digits, and float16 without range.
    for dtype in (jnp.bfloat16, jnp.float16):
        x = jnp.full((1, 256), 300.0, dtype)
        got = rms_norm(x, jnp.ones(256, dtype), 1e-5)
        assert got.dtype == dtype
        np.testing.assert_allclose(got.astype(np.float32), 1.0, rtol=1e-2)


def test_linear_and_soft_cap():
    got = linear(
        jnp.asarray([[1.0, 2.0]]), jnp.asarray([[1.0, 0.0, 3.0], [0.0, 1.0, -1.0]]), jnp.asarray([0.0, 0.5, 0.0])
    )
    np.testing.assert_allclose(got, [[1.0, 2.5, 1.0]])
    np.testing.assert_allclose(soft_cap(jnp.asarray([0.1, 1000.0]), 2.0), [0.09991681, 2.0], rtol=1e-5)


def test_fused_rows_are_cut_by_head():
    # GPT-NeoX: two heads of two lanes; each head's q, k and v lie together.
    q, k, v = np.split(group_order(kv_heads=2, group=1, head_size=2), 3)
    assert (q.tolist(), k.tolist(), v.tolist()) == ([0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11])
    # Falcon-40B: two groups of two queries, one key and one value.
    order = group_order(kv_heads=2, group=2, head_size=1)
    assert order.tolist() == [0, 1, 4, 5, 2, 6, 3, 7]


def test_head_size_is_declared():
    hf = LLAMA | dict(model_type="qwen3", hidden_size=2560, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    config = from_hf_config(hf)
    specs = weight_specs(config)
    assert specs["layers", "attention", "qkv", "kernel"].shape == (2, 2560, 4096 + 2 * 1024)
    assert specs["layers", "attention", "out", "kernel"].shape == (2, 4096, 2560)
    rule = next(rule for rule in tensor_map(config) if rule.path == ("layers_0", "attention", "qkv", "kernel"))
    assert rule.shapes == ((4096, 2560), (1024, 2560), (1024, 2560))
    assert config.shape.head_size == config.cache_layout(1).head_size == 128


@pytest.mark.parametrize("size", [64, 80, 96, 128, 192])
def test_softmax_scale_is_that_of_the_declared_head_size(size):
    config = from_hf_config(LLAMA | dict(model_type="llama", head_dim=size))
    assert config.attention_scale == pytest.approx(size**-0.5)
    q = jnp.ones((1, 1, size))
    k = jnp.stack([jnp.ones(size), jnp.full(size, 0.9)])[None, None]
    v = jnp.broadcast_to(jnp.asarray([0.0, 1.0])[None, None, :, None], k.shape)
    out = paged_attention(
        q, k, v, jnp.zeros((1, 1), jnp.int32), jnp.asarray([2]), jnp.asarray([0, 1]), scale=config.attention_scale
    )
    np.testing.assert_allclose(out, 1 / (1 + np.exp(0.1 * size**0.5)), rtol=1e-4)
    if size == 96:
        np.testing.assert_allclose(out[0, 0, 0], 0.2729323, rtol=1e-5)


def test_alibi_slopes():
    np.testing.assert_allclose(alibi_slopes(8, 64) * 8, [2.0**-i for i in range(1, 9)])
    # Six heads: the four of four heads, then the odd ones of eight.
    np.testing.assert_allclose(alibi_slopes(6, 1), [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])


def test_windows_lie_on_the_layers_that_the_family_says():
    def windows(family: str, **changes) -> list[int]:
        hf = HF[family] | {"num_hidden_layers": 6, "sliding_window": 4} | changes
        hf = {key: value for key, value in hf.items() if value != "absent"}
        return list(from_hf_config(hf).windows) or [0] * 6

    on = dict(use_sliding_window=True)
    for family in ("qwen2", "qwen3"):
        assert windows(family, **on, max_window_layers=4) == [0, 0, 0, 0, 4, 4]
        assert windows(family, **on, max_window_layers=0) == [4] * 6
        # The split at the last layer, the switch off or absent, no window: every key is seen, in all layers.
        assert windows(family, **on, max_window_layers=6) == [0] * 6
        assert windows(family, use_sliding_window=False, max_window_layers=4) == [0] * 6
        assert windows(family, use_sliding_window="absent", max_window_layers=4) == [0] * 6
        assert windows(family, **on, sliding_window=None, max_window_layers=4) == [0] * 6
    assert windows("mistral") == [4] * 6
    assert windows("mistral", sliding_window=None) == [0] * 6
    assert windows("mistral", sliding_window="absent") == [4096] * 6
    assert windows("gemma2") == [4, 0] * 3
    assert windows("mixtral", sliding_window="absent") == [0] * 6


def test_cache_layout_and_sizes_agree():
    for name in HF:
        config = config_of(name)
        layout = config.cache_layout(10, 8)
        assert layout.bytes_per_token == config.shape.kv_bytes_per_token, name
    # 36 layers of 8 KV heads of 128 lanes: 147,456 bytes in two-byte elements; a derived head size would give 92,160.
    hf = LLAMA | dict(model_type="qwen3", hidden_size=2560, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    config = from_hf_config(hf | dict(num_hidden_layers=36, torch_dtype="bfloat16"))
    assert config.shape.kv_bytes_per_token == config.cache_layout(10).bytes_per_token == 147_456
    layout = config_of("deepseek_v3").cache_layout(10, 8, PageFormat("int8", "token"))
    assert (layout.num_kv_heads, layout.head_size, layout.has_values) == (1, 24, False)


# --- experts --------------------------------------------------------------------------------------------------------


def test_mixtral_routing_is_a_softmax_over_the_picked():
    picked, weights = route(jnp.log(jnp.asarray([[1.0, 6.0, 1.0, 3.0]])), None, Experts(4, 2, 8))
    assert picked.tolist() == [[1, 3]]
    np.testing.assert_allclose(weights, [[2 / 3, 1 / 3]], rtol=1e-6)


def test_v2_routing_keeps_to_the_best_groups():
    # Groups {0,1}, {2,3}, {4,5}: the best two hold 0.4 and 0.3; the 0.25 of the third is out of reach.
    scores = jnp.asarray([[0.40, 0.01, 0.30, 0.02, 0.25, 0.02]])
    experts = Experts(6, 3, 8, normalise=False, scaling=2.0, groups=3, top_groups=2)
    picked, weights = route(jnp.log(scores), None, experts)
    assert picked.tolist() == [[0, 2, 3]]
    np.testing.assert_allclose(weights, [[0.8, 0.6, 0.04]], rtol=1e-5)


def test_v3_routing_picks_with_the_bias_and_weighs_without():
    # Group scores are sums of two. The bias lifts expert 1 over 0; weights are plain sigmoids, normalised, scaled.
    scores = jnp.asarray([[0.6, 0.5, 0.3, 0.7]])
    bias = jnp.asarray([-0.2, 0.3, 0.0, 0.0])
    experts = Experts(
        4, 1, 8, scoring="sigmoid", groups=2, top_groups=1, group_top=2, correction_bias=True, scaling=2.5
    )
    picked, weights = route(jnp.log(scores / (1 - scores)), bias, experts)
    assert picked.tolist() == [[1]]
    np.testing.assert_allclose(weights, [[2.5]], rtol=1e-5)
    two = dataclasses.replace(experts, per_token=2)
    picked, weights = route(jnp.log(scores / (1 - scores)), bias, two)
    assert picked.tolist() == [[1, 0]]
    np.testing.assert_allclose(weights, [[2.5 * 0.5 / 1.1, 2.5 * 0.6 / 1.1]], rtol=1e-5)


def test_an_unpicked_group_stays_out_even_where_scores_are_negative():
    bias = jnp.asarray([-3.0, -3.0, -5.0, -5.0])
    experts = Experts(4, 2, 8, scoring="sigmoid", groups=2, top_groups=1, group_top=2, correction_bias=True)
    picked, _ = route(jnp.zeros((1, 4)), bias, experts)
    assert sorted(picked[0].tolist()) == [0, 1]


def _expert_problem(tokens: int):
    rng = np.random.default_rng(1)
    x, gate_up, down = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((tokens, 8), (5, 8, 12), (5, 6, 8))
    )
    # Expert 4 is picked by nobody.
    picked, weights = route(jnp.asarray(rng.standard_normal((tokens, 5))).at[:, 4].set(-9.0), None, Experts(5, 2, 6))
    return x, gate_up, down, picked, weights


@pytest.mark.parametrize("compute", [by_expert, by_token])
def test_experts_compute_what_one_token_after_the_other_does(compute):
    x, gate_up, down, picked, weights = _expert_problem(7)
    got = compute(x, gate_up, down, picked, weights, "silu")
    for t in range(7):
        want = 0
        for expert, weight in zip(picked[t].tolist(), np.asarray(weights[t], np.float64).tolist(), strict=True):
            gate, up = np.split(np.asarray(x[t], np.float64) @ np.asarray(gate_up[expert], np.float64), 2)
            want = want + weight * (gate / (1 + np.exp(-gate)) * up) @ np.asarray(down[expert], np.float64)
        np.testing.assert_allclose(got[t], want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("compute", [by_expert, by_token])
def test_a_token_does_not_feel_the_experts_of_others(compute):
    x, gate_up, down, picked, weights = _expert_problem(6)
    function = jax.jit(lambda *args: compute(*args, "silu"))
    want = function(x, gate_up, down, picked, weights)
    others = x.at[1:].set(100.0), gate_up, down, picked.at[1:].set(jnp.asarray([4, 3])), weights.at[1:].set(7.0)
    np.testing.assert_array_equal(function(*others)[0], want[0])
