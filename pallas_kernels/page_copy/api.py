"""Copying pages: the public functions, and the table of their implementations."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Shaped

from pallas_kernels import implementations
from pallas_kernels.arguments import require
from pallas_kernels.page_copy import arguments, mosaic_gpu, reference, tpu, xla
from pallas_kernels.page_copy.arguments import Call

__all__ = ["IMPLEMENTATIONS", "copy_pages", "put_pages", "take_pages"]

# Best first. Each module has ``refuses(call) -> reason or None``; ``copy(call)`` and ``put(call)``, which return the
# pool, and ``take(call)``, which returns the content; and ``PLATFORM`` if it is for one only.
IMPLEMENTATIONS: dict[str, ModuleType] = {"tpu": tpu, "mosaic_gpu": mosaic_gpu, "xla": xla, "reference": reference}


def copy_pages(
    pool: Sequence[Shaped[Array, "L N ..."]],
    sources: Int32[Array, " C"],
    destinations: Int32[Array, " C"],
    *,
    implementation: str | None = None,
) -> tuple[Shaped[Array, "L N ..."], ...]:
    """Copies page ``sources[i]`` onto page ``destinations[i]`` in all layers of all arrays, in one launch.

    All sources are read before any destination is written, so chains and swaps mean what they say (copy-on-write, Kwon
    et al. 2023, section 4.4). Bits move unchanged. Donate the pool: it is changed in place.

    Args:
        pool: keys, values and scales per token, each [L,N,...] with the same L and N.
        sources, destinations: page ids. A pair with an id outside [0, N) is dropped; -1 is the usual padding.
            Destinations must be distinct, else it is undefined which source one gets.
        implementation: a name in ``IMPLEMENTATIONS``; None takes the first that can do the call on the platform of the
            mesh in use, or else of this machine.

    Returns:
        The arrays of the pool, changed.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it, its value and the rule.
    """
    pool = arguments.check_pool(pool)
    sources = arguments.check_ids("sources", sources)
    destinations = arguments.check_ids("destinations", destinations)
    lengths = f"lengths {sources.shape[0]} and {destinations.shape[0]}"
    require(sources.shape == destinations.shape, "destinations", lengths, "must be as long as sources")
    call = Call(pool, sources, destinations, (), "copy")
    return run(call, implementation) if call.count else pool


def take_pages(
    pool: Sequence[Shaped[Array, "L N ..."]], ids: Int32[Array, " C"], *, implementation: str | None = None
) -> tuple[Shaped[Array, "C L ..."], ...]:
    """What the pages ``ids`` hold in all layers, page by page, bit for bit (swapping out, section 4.5).

    Args:
        pool: arrays [L,N,...] with the same L and N.
        ids: page ids; one outside [0, N) reads as zeros.
        implementation: as for :func:`copy_pages`.

    Returns:
        An array [C,L,...] for each of the pool.

    Raises:
        ValueError, TypeError: as :func:`copy_pages`.
    """
    pool = arguments.check_pool(pool)
    ids = arguments.check_ids("ids", ids)
    call = Call(pool, ids, jnp.arange(ids.shape[0], dtype=jnp.int32), (), "take")
    if not call.count:
        return tuple(jnp.zeros((0, x.shape[0], *x.shape[2:]), x.dtype) for x in pool)
    return run(call, implementation)


def put_pages(
    pool: Sequence[Shaped[Array, "L N ..."]],
    ids: Int32[Array, " C"],
    content: Sequence[Shaped[Array, "C L ..."]],
    *,
    implementation: str | None = None,
) -> tuple[Shaped[Array, "L N ..."], ...]:
    """Puts what :func:`take_pages` took into the pages ``ids``, bit for bit (swapping in). Donate the pool.

    Args:
        pool: arrays [L,N,...] with the same L and N.
        ids: page ids; one outside [0, N) is dropped. All others must be distinct.
        content: an array [C,L,...] for each of the pool, in its dtype.
        implementation: as for :func:`copy_pages`.

    Returns:
        The arrays of the pool, changed.

    Raises:
        ValueError, TypeError: as :func:`copy_pages`.
    """
    pool = arguments.check_pool(pool)
    ids = arguments.check_ids("ids", ids)
    content = arguments.check_content(content, pool, ids.shape[0])
    call = Call(pool, jnp.arange(ids.shape[0], dtype=jnp.int32), ids, content, "put")
    return run(call, implementation) if call.count else pool


def run(call: Call, implementation: str | None) -> tuple[jax.Array, ...]:
    """Runs a checked call on the implementation named, or on the first that can do it."""
    module = implementations.choose(call, IMPLEMENTATIONS, implementation)
    function = getattr(module, call.kind)
    if hasattr(module, "PLATFORM"):
        function = implementations.differentiated_as(getattr(xla, call.kind), function)
    return function(call)
