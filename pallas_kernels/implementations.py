"""Which implementation of an op does a call."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import jax

from pallas_kernels import platforms
from pallas_kernels.arguments import require


def here(table: dict[str, ModuleType]) -> dict[str, ModuleType]:
    """The part of a table that is for the platform of the mesh in use, or else of this machine."""
    return {name: x for name, x in table.items() if getattr(x, "PLATFORM", None) in (None, platforms.current())}


def has_kernel(table: dict[str, ModuleType]) -> bool:
    """Whether a table has an implementation made for this platform."""
    return any(hasattr(module, "PLATFORM") for module in here(table).values())


def choose(call: object, table: dict[str, ModuleType], name: str | None) -> ModuleType:
    """The implementation named, or the first of the table that is for this platform and can do the call.

    Args:
        call: what ``refuses`` of a module takes.
        table: best first; each module has ``refuses(call) -> reason or None``, and ``PLATFORM`` if it is for one only.
            The last refuses nothing.
        name: a key of the table, or None.

    Raises:
        ValueError: a name that is not in the table, or one that cannot do the call, with its reason.
    """
    if name is None:
        return next(module for module in here(table).values() if module.refuses(call) is None)
    require(name in table, "implementation", name, f"must be one of {', '.join(table)}")
    reason = table[name].refuses(call)
    if reason is not None:
        raise ValueError(f"implementation: {name} cannot do this call: {reason}")
    return table[name]


def differentiated_as(plain: Callable, kernel: Callable) -> Callable:
    """``kernel``, a function of a call that is a pytree, with the derivative of ``plain``, which computes the same."""
    function = jax.custom_jvp(lambda call: kernel(call))

    @function.defjvp
    def _(primals, tangents):
        return function(*primals), jax.jvp(plain, primals, tangents)[1]

    return function
