"""What the engine gives back, and the state of a request on its way there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from paxkv.sampling import SamplingParams
from paxkv.steps.beam import BeamSearch
from paxkv.steps.lane import Lane

if TYPE_CHECKING:
    from paxkv.models.tokenizer import Detokenizer
    from paxkv.sched.sequence import Group

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True)
class RequestTimes:
    """Clock readings of a request, seconds on the engine's clock; None where it has not happened.

    Attributes:
        arrival_s: when it was due.
        first_token_s: when its first token reached the host.
        finish_s: when it ended.
        token_s: when each token of its first sequence reached the host; tokens of one dispatch arrive together.
    """

    arrival_s: float
    first_token_s: float | None = None
    finish_s: float | None = None
    token_s: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """One position of an output.

    Attributes:
        token_id, logprob: what was chosen, under the model's own distribution.
        top: the likeliest tokens there as (id, log-probability), likeliest first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sequence of a request.

    Attributes:
        index: which of the request's sequences (for beams and ``best_of``: its rank).
        token_ids: the output so far; an end or stop id that ended it is the last of them.
        text: the output as text, without the end token and cut before a stop text; None without a tokenizer.
        finish_reason: ``stop`` (end token, stop id or stop text), ``length``, ``abort``, ``error``; None while it runs.
        stop: the stop text or id that ended it.
        logprobs: per token, where the request asked for them.
        error: what the tokenizer could not do with this sequence's tokens, where that ended it; None otherwise.
        score: of a beam: log-probability / length ** length_penalty; of ``best_of``: the summed log-probability.
    """

    index: int
    token_ids: tuple[int, ...]
    text: str | None = None
    finish_reason: FinishReason | None = None
    stop: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    score: float | None = None
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A request as it stands.

    Attributes:
        request_id: as given or made by the engine.
        prompt_ids: the prompt.
        outputs: its sequences. Beams appear when the search has ended.
        finished: whether nothing more will come.
        times: clock readings.
        cached_tokens: prompt tokens found in the prefix cache.
        refused: why the request was never served, or None.
    """

    request_id: int | str
    prompt_ids: tuple[int, ...]
    outputs: tuple[Completion, ...]
    finished: bool
    times: RequestTimes
    cached_tokens: int = 0
    refused: str | None = None

    @property
    def text(self) -> str | None:
        """Text of the first sequence."""
        return self.outputs[0].text if self.outputs else None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Output ids of the first sequence."""
        return self.outputs[0].token_ids if self.outputs else ()


def _blame(error: Exception) -> str:
    return f"the tokenizer could not turn the tokens into text: {type(error).__name__}: {error}"


class Transcript:
    """One sequence's output as it grows: ids come from its lane, text and stops are found here.

    A tokenizer that fails on its tokens ends this sequence with the reason ``error``, and no other.
    """

    __slots__ = ("detokenizer", "error", "lane", "logprobs", "reason", "searched", "stop", "text", "total")

    def __init__(self, lane: Lane, detokenizer: Detokenizer | None) -> None:
        self.lane = lane
        self.detokenizer = detokenizer
        self.text = "" if detokenizer is not None else None
        self.searched = 0  # characters of the text that hold no stop text
        self.reason: FinishReason | None = None
        self.stop: str | int | None = None
        self.error: str | None = None
        self.logprobs: list[TokenLogprob] = []
        self.total = 0.0

    def take(self, tokens: list[int], end_ids: frozenset[int], target: int) -> int:
        """Takes the next tokens, up to the one that completes the sequence; returns how many."""
        lane = self.lane
        tokens = tokens[: target - lane.produced]
        end = next((i for i, token in enumerate(tokens) if token in end_ids), None) if end_ids else None
        if end is not None:
            tokens = tokens[: end + 1]
            self.reason, self.stop = "stop", tokens[end]
        if self.detokenizer is not None:
            tokens = tokens[: self._spell(tokens, end)]
        lane.ids += tokens
        if self.reason is None and lane.produced >= target:
            self.reason = "length"
        if self.reason in ("stop", "length") and self.detokenizer is not None and not isinstance(self.stop, str):
            self._say(self.detokenizer.finish)
        lane.done = self.reason is not None
        return len(tokens)

    def _spell(self, tokens: list[int], end: int | None) -> int:
        """Adds the text of tokens, that of the end token left out; returns how many, up to a stop text or a failure."""
        params = self.lane.params
        quiet = params.min_tokens - self.lane.produced  # tokens that may not end the sequence yet
        longest = max(map(len, params.stop), default=0)
        for count, token in enumerate(tokens[:end], 1):
            if not self._say(self.detokenizer.add, token):
                return count
            if params.stop and count >= quiet:
                start = max(0, self.searched - longest + 1)
                found = [(at, stop) for stop in params.stop if (at := self.text.find(stop, start)) >= 0]
                self.searched = len(self.text)
                if found:
                    at, stop = min(found)
                    self.text, self.reason, self.stop = self.text[:at], "stop", stop
                    return count
        return len(tokens)

    def _say(self, speak: Callable[..., str], *token: int) -> bool:
        """Adds what the detokenizer says next. False if it fails, which ends the sequence."""
        try:
            self.text += speak(*token)
        except Exception as error:  # whatever a tokenizer raises is the fault of this sequence alone
            self.reason, self.stop, self.error = "error", None, _blame(error)
        return self.error is None

    def visible(self, stops: tuple[str, ...]) -> str | None:
        """The text so far, without a tail that may yet turn out to begin a stop text."""
        if self.text is None or self.reason is not None or not stops:
            return self.text
        longest = max(map(len, stops)) - 1
        for size in range(min(longest, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-size:]) for stop in stops):
                return self.text[:-size]
        return self.text


class Live:
    """A request in flight.

    Attributes:
        wide: whether it has several sequences.
        ranks: whether it runs more sequences than it returns, the most likely ones.
        wants_tops: whether log-probabilities must come back with its tokens.
    """

    def __init__(
        self,
        request_id: int | str,
        params: SamplingParams,
        prompt_ids: tuple[int, ...],
        group: Group,
        transcripts: list[Transcript],
        arrival_s: float,
        end_ids: frozenset[int],
        beam: BeamSearch | None,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.prompt_ids = prompt_ids
        self.group = group
        self.transcripts = transcripts
        self.arrival_s = arrival_s
        self.first_token_s: float | None = None
        self.token_s: list[float] = []
        self.end_ids = end_ids
        self.beam = beam
        self.target = group.target
        self.cached_tokens = 0
        self.by_seq = {item.lane.sequence.seq_id: item for item in transcripts}
        self.wide = len(transcripts) > 1
        self.ranks = params.best_of not in (None, params.n)
        self.wants_tops = params.logprobs is not None or beam is not None or self.ranks

    def times(self, finish_s: float | None) -> RequestTimes:
        """Its clock readings."""
        return RequestTimes(self.arrival_s, self.first_token_s, finish_s, tuple(self.token_s))

    def output(
        self, finish_s: float | None = None, reason: FinishReason | None = None, tokenizer=None
    ) -> RequestOutput:
        """The request as it stands; ``reason`` ends what has not ended of itself."""
        finished = finish_s is not None
        if self.beam is not None:
            outputs = self._beams(reason, tokenizer) if finished else ()
        else:
            ranked = self._ranked() if finished else self.transcripts[: self.params.n]
            outputs = tuple(self._completion(rank, item, reason) for rank, item in enumerate(ranked))
        return RequestOutput(
            self.request_id, self.prompt_ids, outputs, finished, self.times(finish_s), self.cached_tokens
        )

    def _ranked(self) -> list[Transcript]:
        if not self.ranks:
            return self.transcripts
        return sorted(self.transcripts, key=lambda item: -item.total)[: self.params.n]

    def _completion(self, rank: int, item: Transcript, reason: FinishReason | None) -> Completion:
        params = self.params
        return Completion(
            index=rank,
            token_ids=tuple(item.lane.output_ids),
            text=item.visible(params.stop),
            finish_reason=item.reason or reason,
            stop=item.stop,
            logprobs=tuple(item.logprobs) if params.logprobs is not None else None,
            score=item.total if self.ranks else None,
            error=item.error,
        )

    def _beams(self, reason: FinishReason | None, tokenizer) -> tuple[Completion, ...]:
        assert self.beam is not None
        if reason is not None:
            return ()
        outputs = []
        for rank, found in enumerate(self.beam.best(self.params.n)):
            ids, text, error = tuple(found.token_ids), None, None
            stopped = bool(ids) and ids[-1] in self.end_ids
            if tokenizer is not None:
                try:
                    text = tokenizer.decode(list(ids[:-1] if stopped else ids))
                except Exception as failure:
                    error = _blame(failure)
            outputs.append(
                Completion(
                    index=rank,
                    token_ids=ids,
                    text=text,
                    finish_reason="error" if error else "stop" if stopped else "length",
                    stop=ids[-1] if stopped else None,
                    score=found.score,
                    error=error,
                )
            )
        return tuple(outputs)
