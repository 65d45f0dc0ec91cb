"""FasterTransformer's batching: one batch at a time, each request with room for its maximum length.

Requests are taken in order while the longest prompt plus the longest output of the batch stays within a
limit and the batch is not full. Prompts are padded to the longest, and every request finishes when the
longest output does (paper section 6.1; the limits are the artifact's).
"""

from __future__ import annotations

from paxkv.config import require
from paxkv.request import Request
from paxkv.sched.events import Blocked
from paxkv.sched.memory import Copies, Memory
from paxkv.sched.sequence import Group
from paxkv.sched.waste import Usage


class StaticMemory(Memory):
    """A batch of rows, each ``max_model_len`` slots long.

    Args:
        num_rows: largest batch.
        max_model_len: slots of a row.
        max_batch_len: most tokens of longest prompt plus longest output (2040 in the artifact).
    """

    def __init__(self, num_rows: int, max_model_len: int = 2048, max_batch_len: int = 2040) -> None:
        require(num_rows > 0, f"num_rows must be positive, got {num_rows}")
        require(
            0 < max_batch_len <= max_model_len,
            f"max_batch_len must be in 1..{max_model_len}, got {max_batch_len}",
        )
        self.num_pages = num_rows
        self.page_size = max_model_len
        self.max_batch_len = max_batch_len
        self.num_held = 0
        self._batch: list[Group] = []
        self._sealed = False
        self._prompt = 0
        self._output = 0
        self._active = 0  # sequences that have not finished
        self._held_tokens = 0
        self._final_tokens = 0
        self._padding = 0  # padding of the sequences that have not finished

    def never_fits(self, request: Request, target: int) -> str | None:
        if request.prompt_tokens + target > self.max_batch_len:
            return (
                f"prompt and output have {request.prompt_tokens + target} tokens, a batch allows "
                f"{self.max_batch_len}; shorten the request"
            )
        if request.num_seqs > self.num_pages:
            return f"it has {request.num_seqs} sequences, a batch has {self.num_pages} rows"
        return None

    def admit(self, group: Group, *, alone: bool, budget: int | None) -> Blocked | None:
        rows = sum(len(member.seqs) for member in self._batch)
        prompt = max(self._prompt, group.request.prompt_tokens)
        output = max(self._output, group.target)
        if self._sealed or rows + len(group.seqs) > self.num_pages or prompt + output > self.max_batch_len:
            return Blocked.BATCH
        self._prompt, self._output = prompt, output
        self._batch.append(group)
        return None

    def seal(self) -> None:
        if self._sealed or not self._batch:
            return
        self._sealed = True
        free = iter(range(self.num_pages))
        for group in self._batch:
            group.padding = self._prompt - group.request.prompt_tokens
            group.known += group.padding
            for seq in group.seqs:
                seq.table = [next(free)]
            group.jobs = [[seq, 0, group.known] for seq in group.seqs]
            self._active += len(group.seqs)
            self._padding += group.padding * len(group.seqs)
            self._final_tokens += (group.request.prompt_tokens + group.target) * len(group.seqs)

    def start(self, group: Group, tick: int) -> None:
        """Rows are given for the whole batch."""

    def stop(self, group: Group, tick: int) -> None:
        """Rows are given for the whole batch."""

    def grow(self, tick: int) -> Copies:
        return []

    def advance(self, tick: int, steps: int) -> None:
        """Rows are given for the whole batch."""

    def hold(self, group: Group, tick: int) -> bool:
        num_seqs = len(group.seqs)
        self._active -= num_seqs
        self._padding -= group.padding * num_seqs
        self._held_tokens += (group.request.prompt_tokens + group.target) * num_seqs
        self.num_held += num_seqs
        return self._active > 0

    def release(self, group: Group, stored: int) -> None:
        self._batch.remove(group)
        if not group.held:  # aborted
            self._active -= len(group.seqs)
            self._padding -= group.padding * len(group.seqs)
        else:
            self.num_held -= len(group.seqs)
            self._held_tokens -= (group.request.prompt_tokens + group.target) * len(group.seqs)
        self._final_tokens -= (group.request.prompt_tokens + group.target) * len(group.seqs)
        for seq in group.seqs:
            seq.table = []
        if not self._batch:
            self._sealed, self._prompt, self._output = False, 0, 0

    @property
    def num_free_pages(self) -> int:
        return self.num_pages - sum(len(group.seqs) for group in self._batch)

    def context_pages(self) -> int:
        return 0  # rows are contiguous

    def usage(self, tick: int, logical_tokens: int, unfilled: tuple[int, int]) -> Usage:
        rows = sum(len(group.seqs) for group in self._batch)
        growing = sum(group.known_at(tick) * len(group.seqs) for group in self._batch if not group.held)
        live = growing - self._padding - unfilled[0] - unfilled[1] + self._held_tokens
        return Usage(
            live=live,
            reserved=self._final_tokens - live,
            internal=rows * self.page_size - self._final_tokens,
            free=(self.num_pages - rows) * self.page_size,
            pages=rows,
            logical_pages=rows,
        )

    def check(self, groups: list[Group], tick: int) -> None:
        rows = [seq.table[0] for group in self._batch if self._sealed for seq in group.seqs]
        if len(set(rows)) != len(rows):
            raise AssertionError(f"two sequences share a row: {rows}")
