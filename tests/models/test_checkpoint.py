"""Hugging Face folders: what is stored is what is loaded, and what is wrong is refused by name."""

from __future__ import annotations

import json
import pathlib
import sys
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from paxkv.models.checkpoint import load
from paxkv.models.families import from_hf_config, tensor_map
from paxkv.models.hf_folder import INDEX
from tests.models.checkpoints import HF, assert_same, params_of, tensors_of

NORM = "model.layers.1.input_layernorm.weight"


def write(folder: pathlib.Path, name: str, tensors=None, shards: int = 1, **changes) -> pathlib.Path:
    """A folder as the hub would hold it; with shards, tensors are dealt out in turn."""
    tensors = tensors_of(name) if tensors is None else tensors
    tensors = {key: np.ascontiguousarray(value) for key, value in tensors.items()}
    (folder / "config.json").write_text(json.dumps(HF[name] | changes))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    where = {key: files[i % shards] for i, key in enumerate(tensors)}
    for file in files:
        save_file({key: value for key, value in tensors.items() if where[key] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps(dict(metadata={}, weight_map=where)))
    return folder


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon_40b", "deepseek_v3", "opt_350m"])
def test_weights_are_those_stored(tmp_path, name, shards, stacked):
    config, params = load(write(tmp_path, name, shards=shards), scan_layers=stacked)
    assert config.scan_layers == stacked
    assert_same(params, params_of(name, stacked=stacked))


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_types_are_cast(tmp_path, stored, dtype):
    tensors = {key: value.astype(stored) for key, value in tensors_of("llama").items()}
    config, params = load(write(tmp_path, "llama", tensors), dtype=dtype)
    assert config.dtype == dtype
    want = tensors["model.embed_tokens.weight"].astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(np.asarray(params["embedding"]), want)


def test_the_config_names_the_type_and_progress_is_told(tmp_path):
    seen = []
    folder = write(tmp_path, "llama", torch_dtype="bfloat16")
    config, params = load(folder, progress=lambda done, total: seen.append((done, total)))
    assert config.dtype == "bfloat16" and params["embedding"].dtype == jnp.bfloat16
    assert seen == [(i, seen[-1][1]) for i in range(1, seen[-1][1] + 1)]


def test_layers_are_not_stacked_on_cpu(tmp_path):
    config, params = load(write(tmp_path, "llama"))
    assert jax.default_backend() == "cpu" and not config.scan_layers and "layers_1" in params


def test_weights_are_in_memory_once(tmp_path):
    wide = dict(num_hidden_layers=10, hidden_size=256, intermediate_size=512, head_dim=64)
    config = from_hf_config(HF["llama"] | wide)
    tensors = {
        name: np.zeros(shape, np.float32)
        for rule in tensor_map(config)
        for name, shape in zip(rule.sources, rule.shapes, strict=True)
    }
    write(tmp_path, "llama", tensors, **wide)
    total = sum(tensor.nbytes for tensor in tensors.values())
    del tensors
    # On CPU the arrays are numpy's memory, so all is traced: what stays, and what is on its way. Stacked, a copy of the
    # largest weight would be 0.4 of all; by layer, the shapes of ten layers are traced, which takes megabytes.
    for scan_layers, limit in ((True, 1.1), (False, 1.4)):
        tracemalloc.start()
        _, params = load(tmp_path, scan_layers=scan_layers)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert total < peak < limit * total
        del params


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_a_number_too_large_for_float16(tmp_path, stored):
    tensors = {key: value.astype(stored) for key, value in tensors_of("llama").items()}
    tensors[NORM][3] = 70_000
    write(tmp_path, "llama", tensors)
    with pytest.raises(ValueError, match=f"tensor {NORM}: a number is not finite in float16"):
        load(tmp_path, dtype="float16")
    _, params = load(tmp_path, dtype="bfloat16")
    assert params["layers_1"]["attention_norm"]["scale"][3] == 70_144  # the nearest there is


@pytest.mark.parametrize("keep", [-1, 200, 4])
def test_a_file_that_is_cut_off(tmp_path, keep):
    file = write(tmp_path, "llama") / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    expected = {-1: f"expected {len(whole)} bytes, found {len(whole) - 1}", 200: "found 200", 4: "at least 8 bytes"}
    with pytest.raises(ValueError, match=f"model.safetensors is not a whole .*{expected[keep]}"):
        load(tmp_path)


def test_a_missing_tensor(tmp_path):
    tensors = tensors_of("llama")
    del tensors[NORM]
    with pytest.raises(
        ValueError, match=f"tensor {NORM}: expected for weight layers_1/attention_norm/scale, not found"
    ):
        load(write(tmp_path, "llama", tensors))


def test_a_tensor_of_another_shape(tmp_path):
    tensors = tensors_of("llama")
    tensors[NORM] = tensors[NORM][:-1]
    with pytest.raises(ValueError, match=rf"tensor {NORM}: expected \[32\].*found \[31\]"):
        load(write(tmp_path, "llama", tensors))


def test_a_tensor_of_another_type(tmp_path):
    tensors = tensors_of("llama")
    tensors[NORM] = tensors[NORM].astype(np.int8)
    with pytest.raises(ValueError, match=f"tensor {NORM} of model.safetensors: expected one of F32.*found I8"):
        load(write(tmp_path, "llama", tensors))


def test_a_tensor_of_no_use(tmp_path):
    tensors = tensors_of("llama") | {"model.layers.0.self_attn.q_proj.bias": np.zeros(32, np.float32)}
    with pytest.raises(ValueError, match="tensor model.layers.0.self_attn.q_proj.bias: no weight of this llama"):
        load(write(tmp_path, "llama", tensors))


def test_a_missing_shard(tmp_path):
    write(tmp_path, "llama", shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="shard .*model-00002-of-00003.safetensors not found"):
        load(tmp_path)


def test_a_shard_without_what_the_index_promises(tmp_path):
    write(tmp_path, "llama", shards=3)
    save_file({"other": np.zeros(1, np.float32)}, tmp_path / "model-00002-of-00003.safetensors")
    with pytest.raises(ValueError, match="tensor .*: expected in .*model-00002-of-00003.safetensors by .*, not found"):
        load(tmp_path)


def test_an_index_that_leads_out_of_the_folder(tmp_path):
    write(tmp_path, "llama", shards=3)
    (tmp_path / INDEX).write_text(json.dumps(dict(weight_map={NORM: "../model.safetensors"})))
    with pytest.raises(ValueError, match="must lie in the folder itself"):
        load(tmp_path)


@pytest.mark.parametrize("where", [None, {}, [], {NORM: 3}])
def test_an_index_that_says_nothing(tmp_path, where):
    write(tmp_path, "llama", shards=3)
    (tmp_path / INDEX).write_text(json.dumps(dict(weight_map=where)))
    with pytest.raises(ValueError, match="must have a weight_map from tensors to files"):
        load(tmp_path)


@pytest.mark.parametrize("file", ["config.json", INDEX])
@pytest.mark.parametrize(("text", "message"), [('{"model_type": ', "is not JSON"), ("[1]", "must hold a JSON object")])
def test_broken_json(tmp_path, file, text, message):
    write(tmp_path, "llama", shards=3)
    (tmp_path / file).write_text(text)
    with pytest.raises(ValueError, match=f"{file} {message}"):
        load(tmp_path)


def test_one_tensor_in_two_files(tmp_path):
    write(tmp_path, "llama", shards=3)
    (tmp_path / INDEX).unlink()
    save_file({NORM: np.zeros(32, np.float32)}, tmp_path / "more.safetensors")
    with pytest.raises(ValueError, match=f"tensor {NORM} of more.safetensors is stored twice.*model-0000"):
        load(tmp_path)


def test_a_path_without_a_model(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing is not there; give a folder .*Nothing is downloaded"):
        load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="model.safetensors is no folder"):
        load(write(tmp_path, "llama") / "model.safetensors")


def test_an_unknown_architecture(tmp_path):
    with pytest.raises(ValueError, match="model_type must be one of .*got 'mamba'"):
        load(write(tmp_path, "llama", model_type="mamba"))


def test_a_folder_without_config_or_weights(tmp_path):
    with pytest.raises(FileNotFoundError, match="config.json not found"):
        load(tmp_path)
    (write(tmp_path, "llama") / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no \\*.safetensors"):
        load(tmp_path)


def test_safetensors_is_asked_for_by_name(tmp_path, monkeypatch):
    write(tmp_path, "llama")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"pip install 'paxkv\[hf\]'"):
        load(tmp_path)


class TestHead:
    """B28: the flag decides, whatever is stored (warnings are errors in these tests)."""

    def tensors(self, head):
        tensors = {key: value for key, value in tensors_of("llama").items() if key != "lm_head.weight"}
        return tensors if head is None else tensors | {"lm_head.weight": head}

    def test_tied_and_absent(self, tmp_path):
        _, params = load(write(tmp_path, "llama", self.tensors(None), tie_word_embeddings=True))
        assert "head" not in params

    def test_tied_and_the_embedding_again(self, tmp_path):
        tensors = self.tensors(tensors_of("llama")["model.embed_tokens.weight"])
        _, params = load(write(tmp_path, "llama", tensors, tie_word_embeddings=True))
        assert "head" not in params

    def test_tied_and_another(self, tmp_path):
        tensors = self.tensors(np.ones((40, 32), np.float32))
        write(tmp_path, "llama", tensors, tie_word_embeddings=True)
        with pytest.warns(UserWarning, match="tensor lm_head.weight is ignored"):
            _, params = load(tmp_path)
        assert "head" not in params
        np.testing.assert_array_equal(params["embedding"], tensors["model.embed_tokens.weight"])

    def test_untied_and_present(self, tmp_path):
        head = np.full((40, 32), 2, np.float32)
        _, params = load(write(tmp_path, "llama", self.tensors(head)))
        np.testing.assert_array_equal(params["head"], head.T)

    def test_untied_and_absent(self, tmp_path):
        with pytest.raises(ValueError, match="tensor lm_head.weight: .*tie_word_embeddings is false"):
            load(write(tmp_path, "llama", self.tensors(None)))
