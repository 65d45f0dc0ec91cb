"""Draft tokens without a draft model: what followed these tokens when they last occurred.

Text that repeats itself (code, quotations, lists) often continues as it did before. The last ``n`` tokens are looked
up in the sequence itself, and what followed an earlier occurrence is proposed. Which occurrence: the newest that is
followed by as many tokens as are wanted; if none is, the one followed by the most. The tokens at the very end are not
an occurrence of themselves: nothing follows them.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

from paxkv.config import require


class NgramProposer:
    """Proposes continuations of one sequence, which only grows.

    Args:
        ids: its tokens so far.
        max_n: longest run of last tokens that is looked up; longer runs are tried first.
        min_n: shortest.

    Raises:
        ValueError: ``min_n`` is below 1 or above ``max_n``.
    """

    def __init__(self, ids: Iterable[int] = (), *, max_n: int = 2, min_n: int = 2) -> None:
        require(
            1 <= min_n <= max_n,
            f"the looked-up runs must have 1 <= min_n <= max_n tokens, got min_n={min_n} and max_n={max_n}; swap them",
        )
        self.sizes = tuple(range(max_n, min_n - 1, -1))
        self.ids: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self.extend(ids)

    def extend(self, ids: Iterable[int]) -> None:
        """Appends accepted tokens."""
        for token in ids:
            self.ids.append(token)
            end = len(self.ids)
            for size in self.sizes:
                if size <= end:
                    self._ends.setdefault(tuple(self.ids[end - size :]), []).append(end)

    def propose(self, count: int, limit: int | None = None) -> tuple[int, ...]:
        """At most ``count`` tokens that may come next.

        Args:
            count: tokens wanted.
            limit: most tokens that the sequence may hold. The step that verifies the proposal adds a token of its own,
                so a sequence one short of its limit gets none.
        """
        if limit is not None:
            count = min(count, limit - len(self.ids) - 1)
        if count < 1:
            return ()
        for size in self.sizes:
            ends = self._ends.get(tuple(self.ids[-size:]), ()) if size <= len(self.ids) else ()
            earlier = len(ends) - 1  # the last one is the end of the sequence itself
            if earlier > 0:
                enough = bisect.bisect_right(ends, len(self.ids) - count, 0, earlier)
                start = ends[max(enough - 1, 0)]
                return tuple(self.ids[start : start + count])
        return ()


def propose(ids: Sequence[int], count: int, *, n: int = 2, limit: int | None = None) -> tuple[int, ...]:
    """What :class:`NgramProposer` proposes for ``ids`` by their last ``n`` tokens."""
    return NgramProposer(ids, max_n=n, min_n=n).propose(count, limit)
