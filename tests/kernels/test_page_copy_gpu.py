"""page_copy in Pallas Mosaic GPU, in the GPU interpreter, which reports races between copies and what reads them."""

from __future__ import annotations

import numpy as np
import pytest

from pallas_kernels.page_copy.api import copy_pages, put_pages, take_pages
from tests.kernels.devices import OLD, gpu_interpreter, new_jax
from tests.kernels.page_copy_suite import PageCopySuite, Shapes, assert_same_bits, build


class MosaicSuite(PageCopySuite):
    implementation = "mosaic_gpu"
    examples = 3

    def run(self, *arguments):
        with gpu_interpreter():
            return super().run(*arguments)


@new_jax
class TestMosaic(MosaicSuite):
    """Everything."""

    def test_more_pages_than_a_batch(self):
        """20 pages, of which some go nowhere: taking and putting take two turns."""
        pool = build(Shapes(layers=2, pages=24))
        ids = np.asarray([*range(22, 6, -1), -1, 30, 3, 2], np.int32)
        content = self.run(take_pages, pool, ids)
        real = ids[(ids >= 0) & (ids < 24)]
        for x, rows in zip(pool, content, strict=True):
            assert_same_bits([rows[[*range(16), 18, 19]]], [np.moveaxis(x[:, real], 1, 0)])
            assert not rows[16:18].view(np.uint8).any()
        blank = [np.zeros_like(x) for x in pool]
        for x, put in zip(pool, self.run(put_pages, blank, ids, content), strict=True):
            want = np.zeros_like(x)
            want[:, real] = x[:, real]
            assert_same_bits([put], [want])


@new_jax
@pytest.mark.parametrize(
    ("pool", "pairs"),
    [
        ([np.zeros((2, 3, 4), np.float32)], 2),  # 16 bytes of a page
        ([np.zeros((1, 2, 8, 1024), np.float32)], 1000),  # more pairs than shared memory has pieces
    ],
)
def test_what_it_refuses_it_explains(pool, pairs):
    ids = np.full(pairs, -1, np.int32)
    with pytest.raises(ValueError, match="mosaic_gpu cannot do this call: .*must fit in shared memory"):
        copy_pages(pool, ids, ids, implementation="mosaic_gpu")


@pytest.mark.skipif(not OLD, reason="this jax is new enough")
def test_an_old_jax_is_refused():
    ids = np.zeros(1, np.int32)
    with pytest.raises(ValueError, match=r"it needs jax 0\.11\.2 or later"):
        copy_pages([np.zeros((1, 2, 2, 16, 64), np.float32)], ids, ids, implementation="mosaic_gpu")
