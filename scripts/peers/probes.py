"""The engine measured by itself: the host's share, what a step consists of, pages against a contiguous cache, decoding
against context."""

from __future__ import annotations

import dataclasses
import itertools
import pathlib
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import bench
from pallas_kernels.paged_attention.arg_specs import ArgSpec
from pallas_kernels.pages import PageFormat
from paxkv.compat import step_compiler_options
from paxkv.config import SchedulerConfig
from paxkv.engine import Engine, EngineConfig
from paxkv.models import checkpoint
from paxkv.models.decoder import DecoderConfig
from paxkv.output import RequestOutput
from paxkv.sampling import SamplingParams
from scripts.peers.contiguous import STEPS, ContiguousDecoder

HOST_SEQS = 128
HOST_PROMPT, HOST_OUTPUT = 32, 96
CONTEXTS = (512, 1024, 2048, 4096, 8192)
BATCHES = (1, 8)
DECODED = 1 + 12 * STEPS
"""Output tokens of a sequence where decoding is timed: the prompt gives the first."""
PROMPT_STEPS = 16  # at most, for the prompts of all sequences

Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Probe:
    """A model, and how often to measure.

    Attributes:
        config, params: the model.
        seed: of the prompts.
        repeats: timed runs; figures are their medians.
    """

    config: DecoderConfig
    params: Any
    seed: int
    repeats: int

    @classmethod
    def load(cls, folder: pathlib.Path, *, seed: int, repeats: int) -> Probe:
        """A probe of the model in a folder."""
        config, params = checkpoint.load(folder)
        return cls(config, params, seed, repeats)

    def engine(self, rows: int, length: int, *, overlap: bool = True, horizon: int = STEPS) -> Engine:
        """An engine for ``rows`` sequences of ``length`` positions.

        Prompts take few steps, since the first sequences decode meanwhile: most decode steps have all rows.
        """
        limits = SchedulerConfig(
            max_num_seqs=rows,
            max_num_batched_tokens=max(512, rows, rows * length // PROMPT_STEPS),
            max_model_len=length,
            step_kind="chunked",
            max_horizon=horizon,
        )
        return Engine(self.config, self.params, EngineConfig(scheduler=limits, overlap=overlap))

    def prompts(self, rows: int, length: int) -> list[list[int]]:
        """Random prompts."""
        rng = random.Random(self.seed)
        return [[rng.randrange(3, self.config.vocab_size) for _ in range(length)] for _ in range(rows)]

    def host(self) -> list[Row]:
        """The host's own work as a share of a step, with and without overlap, by decode steps of a dispatch.

        It is counted as processor time of the thread that calls the engine: planning, building inputs, dispatching
        and reading, but not waiting.
        """
        prompts = self.prompts(HOST_SEQS, HOST_PROMPT)
        rows = []
        for overlap, horizon in itertools.product((True, False), (1, STEPS)):
            runs = []
            with self.engine(HOST_SEQS, HOST_PROMPT + HOST_OUTPUT, overlap=overlap, horizon=horizon) as engine:
                engine.generate(prompts, greedy(HOST_OUTPUT))
                for _ in range(self.repeats):
                    steps, begin, mine = engine.stats.steps, time.perf_counter(), time.thread_time()
                    engine.generate(prompts, greedy(HOST_OUTPUT))
                    mine, wall = time.thread_time() - mine, time.perf_counter() - begin
                    steps = engine.stats.steps - steps
                    runs.append((wall / steps, mine / steps, mine / wall))
            step_s, host_s, share = (statistics.median(values) for values in zip(*runs, strict=True))
            rows.append(
                {
                    "sequences": HOST_SEQS,
                    "overlap": str(overlap).lower(),
                    "steps_per_dispatch": horizon,
                    "step_ms": 1e3 * step_s,
                    "host_us_per_step": 1e6 * host_s,
                    "host_share_percent": 100 * share,
                }
            )
        return rows

    def profile(self) -> list[Row]:
        """Where a decode step of many sequences goes: its parts timed alone, on the same shapes, in turns with it.

        Products: activations of all rows times every weight matrix, and the products' own rate. Attention: of all
        layers over pages of 16, at the mean context of the run. The rest is what the step takes beside them: norms,
        rotations, writes, sampling, and whatever the parts take longer together than alone.
        """
        length = HOST_PROMPT + HOST_OUTPUT
        products, flops = self.products(HOST_SEQS)
        attention = self.attention(HOST_SEQS, HOST_PROMPT + HOST_OUTPUT // 2)
        prompts = self.prompts(HOST_SEQS, HOST_PROMPT)
        turns = []
        with self.engine(HOST_SEQS, length) as engine:
            engine.generate(prompts, greedy(HOST_OUTPUT))
            for _ in range(self.repeats):
                step = step_seconds(engine.generate(prompts, greedy(HOST_OUTPUT)))
                turns.append((step, products(20) / 20, attention(20) / 20))
        step, multiplied, attended = (statistics.median(values) for values in zip(*turns, strict=True))
        parts = {"all": step, "products with weights": multiplied, "attention over pages": attended}
        parts["the rest"] = step - multiplied - attended
        return [
            {
                "part of a step": name,
                "ms": 1e3 * seconds,
                "percent": 100 * seconds / step,
                "gflop_per_s": flops / seconds / 1e9 if name == "products with weights" else "",
            }
            for name, seconds in parts.items()
        ]

    def products(self, rows: int) -> tuple[bench.Timed, float]:
        """Times activations times every weight matrix but the embedding, and the floating-point operations of that."""
        leaves = jax.tree_util.tree_leaves_with_path(self.params)
        weights = [x for path, x in leaves if x.ndim == 2 and "embedding" not in jax.tree_util.keystr(path)]
        inputs = {n: jnp.ones((rows, n), weights[0].dtype) for n in {x.shape[0] for x in weights}}
        options = step_compiler_options(self.config.dtype)

        def multiply(inputs, weights):
            return [inputs[x.shape[0]] @ x for x in weights]

        run = jax.jit(multiply, compiler_options=options)
        return repeated(lambda: run(inputs, weights)), 2.0 * rows * sum(x.size for x in weights)

    def attention(self, rows: int, length: int) -> bench.Timed:
        """Times attention of all layers, for rows of one query and ``length`` tokens in pages in random order."""
        fmt, config = PageFormat(self.config.dtype), self.config
        spec = ArgSpec(
            "decode", ((1, length),) * rows, config.num_heads, config.num_kv_heads, config.head_size, 16,
            query=self.config.dtype, k=fmt, v=fmt,
        )  # fmt: skip
        arrays, step = bench.make_arrays(spec, self.seed), bench.ours(spec, "xla")

        def layers(arrays):
            return jax.lax.fori_loop(0, config.num_layers, lambda _, q: step(q, arrays), arrays["q"])

        run = jax.jit(layers, compiler_options=step_compiler_options(self.config.dtype))
        return repeated(lambda: run(arrays))

    def contiguous(self) -> list[Row]:
        """Decode steps of the engine against those of the same model over a contiguous cache; outputs must be equal.

        The two take turns, and the ratio compares runs of one turn.
        """
        rows = []
        for batch, length in itertools.product(BATCHES, CONTEXTS[:3]):
            decoder = ContiguousDecoder(self.config, self.params, batch, length + DECODED)
            prompts = self.prompts(batch, length)
            turns = []
            with self.engine(batch, length + DECODED) as engine:
                for _ in range(self.repeats):
                    paged, outputs = _paged_step_s(engine, prompts)
                    plain, expected = _contiguous_step_s(decoder, prompts)
                    turns.append((paged, plain, paged / plain))
            paged, plain, ratio = (statistics.median(values) for values in zip(*turns, strict=True))
            same = sum(a == b for a, b in zip(outputs, expected, strict=True))
            rows.append(
                {
                    "sequences": batch,
                    "context": length,
                    "paged_ms_per_step": 1e3 * paged,
                    "contiguous_ms_per_step": 1e3 * plain,
                    "paged / contiguous": ratio,
                    "equal_outputs": f"{same} of {batch}",
                }
            )
        return rows

    def context(self) -> list[Row]:
        """Decode rates by the length of the context."""
        rows = []
        for batch, length in itertools.product(BATCHES, CONTEXTS):
            with self.engine(batch, length + DECODED) as engine:
                step_s, _ = _paged_step_s(engine, self.prompts(batch, length))
            kv_bytes = self.config.cache_layout(1, 1).bytes * length * batch
            rows.append(
                {
                    "sequences": batch,
                    "context": length,
                    "tokens_per_s": batch / step_s,
                    "ms_per_step": 1e3 * step_s,
                    "kv_mb_read_per_step": kv_bytes / 1e6,
                }
            )
        return rows


def repeated(call: Callable[[], Any]) -> bench.Timed:
    """Times calls; warm when this returns."""

    def timed(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            jax.block_until_ready(call())
        return time.perf_counter() - begin

    timed(1)
    return timed


def greedy(tokens: int) -> SamplingParams:
    """Greedy choices, ``tokens`` of them."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def _paged_step_s(engine: Engine, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """Seconds of a decode step, and the outputs."""
    done = engine.generate(prompts, greedy(DECODED))
    return step_seconds(done), [list(one.token_ids) for one in done]


def step_seconds(outputs: list[RequestOutput]) -> float:
    """The median over dispatches of the seconds that a step took, while every sequence decoded."""
    begin = max(one.times.first_token_s for one in outputs)
    end = min(one.times.finish_s for one in outputs)
    arrivals = [at for at in outputs[0].times.token_s if begin <= at <= end]
    # Tokens of one dispatch arrive together: as many as it ran steps.
    at = [(when, len(list(tokens))) for when, tokens in itertools.groupby(arrivals)]
    return statistics.median((now - before) / steps for (before, _), (now, steps) in itertools.pairwise(at))


def _contiguous_step_s(decoder: ContiguousDecoder, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
    """The same of the contiguous decoder."""
    newest = jax.block_until_ready(decoder.prefill(jnp.asarray(prompts, jnp.int32)))
    parts, seconds = [np.asarray(newest)[None]], []
    for done in range(0, DECODED - 1, STEPS):
        begin = time.perf_counter()
        newest, several = decoder.decode(newest, len(prompts[0]) + done)
        parts.append(np.asarray(several))
        seconds.append((time.perf_counter() - begin) / STEPS)
    return statistics.median(seconds), np.concatenate(parts).T.tolist()
