"""Cuts text as SentencePiece's BPE does: of all neighbours that make a piece together, the best-scored join first."""

from __future__ import annotations

import heapq
import re
from collections.abc import Collection, Mapping

from paxkv.config import require


class PieceMerger:
    """Text to ids by scores.

    Args:
        ids: piece → id. Text is cut into these, so the pieces hold ``space`` where the text has spaces.
        scores: of each id; higher joins first, further left among equals.
        byte_ids: id of each byte 0 to 255, for characters that are no piece.
        space: what a space is written as.
        prefix: whether a space is put in front of a text, and behind each special token.
        special: token → id of those that are found in the text first, and split it.
    """

    def __init__(
        self,
        ids: Mapping[str, int],
        scores: Mapping[int, float],
        byte_ids: Collection[int],
        *,
        space: str = " ",
        prefix: bool = True,
        special: Mapping[str, int] | None = None,
    ) -> None:
        require(len(byte_ids) == 256, f"there must be a token for each of the 256 bytes, got {len(byte_ids)}")
        self._ids, self._scores, self._byte_ids = ids, scores, tuple(byte_ids)
        self._space, self._prefix, self._special = space, prefix, dict(special or {})
        # The longest first, so that none hides behind its own beginning.
        words = sorted(map(re.escape, self._special), key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(words)})") if words else None

    def __call__(self, text: str) -> list[int]:
        """Ids of a text."""
        ids: list[int] = []
        for part in self._split.split(text) if self._split else [text]:
            if part in self._special:
                ids.append(self._special[part])
            elif part:
                ids += self._cut((" " + part if self._prefix else part).replace(" ", self._space))
        return ids

    def _cut(self, text: str) -> list[int]:
        """Ids of text between special tokens, in time that grows with its length times the logarithm of it."""
        pieces: list[str] = list(text)  # joined ones grow; what was swallowed is empty
        before, after = list(range(-1, len(text) - 1)), list(range(1, len(text) + 1))
        waiting: list[tuple[float, int, str]] = []

        def offer(left: int) -> None:
            """Lets the piece at ``left`` and its right neighbour wait to be joined, if they make a piece."""
            if left >= 0 and after[left] < len(pieces):
                joined = pieces[left] + pieces[after[left]]
                found = self._ids.get(joined)
                if found is not None:
                    heapq.heappush(waiting, (-self._scores[found], left, joined))

        for left in range(len(text) - 1):
            offer(left)
        while waiting:
            _, left, joined = heapq.heappop(waiting)
            right = after[left]
            if right >= len(pieces) or not pieces[left] or pieces[left] + pieces[right] != joined:
                continue  # one of the two has joined another since
            pieces[left], pieces[right] = joined, ""
            after[left] = after[right]
            if after[right] < len(pieces):
                before[after[right]] = left
            offer(before[left])
            offer(left)
        ids: list[int] = []
        for piece in filter(None, pieces):
            found = self._ids.get(piece)
            ids += [found] if found is not None else [self._byte_ids[byte] for byte in piece.encode()]
        return ids
