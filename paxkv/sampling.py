"""How the tokens of one request are chosen: frozen and validated, without jax.

The order in which the parts act, and what each means on the device, is told in :mod:`paxkv.steps.sample`.
Seeds become keys here too, because a key must be the same in every process and on every device.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
import types
from array import array
from collections.abc import Mapping, Sequence
from typing import Literal

from paxkv.config import require

Variant = Literal["greedy", "sample", "full"]

VARIANTS: tuple[Variant, ...] = ("greedy", "sample", "full")
"""From the cheapest to the one that can do everything. A step takes the highest that any of its rows needs."""


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Choices of one request.

    Greedy decoding (``temperature=0``) gives every sequence the same tokens, so ``n`` above 1 is refused with it.
    A beam search has its own rule for choosing tokens and takes none of the random choices.

    Attributes:
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: keep this many of the most likely tokens; 0 keeps all.
        top_p: keep the most likely tokens that together reach this probability, the one that crosses it included.
        min_p: keep tokens at least this fraction as likely as the most likely one.
        repetition_penalty: divides positive and multiplies negative logits of tokens seen in prompt or output.
        presence_penalty: subtracted from the logits of tokens seen in the output.
        frequency_penalty: subtracted once for each time the token was seen in the output.
        logit_bias: added to the logits of these token ids.
        logprobs: how many of the most likely tokens to report at each position; 0 reports only the chosen one,
            None nothing. Log-probabilities are those of the model, before any choice made here.
        seed: names the random stream; None lets the engine pick one.
        max_tokens: most tokens generated for each sequence.
        min_tokens: end and stop ids are forbidden until this many tokens were generated.
        ignore_eos: whether to go on after the model's end token.
        stop: texts that end a sequence.
        stop_ids: token ids that end a sequence.
        n: sequences returned.
        best_of: sequences generated, of which the ``n`` most likely are returned; None generates ``n``.
        beam_width: beams of a beam search; None samples.
        length_penalty: a beam's score is its log-probability divided by its length to this power.
        early_stopping: whether a beam search ends as soon as ``beam_width`` beams are finished.

    Raises:
        ValueError: a value outside its range or of the wrong type, or two that exclude each other.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    logprobs: int | None = None
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    stop_ids: tuple[int, ...] = ()
    n: int = 1
    best_of: int | None = None
    beam_width: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool = False

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lists()
        self._check_sequences()
        object.__setattr__(self, "logit_bias", types.MappingProxyType(dict(self.logit_bias)))

    def __hash__(self) -> int:
        values = [getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "logit_bias"]
        return hash((*values, frozenset(self.logit_bias.items())))

    def __reduce__(self):
        # A mapping proxy cannot be pickled; the values it was made from can.
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return _rebuild, (values | {"logit_bias": dict(self.logit_bias)},)

    def _check_numbers(self) -> None:
        rules = {
            "temperature": (lambda v: v >= 0, "0 (greedy) or more", "use 0 for greedy decoding"),
            "top_p": (lambda v: 0 < v <= 1, "above 0 and at most 1", "use 1 to keep every token"),
            "min_p": (lambda v: 0 <= v <= 1, "between 0 and 1", "use 0 to keep every token"),
            "repetition_penalty": (lambda v: v > 0, "above 0", "use 1 for no penalty"),
            "presence_penalty": (lambda v: True, "finite", "use 0 for no penalty"),
            "frequency_penalty": (lambda v: True, "finite", "use 0 for no penalty"),
            "length_penalty": (lambda v: True, "finite", "use 1 for the mean log-probability"),
        }
        for field, (holds, rule, advice) in rules.items():
            value = getattr(self, field)
            require(
                _number(value) and holds(value),
                f"SamplingParams.{field} must be a number that is {rule}, got {value!r}; {advice}",
            )
        counts = {"top_k": 0, "max_tokens": 1, "min_tokens": 0, "n": 1}
        optional = {"logprobs": 0, "best_of": 1, "beam_width": 2}
        for field, least in (counts | optional).items():
            value = getattr(self, field)
            require(
                (value is None and field in optional) or (_whole(value) and value >= least),  # pyright: ignore[reportOptionalOperand]
                f"SamplingParams.{field} must be a whole number of at least {least}"
                f"{' or None' if field in optional else ''}, got {value!r}; "
                + ("use 0 to keep every token" if field == "top_k" else f"raise it to {least} or leave it out"),
            )
        require(
            self.seed is None or (_whole(self.seed) and -(1 << 63) <= self.seed < 1 << 63),
            f"SamplingParams.seed must be a whole number of 64 bits or None, got {self.seed!r}; use a smaller number",
        )
        for field in ("ignore_eos", "early_stopping"):
            value = getattr(self, field)
            require(isinstance(value, bool), f"SamplingParams.{field} must be True or False, got {value!r}; use a bool")
        require(
            self.min_tokens <= self.max_tokens,
            f"SamplingParams.min_tokens must not exceed max_tokens, got {self.min_tokens} and {self.max_tokens}; "
            "lower min_tokens",
        )

    def _check_lists(self) -> None:
        require(
            isinstance(self.logit_bias, Mapping)
            and all(_whole(key) and key >= 0 and _number(value) for key, value in self.logit_bias.items()),
            f"SamplingParams.logit_bias must map token ids (0 or more) to finite numbers, got {self.logit_bias!r}; "
            "use a large negative number to forbid a token",
        )
        require(
            isinstance(self.stop, tuple) and all(isinstance(text, str) and text for text in self.stop),
            f"SamplingParams.stop must be a tuple of texts that are not empty, got {self.stop!r}; "
            "write ('text',) for a single one",
        )
        require(
            isinstance(self.stop_ids, tuple) and all(_whole(token) and token >= 0 for token in self.stop_ids),
            f"SamplingParams.stop_ids must be a tuple of token ids (0 or more), got {self.stop_ids!r}; "
            "write (2,) for a single one",
        )

    def _check_sequences(self) -> None:
        require(
            self.best_of is None or self.best_of >= self.n,
            f"SamplingParams.best_of must be at least n, got best_of={self.best_of} and n={self.n}; raise best_of",
        )
        if self.beam_width is None:
            require(
                not self.greedy or self.num_seqs == 1,
                f"greedy decoding gives every sequence the same tokens, got temperature=0 with "
                f"{self.num_seqs} sequences; set n=1 (and no best_of), or a temperature above 0, or beam_width",
            )
            return
        require(
            self.n <= self.beam_width and self.best_of is None,
            f"a beam search returns at most beam_width sequences and has no best_of, got n={self.n}, "
            f"best_of={self.best_of}, beam_width={self.beam_width}; lower n, drop best_of",
        )
        plain = SamplingParams()
        for field in ("top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
            require(
                getattr(self, field) == getattr(plain, field),
                f"a beam search scores tokens with the model's probabilities, got beam_width={self.beam_width} with "
                f"{field}={getattr(self, field)!r}; leave out {field} or beam_width",
            )
        require(
            not self.logit_bias and not self.min_tokens and self.temperature in (0, 1),
            f"a beam search scores tokens with the model's probabilities, got beam_width={self.beam_width} with "
            f"temperature={self.temperature!r}, min_tokens={self.min_tokens}, logit_bias={dict(self.logit_bias)!r}; "
            "leave them out",
        )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature == 0

    @property
    def needs_history(self) -> bool:
        """Whether the choice depends on the tokens before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def variant(self) -> Variant:
        """The cheapest program of :func:`paxkv.steps.sample.sample` that serves this request."""
        if self.needs_history or self.logit_bias or self.min_tokens:
            return "full"
        return "greedy" if self.greedy or self.beam_width is not None else "sample"

    @property
    def num_seqs(self) -> int:
        """Sequences that run: beams, candidates, or simply ``n``."""
        return self.beam_width or self.best_of or self.n


def _rebuild(values: dict) -> SamplingParams:
    return SamplingParams(**values)


def request_seed(seed: int, prompt_ids: Sequence[int], index: int) -> tuple[int, int]:
    """The key of one sequence's random stream: two 32-bit words.

    The words are a digest of all three arguments, so two prompts with one seed draw different numbers, and so do
    the ``n`` sequences of one request, while the same request draws the same ones in every process, batch and run.

    Args:
        seed: the request's seed, within 64 bits.
        prompt_ids: the request's prompt.
        index: which of its sequences, from 0.

    Raises:
        OverflowError: a seed, id or index outside the signed 64-bit range.
    """
    words = array("q", [seed, index])
    words.extend(array("q", prompt_ids))
    # The count of words is part of what is hashed only through the length of the message: the fields before the
    # prompt have a fixed size, so no two different arguments give one message.
    digest = hashlib.sha256(b"paxkv-seed\x01" + words.tobytes()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")
