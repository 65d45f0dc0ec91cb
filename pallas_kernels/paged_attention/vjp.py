"""Paged attention with derivatives: for those who train through a cache."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped, UInt32

from pallas_kernels.paged_attention import arguments, backward
from pallas_kernels.paged_attention.arguments import Call

PAGES = ("k_pages", "v_pages", "k_scale", "v_scale")


@dataclasses.dataclass(frozen=True)
class Options:
    """What is known at trace time, as in ``paged_attention``."""

    scale: float
    causal: bool
    soft_cap: float | None
    max_query_len: int | None
    implementation: str | None


def differentiable_paged_attention(
    q: Float[Array, "T H D"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K Dv"],
    k_pages: Shaped[Array, "N K B _"],
    v_pages: Shaped[Array, "N K B _"],
    block_tables: Int32[Array, "S P"],
    kv_lens: Int32[Array, " S"],
    query_starts: Int32[Array, " _"],
    *,
    k_scale: Float[Array, "_ _ _"] | None = None,
    v_scale: Float[Array, "_ _ _"] | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | Int32[Array, ""] | None = None,
    soft_cap: float | None = None,
    alibi_slopes: Float[Array, " H"] | None = None,
    sinks: Float[Array, " H"] | None = None,
    tree_mask: UInt32[Array, "T _"] | None = None,
    max_query_len: int | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
    cached: tuple[Array, Array, Array | None, Array | None] | None = None,
) -> Float[Array, "T H Dv"] | tuple[Float[Array, "T H Dv"], Float[Array, "T H"]]:
    """``paged_attention``, whatever its implementation, with reverse-mode derivatives.

    They exist for ``q``, ``k``, ``v``, ``alibi_slopes`` and ``sinks``, from the output and from the log-sum-exp.
    Pages and scales are constants: no cotangent as large as the pool is made, and what earlier calls cached gets none
    (backpropagation truncated at the call). The backward pass computes in float32, reads the pages that its queries
    see, one block after the other, and keeps O(T) numbers. Forward mode and second derivatives do not exist.

    Args:
        q: queries, float32, bfloat16 or float16.
        k: keys of this call's tokens, float32, bfloat16 or float16, which the caller has written into the pages (see
            ``kv_write``). Their numbers are not used: what the pages hold counts. Where the pages round, the
            derivative by what they hold is handed to ``k`` as it is: the straight-through estimate.
        v: values of this call's tokens; the same.
        cached: (k_pages, v_pages, k_scale, v_scale) from which the backward pass reads the tokens that were cached
            before this call; None: those of the call. Where layers write one pool in turn, hand each of them the pool
            as it was before the first write, and write ``stop_gradient`` of k and v: the backward pass then keeps that
            one pool, and not each layer's state of it.

    All else is as in ``paged_attention``.

    Returns:
        As ``paged_attention``. Padding, empty rows and tokens that no query sees have zero derivatives.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it, its value and the rule.
    """
    arguments.require_array("q", q, 3, ("float32", "bfloat16", "float16"))
    arguments.check_pages("k_pages", k_pages, k_scale, "k_scale")
    arguments.check_pages("v_pages", v_pages, v_scale, "v_scale")
    for name, x, pages in (("k", k, k_pages), ("v", v, v_pages)):
        arguments.require_array(name, x, 3, ("float32", "bfloat16", "float16"))
        shape = (q.shape[0], pages.shape[1], arguments.head_size(pages))
        rule = f"must be one vector per token of q and head of {name}_pages, {shape}"
        arguments.require(tuple(x.shape) == shape, name, f"shape {tuple(x.shape)}", rule)
    causal = arguments.check_flag("causal", causal)
    return_lse = arguments.check_flag("return_lse", return_lse)
    options = Options(
        scale=q.shape[2] ** -0.5 if scale is None else arguments.check_number("scale", scale, "must be finite"),
        causal=causal,
        soft_cap=None if soft_cap is None else arguments.check_number("soft_cap", soft_cap, "must be above 0", 0.0),
        max_query_len=arguments.check_max_query_len(max_query_len),
        implementation=implementation,
    )
    constants = dict(
        zip(PAGES, (k_pages, v_pages, k_scale, v_scale), strict=True),
        block_tables=block_tables,
        kv_lens=kv_lens,
        query_starts=query_starts,
        window=arguments.check_window(window, causal),
        tree_mask=tree_mask,
    )
    cached = check_cached(cached, constants)
    # In float32, so that the cast hands k and v derivatives in their own dtype.
    own = k.astype(jnp.float32), v.astype(jnp.float32)
    out, lse = attend(options, q, own, alibi_slopes, sinks, constants, cached)
    return (out, lse) if return_lse else out


def check_cached(cached: object, constants: dict[str, Any]) -> dict[str, Any] | None:
    """Pages and scales by name, which must be of the shapes and dtypes of the call's."""
    if cached is None:
        return None
    if not isinstance(cached, tuple) or len(cached) != len(PAGES):
        raise TypeError(f"cached: must be a tuple ({', '.join(PAGES)}) or None; got {type(cached).__name__}")
    for name, x in zip(PAGES, cached, strict=True):
        want, got = (None if y is None else (y.dtype.name, tuple(y.shape)) for y in (constants[name], x))
        arguments.require(got == want, f"cached {name}", got, f"must be like the call's, {want}")
    return dict(zip(PAGES, cached, strict=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(
    options: Options,
    q: jax.Array,
    own: tuple[jax.Array, jax.Array],
    alibi_slopes: jax.Array | None,
    sinks: jax.Array | None,
    constants: dict[str, Any],
    cached: dict[str, Any] | None,
) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp, with derivatives for the queries, the own keys and values, the slopes and the sinks."""
    from pallas_kernels.paged_attention.api import paged_attention  # which exports this module's function

    del own, cached
    per_head = dict(alibi_slopes=alibi_slopes, sinks=sinks)
    return paged_attention(q, **constants, **per_head, **dataclasses.asdict(options), return_lse=True)


def attend_and_keep(options, q, own, alibi_slopes, sinks, constants, cached):
    """The answer, and what the backward pass needs."""
    out, lse = attend(options, q, own, alibi_slopes, sinks, constants, cached)
    call = as_call(options, q, alibi_slopes, sinks, constants)
    stored = (
        backward.own_content(call, call.k_pages, call.k_scale),
        backward.own_content(call, call.v_pages, call.v_scale),
    )
    constants = constants if cached is None else {**constants, **cached}
    return (out, lse), (q, stored, alibi_slopes, sinks, constants, out, lse)


def pull_back(options, kept, cotangents):
    """Cotangents of ``attend``'s arguments."""
    q, stored, alibi_slopes, sinks, constants, out, lse = kept
    call = as_call(options, q, alibi_slopes, sinks, constants)
    sums, d_sinks = backward.differentiate(call, stored, (out, lse), cotangents)
    d_slopes = None if alibi_slopes is None else sums.slopes
    return sums.q.astype(q.dtype), (sums.k, sums.v), d_slopes, d_sinks, None, None


attend.defvjp(attend_and_keep, pull_back)


def as_call(options: Options, q: jax.Array, alibi_slopes, sinks, constants: dict[str, Any]) -> Call:
    """The checked call of the same arguments."""
    statics = dataclasses.asdict(options)
    del statics["implementation"]
    v_width = arguments.head_size(constants["v_pages"])
    return Call(q=q, **constants, v_width=v_width, alibi_slopes=alibi_slopes, sinks=sinks, **statics)
