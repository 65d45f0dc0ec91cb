"""How many pages fit: from bytes of memory to pages, tokens and the longest request, item by item.

The formulas know no device; give them ``memory_bytes`` from ``paxkv.sim.hardware`` or from the device itself.
Everything is per device. With tensor parallelism each device holds its KV heads' part of every page, so all
devices have the same number of pages and one block table serves them (paper section 4.6).

    total ─┬─ outside the utilization share, other processes
           └─ usable = total x utilization ─┬─ weights, activations, workspace
                                            └─ KV bytes ──▶ whole pages ──▶ tokens ──▶ longest request
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from paxkv.config import MODELS, ModelShape, require

GIB = 1 << 30
ScaleKind = Literal["none", "tensor", "head", "token_head"]

ARTIFACT_UTILIZATION = 0.95
ARTIFACT_WORKSPACE_BYTES = GIB
ARTIFACT_BATCHED_TOKENS = 2560
ARTIFACT_ROTARY_POSITIONS = 8192
"""The artifact's analyser counts one rotary buffer of 8192 positions x head size for each LLaMA layer."""

INDEX_LIMIT = 1 << 31
"""Elements of one buffer that a 32-bit signed offset can reach: a larger flat buffer wraps silently (B04)."""

MLA_LATENT = 576
"""DeepSeek V2 and V3: 512 compressed dimensions and 64 rotary ones, per token and layer, shared by all heads."""

LLAMA_3_8B = ModelShape(
    "llama-3-8b", 32, 32, 8, 128, 4096, 14336, vocab_size=128256, max_positions=8192, gated_ffn=True, biases=False
)
LLAMA_3_70B = ModelShape(
    "llama-3-70b", 80, 64, 8, 128, 8192, 28672, vocab_size=128256, max_positions=8192, gated_ffn=True, biases=False
)
PRESETS = {**MODELS, **{shape.name: shape for shape in (LLAMA_3_8B, LLAMA_3_70B)}}


def kv_heads_per_device(num_kv_heads: int, tensor_parallel: int) -> int:
    """KV heads that one device holds; with more devices than heads each head is replicated (B27).

    Raises:
        ValueError: neither number divides the other.
    """
    require(
        isinstance(tensor_parallel, int) and tensor_parallel > 0,
        f"tensor_parallel must be a positive integer, got {tensor_parallel!r}",
    )
    more, fewer = max(num_kv_heads, tensor_parallel), min(num_kv_heads, tensor_parallel)
    require(
        more % fewer == 0,
        f"KV heads and tensor_parallel must divide one another, got {num_kv_heads} and {tensor_parallel}; "
        "choose another tensor_parallel",
    )
    return max(1, num_kv_heads // tensor_parallel)


@dataclasses.dataclass(frozen=True)
class KVLayout:
    """The bytes of the page pool on one device, padding and scales included.

    Attributes:
        num_layers, num_kv_heads, head_size: of the model; for MLA one head of the latent's width.
        page_size: token positions of a page.
        bits: bits of one stored element: 32, 16, 8 or 4 (two to a byte).
        arrays: arrays per layer: 2 (K and V), or 1 for an MLA latent.
        scales: how quantised pages are scaled; only ``token_head`` grows with the pool.
        scale_bytes: bytes of one scale.
        lane, sublane: the device rounds the head size, the positions of a page up to a multiple of these.
        tensor_parallel: devices that share the KV heads.
        fused: whether K and V lie in one buffer (halves the pages that 32-bit offsets can reach).

    Raises:
        ValueError: the rule, the value seen and what to change.
    """

    num_layers: int
    num_kv_heads: int
    head_size: int
    page_size: int = 16
    bits: int = 16
    arrays: int = 2
    scales: ScaleKind = "none"
    scale_bytes: int = 4
    lane: int = 1
    sublane: int = 1
    tensor_parallel: int = 1
    fused: bool = False

    def __post_init__(self) -> None:
        for field in ("num_layers", "num_kv_heads", "head_size", "page_size", "scale_bytes", "lane", "sublane"):
            value = getattr(self, field)
            require(
                isinstance(value, int) and not isinstance(value, bool) and value > 0,
                f"KVLayout.{field} must be a positive integer, got {value!r}",
            )
        require(self.bits in (4, 8, 16, 32), f"KVLayout.bits must be 4, 8, 16 or 32, got {self.bits!r}")
        require(self.arrays in (1, 2), f"KVLayout.arrays is 2 (K and V) or 1 (latent), got {self.arrays!r}")
        require(
            self.scales in ("none", "tensor", "head", "token_head"),
            f"KVLayout.scales must be none, tensor, head or token_head, got {self.scales!r}",
        )
        require(
            self.stored_head_size * self.bits % 8 == 0,
            f"4-bit pages need an even head size, got {self.stored_head_size}; pad it with lane=2",
        )
        kv_heads_per_device(self.num_kv_heads, self.tensor_parallel)

    @classmethod
    def of(cls, shape: ModelShape, page_size: int = 16, **options) -> KVLayout:
        """The layout of a model: its KV heads (not its query heads), its declared head size, ``kv_bytes``."""
        options.setdefault("bits", round(shape.kv_bytes * 8))
        return cls(shape.num_layers, shape.num_kv_heads, shape.head_size, page_size, **options)

    @classmethod
    def mla(cls, num_layers: int, latent: int = MLA_LATENT, page_size: int = 16, **options) -> KVLayout:
        """The layout of an MLA model: one latent per token and layer, whole on every device."""
        return cls(num_layers, 1, latent, page_size, arrays=1, **options)

    @property
    def heads_per_device(self) -> int:
        """KV heads on one device."""
        return kv_heads_per_device(self.num_kv_heads, self.tensor_parallel)

    @property
    def stored_head_size(self) -> int:
        """Head size after padding."""
        return _round_up(self.head_size, self.lane)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page over all layers and arrays, its scales included."""
        values = self.heads_per_device * self._stored_positions * self.stored_head_size * self.bits // 8
        scales = self.heads_per_device * self.page_size * self.scale_bytes if self.scales == "token_head" else 0
        return self.num_layers * self.arrays * (values + scales)

    @property
    def fixed_bytes(self) -> int:
        """Bytes of scales that do not depend on the number of pages."""
        per_array = {"tensor": 1, "head": self.heads_per_device}.get(self.scales, 0)
        return self.num_layers * self.arrays * per_array * self.scale_bytes

    @property
    def bytes_per_token(self) -> float:
        """Bytes of one token position: page bytes over page size (a whole number unless pages are padded)."""
        return self.page_bytes / self.page_size

    @property
    def page_elements(self) -> int:
        """Stored elements of one page in one buffer (4-bit values count in pairs)."""
        width = self.stored_head_size // 2 if self.bits == 4 else self.stored_head_size
        return self.heads_per_device * self._stored_positions * width * (2 if self.fused else 1)

    @property
    def max_pages(self) -> int:
        """Most pages whose every element a 32-bit offset reaches."""
        return INDEX_LIMIT // self.page_elements

    def check_pages(self, num_pages: int) -> None:
        """Refuses a pool whose flat element offsets pass 2^31 (``ValueError``); allocates nothing."""
        require(
            isinstance(num_pages, int) and not isinstance(num_pages, bool) and num_pages > 0,
            f"the number of pages must be a positive integer, got {num_pages!r}",
        )
        require(
            num_pages <= self.max_pages,
            f"a pool of {num_pages} pages has {num_pages * self.page_elements} elements in one buffer, more than 2^31: "
            f"32-bit offsets would wrap; use at most {self.max_pages} pages, or split the pool over more devices",
        )

    @property
    def _stored_positions(self) -> int:
        return _round_up(self.page_size, self.sublane)


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Where the memory of one device goes. Every number is computed; nothing is negative.

    Attributes:
        total_bytes: memory as the device reports it.
        utilization: share of TOTAL memory (never of free memory) that we may use, in (0, 1].
        weight_bytes, activation_bytes, workspace_bytes: taken from that share before the pool.
        layout: bytes of a page.
        other_bytes: held by other processes. They may use what lies outside our share for nothing; what they hold
            beyond it is taken from our pool, down to zero pages: the plan never counts on memory that is not there.
        explicit_pages: a page count that wins over the computed one and is not held against ``utilization``;
            ``fits`` says whether the device can hold it.
        max_model_len: longest sequence the model allows, or None.

    Raises:
        ValueError: a negative or missing figure, or an explicit page count beyond 32-bit offsets.
    """

    total_bytes: int
    utilization: float
    weight_bytes: int
    activation_bytes: int
    workspace_bytes: int
    layout: KVLayout
    other_bytes: int = 0
    explicit_pages: int | None = None
    max_model_len: int | None = None

    def __post_init__(self) -> None:
        for field in ("total_bytes", "weight_bytes", "activation_bytes", "workspace_bytes", "other_bytes"):
            value, least = getattr(self, field), 1 if field == "total_bytes" else 0
            require(
                isinstance(value, int) and value >= least,
                f"MemoryPlan.{field} must be an integer of at least {least} bytes, got {value!r}",
            )
        require(
            0 < self.utilization <= 1,
            f"utilization is a share of total memory in (0, 1], got {self.utilization!r}; 0.9 means 90%",
        )
        if self.explicit_pages is not None:
            self.layout.check_pages(self.explicit_pages)

    @property
    def usable_bytes(self) -> int:
        """Our share: total x utilization, or what other processes leave if that is less."""
        return max(0, min(int(self.total_bytes * self.utilization), self.total_bytes - self.other_bytes))

    @property
    def kv_bytes(self) -> int:
        """What is left for the pool, at least zero."""
        return max(0, self.usable_bytes - self._before_pool)

    @property
    def shortfall_bytes(self) -> int:
        """How much is missing for the first page; zero where there is one."""
        needed = self._before_pool + self.layout.fixed_bytes + self.layout.page_bytes
        return max(0, needed - self.usable_bytes)

    @property
    def num_pages(self) -> int:
        """Pages of the pool: the explicit count, else the whole pages that fit."""
        if self.explicit_pages is not None:
            return self.explicit_pages
        return min(self._pages_by_memory, self.layout.max_pages)

    @property
    def limited_by(self) -> Literal["memory", "index width", "explicit"]:
        """What set the number of pages."""
        if self.explicit_pages is not None:
            return "explicit"
        return "memory" if self._pages_by_memory <= self.layout.max_pages else "index width"

    @property
    def num_tokens(self) -> int:
        """Token positions of the pool."""
        return self.num_pages * self.layout.page_size

    @property
    def pool_bytes(self) -> int:
        """What the pool allocates."""
        return self.num_pages * self.layout.page_bytes + (self.layout.fixed_bytes if self.num_pages else 0)

    @property
    def fits(self) -> bool:
        """Whether everything fits in what the other processes leave of the device."""
        return self._before_pool + self.pool_bytes <= self.total_bytes - self.other_bytes

    @property
    def longest_request(self) -> int:
        """Longest servable sequence, prompt and output together: alone in the pool, within ``max_model_len``."""
        return min(self.num_tokens, self.max_model_len or self.num_tokens)

    @property
    def items(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes) from the total down; the parts after ``total`` add up to it unless memory is over-committed."""
        parts = (
            ("other processes", self.other_bytes),
            ("weights", self.weight_bytes),
            ("activations", self.activation_bytes),
            ("workspace", self.workspace_bytes),
            ("page pool", self.pool_bytes),
        )
        unused = self.total_bytes - sum(size for _, size in parts)
        return (("total", self.total_bytes), *parts, ("unused", max(0, unused)))

    def require_pages(self, least: int = 1) -> MemoryPlan:
        """This plan, or ``ValueError`` with all items where it has fewer than ``least`` pages."""
        items = ", ".join(f"{name} {size / GIB:.2f} GiB" for name, size in self.items)
        require(
            self.num_pages >= least,
            f"at least {least} pages are needed, the plan has {self.num_pages} ({items}; {self.shortfall_bytes} bytes "
            "short of the first page): use a larger share, more devices, smaller weights or fewer batched tokens",
        )
        return self

    @property
    def _before_pool(self) -> int:
        return self.weight_bytes + self.activation_bytes + self.workspace_bytes

    @property
    def _pages_by_memory(self) -> int:
        return max(0, self.kv_bytes - self.layout.fixed_bytes) // self.layout.page_bytes


def weight_bytes(shape: ModelShape, tensor_parallel: int = 1) -> int:
    """Bytes of weights on one device: matrices and embeddings split, KV projections by KV head, the rest replicated.

    The rest is biases, norms and the position table, as in the artifact's analyser.
    """
    kv_heads = kv_heads_per_device(shape.num_kv_heads, tensor_parallel)
    h, layers = shape.hidden_size, shape.num_layers
    kv_whole = 2 * layers * h * shape.num_kv_heads * shape.head_size
    kv_here = 2 * layers * h * kv_heads * shape.head_size
    ffn = (3 if shape.gated_ffn else 2) * h * shape.ffn_size
    embeddings = (2 if shape.gated_ffn else 1) * shape.vocab_size * h
    split = layers * (2 * h * shape.num_heads * shape.head_size + ffn) + embeddings
    replicated = shape.num_params - split - kv_whole
    return round((-(-split // tensor_parallel) + kv_here + replicated) * shape.weight_bytes)


def activation_bytes(
    shape: ModelShape, batched_tokens: int = ARTIFACT_BATCHED_TOKENS, tensor_parallel: int = 1, element_bytes: int = 2
) -> int:
    """The artifact's estimate of peak activations: the widest layer's input and output, or the logits if larger.

    Bytes = element x max(2 T (max(qkv, ffn) / tp + hidden), 2 T vocab); logits are whole on every device.
    """
    require(batched_tokens > 0, f"batched_tokens must be positive, got {batched_tokens!r}")
    qkv = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_size
    layer = 2 * batched_tokens * (-(-max(qkv, shape.ffn_size) // tensor_parallel) + shape.hidden_size)
    return element_bytes * max(layer, 2 * batched_tokens * shape.vocab_size)


def plan(
    shape: ModelShape,
    memory_bytes: int,
    *,
    utilization: float = 0.9,
    page_size: int = 16,
    tensor_parallel: int = 1,
    batched_tokens: int = ARTIFACT_BATCHED_TOKENS,
    workspace_bytes: int = ARTIFACT_WORKSPACE_BYTES,
    other_bytes: int = 0,
    explicit_pages: int | None = None,
    **layout,
) -> MemoryPlan:
    """The plan of a model on devices of ``memory_bytes`` each; further options go to :class:`KVLayout`."""
    return MemoryPlan(
        memory_bytes,
        utilization,
        weight_bytes(shape, tensor_parallel),
        activation_bytes(shape, batched_tokens, tensor_parallel),
        workspace_bytes,
        KVLayout.of(shape, page_size, tensor_parallel=tensor_parallel, **layout),
        other_bytes,
        explicit_pages,
        shape.max_positions,
    )


def artifact_plan(
    shape: ModelShape,
    memory_bytes: int,
    *,
    page_size: int = 16,
    tensor_parallel: int = 1,
    utilization: float = ARTIFACT_UTILIZATION,
) -> MemoryPlan:
    """The pool of the paper's artifact (its memory analyser, with T = 2560 and 1 GiB of workspace).

    Reproduces Table 1: 983 pages of 16 for OPT-13B on one A100-40GB, 603 for OPT-66B on four, 3753 for OPT-175B
    on eight A100-80GB. LLaMA's rotary buffers count as weights here: 966 pages for LLaMA-13B.
    """
    base = plan(shape, memory_bytes, utilization=utilization, page_size=page_size, tensor_parallel=tensor_parallel)
    if shape.learned_positions:
        return base
    rotary = round(shape.num_layers * ARTIFACT_ROTARY_POSITIONS * shape.head_size * shape.weight_bytes)
    return dataclasses.replace(base, weight_bytes=base.weight_bytes + rotary)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
