"""Latent attention: the public function, and the table of its implementations."""

from __future__ import annotations

from types import ModuleType

from jaxtyping import Array, Float, Int32, Shaped, UInt32

from pallas_kernels.mla_attention import reference, xla
from pallas_kernels.paged_attention import arguments
from pallas_kernels.paged_attention.api import run
from pallas_kernels.paged_attention.arguments import Call

__all__ = ["IMPLEMENTATIONS", "mla_attention"]

# Best first. Each module has ``refuses(call) -> reason or None`` and ``attend(call) -> (out, lse)``.
IMPLEMENTATIONS: dict[str, ModuleType] = {"xla": xla, "reference": reference}


def mla_attention(
    q: Float[Array, "T H C"],
    pages: Shaped[Array, "N 1 B _"],
    block_tables: Int32[Array, "S P"],
    kv_lens: Int32[Array, " S"],
    query_starts: Int32[Array, " _"],
    *,
    v_width: int,
    scale: float,
    k_scale: Float[Array, "_ _ _"] | None = None,
    causal: bool = True,
    tree_mask: UInt32[Array, "T _"] | None = None,
    max_query_len: int | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> Float[Array, "T H v_width"] | tuple[Float[Array, "T H v_width"], Float[Array, "T H"]]:
    """Multi-head latent attention over paged latents, in its absorbed form (DeepSeek-V2, section 2.1.2).

    All query heads share one cached vector per token of C lanes, for DeepSeek 512 of the latent and 64 of the rotary
    key; the values are its first ``v_width`` lanes. The up-projections are the caller's: that of the keys is folded
    into ``q``, that of the values applied to the output. Rows, positions, masks, padding and errors are those of
    ``paged_attention``.

    Args:
        q: queries against the whole latent, [T,H,C].
        pages: latents [N,1,B,C], in any of the page dtypes.
        block_tables, kv_lens, query_starts: the rows, as in ``paged_attention``.
        v_width: lanes that are values, 1..C.
        scale: factor of the logits. It has no default: it follows from the head size before absorption, not from C.
        k_scale: what stored latents, keys and values alike, are multiplied by: float32 [1,1,1] or [N,1,B].
        causal, tree_mask, max_query_len, return_lse, implementation: as in ``paged_attention``.

    Returns:
        [T,H,v_width] in q's dtype; with ``return_lse`` also the natural log-sum-exp [T,H], float32.

    Raises:
        ValueError, TypeError: an argument breaks a rule; the message names it, its value and the rule.
    """
    arguments.check_rows(q, block_tables, kv_lens, query_starts)
    arguments.check_pages("pages", pages, k_scale, "k_scale")
    arguments.require(pages.shape[1] == 1, "pages", f"{pages.shape[1]} heads", "latents have one head")
    arguments.check_heads(q, pages, "pages")
    causal = arguments.check_flag("causal", causal)
    call = Call(
        q=q,
        k_pages=pages,
        v_pages=None,
        block_tables=block_tables,
        kv_lens=kv_lens,
        query_starts=query_starts,
        v_width=arguments.check_width(v_width, q.shape[2]),
        k_scale=k_scale,
        v_scale=k_scale,
        scale=arguments.check_number("scale", scale, "must be finite"),
        causal=causal,
        window=None,
        soft_cap=None,
        alibi_slopes=None,
        sinks=None,
        tree_mask=arguments.check_tree_mask(tree_mask, q.shape[0], causal),
        max_query_len=arguments.check_max_query_len(max_query_len),
    )
    return run(call, IMPLEMENTATIONS, implementation, return_lse)
