"""The oracle itself: it reads every field of a config that changes what a model computes, or refuses it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from paxkv.models.architecture import Experts, LatentAttention
from paxkv.models.rotary import Rope
from paxkv.models.weights import init_params
from paxkv.testing.dense import DenseModel
from paxkv.testing.tiny_model import HEAD_SIZE, tiny_config
from tests.models.session import Session

READ = {
    "head_size": {"head_size": 32, "rope": Rope(32)},
    "num_kv_heads": {"num_kv_heads": 1},
    "norm_eps": {"norm_eps": 0.1},
    "tied_head": {"tied_head": True},
    "rope base": {"rope": Rope(HEAD_SIZE, base=10.0)},
    "rope interleaved": {"rope": Rope(HEAD_SIZE, interleaved=True)},
    "rope size": {"rope": Rope(HEAD_SIZE // 2, interleaved=True)},
}
REFUSED = {
    "norm": "layer",
    "norm_offset": 1.0,
    "residual": "post",
    "activation": "relu",
    "gated": False,
    "qkv_bias": True,
    "out_bias": True,
    "ffn_bias": True,
    "qk_norm": True,
    "positions": "alibi",
    "embedding_size": 32,
    "embedding_scale": 2.0,
    "softmax_scale": 1.0,
    "windows": (0, 4, 4),
    "attention_soft_cap": 5.0,
    "logit_soft_cap": 5.0,
    "final_norm": False,
    "scan_layers": False,
    "mla": LatentAttention(8, 8, HEAD_SIZE, 8),
    "experts": Experts(4, 2, 16),
    "rope": Rope(HEAD_SIZE, kind="linear", factor=2.0),
}
MEANS_NOTHING = {"name", "dtype", "shared_norm", "position_offset", "attention", "max_positions"}
"""A name, how it is computed, and what only a refused field gives a meaning to."""
SIZES = {"vocab_size", "hidden_size", "num_layers", "num_heads", "ffn_size"}
"""Seen in the shapes of the weights: a wrong one fails by itself."""


@pytest.mark.parametrize("name", READ)
def test_what_it_reads(name):
    """Logits of a prompt are those of our model, and not those of the plain one."""
    config = tiny_config(**READ[name])
    params = init_params(config, 3)
    ids = np.random.default_rng(0).integers(0, 256, 12).tolist()
    want = DenseModel(config, params).logits(ids)
    got = Session(config, params).step({"a": ids})["a"]
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want).max())
    if READ[name].keys() <= {"rope", "norm_eps"}:  # the same weights fit both
        assert np.abs(want - DenseModel(tiny_config(), params).logits(ids)).max() > 1e-3 * np.abs(want).max()


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_refuses(name):
    changes = {name: REFUSED[name]} | ({"rope": None} if name == "positions" else {})
    with pytest.raises(ValueError, match="only Llama's family with stacked layers"):
        DenseModel(tiny_config(**changes), {})


def test_no_field_is_forgotten():
    fields = {field.name for field in dataclasses.fields(tiny_config())}
    assert fields == {*REFUSED, *SIZES, *MEANS_NOTHING, *(field for changes in READ.values() for field in changes)}
