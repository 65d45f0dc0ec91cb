"""A model from a path, whatever its format: a Hugging Face folder, a GGUF file, or an Orbax folder of ours."""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib

from paxkv.compat import stacks_layers
from paxkv.models import orbax_folder
from paxkv.models.architecture import DecoderConfig
from paxkv.models.assembly import Progress, assemble
from paxkv.models.families import from_hf_config
from paxkv.models.hf_folder import CONFIG, HFTensors, read_json
from paxkv.models.orbax_folder import save
from paxkv.models.weights import Tree

__all__ = ["load", "save"]


def load(
    path: str | pathlib.Path,
    *,
    dtype: str | None = None,
    scan_layers: bool | None = None,
    progress: Progress | None = None,
) -> tuple[DecoderConfig, Tree]:
    """A decoder and its weights. Tensors are read one by one; the weights are in memory once, as they are built.

    Args:
        path: a folder with config.json and *.safetensors, a file *.gguf, or a folder that :func:`save` made.
        dtype: of the weights, ``float32``, ``bfloat16`` or ``float16``; None: what the checkpoint names.
        scan_layers: weights stacked [L, ...] rather than by layer. None: stacked, but by layer on CPU, where a scan
            copies each layer's weights in every step.
        progress: called with (weights done, weights in all) after each.

    Raises:
        FileNotFoundError: nothing at the path, no config.json, no weights, or a shard that the index names is missing.
        ImportError: the package that reads the format is missing; names the extra that brings it.
        ValueError: an architecture or option that is not supported; a file that is cut off; a tensor that is missing,
            of another shape, of a type that is not read, or of no use.
    """
    path = pathlib.Path(path)
    scan = stacks_layers() if scan_layers is None else scan_layers
    if path.suffix == ".gguf" and path.is_file():
        from paxkv.models import gguf_file

        return gguf_file.load(path, dtype=dtype, scan_layers=scan, progress=progress)
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path} is {'no folder' if path.exists() else 'not there'}; give a folder with {CONFIG} and "
            "*.safetensors, a file *.gguf, or a folder that was saved. Nothing is downloaded"
        )
    if (path / orbax_folder.CONFIG).is_file():
        return orbax_folder.load(path, dtype=dtype, scan_layers=scan, progress=progress)
    config = from_hf_config(read_json(path / CONFIG))
    config = dataclasses.replace(config, dtype=dtype or config.dtype, scan_layers=scan)
    with contextlib.ExitStack() as stack:
        return config, assemble(config, HFTensors(path, config, stack).read, progress)
