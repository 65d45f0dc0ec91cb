"""Between checkpoint tensors and our weights: which ones make each weight, their shapes, where their numbers lie.

Checkpoints keep a projection as [out, in] (GPT-2: [in, out]) and mostly q, k, v, gate and up apart; ours are [in, out]
with q|k|v and gate|up side by side. Where a checkpoint fuses q, k and v it does so by KV head: the queries of its
group, its key, its value. A flat cut in three has the same shapes and gives fluent nonsense.

A rule is a list of pairs of views that hold the same numbers, so it serves in both directions, and a tensor is copied
once, straight to where it belongs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from paxkv.models.architecture import DecoderConfig

Pairs = Callable[[np.ndarray, int, np.ndarray], Iterable[tuple[np.ndarray, np.ndarray]]]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """How one of our weights and a checkpoint's tensors correspond.

    Attributes:
        path: of the weight in the unrolled form (``layers_{i}``); ``paxkv.models.weights.stacked_place`` says where
            that lies in the stacked form.
        shape: of the weight.
        sources: names of the checkpoint's tensors.
        shapes: what each must have.
        pairs: of the weight, a source's number and its tensor: (view of the weight, view of the tensor), equal.
    """

    path: tuple[str, ...]
    shape: Shape
    sources: tuple[str, ...]
    shapes: tuple[Shape, ...]
    pairs: Pairs

    def put(self, weight: np.ndarray, source: int, tensor: np.ndarray) -> None:
        """Copies the tensor of source number ``source`` into the weight, whose dtype it takes.

        Raises:
            ValueError: the tensor has another shape; names it, what was expected and what was found.
        """
        if tuple(tensor.shape) != self.shapes[source]:
            raise ValueError(
                f"tensor {self.sources[source]}: expected {list(self.shapes[source])} for weight "
                f"{'/'.join(self.path)}, found {list(tensor.shape)}; check that the weights belong to this config.json"
            )
        for ours, theirs in self.pairs(weight, source, tensor):
            ours[...] = theirs

    def take(self, weight: np.ndarray, source: int, tensor: np.ndarray) -> None:
        """The other way: copies the weight's part into the tensor, a contiguous array of its shape."""
        for ours, theirs in self.pairs(weight, source, tensor):
            theirs[...] = ours

    def __call__(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        """The weight, in the dtype of the tensors, which are those of all sources in order.

        Raises:
            ValueError: as :meth:`put`.
        """
        weight = np.empty(self.shape, tensors[0].dtype)
        for source, tensor in enumerate(tensors):
            self.put(weight, source, tensor)
        return weight


def group_order(kv_heads: int, group: int, head_size: int) -> np.ndarray:
    """Rows of a projection fused by KV head ([K, group + 2, D]), in the order all q, all k, all v."""
    rows = np.arange(kv_heads * (group + 2) * head_size).reshape(kv_heads, group + 2, head_size)
    return np.concatenate([rows[:, :group].ravel(), rows[:, group].ravel(), rows[:, group + 1].ravel()])


def _runs(order: np.ndarray) -> list[tuple[int, int, int]]:
    """The order cut into runs of neighbours: (first of ours, first of theirs, how many)."""
    starts = [0, *(np.flatnonzero(np.diff(order) != 1) + 1).tolist(), len(order)]
    return [(a, int(order[a]), b - a) for a, b in zip(starts, starts[1:], strict=False) if b > a]


class RuleList:
    """Collects the rules of one decoder."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self.rules: list[TensorRule] = []

    def add(
        self, path: tuple[str, ...], shape: Shape, sources: Sequence[str], shapes: Sequence[Shape], pairs: Pairs
    ) -> None:
        """Any rule."""
        self.rules.append(TensorRule(path, shape, tuple(sources), tuple(shapes), pairs))

    def same(self, path: tuple[str, ...], source: str, shape: Shape) -> None:
        """A weight that is stored as we keep it."""
        self.add(path, shape, [source], [shape], lambda weight, _, tensor: [(weight, tensor)])

    def turned(self, path: tuple[str, ...], source: str, shape: tuple[int, int]) -> None:
        """A matrix that is stored transposed, with ``shape``."""
        self.add(path, shape[::-1], [source], [shape], lambda weight, _, tensor: [(weight, tensor.T)])

    def norm(self, path: tuple[str, ...], source: str, width: int, kind: str | None = None) -> None:
        """A norm's weight, and its bias if it is a layer norm."""
        self.same((*path, "scale"), f"{source}.weight", (width,))
        if (kind or self.config.norm) == "layer":
            self.same((*path, "bias"), f"{source}.bias", (width,))

    def linear(
        self,
        path: tuple[str, ...],
        sources: Sequence[tuple[str, int]],
        inner: int,
        bias: bool = False,
        *,
        transposed: bool = True,
        order: np.ndarray | None = None,
    ) -> None:
        """Projections from ``inner`` lanes, side by side; ``sources`` are (name, out lanes).

        Args:
            transposed: stored as [out, in]; else [in, out].
            order: which stored out lane each of ours is, for a single source; None: as stored.
        """
        names, widths = zip(*sources, strict=True)
        starts = np.cumsum([0, *widths]).tolist()

        def pairs(weight: np.ndarray, source: int, tensor: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
            # Out lanes are the last axis of ours and, turned, of theirs; a bias has no other.
            ours = weight[..., starts[source] : starts[source + 1]]
            theirs = tensor.T if transposed else tensor
            if order is None:
                return [(ours, theirs)]
            return [(ours[..., a : a + n], theirs[..., b : b + n]) for a, b, n in _runs(order)]

        shapes = [(width, inner) if transposed else (inner, width) for width in widths]
        self.add((*path, "kernel"), (inner, starts[-1]), [f"{name}.weight" for name in names], shapes, pairs)
        if bias:
            shapes = [(width,) for width in widths]
            self.add((*path, "bias"), (starts[-1],), [f"{name}.bias" for name in names], shapes, pairs)

    def head(self, source: str) -> None:
        """The output head, unless it is the embedding: then a stored one is not ours to read."""
        if not self.config.tied_head:
            size = self.config.embedding_size or self.config.hidden_size
            self.turned(("head",), source, (self.config.vocab_size, size))

    def experts(self, path: tuple[str, ...], name: Callable[[int, str], str], gate: str, up: str, down: str) -> None:
        """Routed experts; ``name(expert, part)`` is a tensor's name."""
        config, experts = self.config, self.config.experts
        hidden, width, count = config.hidden_size, experts.ffn_size, experts.count

        def gates(weight: np.ndarray, source: int, tensor: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
            expert, half = divmod(source, 2)
            return [(weight[expert, :, half * width : (half + 1) * width], tensor.T)]

        sources = [name(e, part) for e in range(count) for part in (gate, up)]
        self.add((*path, "gate_up"), (count, hidden, 2 * width), sources, [(width, hidden)] * (2 * count), gates)
        sources = [name(e, down) for e in range(count)]
        self.add(
            (*path, "down"),
            (count, width, hidden),
            sources,
            [(hidden, width)] * count,
            lambda weight, source, tensor: [(weight[source], tensor.T)],
        )
