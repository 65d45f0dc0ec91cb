"""The kernel that moves pieces of pages on NVIDIA GPUs, see ``mosaic_gpu``."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Literal

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class Shape:
    """What the kernel is compiled for.

    Attributes:
        kind: what is done, see ``arguments.Call``.
        batch: pairs whose pieces are in shared memory together.
        layers: L.
        pieces: of each array, rows and width of a piece.
        parts: of each array, pieces of a page.
        interpreted: whether it runs in the interpreter.
    """

    kind: Literal["copy", "take", "put"]
    batch: int
    layers: int
    pieces: tuple[tuple[int, int], ...]
    parts: tuple[int, ...]
    interpreted: bool

    @property
    def name(self) -> str:
        """Name of the kernel in profiles and dumps."""
        return f"page_copy_{self.kind}_{'_'.join(f'{rows}x{width}' for rows, width in self.pieces)}_b{self.batch}"


def body(shape: Shape, sources_ref, destinations_ref, read_refs, changed_refs, *, stages, barrier):
    """Ids int32 [C], a multiple of the batch, destinations negative where nothing is written; arrays [L,N,R,W] of pages

    or [C,L,R,W] of content. ``stages`` of each array [batch,rows,W] are in shared memory; ``barrier`` has as many
    arrivals as a batch has pairs.
    """
    layer, part = lax.axis_index("layer"), lax.axis_index("part")
    begins = (0, *itertools.accumulate(shape.parts))
    for array, stage in enumerate(stages):
        rows = shape.pieces[array][0]
        changed = changed_refs[array]
        read = read_refs[array] if read_refs else changed

        @pl.when((part >= begins[array]) & (part < begins[array + 1]))
        def _(read=read, changed=changed, stage=stage, rows=rows, begin=begins[array]):
            mine = pl.ds((part - begin) * rows, rows)

            def one_batch(index, _):
                first = index * shape.batch

                def bring(i, _):
                    page = sources_ref[first + i]
                    piece = read.at[(page, layer, mine) if shape.kind == "put" else (layer, page, mine)]
                    plgpu.copy_gmem_to_smem(piece, stage.at[i], barrier)

                def leave(i, _):
                    page = destinations_ref[first + i]
                    place = (page, layer, mine) if shape.kind == "take" else (layer, page, mine)
                    pl.when(page >= 0)(lambda: plgpu.copy_smem_to_gmem(stage.at[i], changed.at[place]))

                lax.fori_loop(0, shape.batch, bring, None)
                plgpu.barrier_wait(barrier)
                plgpu.commit_smem()  # orders the copies behind it, too, which may write what was read
                lax.fori_loop(0, shape.batch, leave, None)
                plgpu.wait_smem_to_gmem(0)

            lax.fori_loop(0, sources_ref.shape[0] // shape.batch, one_batch, None)


def move(
    shape: Shape,
    sources: jax.Array,
    destinations: jax.Array,
    read: Sequence[jax.Array],
    changed: Sequence[jax.Array],
) -> list[jax.Array]:
    """Runs the kernel on arrays as the body takes them; returns ``changed``, changed in place."""
    stages = [plgpu.SMEM((shape.batch, *piece), x.dtype) for piece, x in zip(shape.pieces, changed, strict=True)]
    kernel = plgpu.kernel(
        functools.partial(body, shape),
        grid=(shape.layers, sum(shape.parts)),
        grid_names=("layer", "part"),
        scratch_types={"stages": stages, "barrier": plgpu.Barrier(num_arrivals=shape.batch)},
        kernel_name=shape.name,
        interpret=plgpu.InterpretGPUParams() if shape.interpreted else False,
    )
    return pl.run_state(lambda refs: kernel(sources, destinations, list(read), refs))(list(changed))
