"""One simulated run, described by a frozen value, and the pieces it is built from.

A `Setting` says which system serves which workload on which model and device. Everything that decides the result
is in it or in the calibration, so the hash of both names the run directory.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

from experiments.calibration import Calibration
from paxkv import sizing
from paxkv.config import MODELS, CacheConfig, ModelShape, PreemptionMode, SchedulerConfig, StepKind, require
from paxkv.request import Request
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.memory import Memory
from paxkv.sched.reserve import ReservedMemory
from paxkv.sched.static import StaticMemory
from paxkv.sim import hardware
from paxkv.sim.cost_model import CostModel
from paxkv.workload import (
    Workload,
    build_workload,
    chat_workload,
    load_conversations,
    load_lengths,
    translation_workload,
)

System = Literal["paged", "orca_max", "orca_pow2", "orca_oracle", "static"]
Engine = Literal["serving", "bare", "static"]

DEVICES = {
    "opt-13b": ("a100-40gb", 1),
    "opt-66b": ("a100-40gb", 4),
    "opt-175b": ("a100-80gb", 8),
    "llama-13b": ("a100-40gb", 1),
}
"""Device and number of them for each model (paper section 6.1, Table 1)."""

STATIC_ROWS = {
    ("opt-13b", "alpaca"): 14,
    ("opt-13b", "sharegpt"): 5,
    ("opt-66b", "alpaca"): 8,
    ("opt-66b", "sharegpt"): 2,
    ("opt-175b", "alpaca"): 80,
    ("opt-175b", "sharegpt"): 24,
}
"""FasterTransformer's largest batch by model and data set (the authors' artifact)."""

HOST_SWAP_BYTES_PER_DEVICE = 20 * 2**30
"""Host memory for swapped pages per GPU in the paper's experiments (the authors' artifact)."""

UNLIMITED_TOKENS = 1 << 30
"""FasterTransformer has no token budget: a batch is limited by its rows alone."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """A run of the simulator.

    Attributes:
        system: memory manager and admission rule.
        model: a name of `paxkv.config.MODELS`.
        dataset: `sharegpt`, `alpaca`, `wmt16`, or `chat`.
        rate, duration_s: requests per second and length of the trace in seconds.
        engine: whose overheads count: the paper's serving loop, the bare model step, or FasterTransformer.
        num_seqs, beam: sequences per request and whether they are beams.
        page_size: tokens per page.
        preemption: how victims give up their pages.
        step_kind: how prompts and decodes share a step.
        arrivals, burstiness: the arrival process; burstiness is the coefficient of variation of gamma gaps.
        prefix_tokens: shared tokens at the head of every prompt.
        new_probability: chance that an arrival opens a new conversation (chat).
        windows: (start, end) in seconds over which pool shares are averaged.
        utilization: share of device memory the engine may use (None: the artifact's 0.95 formula).
        pool_bytes: size of the KV pool, when given instead of computed.
    """

    system: System
    model: str
    dataset: str
    rate: float
    duration_s: float
    engine: Engine = "serving"
    seed: int = 0
    num_seqs: int = 1
    beam: bool = False
    page_size: int = 16
    preemption: PreemptionMode = "auto"
    step_kind: StepKind = "mixed"
    max_model_len: int = 2048
    arrivals: Literal["slots", "poisson", "gamma"] = "slots"
    burstiness: float = 1.0
    prefix_tokens: int = 0
    new_probability: float | None = None
    windows: tuple[tuple[float, float], ...] = ()
    utilization: float | None = None
    pool_bytes: int | None = None

    def __post_init__(self) -> None:
        require(self.model in MODELS, f"unknown model {self.model!r}; known: {', '.join(MODELS)}")
        require(
            self.dataset in ("sharegpt", "alpaca", "wmt16", "chat"),
            f"dataset must be sharegpt, alpaca, wmt16 or chat, got {self.dataset!r}",
        )
        require(
            (self.dataset == "chat") == (self.new_probability is not None),
            "new_probability goes with the chat data set, and only with it",
        )

    @property
    def name(self) -> str:
        """A readable name for the run directory."""
        parts = [self.system, self.model, self.dataset, f"{self.rate:g}rps"]
        if self.num_seqs > 1:
            parts.append(f"{'beam' if self.beam else 'n'}{self.num_seqs}")
        if self.page_size != 16:
            parts.append(f"page{self.page_size}")
        return "-".join(parts)

    @property
    def shape(self) -> ModelShape:
        """The model's shape."""
        return MODELS[self.model]


def num_pages(setting: Setting) -> int:
    """Pages of the pool, by the sizing formula of the authors' artifact (paper Table 1), never typed in."""
    name, count = DEVICES[setting.model]
    if setting.pool_bytes is not None:
        return int(setting.pool_bytes // (setting.page_size * setting.shape.kv_bytes_per_token))
    plan = sizing.artifact_plan(
        setting.shape,
        hardware.device(name).memory_bytes,
        page_size=setting.page_size,
        tensor_parallel=count,
        **({} if setting.utilization is None else {"utilization": setting.utilization}),
    )
    return plan.require_pages().num_pages


def build_memory(setting: Setting) -> Memory:
    """The memory of the setting's system, with a pool of the computed size."""
    if setting.system == "static":
        return StaticMemory(STATIC_ROWS[setting.model, setting.dataset], setting.max_model_len)
    pages = num_pages(setting)
    if setting.system == "paged":
        _, count = DEVICES[setting.model]
        host = int(HOST_SWAP_BYTES_PER_DEVICE * count // (setting.page_size * setting.shape.kv_bytes_per_token))
        config = CacheConfig(
            pages, page_size=setting.page_size, num_host_pages=host, prefix_caching=setting.prefix_tokens > 0
        )
        return PagedMemory(config)
    estimate = setting.system.removeprefix("orca_")
    return ReservedMemory(pages, setting.page_size, setting.max_model_len, estimate)  # type: ignore[arg-type]


def scheduler_config(setting: Setting) -> SchedulerConfig:
    """The artifact's limits: 2560 tokens a step; 2048 sequences when paged, 256 for the Orcas."""
    return SchedulerConfig(
        max_num_seqs=2048 if setting.system == "paged" else 256,
        max_num_batched_tokens=UNLIMITED_TOKENS if setting.system == "static" else 2560,
        max_model_len=setting.max_model_len,
        step_kind=setting.step_kind,
        preemption=setting.preemption,
    )


def build_cost(setting: Setting, calibration: Calibration) -> CostModel:
    """Seconds of a step's parts: rooflines from the device's public figures, overheads from the calibration."""
    name, count = DEVICES[setting.model]
    device, shape = hardware.device(name), setting.shape
    bandwidth = device.memory_bytes_per_s * count
    page_bytes = setting.page_size * shape.kv_bytes_per_token
    page_copies = 2 * shape.num_layers  # keys and values of each layer move apart
    heads = shape.num_layers * max(1, shape.num_kv_heads // count)  # pages are read head by head on each device
    static = setting.engine == "static"  # another engine, without a Python loop over sequences
    # Two sums over the devices per layer, each sending 2 (n - 1) / n of a token's activations.
    exchanged = 2 * shape.num_layers * 2 * (count - 1) / count * shape.hidden_size * shape.weight_bytes
    return CostModel(
        floor_s=calibration.floor_s(setting.model, static=static),
        weights_s=shape.num_params * shape.weight_bytes / bandwidth,
        token_s=2 * shape.num_params / (calibration.flops_per_s * count),
        exchange_token_s=exchanged / device.interconnect_bytes_per_s if device.interconnect_bytes_per_s else 0.0,
        sequence_s=0.0 if static else calibration.bare_sequence_s,
        group_s=calibration.serving_group_s if setting.engine == "serving" else 0.0,
        kv_token_s=shape.kv_bytes_per_token / bandwidth,
        page_read_s=calibration.page_read_s * heads,
        page_copy_s=2 * page_bytes / bandwidth,
        swap_out_page_s=page_copies * calibration.swap_out_copy_s,
        swap_in_page_s=page_copies * calibration.swap_in_copy_s,
        swap_out_link_s=page_bytes / count / calibration.swap_out_bytes_per_s,
        swap_in_link_s=page_bytes / count / calibration.swap_in_bytes_per_s,
    )


@functools.lru_cache(maxsize=4)
def _lengths(dataset: str, traces: str | None):
    return load_lengths(dataset, traces)


@functools.lru_cache(maxsize=1)
def _conversations(traces: str | None):
    return load_conversations(traces)


def build_workload_of(setting: Setting, traces: str | None) -> Workload:
    """The setting's workload, from real traces in a folder or from the embedded statistics."""
    if setting.dataset == "chat":
        assert setting.new_probability is not None
        return chat_workload(
            _conversations(traces),
            setting.rate,
            setting.duration_s,
            new_probability=setting.new_probability,
            seed=setting.seed,
        )
    lengths = _lengths(setting.dataset, traces)
    if setting.prefix_tokens:
        return translation_workload(
            lengths, setting.rate, setting.duration_s, prefix_tokens=setting.prefix_tokens, seed=setting.seed
        )
    shape = {"burstiness": setting.burstiness} if setting.arrivals == "gamma" else {}
    return build_workload(
        lengths, setting.rate, setting.duration_s, arrivals=setting.arrivals, seed=setting.seed, **shape
    )


def build_requests(setting: Setting, workload: Workload) -> list[Request]:
    """Requests of a workload. With a shared prefix they carry token ids: the prefix's, then ids of their own."""
    prefix = tuple(range(setting.prefix_tokens))
    requests = []
    own = len(prefix)
    columns = (workload.prompt_tokens.tolist(), workload.output_tokens.tolist(), workload.arrival_s.tolist())
    for index, (prompt, output, arrival) in enumerate(zip(*columns, strict=True)):
        ids = None
        if prefix and setting.system == "paged":
            tail = prompt - len(prefix)
            ids = prefix + tuple(range(own, own + tail))
            own += tail
        requests.append(
            Request(index, prompt, output, arrival, num_seqs=setting.num_seqs, beam=setting.beam, prompt_ids=ids)
        )
    return requests
