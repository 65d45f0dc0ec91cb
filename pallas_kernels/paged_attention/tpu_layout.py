"""How keys, values and queries lie in the matrix products of the TPU kernel.

A page is read as rows of at least 128 lanes: [K*B/fold, width], ``fold`` tokens of a head side by side where heads are
narrower than 128. Rows of different heads or tokens may share a product, as long as each query meets zeros in the
lanes, and masked logits in the columns, that are not its own:

- ``mixed`` heads follow each other in a *run* of rows, so that a run fills whole registers (of 8-bit pages with 16
  slots, two heads);
- ``sides`` runs lie next to each other on the lanes, so that they fill a matrix unit 256 wide: those of different heads
  or, where all heads are in one run, of the two ``halves`` of a block's pages.

The query heads that meet in a product are a *team*. A query head whose tokens lie in several places of the lanes (its
``streams``: fold times halves) has a row of logits, and a softmax, for each of them; they join at the end.

    rows of queries [streams * queries * team heads, sides * width]   rows of keys [columns, sides * width]
                      \\____________ height __________/                              \\ part pages * run
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

LANES = 128


def sublanes(dtype) -> int:
    """Rows of this dtype that one register holds."""
    return 32 // jnp.dtype(dtype).itemsize


@dataclasses.dataclass(frozen=True)
class Layout:
    """See the module.

    Attributes:
        heads, kv_heads, size, page_size: H, K, D, B.
        mixed, sides, halves: see the module; ``halves`` is 2 or 1.
        queries: queries of a job, 1 when decoding.
        pages: pages of a block.
        parts: pieces of a block that are attended one after the other.
        joined: pages that come in one copy where they are neighbours in the pool.
        depth: blocks in the ring, those in flight and the one attended.
        digits: int8 digits that a query is split into for an int8 product, 0 for a float product.
    """

    heads: int
    kv_heads: int
    size: int
    page_size: int
    mixed: int
    sides: int
    halves: int
    queries: int
    pages: int
    parts: int
    joined: int
    depth: int
    digits: int

    @property
    def width(self) -> int:
        """Lanes of a row."""
        return max(LANES, self.size)

    @property
    def fold(self) -> int:
        """Tokens of a head in a row."""
        return self.width // self.size

    @property
    def slots(self) -> int:
        """Rows of a head in a page."""
        return self.page_size // self.fold

    @property
    def run(self) -> int:
        """Rows of a page that go into one side of a product."""
        return self.slots * self.mixed

    @property
    def page_rows(self) -> int:
        """Rows of a page."""
        return self.slots * self.kv_heads

    @property
    def team_runs(self) -> int:
        """Runs of a page in one product."""
        return self.sides // self.halves

    @property
    def teams(self) -> int:
        """Products that it takes to attend a part."""
        return self.kv_heads // (self.mixed * self.team_runs)

    @property
    def team_heads(self) -> int:
        """Query heads of a team."""
        return self.heads // self.teams

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def streams(self) -> int:
        """Softmaxes of a query head."""
        return self.fold * self.halves

    @property
    def lines(self) -> int:
        """Rows of a stream: queries times the heads of a team."""
        return self.queries * self.team_heads

    @property
    def height(self) -> int:
        """Rows of logits of a team."""
        return self.streams * self.lines

    @property
    def block_tokens(self) -> int:
        """Tokens of a row in a block."""
        return self.pages * self.page_size

    @property
    def half_tokens(self) -> int:
        """Tokens between the halves of a block."""
        return self.block_tokens // self.halves

    @property
    def part_pages(self) -> int:
        """Pages of a part (of each half)."""
        return self.pages // (self.halves * self.parts)

    @property
    def columns(self) -> int:
        """Columns of logits of a part."""
        return self.part_pages * self.run

    @property
    def scale_rows(self) -> int:
        """Rows of 128 scales per token that a page has, if the kernel can take them as they lie; 0 if it cannot.

        It can if a run's scales lie in one such row, or fill some, and its columns fill registers.
        """
        scales = self.kv_heads * self.page_size
        in_one = LANES % (self.run * self.fold) == 0
        fill_some = self.fold == 1 and self.run % LANES == 0
        fits = scales % LANES == 0 and self.columns % LANES == 0 and (in_one or fill_some)
        return scales // LANES if fits else 0

    @property
    def run_tiles(self) -> int:
        """Registers of columns that a run fills, 0 if it does not fill one."""
        return self.run // LANES

    @property
    def block_tiles(self) -> int:
        """Registers of columns that the runs of a block fill."""
        return self.pages * self.run // LANES
