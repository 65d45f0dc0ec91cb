"""Orbax folders: our own checkpoints, ``paxkv.json`` (the decoder, as JSON) beside ``weights`` (by Orbax).

Weights lie by layer, whichever form they were saved from, so that a folder loads in either. The folder appears under
its name when all of it is written; ``paxkv.json`` comes last, so that not even a part of one is taken for a model. It
holds a checksum of each weight, for Orbax has none of the numbers themselves.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np

import paxkv
from paxkv.config import require
from paxkv.models.architecture import DTYPES, DecoderConfig, Experts, LatentAttention
from paxkv.models.assembly import Progress, build, check_range
from paxkv.models.hf_folder import read_json
from paxkv.models.new_folder import new_folder
from paxkv.models.rotary import Rope
from paxkv.models.weights import Path, Tree, check_params, flatten, unflatten, unrolled_weight, weight_specs

CONFIG = "paxkv.json"
WEIGHTS = "weights"
FORMAT = 1
_PARTS = {"rope": Rope, "mla": LatentAttention, "experts": Experts}
_OF_A_RUN = ("scan_layers", "attention")  # choices of whoever runs the model, not part of it
_ROOM = 1 << 20  # bytes, for what is no weight


def save(
    config: DecoderConfig,
    params: Mapping[str, Any],
    path: str | pathlib.Path,
    beside: Iterable[pathlib.Path] = (),
) -> None:
    """Writes the model to a new folder.

    Args:
        config: the decoder.
        params: its weights, in the config's form.
        path: the folder; nothing may be there.
        beside: files to copy into it, such as a tokenizer's.

    Raises:
        FileExistsError: something is there already.
        OSError: no room, or no right to write there.
        ValueError: weights that are not the config's.
    """
    check_params(params, config)
    flat = {path: np.asarray(weight) for path, weight in flatten(params).items()}
    by_layer = {path: unrolled_weight(config, flat, path) for path in _unrolled_specs(config)}
    with new_folder(path, sum(weight.nbytes for weight in flat.values()) + _ROOM) as folder:
        with _orbax().PyTreeCheckpointer() as checkpointer:
            checkpointer.save(folder.absolute() / WEIGHTS, unflatten(by_layer))
        for file in beside:
            shutil.copyfile(file, folder / file.name)
        written = _to_json(config) | {"crc32": {"/".join(path): _checksum(value) for path, value in by_layer.items()}}
        (folder / CONFIG).write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def load(
    path: str | pathlib.Path,
    *,
    dtype: str | None = None,
    scan_layers: bool = True,
    progress: Progress | None = None,
) -> tuple[DecoderConfig, Tree]:
    """A decoder and its weights, read one by one; see :func:`paxkv.models.checkpoint.load`.

    Raises:
        FileNotFoundError: no folder of ours: never finished, or something else.
        ValueError: a folder of a newer paxkv; weights that are missing, misshapen, of no use or not whole.
    """
    folder = pathlib.Path(path).absolute()
    if not (folder / CONFIG).is_file():
        raise FileNotFoundError(f"{folder} has no {CONFIG}: writing it was cut short, or it is no folder of paxkv's")
    written = read_json(folder / CONFIG)
    config, checksums = _from_json(written, folder / CONFIG), written.get("crc32", {})
    config = dataclasses.replace(config, dtype=dtype or config.dtype, scan_layers=scan_layers)
    with _orbax().PyTreeCheckpointer() as checkpointer:
        paths = _stored_paths(checkpointer, folder / WEIGHTS, config)

        def fill(path: Path, weight: np.ndarray) -> None:
            stored, name = _restored(checkpointer, folder / WEIGHTS, path), "/".join(path)
            found, expected = _checksum(stored), checksums.get(name)
            require(
                found == expected,
                f"weight {name} in {folder} is not as it was saved: expected checksum {expected}, found {found}; "
                "save or copy it again",
            )
            with np.errstate(over="ignore"):  # told below, by name
                weight[...] = stored
            check_range(f"weight {name}", weight)

        return config, build(config, paths, fill, progress)


def _orbax():
    # Imported where it is needed: that takes seconds.
    import orbax.checkpoint

    return orbax.checkpoint


def _restored(checkpointer: Any, folder: pathlib.Path, path: Path) -> np.ndarray:
    """One weight, in the dtype it was saved in."""
    ocp = _orbax()
    one = unflatten({path: ocp.RestoreArgs(restore_type=np.ndarray)})
    asked = ocp.args.PyTreeRestore(item=one, restore_args=one, partial_restore=True)
    try:
        return flatten(checkpointer.restore(folder, args=asked))[path]
    except Exception as error:  # what the storage below raises is of many kinds
        message = f"weight {'/'.join(path)} cannot be read from {folder}: {error}; save or copy it again"
        raise ValueError(message) from error


def _checksum(weight: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(weight).view(np.uint8))


def _unrolled_specs(config: DecoderConfig) -> dict[Path, jax.ShapeDtypeStruct]:
    return weight_specs(dataclasses.replace(config, scan_layers=False))


def _stored_paths(checkpointer: Any, folder: pathlib.Path, config: DecoderConfig) -> list[Path]:
    """Paths of the unrolled weights, after what is stored was held against them."""
    try:
        stored = flatten(checkpointer.metadata(folder).item_metadata.tree)
    except Exception as error:  # as above
        raise ValueError(f"{folder} is no whole Orbax checkpoint: {error}; save or copy it again") from error
    needed = _unrolled_specs(config)
    for path, spec in needed.items():
        name = "/".join(path)
        require(path in stored, f"weight {name}: expected {list(spec.shape)}, not found in {folder}")
        found = tuple(stored[path].shape)
        require(
            found == spec.shape,
            f"weight {name}: expected {list(spec.shape)}, found {list(found)} in {folder}; "
            f"check that it belongs to the {CONFIG} beside it",
        )
        kind = np.dtype(stored[path].dtype).name
        require(kind in DTYPES, f"weight {name}: expected one of {', '.join(DTYPES)}, found {kind} in {folder}")
    for path in stored:
        require(path in needed, f"weight {'/'.join(path)} in {folder} is of no use to this {config.name}")
    return list(needed)


def _to_json(config: DecoderConfig) -> dict[str, Any]:
    fields = {key: value for key, value in dataclasses.asdict(config).items() if key not in _OF_A_RUN}
    return {"format": FORMAT, "paxkv": paxkv.__version__, "jax": jax.__version__, "decoder": fields}


def _from_json(written: Mapping[str, Any], path: pathlib.Path) -> DecoderConfig:
    require(
        written.get("format") == FORMAT and isinstance(written.get("decoder"), Mapping),
        f"{path} must be of format {FORMAT}, got {written.get('format')!r}, written by paxkv "
        f"{written.get('paxkv')}; read it with that version",
    )
    fields = dict(written["decoder"])
    try:
        for name, kind in _PARTS.items():
            if fields.get(name) is not None:
                fields[name] = kind(**fields[name])
        return DecoderConfig(**fields | {"windows": tuple(fields.get("windows", ()))})
    except TypeError as error:  # a field that is missing or unknown
        raise ValueError(
            f"{path} does not describe a decoder of paxkv {paxkv.__version__} ({error}); "
            f"it was written by {written.get('paxkv')}"
        ) from error
