"""What is read out of the compiler's dumps, from small ones written here, and from one real compile."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys

import pytest

from pallas_kernels import schedule
from pallas_kernels.proof import targets
from pallas_kernels.schedule import SLOTS, Loop, read_schedule

# (mark at the start of a bundle, depth, operations by kind)
Bundle = tuple[str, int, dict[str, int]]

PROGRAM: tuple[Bundle, ...] = (
    ("", 0, {"scalar": 2}),
    ("LB", 1, {"scalar": 1}),  # a loop over jobs
    ("LB", 2, {"load": 2}),  # one without products in it
    ("", 2, {"store": 1}),
    ("PF", 1, {}),
    ("LB", 2, {"matrix": 2, "fill": 1}),  # the loop over blocks
    ("PB", 2, {"matrix": 1, "spill": 2}),
    ("", 2, {"vector": 4}),
    ("LB", 2, {"matrix": 1, "fill": 9}),  # the one over masked blocks
    ("LE", 1, {"scalar": 1}),
    ("", 0, {"scalar": 1}),
)
ALLOCATIONS = """\
  #allocation0 [shape = 's32[5,17]{1,0:T(8,128)}', space=smem, size = 0x1000, offset = 0, scoped, tag = 'scratch']
  #allocation3 [shape = 'bf16[3,2,4096,128]{3,2,1,0:T(16,128)(2,1)}', space=vmem, size = 0x600000, offset = 0, scoped]
  #allocation4 [shape = 'f32[8,128]{1,0}', space=vmem, size = 0x1000, offset = 0x600000, tag = 'spilled']
  #allocation5 [shape = 's32[1]{0}', space=sflag, size = 0x4, offset = 0, scoped]
"""


def write(folder: pathlib.Path, program=PROGRAM, name: str = "attend_q1_t4x3", allocations: str = ALLOCATIONS) -> None:
    """The files of one kernel, in the compiler's words."""
    stem = folder / f"1796264241252606229-{name}.1"
    lines = ["= control target key start", "LB: loop body", "= control target key end", ""]
    for place, (mark, depth, _) in enumerate(program):
        address = "0" if place == 0 else f"{place:#x}"
        head = f"{address:>6} {mark:>3}: {' ' if depth == 0 else '>' * depth} {{"
        lines.append(f"{head} %s1 = smov 1  ;;  %v2 = vld [vmem:[#allocation3] sm:$0xff] }} /* > LB: {{ */")
        lines.append("   /* a line between bundles */")
    pathlib.Path(f"{stem}-71-final_bundles.txt").write_text("\n".join(lines))
    rows = [" ".join(str(used.get(kind, 0)) for kind in SLOTS) for _, _, used in program]
    table = "\n".join(["== CAPACTIY:", "MXU, XLU", "    2     2", "== UTILIZATION:", *rows, ""])
    pathlib.Path(f"{stem}-69-final_hlo-static-per-bundle-utilization.txt").write_text(table)
    # The state before the last step, whose slots do not count.
    pathlib.Path(f"{stem}-67-pre-delay_final_hlo-static-per-bundle-utilization.txt").write_text("nothing of use")
    pathlib.Path(f"{stem}-68-post-delay-converter.txt").write_text(allocations)
    pathlib.Path(f"{stem}-72-schedule-analysis_final_bundles.txt").write_text("Schedule analysis:")


def test_loops(tmp_path):
    write(tmp_path)
    found = read_schedule(tmp_path)
    assert found.name == "attend_q1_t4x3"
    places = [(loop.number, loop.depth, loop.parent, loop.bundles) for loop in found.loops]
    assert places == [(0, 0, 0, 2), (1, 1, 0, 3), (2, 2, 1, 2), (3, 2, 1, 3), (4, 2, 1, 1)]
    assert found.loops[0].slots == {**dict.fromkeys(SLOTS, 0), "scalar": 3}
    assert found.bundles == len(PROGRAM)


def test_the_body_is_the_first_inner_loop_with_products(tmp_path):
    write(tmp_path)
    found = read_schedule(tmp_path)
    expected = {**dict.fromkeys(SLOTS, 0), "matrix": 3, "fill": 1, "spill": 2, "vector": 4}
    assert found.body == Loop(3, 2, 1, 3, expected)
    assert (found.fills, found.spills) == (1, 2)
    assert found.bundles_per_token == 3 / 4


def test_memory_is_summed_by_space(tmp_path):
    write(tmp_path)
    found = read_schedule(tmp_path)
    assert (found.vmem_bytes, found.smem_bytes) == (0x601000, 0x1000)


def test_the_table_has_a_line_for_each_loop(tmp_path):
    write(tmp_path)
    lines = read_schedule(tmp_path).table().split("\n")
    assert len(lines) == 1 + 5 + 1
    assert lines[4].split()[:3] == ["3", "3", "3"]  # loop, bundles, matrix
    assert "6295552 bytes" in lines[-1]


def test_a_loop_inside_the_body_has_no_known_count(tmp_path):
    inner = (*PROGRAM[:7], ("LB", 3, {"vector": 1}), *PROGRAM[7:])
    write(tmp_path, inner)
    with pytest.raises(ValueError, match="trips are not known"):
        _ = read_schedule(tmp_path).bundles_per_token


def test_a_name_without_tokens_has_no_cost(tmp_path):
    write(tmp_path, name="attend")
    with pytest.raises(ValueError, match="_t512"):
        _ = read_schedule(tmp_path).bundles_per_token


def test_a_kernel_without_products_has_no_body(tmp_path):
    write(tmp_path, PROGRAM[:5])
    with pytest.raises(ValueError, match="matrix products"):
        _ = read_schedule(tmp_path).body


def test_one_of_several_kernels(tmp_path):
    write(tmp_path)
    write(tmp_path, PROGRAM[:5], name="copy_t8")
    assert read_schedule(tmp_path, "copy").bundles == 5
    for part in ("", "absent"):
        with pytest.raises(ValueError, match="name of one kernel"):
            read_schedule(tmp_path, part)


def test_an_empty_folder(tmp_path):
    with pytest.raises(ValueError, match="none"):
        read_schedule(tmp_path)


def change_slots(folder: pathlib.Path, old: str, new: str) -> None:
    [path] = folder.glob("*-69-*")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_a_row_of_slots_too_few(tmp_path):
    write(tmp_path)
    change_slots(tmp_path, "0 0 0 0 0 0 0 0 0 2\n", "")
    with pytest.raises(RuntimeError, match="11 bundles and 10 rows"):
        read_schedule(tmp_path)


@pytest.mark.parametrize(
    "row", ["0 0 0 0 0 0 0 0 2", "0 0 0 0 0 0 0 0 0 2 0", "0 0 0 0 0 0 0 0 0 x", "- 0 0 0 0 0 0 0 0 2"]
)
def test_rows_of_slots_of_another_format(tmp_path, row):
    write(tmp_path)
    change_slots(tmp_path, "0 0 0 0 0 0 0 0 0 2\n", f"{row}\n")
    with pytest.raises(RuntimeError, match=f"10 counts a row.*{row}"):
        read_schedule(tmp_path)


def test_no_slots(tmp_path):
    write(tmp_path)
    change_slots(tmp_path, "== UTILIZATION:", "== USAGE:")
    with pytest.raises(RuntimeError, match="no such line"):
        read_schedule(tmp_path)
    next(tmp_path.glob("*-69-*")).unlink()
    with pytest.raises(RuntimeError, match="one file of slots"):
        read_schedule(tmp_path)


def test_an_unknown_target():
    with pytest.raises(ValueError, match="v4, v5e, v5p, v6e, 7x; got 'v3'"):
        schedule.compile_for(lambda x: x, [], "v3")


SUM = """
import json, sys
import jax, jax.numpy as jnp
from jax.experimental import pallas as pl
from pallas_kernels.schedule import measure

def kernel(left, right, out):
    def add(i, total):
        return total + jnp.dot(left[i], right[...], preferred_element_type=jnp.float32)
    out[...] = jax.lax.fori_loop(0, 8, add, jnp.zeros(out.shape, jnp.float32))

def function(left, right):
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct((128, 128), jnp.float32), name="sum_t128")(left, right)

shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 128, 128), (128, 128))]
found = measure(function, shapes, "v5e")["sum_t128"]
print(json.dumps([found.body.bundles, found.body.slots["matrix"], found.bundles_per_token, found.vmem_bytes]))
"""


def test_a_real_compile():
    """In a process of its own, which has not loaded the compiler before."""
    try:
        targets.versions("v5e")
    except ModuleNotFoundError as error:
        pytest.skip(str(error))
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(pathlib.Path(schedule.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", SUM], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    bundles, matrix, per_token, vmem_bytes = json.loads(done.stdout.strip().split("\n")[-1])
    assert matrix >= 16  # 128 rows of bfloat16, eight at a time
    assert bundles >= matrix / 2 and per_token == bundles / 128
    assert vmem_bytes >= 0
