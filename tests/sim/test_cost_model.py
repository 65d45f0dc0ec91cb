"""What a step costs, part by part, in numbers that are sums of powers of two, so that equality is exact."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from paxkv.sched.plan import Chunk, StepPlan, StepResult
from paxkv.sim.cost_model import CostExecutor, CostModel, UniformBeams

PLAIN = CostModel(floor_s=1.0, weights_s=1.0, token_s=0.25)
"""One second besides the weights, one for the weights, and four tokens compute in the time the weights are read."""


def plan(decodes: int = 0, prefills: tuple[int, ...] = (), **changes) -> StepPlan:
    """A plan with so many decodes and with prompt chunks of these sizes, one group each."""
    values = {
        "step": 0,
        "prefills": tuple(Chunk(100 + i, 0, count, True) for i, count in enumerate(prefills)),
        "decodes": tuple(range(decodes)),
        "swap_out": (),
        "swap_in": (),
        "copies": (),
        "admitted": (),
        "preempted": (),
        "blocked": None,
        "horizon": 1,
        "open_to_arrivals": True,
        "num_groups": decodes + len(prefills),
        "context_tokens": 0,
        "context_pages": 0,
        "growth": (),
        "beams": (),
    }
    return StepPlan(**values | changes)


@pytest.mark.parametrize(
    ("decodes", "prefills", "seconds"),
    [
        (1, (), 1 + 1),  # weights 1 against compute 0.25
        (3, (), 1 + 1),
        (4, (), 1 + 1),  # equal
        (5, (), 1 + 1.25),  # compute takes over
        (0, (4,), 1 + 1),
        (0, (5,), 1 + 1.25),
        (0, (8, 8), 1 + 4),
        (4, (8,), 1 + 3),  # decode tokens compute too
    ],
)
def test_the_larger_of_weights_and_compute_counts(decodes, prefills, seconds):
    assert PLAIN.step_s(plan(decodes, prefills)) == seconds


def test_overheads_per_sequence_and_per_group():
    cost = dataclasses.replace(PLAIN, sequence_s=0.125, group_s=0.5)
    assert cost.step_s(plan(2, (1, 1), num_groups=3)) == 2 + 4 * 0.125 + 3 * 0.5
    assert cost.step_s(plan(3, num_groups=1)) == 2 + 3 * 0.125 + 0.5  # three sequences of one request
    # A chunk is a sequence in the step, however many tokens it has.
    assert cost.step_s(plan(0, (64,))) == 1 + 16 + 0.125 + 0.5


def test_every_token_is_exchanged_between_devices():
    cost = dataclasses.replace(PLAIN, exchange_token_s=0.0625)
    assert cost.step_s(plan(2, (6,))) == 1 + 2 + 8 * 0.0625
    assert cost.step_s(plan(1)) == 2 + 0.0625, "beside the larger of weights and compute, not inside it"


def test_reading_the_context():
    cost = dataclasses.replace(PLAIN, kv_token_s=0.0625, page_read_s=0.25)
    assert cost.step_s(plan(1, context_tokens=16, context_pages=2)) == 2 + 1 + 0.5
    assert cost.fixed_s(plan(1, context_tokens=16, context_pages=2)) == 2


def test_copies_and_swaps_are_added():
    cost = dataclasses.replace(PLAIN, page_copy_s=0.125, swap_out_page_s=0.5, swap_in_page_s=0.25)
    moves = {"swap_out": ((1, 0), (2, 1), (3, 2)), "swap_in": ((4, 4),), "copies": ((5, 6), (7, 8))}
    assert cost.transfer_s(plan(1, **moves)) == 3 * 0.5 + 0.25 + 2 * 0.125
    assert cost.step_s(plan(1, **moves)) == 2 + 2.0
    assert cost.step_s(plan(0, (), swap_out=((1, 0),))) == 0.5, "a plan that runs no model step costs its swaps only"


def test_swapped_bytes_cross_the_link_while_the_step_computes():
    cost = dataclasses.replace(PLAIN, swap_out_page_s=0.125, swap_out_link_s=0.75, swap_in_link_s=0.5)
    two = ((1, 0), (2, 1))
    assert cost.link_s(plan(1, swap_out=two)) == 1.5
    assert cost.step_s(plan(1, swap_out=two)) == 2 + 0.25, "hidden behind a step of two seconds, but for its calls"
    assert cost.step_s(plan(1, swap_out=two, swap_in=((3, 3), (4, 4)))) == 2.5 + 0.25, "no less than the link takes"
    assert cost.step_s(plan(0, (), swap_out=two)) == 1.5 + 0.25, "nothing to hide behind"


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(CostModel)])
@pytest.mark.parametrize("value", [-1e-9, float("inf"), float("nan")])
def test_times_are_finite_and_not_negative(field, value):
    with pytest.raises(ValueError, match=f"CostModel.{field} is a time in seconds"):
        dataclasses.replace(PLAIN, **{field: value})


# --- the executor -------------------------------------------------------------------------------------------------


def test_the_clock_adds_up():
    executor = CostExecutor(PLAIN)
    assert executor.clock_s == 0
    assert executor.execute(plan(1)) == StepResult(1)
    executor.execute(plan(0, (8,)))
    assert executor.clock_s == 2 + 3


def test_a_horizon_is_the_sum_of_its_steps():
    cost = dataclasses.replace(PLAIN, kv_token_s=0.0625, page_read_s=0.25, page_copy_s=4.0)
    executor = CostExecutor(cost)
    # Two sequences read 16 and 18 and 20 ... tokens; pages 2, then 2 + 0, 2 + 0 + 1, 2 + 0 + 1 + 0, ...
    result = executor.execute(plan(2, horizon=5, context_tokens=16, context_pages=2, growth=(0, 1), copies=((0, 1),)))
    assert result.steps == 5
    tokens = 16 + 18 + 20 + 22 + 24
    pages = 2 + 2 + 3 + 3 + 4
    assert executor.clock_s == 5 * 2 + 4.0 + 0.0625 * tokens + 0.25 * pages


def test_a_horizon_without_page_reads():
    executor = CostExecutor(dataclasses.replace(PLAIN, kv_token_s=0.5))
    assert executor.execute(plan(3, horizon=3, context_tokens=10)).steps == 3
    assert executor.clock_s == 3 * 2 + 0.5 * (10 + 13 + 16)


@pytest.mark.parametrize("growth", [(), (0,), (1, 0)])
@pytest.mark.parametrize(
    ("until_s", "steps"),
    [
        (-1.0, 1),  # a step that was planned always runs
        (0.0, 1),
        (2.0, 1),  # exactly at a boundary: no further step begins
        (2.5, 2),
        (4.0, 2),
        (4.5, 3),
        (1e9, 10),
    ],
)
def test_a_horizon_is_left_at_the_first_boundary_at_or_after_until(growth, until_s, steps):
    executor = CostExecutor(PLAIN)
    executor.until_s = until_s
    assert executor.execute(plan(1, horizon=10, growth=growth)) == StepResult(steps)
    assert executor.clock_s == 2 * steps


def test_the_clock_goes_on_from_where_it_stands():
    executor = CostExecutor(PLAIN)
    executor.clock_s = 100.0
    executor.until_s = 103.0
    assert executor.execute(plan(1, horizon=10)).steps == 2
    assert executor.clock_s == 104


def test_beam_groups_are_given_parents():
    class Fixed:
        def parents(self, width):
            return (0,) * width

    executor = CostExecutor(PLAIN, Fixed())
    result = executor.execute(plan(5, beams=(("a", 2), (7, 3))))
    assert result == StepResult(1, parents={"a": (0, 0), 7: (0, 0, 0)})
    assert executor.execute(plan(1)).parents is None


def test_uniform_beams_are_seeded():
    def draws(seed):
        beams = UniformBeams(seed)
        return [beams.parents(width) for width in (2, 4, 6) * 50]

    assert draws(0) == draws(0)
    assert draws(0) != draws(1)
    assert [UniformBeams().parents(4), UniformBeams(0).parents(4)] == [UniformBeams(0).parents(4)] * 2


def test_uniform_beams_are_the_same_on_every_python():
    """``random.Random.random`` is frozen by Python's documentation; these values are literals on purpose."""
    beams = UniformBeams(0)
    assert [beams.parents(4) for _ in range(3)] == [(3, 3, 1, 1), (2, 1, 3, 1), (1, 2, 3, 2)]


@pytest.mark.parametrize("width", [2, 4, 6])
def test_uniform_beams_favour_no_parent(width):
    beams, rounds = UniformBeams(3), 3000
    counts = Counter(parent for _ in range(rounds) for parent in beams.parents(width))
    assert sorted(counts) == list(range(width))
    # Each count has a standard deviation below sqrt(rounds): five of them leave no room for chance.
    assert all(abs(count - rounds) < 5 * rounds**0.5 for count in counts.values())
