"""Rotary position embedding: its frequencies under every scaling rule, and the rotation.

Frequencies are computed on the host in float64 from a frozen :class:`Rope`; angles are computed for the positions
of the step, so there is no table that could be shorter than a sequence.

Dynamic scaling stretches the base with the sequence length. If the length were that of the running sequence, keys
already in the cache would have been rotated under another base than the queries that meet them, and with one length
for a batch a request would depend on its mates. The policy here: the length is a constant of the model, the longest
sequence it serves (``Rope.length``, by default trained length x factor; ``DecoderConfig.at_length`` sets it).
Served at no more than the trained length the base is the trained one.
"""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from paxkv.config import require

KINDS = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclasses.dataclass(frozen=True)
class Rope:
    """One rotary embedding.

    Attributes:
        size: lanes of each head that are rotated, the first ones; the rest pass through. Frequencies count over it.
        base: the period's base.
        kind: scaling rule, one of ``KINDS``.
        factor: how much longer the model reads than it was trained to (1 where ``kind`` is ``default``).
        trained_length: positions of the original training; needed by dynamic, llama3 and yarn.
        length: longest sequence served; dynamic only. None: trained length x factor.
        low, high: llama3: wavelengths above trained/low are stretched, below trained/high kept, blended between.
        beta_fast, beta_slow: yarn: rotations over the trained length between which frequencies are blended.
        truncate: yarn: whether the bounds of the blend are rounded outwards to whole lanes.
        attention_factor: yarn: multiplies sine and cosine. None: from ``mscale`` and ``mscale_all_dim`` where both are
            given, else 0.1 ln(factor) + 1.
        mscale, mscale_all_dim: yarn as DeepSeek has it, 0 where absent.
        interleaved: whether a rotated pair is lanes (2i, 2i+1) instead of (i, i + size/2).

    Raises:
        ValueError: the rule, the value seen and what to change.
    """

    size: int
    base: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    trained_length: int = 0
    length: int | None = None
    low: float = 1.0
    high: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    interleaved: bool = False

    def __post_init__(self) -> None:
        require(
            self.kind in KINDS,
            f"rope scaling must be one of {', '.join(KINDS)}, got {self.kind!r}; another rule needs code of its own",
        )
        require(self.size > 0 and self.size % 2 == 0, f"rotated lanes must be even and above 0, got {self.size}")
        require(self.base > 0, f"rope base must be above 0, got {self.base!r}; check rope_theta")
        require(self.factor >= 1, f"rope scaling factor must be at least 1, got {self.factor!r}")
        if self.kind in ("dynamic", "llama3", "yarn"):
            require(
                self.trained_length > 0,
                f"{self.kind} rope needs the trained length, got {self.trained_length}; "
                "set original_max_position_embeddings",
            )
        if self.kind == "llama3":
            require(
                0 < self.low < self.high,
                f"llama3 rope needs 0 < low_freq_factor < high_freq_factor, got {self.low} and {self.high}",
            )

    @property
    def served_length(self) -> int:
        """The length that dynamic scaling is computed for."""
        return self.length or int(self.trained_length * self.factor)

    @property
    def amplitude(self) -> float:
        """What sine and cosine are multiplied by: 1 but for yarn."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_mscale(self.factor, self.mscale) / yarn_mscale(self.factor, self.mscale_all_dim)
        return yarn_mscale(self.factor, 1.0)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Growth of attention logits' temperature with the context (Peng et al. 2023, equation 22)."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def dynamic_base(rope: Rope, length: int) -> float:
    """Base of NTK-aware scaling for sequences up to ``length``: the trained base up to the trained length."""
    length = max(length, rope.trained_length)
    stretch = rope.factor * length / rope.trained_length - (rope.factor - 1)
    return rope.base * stretch ** (rope.size / (rope.size - 2))


def inverse_frequencies(rope: Rope) -> np.ndarray:
    """Angle per position of each rotated pair, float64 [size/2].

    Sources: Su et al. 2021; linear, Chen et al. 2023; dynamic, NTK-aware scaling; llama3, the Llama 3.1 reference
    code; yarn, Peng et al. 2023, sections 3.2 and 3.4.
    """
    base = dynamic_base(rope, rope.served_length) if rope.kind == "dynamic" else rope.base
    exponents = np.arange(0, rope.size, 2, dtype=np.float64) / rope.size
    plain = base**-exponents
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        rotations = rope.trained_length * plain / (2 * math.pi)
        keep = np.clip((rotations - rope.low) / (rope.high - rope.low), 0.0, 1.0)
        return plain * keep + plain / rope.factor * (1 - keep)
    if rope.kind == "yarn":
        keep = 1 - _yarn_ramp(rope)
        return plain * keep + plain / rope.factor * (1 - keep)
    return plain


def _yarn_ramp(rope: Rope) -> np.ndarray:
    """0 for pairs that turn often over the trained length, 1 for those that hardly turn."""

    def lane(rotations: float) -> float:
        return rope.size * math.log(rope.trained_length / (rotations * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = lane(rope.beta_fast), lane(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.size - 1)
    width = max(high - low, 0.001)
    return np.clip((np.arange(rope.size // 2) - low) / width, 0.0, 1.0)


def angles(rope: Rope, positions: Int32[Array, " T"]) -> tuple[Float[Array, "T _"], Float[Array, "T _"]]:
    """Cosine and sine of each token's rotated pairs, float32 [T, size/2], amplitude included."""
    frequencies = jnp.asarray(inverse_frequencies(rope), jnp.float32)
    angle = positions.astype(jnp.float32)[:, None] * frequencies
    return jnp.cos(angle) * rope.amplitude, jnp.sin(angle) * rope.amplitude


def rotate(
    x: Float[Array, "T _ D"], cos: Float[Array, "T _"], sin: Float[Array, "T _"], *, interleaved: bool = False
) -> Float[Array, "T _ D"]:
    """Rotates the first lanes of every head, in float32; the lanes past the rotary size pass through."""
    size = 2 * cos.shape[-1]
    turned = x[..., :size].astype(jnp.float32)
    cos, sin = cos[:, None, :], sin[:, None, :]
    if interleaved:
        even, odd = turned[..., 0::2], turned[..., 1::2]
        turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(turned.shape)
    else:
        first, second = turned[..., : size // 2], turned[..., size // 2 :]
        turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    turned = turned.astype(x.dtype)
    return turned if size == x.shape[-1] else jnp.concatenate([turned, x[..., size:]], axis=-1)
