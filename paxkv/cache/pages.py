"""The paged KV cache: a pytree of pages, and pure functions over it.

``KVPages`` is donated to every jitted step, and every function here returns it changed in place: no step copies the
pool. In a scan over layers the pool belongs in the carry (in ``xs`` and ``ys`` it is copied once per step), with the
layer's number as the scanned input. On CPUs a loop that only reads small floats should carry the pool too, and return
it behind ``jax.lax.optimization_barrier``: else XLA converts all of it before the loop. Sequences reach their pages
through block tables (paper section 4.1); whoever allocates the pages works on the host and hands ids in.

Everything can be differentiated where the pages are floats without a scale. Scaled and 8-bit pages round; their
derivative is that of the cast (integers: none), so do not train through them.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Shaped

from pallas_kernels import implementations
from pallas_kernels.kv_write import api as kv_write
from pallas_kernels.page_copy import api as page_copy
from pallas_kernels.pages import PageFormat, dequantise, dynamic_scale, quantise
from pallas_kernels.rows import store
from paxkv.cache.layout import PageLayout

LEAVES = ("k", "v", "k_scale", "v_scale")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVPages:
    """Pages of all layers.

    Attributes:
        k: [L,N,K,B,D] in the storage dtype of ``layout.k_format``.
        v: [L,N,K,B,Dv], or None where the layout has no values.
        k_scale, v_scale: float32 [L,1,1,1], [L,1,K,1] or [L,N,K,B], or None for a format without.
        layout: the static rest. Inside ``shard_map`` the arrays hold a part of its KV heads.
    """

    k: Shaped[Array, "L N K B D"]
    v: Shaped[Array, "L N K B Dv"] | None
    k_scale: Float32[Array, "L ..."] | None
    v_scale: Float32[Array, "L ..."] | None
    layout: PageLayout = dataclasses.field(metadata=dict(static=True))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageContent:
    """What C pages hold, page by page, on its way to or from the host. Static scales stay with the pool.

    Attributes:
        k, v: [C,L,K,B,D] in the storage dtype; ``v`` None without values.
        k_scale, v_scale: [C,L,K,B] where scales are per token, else None.
    """

    k: Shaped[Array, "C L K B D"]
    v: Shaped[Array, "C L K B Dv"] | None
    k_scale: Float32[Array, "C L K B"] | None
    v_scale: Float32[Array, "C L K B"] | None


def init(layout: PageLayout, *, k_scale=None, v_scale=None, fill: float = 0.0) -> KVPages:
    """A pool whose every element is ``fill``; every leaf is a buffer of its own, so all can be donated.

    Args:
        layout: shapes and formats.
        k_scale, v_scale: static scales, for formats scaled per ``tensor`` (a number, or [L]) or ``head`` (a number, or
            [K], or [L,K]); None otherwise.
        fill: what unwritten slots read as, as near as the format comes; NaN shows reads of unwritten slots.

    Raises:
        ValueError: a scale that is missing, not wanted, not positive and finite, or of another shape; a NaN fill
            that the format cannot hold.
    """
    leaves: dict[str, Array | None] = {"k": None, "v": None, "k_scale": None, "v_scale": None}
    given = {"k": k_scale, "v": v_scale}
    if not layout.has_values and v_scale is not None:
        raise ValueError("v_scale was given for pages without values; leave it out")
    for side, head_size, fmt in layout.sides:
        scale = _initial_scale(layout, side, fmt, given[side], fill)
        leaves[f"{side}_scale"] = scale
        leaves[side] = _filled(layout, head_size, fmt, scale, fill)
    return KVPages(**leaves, layout=layout)


def write(
    pages: KVPages,
    layer: int | Int[Array, ""],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K Dv"] | None,
    slots: Int[Array, " T"],
) -> KVPages:
    """Stores the keys and values of T tokens of one layer, quantised on the way.

    Args:
        pages: the pool.
        layer: which layer; may be traced.
        k, v: as computed; ``v`` None for pages without values.
        slots: page * page_size + offset of each token. A token whose slot lies outside [0, N * B) is dropped; -1 is the
            usual padding. All other slots must be distinct, else it is undefined which token is stored.

    Raises:
        ValueError: shapes that do not fit the pool; values missing, or given without a place for them.
    """
    _check_rows(pages, layer, k, v, slots)
    layer, slots = jnp.asarray(layer, jnp.int32), jnp.asarray(slots).astype(jnp.int32)
    num_layers, num_pages, _, page_size = pages.k.shape[:4]
    # Without a kernel the pool keeps its axis of layers: some versions of XLA copy a pool that loses it, on CPUs.
    if implementations.has_kernel(kv_write.IMPLEMENTATIONS) and num_layers * num_pages * page_size < 2**31:
        return _write_by_kernel(pages, layer, k, v, slots)
    new, given = {}, {"k": k, "v": v}
    for side, _, fmt in pages.layout.sides:
        rows, pool, scale = given[side], getattr(pages, side), getattr(pages, f"{side}_scale")
        if fmt.scale == "token":
            row_scale = dynamic_scale(rows, fmt)
            new[f"{side}_scale"] = store(scale, row_scale, slots, layer)
        else:
            row_scale = None if scale is None else scale[layer, 0, :, 0]
        new[side] = store(pool, quantise(rows, fmt, row_scale), slots, layer)
    return dataclasses.replace(pages, **new)


def _write_by_kernel(pages: KVPages, layer: Array, k: Array, v: Array | None, slots: Array) -> KVPages:
    """:func:`write` through the op, which sees the pages of all layers as one pool."""
    num_layers, num_pages, _, page_size = pages.k.shape[:4]
    valid = (slots >= 0) & (slots < num_pages * page_size) & (layer >= 0) & (layer < num_layers)
    slots = jnp.where(valid, slots + layer * num_pages * page_size, -1)
    named: dict[str, Array] = {}
    for side, _, fmt in pages.layout.sides:
        pool, scale = getattr(pages, side), getattr(pages, f"{side}_scale")
        named[f"{side}_pages"] = pool.reshape(-1, *pool.shape[2:])
        if scale is not None:
            named[f"{side}_scale"] = scale.reshape(-1, *scale.shape[2:]) if fmt.scale == "token" else scale[layer]
    formats = {f"{side}_format": fmt for side, _, fmt in pages.layout.sides}
    written = kv_write.kv_write(**{"v_pages": None, **named}, k=k, v=v, slots=slots, **formats)
    found = dict(zip(("k", "v", "k_scale", "v_scale"), written, strict=True))
    return dataclasses.replace(pages, **{name: found[name].reshape(x.shape) for name, x in _paged(pages).items()})


def gather(
    pages: KVPages, layer: int | Int[Array, ""], table: Int[Array, " P"]
) -> tuple[Float32[Array, "P*B K D"], Float32[Array, "P*B K Dv"] | None]:
    """The keys and values of P pages of one layer, in table order, as float32: for research and tests.

    Rows of a page outside [0, N) are NaN; so is everything where ``layer`` is outside [0, L).
    """
    layer = jnp.asarray(layer, jnp.int32)
    table = jnp.asarray(table).astype(jnp.int32)
    num_layers, num_pages = pages.k.shape[:2]
    valid = (table >= 0) & (table < num_pages) & (layer >= 0) & (layer < num_layers)
    page = jnp.where(valid, table, 0)
    out = []
    for side in ("k", "v"):
        pool, scale = getattr(pages, side), getattr(pages, f"{side}_scale")
        if pool is None:
            out.append(None)
            continue
        stored = pool[layer, page]  # [P,K,B,D]
        if scale is not None:
            scale = scale[layer, page] if scale.shape[1] == num_pages else scale[layer]
        values = jnp.where(valid[:, None, None, None], dequantise(stored, scale), jnp.nan)
        out.append(values.swapaxes(1, 2).reshape(-1, values.shape[1], values.shape[3]))
    return out[0], out[1]


def copy_pages(pages: KVPages, src: Int[Array, " C"], dst: Int[Array, " C"]) -> KVPages:
    """Copies page ``src[i]`` onto page ``dst[i]`` in all layers (copy-on-write, paper section 4.4).

    All sources are read before any destination is written, so chains and swaps mean what they say. Pairs with an id
    outside [0, N) are dropped: pad with -1. Destinations must be distinct.
    """
    src, dst = jnp.asarray(src).astype(jnp.int32), jnp.asarray(dst).astype(jnp.int32)
    if src.ndim != 1 or src.shape != dst.shape:
        raise ValueError(f"src and dst must both be [C], got {list(src.shape)} and {list(dst.shape)}")
    leaves = _paged(pages)
    copied = page_copy.copy_pages(list(leaves.values()), src, dst)
    return dataclasses.replace(pages, **dict(zip(leaves, copied, strict=True)))


def swap_out(pages: KVPages, ids: Int[Array, " C"]) -> PageContent:
    """What the pages ``ids`` hold, as stored (paper section 4.5). Pages outside [0, N) read as zeros."""
    ids = jnp.asarray(ids).astype(jnp.int32)
    leaves = _paged(pages)
    taken = page_copy.take_pages(list(leaves.values()), ids)
    return PageContent(**{**dict.fromkeys(LEAVES), **dict(zip(leaves, taken, strict=True))})


def swap_in(pages: KVPages, ids: Int[Array, " C"], content: PageContent) -> KVPages:
    """Puts what :func:`swap_out` took into the pages ``ids``, bit for bit. Pages outside [0, N) are dropped.

    All other ids must be distinct.

    Raises:
        ValueError: content of another shape or dtype than the pool's.
    """
    ids = jnp.asarray(ids).astype(jnp.int32)

    leaves = _paged(pages)
    for name, pool in leaves.items():
        rows, want = getattr(content, name), (ids.shape[0], pool.shape[0], *pool.shape[2:])
        if rows is None or rows.shape != want or rows.dtype != pool.dtype:
            got = "nothing" if rows is None else f"{rows.dtype} {list(rows.shape)}"
            raise ValueError(f"{name} of the content must be {pool.dtype} {list(want)} for these ids, got {got}")
    put = page_copy.put_pages(list(leaves.values()), ids, [getattr(content, name) for name in leaves])
    return dataclasses.replace(pages, **dict(zip(leaves, put, strict=True)))


def specs(layout: PageLayout, axis: str | None) -> KVPages:
    """The ``PartitionSpec`` of every leaf when the KV heads are split over the mesh axis ``axis``: for ``shard_map``,
    or with a mesh for ``jax.jit`` shardings. Without values (an MLA latent) every device holds all of it.
    """
    heads = jax.sharding.PartitionSpec(None, None, axis if layout.has_values else None)
    leaves = dict.fromkeys(LEAVES)
    for side, _, fmt in layout.sides:
        leaves[side] = heads
        if fmt.quantised:
            leaves[f"{side}_scale"] = jax.sharding.PartitionSpec() if fmt.scale == "tensor" else heads
    return KVPages(**leaves, layout=layout)


def _paged(pages: KVPages) -> dict[str, Array]:
    """The leaves that have pages, by name; static scales have none."""
    names = []
    for side, _, fmt in pages.layout.sides:
        names += (side, f"{side}_scale") if fmt.scale == "token" else (side,)
    return {name: getattr(pages, name) for name in names}


def _initial_scale(layout: PageLayout, side: str, fmt: PageFormat, given, fill: float) -> Array | None:
    if fmt.scale in ("none", "token"):
        if given is not None:
            raise ValueError(f"{side}_scale was given, but {fmt} has no static scale; leave it out")
        return None if fmt.scale == "none" else _filled_scale(layout, fmt, fill)
    shape = layout.scale_shape(fmt)
    if given is None:
        raise ValueError(f"{fmt} has a static scale: give {side}_scale, broadcastable to {list(shape)}, or use 'token'")
    per = (layout.num_layers,) if fmt.scale == "tensor" else (layout.num_layers, layout.num_kv_heads)
    given = jnp.asarray(given, jnp.float32)
    if given.shape == shape:
        given = given.reshape(per)
    if given.ndim > len(per) or any(n not in (1, m) for n, m in zip(given.shape[::-1], per[::-1], strict=False)):
        raise ValueError(f"{side}_scale for {fmt} must be a number or broadcast to {list(per)}, got {given.shape}")
    if not isinstance(given, jax.core.Tracer):
        values = np.asarray(given)
        if not (np.isfinite(values) & (values >= np.finfo(np.float32).tiny)).all():
            raise ValueError(f"{side}_scale must be positive, finite and no subnormal, got {values.tolist()}")
    return jnp.array(jnp.broadcast_to(given, per).reshape(shape), copy=True)


def _filled_scale(layout: PageLayout, fmt: PageFormat, fill: float) -> Array:
    return jnp.broadcast_to(dynamic_scale(jnp.full((1,), fill, jnp.float32), fmt), layout.scale_shape(fmt)) + 0


def _filled(layout: PageLayout, head_size: int, fmt: PageFormat, scale: Array | None, fill: float) -> Array:
    shape = layout.data_shape(head_size, fmt)
    if math.isnan(fill) and fmt.dtype in ("int8", "int4") and fmt.scale != "token":
        raise ValueError(f"{fmt} cannot hold a NaN fill; use a number, or a scale per token")
    if fill == 0:
        return jnp.zeros(shape, fmt.storage_dtype)
    values = jnp.full((*shape[:1], 1, layout.num_kv_heads, 1, head_size), fill, jnp.float32)
    per_row = None if scale is None else scale[:, :1, :, :1]
    return jnp.broadcast_to(quantise(values, fmt, per_row), shape) + jnp.zeros((), fmt.storage_dtype)


def _check_rows(pages: KVPages, layer, k, v, slots) -> None:
    layout = pages.layout
    if isinstance(layer, int) and not 0 <= layer < layout.num_layers:
        raise ValueError(f"layer must lie in 0..{layout.num_layers - 1}, got {layer}")
    if (v is None) == layout.has_values:
        state = "stores values: give v" if layout.has_values else "stores no values: give v=None"
        raise ValueError(f"this pool {state}, got {'None' if v is None else v.shape}")
    for side, rows, head_size in (("k", k, layout.head_size), ("v", v, layout.v_head_size)):
        want = (slots.shape[0] if slots.ndim == 1 else "T", pages.k.shape[2], head_size)
        if rows is not None and tuple(rows.shape) != want:
            raise ValueError(
                f"{side} must be [T,K,D] = {list(want)} for this pool and its slots, got {list(rows.shape)}"
            )
    if slots.ndim != 1 or not jnp.issubdtype(slots.dtype, jnp.integer):
        raise ValueError(f"slots must be integers [T], got {slots.dtype} {list(slots.shape)}")
