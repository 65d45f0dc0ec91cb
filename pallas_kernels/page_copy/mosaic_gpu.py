"""Copying pages on Hopper and Blackwell GPUs, in Pallas Mosaic GPU; needs jax 0.11.2 or later.

The host side: a program has the same piece of all pages of one layer of one array. It brings the pieces of the pages
that are read into shared memory, and then puts them where they belong. So all sources are read before any destination
is written, without a program having to wait for another: nobody else touches these bytes.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from pallas_kernels import in_place
from pallas_kernels.page_copy.arguments import Call
from pallas_kernels.paged_attention import gpu_chip

PLATFORM = "gpu"
BATCH = 16  # pairs that taking and putting have in shared memory at a time; copying has all
SHARED_BYTES = 96 << 10  # of a program, about: two of them fit on a core
ALIGNED = 128  # bytes, of what the TMA unit puts into shared memory
LONGEST = 256  # of an axis of what it moves
MOST_PARTS = 65535  # along an axis of a launch


def refuses(call: Call) -> str | None:
    """Why this implementation cannot do the call, or None."""
    reason = gpu_chip.refuses_mosaic()
    if reason is not None:
        return reason
    for x in call.pool:
        if piece(page_size(x), x.dtype.itemsize, room(call)) is None:
            return f"{batch(call)} pieces of pages, in {ALIGNED} bytes, must fit in shared memory; got {list(x.shape)}"
    parts = sum(page_size(x) // math.prod(piece(page_size(x), x.dtype.itemsize, room(call))) for x in call.pool)
    if max(parts, call.num_layers) > MOST_PARTS:
        return f"one launch has at most {MOST_PARTS} layers, and pieces of a page; got {call.num_layers} and {parts}"
    return None


def page_size(x: jax.Array) -> int:
    """Elements of a page of an array [L,N,...]."""
    return math.prod(x.shape[2:])


def batch(call: Call) -> int:
    """Pairs whose pieces are in shared memory together."""
    return call.count if call.kind == "copy" else min(call.count, BATCH)


def room(call: Call) -> int:
    """Bytes of shared memory for a piece of each of the arrays."""
    return SHARED_BYTES // (batch(call) * len(call.pool))


def piece(elements: int, itemsize: int, most_bytes: int) -> tuple[int, int] | None:
    """Rows and width of the largest pieces of at most ``most_bytes`` that pages fall into; None if there are none."""
    divisors = [n for n in range(1, LONGEST + 1) if elements % n == 0]
    fits = [
        (rows, width)
        for width in divisors
        for rows in divisors
        if elements % (rows * width) == 0
        and width * itemsize % 16 == 0
        and rows * width * itemsize % ALIGNED == 0
        and rows * width * itemsize <= most_bytes
    ]
    return max(fits, key=lambda shape: (math.prod(shape), shape[1]), default=None)


def copy(call: Call) -> tuple[jax.Array, ...]:
    """The pool after the copies."""
    return move(call, (), call.pool)


def take(call: Call) -> tuple[jax.Array, ...]:
    """What the sources hold, and zeros for those out of range."""
    return move(call, call.pool, tuple(jnp.zeros((call.count, x.shape[0], *x.shape[2:]), x.dtype) for x in call.pool))


def put(call: Call) -> tuple[jax.Array, ...]:
    """The pool with the content in it."""
    return move(call, call.content, call.pool)


def move(call: Call, read: tuple[jax.Array, ...], changed: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """One launch; ``changed`` is read, too, if nothing else is."""
    # Pallas Mosaic GPU takes a while to import, and other platforms do without.
    from pallas_kernels.page_copy import mosaic_kernel

    pieces = tuple(piece(page_size(x), x.dtype.itemsize, room(call)) for x in call.pool)
    shape = mosaic_kernel.Shape(
        kind=call.kind,
        batch=batch(call),
        layers=call.num_layers,
        pieces=pieces,
        parts=tuple(page_size(x) // math.prod(one) for x, one in zip(call.pool, pieces, strict=True)),
        interpreted=gpu_chip.current() is None,
    )
    real = jnp.ones((call.count,), bool)
    for ids, paged in ((call.sources, call.kind != "put"), (call.destinations, call.kind != "take")):
        real &= in_place.in_range(ids, call.num_pages) | (not paged)
    pad = (0, -call.count % shape.batch)
    sources = jnp.pad(jnp.where(real, call.sources, 0), pad)
    destinations = jnp.pad(jnp.where(real, call.destinations, -1), pad, constant_values=-1)

    def in_rows(arrays):
        return [x.reshape(*x.shape[:2], -1, width) for x, (_, width) in zip(arrays, pieces, strict=True)]

    results = mosaic_kernel.move(shape, sources, destinations, in_rows(read) if read else [], in_rows(changed))
    return tuple(x.reshape(before.shape) for x, before in zip(results, changed, strict=True))
