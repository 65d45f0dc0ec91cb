"""scripts/convert_checkpoint.py: from format to format and back without a bit changed, and what it refuses."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from paxkv.models import checkpoint
from scripts.convert_checkpoint import convert
from tests.models.checkpoints import HF, assert_same, tensors_of
from tests.models.test_hf_export import assert_equal, tensors_in


@pytest.fixture
def source(tmp_path) -> pathlib.Path:
    """A folder with a tokenizer and a config.json that says more than the decoder."""
    folder = tmp_path / "source"
    folder.mkdir()
    save_file({name: np.ascontiguousarray(t) for name, t in tensors_of("qwen3").items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(HF["qwen3"] | {"eos_token_id": 5}))
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


def test_there_and_back(source, tmp_path):
    seen = []
    made = convert(source, tmp_path / "orbax", "orbax", progress=lambda *done: seen.append(done))
    total = sum(tensor.size for tensor in tensors_of("qwen3").values())
    assert made == f"qwen3, 2 layers, {total:,} weights, {4 * total:,} bytes in float32"
    assert seen and seen[-1][0] == seen[-1][1]
    convert(tmp_path / "orbax", tmp_path / "hf", "safetensors", shard_bytes=10_000)
    assert_equal(tensors_in(tmp_path / "hf"), tensors_of("qwen3"))
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written == HF["qwen3"] | {"eos_token_id": 5, "torch_dtype": "float32"}
    for folder in ("orbax", "hf"):
        assert (tmp_path / folder / "tokenizer.json").read_text() == '{"model": {}}'
    assert_same(checkpoint.load(tmp_path / "orbax")[1], checkpoint.load(source)[1])
    # Once more from each to its own kind.
    convert(tmp_path / "orbax", tmp_path / "orbax2", "orbax")
    convert(tmp_path / "hf", tmp_path / "hf2", "safetensors")
    assert_same(checkpoint.load(tmp_path / "orbax2")[1], checkpoint.load(source)[1])
    assert_equal(tensors_in(tmp_path / "hf2"), tensors_of("qwen3"))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_from_gguf(tmp_path, name):
    pytest.importorskip("gguf", reason="GGUF files need the package gguf: pip install 'paxkv[gguf]'")
    from tests.models.test_gguf_file import write

    file = write(tmp_path, name)
    convert(file, tmp_path / "hf", "safetensors")
    assert_equal(tensors_in(tmp_path / "hf"), tensors_of(name))
    convert(file, tmp_path / "orbax", "orbax")
    for folder in ("hf", "orbax"):
        assert_same(checkpoint.load(tmp_path / folder)[1], checkpoint.load(file)[1])


def test_another_dtype(source, tmp_path):
    convert(source, tmp_path / "short", "safetensors", dtype="bfloat16")
    config, params = checkpoint.load(tmp_path / "short")
    assert config.dtype == "bfloat16"
    assert_same(params, checkpoint.load(source, dtype="bfloat16")[1])


def test_what_is_refused(source, tmp_path):
    before = sorted(path.name for path in source.iterdir())
    with pytest.raises(ValueError, match="source and target must differ"):
        convert(source, source / ".." / "source", "orbax")
    (tmp_path / "target").mkdir()
    with pytest.raises(FileExistsError, match="target is there already and is not overwritten"):
        convert(source, tmp_path / "target", "orbax")
    with pytest.raises(FileNotFoundError, match="nothing is not there"):
        convert(tmp_path / "nothing", tmp_path / "new", "orbax")
    with pytest.raises(FileNotFoundError, match="no_such is not there; make it first"):
        convert(source, tmp_path / "no_such" / "new", "safetensors")
    (source / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes()[:-1])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        convert(source, tmp_path / "new", "safetensors")
    assert sorted(path.name for path in source.iterdir()) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "target"]


def test_no_room(source, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    for to in ("orbax", "safetensors"):
        with pytest.raises(OSError, match="new needs [0-9,]+ bytes, but 1,000 are free"):
            convert(source, tmp_path / "new", to)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def run(root, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.convert_checkpoint", *map(str, arguments)]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)


def test_the_command(source, tmp_path, repo_root):
    done = run(repo_root, f"--source={source}", f"--target={tmp_path / 'new'}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{tmp_path / 'new'}: qwen3, 2 layers, ")
    assert_same(checkpoint.load(tmp_path / "new")[1], checkpoint.load(source)[1])
    done = run(repo_root, f"--source={source}", f"--target={tmp_path / 'new'}", "--to=safetensors")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.strip().splitlines()[-1].startswith("convert_checkpoint: ") and "is there already" in done.stderr
