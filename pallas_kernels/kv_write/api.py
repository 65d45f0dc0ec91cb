"""Writing keys and values into pages: the public function, and the table of its implementations."""

from __future__ import annotations

from types import ModuleType

import jax
from jaxtyping import Array, Float, Float32, Int32, Shaped

from pallas_kernels import implementations
from pallas_kernels.arguments import check_values
from pallas_kernels.kv_write import arguments, mosaic_gpu, reference, tpu, xla
from pallas_kernels.kv_write.arguments import Call
from pallas_kernels.pages import PageFormat

__all__ = ["IMPLEMENTATIONS", "kv_write"]

# Best first. Each module has ``refuses(call) -> reason or None`` and ``write(call) -> [(pages, scale) of each side]``,
# and ``PLATFORM`` if it is for one only.
IMPLEMENTATIONS: dict[str, ModuleType] = {"tpu": tpu, "mosaic_gpu": mosaic_gpu, "xla": xla, "reference": reference}

Written = tuple[jax.Array, jax.Array | None, jax.Array | None, jax.Array | None]


def kv_write(
    k_pages: Shaped[Array, "N K B _"],
    v_pages: Shaped[Array, "N K B _"] | None,
    k: Float[Array, "T K D"],
    v: Float[Array, "T K Dv"] | None,
    slots: Int32[Array, " T"],
    *,
    k_format: PageFormat,
    v_format: PageFormat | None = None,
    k_scale: Float32[Array, "_ _ _"] | None = None,
    v_scale: Float32[Array, "_ _ _"] | None = None,
    implementation: str | None = None,
) -> Written:
    """Stores the keys and values of T tokens in their pages, quantised on the way (see ``pallas_kernels.pages``).

    Donate the pages and the scales: they are changed in place, and what no slot names keeps its bits.

    Args:
        k_pages: where keys go, [N,K,B,D] in ``k_format``'s storage dtype. N pages, all layers of a pool together if the
            slots are offset so: ``pool.reshape(L * N, K, B, D)`` moves nothing, and ``layer * N * B`` is added to the
            slots that lie in [0, N * B) (others must stay out of range).
        v_pages: the same for values, or None where pages hold no values (an MLA latent).
        k: new keys, float32, bfloat16 or float16.
        v: new values, or None without ``v_pages``.
        slots: n * B + offset of each token. A token whose slot lies outside [0, N * B) is dropped, neither clamped nor
            wrapped; -1 is the usual padding. All other slots must be distinct, else it is undefined which is stored.
        k_format, v_format: how the pages store; ``v_format`` None means ``k_format``.
        k_scale: float32 as the format has it: None; static [1,1,1] or [1,K,1], positive; or [N,K,B], into which the
            scale of each token's head is computed and stored.
        v_scale: the same for values.
        implementation: a name in ``IMPLEMENTATIONS``; None takes the first that can do the call on the platform of the
            mesh in use, or else of this machine.

    Returns:
        ``k_pages, v_pages, k_scale, v_scale``, changed. Derivatives are those of the cast to the pages' dtype:
        integers have none.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it, its value and the rule.
    """
    slots = arguments.check_slots(slots)
    sides = [arguments.check_side("k", k, k_pages, k_scale, k_format, slots.shape[0])]
    if v_pages is None:
        arguments.check_no_values(v=v, v_format=v_format, v_scale=v_scale)
    else:
        check_values(v_pages, k_pages)
        v_format = k_format if v_format is None else v_format
        sides.append(arguments.check_side("v", v, v_pages, v_scale, v_format, slots.shape[0]))
    call = Call(tuple(sides), slots)
    module = implementations.choose(call, IMPLEMENTATIONS, implementation)
    write = implementations.differentiated_as(xla.write, module.write) if hasattr(module, "PLATFORM") else module.write
    written = write(call) if call.num_tokens else [(side.pages, side.scale) for side in sides]
    (k_pages, k_scale), (v_pages, v_scale) = (*written, (None, None))[:2]
    return k_pages, v_pages, k_scale, v_scale
