"""Paged attention: the public function, and the table of its implementations."""

from __future__ import annotations

import dataclasses
import math
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32, Shaped, UInt32

from pallas_kernels import implementations
from pallas_kernels.arguments import check_values
from pallas_kernels.paged_attention import arguments, mosaic_gpu, reference, tpu, triton_gpu, xla
from pallas_kernels.paged_attention.arguments import Call, check_tables
from pallas_kernels.paged_attention.states import merge_states
from pallas_kernels.paged_attention.tree import pack_tree_mask
from pallas_kernels.paged_attention.vjp import differentiable_paged_attention

__all__ = [
    "IMPLEMENTATIONS",
    "check_tables",
    "differentiable_paged_attention",
    "merge_states",
    "pack_tree_mask",
    "paged_attention",
]

# Best first. Each module has ``refuses(call) -> reason or None`` and ``attend(call) -> (out, lse)``, and ``PLATFORM``
# if it is for one only.
IMPLEMENTATIONS: dict[str, ModuleType] = {
    "tpu": tpu,
    "mosaic_gpu": mosaic_gpu,
    "triton_gpu": triton_gpu,
    "xla": xla,
    "reference": reference,
}


def paged_attention(
    q: Float[Array, "T H D"],
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
) -> Float[Array, "T H Dv"] | tuple[Float[Array, "T H Dv"], Float[Array, "T H"]]:
    """Attention of ragged rows over keys and values in pages (Kwon et al. 2023, section 4.1, equation 4).

    One call takes any mix of prefill, chunks, decode and draft verification. Row s's queries are the tokens
    ``query_starts[s]:query_starts[s+1]``; they are the last tokens of the row, whose keys and values are already in
    its pages, so query i of n stands at position ``kv_lens[s] - n + i``. Tokens past ``query_starts[-1]`` are padding.
    H/K query heads in a row share a KV head. A row's bits do not depend on what else is in the call.

    Args:
        q: queries, float32, bfloat16 or float16 (float64: reference only).
        k_pages: keys [N,K,B,D] as float32, bfloat16, float16, float8_e4m3fn, float8_e5m2 or int8, or int4 packed in
            pairs along D as uint8 [N,K,B,D/2]. N pages, all layers of a pool together if the tables are offset so.
        v_pages: values [N,K,B,Dv], same choice, independent of the keys'.
        block_tables: page of each block of each row. Entries beyond a row's length are not used; the others must be
            pages (``check_tables``).
        kv_lens: tokens of each row with this step's; 0 is an empty row.
        query_starts: [S+1], ascending from 0.
        k_scale: what stored keys are multiplied by: float32 [1,1,1], [1,K,1] or [N,K,B]. None means 1, and is an error
            for int8 and int4.
        v_scale: the same for values.
        scale: factor of the logits; None means 1/sqrt(D).
        causal: a query sees no key after its own position; False: it sees all of its row.
        window: a query at p sees the keys in (p - window, p]: ``window`` keys with its own. A Python int is at least 1;
            in an int32 scalar array, which may differ by layer under a scan, values below 1 mean no window.
        soft_cap: logits become ``soft_cap * tanh(logits / soft_cap)``, after the scale.
        alibi_slopes: float32; head h adds ``slope * (key position - query position)``, after the cap.
        sinks: float32; head h has one more logit that takes part in the softmax and has no value.
        tree_mask: for draft trees. Query i of a row sees query j of the same row if bit ``j % 32`` of word ``j // 32``
            of the mask of its token is set (itself included), and every token cached before this step. uint32, see
            ``pack_tree_mask``. Window and ALiBi then count a query's position as cached tokens + set bits - 1.
        max_query_len: a promise that no row has more queries; 1 compiles the decode path alone. Outputs of rows that
            break it are undefined.
        return_lse: also return the natural log-sum-exp of the logits (sinks included), for ``merge_states``.
        implementation: a name in ``IMPLEMENTATIONS``; None takes the first that can do the call on the platform of the
            mesh in use, or else of this machine. Only "reference" has derivatives by itself: the loops of "xla" stop
            when they should, which reverse mode cannot follow. ``differentiable_paged_attention`` has them with any.

    Returns:
        Output in q's dtype, computed in float32; with ``return_lse`` also the lse, float32. A query that sees nothing,
        in an empty row for example, and a padding token get zeros and an lse of -inf (its sink, if it sees only that).

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it, its value and the rule.
    """
    arguments.check_rows(q, block_tables, kv_lens, query_starts)
    arguments.check_pages("k_pages", k_pages, k_scale, "k_scale")
    arguments.check_pages("v_pages", v_pages, v_scale, "v_scale")
    arguments.check_heads(q, k_pages)
    check_values(v_pages, k_pages)
    heads = q.shape[1]
    default = 1.0 / math.sqrt(q.shape[2])
    causal = arguments.check_flag("causal", causal)
    call = Call(
        q=q,
        k_pages=k_pages,
        v_pages=v_pages,
        block_tables=block_tables,
        kv_lens=kv_lens,
        query_starts=query_starts,
        v_width=arguments.head_size(v_pages),
        k_scale=k_scale,
        v_scale=v_scale,
        scale=default if scale is None else arguments.check_number("scale", scale, "must be finite"),
        causal=causal,
        window=arguments.check_window(window, causal),
        soft_cap=None if soft_cap is None else arguments.check_number("soft_cap", soft_cap, "must be above 0", 0.0),
        alibi_slopes=arguments.check_per_head("alibi_slopes", alibi_slopes, heads),
        sinks=arguments.check_per_head("sinks", sinks, heads),
        tree_mask=arguments.check_tree_mask(tree_mask, q.shape[0], causal),
        max_query_len=arguments.check_max_query_len(max_query_len),
    )
    return run(call, IMPLEMENTATIONS, implementation, return_lse)


def run(
    call: Call, table: dict[str, ModuleType], implementation: str | None, return_lse: bool
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Runs a checked call on the implementation named, or on the first that can do it."""
    return_lse = arguments.check_flag("return_lse", return_lse)
    given = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    call = dataclasses.replace(call, **{k: jnp.asarray(x) for k, x in given.items() if isinstance(x, np.ndarray)})
    out, lse = implementations.choose(call, table, implementation).attend(call)
    out = out.astype(call.q.dtype)
    return (out, lse.astype(jnp.float32)) if return_lse else out
