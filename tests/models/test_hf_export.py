"""Hugging Face folders that are written: every family's names and numbers as they were read, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import sys

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from paxkv.models import hf_export
from paxkv.models.checkpoint import load
from paxkv.models.families import FAMILIES, from_hf_config
from paxkv.models.hf_export import write_folder
from paxkv.models.hf_folder import INDEX
from paxkv.models.hf_spelling import ARCHITECTURES, differences, to_hf_config
from paxkv.models.weights import stack_layers
from tests.models.checkpoints import HF, LLAMA, config_of, params_of, tensors_of

PARITY = pathlib.Path(__file__).resolve().parents[1] / "parity"
REAL = {path.parent.name: json.loads(path.read_text()) for path in PARITY.glob("*/config.json")}


def tensors_in(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal(got: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    assert got.keys() == want.keys()
    for name, tensor in want.items():
        assert got[name].dtype == tensor.dtype, name
        np.testing.assert_array_equal(got[name], tensor, err_msg=name)


# --- config.json ----------------------------------------------------------------------------------------------------


def test_every_family_has_its_architecture():
    assert set(ARCHITECTURES) == set(FAMILIES)
    for hf in REAL.values():
        assert ARCHITECTURES[hf["model_type"]] == hf["architectures"][0]


@pytest.mark.parametrize("hf", [*HF.values(), *REAL.values()], ids=[*HF, *(f"real-{name}" for name in REAL)])
def test_a_config_is_written_as_it_was_read(hf):
    config = from_hf_config(hf)
    written = json.loads(json.dumps(to_hf_config(config)))
    assert from_hf_config(written) == config


def test_windows_on_some_layers():
    for family in ("qwen2", "qwen3", "gemma2"):
        hf = HF[family] | {"num_hidden_layers": 4, "sliding_window": 6, "use_sliding_window": True}
        hf["layer_types"] = ["full_attention", "sliding_attention", "full_attention", "full_attention"]
        config = from_hf_config(hf)
        assert config.windows == (0, 6, 0, 0)
        assert from_hf_config(to_hf_config(config)) == config
    # Where a family's files have one window for all layers, another choice is not written.
    with pytest.raises(ValueError, match=r"mistral: a config.json of this family cannot say windows=\(5, 0\)"):
        to_hf_config(dataclasses.replace(config_of("mistral"), windows=(5, 0)))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", dict(norm_offset=1.0)),
        ("opt", dict(norm_eps=1e-6)),
        ("gpt2", dict(out_bias=False)),
        ("falcon_7b", dict(qk_norm=True)),
        ("deepseek_v2", dict(windows=(4, 4, 4))),
    ],
)
def test_what_a_family_cannot_say_is_refused(name, changes):
    [(field, _)] = changes.items()
    with pytest.raises(ValueError, match=f"{config_of(name).name}: .* cannot say .*{field}=.*; convert to Orbax"):
        to_hf_config(dataclasses.replace(config_of(name), **changes))


def test_choices_of_a_run_are_no_difference():
    config = from_hf_config(LLAMA | dict(model_type="llama", rope_scaling=dict(type="dynamic", factor=2.0)))
    assert not differences(config, dataclasses.replace(config.at_length(20), scan_layers=False, attention="xla"))
    assert differences(config, dataclasses.replace(config, dtype="float16")) == ["dtype='float32'"]


# --- tensors --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HF)
def test_tensors_are_written_as_they_were_read(tmp_path, name):
    config, want = config_of(name), tensors_of(name)
    write_folder(config, params_of(name, stacked=True), tmp_path / "model")
    assert_equal(tensors_in(tmp_path / "model"), want)
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_bits_of_short_types_stay(tmp_path, dtype):
    kind = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[dtype]
    (tmp_path / "one").mkdir()
    want = {name: np.ascontiguousarray(tensor.astype(kind)) for name, tensor in tensors_of("deepseek_v3").items()}
    save_file(want, tmp_path / "one" / "model.safetensors")
    (tmp_path / "one" / "config.json").write_text(json.dumps(HF["deepseek_v3"] | {"torch_dtype": dtype}))
    config, params = load(tmp_path / "one")
    write_folder(config, params, tmp_path / "two")
    # The router's correction is kept in float32.
    for name in want:
        if name.endswith("e_score_correction_bias"):
            want[name] = want[name].astype(np.float32)
    assert_equal(tensors_in(tmp_path / "two"), want)
    assert load(tmp_path / "two")[0] == config


def test_shards(tmp_path):
    config, want, seen = config_of("llama"), tensors_of("llama"), []
    limit = 12_000
    write_folder(
        dataclasses.replace(config, scan_layers=False),
        params_of("llama", stacked=False),
        tmp_path / "model",
        shard_bytes=limit,
        progress=lambda *done: seen.append(done),
    )
    files = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    assert seen == [(i + 1, len(files)) for i in range(len(files))]
    index = json.loads((tmp_path / "model" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in want.values())
    for file in files:
        stored = load_file(tmp_path / "model" / file)
        assert sum(tensor.nbytes for tensor in stored.values()) <= limit
        assert {name for name, where in index["weight_map"].items() if where == file} == set(stored)
    assert_equal(tensors_in(tmp_path / "model"), want)
    assert load(tmp_path / "model", scan_layers=True)[0] == config


def test_a_tensor_larger_than_a_shard_has_one_to_itself(tmp_path):
    write_folder(config_of("llama"), params_of("llama", stacked=True), tmp_path / "model", shard_bytes=1)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) == len(tensors_of("llama"))
    load(tmp_path / "model")
    with pytest.raises(ValueError, match="shard_bytes must be above 0, got 0"):
        write_folder(config_of("llama"), params_of("llama", stacked=True), tmp_path / "other", shard_bytes=0)


def test_a_config_that_says_more_is_kept(tmp_path):
    config, params = config_of("llama"), params_of("llama", stacked=True)
    hf = HF["llama"] | {"eos_token_id": [2, 7], "torch_dtype": "bfloat16"}
    (tmp_path / "tokenizer.json").write_text("{}")
    write_folder(config, params, tmp_path / "model", hf=hf, beside=[tmp_path / "tokenizer.json"])
    assert json.loads((tmp_path / "model" / "config.json").read_text()) == hf | {"torch_dtype": "float32"}
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "{}"
    with pytest.raises(ValueError, match="describes another decoder, without tied_head=False"):
        write_folder(config, params, tmp_path / "other", hf=hf | {"tie_word_embeddings": True})
    assert not (tmp_path / "other").exists()


def test_a_write_that_raises_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(hf_export, "_write_json", full)
    with pytest.raises(OSError, match="no space left"):
        write_folder(config_of("llama"), params_of("llama", stacked=True), tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_weights_of_another_form_are_not_written(tmp_path):
    with pytest.raises(ValueError, match="weight layers/.* is missing"):
        write_folder(config_of("llama"), params_of("llama", stacked=False), tmp_path / "model")
    params = stack_layers(params_of("llama", stacked=False), config_of("llama"))
    write_folder(config_of("llama"), params, tmp_path / "model")
    with pytest.raises(FileExistsError, match="is there already"):
        write_folder(config_of("llama"), params, tmp_path / "model")


def test_safetensors_is_asked_for_by_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    with pytest.raises(ImportError, match=r"pip install 'paxkv\[hf\]'"):
        write_folder(config_of("llama"), params_of("llama", stacked=True), tmp_path / "model")
