"""What the TPU's own compiler makes of a kernel, for chips that need not be here: bundles per loop, spills, memory.

A TPU core issues one VLIW *bundle* per cycle, if nothing stalls: up to two matrix, four vector, two scalar operations
and so on at once. The compiler writes its final schedule down if asked; this module asks, compiles and reads:

    schedules = measure(function, arguments, "v6e")      # arguments may be jax.ShapeDtypeStruct
    for name, schedule in schedules.items():             # one per Pallas kernel, by the name of its call
        print(schedule.table())
        print(schedule.bundles_per_token, schedule.fills, schedule.spills, schedule.vmem_bytes, schedule.smem_bytes)

``read_schedule`` reads one kernel from a folder of dumps that someone else had the compiler write.

Needs libtpu of the installed JAX (``pip install -e '.[aot]'``). The compiler reads where to write once, when it is
loaded, so the first ``measure`` of a process has to come before any other use of libtpu. Schedules are static: a wait
for a copy, or for a matrix unit that is still busy, is not in them.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import glob
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TARGETS = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}
"""Chips by the names used here, and a topology that has them."""

SLOTS = ("matrix", "cross", "vector", "pop", "transcendental", "load", "fill", "store", "spill", "scalar")
"""Kinds of operations in a bundle, in the compiler's order; a fill loads, and a spill stores, a spilled register."""

BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+(LB|LH|LE|PB|PF|CT)?:\s*([> ]*)\{")
ALLOCATION = re.compile(r"(#allocation\d+) \[shape = [^]]*\][^]]*?space=(vmem|smem), size = (0x[0-9a-f]+)")


@dataclasses.dataclass(frozen=True)
class Loop:
    """A loop of a kernel, or the part outside of all loops.

    Attributes:
        number: place in the order of the loops' heads, from 1; 0 is the part outside.
        depth: loops that it is in, itself included.
        parent: number of the loop around it (0: none).
        bundles: bundles of one trip, without those of loops inside.
        slots: operations in these bundles by kind, see ``SLOTS``.
    """

    number: int
    depth: int
    parent: int
    bundles: int
    slots: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The final schedule of one kernel.

    Attributes:
        name: the kernel's, as its call gives it.
        loops: the part outside of loops first, then every loop.
        vmem_bytes, smem_bytes: allocated, buffers and spilled registers together.
    """

    name: str
    loops: tuple[Loop, ...]
    vmem_bytes: int
    smem_bytes: int

    @property
    def bundles(self) -> int:
        """Bundles of the whole program, each once."""
        return sum(loop.bundles for loop in self.loops)

    @property
    def body(self) -> Loop:
        """The loop that a kernel's time goes into: the first with matrix products and no such loop inside.

        In paged attention that is the loop over blocks that every query sees whole.

        Raises:
            ValueError: no loop has matrix products.
        """
        busy = [loop for loop in self.loops if loop.number and loop.slots["matrix"]]
        outer = {loop.parent for loop in busy}
        inner = [loop for loop in busy if loop.number not in outer]
        if not inner:
            raise ValueError(f"{self.name}: no loop of this kernel has matrix products")
        return inner[0]

    @property
    def fills(self) -> int:
        """Loads of spilled vector registers in one trip of ``body``."""
        return self.body.slots["fill"]

    @property
    def spills(self) -> int:
        """Stores of spilled vector registers in one trip of ``body``."""
        return self.body.slots["spill"]

    @property
    def bundles_per_token(self) -> float:
        """Bundles of one trip of ``body``, issue of the next pages' copies with it, per token of a row in its block.

        Raises:
            ValueError: the kernel's name does not say how many tokens a block has (``_t512`` for 512), or a loop
                inside the body makes the count depend on its trips, which a schedule does not say.
        """
        tokens = re.search(r"_t(\d+)", self.name)
        if tokens is None:
            raise ValueError(f"{self.name}: the name of a kernel must say its tokens per block, as in _t512")
        if any(loop.parent == self.body.number for loop in self.loops if loop.number):
            raise ValueError(f"{self.name}: the loop over blocks has a loop inside, whose trips are not known")
        return self.body.bundles / int(tokens[1])

    def table(self) -> str:
        """The loops as text, a line each."""
        head = f"{'loop':8}{'bundles':>8}" + "".join(f"{name[:8]:>9}" for name in SLOTS)
        lines = [
            f"{'  ' * loop.depth + str(loop.number):8}{loop.bundles:8}"
            + "".join(f"{loop.slots[name]:9}" for name in SLOTS)
            for loop in self.loops
        ]
        return "\n".join([head, *lines, f"VMEM {self.vmem_bytes} bytes, SMEM {self.smem_bytes} bytes"])


def compile_for(
    function: Callable[..., Any], arguments: Sequence[Any], target: str, donate: Sequence[int] = ()
) -> jax.stages.Compiled:
    """Compiles a function for one chip of a kind that may be absent.

    Args:
        arguments: arrays or shapes, no pytrees of them.
        target: a key of ``TARGETS``.
        donate: indices of arguments whose buffers the results may take.

    Raises:
        ValueError: an unknown target.
    """
    chip = mesh(target)
    whole = NamedSharding(chip, PartitionSpec())
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for x in arguments]
    with jax.set_mesh(chip):
        return jax.jit(function, donate_argnums=tuple(donate)).lower(*shapes).compile()


def mesh(target: str) -> Mesh:
    """A mesh of one chip of a kind that may be absent.

    Raises:
        ValueError: an unknown target.
    """
    if target not in TARGETS:
        raise ValueError(f"target: must be one of {', '.join(TARGETS)}; got {target!r}")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    return Mesh(np.array(topologies.get_topology_desc(TARGETS[target], "tpu").devices[:1]), ("x",))


ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",  # do not ask the cloud which machine this is
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",  # of the host that is not here; the topology says what is compiled for
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # other processes may compile, too
}
"""What libtpu wants to know on a machine without a TPU."""


def measure(
    function: Callable[..., Any], arguments: Sequence[Any], target: str, donate: Sequence[int] = ()
) -> dict[str, Schedule]:
    """Compiles a function as ``compile_for`` does, and reads the schedules of the Pallas kernels in it, by name.

    Raises:
        RuntimeError: libtpu was in use before, and writes no schedules.
    """
    folder = dump_folder()
    compile_for(function, arguments, target, donate)
    try:
        finals = list_finals(folder)
        if not finals:
            raise RuntimeError("libtpu wrote no schedule: it was loaded before the first measure() of this process")
        return {name: read(name, path) for name, path in finals.items()}
    finally:
        for path in folder.iterdir():
            path.unlink()


@functools.cache
def dump_folder() -> pathlib.Path:
    """Where the compiler writes, asked for when this is first called."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="schedule-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    os.environ["LIBTPU_INIT_ARGS"] = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}".strip()
    return folder


def list_finals(folder: pathlib.Path) -> dict[str, pathlib.Path]:
    """The files of final bundles in a folder of dumps, ``<time>-<name>.<number>-<step>-final_bundles.txt``, by name."""
    found = ((re.match(r"\d+-(.+?)\.\d+-\d+-final_bundles", path.name), path) for path in folder.iterdir())
    return {match[1]: path for match, path in found if match and "schedule-analysis" not in path.name}


def read_schedule(folder: str | pathlib.Path, part: str = "") -> Schedule:
    """Reads the one schedule in a folder of dumps whose kernel's name contains ``part``.

    Raises:
        ValueError: there is none such, or several.
    """
    finals = {name: path for name, path in list_finals(pathlib.Path(folder)).items() if part in name}
    if len(finals) != 1:
        raise ValueError(
            f"part: must be in the name of one kernel; {part!r} is in {', '.join(sorted(finals)) or 'none'}"
        )
    [(name, path)] = finals.items()
    return read(name, path)


def read(name: str, path: pathlib.Path) -> Schedule:
    """Reads the schedule of one kernel from the file of its final bundles and the files beside it.

    Raises:
        RuntimeError: the files are not as the compiler writes them; says which, and how.
    """
    stem = re.sub(r"-\d+-final_bundles\.txt$", "", path.name)
    pattern = f"{glob.escape(stem)}-*-final_hlo-static-per-bundle-utilization.txt"
    usage = [x for x in path.parent.glob(pattern) if "pre-delay" not in x.name]
    if len(usage) != 1:
        raise RuntimeError(f"{path.name}: must have one file of slots beside it, {pattern}; got {len(usage)}")
    used = read_slots(usage[0])
    with path.open() as lines:
        bundles = [(match[1], match[2].count(">")) for match in map(BUNDLE.match, lines) if match]
    if len(bundles) != len(used):
        raise RuntimeError(f"{path.name}: {len(bundles)} bundles and {len(used)} rows of slots; the format has changed")
    memory = {"vmem": 0, "smem": 0}
    for source in path.parent.glob(f"{glob.escape(stem)}-*-post-delay-converter.txt"):
        found = {place: (space, int(size, 16)) for place, space, size in ALLOCATION.findall(source.read_text())}
        for space, size in found.values():
            memory[space] += size
    return Schedule(name, find_loops(bundles, used), memory["vmem"], memory["smem"])


def read_slots(path: pathlib.Path) -> list[tuple[int, ...]]:
    """Operations of each bundle by kind."""
    _, mark, rows = path.read_text().partition("== UTILIZATION:\n")
    used = [tuple(row.split()) for row in rows.split("\n") if row.strip()]
    wrong = next((row for row in used if len(row) != len(SLOTS) or not all(map(str.isdecimal, row))), None)
    if not mark or wrong is not None:
        seen = "no such line" if wrong is None else f"the row {' '.join(wrong)!r}"
        raise RuntimeError(f"{path.name}: must have {len(SLOTS)} counts a row after '== UTILIZATION:'; got {seen}")
    return [tuple(map(int, row)) for row in used]


def find_loops(bundles: list[tuple[str, int]], used: list[tuple[int, ...]]) -> tuple[Loop, ...]:
    """Sums bundles up by loops.

    Args:
        bundles: mark ("LB" at the head of a loop's body) and depth of each.
        used: operations of each by kind.
    """
    counts: dict[int, list[int]] = {0: [0] * (1 + len(SLOTS))}
    depths, parents = {0: 0}, {0: 0}
    open_at = {0: 0}  # the loop that a depth belongs to
    for (mark, depth), slots in zip(bundles, used, strict=True):
        if mark == "LB":
            number = len(counts)
            counts[number] = [0] * (1 + len(SLOTS))
            depths[number], parents[number] = depth, open_at.get(depth - 1, 0)
            open_at[depth] = number
        row = counts[open_at.get(depth, 0)]
        for i, count in enumerate((1, *slots)):
            row[i] += count
    return tuple(
        Loop(number, depths[number], parents[number], row[0], dict(zip(SLOTS, row[1:], strict=True)))
        for number, row in counts.items()
    )
