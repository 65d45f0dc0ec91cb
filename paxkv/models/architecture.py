"""What a decoder is: frozen values that name every choice in which the families differ, validated where built."""

from __future__ import annotations

import dataclasses
import math

from pallas_kernels.pages import PageFormat
from paxkv.cache.layout import PageLayout
from paxkv.config import ModelShape, require
from paxkv.models.rotary import Rope, yarn_mscale

NORMS = ("rms", "layer")
RESIDUALS = ("pre", "post", "parallel", "sandwich")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
POSITIONS = ("rope", "learned", "alibi")
SCORINGS = ("softmax", "sigmoid")
DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclasses.dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2, section 2.1): all heads read one latent per token.

    Attributes:
        kv_rank: width of the compressed keys and values.
        nope_size: lanes of a query head that carry no position.
        rope_size: lanes that do; one rotated key of this width is shared by all heads.
        v_size: lanes of a value head.
        q_rank: width of the compressed queries, None where queries are not compressed.
    """

    kv_rank: int
    nope_size: int
    rope_size: int
    v_size: int
    q_rank: int | None = None

    @property
    def cached_size(self) -> int:
        """Lanes that the cache keeps per token and layer: the latent and the shared rotated key."""
        return self.kv_rank + self.rope_size


@dataclasses.dataclass(frozen=True)
class Experts:
    """A feed-forward layer of experts, of which a router picks a few for each token.

    Attributes:
        count: routed experts.
        per_token: experts that a token uses.
        ffn_size: width of one routed expert.
        shared_size: width of the shared experts together, which every token uses; 0 for none.
        scoring: ``softmax`` over all experts, or ``sigmoid`` of each.
        normalise: whether the picked scores are divided by their sum. Softmax with normalise is Mixtral's softmax
            over the picked ones.
        scaling: what the weights are multiplied by at last.
        groups, top_groups: only experts of the ``top_groups`` best groups can be picked; 1 and 1: no groups.
        group_top: a group's score is the sum of its best 1 (V2) or 2 (V3) experts.
        correction_bias: whether a learned bias takes part in picking (not in weighting).
        first_dense: layers before the first that has experts.
    """

    count: int
    per_token: int
    ffn_size: int
    shared_size: int = 0
    scoring: str = "softmax"
    normalise: bool = True
    scaling: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_top: int = 1
    correction_bias: bool = False
    first_dense: int = 0

    def __post_init__(self) -> None:
        require(self.scoring in SCORINGS, f"router scoring must be one of {SCORINGS}, got {self.scoring!r}")
        require(
            self.count % self.groups == 0 and 1 <= self.top_groups <= self.groups,
            f"{self.count} experts must divide into {self.groups} groups of which {self.top_groups} are picked; "
            "check n_group and topk_group",
        )
        reachable = self.count // self.groups * self.top_groups
        require(
            1 <= self.per_token <= reachable,
            f"a token must use between 1 and {reachable} experts, got {self.per_token}; check num_experts_per_tok",
        )


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """One decoder. Every family is a value of this (:mod:`paxkv.models.families`).

    Attributes:
        name: family, such as ``llama``.
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        num_layers, num_heads, num_kv_heads: layers, query heads, key and value heads.
        head_size: lanes of a head. Declared, not derived: some models choose it freely.
        ffn_size: width of the dense feed-forward layer.
        max_positions: positions the checkpoint declares (``max_position_embeddings``).
        dtype: of weights and activations; norms, rotary, softmax and logits are float32.
        scan_layers: layers compiled once, weights stacked [L, ...]; False: compiled one by one, ``layers_{i}``.
        norm, norm_eps: ``rms``, or ``layer`` with mean and bias.
        norm_offset: added to the norm's weight (Gemma keeps weight - 1).
        residual: ``pre`` x + f(norm(x)); ``post`` norm(x + f(x)); ``parallel`` attention and feed-forward from the same
            x; ``sandwich`` x + norm(f(norm(x))).
        shared_norm: parallel only: attention and feed-forward read the same normed x.
        activation: of the feed-forward layer.
        gated: down(act(gate x) * up x) instead of down(act(up x)).
        qkv_bias, out_bias, ffn_bias: which projections have biases.
        qk_norm: an rms norm over each query and key head, before rotary.
        positions: ``rope``, ``learned`` or ``alibi``.
        rope: the rotary embedding, if positions are ``rope``.
        position_offset: added to positions before a learned table is read (OPT: 2).
        embedding_size: width of the embedding where it is projected to the hidden size and back; None: hidden size.
        embedding_scale: multiplies embeddings (Gemma: sqrt(hidden size)).
        tied_head: whether the output head is the embedding.
        softmax_scale: factor of attention logits; None: 1/sqrt(head size), the declared and unpadded one.
        windows: keys a query sees, itself included, by layer; 0 for all. Empty: all in every layer.
        attention_soft_cap, logit_soft_cap: bound x to cap * tanh(x / cap).
        final_norm: whether there is a norm before the head.
        mla: latent attention in place of the usual, or None.
        experts: experts in place of the dense feed-forward layer, or None.
        attention: implementation of the attention kernel by name; None: the best that can do the call.

    Raises:
        ValueError: the rule, the value seen and what to change.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    ffn_size: int
    max_positions: int
    dtype: str = "float32"
    scan_layers: bool = True
    norm: str = "rms"
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    residual: str = "pre"
    shared_norm: bool = False
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    ffn_bias: bool = False
    qk_norm: bool = False
    positions: str = "rope"
    rope: Rope | None = None
    position_offset: int = 0
    embedding_size: int | None = None
    embedding_scale: float = 1.0
    tied_head: bool = False
    softmax_scale: float | None = None
    windows: tuple[int, ...] = ()
    attention_soft_cap: float | None = None
    logit_soft_cap: float | None = None
    final_norm: bool = True
    mla: LatentAttention | None = None
    experts: Experts | None = None
    attention: str | None = None

    def __post_init__(self) -> None:
        for field in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_size", "ffn_size"):
            value = getattr(self, field)
            require(
                isinstance(value, int) and not isinstance(value, bool) and value > 0,
                f"{self.name}: {field} must be a positive integer, got {value!r}; take it from config.json",
            )
        for field, allowed in (
            ("norm", NORMS),
            ("residual", RESIDUALS),
            ("activation", ACTIVATIONS),
            ("positions", POSITIONS),
            ("dtype", tuple(DTYPES)),
        ):
            value = getattr(self, field)
            require(value in allowed, f"{self.name}: {field} must be one of {', '.join(allowed)}, got {value!r}")
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"{self.name}: query heads must be a multiple of KV heads, got {self.num_heads} and {self.num_kv_heads}; "
            "check num_key_value_heads",
        )
        require(
            (self.rope is not None) == (self.positions == "rope"),
            f"{self.name}: positions={self.positions!r} and rope={self.rope!r} contradict each other",
        )
        if self.rope is not None:
            turned = self.mla.rope_size if self.mla else self.head_size
            require(
                self.rope.size <= turned,
                f"{self.name}: rotary covers {self.rope.size} lanes of a head of {turned}; check the rotary fraction",
            )
        require(
            len(self.windows) in (0, self.num_layers) and all(window >= 0 for window in self.windows),
            f"{self.name}: windows must name one length (0: none) per layer, {self.num_layers}, got {self.windows}",
        )
        require(
            self.experts is None or 0 <= self.experts.first_dense < self.num_layers,
            f"{self.name}: dense layers before the experts must be fewer than {self.num_layers}, got {self.experts}",
        )

    @property
    def attention_scale(self) -> float:
        """The factor of attention logits, a temperature that grows with yarn's context included (DeepSeek)."""
        if self.softmax_scale is not None:
            return self.softmax_scale
        size = self.mla.nope_size + self.mla.rope_size if self.mla else self.head_size
        scale = 1.0 / math.sqrt(size)
        if self.mla and self.rope is not None and self.rope.kind == "yarn" and self.rope.mscale_all_dim:
            scale *= yarn_mscale(self.rope.factor, self.rope.mscale_all_dim) ** 2
        return scale

    @property
    def max_length(self) -> int:
        """Longest sequence that positions have a meaning for."""
        rope = self.rope
        if rope is None or rope.kind in ("default", "llama3"):
            return self.max_positions
        if rope.kind == "dynamic":
            return rope.served_length
        return max(self.max_positions, int((rope.trained_length or self.max_positions) * rope.factor))

    def at_length(self, length: int) -> DecoderConfig:
        """The config for serving sequences up to ``length`` tokens; dynamic rope is stretched to that and no more.

        Raises:
            ValueError: positions past ``max_length`` would have no meaning, or no row in a learned table.
        """
        limit = self.max_length
        if self.rope is not None and self.rope.kind == "dynamic":
            limit = int(self.rope.trained_length * self.rope.factor)
        require(
            0 < length <= limit,
            f"{self.name}: sequences of {length} tokens were asked for, but positions end at {limit}; "
            "ask for shorter ones, or scale the rotary embedding in config.json (rope_scaling)",
        )
        if self.rope is not None and self.rope.kind == "dynamic":
            return dataclasses.replace(self, rope=dataclasses.replace(self.rope, length=length))
        return self

    @property
    def runs(self) -> tuple[tuple[str, int, int, bool], ...]:
        """Runs of layers alike, each scanned on its own: (name in the weights, first, end, whether it has experts)."""
        if self.experts is None:
            return (("layers", 0, self.num_layers, False),)
        dense = self.experts.first_dense
        head = (("dense_layers", 0, dense, False),) if dense else ()
        return (*head, ("layers", dense, self.num_layers, True))

    @property
    def shape(self) -> ModelShape:
        """The numbers that sizing and the cost model need. A latent cache counts as one KV head of its width."""
        latent = self.mla is not None
        kv_bytes = DTYPES[self.dtype]
        return ModelShape(
            self.name,
            self.num_layers,
            self.num_heads,
            1 if latent else self.num_kv_heads,
            self.mla.cached_size if self.mla else self.head_size,
            self.hidden_size,
            self.ffn_size,
            self.vocab_size,
            max_positions=self.max_positions,
            learned_positions=self.max_positions + self.position_offset if self.positions == "learned" else 0,
            gated_ffn=self.gated,
            biases=self.qkv_bias and self.ffn_bias,
            weight_bytes=DTYPES[self.dtype],
            # ModelShape counts K and V; a latent is one array.
            kv_bytes=kv_bytes / 2 if latent else kv_bytes,
        )

    def cache_layout(
        self,
        num_pages: int,
        page_size: int = 16,
        k_format: PageFormat | None = None,
        v_format: PageFormat | None = None,
    ) -> PageLayout:
        """The page pool of this model: ``num_pages`` pages of ``page_size`` slots in every layer.

        Args:
            k_format: None: the model's dtype, not quantised.
            v_format: None: as ``k_format``; ignored by a latent cache, whose values are part of its keys.
        """
        return PageLayout(
            self.num_layers,
            num_pages,
            page_size,
            num_kv_heads=1 if self.mla else self.num_kv_heads,
            head_size=self.mla.cached_size if self.mla else self.head_size,
            v_head_size=0 if self.mla else self.head_size,
            k_format=k_format or PageFormat(self.dtype),
            v_format=None if self.mla else v_format or k_format or PageFormat(self.dtype),
        )
