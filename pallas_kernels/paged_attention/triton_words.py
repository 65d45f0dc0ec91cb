"""How pages come into registers: as words that hold one element of a head, or several neighbours."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

NARROW_OFFSETS = 2**31, 2**32
"""Above so many bytes and up to so many Triton's 32-bit offsets overflow if a word is a byte; beyond it has 64 bits."""


def power_of_two(count: int) -> int:
    """The smallest power of two that is no less, and no less than the 16 that a product takes."""
    return max(16, 1 << (count - 1).bit_length())


@dataclasses.dataclass(frozen=True)
class Words:
    """One side of the pages as the kernels read it. Element i of a head is in word ``i // planes``.

    Attributes:
        kind: dtype of an element, a name in ``pages.BITS``.
        size: elements of a head.
        planes: elements in a word, the first in its lowest bits: 1, 2 or 4.
        unit: what the tensor cores multiply; it holds every element exactly.
        native: whether the GPU converts e4m3 by itself.
    """

    kind: str
    size: int
    planes: int
    unit: str
    native: bool

    @property
    def count(self) -> int:
        """Words of a head."""
        return self.size // self.planes

    @property
    def lanes(self) -> int:
        """Words of a head in registers: a power of two, and no fewer than a product takes."""
        return power_of_two(self.count)


def view(pages: jax.Array, query: jnp.dtype, native: bool) -> tuple[Words, jax.Array]:
    """How the pages [N,K,B,*] are read, and their words [N*K*B,words]; nothing is moved."""
    rows = pages.reshape(-1, pages.shape[3])
    kind, planes = ("int4", 2) if pages.dtype == jnp.uint8 else (pages.dtype.name, 1)
    size = planes * rows.shape[1]
    if kind.startswith("float8"):
        rows = lax.bitcast_convert_type(rows, jnp.uint8)
    if in_pairs(pages):
        rows = lax.bitcast_convert_type(rows.reshape(rows.shape[0], -1, 2), jnp.uint16)
        planes *= 2
    return Words(kind, size, planes, unit_of(kind, query), native), rows


def in_pairs(pages: jax.Array) -> bool:
    """Whether bytes have to be read in pairs because their number passes what Triton's offsets can count."""
    low, high = NARROW_OFFSETS
    return pages.dtype.itemsize == 1 and low < pages.size <= high


def unit_of(kind: str, query: jnp.dtype) -> str:
    """16-bit numbers that hold the pages exactly, or float32 where pages or queries are more precise."""
    if "float32" in (kind, query.name):
        return "float32"
    if kind == "bfloat16":
        return "float32" if query == jnp.float16 else "bfloat16"
    return "float16"


def plane(side: Words, words: jax.Array, index: int) -> jax.Array:
    """Elements ``index``, ``index + planes``, ... of words of any shape, in the unit of the side."""
    unit = jnp.dtype(side.unit)
    if side.planes == 1 and words.dtype != jnp.uint8:  # the words are the elements
        return words.astype(unit)
    if side.kind == "float8_e4m3fn" and side.planes == 1 and side.native:
        return lax.bitcast_convert_type(words, jnp.float8_e4m3fn).astype(jnp.float16).astype(unit)
    bits = 4 if side.kind == "int4" else 8
    # The element alone, at the top of 16 bits.
    code = (words.astype(jnp.uint16) >> bits * index) << 16 - bits
    if side.kind == "float8_e5m2":  # the upper half of a float16
        value = lax.bitcast_convert_type(code, jnp.float16)
    elif side.kind == "float8_e4m3fn":
        value = decode_e4m3(code)
    else:
        value = lax.bitcast_convert_type(code, jnp.int16) >> 16 - bits
    return value.astype(unit)


def decode_e4m3(code: jax.Array) -> jax.Array:
    """float8_e4m3fn in the upper byte of a uint16, as float16: exact, for every code.

    float16 has one more bit of exponent, and its bias is larger by 8.
    """
    magnitude = (code & 0x7F00) >> 1
    value = lax.bitcast_convert_type((code & 0x8000) | magnitude, jnp.float16) * jnp.float16(256)
    return jnp.where(magnitude == 0x3F80, jnp.float16(jnp.nan), value)
