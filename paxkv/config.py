"""Frozen configuration values, each validated where it is built.

Units are part of the names: ``_bytes``, ``_s`` (seconds), ``_tokens``. An invalid value raises
``ValueError`` with the rule, the value seen and what to change.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

StepKind = Literal["mixed", "prompts_only", "chunked"]
PreemptionMode = Literal["auto", "recompute", "swap"]
EvictionOrder = Literal["lru", "fifo", "lfu", "mru"]

ADMISSION_WATERMARK = 0.01
"""Watermark of the paper's artifact: the share of device pages that admission keeps free."""


def require(ok: bool, message: str) -> None:
    """Raise ``ValueError(message)`` unless ``ok``."""
    if not ok:
        raise ValueError(message)


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The numbers of a decoder that decide its memory and its arithmetic.

    Source of the presets: Table 1 of the paper and the public OPT and LLaMA configurations.

    Attributes:
        name: short name, such as ``opt-13b``.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key and value heads (equal to ``num_heads`` without grouped queries).
        head_size: width of one head. Not derived: some models declare it freely.
        hidden_size: width of the residual stream.
        ffn_size: width of the feed-forward layer.
        vocab_size: rows of the embedding.
        max_positions: longest sequence, prompt and output together.
        learned_positions: rows of a learned position table (0 where rotary).
        gated_ffn: whether the feed-forward layer has three matrices instead of two.
        biases: whether linear layers have biases (OPT has, LLaMA has not).
        weight_bytes: bytes of one weight.
        kv_bytes: bytes of one key or value element.
    """

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    hidden_size: int
    ffn_size: int
    vocab_size: int
    max_positions: int = 2048
    learned_positions: int = 0
    gated_ffn: bool = False
    biases: bool = True
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_heads", "num_kv_heads", "head_size", "hidden_size", "max_positions"):
            value = getattr(self, field)
            require(
                isinstance(value, int) and value > 0,
                f"ModelShape.{field} must be a positive integer, got {value!r}; take it from the model's config.json",
            )
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"query heads must be a multiple of KV heads, got {self.num_heads} and {self.num_kv_heads}; "
            "check num_key_value_heads",
        )

    @property
    def num_params(self) -> int:
        """Number of weights: embeddings (head tied), attention, feed-forward, norms."""
        h, kv = self.hidden_size, self.num_kv_heads * self.head_size
        q = self.num_heads * self.head_size
        attention = h * q + 2 * h * kv + q * h
        ffn = (3 if self.gated_ffn else 2) * h * self.ffn_size
        norms = (4 if self.biases else 2) * h
        biases = (q + 2 * kv + h + self.ffn_size + h) if self.biases else 0
        embeddings = (self.vocab_size + self.learned_positions) * h
        final_norm = (2 if self.biases else 1) * h
        untied_head = self.vocab_size * h if self.gated_ffn else 0
        return self.num_layers * (attention + ffn + norms + biases) + embeddings + final_norm + untied_head

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of keys and values that one token holds over all layers (paper section 3: 800 KiB for OPT-13B)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_size * self.kv_bytes


def _opt(name: str, layers: int, heads: int, hidden: int) -> ModelShape:
    return ModelShape(
        name, layers, heads, heads, hidden // heads, hidden, 4 * hidden, vocab_size=50272, learned_positions=2050
    )


OPT_13B = _opt("opt-13b", 40, 40, 5120)
OPT_66B = _opt("opt-66b", 64, 72, 9216)
OPT_175B = _opt("opt-175b", 96, 96, 12288)
LLAMA_13B = ModelShape("llama-13b", 40, 40, 40, 128, 5120, 13824, vocab_size=32000, gated_ffn=True, biases=False)
MODELS = {shape.name: shape for shape in (OPT_13B, OPT_66B, OPT_175B, LLAMA_13B)}


@dataclasses.dataclass(frozen=True)
class SchedulerConfig:
    """Limits and choices of the scheduler.

    Attributes:
        max_num_seqs: most request groups that run together.
        max_num_batched_tokens: tokens of one step, prompts and decodes together (2560 in the paper's artifact).
        max_model_len: longest sequence, prompt and output together.
        step_kind: ``mixed`` runs new prompts and one token per running sequence in one step (the paper);
            ``prompts_only`` gives new prompts a step of their own; ``chunked`` cuts prompts to what the
            budget leaves after the running sequences.
        preemption: ``auto`` recomputes groups of one sequence and swaps groups of several (the paper's
            default); ``recompute`` or ``swap`` force one kind.
        max_horizon: longest run of decode steps that one plan may cover.
    """

    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2560
    max_model_len: int = 2048
    step_kind: StepKind = "mixed"
    preemption: PreemptionMode = "auto"
    max_horizon: int = 4096

    def __post_init__(self) -> None:
        for field in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_horizon"):
            value = getattr(self, field)
            require(
                isinstance(value, int) and value > 0,
                f"SchedulerConfig.{field} must be a positive integer, got {value!r}",
            )
        require(
            self.step_kind in ("mixed", "prompts_only", "chunked"),
            f"step_kind must be mixed, prompts_only or chunked, got {self.step_kind!r}",
        )
        require(
            self.preemption in ("auto", "recompute", "swap"),
            f"preemption must be auto, recompute or swap, got {self.preemption!r}",
        )

    @property
    def max_step_seqs(self) -> int:
        """Sequences that can run together: each decode is a token of the step."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Size and behaviour of the page pools.

    Attributes:
        num_pages: device pages.
        page_size: token positions of one page.
        num_host_pages: pages of the host pool that swapping uses (0: no swapping).
        watermark: share of device pages that admission and swap-in keep free.
        prefix_caching: whether computed full pages are kept and found again by content.
        eviction: order in which cached pages that nobody uses are given up.
    """

    num_pages: int
    page_size: int = 16
    num_host_pages: int = 0
    watermark: float = ADMISSION_WATERMARK
    prefix_caching: bool = False
    eviction: EvictionOrder = "lru"

    def __post_init__(self) -> None:
        require(
            isinstance(self.num_pages, int) and self.num_pages > 0,
            f"CacheConfig.num_pages must be a positive integer, got {self.num_pages!r}; "
            "see paxkv.sizing for what a device holds",
        )
        require(
            isinstance(self.page_size, int) and self.page_size > 0,
            f"CacheConfig.page_size must be a positive integer, got {self.page_size!r}; 16 is the paper's choice",
        )
        require(
            isinstance(self.num_host_pages, int) and self.num_host_pages >= 0,
            f"CacheConfig.num_host_pages must be zero or more, got {self.num_host_pages!r}",
        )
        require(0 <= self.watermark < 1, f"CacheConfig.watermark is a share in [0, 1), got {self.watermark!r}")
        require(
            self.eviction in ("lru", "fifo", "lfu", "mru"),
            f"CacheConfig.eviction must be lru, fifo, lfu or mru, got {self.eviction!r}",
        )

    @property
    def watermark_pages(self) -> int:
        """Whole pages that admission keeps free."""
        return int(self.watermark * self.num_pages)
