"""Convert a model: from a Hugging Face folder, a GGUF file or an Orbax folder to an Orbax or a Hugging Face folder.

    python -m scripts.convert_checkpoint --source=SmolLM2-135M --target=smollm2.orbax
    python -m scripts.convert_checkpoint --source=model.gguf --target=model_hf --to=safetensors --dtype=bfloat16

The target is a new folder; it appears when all of it is written. Tokenizer files of a folder are copied along; a GGUF
file keeps its tokenizer to itself. Weights are in host memory once. A gigabyte takes some seconds.
"""

from __future__ import annotations

import pathlib
import sys
import time

import jax
from absl import app, flags
from rich.console import Console

from paxkv.models import checkpoint, hf_export
from paxkv.models.architecture import DTYPES
from paxkv.models.assembly import Progress
from paxkv.models.hf_folder import CONFIG, read_json

_SOURCE = flags.DEFINE_string("source", None, f"folder with {CONFIG} and *.safetensors, file *.gguf, or Orbax folder")
_TARGET = flags.DEFINE_string("target", None, "folder to make")
_TO = flags.DEFINE_enum("to", "orbax", ["orbax", "safetensors"], f"what to make; safetensors come with a {CONFIG}")
_DTYPE = flags.DEFINE_enum("dtype", None, list(DTYPES), "dtype of the weights; the source's unless given")
_SHARD_BYTES = flags.DEFINE_integer("shard_bytes", hf_export.SHARD_BYTES, "largest file of safetensors")

BESIDE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
"""Files of a folder that are copied along."""


def convert(
    source: pathlib.Path,
    target: pathlib.Path,
    to: str,
    *,
    dtype: str | None = None,
    shard_bytes: int = hf_export.SHARD_BYTES,
    progress: Progress | None = None,
) -> str:
    """Reads ``source`` and writes ``target``; returns what the model is, in a line.

    Raises:
        FileExistsError, FileNotFoundError, ImportError, OSError, ValueError: what is wrong and what to change.
    """
    if target.resolve() == source.resolve():
        raise ValueError(f"source and target must differ, both are {source}; give another --target")
    # Said before a large model is read: the writer says so again.
    if target.exists():
        raise FileExistsError(f"{target} is there already and is not overwritten; give another --target, or remove it")
    with jax.default_device(jax.devices("cpu")[0]):
        config, params = checkpoint.load(source, dtype=dtype, scan_layers=False, progress=progress)
    beside = [source / name for name in BESIDE if source.is_dir() and (source / name).is_file()]
    described = source / CONFIG
    hf = read_json(described) if source.is_dir() and described.is_file() else None
    if to == "orbax":
        checkpoint.save(config, params, target, [*beside, *([described] if hf is not None else [])])
    else:
        hf_export.write_folder(config, params, target, shard_bytes=shard_bytes, hf=hf, beside=beside)
    weights = jax.tree.leaves(params)
    return (
        f"{config.name}, {config.num_layers} layers, {sum(weight.size for weight in weights):,} weights, "
        f"{sum(weight.nbytes for weight in weights):,} bytes in {config.dtype}"
    )


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    if _SOURCE.value is None or _TARGET.value is None:
        raise app.UsageError("give --source and --target")
    source, target, start = pathlib.Path(_SOURCE.value), pathlib.Path(_TARGET.value), time.perf_counter()
    console = Console(stderr=True)
    try:
        with console.status(f"reading {source}") as status:

            def tell(done: int, total: int) -> None:
                status.update(f"reading {source}: weight {done} of {total}" if done < total else f"writing {target}")

            made = convert(source, target, _TO.value, dtype=_DTYPE.value, shard_bytes=_SHARD_BYTES.value, progress=tell)
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"convert_checkpoint: {error}")
    print(f"{target}: {made}, {time.perf_counter() - start:.1f} s")


if __name__ == "__main__":
    app.run(main)
