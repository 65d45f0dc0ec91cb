"""The shapes of a step: one place for planning, padding and warm-up, so that they cannot disagree.

XLA compiles a program for each shape. A step is therefore padded to one of few sizes, a *bucket*: powers of two and
the points half-way between them, up to a limit that is itself the last size. What :class:`Buckets` answers for any
step is in :meth:`Buckets.all`, which is what warm-up compiles; tests hold the two against each other.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from typing import Literal

from paxkv.config import require


@dataclasses.dataclass(frozen=True)
class Ladder:
    """Sizes that grow up to a limit.

    From 8 on there are ``per_doubling`` sizes to each doubling. With 2, at most a third of a bucket of more than 8 is
    padding (33 in 48) and about a seventh on average; with 4 at most a fifth.

    Attributes:
        limit: the last size, exactly.
        start: the first size, unless the limit is smaller. Small sizes that save nothing are left out with it.
        per_doubling: 1, 2 or 4.

    Raises:
        ValueError: a limit or start below 1, another ``per_doubling``.
    """

    limit: int
    start: int = 1
    per_doubling: int = 2

    def __post_init__(self) -> None:
        for field in ("limit", "start"):
            value = getattr(self, field)
            require(
                isinstance(value, int) and not isinstance(value, bool) and value >= 1,
                f"Ladder.{field} must be a whole number of at least 1, got {value!r}; use the configured limit",
            )
        require(
            self.per_doubling in (1, 2, 4),
            f"Ladder.per_doubling must be 1, 2 or 4, got {self.per_doubling!r}; use 2 unless padding is costly",
        )
        object.__setattr__(self, "_sizes", self._grow())

    def _grow(self) -> tuple[int, ...]:
        sizes, power = [], 1
        while power < self.limit:
            # Below 8 the points between add compilations and save nothing.
            parts = self.per_doubling if power >= 8 else 1
            sizes += [power + power * part // parts for part in range(parts)]
            power *= 2
        return (*(size for size in sizes if self.start <= size < self.limit), self.limit)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every size, growing."""
        return self._sizes  # pyright: ignore[reportAttributeAccessIssue]

    def fit(self, count: int) -> int:
        """The smallest size that holds ``count``.

        Raises:
            ValueError: ``count`` is below 1 or above the limit.
        """
        require(
            1 <= count <= self.limit,
            f"a bucket holds 1 to {self.limit} entries, got {count}; the buckets' limits must be the scheduler's",
        )
        return self.sizes[bisect.bisect_left(self.sizes, count)]


@dataclasses.dataclass(frozen=True, order=True)
class Bucket:
    """The shape of one program.

    Attributes:
        kind: ``decode``, ``mixed`` or ``copies``.
        sizes: (rows,), (tokens, samples) or (pairs,).
    """

    kind: Literal["decode", "mixed", "copies"]
    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind}[{','.join(map(str, self.sizes))}]"


class Buckets:
    """The shapes of every step that fits the limits.

    Args:
        max_num_seqs: most sequences in a step, all the sequences of a group counted.
        max_num_batched_tokens: most tokens in a step.
        max_copies: most page copies in one call; more are made in several calls. None is ``max_num_seqs``.
        per_doubling: how fine the sizes are, see :class:`Ladder`.

    Raises:
        ValueError: a limit below 1.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        *,
        max_copies: int | None = None,
        per_doubling: int = 2,
    ) -> None:
        for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
            require(
                isinstance(value, int) and value >= 1,
                f"{name} must be a whole number of at least 1, got {value!r}; take it from SchedulerConfig",
            )
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        rows = min(max_num_seqs, max_num_batched_tokens)  # each sequence of a step has a token in it
        self.rows = Ladder(rows, per_doubling=per_doubling)
        # A step with a prompt in it is dominated by that prompt: its smallest size is 16, and its samples, which cost
        # a row of the last layer each, come in quarters of their limit.
        self.tokens = Ladder(max_num_batched_tokens, start=16, per_doubling=per_doubling)
        self.samples = tuple(sorted({max(1, rows // 16), max(1, rows // 4), rows}))
        self.pairs = Ladder(max_num_seqs if max_copies is None else max_copies, start=4, per_doubling=1)

    def decode(self, rows: int) -> int:
        """Rows, which are also tokens and samples, of a step in which every sequence has one token."""
        return self.rows.fit(rows)

    def mixed(self, tokens: int, samples: int) -> tuple[int, int]:
        """(T, R) of any other step: its tokens, and how many of them are sampled from (0 counts as 1)."""
        require(
            0 <= samples <= min(tokens, self.samples[-1]),
            f"a step samples from at most {self.samples[-1]} of its tokens, got {samples} samples of {tokens} tokens; "
            "the buckets' limits must be the scheduler's",
        )
        return self.tokens.fit(tokens), self.samples[bisect.bisect_left(self.samples, samples)]

    def copies(self, count: int) -> int:
        """Page copies of one call: 0 for none."""
        return 0 if count == 0 else self.pairs.fit(count)

    def all(self) -> tuple[Bucket, ...]:
        """Every bucket that some step within the limits needs, smallest first: what warm-up compiles."""
        decodes = [Bucket("decode", (size,)) for size in self.rows.sizes]
        # A step has no more samples than tokens, so a pair is reached unless even the fewest samples that need R,
        # one more than the size before, are too many.
        least = zip(itertools.chain([0], self.samples), self.samples, strict=False)
        fewest = {size: before + 1 for before, size in least}
        mixed = [
            Bucket("mixed", (tokens, samples))
            for tokens in self.tokens.sizes
            for samples in self.samples
            if fewest[samples] <= tokens
        ]
        return (*decodes, *mixed, *(Bucket("copies", (size,)) for size in self.pairs.sizes))
