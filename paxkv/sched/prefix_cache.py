"""The prefix index: content key -> page.

Only pages whose keys and values have been computed are in the index. A page that nobody uses stays
findable until it is evicted; its key leaves the index in the same call that gives the page away::

    written full -> publish -> in use <-> idle (evictable) -> evicted
                                 ^            |
                                 +-- hit -----+
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from paxkv.sched.events import Miss
from paxkv.sched.eviction import ORDERS

EVICTED_KEYS_REMEMBERED = 65536
"""How many evicted keys are kept to explain a miss."""


class PrefixCache:
    """Maps content keys to pages and decides which idle page is given up next.

    Args:
        order: eviction order, one of ``lru fifo lfu mru``.
    """

    def __init__(self, order: str = "lru") -> None:
        self._page_of: dict[bytes | int, int] = {}
        self._key_of: dict[int, bytes | int] = {}
        self._idle = ORDERS[order]()
        self._evicted: OrderedDict[bytes | int, None] = OrderedDict()
        self.evictions = 0

    @property
    def num_idle(self) -> int:
        """Cached pages that nobody uses."""
        return len(self._idle)

    def is_idle(self, page: int) -> bool:
        """Whether ``page`` is cached and unused."""
        return page in self._idle

    def holds(self, page: int) -> bool:
        """Whether ``page`` can be found by content."""
        return page in self._key_of

    def lookup(self, keys: Iterable[bytes | int]) -> list[int]:
        """Pages of the longest cached prefix of ``keys``. Changes nothing."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def why_missed(self, keys: Sequence[bytes | int], hits: int) -> Miss:
        """The reason that page ``hits`` of ``keys`` was not found."""
        if hits >= len(keys):
            return Miss.NONE
        return Miss.EVICTED if keys[hits] in self._evicted else Miss.NEVER_STORED

    def publish(self, key: bytes | int, page: int) -> bool:
        """Makes a computed page findable. False when the content is already cached in another page."""
        if key in self._page_of or page in self._key_of:
            return False
        self._page_of[key] = page
        self._key_of[page] = key
        self._evicted.pop(key, None)
        return True

    def use(self, page: int) -> None:
        """An idle page is used again."""
        self._idle.remove(page)

    def leave(self, page: int) -> None:
        """The last user of a cached page is gone; it becomes idle."""
        self._idle.add(page)

    def evict(self) -> int:
        """Gives up the next idle page: its key leaves the index and the page is returned.

        Raises:
            LookupError: no page is idle.
        """
        if not len(self._idle):
            raise LookupError("no idle cached page to evict; ask num_idle first")
        page = self._idle.pop()
        key = self._key_of.pop(page)
        del self._page_of[key]
        self._evicted[key] = None
        if len(self._evicted) > EVICTED_KEYS_REMEMBERED:
            self._evicted.popitem(last=False)
        self.evictions += 1
        return page

    def items(self) -> dict[bytes | int, int]:
        """A copy of the index, for checks."""
        return dict(self._page_of)
