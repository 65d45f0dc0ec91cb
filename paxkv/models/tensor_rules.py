"""From a checkpoint's tensors to our weights: which ones make each weight, their shapes, and how they are put together.

Checkpoints keep a projection as [out, in] (GPT-2: [in, out]) and mostly q, k, v, gate and up apart; ours are [in, out]
with q|k|v and gate|up side by side. Where a checkpoint fuses q, k and v it does so by KV head: the queries of its
group, its key, its value. A flat cut in three has the same shapes and gives fluent nonsense.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from paxkv.models.architecture import DecoderConfig

Build = Callable[[Sequence[np.ndarray]], np.ndarray]
Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class TensorRule:
    """How one of our weights is made.

    Attributes:
        path: of the weight in the unrolled form (``layers_{i}``); ``paxkv.models.weights.stacked_place`` says where
            that lies in the stacked form.
        sources: names of the checkpoint's tensors.
        shapes: what each must have.
        build: the weight, from the sources in order; keeps their dtype.
    """

    path: tuple[str, ...]
    sources: tuple[str, ...]
    shapes: tuple[Shape, ...]
    build: Build

    def __call__(self, tensors: Sequence[np.ndarray]) -> np.ndarray:
        """The weight.

        Raises:
            ValueError: a tensor has another shape; names it, what was expected and what was found.
        """
        for name, want, tensor in zip(self.sources, self.shapes, tensors, strict=True):
            if tuple(tensor.shape) != want:
                raise ValueError(
                    f"tensor {name}: expected {list(want)} for weight {'/'.join(self.path)}, "
                    f"found {list(tensor.shape)}; check that the weights belong to this config.json"
                )
        return self.build(tensors)


def group_order(kv_heads: int, group: int, head_size: int) -> np.ndarray:
    """Rows of a projection fused by KV head ([K, group + 2, D]), in the order all q, all k, all v."""
    rows = np.arange(kv_heads * (group + 2) * head_size).reshape(kv_heads, group + 2, head_size)
    return np.concatenate([rows[:, :group].ravel(), rows[:, group].ravel(), rows[:, group + 1].ravel()])


class RuleList:
    """Collects the rules of one decoder."""

    def __init__(self, config: DecoderConfig) -> None:
        self.config = config
        self.rules: list[TensorRule] = []

    def add(self, path: tuple[str, ...], sources: Sequence[str], shapes: Sequence[Shape], build: Build) -> None:
        """Any rule."""
        self.rules.append(TensorRule(path, tuple(sources), tuple(shapes), build))

    def same(self, path: tuple[str, ...], source: str, shape: Shape) -> None:
        """A weight that is stored as we keep it."""
        self.add(path, [source], [shape], lambda tensors: tensors[0])

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
            order: which stored out lane each of ours is; None: as stored.
        """
        names, widths = zip(*sources, strict=True)

        def kernel(tensors: Sequence[np.ndarray]) -> np.ndarray:
            joined = np.concatenate([t.T if transposed else t for t in tensors], axis=1)
            return joined if order is None else joined[:, order]

        def joined_bias(tensors: Sequence[np.ndarray]) -> np.ndarray:
            joined = np.concatenate(list(tensors))
            return joined if order is None else joined[order]

        shapes = [(width, inner) if transposed else (inner, width) for width in widths]
        self.add((*path, "kernel"), [f"{name}.weight" for name in names], shapes, kernel)
        if bias:
            self.add((*path, "bias"), [f"{name}.bias" for name in names], [(width,) for width in widths], joined_bias)

    def head(self, source: str) -> None:
        """The output head, unless it is the embedding: then a stored one is not ours to read."""
        if not self.config.tied_head:
            size = self.config.embedding_size or self.config.hidden_size
            self.add(("head",), [source], [(self.config.vocab_size, size)], lambda tensors: tensors[0].T)

    def experts(self, path: tuple[str, ...], name: Callable[[int, str], str], gate: str, up: str, down: str) -> None:
        """Routed experts; ``name(expert, part)`` is a tensor's name."""
        config, experts = self.config, self.config.experts
        hidden, width, count = config.hidden_size, experts.ffn_size, experts.count

        def gates(tensors: Sequence[np.ndarray]) -> np.ndarray:
            return np.stack(
                [np.concatenate([tensors[2 * e].T, tensors[2 * e + 1].T], axis=1) for e in range(len(tensors) // 2)]
            )

        sources = [name(e, part) for e in range(count) for part in (gate, up)]
        self.add((*path, "gate_up"), sources, [(width, hidden)] * (2 * count), gates)
        sources = [name(e, down) for e in range(count)]
        self.add((*path, "down"), sources, [(hidden, width)] * count, lambda tensors: np.stack([t.T for t in tensors]))
