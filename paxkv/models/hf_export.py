"""A model written as a Hugging Face folder: ``config.json`` and ``*.safetensors``, in the names of its family."""

from __future__ import annotations

import json
import math
import pathlib
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from paxkv.config import require
from paxkv.models.architecture import DecoderConfig
from paxkv.models.assembly import Progress
from paxkv.models.families import from_hf_config, tensor_map
from paxkv.models.hf_folder import CONFIG, INDEX, NEEDS_EXTRA, WEIGHTS
from paxkv.models.hf_spelling import differences, to_hf_config
from paxkv.models.new_folder import new_folder
from paxkv.models.tensor_rules import TensorRule
from paxkv.models.weights import Path, check_params, flatten, unrolled_weight

SHARD_BYTES = 2_000_000_000
_ROOM = 1 << 20  # bytes, for what is no weight


def write_folder(
    config: DecoderConfig,
    params: Mapping[str, Any],
    path: str | pathlib.Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    hf: Mapping[str, Any] | None = None,
    beside: Iterable[pathlib.Path] = (),
    progress: Progress | None = None,
) -> None:
    """Writes the model to a new folder. Beside the weights, a shard of them is in memory.

    Args:
        config: the decoder.
        params: its weights, in the config's form.
        path: the folder; nothing may be there.
        shard_bytes: largest file of weights, unless a single tensor is larger.
        hf: a config.json that says more than the decoder (such as end ids) and describes it; None: one is made.
        beside: files to copy into the folder, such as a tokenizer's.
        progress: called with (shards done, shards in all) after each.

    Raises:
        FileExistsError: something is there already.
        ImportError: the package ``safetensors`` is missing.
        OSError: no room, or no right to write there.
        ValueError: weights that are not the config's, a choice that config.json has no word for, or an ``hf`` that
            describes another decoder.
    """
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        raise ImportError(NEEDS_EXTRA) from error
    require(shard_bytes > 0, f"shard_bytes must be above 0, got {shard_bytes}")
    check_params(params, config)
    tensors, written = _Tensors(config, params), _description(config, hf)
    shards = tensors.shards(shard_bytes)
    with new_folder(path, sum(map(tensors.nbytes, tensors.parts)) + _ROOM) as folder:
        where = {}
        for number, names in enumerate(shards, 1):
            file = folder / (WEIGHTS if len(shards) == 1 else f"model-{number:05}-of-{len(shards):05}.safetensors")
            file.touch()
            mode = file.stat().st_mode
            save_file({name: tensors.make(name) for name in names}, file, metadata={"format": "pt"})
            file.chmod(mode)  # the package leaves it to its owner alone
            where |= dict.fromkeys(names, file.name)
            if progress is not None:
                progress(number, len(shards))
        if len(shards) > 1:
            total = sum(map(tensors.nbytes, tensors.parts))
            _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
        for file in beside:
            shutil.copyfile(file, folder / file.name)
        _write_json(folder / CONFIG, written)


def _description(config: DecoderConfig, hf: Mapping[str, Any] | None) -> dict[str, Any]:
    if hf is None:
        return to_hf_config(config)
    keys = [key for key in ("dtype", "torch_dtype") if key in hf] or ["torch_dtype"]
    written = dict(hf) | dict.fromkeys(keys, config.dtype)
    differ = differences(config, from_hf_config(written))
    require(not differ, f"the {CONFIG} that was given describes another decoder, without {', '.join(differ)}")
    return written


def _write_json(path: pathlib.Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


class _Tensors:
    """The tensors of a checkpoint, each made of the weights when it is asked for."""

    def __init__(self, config: DecoderConfig, params: Mapping[str, Any]) -> None:
        self.config = config
        self.weights = {path: np.asarray(weight) for path, weight in flatten(params).items()}
        self.parts: dict[str, list[tuple[TensorRule, int]]] = {}
        for rule in tensor_map(config):
            for number, name in enumerate(rule.sources):
                self.parts.setdefault(name, []).append((rule, number))

    def make(self, name: str) -> np.ndarray:
        """The tensor."""
        tensor = np.empty(self._shape(name), self._dtype(name))
        for rule, number in self.parts[name]:
            rule.take(self._weight(rule.path), number, tensor)
        return tensor

    def nbytes(self, name: str) -> int:
        """Its size."""
        return math.prod(self._shape(name)) * self._dtype(name).itemsize

    def shards(self, limit: int) -> list[list[str]]:
        """Names by file, in the order of the tensor map."""
        shards: list[list[str]] = [[]]
        room = limit
        for name in self.parts:
            size = self.nbytes(name)
            if size > room and shards[-1]:
                shards.append([])
                room = limit
            shards[-1].append(name)
            room -= size
        return shards

    def _shape(self, name: str) -> tuple[int, ...]:
        rule, number = self.parts[name][0]
        return rule.shapes[number]

    def _dtype(self, name: str) -> np.dtype:
        return self._weight(self.parts[name][0][0].path).dtype

    def _weight(self, path: Path) -> np.ndarray:
        """A weight of the unrolled form, a view of the config's."""
        return unrolled_weight(self.config, self.weights, path)
