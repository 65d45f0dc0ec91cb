"""Knees of curves that are known exactly: read off the grid as the paper's are, and found between its rates."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest

from experiments import knee, paper
from experiments.calibration import Calibration
from experiments.context import Context
from experiments.setting import Setting

SYSTEMS = ("static", "orca_max", "orca_pow2", "orca_oracle", "paged")


class Curves:
    """Stands in for the runner: latency is a function of system and rate, and every run is counted."""

    def __init__(self, **latency: Callable[[float], float]) -> None:
        self.latency = latency
        self.batches: list[list[Setting]] = []
        self._seen: set[Setting] = set()

    def run(self, settings: Sequence[Setting]) -> list[dict[str, float]]:
        fresh = [setting for setting in settings if setting not in self._seen]
        self.batches.append(fresh)
        self._seen.update(fresh)
        return [{"normalised_latency_s": self.latency[setting.system](setting.rate)} for setting in settings]

    @property
    def runs(self) -> int:
        return sum(map(len, self.batches))


def context(runner: Curves) -> Context:
    calibration = Calibration(0, 0, 0, 1, 1, 1, 0, 0, {}, {})
    return Context(runner, "paper", None, calibration, ())  # type: ignore[arg-type]


def settings(rates: Sequence[float], system: str = "paged") -> list[Setting]:
    return [Setting(system, "opt-13b", "sharegpt", rate, 3600.0) for rate in rates]  # type: ignore[arg-type]


# --- curves whose crossing of 0.5 s/token is at a given rate ------------------------------------------------------


def exponential(rate: float) -> Callable[[float], float]:
    return lambda r: 0.5 * math.exp(2.5 * (r / rate - 1))


def hockey_stick(rate: float, steepness: float = 8.0) -> Callable[[float], float]:
    """Flat at 0.05 until the server is full, then straight up: what a trace of fixed length gives."""
    return lambda r: max(0.05, 0.5 + steepness * (r / rate - 1))


def queue(rate: float) -> Callable[[float], float]:
    """0.05 s/token stretched by the load, as in a queue: ten times at nine tenths of the largest rate."""
    return lambda r: 0.05 / (1 - 0.9 * r / rate) if r < rate / 0.9 * 0.9999 else 500.0


SHAPES = {
    "exponential": exponential,
    "hockey stick": hockey_stick,
    "steep": lambda rate: hockey_stick(rate, 60.0),
    "queue": queue,
}


# --- reading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("latencies", "level", "expected"),
    [
        ((0.1, 0.3, 0.7), 0.5, 2.5),  # halfway between 0.3 and 0.7
        ((0.1, 0.2, 1.7), 0.5, 2.2),
        ((0.1, 0.5, 0.9), 0.5, 2.0),  # a point on the level is the crossing
        ((0.1, 0.2, 0.5), 0.5, 3.0),
        ((0.1, 0.3, 0.7), 0.2, 1.5),
        ((0.1, 0.7, 0.3), 0.5, 1.0 + 0.4 / 0.6),  # the first crossing
    ],
)
def test_a_knee_lies_on_the_straight_line(latencies, level, expected):
    assert paper.read_knee((1.0, 2.0, 3.0), latencies, level) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("latencies", [(0.1, 0.2, 0.3), (0.5, 0.6, 0.7), (0.9, 0.95, 1.0)])
def test_no_crossing_is_none(latencies):
    assert paper.read_knee((1.0, 2.0, 3.0), latencies, 0.5) is None


@pytest.mark.parametrize(
    ("rates", "latencies", "message"),
    [
        ((1.0, 2.0), (0.1,), "one latency per rate"),
        ((1.0, 1.0), (0.1, 0.9), "rates must increase"),
        ((2.0, 1.0), (0.1, 0.9), "rates must increase"),
        ((1.0, 2.0), (0.1, math.nan), "must be finite"),
    ],
)
def test_bad_curves_are_refused(rates, latencies, message):
    with pytest.raises(ValueError, match=message):
        paper.read_knee(rates, latencies, 0.5)


def test_reading_depends_on_the_grid():
    """The point of reading on the paper's own rates: one curve, two grids, two knees."""
    curve = hockey_stick(1.93)
    fine, coarse = (1.8, 1.9, 2.0, 2.1), (1.5, 2.1)
    knees = [knee.read(context(Curves(paged=curve)), settings(rates)) for rates in (fine, coarse)]
    low, high = curve(1.9), curve(2.0)
    assert knees[0] == pytest.approx(1.9 + 0.1 * (0.5 - low) / (high - low))
    assert knees[1] == pytest.approx(1.5 + 0.6 * 0.45 / (curve(2.1) - 0.05))
    assert abs(knees[0] - 1.93) < 0.002 < 0.02 < abs(knees[1] - 1.93)


def test_latencies_keep_the_order_of_the_settings():
    runner = Curves(paged=lambda r: r / 10, static=lambda r: r)
    mixed = [*settings((2.0, 1.0)), *settings((3.0,), "static")]
    assert knee.latencies(context(runner), mixed) == [0.2, 0.1, 3.0]


def test_a_curve_is_followed_beyond_its_rates():
    runner = Curves(paged=exponential(2.6))
    followed = knee.extend(context(runner), settings((1.0, 2.0, 2.2)))
    assert [setting.rate for setting in followed] == [1.0, 2.0, 2.2, 2.4, 2.6]
    assert knee.read(context(runner), followed) == pytest.approx(2.6)


def test_a_curve_that_has_crossed_is_not_followed():
    grid = settings((1.0, 2.0, 3.0))
    runner = Curves(paged=exponential(2.5))
    assert knee.extend(context(runner), grid) == grid
    assert runner.runs == 1, "only the last rate is needed to know"


def test_following_ends():
    followed = knee.extend(context(Curves(paged=lambda r: 0.1)), settings((1.0, 1.5)))
    assert len(followed) == 2 + knee.EXTRA_RATES


# --- the true crossing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("panel", ["a", "b", "d"])
def test_the_true_crossing_is_found(panel, system, shape):
    """On the paper's grids, wherever the curve crosses: within half a percent, in a handful of runs."""
    rates = paper.reading_grid("fig12", panel, system)
    for share in (0.12, 0.35, 0.5, 0.77, 0.93):
        true = rates[0] + share * (rates[-1] - rates[0])
        curve = SHAPES[shape](true)
        if curve(rates[0]) >= 0.5:
            continue
        runner = Curves(**{system: curve})
        (found,) = knee.true_crossings(context(runner), [settings(rates, system)])
        assert found == pytest.approx(true, rel=0.005), f"crossing at {true}"
        assert runner.runs <= len(rates) + knee.ROUNDS


def test_curves_advance_together():
    """One batch per round, so that all processes have work; a curve that never crosses costs nothing."""
    runner = Curves(paged=exponential(2.2), orca_max=hockey_stick(0.61), static=lambda r: 0.1, orca_pow2=lambda r: 0.9)
    curves = [
        settings((1.0, 2.0, 3.0)),
        settings((0.25, 0.5, 0.75), "orca_max"),
        settings((0.1, 0.2), "static"),
        settings((1.0, 2.0), "orca_pow2"),
    ]
    found = knee.true_crossings(context(runner), curves)
    assert found[0] == pytest.approx(2.2, rel=0.005)
    assert found[1] == pytest.approx(0.61, rel=0.005)
    assert found[2:] == [None, None]
    trials = runner.batches[len(curves) :]
    assert len(trials) <= knee.ROUNDS
    assert {setting.system for setting in trials[0]} == {"paged", "orca_max"}
    assert {setting.system for batch in trials for setting in batch} == {"paged", "orca_max"}


def test_a_trial_differs_from_its_curve_in_the_rate_only():
    runner = Curves(paged=exponential(2.2))
    grid = [Setting("paged", "opt-13b", "alpaca", rate, 900.0, seed=7, num_seqs=2) for rate in (1.0, 3.0)]
    knee.true_crossings(context(runner), [grid])
    for batch in runner.batches[1:]:
        for trial in batch:
            assert trial == Setting("paged", "opt-13b", "alpaca", trial.rate, 900.0, seed=7, num_seqs=2)
            assert 1.0 < trial.rate < 3.0


def test_another_level():
    runner = Curves(paged=exponential(2.0))
    true = 2.0 * (1 + math.log(0.2 / 0.5) / 2.5)
    (found,) = knee.true_crossings(context(runner), [settings((1.0, 1.5, 2.0))], 0.2)
    assert found == pytest.approx(true, rel=0.005)


def test_a_crossing_at_a_rate_of_the_grid():
    (found,) = knee.true_crossings(context(Curves(paged=exponential(2.0))), [settings((1.0, 2.0, 3.0))])
    assert found == pytest.approx(2.0, rel=0.005)
