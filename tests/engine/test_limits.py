"""Requests at and beyond the limits: refused with a reason or served exactly, and nobody else notices."""

from __future__ import annotations

import pytest

from paxkv.config import CacheConfig
from paxkv.sampling import SamplingParams
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.events import RequestRejected


def greedy(tokens: int = 8) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens)


def works_as_ever(engine, prompt, dense) -> None:
    ids = prompt(10)
    (output,) = engine.generate([ids], greedy())
    assert output.token_ids == dense(ids, greedy())
    assert engine.memory.num_free_pages == engine.memory.num_pages
    assert not engine.has_work


def test_larger_than_the_pool(make, prompt, dense):
    """Within the length limit and above the pool's capacity: "never", not "not now" (public fault B14)."""
    engine = make(memory=PagedMemory(CacheConfig(4, 16, watermark=0.0)))
    for length, tokens in ((80, 4), (40, 50)):
        with pytest.raises(RequestRejected, match=r"needs . pages of 16 tokens .* the pool has 4"):
            engine.add_request(prompt(length), greedy(tokens))
        works_as_ever(engine, prompt, dense)
    a, b = engine.generate([prompt(80), prompt(12)], greedy(4))
    assert "the pool has 4" in a.refused and a.finished and not a.outputs
    assert b.refused is None and b.token_ids == dense(prompt(12), greedy(4))
    # The longest that fits is really served: 64 slots hold all but the newest token.
    (output,) = engine.generate([prompt(40)], greedy(25))
    assert output.token_ids == dense(prompt(40), greedy(25))


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "prompt_tokens must be a whole number of at least 1"),
        ([1] * 96, "the prompt has 96 tokens and max_model_len is 96"),
        ([1] * 97, "leaves no room for an output token"),
        ([1, 256], "token ids must lie in 0..255, got 256"),
        ([1, -1], "token ids must lie in 0..255, got -1"),
        ([1, 2.5], "a prompt must be text or a list of token ids"),
        ("text", "no tokenizer"),
        (7, "a prompt must be text or a list of token ids"),
        ([float("inf")], "a prompt must be text or a list of token ids"),
    ],
    ids=str,
)
def test_prompts_that_cannot_be(engine, prompt, dense, ids, message):
    """Each is an error for that request alone (B15)."""
    with pytest.raises(RequestRejected, match=message):
        engine.add_request(ids, greedy())
    refused, served = engine.generate([ids, prompt(5)], greedy())
    assert message.replace("\\", "") in refused.refused
    assert served.token_ids == dense(prompt(5), greedy())
    works_as_ever(engine, prompt, dense)


@pytest.mark.parametrize("field", ["salt", "adapter"])
def test_what_keeps_pages_apart_is_text(engine, prompt, dense, field):
    """It is read when a step looks for pages: too late to be the fault of one request alone."""
    with pytest.raises(RequestRejected, match=f"{field} must be a text or None, got 5"):
        engine.add_request(prompt(20), greedy(), **{field: 5})
    works_as_ever(engine, prompt, dense)


def test_a_prompt_one_short_of_the_limit(engine, prompt, dense):
    (output,) = engine.generate([prompt(95)], greedy(10))
    assert output.token_ids == dense(prompt(95), greedy(1))
    assert output.outputs[0].finish_reason == "length"
    works_as_ever(engine, prompt, dense)


def test_one_token_needs_no_decode_step(make, prompt, dense):
    plans = []
    engine = make(on_plan=plans.append)
    (output,) = engine.generate([prompt(20)], greedy(1))
    assert output.token_ids == dense(prompt(20), greedy(1))
    assert [(plan.prefill_tokens, plan.decodes) for plan in plans] == [(20, ())]
    works_as_ever(engine, prompt, dense)


def test_no_token_at_all_is_refused():
    with pytest.raises(ValueError, match="max_tokens must be a whole number of at least 1, got 0"):
        SamplingParams(max_tokens=0)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (SamplingParams(n=5), "5 sequences, max_num_seqs is 4"),
        (SamplingParams(logprobs=17), "logprobs is 17 and max_logprobs 16"),
        (SamplingParams(temperature=0.0, beam_width=9), "twice its width, 18"),
        (SamplingParams(stop=("x",)), "stop texts need a tokenizer"),
        (SamplingParams(stop_ids=(256,)), "token ids must lie in 0..255, got 256"),
        (SamplingParams(logit_bias={300: 1.0}), "token ids must lie in 0..255, got 300"),
        ({"n": 1}, "sampling must be SamplingParams, got dict"),
    ],
    ids=str,
)
def test_sampling_that_cannot_be(engine, prompt, dense, params, message):
    with pytest.raises(RequestRejected, match=message):
        engine.add_request(prompt(5), params)
    works_as_ever(engine, prompt, dense)


def test_a_name_in_use(engine, prompt, dense):
    engine.add_request(prompt(5), greedy(), request_id="a")
    with pytest.raises(RequestRejected, match="a request with this id is in flight"):
        engine.add_request(prompt(6), greedy(), request_id="a")
    while engine.has_work:
        outputs = engine.step()
    assert outputs[0].token_ids == dense(prompt(5), greedy())
    works_as_ever(engine, prompt, dense)


def test_refused_among_others(engine, prompt, dense):
    """``generate`` returns everything in order; what could not be served says why."""
    outputs = engine.generate([prompt(5), [], prompt(7)], greedy())
    assert [bool(output.refused) for output in outputs] == [False, True, False]
    assert [output.token_ids for output in outputs[::2]] == [dense(prompt(n), greedy()) for n in (5, 7)]
    with pytest.raises(ValueError, match="one SamplingParams for all prompts or one for each, got 2 for 1"):
        engine.generate([prompt(5)], [greedy()] * 2)
    works_as_ever(engine, prompt, dense)


def test_more_than_fit_at_once(make, prompt, dense):
    """Every seat is taken and given again, step after step, while tokens are read late."""
    engine = make(limits={"max_num_batched_tokens": 32})
    prompts = [prompt(3, seed=seed) for seed in range(40)]
    params = [greedy(1 + seed % 4) for seed in range(40)]
    outputs = engine.generate(prompts, params)
    assert [output.token_ids for output in outputs] == [dense(*pair) for pair in zip(prompts, params, strict=True)]
