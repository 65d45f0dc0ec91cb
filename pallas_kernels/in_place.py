"""What the XLA paths that change a pool of pages share: how to do it where the pool lies.

Every change is made in place on a donated array. What XLA does on CPUs shapes these paths (measured on jax 0.10 and
0.12; tests/cache/test_memory.py holds it):

- It scatters in place at a tenth of a microsecond per row, except for the small floats (float8, and bfloat16 before
  0.12): there it converts the whole operand to float32 and back, two copies of the pool. Bitcasts around the scatter
  copy the pool too. A ``dynamic_update_slice`` between two bitcasts is fused and stays in place, so small floats take a
  loop of those.
- A scatter pays for its padding. Copies are mostly padding, so they take a loop that ends at the last real pair.
- A conversion or bitcast of the pool inside a loop that does not change the pool is hoisted out, and copies it. Such a
  loop carries the pool and returns it behind an ``optimization_barrier``.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from pallas_kernels.pages import bits_of, from_bits

_BF16_SCATTERS_IN_PLACE = jax.__version_info__ >= (0, 12)


def scatters(pool: Array) -> bool:
    """Whether XLA scatters into an array of this dtype in place."""
    if pool.dtype == jnp.bfloat16:
        return _BF16_SCATTERS_IN_PLACE
    return not jnp.issubdtype(pool.dtype, jnp.floating) or pool.dtype in (jnp.float32, jnp.float16)


def movable(x: Array) -> Array:
    """``x``, or its bits where XLA would compute on it in float32."""
    return x if scatters(x) else bits_of(x)


def update(pool: Array, bits: Array, start: tuple) -> Array:
    """``pool`` with a block of it replaced by ``bits``, which are ``movable``."""
    return from_bits(lax.dynamic_update_slice(movable(pool), bits, start), pool.dtype)


def by_platform(cpu: Callable, default: Callable) -> Callable:
    """``cpu`` where the program is compiled for a CPU, else ``default``; both compute the same."""
    return lambda *args: lax.platform_dependent(*args, cpu=cpu, default=default)


def differentiated_as(plain: Callable, linear: int, fast: Callable) -> Callable:
    """``fast``, with the derivative of ``plain``, which computes the same and is linear in its first arguments.

    Bits have no derivative, and a loop whose length is known only when it runs has no transpose. Integers have none
    either way: what is to be differentiated is seen from the first argument.
    """
    function = jax.custom_jvp(lambda *args: fast(*args))

    @function.defjvp
    def _(primals, tangents):
        return function(*primals), plain(*tangents[:linear], *primals[linear:])

    return lambda *args: (function if jnp.issubdtype(args[0].dtype, jnp.floating) else fast)(*args)


def real(valid: Bool[Array, " C"]) -> tuple[Int32[Array, ""], Int32[Array, " C"]]:
    """How many turns a loop takes to reach the last valid entry, and which entry each turn handles.

    A turn that meets an invalid entry handles the last valid one, which does no harm twice.
    """
    index = jnp.arange(valid.shape[0], dtype=jnp.int32)
    last = jnp.max(jnp.where(valid, index, -1), initial=-1)
    return last + 1, jnp.where(valid, index, jnp.maximum(last, 0))


def in_range(ids: Int32[Array, "*C"], size: int) -> Bool[Array, "*C"]:
    """Which ids are indices of an axis of ``size``."""
    return (ids >= 0) & (ids < size)


def past_end(ids: Int32[Array, " C"], size: int) -> Int32[Array, " C"]:
    """Ids with each that is out of range moved past the end, where nothing wraps, to a place of its own."""
    return jnp.where(in_range(ids, size), ids, size + jnp.arange(ids.shape[0], dtype=jnp.int32))
