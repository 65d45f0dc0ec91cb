"""The live runs of one reproduction: each setting runs once on the device, and the simulator predicts the same."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from experiments.live.clock import Clock, fit_cost, time_steps
from experiments.live.prediction import UNTIMED, Summary, predict
from experiments.live.setting import PAGE_SIZE, SIZES, LiveSetting, LiveSize
from paxkv.record import RunDirectory, environment

FORMAT = 1
"""Goes into every run's configuration: raise it when the meaning of a summary changes."""
TOKENS_FILE = "requests.jsonl"


class LiveSession:
    """Runs settings on the device, one after the other, and keeps their summaries. Imports jax with the first one.

    Args:
        root: folder of the run directories.
        size: a name of `SIZES`; None takes the one for the device that is there.
        checkpoint: path of a checkpoint, or name of a known one, to run instead of the embedded model.
        traces: folder of real traces, or None for the embedded statistics.
        timed: whether the device's steps are timed, so that the simulator can predict seconds.
        record: also write a row per dispatched plan.
        progress: called with (finished work, all work, label).
    """

    def __init__(
        self,
        root: str | Path,
        size: str | None = None,
        *,
        checkpoint: str | Path | None = None,
        traces: str | None = None,
        timed: bool = True,
        record: bool = False,
        progress: Callable[[float, float, str], None] | None = None,
    ) -> None:
        self.root = Path(root)
        self.traces = traces
        self.timed = timed
        self.record = record
        self.progress = progress or (lambda done, total, label: None)
        self._size = size
        self._checkpoint = checkpoint
        self._summaries: dict[LiveSetting, Summary] = {}

    @functools.cached_property
    def size(self) -> LiveSize:
        """The model and its limits."""
        from experiments.live.model import default_size, size_of_checkpoint

        if self._checkpoint is not None:
            return size_of_checkpoint(self._weights, self.model)
        return SIZES[self._size] if self._size else default_size()

    @functools.cached_property
    def model(self):
        """The model, on the device."""
        from experiments.live.model import load_model, seeded_model

        self.progress(0, 1, "making the weights")
        if self._checkpoint is not None:
            return load_model(self._weights, self.progress)
        return seeded_model(self.size)

    @functools.cached_property
    def _weights(self) -> Path:
        """Where the checkpoint's weights lie. A known model's are checked whole, so they are looked for once."""
        from paxkv.models import known

        return known.find(str(self._checkpoint)).weights

    @functools.cached_property
    def device(self) -> str:
        """What jax runs on."""
        from experiments.live.model import device_name

        return device_name()

    @functools.cached_property
    def clock(self) -> Clock:
        """Step times of this device: measured once, then read back."""
        with RunDirectory(self.root, f"clock-{self.size.name}", self._config("clock", {})) as run:
            if run.complete:
                found = run.load_summary()
            else:
                from experiments.live.model import device_limits

                points = time_steps(self.size, self.model, self.progress)
                found = run.write_summary({"points": points, "limits": device_limits(), "model": self.model.facts()})
        page_s = PAGE_SIZE * self.size.shape.kv_bytes_per_token / found["limits"]["bytes_per_s"]
        return Clock(fit_cost(found["points"], page_s), found["points"], found["limits"], found["model"])

    @functools.cached_property
    def attention(self) -> list[dict[str, Any]]:
        """Figure 18a's points in our own kernel on this device (see `experiments.live.attention`), measured once."""
        with RunDirectory(self.root, "attention", self._config("attention", {})) as run:
            if run.complete:
                return run.load_summary()["points"]
            from experiments.live.attention import measure_figure, names_here

            self.progress(0, 1, "timing attention over pages")
            return run.write_summary({"points": measure_figure(names_here())})["points"]

    def __len__(self) -> int:
        """Runs known so far."""
        return len(self._summaries)

    def run(self, settings: Sequence[LiveSetting]) -> list[Summary]:
        """Summaries of ``settings`` in their order; each distinct one runs once.

        Raises:
            RuntimeError: a run failed; the message names its setting.
        """
        todo = [setting for setting in dict.fromkeys(settings) if setting not in self._summaries]
        if todo and self.timed:
            _ = self.clock  # before any run, so that no run has a part in it
        for done, setting in enumerate(todo):
            self.progress(done, len(todo), setting.name)
            try:
                self._summaries[setting] = self._run_one(setting)
            except Exception as error:
                raise RuntimeError(f"the run {setting.name} failed: {error}") from error
        return [self._summaries[setting] for setting in settings]

    def _run_one(self, setting: LiveSetting) -> Summary:
        with self._directory(setting) as run:
            if run.complete:
                return run.load_summary()
            from experiments.live.serve import run_live

            result = run_live(setting, self.model, self.traces)
            if self.record:
                run.append_steps(result.steps)
            run.append_requests({"request": index, "tokens": ids} for index, ids in enumerate(result.outputs))
            return run.write_summary(result.summary)

    def _directory(self, setting: LiveSetting) -> RunDirectory:
        config = self._config("run", dataclasses.asdict(setting))
        return RunDirectory(self.root, setting.name, config, record=self.record)

    def _config(self, kind: str, values: dict[str, Any]) -> dict[str, Any]:
        """Everything that decides a run, and what it ran on: numbers of two machines are never mixed."""
        return {
            "format": FORMAT,
            "kind": kind,
            "values": values,
            "size": dataclasses.asdict(self.size),
            "device": self.device,
            "jax": environment()["packages"]["jax"],
            "workload": "real" if self.traces else "embedded",
        }

    def tokens(self, setting: LiveSetting) -> list[list[list[int]]]:
        """Token ids of a run by request and sequence, from its run directory."""
        path = self._directory(setting).path / TOKENS_FILE
        rows = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
        return [row["tokens"] for row in sorted(rows, key=lambda row: row["request"])]

    def workload_hashes(self) -> dict[str, str]:
        """Content hash of each workload that was run, by its description."""
        return {s["workload_source"]: s["workload_hash"] for s in self._summaries.values()}

    @functools.cache  # noqa: B019 (a session lives as long as its program)
    def predict(self, setting: LiveSetting) -> Summary:
        """What the simulator says about a setting on this device's clock, in the terms of a run's summary."""
        return predict(setting, self.clock.cost if self.timed else UNTIMED, self.traces)
