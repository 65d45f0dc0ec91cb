"""The two values that everything else is built from: a data set of lengths, and a workload.

``Lengths`` are pairs in file order, without arrivals. A ``Workload`` is what a scheduler is given: when each
request arrives, how long its prompt is and how many tokens it will generate.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable

import numpy as np

from paxkv.workload import validate
from paxkv.workload.validate import WorkloadError, require

MAX_HASH_ID = 2**63 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Lengths:
    """A data set as pairs of token counts, in file order.

    Attributes:
        name: short name, such as ``sharegpt``.
        prompt: int64 [R], tokens of each prompt, at least 1, read-only.
        output: int64 [R], tokens of each output, at least 1, read-only.
        source: where the pairs come from: ``real:FILE``, ``embedded:NAME`` or ``distribution:RULE``.
    """

    name: str
    prompt: np.ndarray
    output: np.ndarray
    source: str

    def __post_init__(self) -> None:
        validate.text(self.name, "Lengths.name")
        validate.text(self.source, "Lengths.source")
        object.__setattr__(self, "prompt", validate.tokens_array(self.prompt, "Lengths.prompt"))
        object.__setattr__(self, "output", validate.tokens_array(self.output, "Lengths.output"))
        require(
            len(self.prompt) == len(self.output),
            f"Lengths needs as many outputs as prompts, got {len(self.prompt)} prompts and {len(self.output)} outputs",
        )
        require(len(self.prompt) > 0, f"Lengths {self.name!r} must hold at least one pair, got none")

    def __len__(self) -> int:
        return len(self.prompt)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Lengths):
            return NotImplemented
        return self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __reduce__(self) -> tuple:
        # Through the constructor, so that a copy in another process is validated and read-only too.
        return Lengths, (self.name, self.prompt, self.output, self.source)

    def _key(self) -> tuple:
        return self.name, self.source, self.prompt.tobytes(), self.output.tobytes()

    def with_total_at_most(self, max_total_tokens: int) -> Lengths:
        """Return the pairs whose prompt and output together have at most ``max_total_tokens``, in order."""
        limit = validate.whole_number(max_total_tokens, "max_total_tokens", least=2)
        keep = self.prompt + self.output <= limit
        require(
            bool(keep.any()),
            f"no pair of {self.name!r} has prompt + output <= {limit}; the shortest has "
            f"{int((self.prompt + self.output).min())}; raise max_total_tokens",
        )
        return dataclasses.replace(self, prompt=self.prompt[keep], output=self.output[keep])


@dataclasses.dataclass(frozen=True, eq=False)
class Workload:
    """Requests with their arrivals, sorted by arrival.

    Attributes:
        name: short name, for people; not part of the content hash.
        arrival_s: float64 [R], seconds since the start, sorted, zero or more, read-only.
        prompt_tokens: int64 [R], at least 1, read-only.
        output_tokens: int64 [R], tokens that the request generates (no early stop), at least 1, read-only.
        source: where the lengths and arrivals come from; not part of the content hash.
        prefix_tokens: leading tokens that the prompts of all requests share (figure 16 of the paper).
        hash_ids: per request, the ids of its prompt's blocks: equal leading ids mean equal leading tokens.
        hash_block: tokens of one hash id (512 in Mooncake's traces), 0 without ``hash_ids``.

    Two workloads are equal when their content hashes are; names and sources may differ.
    """

    name: str
    arrival_s: np.ndarray
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    source: str
    prefix_tokens: int = 0
    hash_ids: tuple[tuple[int, ...], ...] | None = None
    hash_block: int = 0

    def __post_init__(self) -> None:
        def put(field: str, value: object) -> None:
            object.__setattr__(self, field, value)

        validate.text(self.name, "Workload.name")
        validate.text(self.source, "Workload.source")
        put("arrival_s", validate.arrivals_array(self.arrival_s, "Workload.arrival_s"))
        put("prompt_tokens", validate.tokens_array(self.prompt_tokens, "Workload.prompt_tokens"))
        put("output_tokens", validate.tokens_array(self.output_tokens, "Workload.output_tokens"))
        sizes = (len(self.arrival_s), len(self.prompt_tokens), len(self.output_tokens))
        require(
            len(set(sizes)) == 1,
            f"Workload needs one arrival, prompt and output per request, got {sizes[0]}, {sizes[1]} and {sizes[2]}",
        )
        require(sizes[0] > 0, f"Workload {self.name!r} must hold at least one request, got none")
        put("prefix_tokens", validate.whole_number(self.prefix_tokens, "Workload.prefix_tokens"))
        shortest = int(self.prompt_tokens.min())
        require(
            self.prefix_tokens <= shortest,
            f"a shared prefix must fit in every prompt, got prefix_tokens={self.prefix_tokens} "
            f"and a prompt of {shortest} tokens",
        )
        put("hash_block", validate.whole_number(self.hash_block, "Workload.hash_block"))
        if self.hash_ids is None:
            require(self.hash_block == 0, f"hash_block={self.hash_block} needs hash_ids; pass both or neither")
        else:
            require(self.hash_block > 0, "hash_ids need hash_block, the tokens of one id (512 in Mooncake's traces)")
            put("hash_ids", _checked_hash_ids(self.hash_ids, self.prompt_tokens, self.hash_block))

    def __len__(self) -> int:
        return len(self.arrival_s)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Workload):
            return NotImplemented
        return self.content_hash == other.content_hash

    def __hash__(self) -> int:
        return hash(self.content_hash)

    def __reduce__(self) -> tuple:
        # Through the constructor, so that a copy in another process is validated and read-only too.
        return Workload, tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    @property
    def content_hash(self) -> str:
        """SHA-256, as 64 hex digits, of what a scheduler sees; ``name`` and ``source`` are left out.

        The bytes hashed, all little-endian, each part led by its tag and its count as uint64: arrivals as
        float64, prompts, outputs as int64, then prefix and hash block, then the number of ids per request
        and all ids. Equal on every machine and Python.
        """
        ids = self.hash_ids or ()
        flat = [i for request in ids for i in request]
        parts = (
            (b"arrival_s", self.arrival_s, "<f8"),
            (b"prompt_tokens", self.prompt_tokens, "<i8"),
            (b"output_tokens", self.output_tokens, "<i8"),
            (b"prefix_tokens, hash_block", [self.prefix_tokens, self.hash_block], "<i8"),
            (b"hash_id counts", [len(request) for request in ids], "<i8"),
            (b"hash_ids", flat, "<i8"),
        )
        digest = hashlib.sha256(b"paxkv workload 1\0")
        for tag, values, dtype in parts:
            digest.update(tag + b"\0" + len(values).to_bytes(8, "little"))
            digest.update(np.asarray(values, dtype=dtype).tobytes())
        return digest.hexdigest()

    @property
    def max_total_tokens(self) -> int:
        """Tokens of the longest request, prompt and output together."""
        return int((self.prompt_tokens + self.output_tokens).max())

    def require_fit(self, max_model_len: int) -> Workload:
        """Return this workload if every request fits a model of ``max_model_len`` tokens; raise otherwise."""
        limit = validate.whole_number(max_model_len, "max_model_len", least=2)
        total = self.prompt_tokens + self.output_tokens
        if total.max() > limit:
            i = int(np.argmax(total > limit))
            raise WorkloadError(
                f"every request must fit the model: prompt + output <= max_model_len={limit}, but request {i} of "
                f"{self.name!r} has {self.prompt_tokens[i]} + {self.output_tokens[i]}; filter the lengths "
                "(Lengths.with_total_at_most) or raise max_model_len"
            )
        return self


def _checked_hash_ids(
    hash_ids: Iterable[Iterable[int]], prompt_tokens: np.ndarray, hash_block: int
) -> tuple[tuple[int, ...], ...]:
    """Return ``hash_ids`` as tuples, one id for each started block of every prompt."""
    rows = tuple(tuple(row) for row in hash_ids)
    require(
        len(rows) == len(prompt_tokens),
        f"hash_ids needs one entry per request, got {len(rows)} for {len(prompt_tokens)} requests",
    )
    for i, (row, prompt) in enumerate(zip(rows, prompt_tokens.tolist(), strict=True)):
        blocks = -(-prompt // hash_block)
        require(
            len(row) == blocks,
            f"hash_ids[{i}] needs one id per {hash_block} prompt tokens, the last block may be partial: "
            f"{blocks} ids for {prompt} tokens, got {len(row)}",
        )
        odd = next((v for v in row if type(v) is not int or not 0 <= v <= MAX_HASH_ID), None)
        require(odd is None, f"hash_ids[{i}] must hold integers in 0 .. 2**63 - 1, got {odd!r}")
    return rows
