"""Which pages the rows of a step read and write.

A row is one sequence in a step. Its keys are the first ``kv_lens[s]`` positions of the pages in ``block_tables[s]``;
its queries are the newest of them.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
from jaxtyping import Array, Int32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of one step.

    Attributes:
        block_tables: [S,P] page of each block; entries past a row's last block are never read.
        kv_lens: [S] tokens of each row once this step's are written; 0 for a row that only pads.
        query_starts: [S+1] row s's queries are tokens ``query_starts[s]:query_starts[s+1]``, at positions
            ``kv_lens[s] - n .. kv_lens[s] - 1``; tokens from ``query_starts[S]`` on only pad.
        slots: [T] where each token's K and V are written: page * page_size + offset; -1: nowhere.
        max_query_len: most queries of a row, static; 1 for a step that only decodes, None where nothing is known.
    """

    block_tables: Int32[Array, "S P"]
    kv_lens: Int32[Array, " S"]
    query_starts: Int32[Array, " S+1"]
    slots: Int32[Array, " T"]
    max_query_len: int | None = dataclasses.field(default=None, metadata=dict(static=True))

    def check(self, num_pages: int, page_size: int) -> None:
        """Rejects rows that would read or write outside the pool. For the host, before the launch: reads every array.

        Raises:
            ValueError: the rule that is broken, the row or token, and the value seen.
        """
        tables, lens, starts, slots = (
            np.asarray(x) for x in (self.block_tables, self.kv_lens, self.query_starts, self.slots)
        )
        if tables.ndim != 2 or lens.shape != tables.shape[:1] or starts.shape != (len(lens) + 1,) or slots.ndim != 1:
            raise ValueError(
                "rows are block_tables [S,P], kv_lens [S], query_starts [S+1] and slots [T], got "
                f"{tables.shape}, {lens.shape}, {starts.shape} and {slots.shape}"
            )
        counts = np.diff(starts)
        if starts[0] != 0 or (counts < 0).any() or starts[-1] > len(slots):
            raise ValueError(f"query_starts must rise from 0 to at most the {len(slots)} tokens, got {starts.tolist()}")
        limit = tables.shape[1] * page_size
        for wrong, rule in (
            ((lens < 0) | (lens > limit), f"kv_lens must lie in 0..{limit} ({tables.shape[1]} pages of {page_size})"),
            (counts > lens, f"a row cannot have more queries than keys (queries {counts.tolist()}) in kv_lens"),
            (counts > (self.max_query_len or counts), f"no row may have more than {self.max_query_len} queries"),
        ):
            if wrong.any():
                raise ValueError(f"{rule}, got {lens.tolist()}; row {np.flatnonzero(wrong)[0]} is wrong")
        used = np.arange(tables.shape[1]) * page_size < lens[:, None]
        wrong = used & ((tables < 0) | (tables >= num_pages))
        if wrong.any():
            row, block = np.argwhere(wrong)[0]
            raise ValueError(
                f"pages in use must lie in 0..{num_pages - 1}, got {tables[row, block]} in row {row}, block {block}"
            )
        wrong = (slots < -1) | (slots >= num_pages * page_size)
        if wrong[: starts[-1]].any():
            token = np.flatnonzero(wrong)[0]
            raise ValueError(
                f"slots must lie in 0..{num_pages * page_size - 1}, or be -1 for a token that is not written, got "
                f"{slots[token]} for token {token}"
            )
