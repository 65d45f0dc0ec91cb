"""Copying pages on TPUs: whole pages from HBM to HBM, all layers and arrays in one launch."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import in_place
from pallas_kernels.page_copy.arguments import Call

PLATFORM = "tpu"
MOST_PAIRS = 1 << 16  # whose ids fit in SMEM


def refuses(call: Call) -> str | None:
    """Why this implementation cannot do the call, or None."""
    if call.count > MOST_PAIRS:
        return f"at most {MOST_PAIRS} pairs have their ids in SMEM; got {call.count}"
    for x in call.pool:
        if x.dtype == jnp.float16:
            return "it has no float16"
        if x.ndim < 4:
            return f"a page must have at least two axes, to lie in tiles; got arrays {list(x.shape)}"
    return None


def copy(call: Call) -> tuple[jax.Array, ...]:
    """The pool after the copies: straight ones where no page is both read and written, else through a stage."""
    sources, destinations = call.sources, call.destinations
    real = in_place.in_range(sources, call.num_pages) & in_place.in_range(destinations, call.num_pages)
    sources, destinations, count = first_real(real, sources, destinations)
    index = jnp.arange(call.count, dtype=jnp.int32)
    meets = (destinations[:, None] == sources[None]) & (index[:, None] < count) & (index[None] < count)
    staged = jnp.any(meets & (index[:, None] != index[None]))
    # One layer at a time waits in the stage.
    stages = [jax.ShapeDtypeStruct((call.count, *x.shape[2:]), x.dtype) for x in call.pool]
    scalars = jnp.stack([count, staged.astype(jnp.int32)]), sources, destinations
    return launch(copy_kernel, scalars, (), call.pool, stages)[: len(call.pool)]


def take(call: Call) -> tuple[jax.Array, ...]:
    """What the sources hold, and zeros for those out of range."""
    real = in_place.in_range(call.sources, call.num_pages)
    sources, places, count = first_real(real, call.sources, call.destinations)
    blank = [jnp.zeros((call.count, x.shape[0], *x.shape[2:]), x.dtype) for x in call.pool]
    return launch(functools.partial(move_kernel, True), (count[None], sources, places), call.pool, blank, [])


def put(call: Call) -> tuple[jax.Array, ...]:
    """The pool with the content in it."""
    real = in_place.in_range(call.destinations, call.num_pages)
    places, destinations, count = first_real(real, call.sources, call.destinations)
    scalars = count[None], places, destinations
    return launch(functools.partial(move_kernel, False), scalars, call.content, call.pool, [])


def first_real(real: jax.Array, sources: jax.Array, destinations: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The pairs with the real ones first, and how many those are."""
    order = jnp.argsort(~real)  # stable
    return sources[order], destinations[order], jnp.sum(real, dtype=jnp.int32)


def launch(kernel, scalars, inputs, changed, made) -> tuple[jax.Array, ...]:
    """One launch: ``changed`` in place, then arrays of the shapes ``made``."""
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    results = pl.pallas_call(
        functools.partial(kernel, len(inputs), len(changed)),
        out_shape=[*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in changed), *made],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[anywhere] * (len(inputs) + len(changed)),
            out_specs=[anywhere] * (len(changed) + len(made)),
            scratch_shapes=[pltpu.SemaphoreType.DMA((2,))],
        ),
        input_output_aliases={len(scalars) + len(inputs) + i: i for i in range(len(changed))},
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),  # all ids were sorted out before
        name="page_copy",
    )(*scalars, *inputs, *changed)
    return tuple(results)


def each(count, act) -> None:
    """``act(i)`` for the first ``count`` pairs."""
    lax.fori_loop(0, count, lambda i, _: act(i), None)


def all_of(count, copies, sem) -> None:
    """Starts the copies of every pair, then waits for them; ``copies(i)`` gives (source, target) refs."""

    def issue(start):
        def act(i):
            for source, target in copies(i):
                copy = pltpu.make_async_copy(source, target, sem)
                copy.start() if start else copy.wait()

        return act

    each(count, issue(True))
    each(count, issue(False))


def copy_kernel(inputs, changed, facts, sources, destinations, *refs):
    """facts int32 [2]: pairs, and whether a page is both read and written; the pool, twice; stages; semaphores."""
    del inputs
    pool, stages, sems = refs[changed : 2 * changed], refs[2 * changed : 3 * changed], refs[3 * changed]
    count = facts[0]

    @pl.when(facts[1] == 0)
    def _():
        def straight(i):
            source, target = sources[i], destinations[i]
            return [(x.at[:, source], x.at[:, target]) for x in pool]

        all_of(count, straight, sems.at[0])

    @pl.when(facts[1] == 1)
    def _():
        def layer_by_layer(layer, _):
            all_of(count, lambda i: [(x.at[layer, sources[i]], y.at[i]) for x, y in pairs], sems.at[0])
            all_of(count, lambda i: [(y.at[i], x.at[layer, destinations[i]]) for x, y in pairs], sems.at[1])

        pairs = list(zip(pool, stages, strict=True))
        lax.fori_loop(0, pool[0].shape[0], layer_by_layer, None)


def move_kernel(out, inputs, changed, count, sources, destinations, *refs):
    """count int32 [1]; then what is read, what is changed, twice, and semaphores. ``out``: from pages, else to them."""
    arrays = list(zip(refs[:inputs], refs[inputs + changed : inputs + 2 * changed], strict=True))
    sems = refs[inputs + 2 * changed]

    def across(i):
        source, target = sources[i], destinations[i]
        return [(x.at[:, source], y.at[target]) if out else (x.at[source], y.at[:, target]) for x, y in arrays]

    all_of(count[0], across, sems.at[0])
