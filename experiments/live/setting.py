"""One run of the real engine, described by a frozen value, and the pieces it is built from.

Every system gets the same pool: room for exactly seven sequences of the model's longest length, which is what Orca
(Max) has for OPT-13B in the paper. Lengths are the traces', times a factor that makes them fit the model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from experiments.setting import System
from paxkv.config import CacheConfig, ModelShape, PreemptionMode, SchedulerConfig, require
from paxkv.request import Request
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.memory import Memory
from paxkv.sched.reserve import ReservedMemory
from paxkv.sched.static import StaticMemory
from paxkv.workload import Lengths, Workload, build_workload, load_lengths, translation_workload

SYSTEMS: tuple[System, ...] = ("static", "orca_max", "orca_pow2", "orca_oracle", "paged")
LONGEST_SEQUENCES = 7
"""Sequences of the longest length that the pool holds (paper figure 13: Orca (Max) batches 7.00)."""
PAPER_LENGTH = 2048
"""Longest sequence of the paper's runs: the unit of the scaled lengths."""
PAGE_SIZE = 16
SPECIAL_IDS = 3
"""Ids that prompts leave out: unknown, begin, end."""


@dataclasses.dataclass(frozen=True)
class LiveSize:
    """A model, and the share of the traces' lengths that fits it.

    Attributes:
        name: goes into the names of run directories.
        shape: of the model.
        max_model_len: longest sequence.
        scales: data set and what its lengths are multiplied by.
        max_num_seqs: most sequences of a step, whatever the memory would allow.
        max_num_batched_tokens: tokens of a step; the paper's 2560 belong to sequences of 2048.
        requests: of the runs in which all requests are there from the start.
        batches: at which steps are timed for the simulator; none: they are not.
        max_horizon: most decode steps of one dispatch.
        preemption: how victims give up their pages: ``swap`` where copying a page is cheaper than computing it again.
        weights: ``seeded`` for random weights made at run time, else the digest of a checkpoint.
    """

    name: str
    shape: ModelShape
    max_model_len: int
    scales: tuple[tuple[str, float], ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    requests: int
    batches: tuple[int, ...]
    max_horizon: int = 8
    preemption: PreemptionMode = "swap"
    weights: str = "seeded"

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the same for every system."""
        return LONGEST_SEQUENCES * self.max_model_len // PAGE_SIZE

    def scale(self, dataset: str) -> float:
        """What the lengths of a data set are multiplied by."""
        scales = dict(self.scales)
        require(
            dataset in scales,
            f"size {self.name!r} has no scale for the data set {dataset!r}, it has {', '.join(scales)}; "
            "take a larger model",
        )
        return scales[dataset]


def _llama(name: str, layers: int, heads: int, kv_heads: int, hidden: int, ffn: int, vocab: int, longest: int):
    return ModelShape(
        name, layers, heads, kv_heads, hidden // heads, hidden, ffn, vocab,
        max_positions=longest, gated_ffn=True, biases=False, weight_bytes=4.0, kv_bytes=4.0,
    )  # fmt: skip


SIZES: Mapping[str, LiveSize] = {
    # Few shapes, so that it compiles in seconds on any machine.
    "tiny": LiveSize(
        "tiny", _llama("random-0.1m", 2, 4, 2, 64, 160, 256, 32), 32,
        (("sharegpt", 1 / 48), ("alpaca", 1 / 8)), 8, 32, 12, (),
    ),
    # Wide and flat, so that a step of few rows is bound by reading the weights (105 MB, more than a last-level cache
    # holds) and neither by attention nor by launching operations.
    "desktop": LiveSize(
        "desktop", _llama("random-26m", 2, 8, 1, 1024, 2816, 4096, 512), 512,
        (("sharegpt", 1 / 4), ("alpaca", 1.0), ("wmt16", 1.0)), 64, 512, 160, (2, 7, 16, 32, 48),
    ),
    # The lengths as they are.
    "accelerator": LiveSize(
        "accelerator", _llama("random-1.1b", 22, 32, 4, 2048, 5632, 32000, 2048), PAPER_LENGTH,
        (("sharegpt", 1.0), ("alpaca", 1.0), ("wmt16", 1.0)), 256, 2560, 256, (2, 4, 7, 16, 32, 64, 128, 256),
        preemption="recompute",
    ),
}  # fmt: skip
"""Sizes of the embedded models by name: `tiny` for the smoke preset, `desktop` for a CPU, else `accelerator`."""


def checkpoint_size(name: str, shape: ModelShape, max_length: int, weights: str, *, on_cpu: bool) -> LiveSize:
    """The size for a checkpoint: its own lengths up to those of the embedded model for the device.

    Args:
        name: of the checkpoint.
        max_length: longest sequence that its positions allow.
        weights: digest of its files.

    Raises:
        ValueError: the model is too short for the translation prompts of figure 16.
    """
    like = SIZES["desktop" if on_cpu else "accelerator"]
    longest = min(max_length, like.max_model_len) // PAGE_SIZE * PAGE_SIZE
    require(longest >= 512, f"a live run needs sequences of 512 tokens, {name} ends at {max_length}; take a longer one")
    scales = (("sharegpt", longest / PAPER_LENGTH), ("alpaca", 1.0), ("wmt16", 1.0))
    return dataclasses.replace(
        like, name=name, shape=shape, max_model_len=longest, scales=scales, requests=like.requests // 2, weights=weights
    )


@dataclasses.dataclass(frozen=True)
class LiveSetting:
    """A run of the real engine.

    Attributes:
        system: memory manager and admission rule.
        size: model and limits.
        dataset: `sharegpt`, `alpaca` or `wmt16`, scaled by the size.
        requests: how many arrive; the expected number where they arrive over time.
        rate: requests per second (Poisson), or None: all are there from the start.
        num_seqs, beam: sequences per request and whether they are beams.
        prefix_tokens: shared tokens at the head of every prompt.
        prefix_caching: whether pages are found by content (paged only).
    """

    system: System
    size: LiveSize
    dataset: str
    requests: int
    rate: float | None = None
    num_seqs: int = 1
    beam: bool = False
    prefix_tokens: int = 0
    prefix_caching: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        self.size.scale(self.dataset)
        require(self.requests > 0, f"a run needs at least one request, got {self.requests}")
        require(self.rate is None or self.rate > 0, f"rate must be positive, or None for all at once, got {self.rate}")
        require(
            not self.prefix_caching or self.system == "paged",
            f"only paged memory finds pages by content, got prefix_caching with {self.system!r}",
        )

    @property
    def name(self) -> str:
        """A readable name for the run directory."""
        parts = [self.system, self.size.name, self.dataset, str(self.requests)]
        parts += [f"{self.rate:g}rps"] if self.rate else []
        parts += [f"{'beam' if self.beam else 'n'}{self.num_seqs}"] if self.num_seqs > 1 else []
        parts += [f"prefix{self.prefix_tokens}"] if self.prefix_tokens else []
        parts += ["cached"] if self.prefix_caching else []
        return "-".join(parts)

    @property
    def foreseen(self) -> bool:
        """Whether the run's decisions depend neither on the clock nor on the model's scores."""
        return self.rate is None and not self.beam


def saturated(size: LiveSize) -> list[LiveSetting]:
    """ShareGPT on every system. All requests are there from the start, so memory limits the batch while any waits."""
    return [LiveSetting(system, size, "sharegpt", size.requests) for system in SYSTEMS]


def num_host_pages(setting: LiveSetting) -> int:
    """Pages of the host pool: as many as the device has, where victims of a paged system are swapped."""
    return setting.size.num_pages if setting.system == "paged" and setting.size.preemption == "swap" else 0


def build_live_memory(setting: LiveSetting) -> Memory:
    """The memory of the setting's system; all have the same bytes."""
    size = setting.size
    if setting.system == "static":
        return StaticMemory(LONGEST_SEQUENCES, size.max_model_len, size.max_model_len)
    if setting.system == "paged":
        return PagedMemory(
            CacheConfig(size.num_pages, PAGE_SIZE, num_host_pages(setting), prefix_caching=setting.prefix_caching)
        )
    estimate = setting.system.removeprefix("orca_")
    return ReservedMemory(size.num_pages, PAGE_SIZE, size.max_model_len, estimate)  # type: ignore[arg-type]


def live_scheduler_config(setting: LiveSetting) -> SchedulerConfig:
    """The same limits for every system."""
    size = setting.size
    return SchedulerConfig(
        max_num_seqs=size.max_num_seqs,
        max_num_batched_tokens=size.max_num_batched_tokens,
        max_model_len=size.max_model_len,
        preemption=size.preemption,
        max_horizon=size.max_horizon,
    )


@functools.lru_cache(maxsize=4)
def scaled_lengths(dataset: str, scale: float, longest: int, traces: str | None) -> Lengths:
    """A data set with its lengths multiplied and rounded, without the pairs that are longer than the model's longest.

    Args:
        traces: folder of the real traces, or None for the embedded statistics.
    """
    lengths = load_lengths(dataset, traces)
    if scale != 1:
        prompt, output = (
            np.maximum(1, np.rint(column * scale)).astype(np.int64) for column in (lengths.prompt, lengths.output)
        )
        lengths = dataclasses.replace(
            lengths, name=f"{lengths.name}*{scale:g}", prompt=prompt, output=output,
            source=f"{lengths.source}; lengths times {scale:g}",
        )  # fmt: skip
    return lengths.with_total_at_most(longest)


def build_live_workload(setting: LiveSetting, traces: str | None) -> Workload:
    """The setting's requests, from real traces in a folder or from the embedded statistics."""
    longest = setting.size.max_model_len
    lengths = scaled_lengths(setting.dataset, setting.size.scale(setting.dataset), longest, traces)
    rate, seconds = (setting.rate, setting.requests / setting.rate) if setting.rate else (setting.requests, 1.0)
    arrivals = "poisson" if setting.rate else "all_at_once"
    if setting.prefix_tokens:
        return translation_workload(
            lengths, rate, seconds, prefix_tokens=setting.prefix_tokens, seed=setting.seed, arrivals=arrivals,
            max_total_tokens=longest,
        )  # fmt: skip
    return build_workload(lengths, rate, seconds, arrivals=arrivals, seed=setting.seed)


def prompt_ids(setting: LiveSetting, workload: Workload) -> list[tuple[int, ...]]:
    """Token ids of every prompt: the same for all systems, the shared prefix first."""
    vocab = setting.size.shape.vocab_size
    prefix = tuple(np.random.RandomState(setting.seed + 1).randint(SPECIAL_IDS, vocab, workload.prefix_tokens).tolist())
    draw = np.random.RandomState(setting.seed)
    return [
        prefix + tuple(draw.randint(SPECIAL_IDS, vocab, int(tokens) - len(prefix)).tolist())
        for tokens in workload.prompt_tokens
    ]


def build_live_requests(setting: LiveSetting, workload: Workload) -> list[Request]:
    """The requests as the scheduler sees them, for the simulator."""
    ids = prompt_ids(setting, workload)
    columns = zip(ids, workload.output_tokens.tolist(), workload.arrival_s.tolist(), strict=True)
    return [
        Request(index, len(prompt), output, arrival, setting.num_seqs, setting.beam, prompt_ids=prompt)
        for index, (prompt, output, arrival) in enumerate(columns)
    ]
