"""A tokenizer that fails on one request's text: that request is refused, or ends, with a reason; the others go on."""

from __future__ import annotations

import pytest

from paxkv.sampling import SamplingParams
from paxkv.sched.events import RequestRejected
from paxkv.testing.letter_tokenizer import LetterDetokenizer, LetterTokenizer

TEXT = "some text"


def greedy(tokens: int = 12, **changes) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, **changes)


class Fails(LetterTokenizer):
    """Reads and says everything but what a test forbids."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: object = None  # given instead of a text's ids
        self.never: set[int] = set()  # ids that cannot be said
        self.begins, self.ends = True, True

    def encode(self, text: str) -> list[int]:
        text.encode()
        return super().encode(text) if self.ids is None else self.ids

    def decode(self, ids) -> str:
        ids = list(ids)
        if self.never.intersection(ids):
            raise IndexError(f"no piece for {ids}")
        return super().decode(ids)

    def detokenizer(self) -> LetterDetokenizer:
        if not self.begins:
            raise MemoryError("no table")
        return super().detokenizer() if self.ends else Endless(self)


class Endless(LetterDetokenizer):
    """Cannot end a text."""

    def finish(self) -> str:
        raise UnicodeDecodeError("utf-8", b"\xe2", 0, 1, "unexpected end")


@pytest.fixture
def words() -> Fails:
    return Fails()


@pytest.fixture
def engine(make, words):
    return make(tokenizer=words)


@pytest.mark.parametrize("text", ["half a pair \ud83d", "\udc80", "snow \u2603"])
def test_a_text_that_cannot_be_read(engine, dense, text):
    """Half of a surrogate pair has no bytes; a letter may have no id. It is refused among others that are served."""
    with pytest.raises(RequestRejected, match="the tokenizer cannot read the prompt: .*Error: "):
        engine.add_request(text, greedy())
    refused, served = engine.generate([text, TEXT], greedy())
    assert "cannot read the prompt" in refused.refused
    assert (refused.finished, refused.prompt_ids, refused.outputs) == (True, (), ())
    assert served.token_ids == dense([*map(ord, TEXT)], greedy())
    assert not engine.has_work and engine.memory.num_free_pages == 16


@pytest.mark.parametrize("ids", [7, [1, "x"], [256], [-1], [0.5], [float("inf")], []], ids=str)
def test_ids_that_are_none(engine, words, ids):
    words.ids = ids
    with pytest.raises(RequestRejected, match="must make a list of token ids|must lie in 0|prompt_tokens must be"):
        engine.add_request(TEXT, greedy())
    assert not engine.has_work and not engine.scheduler.has_work


def test_a_tokenizer_that_cannot_begin(engine, words, dense):
    """The scheduler has not heard of the request."""
    words.begins = False
    with pytest.raises(RequestRejected, match="cannot begin a text: MemoryError: no table"):
        engine.add_request(TEXT, greedy())
    assert not engine.scheduler.has_work
    words.begins = True
    assert engine.generate([TEXT], greedy())[0].token_ids == dense([*map(ord, TEXT)], greedy())


def fails_beside(engine, params, dense):
    """What comes of a request that meets what its engine's tokenizer cannot say; another beside it does not."""
    others = ([first, 2, 3] for first in range(256))
    ids = next(ids for ids in others if engine.tokenizer.never.isdisjoint(dense(ids, greedy(14))))
    names = [engine.add_request(TEXT, params), engine.add_request(ids, greedy(14))]
    done = {}
    while engine.has_work:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert engine.memory.num_free_pages == 16
    other = done[names[1]]
    assert (other.token_ids, other.outputs[0].finish_reason) == (dense(ids, greedy(14)), "length")
    assert other.outputs[0].error is None
    return done[names[0]]


@pytest.mark.parametrize("at", [0, 1, 5, 11])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_token_that_cannot_be_said(make, words, dense, at, overlap):
    engine = make(tokenizer=words, overlap=overlap)
    plain = dense([*map(ord, TEXT)], greedy())
    assert plain.index(plain[at]) == at
    words.never = {plain[at]}
    (completion,) = fails_beside(engine, greedy(), dense).outputs
    assert (completion.finish_reason, completion.stop) == ("error", None)
    assert completion.error.startswith("the tokenizer could not turn the tokens into text: IndexError: no piece")
    assert (completion.token_ids, completion.text) == (plain[: at + 1], "".join(map(chr, plain[:at])))


def test_samples_fail_alone(engine, words, dense):
    """Of three sequences one meets the token; the request ends when the others have."""
    params = SamplingParams(seed=8, n=3, max_tokens=12)
    want = [dense([*map(ord, TEXT)], params, index) for index in range(3)]
    words.never = set(want[1]) - {*want[0], *want[2]}
    failed = fails_beside(engine, params, dense)
    assert [out.finish_reason for out in failed.outputs] == ["length", "error", "length"]
    assert [out.token_ids for out in failed.outputs][::2] == want[::2]


def test_a_text_that_cannot_end(engine, words, dense):
    words.ends = False
    plain = dense([*map(ord, TEXT)], greedy())
    outputs = engine.generate([TEXT, TEXT], [greedy(stop_ids=(plain[4],)), greedy()])
    for output, tokens in zip(outputs, (plain[:5], plain), strict=True):
        assert (output.token_ids, output.outputs[0].finish_reason) == (tokens, "error")
        assert "UnicodeDecodeError" in output.outputs[0].error
    assert engine.memory.num_free_pages == 16


def test_beams_that_cannot_be_said(engine, words, dense):
    """The search itself reads no text: its beams come back without."""
    params = SamplingParams(temperature=0.0, beam_width=2, n=2, max_tokens=6)
    want = engine.generate([TEXT], params)[0]
    words.never = set(want.outputs[0].token_ids) - set(want.outputs[1].token_ids)
    failed = fails_beside(engine, params, dense)
    assert [out.token_ids for out in failed.outputs] == [out.token_ids for out in want.outputs]
    assert [out.finish_reason for out in failed.outputs] == ["error", "length"]
    assert [out.text for out in failed.outputs] == [None, want.outputs[1].text]
