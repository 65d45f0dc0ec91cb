"""Results that no plain run gives, kept in run directories all the same: computed once, read back afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from experiments.context import Context
from experiments.run import FORMAT
from paxkv.record import RunDirectory

Result = dict[str, Any]


def kept(context: Context, name: str, config: Result, compute: Callable[[], Result]) -> Result:
    """The result of `compute`, read back if the run directory of this name and configuration is complete.

    Args:
        name: a readable name for the run directory.
        config: everything that decides the result, besides whether the workload is real.
        compute: gives JSON values.
    """
    config = {"format": FORMAT, "workload": "real" if context.traces else "embedded", **config}
    with RunDirectory(context.runner.root, name, config) as run:
        return run.load_summary() if run.complete else run.write_summary(compute())
