"""The decoder: a pure function of weights, tokens and pages, with one compiled layer for all layers alike.

::

    tokens ─ embed ─┬─ layer 0 ─ ... ─ layer L-1 ─┬─ norm ─ head ─▶ logits
    pages ──────────┴──── written and read ───────┴───────────────▶ pages

With ``scan_layers`` the weights of a run of layers are stacked [L, ...] and scanned; the pool stays in the scan's
carry, so that it is written in place. Without, each layer has its own weights ``layers_{i}`` and its own code.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, Int32

from paxkv.cache.pages import KVPages
from paxkv.cache.rows import Rows
from paxkv.models.architecture import DecoderConfig, Experts, LatentAttention
from paxkv.models.attention import Attention, LatentAttentionLayer, Step
from paxkv.models.experts import ExpertLayer
from paxkv.models.layers import FeedForward, Linear, Norm, soft_cap
from paxkv.models.rotary import Rope, angles

__all__ = ["Decoder", "DecoderConfig", "Experts", "LatentAttention", "Layer", "Rope"]


class Layer(nn.Module):
    """One layer: attention and feed-forward on the residual stream, in one of the orders of ``config.residual``."""

    config: DecoderConfig
    has_experts: bool = False

    @nn.compact
    def __call__(
        self,
        carry: tuple[Float[Array, "T hidden"], KVPages],
        layer: int | Int[Array, ""],
        window: int | Int[Array, ""],
        step: Step,
    ) -> tuple[tuple[Float[Array, "T hidden"], KVPages], None]:
        config, (x, pages) = self.config, carry
        attend = (LatentAttentionLayer if config.mla else Attention)(config, name="attention")
        feed = ExpertLayer(config, name="ffn") if self.has_experts else FeedForward(config, config.ffn_size, name="ffn")

        def norm(name: str, x: Array) -> Array:
            return Norm(config, name=name)(x)

        if config.residual == "parallel":
            normed = norm("attention_norm", x)
            attended, pages = attend(normed, pages, step, layer, window)
            x = x + attended + feed(normed if config.shared_norm else norm("ffn_norm", x))
        elif config.residual == "post":
            attended, pages = attend(x, pages, step, layer, window)
            x = norm("attention_norm", x + attended)
            x = norm("ffn_norm", x + feed(x))
        else:
            attended, pages = attend(norm("attention_norm", x), pages, step, layer, window)
            x = x + (norm("attention_post_norm", attended) if config.residual == "sandwich" else attended)
            fed = feed(norm("ffn_norm", x))
            x = x + (norm("ffn_post_norm", fed) if config.residual == "sandwich" else fed)
        return (x, pages), None


class Decoder(nn.Module):
    """A decoder of any family, by configuration."""

    config: DecoderConfig

    @nn.compact
    def __call__(
        self,
        tokens: Int32[Array, " T"],
        positions: Int32[Array, " T"],
        pages: KVPages,
        rows: Rows,
        logit_rows: Int32[Array, " R"] | None = None,
    ) -> tuple[Float32[Array, "R V"], KVPages]:
        """One step: writes the tokens' keys and values, and scores what follows them.

        Args:
            tokens: ids, those of each row beside each other; padding may have any id.
            positions: of each token in its sequence, from 0. A learned table must reach that far
                (:meth:`DecoderConfig.at_length` checks it where lengths are known).
            pages: the cache, of the config's ``cache_layout``. Donate it: it is written in place.
            rows: which pages the tokens read and write.
            logit_rows: the tokens whose logits are wanted, in any order, repeats allowed; None: all T.

        Returns:
            Logits, float32, and the pages with the step's keys and values in them. Logits of padding mean nothing.

        Raises:
            ValueError: arrays or pages that do not fit the config or each other.
            flax.errors.ScopeParamNotFoundError, ScopeParamShapeError: weights that are missing or misshapen.
        """
        config = self.config
        self._check(tokens, positions, pages, rows)
        embedding_size = config.embedding_size or config.hidden_size
        normal = nn.initializers.normal(0.02)
        table = self.param("embedding", normal, (config.vocab_size, embedding_size), config.dtype)
        x = jnp.take(table, tokens, axis=0, mode="clip")
        if config.embedding_scale != 1.0:
            # The factor is rounded to the dtype first, as the families that have one were trained.
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
        if config.embedding_size:
            x = Linear(config, config.hidden_size, name="embedding_in")(x)
        if config.positions == "learned":
            shape = (config.max_positions + config.position_offset, config.hidden_size)
            places = self.param("positions", normal, shape, config.dtype)
            x = x + jnp.take(places, positions + config.position_offset, axis=0, mode="clip")
        cos, sin = (None, None) if config.rope is None else angles(config.rope, positions)
        x, pages = self._layers(x, pages, Step(rows, cos, sin))
        if logit_rows is not None:
            x = jnp.take(x, logit_rows, axis=0, mode="clip")
        if config.final_norm:
            x = Norm(config, name="final_norm")(x)
        if config.embedding_size:
            x = Linear(config, config.embedding_size, name="embedding_out")(x)
        if config.tied_head:
            contract = (((1,), (1,)), ((), ()))
        else:
            table = self.param(
                "head", nn.initializers.lecun_normal(), (embedding_size, config.vocab_size), config.dtype
            )
            contract = (((1,), (0,)), ((), ()))
        logits = jax.lax.dot_general(x, table, contract, preferred_element_type=jnp.float32)
        return soft_cap(logits, config.logit_soft_cap), pages

    def _layers(self, x: Array, pages: KVPages, step: Step) -> tuple[Array, KVPages]:
        config = self.config
        windows = config.windows or (0,) * config.num_layers
        carry = (x, pages)
        for name, first, end, has_experts in config.runs:
            if not config.scan_layers:
                for i in range(first, end):
                    carry, _ = Layer(config, has_experts, name=f"layers_{i}")(carry, i, windows[i], step)
                continue
            ours = windows[first:end]
            alike = len(set(ours)) == 1
            scanned = nn.scan(
                Layer,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=(0, nn.broadcast if alike else 0, nn.broadcast),
                length=end - first,
            )
            window = ours[0] if alike else jnp.asarray(ours, jnp.int32)
            layers = jnp.arange(first, end, dtype=jnp.int32)
            carry, _ = scanned(config, has_experts, name=name)(carry, layers, window, step)
        return carry

    def _check(self, tokens: Array, positions: Array, pages: KVPages, rows: Rows) -> None:
        config = self.config
        for name, array in (("tokens", tokens), ("positions", positions), ("rows.slots", rows.slots)):
            if array.ndim != 1 or array.shape != tokens.shape or not jnp.issubdtype(array.dtype, jnp.integer):
                raise ValueError(
                    f"{name} must be integers [T] with the tokens' T, got {array.dtype} {list(array.shape)} beside "
                    f"tokens {list(tokens.shape)}"
                )
        want, got = config.cache_layout(1), pages.layout
        for field in ("num_layers", "num_kv_heads", "head_size", "v_head_size"):
            if getattr(want, field) != getattr(got, field):
                raise ValueError(
                    f"pages must have {field} {getattr(want, field)} for this {config.name}, "
                    f"got {getattr(got, field)}; make them with DecoderConfig.cache_layout"
                )
