"""Which limit a step meets first on a device, arithmetic or memory bandwidth: the roofline of the cost model."""

from __future__ import annotations

import dataclasses

from paxkv.config import ModelShape
from paxkv.sim.cost_model import CostModel
from paxkv.sim.hardware import Device


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step holds: prompt tokens, and decoding sequences with their mean context in tokens."""

    prompt_tokens: int = 0
    sequences: int = 0
    context_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Seconds that the device's limits alone give; overheads are left out.

    Attributes:
        weights_s: reading all weights once.
        token_s: computing one token.
        kv_token_s: reading one token's keys and values.
    """

    weights_s: float
    token_s: float
    kv_token_s: float

    @classmethod
    def of(cls, shape: ModelShape, device: Device) -> Roofline:
        """From the device's public peaks. Spreading a model over devices changes all three alike."""
        return cls(
            shape.num_params * shape.weight_bytes / device.memory_bytes_per_s,
            2 * shape.num_params / device.flops_per_s,
            shape.kv_bytes_per_token / device.memory_bytes_per_s,
        )

    @classmethod
    def of_cost(cls, cost: CostModel) -> Roofline:
        """From a calibrated cost model."""
        return cls(cost.weights_s, cost.token_s, cost.kv_token_s)

    @property
    def ridge_tokens(self) -> float:
        """Tokens of a step from which computing them takes longer than reading the weights."""
        return self.weights_s / self.token_s

    def compute_over_memory(self, step: Step) -> float:
        """Time to compute over time to read; above 1 the step is bound by arithmetic."""
        compute = self.token_s * (step.prompt_tokens + step.sequences)
        return compute / (self.weights_s + self.kv_token_s * step.sequences * step.context_tokens)

    def largest_ratio(self, context_tokens: int) -> float:
        """What the ratio of decode steps approaches as the batch grows without end."""
        return self.token_s / (self.kv_token_s * context_tokens)
