"""The jobs of a launch: which queries of which row attend which blocks of its pages. Scalar code, inside the kernel."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

ROW, FIRST, LOW, HIGH, END, FIELDS = range(6)
"""What is kept of a job, int32: its row, the first of its queries in the row, its first block, one past its last block,
one past the last token that one of its queries sees."""


class Job(NamedTuple):
    """A job in full, int32 scalars.

    Attributes:
        low, high: blocks with a token that some query sees: low..high-1.
        inner_low, inner_high: blocks that every query sees whole, inner_low..inner_high-1 in low..high-1.
        at: position of the first query in its row.
        start: first token that some query sees.
        end: one past the last.
    """

    low: jax.Array
    high: jax.Array
    inner_low: jax.Array
    inner_high: jax.Array
    at: jax.Array
    start: jax.Array
    end: jax.Array


def first_seen(options, window: jax.Array, position: jax.Array) -> jax.Array:
    """The first token that a query at ``position`` sees."""
    if not options.window:
        return jnp.int32(0)
    return jnp.where(window < 1, 0, jnp.maximum(position - window + 1, 0))


def list_jobs(layout, options, refs) -> jax.Array:
    """Fills ``refs.jobs`` with the jobs that have something to attend, and one more of zeros; returns their number."""
    window = refs.window[0]

    def add_row(row, count):
        queries = refs.query_starts[row + 1] - refs.query_starts[row]
        length = refs.kv_lens[row]

        def add(index, count):
            first = index * layout.queries
            at = length - queries + first
            end = jnp.minimum(at + layout.queries, length) if options.causal else length
            low = first_seen(options, window, at) // layout.block_tokens
            high = (jnp.maximum(end, 0) + layout.block_tokens - 1) // layout.block_tokens
            for field, value in ((ROW, row), (FIRST, first), (LOW, low), (HIGH, high), (END, end)):
                refs.jobs[field, count] = value
            return count + (high > low).astype(jnp.int32)  # an empty job is overwritten by the next

        mine = {"all": queries > 0, "single": queries == 1, "several": queries > 1}[options.takes]
        return lax.fori_loop(0, jnp.where(mine, (queries + layout.queries - 1) // layout.queries, 0), add, count)

    count = lax.fori_loop(0, refs.kv_lens.shape[0], add_row, jnp.int32(0))
    for field in range(FIELDS):
        refs.jobs[field, count] = 0
    return count


def load_job(layout, options, refs, index: jax.Array) -> Job:
    """The job at ``index`` of the list."""
    row, first, low, high, end = (refs.jobs[field, index] for field in range(FIELDS))
    window = refs.window[0]
    length = refs.kv_lens[row]
    at = length - (refs.query_starts[row + 1] - refs.query_starts[row]) + first
    last = at + layout.queries - 1
    inner_low = (first_seen(options, window, last) + layout.block_tokens - 1) // layout.block_tokens
    inner_high = (at + 1 if options.causal else length) // layout.block_tokens
    inner_low = jnp.clip(inner_low, low, high)
    inner_high = jnp.clip(inner_high, inner_low, high)
    return Job(low, high, inner_low, inner_high, at, first_seen(options, window, at), end)


def job_tokens(layout, refs, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The index of a job's first query among all queries, and how many it has."""
    row = refs.jobs[ROW, index]
    first = refs.query_starts[row] + refs.jobs[FIRST, index]
    return first, jnp.minimum(refs.query_starts[row + 1] - first, layout.queries)
