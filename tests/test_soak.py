"""Many random requests, with aborts, forks, stops and pools that are too small: nothing leaks, nothing is forgotten.

The first half runs the scheduler and its pools on a simulated device, with conservation checked before and after
every step. CI runs a fifth of it; ``pytest tests/test_soak.py --soak`` runs all 100,000 requests. The second half runs
2,000 requests through the real engine on a tiny model, and every output is compared with that of a model without pages.
"""

from __future__ import annotations

import functools
import random
from collections import Counter

import pytest

from paxkv.config import CacheConfig, SchedulerConfig
from paxkv.request import Request
from paxkv.sampling import SamplingParams
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.events import RequestRejected
from paxkv.sched.memory import Memory
from paxkv.sched.reserve import ReservedMemory
from paxkv.sched.scheduler import Scheduler
from paxkv.sched.static import StaticMemory
from paxkv.testing.fake_model import FakeModel
from paxkv.testing.force import ForceRandomly
from paxkv.testing.naive_beam import naive_beam
from paxkv.testing.overlapped import OverlappedRun
from paxkv.testing.tiny_engine import tiny_dense, tiny_engine

LIMIT = 40
"""Longest sequence."""
SYSTEMS, REQUESTS = 10, 500
"""Systems of one test case, and the requests each of them serves."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "batch" in metafunc.fixturenames:
        metafunc.parametrize("batch", range(20 if metafunc.config.getoption("soak") else 4))


def random_memory(draw: random.Random) -> Memory:
    page_size = draw.choice([1, 2, 4, 8, 16])
    kind = draw.choice(["paged"] * 6 + ["reserved", "static"])
    if kind == "reserved":
        return ReservedMemory(
            max(3, draw.choice([45, 90, 150]) // page_size), page_size, LIMIT, draw.choice(["max", "pow2", "oracle"])
        )
    if kind == "static":
        return StaticMemory(draw.choice([2, 4, 6]), LIMIT + 8, LIMIT + 4)
    return PagedMemory(
        CacheConfig(
            draw.choice([1, 1, 2, 3]) * -(-LIMIT // page_size) + draw.randint(0, 2),
            page_size,
            num_host_pages=draw.choice([0, 3, 100]),
            watermark=draw.choice([0, 0.01, 0.3]),
            prefix_caching=draw.random() < 0.6,
            eviction=draw.choice(["lru", "fifo", "lfu", "mru"]),
        )
    )


def random_request(draw: random.Random, request_id: int) -> Request:
    num_seqs = draw.choice([1, 1, 1, 1, 2, 3, 4])
    prompt = draw.randint(1, 12) if draw.random() < 0.9 else draw.randint(13, LIMIT + 1)
    ids = tuple([0] * (prompt // 2) + [draw.randrange(3) for _ in range(prompt - prompt // 2)])
    return Request(
        request_id,
        prompt,
        draw.randint(1, 10) if draw.random() < 0.9 else draw.randint(9, LIMIT),
        num_seqs=num_seqs,
        beam=num_seqs > 1 and draw.random() < 0.4,
        prompt_ids=ids if draw.random() < 0.7 else None,
        salt=draw.choice([None, None, "x"]),
    )


def soak(seed: int, count: int) -> Counter[str]:
    """One random system under ``count`` random requests; returns what happened how often."""
    draw = random.Random(seed)
    memory = random_memory(draw)
    config = SchedulerConfig(
        max_num_seqs=draw.choice([4, 8, 16]),
        max_num_batched_tokens=draw.choice([8, 20, 64]),
        max_model_len=LIMIT,
        step_kind=draw.choice(["mixed", "prompts_only", "chunked"]),
        preemption=draw.choice(["auto", "recompute", "swap"]),
        max_horizon=draw.choice([1, 3, 8]),
    )
    force = ForceRandomly(seed) if draw.random() < 0.2 else None
    scheduler = Scheduler(config, memory, force=force, check=True)
    model = FakeModel(seed, vocab=50, end_share=draw.choice([0, 0.05, 0.2]))
    run = OverlappedRun(scheduler, model, seed, commits=draw.choice([0, 0.5, 1]), lag=draw.choice([0, 1, 1, 2]))
    calm = draw.choice([0.3, 0.6, 0.85])
    taken: dict[int, Request] = {}
    refused: dict[int, str] = {}
    aborted: set[int] = set()
    for index in range(count):
        request = random_request(draw, index)
        try:
            run.submit(request)
        except RequestRejected as refusal:
            refused[index] = refusal.reason
        else:
            taken[index] = request
        while len(scheduler.groups()) > 20 or draw.random() < calm:
            if run.step() is None:
                break
        if draw.random() < 0.05:
            victim = draw.choice([index, *(group.request.request_id for group in scheduler.groups())])
            if run.abort(victim):
                aborted.add(victim)
    outputs = run.run()

    for index, request in taken.items():
        if index not in aborted:
            target = min(request.max_tokens, LIMIT - request.prompt_tokens)
            assert outputs[index] == model.outputs(request, target), f"seed {seed}, request {index}"
    assert all(len(reason) > 20 for reason in refused.values())
    assert sorted([*run.finished, *aborted, *refused]) == list(range(count))
    assert sorted(run.told) == sorted(run.finished), "the scheduler names each request that finished, once"
    assert memory.num_free_pages == memory.num_pages
    counters = scheduler.counters
    assert (counters.finished, counters.failed) == (len(run.finished), len(aborted))
    if isinstance(memory, PagedMemory):
        assert memory.host.num_free == memory.host.num_pages
        assert sorted(memory.pool.owners) == [0] * memory.num_pages
    return Counter(
        requests=count,
        aborted=len(aborted),
        refused=len(refused),
        preempted=counters.preemptions,
        swapped=counters.swapped_in_pages,
        found=counters.prefix_hits,
        skipped=run.steps - run.plans,
    )


def test_scheduler(batch):
    """Ten systems, none like another."""
    happened = sum((soak(seed, REQUESTS) for seed in range(batch * SYSTEMS, (batch + 1) * SYSTEMS)), Counter())
    assert happened["requests"] == SYSTEMS * REQUESTS
    wanted = ("aborted", "refused", "preempted", "swapped", "found", "skipped")
    rare = {name: happened[name] for name in wanted if happened[name] < 50}
    assert not rare, f"of {SYSTEMS * REQUESTS} requests only {rare}: the soak is too tame to show anything"


# --- the real engine ------------------------------------------------------------------------------

CATALOGUE = 100
"""Different requests, drawn again and again, so that the slow oracle answers each only once."""


@functools.cache
def catalogue() -> list[tuple[list[int], SamplingParams]]:
    draw = random.Random(0)
    entries = []
    for index in range(CATALOGUE):
        start = [7, 8, 9, 10, 11, 12, 13, 14][: draw.choice([0, 0, 4, 8])]
        ids = start + [draw.randrange(256) for _ in range(draw.randint(1, 12))]
        choices = {"max_tokens": draw.randint(1, 16), "logprobs": 0, "seed": index}
        kind = draw.choice(["greedy", "greedy", "sampled", "sampled", "several", "beams", "penalty"])
        if draw.random() < 0.4:
            choices["stop_ids"] = tuple(draw.sample(range(256), 30))
        if kind == "beams":
            choices |= {"temperature": 0.0, "beam_width": draw.choice([2, 3]), "n": 2, "logprobs": None}
        elif kind == "greedy":
            choices |= {"temperature": 0.0}
        elif kind == "several":
            choices |= {"n": draw.choice([2, 3, 4])}
        elif kind == "penalty":
            choices |= {"presence_penalty": 0.5, "min_tokens": draw.randint(0, choices["max_tokens"])}
        entries.append((ids, SamplingParams(**choices)))
    return entries


@functools.cache
def answer(index: int) -> list[tuple[int, ...]]:
    """What each sequence of a request of the catalogue must be."""
    ids, params = catalogue()[index]
    if params.beam_width:
        logits, width = tiny_dense().next_logits, params.beam_width
        found = naive_beam(logits, ids, width, params.max_tokens, end_ids=params.stop_ids)
        return [beam.token_ids for beam in found[: params.n]]
    return [tiny_dense().generate(ids, params, index=which).token_ids for which in range(params.n)]


ENGINES = {
    "recompute": {},
    "swap": {"num_host_pages": 20, "prefix_caching": True, "limits": {"preemption": "swap"}},
    "forced": {"num_host_pages": 10, "prefix_caching": True, "force": lambda: ForceRandomly(1, preempt=0.05)},
    "nothing overlaps": {"num_host_pages": 20, "overlap": False, "limits": {"step_kind": "mixed"}},
}


@pytest.mark.parametrize("system", ENGINES)
def test_engine(system):
    """500 requests over four seats and 14 pages of four tokens; conservation is checked in every step."""
    options = dict(ENGINES[system])
    limits = {"max_model_len": 40, "max_num_batched_tokens": 24, **options.pop("limits", {})}
    force = options.pop("force", lambda: None)()
    engine = tiny_engine(limits=limits, num_pages=14, force=force, **options)
    draw, count = random.Random(system), 500
    wanted: dict[int, int] = {}  # request → what it is in the catalogue
    done: dict[int, object] = {}
    refused: dict[int, str] = {}

    def take(outputs) -> None:
        for output in outputs:
            assert output.request_id not in done, "an output came after the last one"
            if output.finished:
                done[output.request_id] = output

    for name in range(count):
        which = draw.randrange(CATALOGUE)
        ids, params = catalogue()[which]
        if draw.random() < 0.05:
            ids, params = draw.choice([([], params), ([1] * 40, params), ([256], params), (ids, SamplingParams(n=5))])
        try:
            engine.add_request(ids, params, request_id=name)
        except RequestRejected as refusal:
            refused[name] = refusal.reason
        else:
            wanted[name] = which
        while len(engine.scheduler.groups()) > 12 or draw.random() < 0.4:
            if not engine.has_work:
                break
            take(engine.step())
        if draw.random() < 0.05:
            engine.abort(draw.choice([name, *(group.request.request_id for group in engine.scheduler.groups())]))
    for _ in range(20_000):
        if not engine.has_work:
            break
        take(engine.step())

    assert not engine.has_work, engine.scheduler.dump()
    assert sorted([*done, *refused]) == list(range(count))
    assert all(len(reason) > 20 for reason in refused.values())
    aborted = 0
    for name, output in done.items():
        want, got = answer(wanted[name]), [completion.token_ids for completion in output.outputs]
        if "abort" in {completion.finish_reason for completion in output.outputs} or not got:
            aborted += 1
            assert all(whole[: len(part)] == part for part, whole in zip(got, want, strict=False))
        else:
            assert got == want, f"request {name}, {catalogue()[wanted[name]]}"
    assert 5 < aborted < 60
    assert len(refused) > 5
    counters = engine.counters
    assert counters.preemptions > 20
    assert len(engine.inflight.lanes) < 100, "what belongs to finished requests stays"
    assert engine.memory.num_free_pages == engine.memory.num_pages
    assert engine.memory.host.num_free == engine.memory.host.num_pages
