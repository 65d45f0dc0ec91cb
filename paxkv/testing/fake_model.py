"""A deterministic stand-in for a language model, whose next token depends on everything before it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from paxkv.request import Request
from paxkv.sched import beam


class FakeModel:
    """Draws tokens from digests.

    A slot (the keys and values of one token) is a digest of the token and of the slot before it, so it depends on all
    tokens up to there, on the salt and on the adapter. The next token is a digest of the newest slot.

    Args:
        seed: another seed is another model.
        vocab: number of token ids.
        end_share: probability that a token ends its sequence.
    """

    def __init__(self, seed: int = 0, *, vocab: int = 1000, end_share: float = 0.0) -> None:
        self.seed, self.vocab, self.end_share = seed, vocab, end_share

    def prompt(self, request: Request) -> list[int]:
        """The prompt's ids; a request that gives none gets some of its own."""
        if request.prompt_ids is not None:
            return list(request.prompt_ids)
        name = zlib.crc32(repr(request.request_id).encode())
        return [hash((name, position, self.seed)) % self.vocab for position in range(request.prompt_tokens)]

    def root(self, request: Request) -> int:
        """What stands before the first slot: everything but the tokens that changes keys and values."""
        return zlib.crc32(repr((request.salt, request.adapter)).encode())

    def slot(self, before: int, token: int) -> int:
        """The slot of ``token`` that follows the slot ``before``."""
        return hash((before, token))

    def token(self, slot: int, stream: int) -> int:
        """The token that sequence number ``stream`` of a request samples after ``slot``."""
        return hash((slot, stream, self.seed)) % self.vocab

    def ends(self, slot: int, stream: int) -> bool:
        """Whether that token ends the sequence."""
        return hash((slot, stream, self.seed, 1)) % 4096 < self.end_share * 4096

    def parents(self, request: Request, generated: int, width: int) -> tuple[int, ...]:
        """The parents of the tokens that bring ``width`` beams from ``generated`` tokens to one more."""
        return tuple(hash((self.root(request), generated, i, self.seed)) % width for i in range(width))

    def outputs(self, request: Request, target: int) -> list[list[int]]:
        """What each sequence generates, at most ``target`` tokens: the answer of a run with no scheduler at all."""
        slot = self.root(request)
        for token in self.prompt(request):
            slot = self.slot(slot, token)
        done: dict[int, list[int]] = {}
        live: list[tuple[int, int, list[int]]] = [(stream, slot, []) for stream in range(request.num_seqs)]
        for generated in range(target):
            order: Sequence[int] = range(len(live))
            if generated:
                live = [(stream, self.slot(slot, ids[-1]), ids) for stream, slot, ids in live]
                if request.beam and live:
                    order = beam.place(self.parents(request, generated, len(live)), len(live))
            grown = []
            for (stream, _, _), parent in zip(live, order, strict=True):
                _, slot, ids = live[parent]
                ids = [*ids, self.token(slot, stream)]
                if self.ends(slot, stream) or generated + 1 == target:
                    done[stream] = ids
                else:
                    grown.append((stream, slot, ids))
            live = grown
        return [done[stream] for stream in range(request.num_seqs)]
