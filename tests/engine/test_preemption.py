"""Put out and brought back: no token lost, repeated or changed, and no work mis-sized."""

from __future__ import annotations

import pytest

from paxkv.sampling import SamplingParams
from paxkv.testing.tiny_engine import ForceBy

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)


@pytest.fixture(scope="module", params=[False, True], ids=["no index", "prefix index"])
def forced(request, make):
    """(engine, its force policy, its plans)."""
    force, plans = ForceBy(), []
    options = {"prefix_caching": request.param, "num_host_pages": 32, "on_plan": plans.append}
    return make(force=force, **options), force, plans


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("produced", [0, 1, 2, 3, 18, 19])
def test_resumed(forced, prompt, dense, mode, times, produced):
    """30 tokens of prompt, preempted when so many were produced: both sides of 32 and 48 (public fault B16)."""
    engine, force, plans = forced
    # Another request takes part of the budget, so that the prompt is computed in two steps and can be put out between.
    seed = [produced, times, mode == "swap"]  # so that nothing is found in the index but what this test put there
    other, ids = prompt(20, seed=seed), prompt(30, seed=seed)
    names = [engine.add_request(other, GREEDY), engine.add_request(ids, GREEDY)]
    left, known = [times], []
    begin = engine.scheduler.step

    def choose(step, running):
        victim = next((group for group in running if group.request.request_id == names[1]), None)
        if victim is None or not left[0] or step < begin + 1 + produced:
            return []
        left[0] -= 1
        known.append(victim.known_at(engine.scheduler.tick))
        return [(victim, mode)]

    plans.clear()
    force.choose = choose
    done = {}
    while engine.has_work:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    force.choose = lambda step, running: []
    assert [done[name].token_ids for name in names] == [dense(other, GREEDY), dense(ids, GREEDY)]
    assert sum(len(plan.preempted) for plan in plans) == times
    assert known[0] == 30 + produced

    # On the last resume everything known is computed, except what the index still had, and never more than the budget.
    assert all(plan.prefill_tokens + len(plan.decodes) <= 32 for plan in plans)
    resumed = [(index, event) for index, plan in enumerate(plans) for event in plan.admitted if event.resumed]
    if resumed:
        index, event = resumed[-1]
        work = sum(chunk.count for plan in plans[index:] for chunk in plan.prefills)
        before = sum(len(plan.preempted) for plan in plans[:index])
        assert work == known[before - 1] - event.cached_tokens
        assert engine.config.prefix_caching or event.cached_tokens == 0
    assert engine.memory.num_free_pages == 16
    assert engine.memory.host.num_free == 32


def test_swapped_pages_are_those_that_were_computed(make, prompt):
    """What leaves is overwritten at once by others, while the host runs ahead; no bit may differ (B19).

    The same plans run once without any overlap.
    """
    prompts = [prompt(17 + seed, seed=seed) for seed in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=0)

    def run(overlap: bool) -> list:
        force = ForceBy()
        force.choose = lambda step, running: [(g, "swap") for g in running if g.decoding and (step + g.order) % 5 == 0]
        engine = make(num_host_pages=64, overlap=overlap, force=force)
        outputs = engine.generate(prompts, params)
        assert engine.counters.swapped_in_pages > 50
        return [[(p.token_id, p.logprob) for p in output.outputs[0].logprobs] for output in outputs]

    want = run(False)
    for _ in range(10):
        assert run(True) == want


def test_aborted_wherever_it_is(make, prompt, dense):
    """Waiting, in prefill, decoding, swapped: everything comes back, and the others do not notice."""
    force = ForceBy()
    engine = make(num_host_pages=32, force=force, limits={"max_num_seqs": 4})
    for at in range(8):
        victim = engine.add_request(prompt(40), GREEDY)
        other = engine.add_request(prompt(20), SamplingParams(temperature=0.0, max_tokens=9))
        waiting = [engine.add_request(prompt(9), GREEDY) for _ in range(5)]
        begin = engine.scheduler.step
        force.choose = lambda step, running, begin=begin, victim=victim: [
            (group, "swap") for group in running if group.request.request_id == victim and step == begin + 4
        ]
        states, done = [], {}
        for step in range(100):
            if step == at:
                states.append(engine.scheduler.group(victim).state.value)
                assert engine.abort(victim)
                assert not engine.abort(victim)
                assert all(map(engine.abort, waiting))
            if not engine.has_work:
                break
            done |= {output.request_id: output for output in engine.step() if output.finished}
        assert done[other].token_ids == dense(prompt(20), SamplingParams(temperature=0.0, max_tokens=9))
        assert done[victim].outputs[0].finish_reason == "abort"
        assert done[victim].token_ids == dense(prompt(40), GREEDY)[: len(done[victim].token_ids)]
        assert engine.memory.num_free_pages == 16
        assert engine.memory.host.num_free == 32
