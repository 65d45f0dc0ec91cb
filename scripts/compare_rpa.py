"""Our TPU kernel's schedule beside that of RPA v3, the ragged paged attention of tpu-inference, for absent chips.

    pip install -e '.[aot]'                               (with jax 0.11.2 or newer)
    pip download --no-deps tpu-inference==0.32.0
    python -m zipfile -e tpu_inference-0.32.0-*.whl wheel
    python -m scripts.compare_rpa --wheel=wheel
    python -m scripts.compare_rpa --table                 (prints the table of the committed run)

Both decode 64 rows of 2,048 tokens, 32 query heads over 8 KV heads of 128, and are compiled by the same compiler for
the same chip. What counts is bundles per KV token: those of the loop that has the products and those of the loop over
blocks around it, which issues the copies, over the tokens of a block; in ours they are one. A bundle takes a cycle if
nothing stalls. Both hold all heads. Theirs is imported where it lies, without the rest of its engine, and has blocks of
2,048 tokens (--block); ours takes its own.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import pathlib
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags

from pallas_kernels import schedule
from pallas_kernels.paged_attention.arg_specs import ArgSpec
from pallas_kernels.pages import PageFormat
from pallas_kernels.proof import targets
from paxkv.record import write_atomically
from scripts.peers.tables import markdown
from scripts.readme import put_table

ROOT = pathlib.Path(__file__).resolve().parents[1]
COMMITTED = ROOT / "experiments" / "reference" / "kernels" / "rpa_v3.json"
RPA = "tpu_inference.kernels.ragged_paged_attention.v3"
GENERATIONS = {"v5e": 5, "v6e": 6, "7x": 7}
SCALES = {"bfloat16": "none", "float8_e4m3fn": "tensor", "int8": "tensor"}
PAGES = (128, 16)
ROWS, LENGTH, HEADS, KV_HEADS, SIZE = 64, 2048, 32, 8, 128

_WHEEL = flags.DEFINE_string("wheel", None, "the folder of the unpacked wheel, which holds tpu_inference/")
_TARGETS = flags.DEFINE_multi_enum("chip", list(GENERATIONS), list(GENERATIONS), "chips; may be given several times")
_BLOCK = flags.DEFINE_integer("block", 2048, "tokens of a block of theirs", lower_bound=128, upper_bound=LENGTH)
_OUT = flags.DEFINE_string("out", str(COMMITTED), "the file that is written; the committed one shows in README.md too")
_TABLE = flags.DEFINE_bool("table", False, "print the table of --out, measure nothing")
_ONE = flags.DEFINE_enum("one", None, ["ours", "theirs"], "measure one kernel for one --chip, and print JSON lines")

Call = tuple[Any, list[Any]]
"""A function, and the shapes of its arguments."""


def theirs(target: str, dtype: str, page_size: int) -> Call:
    """A call of RPA v3."""
    if RPA not in sys.modules:
        parent = types.ModuleType("tpu_inference")  # in place of the package's own, which starts the whole engine
        parent.__path__ = [str(pathlib.Path(_WHEEL.value) / "tpu_inference")]
        log = types.ModuleType("tpu_inference.logger")
        log.init_logger = importlib.import_module("logging").getLogger
        names = types.ModuleType("tpu_inference.utils")
        names.get_device_name = lambda *_: "TPU"
        sys.modules |= {"tpu_inference": parent, "tpu_inference.logger": log, "tpu_inference.utils": names}
    kernel, util = (importlib.import_module(f"{RPA}.{name}") for name in ("kernel", "util"))
    for module in (kernel, util):  # they ask the device that is there
        module.get_tpu_version = lambda: GENERATIONS[target]
    pages, new = ROWS * LENGTH // page_size, jnp.dtype(dtype)
    pool = kernel.get_kv_cache_shape(pages, page_size, KV_HEADS, SIZE, new)
    shapes = [((ROWS, HEADS, SIZE), jnp.bfloat16), *[((ROWS, KV_HEADS, SIZE), new)] * 2, (pool, new)]
    shapes += [((count,), jnp.int32) for count in (ROWS, pages, ROWS + 1, 3)]
    decoding, others = (1, _BLOCK.value, 1, _BLOCK.value), (ROWS, _BLOCK.value, ROWS, _BLOCK.value)

    def call(*arrays: jax.Array) -> Any:
        sizes = {"d_block_sizes": decoding, "p_block_sizes": others, "m_block_sizes": others}
        return kernel.ragged_paged_attention(*arrays, **sizes)

    return call, [jax.ShapeDtypeStruct(*shape) for shape in shapes]


def ours(target: str, dtype: str, page_size: int) -> Call:
    """A call of ours."""
    del target
    fmt = PageFormat(dtype, SCALES[dtype])
    spec = ArgSpec("ours", ((1, LENGTH),) * ROWS, HEADS, KV_HEADS, SIZE, page_size, k=fmt, v=fmt)
    names, shapes = zip(*spec.shapes().items(), strict=True)
    return lambda *arrays: spec.call(dict(zip(names, arrays, strict=True)), "tpu"), list(shapes)


def count(found: schedule.Schedule, block: int | None) -> dict[str, Any]:
    """Figures of a decoding kernel.

    Args:
        block: tokens of a block, in whose loop lies the one with the products: the largest loop of each of the two
            deepest levels counts. None: they are one loop, and the kernel's name says its tokens.
    """
    if block is None:
        loops, per_token = [found.body], found.bundles_per_token
    else:
        deepest = max(loop.depth for loop in found.loops)
        levels = [[x for x in found.loops if x.depth == depth] for depth in (deepest, deepest - 1)]
        loops = [max(level, key=lambda loop: loop.bundles) for level in levels]
        per_token = sum(loop.bundles for loop in loops) / block
    return {
        "bundles_per_token": round(per_token, 4),
        "bundles": [loop.bundles for loop in loops],
        "fills_and_spills": sum(loop.slots["fill"] + loop.slots["spill"] for loop in loops),
    }


def measure(whose: str, target: str, dtype: str, page_size: int) -> dict[str, Any]:
    """The figures of a kernel, or under ``refused`` why there are none."""
    try:
        call, shapes = {"ours": ours, "theirs": theirs}[whose](target, dtype, page_size)
        found = schedule.measure(call, shapes, target, donate=(3,) if whose == "theirs" else ())
    except Exception as error:  # whatever it raises is a result
        return {"refused": next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]}
    if whose == "ours":
        [one] = [one for name, one in found.items() if name.startswith("paged_attention")]
        return count(one, None)
    [one] = [one for name, one in found.items() if name.startswith("RPAd")]  # the kernel of rows that decode
    return count(one, _BLOCK.value)


def table(summary: dict[str, Any]) -> str:
    """A run as a table: bundles per KV token, with fills and spills in brackets."""

    def cell(row: dict[str, Any]) -> str:
        return "refused" if "refused" in row else f"{row['bundles_per_token']:.2f} ({row['fills_and_spills']})"

    rows = [
        {
            "chip": row["target"],
            "pages": row["dtype"],
            "page size": row["page_size"],
            "RPA v3": cell(row["theirs"]),
            "ours": cell(row["ours"]),
        }
        for row in summary["rows"]
    ]
    made = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    return f"{markdown(rows)}\n\n({made})"


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unknown arguments: {' '.join(argv[1:])}")
    out = pathlib.Path(_OUT.value)
    if _TABLE.value:
        if not out.is_file():
            raise app.UsageError(f"--out: must be a file that this script wrote; got {out}")
        print(table(json.loads(out.read_text())))
        return
    if _WHEEL.value is None or not (pathlib.Path(_WHEEL.value) / "tpu_inference").is_dir():
        raise app.UsageError(f"--wheel: must be a folder that holds tpu_inference/; got {_WHEEL.value}")
    asked = [(dtype, page_size) for dtype in SCALES for page_size in PAGES]
    if _ONE.value is not None:
        for dtype, page_size in asked:
            print(json.dumps(measure(_ONE.value, _TARGETS.value[0], dtype, page_size)), flush=True)
        return
    rows = []
    for target in _TARGETS.value:
        found = {}
        for whose in ("theirs", "ours"):  # a process each: the compiler keeps state
            command = [sys.executable, "-m", "scripts.compare_rpa", f"--one={whose}", f"--chip={target}"]
            command += [f"--wheel={_WHEEL.value}", f"--block={_BLOCK.value}"]
            print(f"{whose} for {target}", file=sys.stderr, flush=True)
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
            found[whose] = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        for (dtype, page_size), one, other in zip(asked, found["theirs"], found["ours"], strict=True):
            rows.append({"target": target, "dtype": dtype, "page_size": page_size, "theirs": one, "ours": other})
    versions = targets.versions(_TARGETS.value[0]) | {"tpu-inference": version_of(pathlib.Path(_WHEEL.value))}
    command = "python -m scripts.compare_rpa --wheel=wheel"
    summary = {"command": command, "block": _BLOCK.value, "versions": versions, "rows": rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, json.dumps(summary, indent=1) + "\n")
    if out == COMMITTED:
        put_table("rpa", table(summary))
    print(table(summary))


def version_of(wheel: pathlib.Path) -> str:
    """What the wheel says of itself."""
    return next(iter(importlib.metadata.distributions(name="tpu_inference", path=[str(wheel)]))).version


if __name__ == "__main__":
    app.run(main)
