"""What every experiment is given: the runner, and whose workload and which tolerances hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from experiments.calibration import Calibration
from experiments.figure import Chapter
from experiments.live.session import LiveSession
from experiments.run import Runner, Summary
from experiments.setting import Setting

Preset = Literal["smoke", "paper", "live"]

EMBEDDED_SLACK = 2.0
"""Tolerances are this many times wider when lengths are drawn from the embedded statistics."""


@dataclasses.dataclass(frozen=True)
class Context:
    """One reproduction.

    Attributes:
        runner: runs settings and keeps their summaries.
        preset: `smoke` for a subset that takes a minute, `paper` for everything on the simulated clock, `live` for the
            real engine on the device that is there.
        traces: folder of the real traces; None for the embedded statistics.
        calibration: the constants of the cost model.
        points: the points that the calibration rests on.
        live_session: runs the real engine; None where a preset has no live runs.
    """

    runner: Runner
    preset: Preset
    traces: str | None
    calibration: Calibration
    points: Sequence[dict[str, Any]]
    live_session: LiveSession | None = None

    @property
    def live(self) -> LiveSession:
        """What runs the real engine. Raises ``RuntimeError`` where the preset has none."""
        if self.live_session is None:
            raise RuntimeError(f"the preset {self.preset} has no live runs; give Context a live_session")
        return self.live_session

    def workload(self, dataset: str) -> str:
        """The workload column of a verdict row."""
        return f"{dataset} ({'real' if self.traces else 'embedded'})"

    def tolerance(self, value: float) -> float:
        """A tolerance that holds with real traces, widened for embedded ones."""
        return value if self.traces else EMBEDDED_SLACK * value

    def factor(self, value: float) -> float:
        """A factor tolerance, widened likewise: 1.5 becomes 2."""
        return value if self.traces else 1.0 + EMBEDDED_SLACK * (value - 1.0)

    def summaries(self, settings: Sequence[Setting]) -> list[Summary]:
        """Summaries of runs, executed now unless they are there."""
        return self.runner.run(settings)


class Experiment(Protocol):
    """A module of this package that answers one figure or claim."""

    def settings(self, preset: Preset) -> list[Setting]:
        """Runs known beforehand; empty when the preset leaves the experiment out or it needs none."""
        ...

    def chapter(self, context: Context) -> Chapter | None:
        """The report's chapter, or None when the preset leaves the experiment out."""
        ...


def windowed(settings: Sequence[Setting], *windows: tuple[float, float]) -> list[Setting]:
    """The same runs with pool shares averaged over ``windows``."""
    return [dataclasses.replace(setting, windows=windows) for setting in settings]
