"""What the compiler of NVIDIA GPUs makes of a Mosaic GPU kernel: registers, spills, shared memory, instructions.

Read from what JAX writes into the folder that ``MOSAIC_GPU_DUMP_TO`` names when it is loaded.
"""

from __future__ import annotations

import pathlib
import re

COUNTED = {
    "bulk_copies": r"cp\.async\.bulk\.tensor\.\dd\.shared::",  # from global into shared memory, by the TMA unit
    "wgmma": r"wgmma\.mma_async",
    "mma": r"mma\.sync",
}


def read_kernels(folder: pathlib.Path) -> dict[str, dict[str, float]]:
    """Figures of every kernel in a folder of dumps, by its name.

    The folder must be one process's, and its calls must not share a kernel: those that were compiled before are not
    written again.

    Raises:
        RuntimeError: a kernel without the assembler's report, whose form has changed.
    """
    resources = {unnumbered(path.name.removesuffix(".resources.txt")): path for path in folder.glob("*.resources.txt")}
    codes = {unnumbered(path.stem): path for path in sorted(folder.glob("*.ptx"))}
    return {name: read_kernel(path, resources.get(name)) for name, path in codes.items()}


def unnumbered(name: str) -> str:
    """A kernel's name without the number behind it, which JAX and the compiler count apart."""
    return re.sub(r"_\d+$", "", name)


def read_kernel(ptx: pathlib.Path, resources: pathlib.Path | None) -> dict[str, float]:
    """Figures of one kernel, from its PTX, the assembler's report beside it, and the file of its resources."""
    report = ptx.with_suffix(".ptxas")
    text = report.read_text() if report.is_file() else ""
    registers = re.search(r"Used (\d+) registers", text)
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", text)
    shared = re.search(r"smem_scratch_bytes=(\d+)", resources.read_text() if resources is not None else "")
    if registers is None or spills is None or shared is None:
        raise RuntimeError(f"{ptx.name}: no registers, spills or shared memory beside it; the dumps' form has changed")
    code = ptx.read_text()
    return {
        "registers": int(registers[1]),
        "spill_bytes": int(spills[1]) + int(spills[2]),
        "shared_bytes": int(shared[1]),
        **{name: len(re.findall(pattern, code)) for name, pattern in COUNTED.items()},
    }
