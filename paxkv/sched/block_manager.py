"""Paged memory: block tables over a pool of pages, with copy-on-write, swapping and a prefix index.

Rules of the paper (sections 4.2 to 4.5): a prompt gets only the pages it fills; a decoding sequence gets
a page when its last one is full; the sequences of a group share their prompt, and a shared last page is
copied before it is written, except by its last owner.

When a sequence next needs a page follows from its length: it is ``due`` at ticks of one residue modulo
the page size. Sequences are kept by residue, so a step touches only those that need a page now.
"""

from __future__ import annotations

from typing import ClassVar

from paxkv.config import CacheConfig
from paxkv.request import Request
from paxkv.sched import hashing
from paxkv.sched.block import PagePool
from paxkv.sched.events import Blocked, Miss
from paxkv.sched.memory import Copies, Memory
from paxkv.sched.prefix_cache import PrefixCache
from paxkv.sched.sequence import Group, Sequence
from paxkv.sched.waste import Usage


class PagedMemory(Memory):
    """The paper's memory manager.

    Args:
        config: pool sizes, watermark and prefix caching.
    """

    absorbs: ClassVar = "internal"

    def __init__(self, config: CacheConfig) -> None:
        self.config = config
        self.num_pages = config.num_pages
        self.page_size = config.page_size
        self.cache = PrefixCache(config.eviction) if config.prefix_caching else None
        self.pool = PagePool(config.num_pages, self.cache)
        self.host = PagePool(config.num_host_pages)
        self._due: list[dict[Sequence, None]] = [{} for _ in range(config.page_size)]
        self._residue: dict[Sequence, int] = {}
        self._forks: dict[Group, None] = {}  # share a partly filled last page until their first decode
        self._beams: dict[Group, None] = {}
        self._fork_need = 0
        self._decode_pages = 0
        self._logical_pages = 0
        self._looked_up: tuple[int, Miss] = (0, Miss.OFF)

    @property
    def finds_content(self) -> bool:
        return self.cache is not None

    # --- admission -------------------------------------------------------------------------------

    def never_fits(self, request: Request, target: int) -> str | None:
        page, tokens = self.page_size, request.prompt_tokens + target - 1
        shared = request.prompt_tokens // page if request.num_seqs > 1 else 0
        need = shared + request.num_seqs * (-(-tokens // page) - shared)
        if need <= self.num_pages:
            return None
        return (
            f"it needs {need} pages of {page} tokens when it is longest ({request.num_seqs} sequence(s) of {tokens} "
            f"stored tokens), the pool has {self.num_pages}; shorten it or enlarge the pool"
        )

    def _cached(self, group: Group) -> list[int]:
        """Pages of the longest cached prefix that leaves at least one token to compute."""
        if self.cache is None or group.ids is None:
            self._looked_up = (0, Miss.OFF if self.cache is None else Miss.NO_IDS)
            return []
        self._extend_keys(group, group.ids)
        usable = group.keys[: (group.known - 1) // self.page_size]
        hits = self.cache.lookup(usable)
        miss = self.cache.why_missed(usable, len(hits)) if usable else Miss.SHORT
        self._looked_up = (len(hits) * self.page_size, miss)
        return hits

    def _extend_keys(self, group: Group, ids: list[int]) -> None:
        """Adds the keys of pages that have filled since."""
        request, page, keys = group.request, self.page_size, group.keys
        if len(ids) // page > len(keys):
            parent = keys[-1] if keys else hashing.root_key(request.salt, request.adapter)
            keys += hashing.page_keys(ids[len(keys) * page :], page, parent)

    def lookup_result(self) -> tuple[int, Miss]:
        return self._looked_up

    def admit(self, group: Group, *, alone: bool, budget: int | None) -> Blocked | None:
        page, known, num_seqs = self.page_size, group.known, len(group.seqs)
        hits = self._cached(group)
        pages = -(-known // page)
        # A group that already generated tokens has sequences that differ behind the prompt's full pages.
        apart = num_seqs > 1 and known > group.request.prompt_tokens
        common = group.request.prompt_tokens // page if apart else pages
        hits = hits[:common]
        start = len(hits) * page
        compute = known - start + ((num_seqs - 1) * (known - common * page) if apart else 0)
        if budget is not None and compute > budget:
            return Blocked.BUDGET
        need = pages - len(hits) + ((num_seqs - 1) * (pages - common) if apart else 0)
        free = self.pool.num_free
        if hits and self.cache is not None:
            free -= sum(map(self.cache.is_idle, hits))
        if free - need < (0 if alone else self.config.watermark_pages):
            return Blocked.PAGES

        pool = self.pool
        for hit in hits:  # before anything is taken, so that no hit is evicted by its own request
            pool.share(hit, page)
        first = group.seqs[0]
        group.published, group.twins = len(hits), []
        first.table = hits + [pool.take() for _ in range(pages - len(hits))]
        group.jobs = [[first, start, known]]
        for seq in group.seqs[1:]:
            for index in range(common):
                pool.share(first.table[index], min(page, known - index * page))
            seq.table = first.table[:common] + [pool.take() for _ in range(pages - common)]
            if apart:
                group.jobs.append([seq, common * page, known])
        self._logical_pages += pages * num_seqs
        return None

    # --- growth ----------------------------------------------------------------------------------

    def start(self, group: Group, tick: int) -> None:
        seqs = group.seqs
        tail = seqs[0].table[-1]
        self._decode_pages += sum(len(seq.table) for seq in seqs)
        if group.request.beam:
            self._beams[group] = None
            self._fork_need += len(seqs)
        elif len(seqs) > 1 and (group.offset + tick - 1) % self.page_size and self.pool.owners[tail] > 1:
            self._forks[group] = None
            self._fork_need += len(seqs)
        else:
            self._join(group)

    def _join(self, group: Group) -> None:
        """Puts the sequences under the residue of the ticks at which they open a page."""
        residue = (1 - group.offset) % self.page_size
        due = self._due[residue]
        for seq in group.seqs:
            due[seq] = None
            self._residue[seq] = residue

    def stop(self, group: Group, tick: int) -> None:
        seqs = group.seqs
        self._decode_pages -= sum(len(seq.table) for seq in seqs)
        if group in self._beams or group in self._forks:
            self._beams.pop(group, None)
            self._forks.pop(group, None)
            self._fork_need -= len(seqs)
        else:
            for seq in seqs:
                del self._due[self._residue.pop(seq)][seq]

    def fits(self, tick: int, width: int) -> bool:
        need = len(self._due[tick % self.page_size]) + self._fork_need
        return self.pool.num_free - need >= width

    def grow(self, tick: int) -> Copies:
        due = self._due[tick % self.page_size]
        if due:
            take = self.pool.take
            for seq in due:
                seq.table.append(take())
            self._decode_pages += len(due)
            self._logical_pages += len(due)
        copies: Copies = []
        if self._fork_need:
            for group in [*self._forks, *self._beams]:
                copies += self._append_shared(group, tick)
        return copies

    def can_append(self, group: Group) -> bool:
        return self.pool.num_free >= len(group.seqs)

    def can_append_alone(self, group: Group, tick: int) -> bool:
        return self.pool.num_free >= self._need(group, tick)

    def _need(self, group: Group, tick: int) -> int:
        """Pages the group's next slots take."""
        if group not in self._forks and group not in self._beams:
            due = self._due[tick % self.page_size]
            return sum(seq in due for seq in group.seqs)
        if (group.offset + tick - 1) % self.page_size == 0:
            return len(group.seqs)
        tails: dict[int, int] = {}
        for seq in group.seqs:
            tails[seq.table[-1]] = tails.get(seq.table[-1], 0) + 1
        return sum(count if self.pool.owners[page] > count else count - 1 for page, count in tails.items())

    def append(self, group: Group, tick: int) -> Copies:
        if group in self._forks or group in self._beams:
            return self._append_shared(group, tick)
        due = self._due[tick % self.page_size]
        for seq in group.seqs:
            if seq in due:
                seq.table.append(self.pool.take())
                self._decode_pages += 1
                self._logical_pages += 1
        return []

    def _append_shared(self, group: Group, tick: int) -> Copies:
        """The next slot of sequences that may share their last page: a new page, a copy, or in place."""
        pool, page, copies = self.pool, self.page_size, []
        fill = (group.offset + tick - 1) % page
        for seq in group.seqs:
            if fill == 0:
                seq.table.append(pool.take())
                self._decode_pages += 1
                self._logical_pages += 1
            elif pool.owners[seq.table[-1]] > 1:
                fresh = pool.take()
                copies.append((seq.table[-1], fresh))
                pool.drop(seq.table[-1], fill)
                seq.table[-1] = fresh
        if group in self._forks:
            del self._forks[group]
            self._fork_need -= len(group.seqs)
            self._join(group)
        return copies

    def horizon(self, tick: int, limit: int, width: int) -> tuple[int, tuple[int, ...]]:
        if self._fork_need:
            return 1, ()
        page, due, free = self.page_size, self._due, self.pool.num_free
        growth: list[int] = []
        for j in range(1, min(limit, page + 1)):
            need = len(due[(tick + j) % page])
            free -= need
            if free < width:
                return j, tuple(growth)
            growth.append(need)
        if limit <= page + 1:
            return limit, tuple(growth)
        steps = page + 1
        per_cycle = sum(growth)
        cycles = (limit - steps) // page
        if per_cycle:
            cycles = min(cycles, (free - width) // per_cycle)
        free -= cycles * per_cycle
        steps += cycles * page
        while steps < limit:
            free -= growth[(steps - 1) % page]
            if free < width:
                break
            steps += 1
        return steps, tuple(growth)

    def advance(self, tick: int, steps: int) -> None:
        page, due, take = self.page_size, self._due, self.pool.take
        grown = 0
        for t in range(tick + 1, tick + steps):
            now = due[t % page]
            for seq in now:
                seq.table.append(take())
            grown += len(now)
        self._decode_pages += grown
        self._logical_pages += grown

    def reorder(self, group: Group, parents: tuple[int, ...], stored: int) -> Copies:
        pool, page, seqs = self.pool, self.page_size, group.seqs
        moved = [(seqs[child], list(seqs[parent].table)) for child, parent in enumerate(parents) if child != parent]
        starts = []
        for seq, table in moved:  # first the new owners, so that no surviving page is freed on the way
            old, start = seq.table, len(table)
            while start and table[start - 1] != old[start - 1]:  # beams that share a page share all before it
                start -= 1
            for index in range(start, len(table)):
                pool.share(table[index], min(page, stored - index * page))
            starts.append(start)
        for (seq, table), start in zip(moved, starts, strict=True):
            for index in range(len(table) - 1, start - 1, -1):
                pool.drop(seq.table[index], min(page, stored - index * page))
            seq.table = table
        return []

    # --- leaving ---------------------------------------------------------------------------------

    def release(self, group: Group, stored: int) -> None:
        for seq in group.seqs:
            self._logical_pages -= len(seq.table)
            self.pool.drop_table(seq.table, stored, self.page_size)

    def release_sequence(self, group: Group, index: int, stored: int) -> None:
        seq = group.seqs[index]
        if seq in self._residue:
            del self._due[self._residue.pop(seq)][seq]
        else:
            self._fork_need -= 1
        self._decode_pages -= len(seq.table)
        self._logical_pages -= len(seq.table)
        self.pool.drop_table(seq.table, stored, self.page_size)

    def _move(self, group: Group, stored: int, source: PagePool, target: PagePool) -> Copies:
        """Moves a group's tables between pools; pages that its sequences share stay shared."""
        moved: dict[int, int] = {}
        page = self.page_size
        for seq in group.seqs:
            table = []
            for index, old in enumerate(seq.table):
                if old in moved:
                    target.share(moved[old], min(page, stored - index * page))
                else:
                    moved[old] = target.take()
                table.append(moved[old])
            source.drop_table(seq.table, stored, page)
            seq.table = table
        return list(moved.items())

    def swap_out(self, group: Group, stored: int) -> Copies | None:
        if len({page for seq in group.seqs for page in seq.table}) > self.host.num_free:
            return None
        self._logical_pages -= sum(len(seq.table) for seq in group.seqs)
        return self._move(group, stored, self.pool, self.host)

    def can_swap_in(self, group: Group, tick: int, *, alone: bool) -> bool:
        pages = len({page for seq in group.seqs for page in seq.table})
        if alone:
            return self.pool.num_free >= pages
        return self.pool.num_free - pages - len(group.seqs) >= self.config.watermark_pages

    def swap_in(self, group: Group, stored: int) -> Copies:
        copies = self._move(group, stored, self.host, self.pool)
        group.published, group.twins = 0, []  # other pages than before
        self._logical_pages += sum(len(seq.table) for seq in group.seqs)
        return copies

    def release_swapped(self, group: Group, stored: int) -> None:
        for seq in group.seqs:
            self.host.drop_table(seq.table, stored, self.page_size)

    # --- accounting ------------------------------------------------------------------------------

    @property
    def num_free_pages(self) -> int:
        return self.pool.num_free

    def context_pages(self) -> int:
        return self._decode_pages

    def usage(self, tick: int, logical_tokens: int, unfilled: tuple[int, int]) -> Usage:
        pool, page = self.pool, self.page_size
        free = pool.num_free
        used = self.num_pages - free
        distinct = logical_tokens - pool.duplicate_tokens
        return Usage(
            live=distinct - pool.shared_tokens - unfilled[0],
            shared=pool.shared_tokens - unfilled[1],
            reserved=unfilled[0] + unfilled[1],
            internal=used * page - distinct,
            free=free * page,
            pages=used,
            logical_pages=self._logical_pages,
            cached=self.cache.num_idle if self.cache else 0,
        )

    def publish(self, group: Group, stored: int) -> None:
        if self.cache is None or group.ids is None:
            return
        self._extend_keys(group, group.ids)
        cache, keys, table = self.cache, group.keys, group.seqs[0].table
        offered = range(group.published, min(stored // self.page_size, len(keys)))
        if group.twins and group.evictions != cache.evictions:
            offered, group.twins = [*group.twins, *offered], []
        for index in offered:
            if not cache.publish(keys[index], table[index]):
                group.twins.append(index)
        group.published = max(group.published, min(stored // self.page_size, len(keys)))
        group.evictions = cache.evictions

    def evict(self, pages: int) -> int:
        return self.pool.evict(pages)

    def check(self, groups: list[Group], tick: int) -> None:
        running = [seq for group in groups if group.state.value == "running" for seq in group.seqs]
        swapped = [seq for group in groups if group.state.value == "swapped" for seq in group.seqs]
        self.pool.check([seq.table for seq in running])
        self.host.check([seq.table for seq in swapped])
        if self._logical_pages != sum(len(seq.table) for seq in running):
            raise AssertionError(f"logical pages counted {self._logical_pages}, block tables disagree")
        decoding = [seq for seq in running if seq.group.decoding]
        if self._decode_pages != sum(len(seq.table) for seq in decoding):
            raise AssertionError(f"pages of decodes counted {self._decode_pages}, block tables disagree")
        due = {seq: residue for residue, seqs in enumerate(self._due) for seq in seqs}
        waiting = [seq for group in [*self._forks, *self._beams] for seq in group.seqs]
        if due != self._residue or {*due, *waiting} != {*decoding} or self._fork_need != len(waiting):
            raise AssertionError(
                f"{len(decoding)} sequences decode, {len(due)} are due and {self._fork_need} of {waiting} fork"
            )
        for seq in decoding:
            stored = seq.group.offset + tick - 1
            if len(seq.table) != -(-stored // self.page_size):
                raise AssertionError(f"{seq} holds {len(seq.table)} pages for {stored} tokens")
        fills = [
            (page, min(self.page_size, (seq.group.known_at(tick) - seq.group.decoding) - i * self.page_size))
            for seq in running
            for i, page in enumerate(seq.table)
        ]
        shared = {page: fill for page, fill in fills if self.pool.owners[page] > 1}
        duplicates = sum(fill * (self.pool.owners[page] - 1) for page, fill in shared.items())
        if (sum(shared.values()), duplicates) != (self.pool.shared_tokens, self.pool.duplicate_tokens):
            raise AssertionError(
                f"sharing counted {self.pool.shared_tokens} tokens and {self.pool.duplicate_tokens} duplicates, "
                f"block tables give {sum(shared.values())} and {duplicates}"
            )
