"""What the device half knows about one sequence: its lane.

Life of a lane's tokens::

    host ids (prompt, fetched output) --chunk--> computed --sampled--> on the device --fetched--> host ids

``known`` counts all of them; the ids of the newest may still lie on the device, in the lane's slot.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from paxkv.sampling import SamplingParams


class HasTable(Protocol):
    """A sequence of the scheduler: its block table is what the device must see."""

    seq_id: int
    table: list[int]


class Lane:
    """One sequence as steps see it.

    Attributes:
        sequence: the scheduler's sequence; its block table is read when a step is built.
        index: which of its request's sequences it is.
        ids: the ids known on the host: the prompt, then the output as far as it was fetched.
        prompt_len: tokens of the prompt.
        known: tokens of the sequence, those on the device included.
        padding: tokens that a static batch computes before the prompt.
        params: how its tokens are sampled.
        variant: the program that this needs.
        seed: the request's sampling key for this sequence, two 32-bit words.
        slot: where its newest token lies on the device; -1 while it has no place there.
        end_ids: tokens that end it, for ``min_tokens``.
        held: of a beam, the likeliest next tokens (ids, log-probabilities) until those of all beams are there.
        done: whether its output is complete; what is sampled for it later is dropped.
    """

    __slots__ = (
        "done",
        "end_ids",
        "held",
        "ids",
        "index",
        "known",
        "padding",
        "params",
        "prompt_len",
        "seed",
        "sequence",
        "slot",
        "variant",
    )

    def __init__(
        self,
        sequence: HasTable,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        seed: tuple[int, int],
        end_ids: tuple[int, ...] = (),
    ) -> None:
        self.sequence = sequence
        self.index = index
        self.ids = list(prompt)
        self.prompt_len = len(prompt)
        self.known = len(prompt)
        self.padding = 0
        self.params = params
        self.variant = params.variant
        self.seed = seed
        self.slot = -1
        self.end_ids = end_ids
        self.held: tuple[np.ndarray, np.ndarray] | None = None
        self.done = False

    @property
    def produced(self) -> int:
        """Output tokens that the host has the ids of."""
        return len(self.ids) - self.prompt_len

    @property
    def output_ids(self) -> list[int]:
        """The output as far as it was fetched."""
        return self.ids[self.prompt_len :]

    @property
    def fetched(self) -> bool:
        """Whether the host has the id of every token."""
        return len(self.ids) == self.known
