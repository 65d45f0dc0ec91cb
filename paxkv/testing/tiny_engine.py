"""The real engine on the tiny model, with limits small enough that every rare path is near.

All engines made here share their shapes unless a test changes them, so a process compiles each step once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

from paxkv.config import SchedulerConfig
from paxkv.engine import Engine, EngineConfig
from paxkv.sched.sequence import Group
from paxkv.testing.dense import DenseModel
from paxkv.testing.tiny_model import tiny_config, tiny_params

LIMITS: Mapping = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "step_kind": "chunked",
    "max_horizon": 4,
}
NUM_PAGES, PAGE_SIZE = 64, 4


@functools.cache
def tiny_dense() -> DenseModel:
    """The oracle of the tiny model."""
    return DenseModel(tiny_config(), tiny_params())


@functools.cache
def _params():
    return tiny_params()


def tiny_engine(*, limits: Mapping | None = None, check: bool = True, **options) -> Engine:
    """An engine on the tiny model.

    Args:
        limits: fields of :class:`SchedulerConfig` that differ from ``LIMITS``.
        check: as :class:`Engine` takes it.
        options: fields of :class:`EngineConfig`, and other arguments of :class:`Engine`.
    """
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    choices = {name: value for name, value in options.items() if name in fields}
    others = {name: value for name, value in options.items() if name not in fields}
    choices = {"page_size": PAGE_SIZE, "num_pages": NUM_PAGES, "watermark": 0.0, **choices}
    config = EngineConfig(scheduler=SchedulerConfig(**{**LIMITS, **(limits or {})}), **choices)
    return Engine(tiny_config(), _params(), config, check=check, **others)


class ForceBy:
    """A force policy that asks a function, so that a test can change its mind between steps.

    Attributes:
        choose: (step, running groups) → (group, ``recompute`` or ``swap``) of the victims.
        pages: idle cached pages to give up before the next step.
    """

    def __init__(self) -> None:
        self.choose: Callable[[int, Sequence[Group]], list[tuple[Group, str]]] = lambda step, running: []
        self.pages = 0

    def preempt(self, step: int, running: list[Group]) -> list[tuple[Group, str]]:
        """The step's victims."""
        return self.choose(step, running)

    def evict(self, step: int) -> int:
        """Pages to give up before the step."""
        pages, self.pages = self.pages, 0
        return pages
