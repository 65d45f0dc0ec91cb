"""What a request must be to be served by an engine: ids within the vocabulary, choices within its limits."""

from __future__ import annotations

from collections.abc import Sequence

from paxkv.sampling import SamplingParams
from paxkv.sched.events import RequestRejected


def prompt_ids(name: int | str, prompt: str | Sequence[int], tokenizer, vocab_size: int) -> list[int]:
    """The prompt as token ids.

    Args:
        name: of the request.
        prompt: text, or token ids.
        tokenizer: for text; may be None.
        vocab_size: V.

    Raises:
        RequestRejected: text without a tokenizer, or that it cannot read; no list of whole numbers; ids outside the
            vocabulary.
    """
    if isinstance(prompt, str):
        if tokenizer is None:
            raise RequestRejected(name, "the prompt is text and the engine has no tokenizer; give token ids")
        try:
            given = tokenizer.encode(prompt)
        except Exception as error:  # whatever a tokenizer raises is the fault of this text alone
            raise RequestRejected(name, f"the tokenizer cannot read the prompt: {_said(error)}; mend it") from error
        rule = "a tokenizer must make a list of token ids of the prompt"
    else:
        given, rule = prompt, "a prompt must be text or a list of token ids"
    try:
        ids = [int(token) for token in given]
        whole = all(token == one for token, one in zip(ids, given, strict=True))
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise RequestRejected(name, f"{rule}, got {type(given).__name__}")
    wrong = next((token for token in ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise RequestRejected(name, f"token ids must lie in 0..{vocab_size - 1}, got {wrong}; check the tokenizer")
    return ids


def detokenizers(name: int | str, tokenizer, count: int) -> list:
    """What turns the tokens of each of ``count`` sequences into text; Nones without a tokenizer.

    Raises:
        RequestRejected: the tokenizer cannot make one.
    """
    if tokenizer is None:
        return [None] * count
    try:
        return [tokenizer.detokenizer() for _ in range(count)]
    except Exception as error:
        raise RequestRejected(name, f"the tokenizer cannot begin a text: {_said(error)}; mend it") from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def check_sampling(name: int | str, sampling: SamplingParams, tokenizer, vocab_size: int, max_logprobs: int) -> None:
    """Refuses choices that the engine cannot carry out.

    Raises:
        RequestRejected: naming the choice, its value and the limit.
    """
    if not isinstance(sampling, SamplingParams):
        raise RequestRejected(name, f"sampling must be SamplingParams, got {type(sampling).__name__}")
    if (sampling.logprobs or 0) > max_logprobs:
        raise RequestRejected(
            name,
            f"logprobs is {sampling.logprobs} and max_logprobs {max_logprobs}; ask for fewer, or raise max_logprobs",
        )
    if sampling.beam_width is not None and 2 * sampling.beam_width > max_logprobs:
        raise RequestRejected(
            name,
            f"a beam search looks at twice its width, {2 * sampling.beam_width}, of the likeliest tokens and "
            f"max_logprobs is {max_logprobs}; narrow it, or raise max_logprobs",
        )
    if sampling.stop and tokenizer is None:
        raise RequestRejected(name, "stop texts need a tokenizer; give stop_ids")
    wrong = next((i for i in (*sampling.logit_bias, *sampling.stop_ids) if i >= vocab_size), None)
    if wrong is not None:
        raise RequestRejected(name, f"token ids must lie in 0..{vocab_size - 1}, got {wrong} in logit_bias or stop_ids")
