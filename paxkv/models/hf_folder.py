"""Hugging Face folders: ``config.json`` beside ``model.safetensors``, or shards and their index.

No weight stays unset and no tensor is passed over in silence: a folder that is not exactly what its config needs is
refused by the tensor's or the file's name. The one exception is a stored head where the config ties the head to the
embedding: the flag decides, and a head that differs from the embedding is ignored with a warning.
"""

from __future__ import annotations

import contextlib
import json
import pathlib
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from paxkv.config import require
from paxkv.models.architecture import DecoderConfig
from paxkv.models.families import canonical_name, tensor_map

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
STORED = ("F32", "BF16", "F16")
"""Types of stored tensors that can be read, as safetensors spells them."""
NEEDS_EXTRA = "*.safetensors need the package safetensors: pip install 'paxkv[hf]'"

Place = tuple[Any, str, str]  # open file, the file's name, the tensor's name in it


class HFTensors:
    """The tensors of a folder, found by the names that the family's tensor map has for them.

    Args:
        folder: holds the files.
        config: what its config.json describes.
        stack: closes the files.

    Raises:
        FileNotFoundError: no weights, or a shard that the index names is missing.
        ImportError: the package ``safetensors`` is missing.
        ValueError: a file that is cut off, or a tensor that is missing, stored twice or of no use.
    """

    def __init__(self, folder: pathlib.Path, config: DecoderConfig, stack: contextlib.ExitStack) -> None:
        self.folder, self.config = folder, config
        self.where: dict[str, Place] = {}  # by our name
        self.unused: dict[str, Place] = {}  # by the file's
        for file, promised in _files(folder).items():
            opened = stack.enter_context(_open(folder / file))
            stored = set(opened.keys())
            for name in sorted(promised - stored):
                raise ValueError(f"tensor {name}: expected in {folder / file} by {INDEX}, not found; download it again")
            for name in sorted(stored):
                ours = canonical_name(config, name)
                if ours is None:
                    self.unused[name] = (opened, file, name)
                    continue
                require(
                    ours not in self.where,
                    f"tensor {name} of {file} is stored twice, the other is {self.where.get(ours, ('', '', ''))[1:]}; "
                    "remove the file that does not belong to the model",
                )
                self.where[ours] = (opened, file, name)
        self._check_names()

    def read(self, name: str) -> np.ndarray:
        """A tensor by our name.

        Raises:
            ValueError: it is of a type that is not read.
        """
        return self._get(*self.where[name])

    def _get(self, opened: Any, file: str, name: str) -> np.ndarray:
        found = opened.get_slice(name).get_dtype()
        require(
            found in STORED,
            f"tensor {name} of {file}: expected one of {', '.join(STORED)}, found {found}; "
            "convert the checkpoint to bfloat16 first",
        )
        return opened.get_tensor(name)

    def _check_names(self) -> None:
        """Refuses missing tensors and ones of no use; tells of a stored head that is ignored."""
        needed = {source: rule.path for rule in tensor_map(self.config) for source in rule.sources}
        for name, path in needed.items():
            if name not in self.where:
                hint = "tie_word_embeddings is false, so the head must be stored; " if path == ("head",) else ""
                raise ValueError(
                    f"tensor {name}: expected for weight {'/'.join(path)}, not found in {self.folder}; {hint}"
                    f"check that the weights belong to this {CONFIG}"
                )
        for name, (_, file, _) in self.where.items():
            require(
                name in needed,
                f"tensor {name}: no weight of this {self.config.name} is made of it; found in {file}; "
                f"check that the weights belong to this {CONFIG}",
            )
        if self.config.tied_head:
            self._compare_heads(next(name for name, path in needed.items() if path == ("embedding",)))

    def _compare_heads(self, embedding: str) -> None:
        for name, place in self.unused.items():
            head = name in ("lm_head.weight", "embed_out.weight")
            if head and not np.array_equal(self._get(*place), self.read(embedding)):
                warnings.warn(
                    f"tensor {name} is ignored: the config ties the head to the embedding, from which it differs; "
                    f"set tie_word_embeddings to false in {CONFIG} to use it",
                    stacklevel=5,
                )


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """The object of a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is not JSON, or no object.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} not found; give the folder that holds it and the model's *.safetensors")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again") from error
    require(isinstance(value, dict), f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


def _files(folder: pathlib.Path) -> dict[str, set[str]]:
    """The files to read, each with the tensors that the index promises in it."""
    if (folder / INDEX).is_file():
        return _promised(folder, read_json(folder / INDEX).get("weight_map"))
    # Folders without an index that hold the model twice (consolidated.safetensors) are common.
    files = [folder / WEIGHTS]
    if not files[0].is_file():
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"no *.safetensors in {folder}; other formats (*.bin) must be converted first")
    return {file.name: set() for file in files}


def _promised(folder: pathlib.Path, where: Any) -> dict[str, set[str]]:
    require(
        isinstance(where, Mapping) and bool(where) and all(isinstance(file, str) for file in where.values()),
        f"{folder / INDEX} must have a weight_map from tensors to files, got {where!r}; download it again",
    )
    promised: dict[str, set[str]] = {}
    for tensor, file in where.items():
        require(pathlib.PurePath(file).name == file, f"{INDEX}: files must lie in the folder itself, got {file!r}")
        promised.setdefault(file, set()).add(tensor)
    for file, names in promised.items():
        if not (folder / file).is_file():
            raise FileNotFoundError(
                f"shard {folder / file} not found; {INDEX} expects {len(names)} tensors in it, such as {min(names)}; "
                "download it"
            )
    return promised


def _open(path: pathlib.Path) -> Any:
    """The file, opened lazily; one that is cut off is refused with the bytes it should have."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(NEEDS_EXTRA) from error
    try:
        return safe_open(path, framework="np")
    except SafetensorError as error:
        raise ValueError(
            f"{path} is not a whole safetensors file ({error}): expected {_expected_size(path)} bytes, "
            f"found {path.stat().st_size}; download it again"
        ) from error


def _expected_size(path: pathlib.Path) -> str:
    """How many bytes a safetensors file should have by its header: a length of 8 bytes, the header, the data."""
    with path.open("rb") as file:
        start = file.read(8)
        if len(start) < 8:
            return "at least 8"
        length, found = int.from_bytes(start, "little"), path.stat().st_size
        if 8 + length > found:
            return f"more than {8 + length}"
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, LookupError, TypeError, AttributeError):
            return "a readable header in these"
    return str(8 + length + max(ends, default=0))
