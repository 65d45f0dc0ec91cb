"""Golden tokens: what two other engines make of the same prompts, greedily and in float32, whatever pages we use.

The trained models lie outside the repository, so their tests skip where the files are not. The same cases run, and
never skip, on a seeded model of stories260K's shape, whose golden tokens come from an independent dense model.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from paxkv.config import SchedulerConfig
from paxkv.engine import Engine, EngineConfig
from paxkv.models import checkpoint, known, tokenizer
from paxkv.models.architecture import DecoderConfig
from paxkv.models.rotary import Rope
from paxkv.models.weights import init_params
from paxkv.sampling import SamplingParams
from paxkv.testing import llama2c
from paxkv.testing.dense import DenseModel
from paxkv.testing.tiny_engine import ForceBy


class Golden(NamedTuple):
    """A model and (prompt ids, output ids) of each prompt."""

    model: DecoderConfig
    params: dict
    lines: Sequence[tuple[list[int], list[int]]]


def read_lines(path: pathlib.Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def stories(shared_data) -> Golden:
    files = known.find("stories260k", shared_data / "models" / "stories260k")
    lines = read_lines(shared_data / "golden" / "stories260k_greedy.jsonl")
    return Golden(*llama2c.read(files.weights), [(line["prompt_ids"], line["output_ids"]) for line in lines])


@pytest.fixture(scope="module")
def seeded() -> Golden:
    """Random weights in stories260K's shape, so that both compile the same steps; lengths around the page sizes.

    The dense model turns lane i with lane i + 4. Ours is given the same heads with those lanes beside each other.
    """
    halves = DecoderConfig(
        name="llama",
        vocab_size=512,
        hidden_size=64,
        num_layers=5,
        num_heads=8,
        num_kv_heads=4,
        head_size=8,
        ffn_size=172,
        max_positions=512,
        rope=Rope(8),
        tied_head=True,
    )
    params, draw = init_params(halves, 1), np.random.default_rng(7)
    # A tied head scores the token that was just read above all others, unless what is left of it is half negated.
    params["final_norm"]["scale"] *= np.resize(np.float32([-1, 1]), halves.hidden_size)
    dense, lines = DenseModel(halves, params), []
    for length, tokens in ((1, 40), (15, 20), (16, 33), (17, 24), (80, 40), (97, 32), (64, 50), (79, 30)):
        ids = draw.integers(0, halves.vocab_size, length).tolist()
        answer = dense.generate(ids, SamplingParams(temperature=0.0, max_tokens=tokens))
        assert len(set(answer.token_ids)) > tokens // 4  # it does not repeat itself
        lines.append((ids, list(answer.token_ids)))
    lanes = np.arange((8 + 4) * 8).reshape(-1, 2, 4).swapaxes(1, 2).ravel()  # of q and k: 0 4 1 5 2 6 3 7, 8 12 ...
    qkv = params["layers"]["attention"]["qkv"]
    qkv["kernel"] = jnp.concatenate([qkv["kernel"][..., lanes], qkv["kernel"][..., len(lanes) :]], axis=-1)
    return Golden(dataclasses.replace(halves, rope=Rope(8, interleaved=True)), params, lines)


CASES = [
    # page size, pages, sequences at once, way
    (16, 100, 4, "together"),
    (16, 100, 4, "one by one"),
    (16, 100, 4, "recompute"),
    (16, 100, 4, "swap"),
    (4, 110, 4, "too small a pool"),
    (64, 60, 12, "cached prefixes"),
]
STORIES = [
    *CASES,
    (16, 200, 12, "together"),
    (16, 200, 12, "one by one"),
    (16, 200, 12, "recompute"),
    (16, 200, 12, "swap"),
    (4, 110, 12, "too small a pool"),
]


def check(golden: Golden, page_size: int, num_pages: int, together: int, way: str) -> None:
    """Serves the prompts that way; the tokens are the golden ones and the way was really taken."""
    limits = SchedulerConfig(
        max_num_seqs=together, max_num_batched_tokens=16, max_model_len=512, step_kind="chunked", max_horizon=8
    )
    config = EngineConfig(
        limits,
        page_size=page_size,
        num_pages=num_pages,
        num_host_pages=num_pages,
        prefix_caching=way == "cached prefixes",
    )
    force = ForceBy() if way in ("recompute", "swap") else None
    engine = Engine(golden.model, golden.params, config, check=True, force=force)
    if force is not None:
        # Requests are put out several times, each at other points: in the prompt, early and late in the output.
        force.choose = lambda step, running: [(group, way) for group in running if (step + 5 * group.order) % 29 == 0]
    prompts = [ids for ids, _ in golden.lines]
    wanted = [SamplingParams(temperature=0.0, max_tokens=len(output)) for _, output in golden.lines]
    if way == "one by one":
        outputs = [engine.generate([ids], [choice])[0] for ids, choice in zip(prompts, wanted, strict=True)]
    else:
        outputs = engine.generate(prompts, wanted)
    assert [list(output.token_ids) for output in outputs] == [output for _, output in golden.lines]
    if way == "cached prefixes":
        again = engine.generate(prompts, wanted)
        assert [output.token_ids for output in again] == [output.token_ids for output in outputs]
        assert sum(output.cached_tokens for output in again) >= page_size
    counters = engine.counters
    assert (counters.preemptions > 0) == (way in ("recompute", "swap", "too small a pool"))
    assert (counters.swapped_in_pages > 0) == (way == "swap")
    assert engine.memory.num_free_pages == num_pages


@pytest.mark.parametrize(("page_size", "num_pages", "together", "way"), STORIES)
def test_stories260k(stories, page_size, num_pages, together, way):
    check(stories, page_size, num_pages, together, way)


@pytest.mark.parametrize(("page_size", "num_pages", "together", "way"), CASES)
def test_seeded(seeded, page_size, num_pages, together, way):
    """The twin that never skips."""
    check(seeded, page_size, num_pages, together, way)


def test_smollm2(request, shared_data):
    """Weights, tokenizer and chat of a model that people use: ``pytest tests/test_golden.py --real-model``."""
    if not request.config.getoption("real_model"):
        pytest.skip("takes half a minute and 1.5 GB: --real-model runs it")
    files = known.find("smollm2-135m")
    model, params = checkpoint.load(files.weights, scan_layers=True)  # compiles seven times as fast
    words = tokenizer.load(files.tokenizer)
    limits = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=128)
    engine = Engine(model, params, EngineConfig(limits, num_pages=64), tokenizer=words)
    lines = read_lines(shared_data / "golden" / "smollm2_135m_greedy.jsonl")
    choices = [SamplingParams(temperature=0.0, max_tokens=len(line["output_ids"]), ignore_eos=True) for line in lines]
    outputs = engine.generate([line["prompt"] for line in lines], choices)
    assert [list(output.prompt_ids) for output in outputs] == [line["prompt_ids"] for line in lines]
    assert [list(output.token_ids) for output in outputs] == [line["output_ids"] for line in lines]
    plain = [
        (output.text, line["text"]) for output, line in zip(outputs, lines, strict=True) if "<|" not in line["text"]
    ]
    assert len(plain) >= 4 and all(ours == theirs for ours, theirs in plain)
