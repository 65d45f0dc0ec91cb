"""Several sequences of one request: forks, seeds, and the host pool that they swap to."""

from __future__ import annotations

import pytest

from paxkv.sampling import SamplingParams


def sampling(**changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 40, "seed": 42, **changes})


def test_fork_with_different_seeds(make, prompt, dense):
    """A half-full page is copied before the second sequence writes into it (public fault B12)."""
    plans = []
    engine = make(on_plan=plans.append)
    ids, params = prompt(20), sampling(n=2)
    engine.add_request(ids, params)
    engine.step()
    assert sorted(engine.memory.pool.owners)[-3:] == [0, 2, 2]
    engine.step()
    assert sorted(engine.memory.pool.owners)[-4:] == [0, 1, 1, 2]
    assert [len(plan.copies) for plan in plans] == [0, 1]
    while engine.has_work:
        outputs = engine.step()
    assert [out.token_ids for out in outputs[0].outputs] == [dense(ids, params, index) for index in (0, 1)]
    assert engine.memory.num_free_pages == 16


def test_fork_at_the_end_of_a_page_copies_nothing(make, prompt, dense):
    plans = []
    engine = make(on_plan=plans.append)
    ids, params = prompt(32), sampling(n=2)
    (output,) = engine.generate([ids], params)
    assert [out.token_ids for out in output.outputs] == [dense(ids, params, index) for index in (0, 1)]
    assert not any(plan.copies for plan in plans)


def test_counts_of_beams_match_their_tables(make, prompt):
    """A parent kept by two children, then one of them dropped; the scheduler checks its counts after each step."""
    engine = make()
    engine.add_request(prompt(20), SamplingParams(temperature=0.0, beam_width=4, n=4, max_tokens=40))
    shared = set()
    while engine.has_work:
        engine.step()
        groups = engine.scheduler.groups()
        tables = [seq.table for group in groups for seq in group.seqs]
        assert engine.memory.pool.owners == [sum(table.count(page) for table in tables) for page in range(16)]
        shared.update(engine.memory.pool.owners)
    assert {0, 1, 2, 4} <= shared


def test_seeds(engine, prompt, dense):
    """The samples differ, come back in order, and do not depend on what runs beside them (B17)."""
    ids, params = prompt(12), sampling(n=4, max_tokens=20)
    want = [dense(ids, params, index) for index in range(4)]
    assert len(set(want)) == 4
    others = [prompt(5 + seed, seed=seed) for seed in range(7)]
    choices = [sampling(seed=seed, max_tokens=15) for seed in range(7)]
    for position in (0, 3, 7):
        prompts = [*others[:position], ids, *others[position:]]
        outputs = engine.generate(prompts, [*choices[:position], params, *choices[position:]])
        assert [out.index for out in outputs[position].outputs] == [0, 1, 2, 3]
        assert [out.token_ids for out in outputs[position].outputs] == want
    # One of them ends early; the rest goes on as before.
    stop = want[2][5]
    (output,) = engine.generate([ids], sampling(n=4, max_tokens=20, stop_ids=(stop,)))
    for index, out in enumerate(output.outputs):
        assert out.token_ids == dense(ids, sampling(max_tokens=20, stop_ids=(stop,)), index)
    assert len(output.outputs[2].token_ids) <= 6


def test_one_seed_for_all_prompts_is_not_one_noise(engine, prompt):
    """Equal prompts give equal samples; unequal ones draw other numbers, though the parameters are one object."""
    params = sampling(max_tokens=30, logit_bias={token: 100.0 for token in range(4)})  # nearly uniform over four ids
    ids = [prompt(8), prompt(8), prompt(8, seed=1)]
    first, same, other = (output.token_ids for output in engine.generate(ids, params))
    assert first == same
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 25


def test_no_seed_is_another_one_each_time(engine, prompt):
    outputs = engine.generate([prompt(8)] * 2, sampling(seed=None))
    assert outputs[0].token_ids != outputs[1].token_ids


@pytest.mark.parametrize("host", [0, 2, 64])
def test_host_pool_runs_out(make, prompt, dense, host):
    """Two requests of two sequences need 24 pages of 16: one goes to the host, or is computed again (B18)."""
    engine = make(num_host_pages=host)
    params = sampling(n=2, max_tokens=86)
    prompts = [prompt(10, seed=seed) for seed in range(2)]
    outputs = engine.generate(prompts, params)
    for ids, output in zip(prompts, outputs, strict=True):
        assert [out.token_ids for out in output.outputs] == [dense(ids, params, index) for index in (0, 1)]
    counters = engine.counters
    assert counters.preemptions > 0
    assert counters.swapped_out_pages == counters.swapped_in_pages
    assert (counters.swapped_in_pages > 0) == (host == 64)
    assert engine.memory.num_free_pages == 16
    assert engine.memory.host.num_free == host


def test_best_of(engine, prompt, dense):
    """The n likeliest of best_of, likeliest first."""
    ids, params = prompt(9), sampling(best_of=4, n=2, max_tokens=6)
    (output,) = engine.generate([ids], params)
    (all_,) = engine.generate([ids], sampling(n=4, max_tokens=6, logprobs=0))
    totals = {out.token_ids: sum(position.logprob for position in out.logprobs) for out in all_.outputs}
    want = sorted(totals, key=totals.__getitem__, reverse=True)[:2]
    assert [out.token_ids for out in output.outputs] == want
    assert [out.score for out in output.outputs] == pytest.approx([totals[ids] for ids in want])
