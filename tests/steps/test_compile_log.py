"""Compilations are counted where they happen and told apart; implicit transfers raise; programs are kept on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.steps.compile_log import CompileForbidden, CompileLog, no_implicit_transfers


@pytest.fixture
def step():
    """A jitted function of its own, so that nothing was compiled before."""

    @jax.jit
    def double(x):
        return jnp.where(x > 0, x * 2, x)

    return double


def array(size: int) -> jax.Array:
    return jax.device_put(np.ones(size, np.float32))


def test_counts_each_compilation_once(step):
    log = CompileLog()
    for size in (4, 4, 8, 4, 8):
        with log.watch(f"decode[{size}]"):
            step(array(size))
    assert [(entry.bucket, entry.program, entry.reason) for entry in log.entries] == [
        ("decode[4]", "jit(double)", "first use of bucket decode[4]"),
        ("decode[8]", "jit(double)", "first use of bucket decode[8]"),
    ]
    assert all(entry.compile_s > 0 and entry.trace_s > 0 and not entry.cached for entry in log.entries)
    assert log.seconds == sum(entry.seconds for entry in log.entries) > 0
    assert "2 compilations" in log.report() and "0 after warm-up" in log.report()


def test_hears_only_inside(step):
    log = CompileLog()
    step(array(2))
    with log.watch("a"):
        pass
    step(array(3))
    assert log.entries == []


def test_hears_only_its_thread(step):
    log = CompileLog()
    with log.watch("a"):
        other = threading.Thread(target=lambda: step(array(5)))
        other.start()
        other.join()
    assert log.entries == []


def test_explains_what_came_after_warm_up(step):
    log = CompileLog()
    for size in (4, 8):
        with log.watch(f"decode[{size}]"):
            step(array(size))
    log.warmed_up()
    for bucket, size in (("decode[4]", 4), ("decode[4]", 5), ("decode[16]", 16), ("mixed[17,1]", 17)):
        with log.watch(bucket):
            step(array(size))
    assert [(entry.bucket, entry.reason) for entry in log.after_warm_up] == [
        (
            "decode[4]",
            "decode[4] had run 2 times: a shape, dtype, static option or placement that is not part of the bucket "
            "changed",
        ),
        ("decode[16]", "after warm-up: decode[16] was not warmed up"),
        ("mixed[17,1]", "after warm-up: mixed[17,1] was not warmed up"),
    ]


def test_forbids(step):
    log = CompileLog(forbid=True)
    with log.watch("a"):
        step(array(4))
    log.warmed_up()
    with log.watch("a"):
        step(array(4))
    with pytest.raises(CompileForbidden, match=r"nothing may compile after warm-up: b: jit\(double\) .*not warmed up"):
        with log.watch("b"):
            step(array(5))
    assert len(log.after_warm_up) == 1


def test_a_step_that_fails_keeps_its_own_error(step):
    log = CompileLog(forbid=True)
    log.warmed_up()
    with pytest.raises(KeyError, match="its own"):
        with log.watch("a"):
            step(array(6))
            raise KeyError("its own")
    assert [entry.bucket for entry in log.entries] == ["a"]
    step(array(7))
    assert len(log.entries) == 1  # nobody listens any more


def test_logs_inside_each_other(step):
    outer, inner = CompileLog(), CompileLog()
    with outer.watch("run"), inner.watch("step"):
        step(array(9))
    assert [entry.bucket for entry in outer.entries + inner.entries] == ["run", "step"]


def test_record():
    log = CompileLog()
    entry = log.record("decode[4]", "step", compile_s=2.0)
    assert log.entries == [entry] and entry.seconds == 2.0


def test_no_implicit_transfers(step):
    values = np.ones(4, np.float32)
    with no_implicit_transfers():
        found = jax.device_get(step(jax.device_put(values)))
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            step(values)
    np.testing.assert_array_equal(found, 2 * values)


PROGRAM = """
import sys
import jax
import jax.numpy as jnp
from paxkv.steps.compile_log import CompileLog, use_compile_cache

use_compile_cache(sys.argv[1], min_compile_s=0)
log = CompileLog()
with log.watch("a"):
    jax.jit(lambda x: jnp.sin(x) * 2)(jnp.arange(4.0))
print([entry.cached for entry in log.entries if "lambda" in entry.program])
"""


def test_programs_are_kept_for_the_next_process(tmp_path):
    folder = tmp_path / "cache"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    found = [
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
        for _ in range(2)
    ]
    assert found == ["[False]", "[True]"]
    assert any(folder.iterdir())
