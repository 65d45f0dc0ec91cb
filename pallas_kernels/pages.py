"""The page format: how keys and values lie in pages, and how they are quantised.

One side (K or V) of a layer is an array [N,K,B,D] in the storage dtype; 4-bit values are packed in pairs, uint8
[N,K,B,D/2] (a uint8 page always means packed int4). A scaled format keeps float32 scales that broadcast against
[N,K,B]: [1,1,1] per tensor, [1,K,1] per head, [N,K,B] per token and head; ``value = stored * scale``. A pool stacks all
layers in front; a kernel sees ``pool.reshape(L * N, K, B, D)``, which moves nothing, and block tables offset by
``layer * N``.

What does not fit saturates at the largest finite value (a plain cast to e4m3 gives NaN above 464, one to float16 gives
infinity above 65519). Values that are not finite:

=====================  ==================================  =====================================================
format                 static scale or none                scale per token (dynamic)
=====================  ==================================  =====================================================
float32/bfloat16/16    kept                                -
float8                 NaN kept, infinity saturates        the token's whole head reads as NaN
int8, int4             NaN is stored as 0, inf saturates   the token's whole head reads as NaN
=====================  ==================================  =====================================================
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int8, Shaped, UInt8

ScaleKind = Literal["none", "tensor", "head", "token"]

BITS = {"float32": 32, "bfloat16": 16, "float16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8, "int8": 8, "int4": 4}
"""The dtypes that pages can have, and the bits of one element."""

_SMALLEST_SCALE = float(np.finfo(np.float32).tiny)  # below it XLA flushes to zero, and a division gives NaN


@dataclasses.dataclass(frozen=True)
class PageFormat:
    """How the elements of one side of the pages are stored.

    Attributes:
        dtype: one of ``BITS``.
        scale: ``none``; static, given when the pool is made: ``tensor`` (one per layer) or ``head`` (one per layer and
            KV head); dynamic: ``token``, computed from each token's head as it is written.

    Raises:
        ValueError: an unknown name, int8 or int4 without a scale, or a float of 16 bits or more with one.
    """

    dtype: str = "float32"
    scale: ScaleKind = "none"

    def __post_init__(self) -> None:
        if self.dtype not in BITS:
            raise ValueError(f"PageFormat.dtype must be one of {', '.join(BITS)}, got {self.dtype!r}")
        if self.scale not in get_args(ScaleKind):
            raise ValueError(f"PageFormat.scale must be one of {', '.join(get_args(ScaleKind))}, got {self.scale!r}")
        if self.dtype in ("int8", "int4") and self.scale == "none":
            raise ValueError(f"{self.dtype} pages need a scale, got 'none'; use 'tensor', 'head' or 'token'")
        if self.bits >= 16 and self.scale != "none":
            raise ValueError(f"{self.dtype} pages take no scale, got {self.scale!r}; use 'none', or 8 bits or fewer")

    @property
    def bits(self) -> int:
        """Bits of one element."""
        return BITS[self.dtype]

    @property
    def quantised(self) -> bool:
        """Whether a scale belongs to the pages."""
        return self.scale != "none"

    @property
    def packed(self) -> bool:
        """Whether two elements share a byte."""
        return self.dtype == "int4"

    @property
    def storage_dtype(self) -> np.dtype:
        """The dtype of the array; uint8 for int4."""
        return jnp.dtype("uint8" if self.packed else self.dtype)

    @property
    def max_value(self) -> float:
        """The largest stored value; a token's largest element maps to it under a dynamic scale."""
        if self.dtype in ("int8", "int4"):
            return float(2 ** (self.bits - 1) - 1)
        return float(jnp.finfo(self.dtype).max)

    def width(self, head_size: int) -> int:
        """Length of the last axis for a head of ``head_size`` elements.

        Raises:
            ValueError: an odd head size with int4.
        """
        if self.packed and head_size % 2:
            raise ValueError(f"int4 pages need an even head size, got {head_size}; pad the heads or use int8")
        return head_size // 2 if self.packed else head_size

    def scale_shape(self, num_pages: int, num_kv_heads: int, page_size: int) -> tuple[int, int, int] | None:
        """Shape of one layer's scales, or None without."""
        return {
            "none": None,
            "tensor": (1, 1, 1),
            "head": (1, num_kv_heads, 1),
            "token": (num_pages, num_kv_heads, page_size),
        }[self.scale]


def dynamic_scale(x: Float[Array, "*rows D"], fmt: PageFormat) -> Float32[Array, "*rows"]:
    """The scale that maps the largest element of each row to ``fmt.max_value``.

    A row of zeros gets 1; no scale is zero or subnormal; a row with NaN or infinity gets that as its scale.
    """
    return scale_for(jnp.max(jnp.abs(x.astype(jnp.float32)), axis=-1), fmt)


def scale_for(largest: Float32[Array, "*shape"], fmt: PageFormat) -> Float32[Array, "*shape"]:
    """What :func:`dynamic_scale` gives rows whose largest magnitudes are these."""
    # At the very top of float32 the quotient may round up, and max_value times it would overflow.
    top = np.nextafter(np.float32(np.finfo(np.float32).max / np.float32(fmt.max_value)), np.float32(0))
    scale = jnp.clip(largest / fmt.max_value, _SMALLEST_SCALE, top)
    scale = jnp.where(largest == 0, 1.0, scale)
    return jnp.where(largest < jnp.inf, scale, largest)


def quantise(
    x: Float[Array, "*rows D"], fmt: PageFormat, scale: Float32[Array, "*#rows"] | None = None
) -> Shaped[Array, "*rows stored"]:
    """``x / scale`` in the storage dtype: nearest value, ties to even, saturating; int4 comes packed along D.

    Args:
        x: [..., D].
        scale: broadcastable to [...]; None for a format without.

    Raises:
        ValueError: a scale that the format does not have, or the reverse.
    """
    _check_scale(fmt, scale)
    if x.dtype == fmt.storage_dtype and not fmt.packed:
        if not fmt.quantised:
            return x
    x = x.astype(jnp.float32)
    if scale is not None:
        x = x / scale[..., None]
    if fmt.dtype in ("int8", "int4"):
        rounded = jnp.where(jnp.isnan(x), 0.0, jnp.round(x))
        stored = jnp.clip(rounded, -fmt.max_value - 1, fmt.max_value).astype(jnp.int8)
        return pack_int4(stored) if fmt.packed else stored
    saturated = jnp.clip(x, -fmt.max_value, fmt.max_value)  # NaN stays NaN
    if fmt.bits >= 16:
        saturated = jnp.where(jnp.isinf(x), x, saturated)
    return saturated.astype(fmt.storage_dtype)


def dequantise(
    stored: Shaped[Array, "*rows stored"], scale: Float32[Array, "*#rows"] | None = None
) -> Float32[Array, "*rows D"]:
    """``stored * scale`` as float32; a uint8 array is unpacked to twice the width.

    Args:
        scale: broadcastable to [...]; None for a format without.
    """
    values = unpack_int4(stored) if stored.dtype == jnp.uint8 else stored
    values = values.astype(jnp.float32)
    return values if scale is None else values * scale[..., None]


def pack_int4(values: Int8[Array, "*rows D"]) -> UInt8[Array, "*rows half"]:
    """Two's complement nibbles, two to a byte: even indices in the low nibble, odd ones in the high one.

    Args:
        values: [..., D] in -8..7, D even.
    """
    pairs = values.astype(jnp.uint8).reshape(*values.shape[:-1], -1, 2)
    return (pairs[..., 0] & 15) | (pairs[..., 1] << 4)


def unpack_int4(packed: UInt8[Array, "*rows half"]) -> Int8[Array, "*rows D"]:
    """The inverse of :func:`pack_int4`."""
    signed = jax.lax.bitcast_convert_type(packed, jnp.int8)
    low, high = (signed << 4) >> 4, signed >> 4  # arithmetic shifts carry the sign down
    return jnp.stack([low, high], axis=-1).reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def bits_of(x: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
    """The same bits as unsigned integers where ``x`` has 16-bit or 8-bit floats, else ``x``.

    Bits move unchanged, where a float that XLA computes on in float32 may lose the payload of a NaN. On CPUs a bitcast
    of the pool is a copy of it unless it fuses with what reads or updates it.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 2:
        return x
    return jax.lax.bitcast_convert_type(x, jnp.uint16 if x.dtype.itemsize == 2 else jnp.uint8)


def from_bits(bits: Shaped[Array, "*shape"], dtype) -> Shaped[Array, "*shape"]:
    """The inverse of :func:`bits_of`."""
    return bits if bits.dtype == dtype else jax.lax.bitcast_convert_type(bits, dtype)


def _check_scale(fmt: PageFormat, scale) -> None:
    if (scale is not None) != fmt.quantised:
        state = "was not given" if scale is None else "was given"
        raise ValueError(f"{fmt} {'needs a' if fmt.quantised else 'takes no'} scale, and one {state}")
