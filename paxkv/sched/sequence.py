"""Sequences and groups: what the scheduler moves between its queues.

Life of a group (paper section 4.5)::

                        admit                    all sequences done
    submit -> WAITING ---------> RUNNING -------------------------> FINISHED
                 ^                |   ^
                 |  recompute     |   | swap in
                 +----------------+   |
                                  +-> SWAPPED
                              swap out

All sequences of a group have the same length and move together. While a group decodes, its length is
not stored but derived: every decoding sequence gains one token per tick of the scheduler, so
``known = offset + tick``. A run of decode steps therefore costs no work per sequence.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable

from paxkv.request import Request
from paxkv.sched.plan import Chunk


class GroupState(enum.Enum):
    """Where a group is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"


class Sequence:
    """One output of a request: an id and a block table (logical block -> physical page)."""

    __slots__ = ("group", "seq_id", "table")

    def __init__(self, seq_id: int, group: Group) -> None:
        self.seq_id = seq_id
        self.group = group
        self.table: list[int] = []

    def __repr__(self) -> str:
        return f"Sequence({self.seq_id}, pages={self.table})"


class Group:
    """All sequences of one request.

    Attributes:
        order: position in the arrival order; smaller is served first and preempted last.
        seqs: the sequences still alive.
        known: tokens of each sequence (prompt and output) while the group does not decode.
        offset: ``known - tick`` while the group decodes.
        padding: tokens that a static batch adds before the prompt.
        target: output tokens of each sequence at its length limit.
        jobs: prefill work left, as [sequence, next position, end position].
        ids: token ids of the prompt and of the output, when known (sequence 0 speaks for the prompt).
        keys: content keys of the full pages of ``ids``, extended as pages fill.
        published: full pages of the first sequence that were offered to the prefix index since it got its table.
        twins: those of them whose content the index had in another page; they take its place if that one is evicted.
        evictions: of the index, when the twins were last offered.
        held: finished, but kept until its static batch ends.
    """

    __slots__ = (
        "decoding",
        "epoch",
        "evictions",
        "held",
        "ids",
        "jobs",
        "keys",
        "known",
        "offset",
        "order",
        "padding",
        "preemptions",
        "published",
        "request",
        "seqs",
        "state",
        "target",
        "twins",
    )

    def __init__(self, request: Request, order: int, first_seq_id: int) -> None:
        self.request = request
        self.order = order
        self.seqs = [Sequence(first_seq_id + i, self) for i in range(request.num_seqs)]
        self.state = GroupState.WAITING
        self.known = request.prompt_tokens
        self.offset = 0
        self.padding = 0
        self.decoding = False
        self.held = False
        self.epoch = 0
        self.preemptions = 0
        self.target = request.max_tokens
        self.jobs: list[list] = []
        self.ids: list[int] | None = list(request.prompt_ids) if request.prompt_ids is not None else None
        self.keys: list[bytes] = []
        self.published = 0
        self.twins: list[int] = []
        self.evictions = 0

    def common_tokens(self, page_size: int) -> int:
        """Tokens in pages that all sequences share on admission: all of them, or the prompt's full pages once the
        sequences have generated different tokens."""
        prompt = self.request.prompt_tokens
        return self.known if self.known == prompt else prompt // page_size * page_size

    def learn(self, ids: Iterable[int], known: int) -> bool:
        """Takes the ids of new tokens, after which ``known`` tokens are known. False if there is a gap.

        A gap (ids that were not reported, or those of a group that had several sequences) never closes: pages behind
        it must not be found by content.
        """
        if self.ids is None or self.request.num_seqs > 1:
            return False
        new = tuple(ids)
        if len(self.ids) + len(new) != known:
            return False
        self.ids += new
        return True

    def known_at(self, tick: int) -> int:
        """Tokens of each sequence when the scheduler's decode clock shows ``tick``."""
        return self.offset + tick if self.decoding else self.known

    def completes(self, prefills: Iterable[Chunk]) -> bool:
        """Whether the chunks are all that the group, in prefill, still needs."""
        done = {chunk.seq_id: chunk.start + chunk.count for chunk in prefills}
        return all(done.get(seq.seq_id, start) >= end for seq, start, end in self.jobs)

    def generated_at(self, tick: int) -> int:
        """Output tokens of each sequence at ``tick``."""
        return self.known_at(tick) - self.request.prompt_tokens - self.padding

    def __repr__(self) -> str:
        return f"Group({self.request.request_id!r}, {self.state.value}, seqs={len(self.seqs)}, known={self.known})"
