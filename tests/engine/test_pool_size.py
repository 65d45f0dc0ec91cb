"""How large the engine makes its pool: a share of the device's total memory, and never what others hold (B23)."""

from __future__ import annotations

import types

import jax
import pytest

from pallas_kernels.pages import PageFormat
from paxkv import engine_config
from paxkv.config import SchedulerConfig
from paxkv.engine import Engine
from paxkv.engine_config import EngineConfig, device_memory, pool_pages
from paxkv.models.architecture import DecoderConfig
from paxkv.models.rotary import Rope
from paxkv.sampling import SamplingParams
from paxkv.testing.tiny_model import tiny_config, tiny_params

GIB = 1 << 30
WEIGHTS = [types.SimpleNamespace(nbytes=16 * GIB)]
MODEL = DecoderConfig("llama", 131_072, 4096, 32, 32, 8, 128, 8192, 8192, dtype="bfloat16", rope=Rope(128))
"""131,072 bytes a token; 8192 tokens in a step make logits of 4 GiB."""


def config(**changes) -> EngineConfig:
    limits = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=8192)
    return EngineConfig(limits, **changes)


@pytest.mark.parametrize(
    ("free_gib", "pool_gib"),
    [
        (64, 52),  # 0.9 of 80 GiB, less 16 of weights and 4 of activations
        (56, 52),  # others hold 8: they fit in the 10% that is not ours
        (44, 40),  # others hold 20: 12 GiB of our share are not there
        (5, 1),
    ],
)
@pytest.mark.parametrize("fmt", [None, PageFormat("int8", "head")], ids=["bfloat16", "int8"])
def test_pages_of_a_device(monkeypatch, free_gib, pool_gib, fmt):
    monkeypatch.setattr(engine_config, "device_memory", lambda: (80 * GIB, free_gib * GIB))
    pages = pool_pages(MODEL, WEIGHTS, config(k_format=fmt))
    two_bytes = {52: 26_624, 40: 20_480, 1: 512}[pool_gib]
    # A scale per head, once for all pages, takes a page's place.
    assert pages == (two_bytes if fmt is None else 2 * two_bytes - 1)
    assert MODEL.cache_layout(pages, 16, fmt).bytes <= pool_gib * GIB < MODEL.cache_layout(pages + 1, 16, fmt).bytes


def test_an_explicit_count_wins(monkeypatch):
    monkeypatch.setattr(engine_config, "device_memory", lambda: (80 * GIB, 0))
    assert pool_pages(MODEL, WEIGHTS, config(num_pages=30_000)) == 30_000


def test_no_more_than_the_limits_can_fill(monkeypatch):
    monkeypatch.setattr(engine_config, "device_memory", lambda: (8000 * GIB, 8000 * GIB))
    assert pool_pages(MODEL, WEIGHTS, config()) == 256 * 8192 // 16


@pytest.mark.parametrize("memory", [(80 * GIB, 4 * GIB), (20 * GIB, 20 * GIB), (80 * GIB, 0)], ids=str)
def test_no_room_is_an_error_with_the_numbers(monkeypatch, memory):
    monkeypatch.setattr(engine_config, "device_memory", lambda: memory)
    with pytest.raises(ValueError, match=rf"90% of the device's {memory[0]} bytes, of which {memory[1]} are free"):
        pool_pages(MODEL, WEIGHTS, config())


def test_this_device():
    total, free = device_memory()
    assert 0 < free <= total
    assert total > GIB


def test_a_pool_sized_from_memory_serves(dense, prompt):
    """And its longest request is really served."""
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, max_horizon=4)
    with Engine(tiny_config(), tiny_params(), EngineConfig(limits, page_size=4, memory_utilization=0.5)) as engine:
        assert engine.memory.num_pages == 4 * 64 // 4  # all that the limits can fill
        layout = engine.executor.layout
        assert sum(leaf.nbytes for leaf in jax.tree.leaves(engine.executor.pages)) == layout.bytes
        params = SamplingParams(temperature=0.0, max_tokens=24)
        (output,) = engine.generate([prompt(40)], params)
        assert output.token_ids == dense(prompt(40), params)
