"""Rotary frequencies under every scaling rule, the lanes they turn, and how long sequences may be."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.models.families import from_hf_config
from paxkv.models.rotary import Rope, angles, dynamic_base, inverse_frequencies, rotate
from tests.models.checkpoints import HF, LLAMA, config_of, params_of
from tests.models.session import Session

LLAMA3 = dict(base=500000.0, kind="llama3", trained_length=8192, low=1.0, high=4.0)


def hf_with(**changes):
    return LLAMA | {"model_type": "llama"} | changes


@pytest.mark.parametrize(
    ("size", "factor", "expected"),
    [
        (
            128,
            8.0,
            {
                28: 3.2114460e-3,
                29: 2.1665708e-3,
                30: 1.3718936e-3,
                34: 1.7850781e-4,
                35: 9.5562124e-5,
                63: 3.0689260e-7,
            },
        ),
        (64, 32.0, {14: 3.2114460e-3, 15: 1.2905479e-3, 17: 9.7082878e-5, 18: 1.9461638e-5, 31: 9.4183067e-8}),
    ],
)
def test_llama3_frequencies(size, factor, expected):
    got = inverse_frequencies(Rope(size, factor=factor, **LLAMA3))
    plain = inverse_frequencies(Rope(size, 500000.0))
    for index, value in expected.items():
        assert got[index] == pytest.approx(value, rel=1e-5), index
    first, *_, last = expected
    assert got[first] == plain[first]  # short waves stay
    assert got[last] == pytest.approx(plain[last] / factor)  # long ones are stretched whole


def test_dynamic_base_grows_past_the_trained_length():
    rope = Rope(128, 10000.0, "dynamic", 2.0, 2048)
    assert dynamic_base(rope, 100) == dynamic_base(rope, 2048) == 10000.0
    assert dynamic_base(rope, 4096) == pytest.approx(30527.737, rel=1e-6)
    # Served length, not the running sequence's, decides; by default the longest that can be served.
    assert rope.served_length == 4096
    assert inverse_frequencies(rope)[1] == pytest.approx(30527.737 ** (-2 / 128))
    short = dataclasses.replace(rope, length=2048)
    np.testing.assert_array_equal(inverse_frequencies(short), inverse_frequencies(Rope(128)))


def test_dynamic_rope_means_the_same_for_cached_keys_and_whatever_runs_beside():
    hf = hf_with(max_position_embeddings=8, rope_scaling={"type": "dynamic", "factor": 4.0})
    config, params = from_hf_config(hf), params_of("llama", stacked=True)
    tokens, long = list(range(1, 13)), list(range(2, 30))
    whole = Session(config, params, width=40, places=2).step({"a": tokens})["a"]
    # From under the trained length across it, beside a longer sequence.
    session = Session(config, params, width=40, places=2)
    parts = [session.step({"long": long, "a": tokens[:6]})["a"], session.step({"a": tokens[6:]})["a"]]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-5 * np.abs(whole).max())
    other = Session(config.at_length(8), params, width=40, places=2).step({"a": tokens[:8]})["a"]
    plain = Session(config_of("llama"), params, width=40, places=2).step({"a": tokens[:8]})["a"]
    np.testing.assert_allclose(other, plain, atol=1e-5 * np.abs(plain).max())
    assert np.abs(other - whole[:8]).max() > 1e-3


def test_linear_divides_every_frequency():
    got = inverse_frequencies(Rope(64, kind="linear", factor=4.0))
    np.testing.assert_allclose(got, inverse_frequencies(Rope(64)) / 4)


def test_yarn_keeps_short_waves_and_stretches_long_ones():
    # DeepSeek-V3: 64 lanes, factor 40 over 4096 positions.
    rope = Rope(64, 10000.0, "yarn", 40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
    got, plain = inverse_frequencies(rope), inverse_frequencies(Rope(64))
    np.testing.assert_array_equal(got[:11], plain[:11])  # 32 turns over 4096 positions at lane 10.47
    np.testing.assert_allclose(got[23:], plain[23:] / 40)  # one turn at lane 22.51
    assert (got[11:23] < plain[11:23]).all() and (got[11:23] > plain[11:23] / 40).all()
    assert got[16] == pytest.approx(plain[16] * (1 - 6 / 13 * 39 / 40))
    assert rope.amplitude == 1.0
    assert Rope(64, kind="yarn", factor=4.0, trained_length=16).amplitude == pytest.approx(1.1386294)
    assert dataclasses.replace(rope, attention_factor=0.5).amplitude == 0.5
    cos, sin = angles(dataclasses.replace(rope, attention_factor=0.5), jnp.zeros(1, jnp.int32))
    assert (cos == 0.5).all() and (sin == 0).all()


def test_yarn_raises_deepseeks_softmax_scale():
    hf = HF["deepseek_v3"] | dict(qk_nope_head_dim=128, qk_rope_head_dim=64, rope_scaling=dict(type="yarn", factor=40))
    hf["rope_scaling"] |= dict(original_max_position_embeddings=4096, mscale=1.0, mscale_all_dim=1.0)
    assert from_hf_config(hf).attention_scale == pytest.approx(0.1352337788608801)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_both_spellings_of_the_kind_are_read(key):
    scaling = {key: "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    rope = from_hf_config(hf_with(rope_theta=500000.0, head_dim=128, rope_scaling=scaling)).rope
    assert rope == Rope(128, factor=8.0, **LLAMA3)
    newer = from_hf_config(hf_with(head_dim=128, rope_parameters=scaling | {"rope_theta": 500000.0})).rope
    assert newer == rope


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "longrope", "factor": 2.0}, "must be one of default, linear, .*got 'longrope'"),
        ({"factor": 2.0}, "must name its rope_type"),
        ({"type": "linear"}, "linear rope scaling must have a factor"),
        ({"type": "linear", "factor": 0.5}, "at least 1, got 0.5"),
        ({"type": "llama3", "factor": 8.0, "low_freq_factor": 4.0}, "0 < low_freq_factor < high_freq_factor, got 4.0"),
    ],
)
def test_scalings_that_are_not_understood_are_named(scaling, message):
    with pytest.raises(ValueError, match=message):
        from_hf_config(hf_with(rope_scaling=scaling))


def test_partial_rotary_counts_over_the_rotated_lanes():
    config = from_hf_config(HF["gpt_neox"] | dict(hidden_size=256))
    assert (config.head_size, config.rope.size) == (64, 16)
    expected = [1, 0.31622777, 0.1, 0.031622777, 0.01]
    np.testing.assert_allclose(inverse_frequencies(config.rope)[:5], expected, rtol=1e-7)
    x = np.random.default_rng(0).standard_normal((3, 2, 64)).astype(np.float32)
    turned = rotate(jnp.asarray(x), *angles(config.rope, jnp.asarray([5, 6, 7])))
    np.testing.assert_array_equal(turned[..., 16:], x[..., 16:])
    assert (np.asarray(turned[..., :16]) != x[..., :16]).all()
    np.testing.assert_allclose(np.linalg.norm(turned, axis=-1), np.linalg.norm(x, axis=-1), rtol=1e-6)


@pytest.mark.parametrize(("interleaved", "partner"), [(False, 4), (True, 1)])
def test_which_lanes_turn_together(interleaved, partner):
    x = np.zeros((1, 1, 8), np.float32)
    x[0, 0, 0] = 1.0
    turned = np.asarray(rotate(jnp.asarray(x), *angles(Rope(8), jnp.asarray([1])), interleaved=interleaved))[0, 0]
    want = np.zeros(8)
    want[0], want[partner] = math.cos(1), math.sin(1)
    np.testing.assert_allclose(turned, want, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "scaling", "longest"),
    [
        ("llama", None, 64),
        ("opt", None, 64),
        ("gpt2", None, 64),
        ("llama", dict(type="linear", factor=2.0), 128),
        ("llama", dict(type="dynamic", factor=2.0), 128),
        ("llama", dict(type="yarn", factor=4.0, original_max_position_embeddings=32), 128),
    ],
)
def test_sequences_past_the_last_position_are_refused(name, scaling, longest):
    config = from_hf_config(HF[name] | ({"rope_scaling": scaling} if scaling else {}))
    assert config.max_length == longest
    assert config.at_length(longest).max_length == longest
    with pytest.raises(
        ValueError, match=f"sequences of {longest + 1} tokens were asked for, but positions end at {longest}"
    ):
        config.at_length(longest + 1)


def test_opt_reads_its_table_two_rows_on():
    # Rows 0 and 1 belong to no token; the first is at row 2, in a prompt, on resume, in a chunk, beside padding.
    config, params = config_of("opt"), params_of("opt", stacked=True)
    tokens = [3, 1, 4, 1, 5, 9]
    want = Session(config, params, width=8, places=2).step({"a": tokens})["a"]
    table = params["positions"]
    cut = params | {"positions": table.at[:2].set(jnp.nan).at[8:].set(jnp.nan)}
    session = Session(config, cut, width=8, places=2)
    parts = [
        session.step({"a": tokens[:3]})["a"],
        session.step({"a": tokens[3:5]})["a"],
        session.step({"a": tokens[5:]})["a"],
    ]
    np.testing.assert_allclose(np.concatenate(parts), want, atol=1e-5)
    wrong = params | {"positions": table.at[2].multiply(-2.0)}
    assert np.abs(Session(config, wrong, width=8, places=2).step({"a": tokens})["a"] - want).max() > 1e-2
