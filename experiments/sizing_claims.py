"""Claims about sizing that arithmetic alone judges: shares of a card, KV bytes, margins, users on a local card."""

from __future__ import annotations

import dataclasses
from typing import Literal

from paxkv.config import OPT_13B, ModelShape, require
from paxkv.sizing import ARTIFACT_UTILIZATION, GIB, LLAMA_3_8B, LLAMA_3_70B, MLA_LATENT, KVLayout, artifact_plan, plan


@dataclasses.dataclass(frozen=True)
class ClaimResult:
    """One statement about sizing, put to the test.

    Attributes:
        claim: its number in the project's list.
        statement: what is said.
        claimed, ours: both figures in ``unit``.
        verdict: ``confirmed``, ``refuted``, or ``conditional`` (true only under the conditions of ``explanation``).
    """

    claim: int
    statement: str
    claimed: float
    ours: float
    unit: str
    verdict: Literal["confirmed", "refuted", "conditional"]
    explanation: str


def claim_kv_share(memory_bytes: int) -> ClaimResult:
    """Claim 5, for a 40 GB card of ``memory_bytes``: 26 GB of weights, 35% (others say 30%) of the card for KV."""
    card = artifact_plan(OPT_13B, memory_bytes).require_pages()
    share = card.kv_bytes / memory_bytes
    loose = (int(memory_bytes * ARTIFACT_UTILIZATION) - card.weight_bytes) / memory_bytes
    near = abs(share - 0.35) <= 0.02
    return ClaimResult(
        5,
        "a 13B model takes 26 GB of weights on a 40 GB card and 35% of the card goes to KV",
        0.35,
        share,
        "share of the card",
        "confirmed" if near else "conditional" if abs(loose - 0.35) <= 0.02 else "refuted",
        f"weights are {card.weight_bytes / 1e9:.1f} GB; the pool gets {share:.1%} of what the card reports. "
        f"{loose:.1%} is reached only if activations and workspace ({card.activation_bytes / GIB:.2f} and "
        f"{card.workspace_bytes / GIB:.2f} GiB) are left out",
    )


def claim_kv_formula(shape: ModelShape = LLAMA_3_70B, mla_layers: int = 61, mla_heads: int = 128) -> ClaimResult:
    """Claim 6: KV bytes = 2 x layers x heads x head size x tokens x bytes, with the query heads."""
    gqa = 2 * shape.num_layers * shape.num_heads * shape.head_size * shape.kv_bytes / shape.kv_bytes_per_token
    mla = 2 * mla_layers * mla_heads * 128 * 2 / KVLayout.mla(mla_layers).bytes_per_token
    return ClaimResult(
        6,
        "KV bytes = 2 x layers x heads x head size x tokens x batch x bytes",
        1.0,
        gqa,
        "times the true size",
        "confirmed" if gqa == 1 else "conditional",
        f"exact when every query head has its own KV head. For {shape.name} it gives {gqa:.1f} times too much: count "
        f"its {shape.num_kv_heads} KV heads. For MLA ({mla_layers} layers, {mla_heads} heads of 128) {mla:.1f} times: "
        f"count one latent of {MLA_LATENT}, once, not for K and V",
    )


def claim_llama_70b(requests: int = 20, tokens: int = 8000, claimed_gb: float = 40, exact: bool = False) -> ClaimResult:
    """Claim 7: KV of Llama-3-70B in bf16; ``exact`` compares with "about" (5%), else with "over"."""
    ours = LLAMA_3_70B.kv_bytes_per_token * requests * tokens / 1e9
    holds = abs(ours / claimed_gb - 1) <= 0.05 if exact else ours > claimed_gb
    return ClaimResult(
        7,
        f"Llama-3-70B, {requests} requests of {tokens} tokens, bf16: {'about' if exact else 'over'} {claimed_gb} GB",
        claimed_gb,
        ours,
        "GB",
        "confirmed" if holds else "refuted",
        f"{LLAMA_3_70B.kv_bytes_per_token:,.0f} bytes a token x {requests * tokens:,} tokens = {ours:.1f} GB "
        f"({ours * 1e9 / GIB:.1f} GiB)",
    )


def claim_margin(mean_tokens: float, layout: KVLayout, claimed: float = 0.2) -> ClaimResult:
    """Claim 8: plan a margin of 20% for metadata and leftover fragmentation.

    A sequence leaves (page size - 1) / 2 slots of its last page empty on average and needs 4 bytes of block table
    per page. ``mean_tokens`` is the mean length of the running sequences. Confirmed within a half of the claim.
    """
    require(mean_tokens > 0, f"mean_tokens must be positive, got {mean_tokens!r}")
    empty = (layout.page_size - 1) / 2
    fragmentation = empty / (mean_tokens + empty)
    metadata = 4 / layout.page_bytes
    margin = fragmentation + metadata
    needing = 1 + 2 * mean_tokens * claimed / (1 - claimed)
    return ClaimResult(
        8,
        f"plan a margin of {claimed:.0%} for metadata and leftover fragmentation",
        claimed,
        margin,
        "share of the pool",
        "confirmed" if claimed / 2 <= margin <= 1.5 * claimed else "refuted",
        f"with pages of {layout.page_size} and {mean_tokens:.0f} tokens a sequence, {fragmentation:.2%} is empty slots "
        f"and {metadata:.4%} block tables; {claimed:.0%} would be right from pages of about {needing:.0f} tokens on",
    )


def claim_local_card(
    memory_bytes: int, mean_tokens: int, shape: ModelShape = LLAMA_3_8B, claimed_users: int = 5
) -> ClaimResult:
    """Claim 25: out of memory beyond five concurrent users on a local card."""
    require(mean_tokens > 0, f"mean_tokens must be positive, got {mean_tokens!r}")
    card = plan(shape, memory_bytes).require_pages()
    reserved = card.num_tokens // shape.max_positions
    paged = card.num_pages // -(-mean_tokens // card.layout.page_size)
    verdict = "refuted" if reserved > claimed_users else "conditional" if paged > claimed_users else "confirmed"
    return ClaimResult(
        25,
        f"out of memory beyond {claimed_users} concurrent users on a local card",
        claimed_users,
        paged,
        "concurrent requests",
        verdict,
        f"{shape.name} leaves {card.num_tokens:,} token slots on {memory_bytes / GIB:.1f} GiB: {reserved} users if "
        f"each reserves {shape.max_positions} tokens, {paged} users of {mean_tokens} tokens with pages. One more waits "
        "or is preempted; it is no out-of-memory error",
    )
