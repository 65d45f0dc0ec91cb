"""What only a compiled, donating engine can get wrong: page ids, buckets, buffers that are gone."""

from __future__ import annotations

import itertools

import jax
import pytest

from paxkv.engine import EngineError
from paxkv.sampling import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.mark.parametrize("wrong", [-1, 16, 999])
def test_page_ids_outside_the_pool(make, prompt, dense, wrong):
    """A table that names a page which is not there is refused before the launch (public fault B24)."""
    engine = make(check=False)  # the scheduler's own check would see it first
    engine.add_request(prompt(20), GREEDY, request_id="a")
    engine.step()
    engine.scheduler.group("a").seqs[0].table[0] = wrong
    with pytest.raises(EngineError, match=rf"page ids must lie in 0\.\.15, a block table has {wrong}"):
        for _ in range(3):
            engine.step()
    (lost,) = engine.step()
    assert (lost.request_id, lost.outputs[0].finish_reason, lost.finished) == ("a", "error", True)
    (output,) = engine.generate([prompt(20)], GREEDY)
    assert output.token_ids == dense(prompt(20), GREEDY)


def test_every_page_has_a_place_in_every_layer(make):
    engine = make()
    layout = engine.executor.layout
    assert (layout.num_pages, layout.page_size) == (engine.memory.num_pages, engine.memory.page_size)
    assert engine.executor.pages.k.shape[:2] == (engine.model.num_layers, engine.memory.num_pages)


def test_nothing_compiles_after_warm_up(make, prompt, dense):
    """Every batch size and token count, with hits, preemption, swapping and sampling (B25). Odd limits on purpose."""
    engine = make(
        limits={"max_num_seqs": 3, "max_num_batched_tokens": 19, "preemption": "swap"},
        num_pages=9,
        num_host_pages=9,
        prefix_caching=True,
    )
    engine.warm_up(("greedy", "sample"))
    engine.log.forbid = True
    with_sampling = SamplingParams(temperature=1.0, seed=1, max_tokens=12)
    for length, count in itertools.product((1, 15, 16, 17, 18, 19, 20, 33), (1, 2, 3)):
        for params in (GREEDY, with_sampling):
            prompts = [prompt(length, seed=seed) for seed in range(count)]
            outputs = engine.generate(prompts, params)
            assert [output.token_ids for output in outputs] == [dense(ids, params) for ids in prompts]
    wide = SamplingParams(temperature=1.0, seed=2, n=2, max_tokens=30)
    outputs = engine.generate([prompt(40), prompt(33), prompt(20)], [wide, GREEDY, wide])
    assert [len(output.outputs) for output in outputs] == [2, 1, 2]
    assert engine.counters.preemptions > 0
    assert engine.counters.swapped_in_pages > 0
    assert engine.counters.prefix_hits > 0
    assert engine.log.after_warm_up == ()


def test_a_compilation_after_warm_up_is_told(make, prompt):
    """The test above can fail: what was not warmed up is an error that names the step."""
    engine = make(limits={"max_num_seqs": 3, "max_num_batched_tokens": 19}, num_pages=9)
    engine.log.warmed_up()
    engine.log.forbid = True
    with pytest.raises(EngineError, match=r"nothing may compile after warm-up: .*full"):
        engine.generate([prompt(5)], SamplingParams(temperature=1.0, presence_penalty=0.5, seed=0))


def leaves(engine) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(engine.executor.pages)]


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_step_that_raises(make, prompt, dense, monkeypatch, where):
    """The requests in flight end with ``error``; the next ones are served from a fresh pool (B26)."""
    engine = make(prefix_caching=True, num_host_pages=8)
    assert len({*leaves(engine)}) == len(leaves(engine)) == 2
    ids = prompt(20)
    assert engine.generate([ids], GREEDY)[0].token_ids == dense(ids, GREEDY)
    name = "run" if where == "before" else "fetch"
    method = getattr(engine.executor, name)

    def fails(*args, **options):
        if where == "after":
            method(*args, **options)
        monkeypatch.undo()
        raise RuntimeError("out of luck")

    first, second = engine.add_request(prompt(33), GREEDY), engine.add_request(prompt(9), GREEDY)
    engine.step()
    monkeypatch.setattr(engine.executor, name, fails)
    with pytest.raises(EngineError, match="a step failed, the requests in flight are lost: out of luck"):
        for _ in range(3):
            engine.step()
    assert engine.has_work
    lost = {output.request_id: output.outputs[0].finish_reason for output in engine.step()}
    assert lost == {first: "error", second: "error"}
    assert not engine.has_work
    assert len({*leaves(engine)}) == 2
    for _ in range(2):
        (output,) = engine.generate([ids], GREEDY)
        assert output.token_ids == dense(ids, GREEDY)
    assert output.cached_tokens == 16
    assert engine.memory.num_free_pages == 16


def test_a_hook_that_raises(make, prompt, dense):
    """Also a fault of the caller's own code leaves an engine that works."""

    def hook(plan):
        if plan.step == 3 and not raised:
            raised.append(plan)
            raise ZeroDivisionError("mine")

    raised = []
    engine = make(on_plan=hook, limits={"max_horizon": 1})
    with pytest.raises(EngineError, match="mine"):
        engine.generate([prompt(5)], GREEDY)
    assert engine.generate([prompt(5)], GREEDY)[0].token_ids == dense(prompt(5), GREEDY)
