"""The shape of a page pool: everything static about it, and its bytes."""

from __future__ import annotations

import dataclasses

from pallas_kernels.pages import PageFormat
from paxkv.sizing import KVLayout

ID_LIMIT = 1 << 31
"""Page ids over all layers, and slots, are int32."""

_SIZING_SCALE = {"none": "none", "tensor": "tensor", "head": "head", "token": "token_head"}


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """Shapes and formats of a pool of pages, per device or whole.

    Attributes:
        num_layers, num_pages, page_size, num_kv_heads, head_size: L, N, B, K, D.
        v_head_size: D of the values; None: as the keys; 0: no values (an MLA latent is its own value).
        k_format, v_format: how each side is stored; ``v_format=None``: as the keys, or nothing without values.

    Raises:
        ValueError: the rule, the value seen and what to change.
    """

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    head_size: int
    v_head_size: int | None = None
    k_format: PageFormat = PageFormat()
    v_format: PageFormat | None = None

    def __post_init__(self) -> None:
        if self.v_head_size is None:
            object.__setattr__(self, "v_head_size", self.head_size)
        if self.v_format is None and self.v_head_size:
            object.__setattr__(self, "v_format", self.k_format)
        for field in ("num_layers", "num_pages", "page_size", "num_kv_heads", "head_size", "v_head_size"):
            value, least = getattr(self, field), 0 if field == "v_head_size" else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"PageLayout.{field} must be an integer of at least {least}, got {value!r}")
        for field in ("k_format", "v_format"):
            value = getattr(self, field)
            if not isinstance(value, PageFormat) and not (field == "v_format" and value is None):
                raise ValueError(f"PageLayout.{field} must be a PageFormat, got {value!r}; write PageFormat({value!r})")
        if self.v_format is not None and not self.v_head_size:
            raise ValueError(f"PageLayout.v_format must be None without values (v_head_size=0), got {self.v_format!r}")
        for ids, what in (
            (self.num_layers * self.num_pages, "pages over all layers"),
            (self.num_slots, "token slots"),
        ):
            if ids >= ID_LIMIT:
                raise ValueError(f"a pool has fewer than 2^31 {what} (ids are int32), got {ids}; use fewer pages")
        for _, width, fmt in self.sides:
            fmt.width(width)

    @property
    def has_values(self) -> bool:
        """Whether values are stored besides the keys."""
        return self.v_head_size != 0

    @property
    def num_slots(self) -> int:
        """Token slots of a layer: valid slots are below it."""
        return self.num_pages * self.page_size

    @property
    def sides(self) -> tuple[tuple[str, int, PageFormat], ...]:
        """(name, head size, format) of each side."""
        keys = ("k", self.head_size, self.k_format)
        return (keys, ("v", self.v_head_size, self.v_format)) if self.has_values else (keys,)

    @property
    def sizing(self) -> tuple[KVLayout, ...]:
        """What ``paxkv.sizing`` says of each side: one array per layer."""
        return tuple(
            KVLayout(
                self.num_layers,
                self.num_kv_heads,
                head_size,
                self.page_size,
                bits=fmt.bits,
                arrays=1,
                scales=_SIZING_SCALE[fmt.scale],
            )
            for _, head_size, fmt in self.sides
        )

    @property
    def bytes(self) -> int:
        """Bytes of the whole pool, scales included; what the arrays of the pool really hold."""
        return sum(side.page_bytes * self.num_pages + side.fixed_bytes for side in self.sizing)

    @property
    def bytes_per_token(self) -> float:
        """Bytes that one token position takes over all layers."""
        return sum(side.bytes_per_token for side in self.sizing)

    def data_shape(self, head_size: int, fmt: PageFormat) -> tuple[int, ...]:
        """Shape [L,N,K,B,D] of one side as stored."""
        return (self.num_layers, self.num_pages, self.num_kv_heads, self.page_size, fmt.width(head_size))

    def scale_shape(self, fmt: PageFormat) -> tuple[int, ...] | None:
        """Shape of one side's scales: [L,1,1,1], [L,1,K,1], [L,N,K,B], or None."""
        per_layer = fmt.scale_shape(self.num_pages, self.num_kv_heads, self.page_size)
        return per_layer and (self.num_layers, *per_layer)
