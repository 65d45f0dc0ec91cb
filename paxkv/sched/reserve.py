"""Orca's memory, as the paper's authors rebuilt it: one contiguous chunk per sequence from a buddy allocator.

Three estimates of the output length (paper section 6.1): ``max`` reserves up to the model's maximum,
``pow2`` the true length rounded up to a power of two, ``oracle`` the true length. A reservation never
runs out, so nothing is ever preempted.
"""

from __future__ import annotations

from typing import Literal

from paxkv.config import require
from paxkv.request import Request
from paxkv.sched.events import Blocked
from paxkv.sched.memory import Copies, Memory
from paxkv.sched.sequence import Group
from paxkv.sched.waste import Usage

Estimate = Literal["max", "pow2", "oracle"]


class BuddyAllocator:
    """Power-of-two chunks of a pool that is cut into regions.

    The pool gives as many regions of ``region`` pages as fit, then smaller powers of two from what is
    left. The smallest free size that fits is split, the lower half is used first, and freed chunks are
    reused last-in-first-out. A freed chunk merges with its buddy while both are free and below a region.
    """

    def __init__(self, num_pages: int, region: int) -> None:
        require(region > 0 and region & (region - 1) == 0, f"region must be a power of two, got {region}")
        self.region = region
        self._free: dict[int, list[int]] = {}
        size = region
        while size >= 1:
            self._free[size] = []
            size //= 2
        start, size = 0, region
        while size >= 1:
            while start + size <= num_pages:
                self._free[size].append(start)
                start += size
            size //= 2

    def take(self, size: int) -> int | None:
        """Start of a chunk of ``size`` pages (a power of two), or None if no chunk that large is free."""
        have = size
        while have <= self.region and not self._free[have]:
            have *= 2
        if have > self.region:
            return None
        start = self._free[have].pop()
        while have > size:
            have //= 2
            self._free[have].append(start + have)
        return start

    def give(self, start: int, size: int) -> None:
        """Returns a chunk and merges it with free buddies."""
        while size < self.region and start ^ size in self._free[size]:
            self._free[size].remove(start ^ size)
            start &= ~size
            size *= 2
        self._free[size].append(start)

    def free_chunks(self) -> dict[int, list[int]]:
        """Starts of the free chunks by size, a copy."""
        return {size: list(starts) for size, starts in self._free.items()}


class ReservedMemory(Memory):
    """One chunk per sequence, for its whole life.

    Args:
        num_pages: pages of the pool.
        page_size: tokens per page.
        max_model_len: the cap of every reservation.
        estimate: how the output length is guessed.
    """

    def __init__(self, num_pages: int, page_size: int, max_model_len: int, estimate: Estimate) -> None:
        require(num_pages > 0, f"num_pages must be positive, got {num_pages}")
        require(estimate in ("max", "pow2", "oracle"), f"estimate must be max, pow2 or oracle, got {estimate!r}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.max_model_len = max_model_len
        self.estimate = estimate
        region = 1
        while region * page_size < max_model_len:
            region *= 2
        self._buddies = BuddyAllocator(num_pages, region)
        self._used_pages = 0
        self._reserved_tokens = 0
        self._final_tokens = 0
        self._held: dict[Group, tuple[int, int]] = {}  # per sequence: reserved tokens, pages
        self._crossings = [0] * page_size  # sequences by the tick residue at which they read one page more
        self._residue: dict[Group, int] = {}
        self._read_pages = 0

    def reserve_tokens(self, prompt_tokens: int, output_tokens: int) -> int:
        """Tokens reserved for one sequence: prompt plus the estimate, capped at the model's maximum."""
        if self.estimate == "max":
            guess = self.max_model_len
        elif self.estimate == "pow2":
            guess = 1 << (output_tokens - 1).bit_length()
        else:
            guess = output_tokens
        return min(prompt_tokens + guess, self.max_model_len)

    def _chunk_pages(self, tokens: int) -> int:
        return 1 << (-(-tokens // self.page_size) - 1).bit_length()

    def never_fits(self, request: Request, target: int) -> str | None:
        if request.prompt_tokens + target > self.max_model_len:
            return (
                f"prompt and output have {request.prompt_tokens + target} tokens, a reservation has at most "
                f"{self.max_model_len}; shorten the request"
            )
        tokens = self.reserve_tokens(request.prompt_tokens, target)
        size = self._chunk_pages(tokens)
        fresh = BuddyAllocator(self.num_pages, self._buddies.region)
        if all(fresh.take(size) is not None for _ in range(request.num_seqs)):
            return None
        return (
            f"it reserves {request.num_seqs} chunk(s) of {size} pages for {tokens} tokens, which a pool of "
            f"{self.num_pages} pages never has; shorten it or enlarge the pool"
        )

    def admit(self, group: Group, *, alone: bool, budget: int | None) -> Blocked | None:
        # A group that already generated tokens has sequences that differ; none can be computed for another.
        jobs = group.seqs if group.known > group.request.prompt_tokens else group.seqs[:1]
        if budget is not None and len(jobs) * group.known > budget:
            return Blocked.BUDGET
        tokens = self.reserve_tokens(group.request.prompt_tokens, group.target)
        size = self._chunk_pages(tokens)
        starts = []
        for _ in group.seqs:
            start = self._buddies.take(size)
            if start is None:
                for taken in reversed(starts):
                    self._buddies.give(taken, size)
                return Blocked.CHUNK
            starts.append(start)
        pages = -(-tokens // self.page_size)
        for seq, start in zip(group.seqs, starts, strict=True):
            seq.table = list(range(start, start + pages))
        self._held[group] = (tokens, size)
        self._account(group, len(group.seqs))
        group.jobs = [[seq, 0, group.known] for seq in jobs]
        return None

    def _account(self, group: Group, sequences: int) -> None:
        tokens, size = self._held[group]
        self._used_pages += sequences * size
        self._reserved_tokens += sequences * tokens
        self._final_tokens += sequences * (group.request.prompt_tokens + group.target)

    def start(self, group: Group, tick: int) -> None:
        stored = group.offset + tick - 1
        pages = -(-stored // self.page_size)
        residue = (1 - group.offset) % self.page_size
        self._residue[group] = residue
        self._crossings[residue] += len(group.seqs)
        self._read_pages += pages * len(group.seqs)

    def stop(self, group: Group, tick: int) -> None:
        stored = group.offset + tick - 1
        self._crossings[self._residue.pop(group)] -= len(group.seqs)
        self._read_pages -= -(-stored // self.page_size) * len(group.seqs)

    def grow(self, tick: int) -> Copies:
        self._read_pages += self._crossings[tick % self.page_size]
        return []

    def horizon(self, tick: int, limit: int, width: int) -> tuple[int, tuple[int, ...]]:
        page = self.page_size
        return limit, tuple(self._crossings[(tick + j) % page] for j in range(1, min(limit, page + 1)))

    def advance(self, tick: int, steps: int) -> None:
        cycles, rest = divmod(steps - 1, self.page_size)
        grown = cycles * sum(self._crossings) if cycles else 0
        for j in range(1, rest + 1):
            grown += self._crossings[(tick + j) % self.page_size]
        self._read_pages += grown

    def fork(self, group: Group) -> Copies:
        first, *others = group.seqs
        pages = -(-group.known // self.page_size)
        return [(first.table[index], seq.table[index]) for seq in others for index in range(pages)]

    def reorder(self, group: Group, parents: tuple[int, ...], stored: int) -> Copies:
        # Nothing is shared: a beam that takes another's place copies its whole table, as the authors' Orca does.
        return [
            pair
            for child, parent in enumerate(parents)
            if parent != child
            for pair in zip(group.seqs[parent].table, group.seqs[child].table, strict=True)
        ]

    def release(self, group: Group, stored: int) -> None:
        size = self._held[group][1]
        for seq in group.seqs:
            self._buddies.give(seq.table[0], size)
            seq.table = []
        self._account(group, -len(group.seqs))
        del self._held[group]

    def release_sequence(self, group: Group, index: int, stored: int) -> None:
        seq = group.seqs[index]
        self._crossings[self._residue[group]] -= 1
        self._read_pages -= -(-stored // self.page_size)
        self._buddies.give(seq.table[0], self._held[group][1])
        seq.table = []
        self._account(group, -1)

    @property
    def num_free_pages(self) -> int:
        return self.num_pages - self._used_pages

    def context_pages(self) -> int:
        return self._read_pages

    def usage(self, tick: int, logical_tokens: int, unfilled: tuple[int, int]) -> Usage:
        slots = self._used_pages * self.page_size
        missing = unfilled[0] + unfilled[1]
        return Usage(
            live=logical_tokens - missing,
            reserved=self._final_tokens - logical_tokens + missing,
            internal=self._reserved_tokens - self._final_tokens,
            external=slots - self._reserved_tokens,
            free=self.num_pages * self.page_size - slots,
            pages=self._used_pages,
            logical_pages=self._used_pages,
        )

    def check(self, groups: list[Group], tick: int) -> None:
        stored = [group.offset + tick - 1 for group in groups if group.decoding for _ in group.seqs]
        if self._read_pages != sum(-(-tokens // self.page_size) for tokens in stored):
            raise AssertionError(f"pages of decodes counted {self._read_pages}, lengths {stored} disagree")
        chunks = [(seq.table[0], self._held[g][1]) for g in groups if g in self._held for seq in g.seqs]
        chunks += [(start, size) for size, starts in self._buddies.free_chunks().items() for start in starts]
        end = 0
        for start, size in sorted(chunks):
            if start != end:
                raise AssertionError(f"chunks must tile the pool: one ends at page {end}, the next starts at {start}")
            end = start + size
        if end != self.num_pages:
            raise AssertionError(f"chunks must tile the pool's {self.num_pages} pages, they end at {end}")
