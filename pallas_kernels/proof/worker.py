"""Compiles cases of one target, in a process of its own: a compiler may abort, and keeps state between targets.

    python -m pallas_kernels.proof.worker v6e DUMPS       (names of cases on standard input, one a line)

``DUMPS`` is an empty folder for what the compiler writes, or "-" to leave that out. A case to be lowered only has a "-"
before its name. Each case gives two lines of JSON on standard output: its name, and then the name with the outcome.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
import time
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from pallas_kernels import schedule
from pallas_kernels.proof import gpu_code, targets
from pallas_kernels.proof.cases import OPS, Case, cases_for


def environment(target: str, dumps: pathlib.Path | None) -> dict[str, str]:
    """What has to be in a worker's environment before its compiler is loaded."""
    found = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    if targets.platform(target) == "gpu":
        return found | ({"MOSAIC_GPU_DUMP_TO": str(dumps)} if dumps else {})
    flags = f"--xla_jf_dump_to={dumps} --xla_jf_dump_llo_text=true" if dumps else ""
    return found | schedule.ENVIRONMENT | {"LIBTPU_INIT_ARGS": flags}


def examine(case: Case, dumps: pathlib.Path | None, lower_only: bool = False) -> dict[str, Any]:
    """Compiles a case and says what came of it.

    Returns:
        ``outcome``: compiled, lowered, missing, refused or failed; ``why``, unless it is one of the first two: the
        first line of the compiler's or the refusal's own words; ``temp_bytes`` that the compiled call takes beside
        arguments and results; ``kernels``, figures from the dumps.
    """
    try:
        found = compile_case(case, lower_only)
    except Exception as error:  # whatever a compiler raises is a result
        refusal = f"implementation: {case.implementation} cannot do this call: "
        words = str(error).strip() or type(error).__name__
        outcome = "refused" if isinstance(error, ValueError) and words.startswith(refusal) else "failed"
        return {"outcome": outcome, "why": first_line(words.removeprefix(refusal))}
    if dumps is not None and found["outcome"] == "compiled":
        found["kernels"] = read_dumps(case, dumps)
    return found


def compile_case(case: Case, lower_only: bool) -> dict[str, Any]:
    """Lowers, and compiles, a call for a device of the case's target."""
    if case.implementation not in OPS[case.op].IMPLEMENTATIONS:
        return {"outcome": "missing", "why": f"{case.op} has no implementation {case.implementation}"}
    mesh = targets.mesh(case.target)
    whole = NamedSharding(mesh, PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), case.spec.shapes())
    donated = {name: shapes.pop(name) for name in case.spec.donated if name in shapes}

    def function(changed, given):
        return case.spec.call({**changed, **given}, case.implementation)

    with jax.set_mesh(mesh):
        lowered = jax.jit(function, donate_argnums=0).lower(donated, shapes)
    if lower_only:
        return {"outcome": "lowered"}
    memory = lowered.compile().memory_analysis()
    return {"outcome": "compiled", "temp_bytes": memory.temp_size_in_bytes}


def read_dumps(case: Case, dumps: pathlib.Path) -> dict[str, dict[str, float]]:
    """Figures of each of our kernels by its name; empties the folder."""
    try:
        if targets.platform(case.target) == "gpu":
            return gpu_code.read_kernels(dumps)
        finals = schedule.list_finals(dumps)
        kernels = {name: path for name, path in finals.items() if name.startswith(case.op)}
        return {name: figures(schedule.read(name, path)) for name, path in sorted(kernels.items())}
    finally:
        for path in dumps.iterdir():
            path.unlink()


def figures(found: schedule.Schedule) -> dict[str, float]:
    """What is kept of a TPU kernel's schedule."""
    memory = {"vmem_bytes": found.vmem_bytes, "smem_bytes": found.smem_bytes}
    if not any(loop.number and loop.slots["matrix"] for loop in found.loops):  # it only moves: all of it counts
        spilled = {f"{name}s": sum(loop.slots[name] for loop in found.loops) for name in ("fill", "spill")}
        return {"bundles": found.bundles} | spilled | memory
    try:
        cost = {"bundles_per_token": round(found.bundles_per_token, 4)}
    except ValueError:  # a loop inside the one over blocks, whose trips are not known
        cost = {"bundles": found.body.bundles}
    return cost | {"fills": found.fills, "spills": found.spills} | memory


def first_line(words: str) -> str:
    """The first line that says something, at most 300 characters of it."""
    line = next(filter(None, map(str.strip, words.splitlines())), "")
    return line if len(line) <= 300 else f"{line[:297]}..."


def main(target: str, dumps: str) -> None:
    """Works off the cases on standard input."""
    folder = None if dumps == "-" else pathlib.Path(dumps)
    cases = {case.name: case for case in cases_for(target)}
    for line in sys.stdin:
        name = line.rstrip("\n")
        lower_only, name = name.startswith("-"), name.removeprefix("-")
        print(json.dumps({"case": name}), flush=True)
        begin = time.monotonic()
        result = examine(cases[name], folder, lower_only)
        print(json.dumps({"case": name, **result, "seconds": round(time.monotonic() - begin, 1)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
