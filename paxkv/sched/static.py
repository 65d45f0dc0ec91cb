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
        self._batch: dict[Group, int] = {}  # tokens that each sequence of the group has when it ends
        self._ended: dict[Group, list[int]] = {}  # tokens of sequences that ended before their group
        self._sealed = False
        self._prompt = 0
        self._output = 0

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
        rows = self._rows()
        prompt = max(self._prompt, group.request.prompt_tokens)
        output = max(self._output, group.target)
        if self._sealed or rows + len(group.seqs) > self.num_pages or prompt + output > self.max_batch_len:
            return Blocked.BATCH
        self._prompt, self._output = prompt, output
        self._batch[group] = group.request.prompt_tokens + group.target
        return None

    def _rows(self) -> int:
        return sum(len(group.seqs) for group in self._batch) + sum(map(len, self._ended.values()))

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

    def start(self, group: Group, tick: int) -> None:
        """Rows are given for the whole batch."""

    def stop(self, group: Group, tick: int) -> None:
        """Rows are given for the whole batch."""

    def grow(self, tick: int) -> Copies:
        return []

    def advance(self, tick: int, steps: int) -> None:
        """Rows are given for the whole batch."""

    def reorder(self, group: Group, parents: tuple[int, ...], stored: int) -> Copies:
        rows = [seq.table[0] for seq in group.seqs]
        return [(rows[parent], rows[child]) for child, parent in enumerate(parents) if parent != child]

    def hold(self, group: Group, tick: int) -> bool:
        self._batch[group] = group.known_at(tick) - group.padding
        self.num_held += len(group.seqs)
        return any(not member.held for member in self._batch if member is not group)

    def release(self, group: Group, stored: int) -> None:
        del self._batch[group]
        self._ended.pop(group, None)
        if group.held:
            self.num_held -= len(group.seqs)
        group.known -= group.padding
        group.padding = 0
        for seq in group.seqs:
            seq.table = []
        if not self._batch:
            self._sealed, self._prompt, self._output = False, 0, 0

    def release_sequence(self, group: Group, index: int, stored: int) -> None:
        # Its row stays taken until the batch ends.
        self._ended.setdefault(group, []).append(stored + 1 - group.padding)

    @property
    def num_free_pages(self) -> int:
        return self.num_pages - self._rows()

    def context_pages(self) -> int:
        return 0  # rows are contiguous

    def usage(self, tick: int, logical_tokens: int, unfilled: tuple[int, int]) -> Usage:
        rows, ended = self._rows(), sum(map(sum, self._ended.values()))
        final = ended + sum(tokens * len(group.seqs) for group, tokens in self._batch.items())
        known = sum(group.known_at(tick) * len(group.seqs) for group in self._batch)
        newest = int(known != logical_tokens)  # between plans the newest token of a sequence has no slot yet
        live = ended - unfilled[0] - unfilled[1]
        for group, tokens in self._batch.items():
            growing = group.known_at(tick) - group.padding - (newest if group.decoding else 0)
            live += (tokens if group.held else growing) * len(group.seqs)
        return Usage(
            live=live,
            reserved=final - live,
            internal=rows * self.page_size - final,
            free=(self.num_pages - rows) * self.page_size,
            pages=rows,
            logical_pages=rows,
        )

    def check(self, groups: list[Group], tick: int) -> None:
        rows = [seq.table[0] for group in self._batch if self._sealed for seq in group.seqs]
        if len(set(rows)) != len(rows):
            raise AssertionError(f"two sequences share a row: {rows}")
