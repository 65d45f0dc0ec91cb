"""How many pages, tokens and requests fit on a device, item by item.

    python -m scripts.size --model=opt-13b --device=a100-40gb --artifact
    python -m scripts.size --model=llama-3-8b --device=h200 --kv_bits=8 --json
    python -m scripts.size --layers=28 --heads=28 --kv_heads=4 --head_size=128 --hidden=3584 --ffn=18944 --vocab=152064

The first prints the pool of the paper's Table 1 (983 pages). With ``--artifact`` the formula and its constants are the
paper's; without, the utilization, the workspace and the batched tokens are the flags'.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from absl import app, flags
from rich.console import Console
from rich.table import Table

from paxkv import sizing
from paxkv.config import ModelShape
from paxkv.sim import hardware

_MODEL = flags.DEFINE_string("model", None, f"a preset: {', '.join(sizing.PRESETS)}; else give the shape flags")
_DEVICE = flags.DEFINE_string("device", "a100-40gb", f"{', '.join(hardware.DEVICES)}, or cpu")
_MEMORY_GIB = flags.DEFINE_float("memory_gib", None, "memory of one device in GiB, instead of --device")
_ARTIFACT = flags.DEFINE_bool("artifact", False, "the formula of the paper's artifact")
_UTILIZATION = flags.DEFINE_float("utilization", 0.9, "share of TOTAL memory that may be used")
_PAGE_SIZE = flags.DEFINE_integer("page_size", 16, "token positions of a page")
_KV_BITS = flags.DEFINE_integer("kv_bits", 16, "bits of a key or value element: 32, 16, 8 or 4")
_SCALES = flags.DEFINE_enum("scales", "none", ["none", "tensor", "head", "token_head"], "scales of quantised pages")
_TP = flags.DEFINE_integer("tensor_parallel", 1, "devices that share the model")
_BATCHED = flags.DEFINE_integer("batched_tokens", sizing.ARTIFACT_BATCHED_TOKENS, "tokens of one step")
_WORKSPACE_GIB = flags.DEFINE_float("workspace_gib", 1.0, "runtime workspace in GiB")
_OTHER_GIB = flags.DEFINE_float("other_gib", 0.0, "memory held by other processes in GiB")
_PAGES = flags.DEFINE_integer("pages", None, "an explicit page count, which wins")
_LANE = flags.DEFINE_integer("lane", 1, "the device pads head sizes to a multiple of this (128 on TPU)")
_JSON = flags.DEFINE_bool("json", False, "print JSON instead of a table")
_WEIGHT_BYTES = flags.DEFINE_float("weight_bytes", 2.0, "bytes of one weight (without --model)")
_SHAPE = {
    name: flags.DEFINE_integer(name, default, f"{name} of a model that is no preset")
    for name, default in (
        ("layers", None),
        ("heads", None),
        ("kv_heads", None),
        ("head_size", None),
        ("hidden", None),
        ("ffn", None),
        ("vocab", None),
        ("max_positions", 2048),
    )
}


def shape_from_flags() -> ModelShape:
    """The preset, or a gated model without biases built from the shape flags."""
    given = {name: flag.value for name, flag in _SHAPE.items() if flag.value is not None}
    if _MODEL.value is not None:
        if _MODEL.value not in sizing.PRESETS:
            raise ValueError(f"unknown model {_MODEL.value!r}; known: {', '.join(sizing.PRESETS)}, or give its shape")
        return sizing.PRESETS[_MODEL.value]
    missing = [f"--{name}" for name in _SHAPE if name not in given]
    if missing:
        raise ValueError(f"without --model the shape flags are needed; missing: {' '.join(missing)}")
    return ModelShape(
        "flags",
        given["layers"],
        given["heads"],
        given["kv_heads"],
        given["head_size"],
        given["hidden"],
        given["ffn"],
        given["vocab"],
        max_positions=given["max_positions"],
        gated_ffn=True,
        biases=False,
        weight_bytes=_WEIGHT_BYTES.value,
    )


def plan_from_flags() -> sizing.MemoryPlan:
    """The plan that the flags describe. Raises ``ValueError`` for flags that contradict one another."""
    shape = shape_from_flags()
    device = hardware.device(_DEVICE.value)
    memory = device.memory_bytes // device.devices_per_chip  # a TPU 7x chip is two JAX devices
    if _MEMORY_GIB.value is not None:
        memory = int(_MEMORY_GIB.value * sizing.GIB)
    if _ARTIFACT.value:
        ignored = [
            f"--{name}"
            for name in (
                "utilization",
                "kv_bits",
                "scales",
                "batched_tokens",
                "workspace_gib",
                "other_gib",
                "pages",
                "lane",
            )
            if flags.FLAGS[name].present
        ]
        if ignored:
            raise ValueError(f"--artifact fixes the formula; leave out {' '.join(ignored)}")
        return sizing.artifact_plan(shape, memory, page_size=_PAGE_SIZE.value, tensor_parallel=_TP.value)
    return sizing.plan(
        shape,
        memory,
        utilization=_UTILIZATION.value,
        page_size=_PAGE_SIZE.value,
        tensor_parallel=_TP.value,
        batched_tokens=_BATCHED.value,
        workspace_bytes=int(_WORKSPACE_GIB.value * sizing.GIB),
        other_bytes=int(_OTHER_GIB.value * sizing.GIB),
        explicit_pages=_PAGES.value,
        bits=_KV_BITS.value,
        scales=_SCALES.value,
        lane=_LANE.value,
    )


def as_json(plan: sizing.MemoryPlan) -> dict:
    """Inputs and results, bytes as integers."""
    results = ("num_pages", "num_tokens", "longest_request", "limited_by", "fits", "kv_bytes", "shortfall_bytes")
    return {
        "plan": dataclasses.asdict(plan),
        "items_bytes": dict(plan.items),
        "page_bytes": plan.layout.page_bytes,
        "bytes_per_token": plan.layout.bytes_per_token,
        **{name: getattr(plan, name) for name in results},
    }


def as_table(plan: sizing.MemoryPlan, title: str) -> Table:
    """Where the memory goes, and what fits in the pool."""
    table = Table(title=title, title_justify="left")
    table.add_column("per device")
    table.add_column("GiB", justify="right")
    table.add_column("share", justify="right")
    for name, size in plan.items:
        table.add_row(name, f"{size / sizing.GIB:.3f}", f"{size / plan.total_bytes:.1%}")
    table.add_section()
    for name, value in (
        ("bytes per token", f"{plan.layout.bytes_per_token:,.0f}"),
        ("pages", f"{plan.num_pages:,}"),
        ("limited by", plan.limited_by),
        ("tokens", f"{plan.num_tokens:,}"),
        ("longest request", f"{plan.longest_request:,}"),
    ):
        table.add_row(name, value, "")
    return table


def main(argv: list[str]) -> int:
    """Prints the plan; returns 1 where no page fits or an explicit pool does not."""
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    try:
        plan = plan_from_flags()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if _JSON.value:
        print(json.dumps(as_json(plan), indent=2, sort_keys=True))
    else:
        title = f"{_MODEL.value or 'model from flags'}, pages of {plan.layout.page_size}, {_TP.value} device(s)"
        Console().print(as_table(plan, title))
    if plan.num_pages == 0 or not plan.fits:
        missing = max(plan.shortfall_bytes, sum(size for _, size in plan.items[1:]) - plan.total_bytes)
        print(f"does not fit: {missing} bytes short; use a larger share, more devices or fewer pages", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    app.run(main)
