"""A pool of physical pages: free list, reference counts, and how much sharing saves.

Life of a page::

    free --take--> owned (1) --share--> owned (n) --drop--> owned (1) --drop--> free, or idle in the index
     ^                                                                            |
     +------------------------------- evicted or taken ---------------------------+

``fill`` is the number of tokens that the page holds when its owners change. Shared pages are never
written, so their fill stands still and the sums below stay exact.
"""

from __future__ import annotations

from paxkv.sched.prefix_cache import PrefixCache


class PagePool:
    """Pages 0 to ``num_pages - 1``.

    Args:
        num_pages: size of the pool.
        cache: the index of pages that can be found by content, or None.

    Attributes:
        owners: number of block-table entries per page.
        duplicate_tokens: tokens that block tables count again because their page is shared.
        shared_tokens: tokens in pages with several owners, each counted once.
    """

    def __init__(self, num_pages: int, cache: PrefixCache | None = None) -> None:
        self.num_pages = num_pages
        self.owners = [0] * num_pages
        self.duplicate_tokens = 0
        self.shared_tokens = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._cache = cache

    @property
    def num_free(self) -> int:
        """Pages that can be taken: free ones and idle cached ones."""
        return len(self._free) + (self._cache.num_idle if self._cache else 0)

    def take(self) -> int:
        """Takes a page: a free one, else the next idle cached one.

        Raises:
            LookupError: none is left. Callers ask ``num_free`` first.
        """
        if self._free:
            page = self._free.pop()
        elif self._cache is not None:
            page = self._cache.evict()
        else:
            raise LookupError("the page pool is empty; ask num_free first")
        self.owners[page] = 1
        return page

    def share(self, page: int, fill: int) -> None:
        """One more owner of a page in use, or the first owner of an idle cached page."""
        owners = self.owners[page]
        if owners == 0:
            assert self._cache is not None
            self._cache.use(page)
        else:
            self.duplicate_tokens += fill
            if owners == 1:
                self.shared_tokens += fill
        self.owners[page] = owners + 1

    def drop(self, page: int, fill: int) -> None:
        """One owner less. The last one frees the page, or leaves it idle when the index knows it."""
        owners = self.owners[page] - 1
        if owners < 0:
            raise AssertionError(f"page {page} was freed twice")
        self.owners[page] = owners
        if owners == 0:
            if self._cache is not None and self._cache.holds(page):
                self._cache.leave(page)
            else:
                self._free.append(page)
        else:
            self.duplicate_tokens -= fill
            if owners == 1:
                self.shared_tokens -= fill

    def drop_table(self, table: list[int], stored: int, page_size: int) -> None:
        """Drops a whole block table that holds ``stored`` tokens, last page first."""
        owners, free = self.owners, self._free
        plain = self._cache is None
        for index in range(len(table) - 1, -1, -1):
            page = table[index]
            if plain and owners[page] == 1:
                owners[page] = 0
                free.append(page)
            else:
                self.drop(page, max(0, min(page_size, stored - index * page_size)))
        table.clear()

    def evict(self, pages: int) -> int:
        """Moves up to ``pages`` idle cached pages to the free list; returns how many."""
        if self._cache is None:
            return 0
        count = min(pages, self._cache.num_idle)
        self._free.extend(self._cache.evict() for _ in range(count))
        return count

    def check(self, tables: list[list[int]]) -> None:
        """Conservation: free + idle + used = all pages, and owners = occurrences in ``tables``."""
        counts = [0] * self.num_pages
        for table in tables:
            for page in table:
                counts[page] += 1
        if counts != self.owners:
            wrong = next(p for p in range(self.num_pages) if counts[p] != self.owners[p])
            raise AssertionError(
                f"page {wrong}: {self.owners[wrong]} owners counted, {counts[wrong]} block-table entries found"
            )
        free = set(self._free)
        if len(free) != len(self._free):
            raise AssertionError("a page is on the free list twice")
        idle = {p for p in range(self.num_pages) if self._cache is not None and self._cache.is_idle(p)}
        used = {p for p in range(self.num_pages) if counts[p]}
        if free & idle or free & used or idle & used or len(free) + len(idle) + len(used) != self.num_pages:
            raise AssertionError(
                f"free {len(free)} + idle {len(idle)} + used {len(used)} must be the pool's {self.num_pages} pages"
            )
