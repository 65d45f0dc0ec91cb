"""Sequences served step by step from one pool: what an engine does, without one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.pages import PageFormat
from paxkv.cache.pages import init
from paxkv.cache.rows import Rows
from paxkv.models.decoder import Decoder, DecoderConfig

NUM_PAGES = 48
BLOCKS = 12


@functools.cache
def _compiled(config: DecoderConfig):
    # Nearly all the time goes into compiling tiny programs, of which each runs a few times.
    quick = {"xla_backend_optimization_level": 0}
    return jax.jit(Decoder(config).apply, donate_argnums=3, compiler_options=quick)


class Session:
    """A pool of scattered pages, full of NaN, and the sequences in it.

    Args:
        width, places: tokens and rows that every step is padded to.
    """

    def __init__(
        self,
        config: DecoderConfig,
        params,
        *,
        page_size: int = 4,
        width: int = 16,
        places: int = 1,
        page_format: PageFormat | None = None,
    ) -> None:
        self.config, self.params, self.page_size = config, params, page_size
        self.width, self.places = width, places
        self.pages = init(config.cache_layout(NUM_PAGES, page_size, page_format), fill=float("nan"))
        self.free = np.random.default_rng(0).permutation(NUM_PAGES).tolist()
        self.tables: dict[str, list[int]] = {}
        self.lengths: dict[str, int] = {}

    def step(self, new: Mapping[str, Sequence[int]]) -> dict[str, np.ndarray]:
        """Feeds each sequence its new tokens, all in one step; the logits of each, [tokens, V]."""
        tables = np.full((self.places, BLOCKS), -1, np.int32)
        lens = np.zeros(self.places, np.int32)
        starts = np.zeros(self.places + 1, np.int32)
        # Padding tokens have an id of their own and stand nowhere.
        tokens, positions = np.full(self.width, 7, np.int32), np.zeros(self.width, np.int32)
        slots = np.full(self.width, -1, np.int32)
        at = 0
        for row, (name, ids) in enumerate(new.items()):
            table, begin = self.tables.setdefault(name, []), self.lengths.get(name, 0)
            end = self.lengths[name] = begin + len(ids)
            while len(table) * self.page_size < end:
                table.append(self.free.pop())
            tables[row, : len(table)] = table
            lens[row] = end
            where = np.arange(begin, end)
            here = slice(at, at + len(ids))
            tokens[here], positions[here] = ids, where
            slots[here] = np.asarray(table)[where // self.page_size] * self.page_size + where % self.page_size
            at += len(ids)
            starts[row + 1 :] = at
        single = self.width == self.places and all(len(ids) == 1 for ids in new.values())
        rows = Rows(*map(jnp.asarray, (tables, lens, starts, slots)), max_query_len=1 if single else None)
        rows.check(NUM_PAGES, self.page_size)
        logits, self.pages = _compiled(self.config)(
            {"params": self.params}, jnp.asarray(tokens), jnp.asarray(positions), self.pages, rows
        )
        logits = np.asarray(logits)
        return {name: logits[starts[row] : starts[row + 1]] for row, name in enumerate(new)}
