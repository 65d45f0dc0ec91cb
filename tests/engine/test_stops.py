"""Where an output ends, what it says, and what is reported beside it."""

from __future__ import annotations

import numpy as np
import pytest

from paxkv.sampling import SamplingParams
from paxkv.testing.dense import log_softmax
from paxkv.testing.letter_tokenizer import LetterTokenizer
from paxkv.testing.tiny_engine import tiny_dense

TEXT = "a prompt of some letters"


def greedy(**changes) -> SamplingParams:
    return SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **changes})


@pytest.fixture(scope="module")
def engine(make):
    return make(tokenizer=LetterTokenizer())


@pytest.fixture(scope="module")
def ids() -> list[int]:
    return LetterTokenizer().encode(TEXT)


@pytest.fixture(scope="module")
def plain(dense, ids) -> tuple[int, ...]:
    """What the prompt gives where nothing stops it."""
    answer = dense(ids, greedy())
    assert len(set(answer[:8])) == 8
    return answer


def letters(tokens) -> str:
    return LetterTokenizer().decode(tokens)


def test_text_in_and_out(engine, ids, plain):
    (output,) = engine.generate([TEXT], greedy())
    assert (output.prompt_ids, output.token_ids, output.text) == (tuple(ids), plain, letters(plain))
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].stop is None


@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("end", [1, 4, 5, 9])
def test_stop_text(engine, plain, end, length):
    """Over one token or several, within a dispatch or across two of them: the text is cut before it."""
    begin = max(0, end - length)
    stop = letters(plain[begin:end])
    (output,) = engine.generate([TEXT], greedy(stop=("never there", stop)))
    (completion,) = output.outputs
    assert (completion.finish_reason, completion.stop) == ("stop", stop)
    assert completion.token_ids == plain[:end]
    assert completion.text == letters(plain[:begin])


def test_the_first_of_several_stop_texts(engine, plain):
    stops = (letters(plain[6:8]), letters(plain[3:5]), letters(plain[4:6]))
    (completion,) = engine.generate([TEXT], greedy(stop=stops))[0].outputs
    assert (completion.stop, completion.text) == (stops[1], letters(plain[:3]))


@pytest.mark.parametrize("at", [0, 1, 6])
def test_stop_id(engine, plain, at):
    (completion,) = engine.generate([TEXT], greedy(stop_ids=(plain[at],)))[0].outputs
    assert (completion.finish_reason, completion.stop) == ("stop", plain[at])
    assert completion.token_ids == plain[: at + 1]


def test_end_token(make, plain):
    """The model's end token ends a sequence and is no text; ``ignore_eos`` goes on; a stop id still stops."""
    end = plain[6]
    engine = make(tokenizer=LetterTokenizer([end]))
    stopped, ignored, both = engine.generate(
        [TEXT] * 3, [greedy(), greedy(ignore_eos=True), greedy(ignore_eos=True, stop_ids=(plain[7],))]
    )
    assert (stopped.token_ids, stopped.text, stopped.outputs[0].stop) == (plain[:7], letters(plain[:6]), end)
    assert (ignored.token_ids, ignored.outputs[0].finish_reason) == (plain, "length")
    assert both.token_ids == plain[:8]
    given = make(end_ids=[end])
    assert given.generate([[*map(ord, TEXT)]], greedy())[0].token_ids == plain[:7]


def test_min_tokens(engine, ids, plain, dense):
    """No end before so many tokens, by id or by text."""
    params = greedy(stop_ids=(plain[2],), min_tokens=6)
    (completion,) = engine.generate([TEXT], params)[0].outputs
    assert completion.token_ids == dense(ids, params)
    assert plain[2] not in completion.token_ids[:6]
    assert completion.token_ids[:2] == plain[:2]
    (output,) = engine.generate([TEXT], greedy(stop=(letters(plain[2:3]),), min_tokens=1))
    assert output.token_ids == plain[:3]


@pytest.mark.parametrize("wanted", [0, 1, 5, 16])
def test_logprobs(engine, ids, plain, wanted):
    """Of the model, before any choice made here; likeliest first."""
    logprobs = log_softmax(tiny_dense().generate(ids, greedy()).logits)
    for params in (greedy(logprobs=wanted), SamplingParams(seed=3, top_k=3, max_tokens=20, logprobs=wanted)):
        (completion,) = engine.generate([TEXT], params)[0].outputs
        assert [position.token_id for position in completion.logprobs] == list(completion.token_ids)
        for step, position in enumerate(completion.logprobs):
            row = log_softmax(tiny_dense().next_logits([*ids, *completion.token_ids[:step]]))
            assert position.logprob == pytest.approx(row[position.token_id], abs=1e-4)
            best = np.argsort(-row, kind="stable")[:wanted]
            assert [token for token, _ in position.top] == best.tolist()
            assert [value for _, value in position.top] == pytest.approx(row[best].tolist(), abs=1e-4)
    assert len(logprobs) == 20
    assert engine.generate([TEXT], greedy())[0].outputs[0].logprobs is None


def test_logprobs_end_with_the_output(engine, plain):
    (completion,) = engine.generate([TEXT], greedy(logprobs=2, stop_ids=(plain[5],)))[0].outputs
    assert len(completion.logprobs) == len(completion.token_ids) == 6


@pytest.mark.parametrize(
    "changes",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"repetition_penalty": 0.3},
        {"logit_bias": {7: 3.0, 9: -100.0}},
        {"min_p": 0.2},
        {"top_p": 0.5},
        {"top_k": 2},
        {"temperature": 0.3},
    ],
    ids=str,
)
def test_choices(engine, ids, dense, changes):
    """Every choice, greedy where it can be, alone and beside a request without it."""
    params = SamplingParams(**{"temperature": 1.0, "seed": 5, "max_tokens": 20, **changes})
    first, second = engine.generate([TEXT, TEXT], [params, greedy()])
    assert first.token_ids == dense(ids, params)
    assert second.token_ids == dense(ids, greedy())
    assert first.token_ids != dense(ids, SamplingParams(temperature=1.0, seed=5, max_tokens=20))


def test_a_sample_that_stops_leaves_the_others(engine, ids, dense):
    params = SamplingParams(seed=8, n=3, max_tokens=20, stop_ids=tuple(range(0, 256, 9)))
    (output,) = engine.generate([TEXT], params)
    assert [out.token_ids for out in output.outputs] == [dense(ids, params, index) for index in range(3)]
    assert len({len(out.token_ids) for out in output.outputs}) > 1
