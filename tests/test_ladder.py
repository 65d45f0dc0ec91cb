"""The equality ladder: whatever the engine does with pages, the tokens are those of a model that has none.

Every rung serves the same requests, greedy and sampled, in another way. Tokens must be equal; log-probabilities must
lie within 1e-5 of the largest logit of the dense answer; and where the device sees arrays of equal shapes, two rungs
must agree to the bit.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools

import numpy as np
import pytest

from paxkv.config import CacheConfig, SchedulerConfig
from paxkv.engine import Engine
from paxkv.request import Request
from paxkv.sampling import SamplingParams
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.draft import Draft
from paxkv.sched.reserve import ReservedMemory
from paxkv.sched.scheduler import Scheduler
from paxkv.sched.static import StaticMemory
from paxkv.sim.cost_model import CostModel
from paxkv.sim.simulate import simulate
from paxkv.testing.dense import Answer, log_softmax
from paxkv.testing.naive_beam import naive_beam
from paxkv.testing.tiny_engine import LIMITS, NUM_PAGES, PAGE_SIZE, ForceBy, tiny_dense, tiny_engine
from paxkv.testing.witness import Witness

VOCAB = 256
TOKENS = 14
LENGTHS = (1, 5, 16, 17, 31, 37)
"""Prompts: one token, less than a page, full pages, one token more, one less, the longest."""


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([length, seed]).integers(0, VOCAB, length).tolist()


def sampled(seed: int, **changes) -> SamplingParams:
    choices = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "max_tokens": TOKENS, "logprobs": VOCAB}
    return SamplingParams(**{**choices, "seed": seed, **changes})


def greedy(**changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": TOKENS, "logprobs": VOCAB, **changes})


PROMPTS = [prompt(length) for length in LENGTHS]
PARAMS = [greedy() if index % 2 else sampled(index) for index in range(len(PROMPTS))]
GREEDY = [greedy()] * len(PROMPTS)


def ladder_engine(**options) -> Engine:
    return tiny_engine(max_logprobs=VOCAB, **options)


@functools.cache
def dense(ids: tuple[int, ...], params: SamplingParams, index: int = 0) -> Answer:
    return tiny_dense().generate(ids, params, index=index)


def distribution(position) -> np.ndarray:
    """[V] log-probabilities that the engine reported for one token."""
    row = np.full(VOCAB, np.nan)
    for token, logprob in position.top:
        row[token] = logprob
    return row


def check(completion, answer: Answer) -> None:
    """The completion is the dense answer."""
    assert completion.token_ids == answer.token_ids
    assert completion.finish_reason == answer.reason
    if completion.logprobs is not None:
        got = np.stack([distribution(position) for position in completion.logprobs])
        tolerance = 1e-5 * np.abs(answer.logits).max()
        np.testing.assert_allclose(got, log_softmax(answer.logits), rtol=0, atol=tolerance)
        chosen = [position.logprob for position in completion.logprobs]
        np.testing.assert_allclose(chosen, got[range(len(chosen)), answer.token_ids], rtol=0, atol=1e-6)


def check_all(outputs, params=PARAMS) -> None:
    """The outputs are those of the ladder's requests."""
    for output, ids, choice in zip(outputs, PROMPTS, params, strict=True):
        check(output.outputs[0], dense(tuple(ids), choice))


def bits(completion) -> list:
    return [(position.token_id, position.logprob, position.top) for position in completion.logprobs]


def serve(engine: Engine, prompts, params, *, before_step=lambda step: None) -> list:
    """Serves requests step by step; returns the finished outputs in order."""
    names = [engine.add_request(ids, choice) for ids, choice in zip(prompts, params, strict=True)]
    done = {}
    for step in range(1000):
        if not engine.has_work:
            return [done[name] for name in names]
        before_step(step)
        done |= {output.request_id: output for output in engine.step() if output.finished}
    raise AssertionError(f"not done after 1000 steps:\n{engine.scheduler.dump()}")


# --- one way against the dense model --------------------------------------------------------------

RUNGS = {
    "plain": {},
    "nothing overlaps": {"overlap": False},
    "prefix index": {"prefix_caching": True},
    "Orca's longest": {"memory": lambda: ReservedMemory(NUM_PAGES, PAGE_SIZE, LIMITS["max_model_len"], "max")},
    "Orca's power of two": {"memory": lambda: ReservedMemory(NUM_PAGES, PAGE_SIZE, LIMITS["max_model_len"], "pow2")},
    "Orca's oracle": {"memory": lambda: ReservedMemory(NUM_PAGES, PAGE_SIZE, LIMITS["max_model_len"], "oracle")},
}
"""Shapes of the device's arrays are those of the plain engine, so each step was compiled before."""


@functools.cache
def plain_bits() -> list:
    outputs = ladder_engine().generate(PROMPTS, PARAMS)
    check_all(outputs)
    return [bits(output.outputs[0]) for output in outputs]


@pytest.mark.parametrize("rung", RUNGS)
def test_same_shapes(rung):
    """The same steps over other pages, planned or read at another time: not one bit changes."""
    options = dict(RUNGS[rung])
    if "memory" in options:
        options["memory"] = options["memory"]()
    outputs = ladder_engine(**options).generate(PROMPTS, PARAMS)
    check_all(outputs)
    assert [bits(output.outputs[0]) for output in outputs] == plain_bits()


TWO = {"max_num_seqs": 2}
OTHER_SHAPES = {
    **{f"page size {size}": {"page_size": size, "num_pages": 256 // size, "limits": TWO} for size in (1, 16, 64)},
    **{f"horizon {steps}": {"limits": {**TWO, "max_horizon": steps}} for steps in (1, 8)},
    **{
        f"{tokens} tokens, {seqs} sequences": {"limits": {"max_num_batched_tokens": tokens, "max_num_seqs": seqs}}
        for tokens, seqs in ((5, 3), (40, 1))
    },
    "whole prompts": {"limits": {**TWO, "step_kind": "mixed", "max_num_batched_tokens": 38}},
    "prompts alone": {"limits": {**TWO, "step_kind": "prompts_only", "max_num_batched_tokens": 38}},
    "pool too small, recompute": {"num_pages": 13, "limits": TWO},
    "pool too small, swap": {"num_pages": 13, "num_host_pages": 64, "limits": {**TWO, "preemption": "swap"}},
    "a batch at a time": {"memory": lambda: StaticMemory(4, LIMITS["max_model_len"], LIMITS["max_model_len"])},
    "attention by the book": {"implementation": "reference", "limits": TWO},
}


@pytest.mark.parametrize("rung", OTHER_SHAPES)
def test_other_shapes(rung):
    """Greedy only: each of these is compiled for itself."""
    options = dict(OTHER_SHAPES[rung])
    if "memory" in options:
        options["memory"] = options["memory"]()
    engine = ladder_engine(**options)
    check_all(engine.generate(PROMPTS, GREEDY), GREEDY)
    if "too small" in rung:
        assert engine.counters.preemptions > 0
        assert (engine.counters.swapped_in_pages > 0) == ("swap" in rung)


@pytest.fixture(scope="module")
def engine() -> Engine:
    return ladder_engine()


def test_alone_is_in_a_batch(engine):
    for ids, params in zip(PROMPTS, PARAMS, strict=True):
        (output,) = engine.generate([ids], [params])
        check(output.outputs[0], dense(tuple(ids), params))


@pytest.mark.parametrize("order", [(5, 4, 3, 2, 1, 0), (2, 0, 5, 1, 4, 3)])
def test_order_does_not_matter(engine, order):
    outputs = engine.generate([PROMPTS[i] for i in order], [PARAMS[i] for i in order])
    for index, output in zip(order, outputs, strict=True):
        check(output.outputs[0], dense(tuple(PROMPTS[index]), PARAMS[index]))


def test_neighbours_do_not_matter(engine):
    """Other tokens in the other rows, shapes equal: not one bit changes."""
    params = [sampled(1), greedy(), sampled(3)]
    first = engine.generate([prompt(17), prompt(9), prompt(6)], params)
    second = engine.generate([prompt(17), prompt(9, seed=1), prompt(6, seed=1)], params)
    assert bits(first[0].outputs[0]) == bits(second[0].outputs[0])
    assert bits(first[1].outputs[0]) != bits(second[1].outputs[0])


def test_what_the_pool_held_does_not_matter(engine):
    """Other pages with other content in them, shapes equal: not one bit changes."""
    engine.generate([prompt(30, seed=2)] * 3, greedy())
    again = engine.generate(PROMPTS, PARAMS)
    assert [bits(output.outputs[0]) for output in again] == plain_bits()


# --- a prompt in parts ----------------------------------------------------------------------------


def splits(tokens: int) -> list[list[int]]:
    """Whole; cut once at each place; one by one; and cut at random places, few or many."""
    draw = np.random.default_rng(1)
    cuts = [[], *([at] for at in range(1, tokens)), [15, 16], [*range(1, tokens)]]
    cuts += [sorted(draw.choice(tokens - 1, count, replace=False) + 1) for count in (2, 3, 5, 8, 13, 21) for _ in "ab"]
    return [np.diff([0, *places, tokens]).tolist() for places in cuts]


def test_every_split_of_a_prompt(monkeypatch):
    """37 tokens, cut in all the ways in which a page or a step can begin and end."""
    ids, params = PROMPTS[-1], greedy(max_tokens=3)
    answer = tiny_dense().generate(ids, params)
    take, ends, plans = Draft._take_chunks, [], []
    engine = ladder_engine(limits={"max_num_batched_tokens": 40, "max_num_seqs": 1}, on_plan=plans.append)

    def take_chunks(self, group, budget):
        done = group.jobs[0][1]
        return take(self, group, min(budget, next(end for end in ends if end > done) - done))

    monkeypatch.setattr(Draft, "_take_chunks", take_chunks)
    for parts in splits(len(ids)):
        plans.clear()
        ends[:] = np.cumsum(parts).tolist()
        (output,) = engine.generate([ids], [params])
        check(output.outputs[0], answer)
        assert [chunk.count for plan in plans for chunk in plan.prefills] == parts


# --- preempted at every step ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def forced() -> tuple[Engine, ForceBy]:
    """Plans cover one step each; what is preempted, and when, is up to the test."""
    force = ForceBy()
    return ladder_engine(num_host_pages=NUM_PAGES, force=force), force


@pytest.fixture(scope="module")
def undisturbed(forced) -> tuple[int, list]:
    """How many steps the ladder's requests take, and their bits."""
    engine, force = forced
    force.choose = lambda step, running: []
    steps = []
    outputs = serve(engine, PROMPTS, PARAMS, before_step=steps.append)
    check_all(outputs)
    return len(steps), [bits(output.outputs[0]) for output in outputs]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("victims", ["first", "last", "all"])
def test_preempted_at_every_step(forced, undisturbed, mode, victims):
    engine, force = forced
    seen = 0
    for at in range(1, undisturbed[0]):
        begin = engine.scheduler.step

        def choose(step, running, at=at, begin=begin):
            if step != begin + at:
                return []
            chosen = {"first": running[:1], "last": running[-1:], "all": running}[victims]
            return [(group, mode) for group in chosen]

        force.choose = choose
        before = engine.counters.preemptions
        check_all(serve(engine, PROMPTS, PARAMS))
        seen += engine.counters.preemptions > before
    assert seen >= undisturbed[0] - 2


def test_swapped_out_and_in_keeps_every_bit(forced):
    """Alone, so that the shapes stay equal."""
    engine, force = forced
    force.choose = lambda step, running: []
    want = bits(serve(engine, PROMPTS[-1:], PARAMS[-1:])[0].outputs[0])
    moved = engine.counters.swapped_in_pages
    force.choose = lambda step, running: [(group, "swap") for group in running if group.decoding and step % 3 == 0]
    assert bits(serve(engine, PROMPTS[-1:], PARAMS[-1:])[0].outputs[0]) == want
    assert engine.counters.swapped_in_pages > moved + 30


# --- found in the cache ---------------------------------------------------------------------------


def test_cached_is_cold():
    engine = ladder_engine(prefix_caching=True)
    for _ in range(3):
        check_all(engine.generate(PROMPTS, PARAMS))
    assert engine.counters.prefix_hits == 2 * sum((length - 1) // PAGE_SIZE * PAGE_SIZE for length in LENGTHS)
    for index, output in enumerate(engine.generate(PROMPTS, PARAMS)):
        assert output.cached_tokens == (LENGTHS[index] - 1) // PAGE_SIZE * PAGE_SIZE


def test_output_found_in_the_cache_is_computed():
    """A second turn: prompt, answer and more. The answer's pages are found; what follows is what a cold run gives."""
    engine = ladder_engine(prefix_caching=True)
    first = engine.generate(PROMPTS[:5], PARAMS[:5])
    turns = [[*ids, *output.token_ids, 7, 8] for ids, output in zip(PROMPTS, first, strict=False)]
    outputs = engine.generate(turns, PARAMS[:5])
    for ids, params, output in zip(turns, PARAMS, outputs, strict=False):
        check(output.outputs[0], tiny_dense().generate(ids, params))
        stored = len(ids) - 3  # the last token of the answer was never computed
        assert output.cached_tokens == stored // PAGE_SIZE * PAGE_SIZE


# --- several sequences ----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 16, 17, 37])
def test_forked_samples_are_separate_runs(engine, length):
    """n samples of one prompt are the sequences that each index would give by itself."""
    ids, params = prompt(length, seed=5), sampled(11, n=3)
    (output,) = engine.generate([ids], [params])
    want = [tiny_dense().generate(ids, params, index=index) for index in range(3)]
    for index, completion in enumerate(output.outputs):
        assert completion.index == index
        check(completion, want[index])
    assert len({answer.token_ids for answer in want}) == 3
    (alone,) = engine.generate([ids], [dataclasses.replace(params, n=1)])
    check(alone.outputs[0], want[0])


def check_beams(output, ids, params, end_ids=()) -> None:
    want = naive_beam(
        tiny_dense().next_logits,
        ids,
        params.beam_width,
        params.max_tokens,
        end_ids=end_ids,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )
    got = [(completion.token_ids, completion.score) for completion in output.outputs]
    assert [ids for ids, _ in got] == [beam.token_ids for beam in want[: params.n]]
    np.testing.assert_allclose([score for _, score in got], [beam.score for beam in want[: params.n]], atol=1e-4)


def beams(width: int, **changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "beam_width": width, "n": width, "max_tokens": TOKENS, **changes})


@pytest.mark.parametrize("length", [1, 16, 37])
@pytest.mark.parametrize(
    "changes", [{}, {"length_penalty": 0.0}, {"length_penalty": 2.0}, {"early_stopping": True}], ids=str
)
@pytest.mark.parametrize("width", [2, 4])
def test_beams_are_a_naive_search(engine, width, length, changes):
    """Ends are frequent: a quarter of all ids end a sequence."""
    ids, params = prompt(length, seed=9), beams(width, stop_ids=tuple(range(0, VOCAB, 4)), **changes)
    (output,) = engine.generate([ids], [params])
    check_beams(output, ids, params, end_ids=params.stop_ids)
    (never,) = engine.generate([ids], [dataclasses.replace(params, stop_ids=())])
    check_beams(never, ids, dataclasses.replace(params, stop_ids=()))


# --- every pair of mechanisms ---------------------------------------------------------------------

MECHANISMS = ("recompute", "swap", "evict", "cached", "fork", "copied", "beam", "chunks", "stop", "abort", "penalty")
APART = {("fork", "beam"), ("beam", "penalty"), ("stop", "abort")}
"""No request can go through both; two requests do, side by side."""


@pytest.fixture(scope="module")
def everything() -> tuple[Engine, ForceBy, Witness]:
    force, witness = ForceBy(), Witness()
    engine = ladder_engine(
        prefix_caching=True,
        num_host_pages=NUM_PAGES,
        force=force,
        on_plan=lambda plan: witness.plan(plan, engine.scheduler.groups()),
        on_step=lambda start, end, plan, result, outcome: witness.result(result),
    )
    return engine, force, witness


def requests_for(pair: tuple[str, str], seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Five requests, of which one or more can go through both."""
    common, requests = prompt(13, seed=seed), []
    for index in range(5):
        ids = [*common, *prompt(1 + index, seed=seed)] if "cached" in pair else prompt(9 + index, seed=seed)
        choice = sampled(index, logprobs=0) if index % 2 else greedy(logprobs=0)
        if "chunks" in pair:
            ids = [*ids, *prompt(23, seed=seed)]
        if "beam" in pair and index in (0, 4):
            choice = beams(2 + index // 2, n=2, max_tokens=TOKENS)
        elif {"fork", "copied"} & {*pair} and index in (1, 3):
            choice = dataclasses.replace(choice, n=3 if index == 1 else 2)
        if "penalty" in pair and index in (1, 2, 3):
            choice = dataclasses.replace(choice, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2)
        if "stop" in pair and index > 0:
            choice = dataclasses.replace(choice, stop_ids=tuple(range(index, VOCAB, 9)))
        requests.append((ids, choice))
    return requests


@pytest.mark.parametrize("pair", [*itertools.combinations(MECHANISMS, 2)], ids="-".join)
def test_every_pair(everything, pair):
    """Two mechanisms at once, over and over in one engine: some request went through both, and no token differs."""
    engine, force, witness = everything
    witness.forget()
    evicted = engine.memory.cache.evictions
    modes = [mode for mode in pair if mode in ("recompute", "swap")]

    def choose(step, running):
        # A group that is computed again must be left in peace long enough to get somewhere.
        due = [group for group in running if (step + group.order) % (4 if group.decoding else 17) == 0]
        return [(group, modes[step // 4 % len(modes)]) for group in due] if modes else []

    force.choose = choose
    requests = requests_for(pair, MECHANISMS.index(pair[0]) * len(MECHANISMS) + MECHANISMS.index(pair[1]))
    names = [engine.add_request(ids, choice) for ids, choice in requests]
    happened: dict[str, set] = witness.seen | {"abort": set(), "stop": set()}
    happened["penalty"] = {name for name, (_, choice) in zip(names, requests, strict=True) if choice.needs_history}
    done = {}
    for step in range(1000):
        if not engine.has_work:
            break
        if "evict" in pair:
            force.pages = step % 3
        done |= {output.request_id: output for output in engine.step() if output.finished}
        if "abort" in pair and len(happened["abort"]) < 2:
            met = happened.get(pair[0] if pair[1] == "abort" else pair[1], set()) or {names[step % 5]}
            happened["abort"] |= {name for name in met if step > 4 and engine.abort(name)}
    assert not engine.has_work, engine.scheduler.dump()
    force.choose = lambda step, running: []

    for name, (ids, choice) in zip(names, requests, strict=True):
        reasons = {completion.finish_reason for completion in done[name].outputs}
        happened["stop"] |= {name} if "stop" in reasons else set()
        if name in happened["abort"]:
            assert reasons <= {"abort", "stop", "length"}
        elif choice.beam_width:
            check_beams(done[name], ids, choice, end_ids=choice.stop_ids)
            continue
        for index, completion in enumerate(done[name].outputs):
            want = dense(tuple(ids), choice, index)
            if completion.finish_reason == "abort":
                assert completion.token_ids == want.token_ids[: len(completion.token_ids)]
            else:
                assert (completion.token_ids, completion.finish_reason) == (want.token_ids, want.reason)
    if "evict" in pair:
        happened["evict"] = {*names} if engine.memory.cache.evictions > evicted else set()  # of nobody: beside all
    first, second = (happened[mechanism] for mechanism in pair)
    assert (first and second) if pair in APART else (first & second), happened
    assert engine.memory.num_free_pages == engine.memory.num_pages
    assert engine.memory.host.num_free == engine.memory.host.num_pages


# --- the engine's plans are the simulator's -------------------------------------------------------

COST = CostModel(floor_s=1.0, weights_s=1.0, token_s=0.25)
SYSTEMS = {
    "roomy": lambda: PagedMemory(CacheConfig(NUM_PAGES, PAGE_SIZE, watermark=0.0)),
    "tight, recompute": lambda: PagedMemory(CacheConfig(13, PAGE_SIZE, watermark=0.0)),
    "tight, swap": lambda: PagedMemory(CacheConfig(13, PAGE_SIZE, num_host_pages=NUM_PAGES, watermark=0.0)),
    "Orca's power of two": lambda: ReservedMemory(NUM_PAGES, PAGE_SIZE, LIMITS["max_model_len"], "pow2"),
    "static batches": lambda: StaticMemory(4, LIMITS["max_model_len"], LIMITS["max_model_len"]),
}


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.parametrize("kind", ["at once", "over time"])
def test_engine_and_simulator_make_the_same_plans(system, kind):
    """Every plan is the same value: who runs, which pages, what moves, for how many steps.

    Requests that arrive over time are handed to the engine on the simulator's clock, before the plan that could first
    see them; plans then cover one step each, since an engine cannot know of an arrival beforehand.
    """
    draw = np.random.default_rng(3)
    wide = system in ("roomy", "Orca's power of two")
    requests = [
        Request(
            index,
            prompt_tokens=int(draw.integers(1, 31)),
            max_tokens=int(draw.integers(1, 20)),
            arrival_s=0.0 if kind == "at once" else index * 7.0,
            num_seqs=2 if wide and index % 4 == 3 else 1,
        )
        for index in range(12)
    ]
    force = None if kind == "at once" else ForceBy()
    preemption = "swap" if "swap" in system else "recompute"
    limits = {**LIMITS, **(TWO if "tight" in system else {}), "preemption": preemption}
    simulated = []
    simulate(
        requests,
        Scheduler(SchedulerConfig(**limits), SYSTEMS[system](), force=force),
        COST,
        on_step=lambda start, end, plan, result, outcome: simulated.append((start, plan, result.steps, outcome)),
    )

    real = []
    engine = ladder_engine(
        memory=SYSTEMS[system](),
        num_host_pages=NUM_PAGES,
        limits=limits,
        force=force,
        end_ids=range(VOCAB),
        on_step=lambda start, end, plan, result, outcome: real.append((plan, result.steps, outcome)),
    )
    waiting = list(requests)
    for start, *_ in simulated:
        while waiting and waiting[0].arrival_s <= start:
            request = waiting.pop(0)
            choices = {"max_tokens": request.max_tokens, "ignore_eos": True, "logprobs": 0}
            params = sampled(1, n=request.num_seqs, **choices) if request.num_seqs > 1 else greedy(**choices)
            engine.add_request(prompt(request.prompt_tokens), params, request_id=request.request_id)
        engine.step()
    while engine.has_work:
        engine.step()
    assert not waiting
    assert real == [(plan, steps, outcome) for _, plan, steps, outcome in simulated]
    if "tight" in system:
        assert any(plan.preempted for plan, *_ in real)
        assert any(plan.swap_in for plan, *_ in real) == ("swap" in system)
    if system == "roomy" and kind == "at once":
        assert max(steps for _, steps, _ in real) == 4
