"""Orders in which cached pages that nobody uses are given up.

Each order answers three calls: a page becomes idle, an idle page is taken back into use, and the next
victim. Pages of one sequence become idle last-to-first, so a prefix outlives its continuations.
"""

from __future__ import annotations

import abc
import heapq
from collections import OrderedDict
from typing import Protocol


class Eviction(Protocol):
    """The idle pages, in some order."""

    def __len__(self) -> int: ...

    def __contains__(self, page: int) -> bool: ...

    def add(self, page: int) -> None:
        """``page`` became idle."""
        ...

    def remove(self, page: int) -> None:
        """``page`` is used again."""
        ...

    def pop(self) -> int:
        """Removes and returns the next victim."""
        ...


class _Ordered:
    """Shared part: idle pages in the order in which they became idle."""

    def __init__(self) -> None:
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._idle)

    def __contains__(self, page: int) -> bool:
        return page in self._idle

    def add(self, page: int) -> None:
        self._idle[page] = None

    def remove(self, page: int) -> None:
        del self._idle[page]


class LRU(_Ordered):
    """The page unused for longest goes first."""

    def pop(self) -> int:
        return self._idle.popitem(last=False)[0]


class MRU(_Ordered):
    """The page unused for the shortest time goes first."""

    def pop(self) -> int:
        return self._idle.popitem(last=True)[0]


class _Ranked(abc.ABC):
    """Shared part: the idle page of lowest rank goes first; equal ranks by time of becoming idle."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int]] = []
        self._entry: dict[int, tuple[int, int, int]] = {}
        self._clock = 0

    def __len__(self) -> int:
        return len(self._entry)

    def __contains__(self, page: int) -> bool:
        return page in self._entry

    @abc.abstractmethod
    def _rank(self, page: int) -> int:
        """The rank of a page that becomes idle now."""

    @abc.abstractmethod
    def _forget(self, page: int) -> None:
        """Called when ``page`` is evicted and its content is gone."""

    def add(self, page: int) -> None:
        self._clock += 1
        entry = (self._rank(page), self._clock, page)
        self._entry[page] = entry
        if len(self._heap) > 2 * len(self._entry) + 64:  # mostly entries of pages that were used again
            self._heap = list(self._entry.values())
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, entry)

    def remove(self, page: int) -> None:
        del self._entry[page]

    def pop(self) -> int:
        while True:
            entry = heapq.heappop(self._heap)
            if self._entry.get(entry[2]) is entry:
                del self._entry[entry[2]]
                self._forget(entry[2])
                return entry[2]


class FIFO(_Ranked):
    """The page that was first stored goes first, however often it was used since."""

    def __init__(self) -> None:
        super().__init__()
        self._born: dict[int, int] = {}

    def _rank(self, page: int) -> int:
        return self._born.setdefault(page, self._clock)

    def _forget(self, page: int) -> None:
        del self._born[page]


class LFU(_Ranked):
    """The page that was used least often goes first."""

    def __init__(self) -> None:
        super().__init__()
        self._uses: dict[int, int] = {}

    def _rank(self, page: int) -> int:
        self._uses[page] = self._uses.get(page, 0) + 1
        return self._uses[page]

    def _forget(self, page: int) -> None:
        del self._uses[page]


ORDERS = {"lru": LRU, "mru": MRU, "fifo": FIFO, "lfu": LFU}
