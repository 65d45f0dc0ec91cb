"""What a user asks for: one request, possibly for several sequences."""

from __future__ import annotations

import dataclasses

from paxkv.config import require


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt and the sequences wanted for it.

    Attributes:
        request_id: any hashable name, unique among the requests in flight.
        prompt_tokens: length of the prompt in tokens, at least 1.
        max_tokens: tokens to generate for each sequence, at least 1.
        arrival_s: when the request was due, in seconds. Latencies count from here.
        num_seqs: sequences of the group: 1 for basic sampling, n for parallel sampling, the width for beams.
        beam: whether the sequences are the beams of one search.
        prompt_ids: the prompt's token ids, when known. Only then can pages be found again by content.
        salt: a secret that keeps this request's pages apart from those of others.
        adapter: name and version of an adapter that changes keys and values.

    Raises:
        ValueError: a length below 1, ids whose count is not ``prompt_tokens``, a beam of width 1, a salt or an adapter
            that is no text.
    """

    request_id: int | str
    prompt_tokens: int
    max_tokens: int
    arrival_s: float = 0.0
    num_seqs: int = 1
    beam: bool = False
    prompt_ids: tuple[int, ...] | None = None
    salt: str | None = None
    adapter: str | None = None

    def __post_init__(self) -> None:
        for field in ("prompt_tokens", "max_tokens", "num_seqs"):
            value = getattr(self, field)
            require(
                isinstance(value, int) and not isinstance(value, bool) and value >= 1,
                f"Request {self.request_id!r}: {field} must be a whole number of at least 1, got {value!r}; "
                "drop the request or mend its length",
            )
        require(
            self.arrival_s >= 0,
            f"Request {self.request_id!r}: arrival_s must be zero or more, got {self.arrival_s!r}",
        )
        require(
            self.prompt_ids is None or len(self.prompt_ids) == self.prompt_tokens,
            f"Request {self.request_id!r}: prompt_ids must have prompt_tokens = {self.prompt_tokens} entries, "
            f"got {0 if self.prompt_ids is None else len(self.prompt_ids)}",
        )
        for field in ("salt", "adapter"):
            value = getattr(self, field)
            require(
                value is None or isinstance(value, str),
                f"Request {self.request_id!r}: {field} must be a text or None, got {value!r}; write it as a text",
            )
        require(
            not self.beam or self.num_seqs > 1,
            f"Request {self.request_id!r}: a beam search needs num_seqs of at least 2, got {self.num_seqs}; "
            "use beam=False for greedy decoding",
        )

    @property
    def total_tokens(self) -> int:
        """Length of each sequence when it is finished."""
        return self.prompt_tokens + self.max_tokens
