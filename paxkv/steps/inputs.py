"""The arrays of one step, and how a plan becomes them: pad to a bucket, look every page up.

Everything here is numpy: block tables and lengths live on the host and are rebuilt for each step. They travel as one
array (:func:`pack`), since each array that is sent costs the host as much as filling it. Rows are the decodes first,
then the prompt chunks, each in the plan's order. A row that only pads has no keys, writes no slot and samples into no
place.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from jaxtyping import Array, Int32

from paxkv.cache.rows import Rows
from paxkv.sampling import VARIANTS
from paxkv.sched.plan import StepPlan
from paxkv.steps.buckets import Buckets
from paxkv.steps.lane import Lane
from paxkv.steps.sample import SampleInputs

NOWHERE = np.iinfo(np.int32).max
"""A slot or place that no array has: what is written there is dropped."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepInputs:
    """What one dispatch is told besides weights and pages.

    Attributes:
        tokens: [T] ids; -1 where the id lies on the device, in ``places``.
        places: [T] place of each such token among the sampled tokens that stay on the device.
        positions: [T] position of each token in its sequence.
        rows: the pages that each row reads and writes.
        sample_rows: [R] index of the token whose logits are sampled from.
        sample_places: [R] where the sampled token is kept; out of range is dropped.
        sampling: per-row parameters [R].
        num_steps: [] decode steps to run.
    """

    tokens: Int32[Array, " T"]
    places: Int32[Array, " T"]
    positions: Int32[Array, " T"]
    rows: Rows
    sample_rows: Int32[Array, " R"]
    sample_places: Int32[Array, " R"]
    sampling: SampleInputs
    num_steps: Int32[Array, ""]


@dataclasses.dataclass(frozen=True)
class StepKey:
    """Everything static of a step: one key, one compilation.

    Attributes:
        kind: ``decode`` (one token per row, several steps in a dispatch) or ``mixed``.
        tokens: T.
        samples: R.
        variant: ``greedy``, ``sample`` or ``full`` (penalties, biases, banned tokens).
        top: likeliest tokens reported per row, 0 for none.
    """

    kind: str
    tokens: int
    samples: int
    variant: str
    top: int = 0

    def __str__(self) -> str:
        size = f"{self.tokens}" if self.kind == "decode" else f"{self.tokens} tokens, {self.samples} samples"
        return f"{self.kind}[{size}] {self.variant}" + (f" top {self.top}" if self.top else "")


@dataclasses.dataclass(frozen=True)
class StepWork:
    """A plan made ready for the device.

    Attributes:
        key: the compilation it needs.
        inputs: numpy arrays, padded.
        sampled: the lane of each row of samples, in order.
    """

    key: StepKey
    inputs: StepInputs
    sampled: tuple[Lane, ...]


class InputBuilder:
    """Builds the inputs of steps.

    Args:
        buckets: the shapes.
        page_size, num_pages: of the pool.
        max_pages: P, the width of a block table.
        max_history: tokens that a penalty can look back on: the longest sequence.
        top: likeliest tokens reported where any are wanted.
    """

    def __init__(
        self, buckets: Buckets, *, page_size: int, num_pages: int, max_pages: int, max_history: int, top: int
    ) -> None:
        self.buckets = buckets
        self.page_size = page_size
        self.num_pages = num_pages
        self.max_pages = max_pages
        self.max_history = max_history
        self.top = top

    def build(
        self,
        plan: StepPlan,
        lanes: Mapping[int, Lane],
        num_steps: int,
        siblings: Callable[[int], Sequence[Lane]],
        tops: bool,
    ) -> StepWork | None:
        """The work of a plan; None if it computes nothing (it only preempts).

        Args:
            plan: whose block tables cover ``num_steps`` steps.
            lanes: by sequence id.
            siblings: sequence id of a chunk that ends its prompt -> the lanes that sample from its last token.
            tops: whether any of the plan's requests wants the likeliest tokens.

        Raises:
            ValueError: a block table does not cover its row, or names a page that the pool does not have.
        """
        rows = [lanes[seq_id] for seq_id in plan.decodes]
        tokens = [lane.ids[-1] if lane.fetched else -1 for lane in rows]
        places = [lane.slot for lane in rows]
        lengths = [lane.known for lane in rows]
        positions = [length - 1 for length in lengths]
        counts = [1] * len(rows)
        sampled = list(rows)
        sample_rows = list(range(len(rows)))
        dead = 0
        for chunk in plan.prefills:
            lane = lanes[chunk.seq_id]
            # A static batch pads prompts on the left: its padding costs a token's arithmetic and stores nothing.
            start = max(0, chunk.start - lane.padding)
            stop = chunk.start + chunk.count - lane.padding
            count = max(0, stop - start)
            dead += chunk.count - count
            if not count:
                continue
            rows.append(lane)
            tokens += lane.ids[start:stop]
            places += [0] * count
            positions += range(start, stop)
            lengths.append(stop)
            counts.append(count)
            if chunk.last:
                chosen = siblings(chunk.seq_id)
                sampled += chosen
                sample_rows += [len(tokens) - 1] * len(chosen)
        if not rows:
            return None
        decode = not plan.prefills
        total = len(tokens) + dead
        if decode:
            T = R = S = self.buckets.decode(len(rows))
        else:
            T, R = self.buckets.mixed(max(total, len(sampled)), len(sampled))  # a short prompt may fork widely
            S = min(T, self.buckets.max_num_seqs)
        tables, table_lens = self._tables(rows, S)
        kv_lens = np.zeros(S, np.int32)
        kv_lens[: len(rows)] = lengths
        last = kv_lens + (num_steps - 1) * (kv_lens > 0)
        short = np.flatnonzero(table_lens * self.page_size < last)
        if short.size:
            row = short[0]
            raise ValueError(
                f"a block table must cover its row: {table_lens[row]} pages of {self.page_size} slots for {last[row]} "
                f"tokens of sequence {rows[row].sequence.seq_id}"
            )
        positions_ = _padded(positions, T, 0)
        if decode:
            slots = np.full(T, -1, np.int32)  # the step looks each slot up itself, since it runs several
            starts = np.arange(S + 1, dtype=np.int32)
        else:
            row_of = np.repeat(np.arange(len(rows)), counts)
            position = positions_[: len(tokens)]
            slots = np.full(T, -1, np.int32)
            page = tables[row_of, position // self.page_size]
            slots[: len(tokens)] = page * self.page_size + position % self.page_size
            starts = np.full(S + 1, len(tokens), np.int32)
            starts[: len(rows) + 1] = np.cumsum([0, *counts])
        variant = max({lane.variant for lane in sampled}, key=VARIANTS.index, default="greedy")
        inputs = StepInputs(
            tokens=_padded(tokens, T, 0),
            places=_padded(places, T, 0),
            positions=positions_,
            rows=Rows(
                block_tables=tables,
                kv_lens=kv_lens,
                query_starts=starts,
                slots=slots,
                max_query_len=1 if decode else None,
            ),
            sample_rows=_padded(sample_rows, R, 0),
            sample_places=_padded([lane.slot if lane.slot >= 0 else NOWHERE for lane in sampled], R, NOWHERE),
            sampling=self._sampling(sampled, R, variant),
            num_steps=np.asarray(num_steps, np.int32),
        )
        key = StepKey("decode" if decode else "mixed", T, R, variant, self.top if tops else 0)
        return StepWork(key, inputs, tuple(sampled))

    def empty(self, key: StepKey) -> StepInputs:
        """Inputs of the shapes of ``key`` whose rows all only pad, for warm-up: they store and sample nothing."""
        decode = key.kind == "decode"
        S = key.tokens if decode else min(key.tokens, self.buckets.max_num_seqs)
        return StepInputs(
            tokens=np.zeros(key.tokens, np.int32),
            places=np.zeros(key.tokens, np.int32),
            positions=np.zeros(key.tokens, np.int32),
            rows=Rows(
                block_tables=np.full((S, self.max_pages), -1, np.int32),
                kv_lens=np.zeros(S, np.int32),
                query_starts=np.arange(S + 1, dtype=np.int32) if decode else np.zeros(S + 1, np.int32),
                slots=np.full(key.tokens, -1, np.int32),
                max_query_len=1 if decode else None,
            ),
            sample_rows=np.zeros(key.samples, np.int32),
            sample_places=np.full(key.samples, NOWHERE, np.int32),
            sampling=self._sampling((), key.samples, key.variant),
            num_steps=np.asarray(1, np.int32),
        )

    def _tables(self, rows: Sequence[Lane], S: int) -> tuple[np.ndarray, np.ndarray]:
        lists = [lane.sequence.table for lane in rows]
        lens = np.zeros(S, np.int32)
        lens[: len(lists)] = [len(table) for table in lists]
        flat = np.fromiter(itertools.chain.from_iterable(lists), np.int32, int(lens.sum()))
        if flat.size and not (flat.min() >= 0 and flat.max() < self.num_pages):
            wrong = flat[(flat < 0) | (flat >= self.num_pages)][0]
            raise ValueError(f"page ids must lie in 0..{self.num_pages - 1}, a block table has {wrong}")
        tables = np.full((S, self.max_pages), -1, np.int32)
        row = np.repeat(np.arange(S), lens)
        column = np.arange(flat.size) - np.repeat(np.cumsum(lens) - lens, lens)
        fits = column < self.max_pages  # a reservation may be wider than any sequence gets long
        tables[row[fits], column[fits]] = flat[fits]
        lens = np.minimum(lens, self.max_pages)
        return tables, lens

    def _sampling(self, sampled: Sequence[Lane], R: int, variant: str) -> SampleInputs:
        params = [lane.params for lane in sampled]
        count = len(sampled)
        fields = {}
        if variant != "greedy":
            fields["temperature"] = _padded([p.temperature for p in params], R, 0.0, np.float32)
            fields["top_k"] = _padded([p.top_k for p in params], R, 0)
            fields["top_p"] = _padded([p.top_p for p in params], R, 1.0, np.float32)
            fields["min_p"] = _padded([p.min_p for p in params], R, 0.0, np.float32)
            seeds = np.zeros((R, 2), np.uint32)
            if count:
                seeds[:count] = [lane.seed for lane in sampled]
            fields["seeds"] = seeds
            fields["positions"] = _padded([lane.known for lane in sampled], R, 0)
        if variant == "full":
            fields["repetition"] = _padded([p.repetition_penalty for p in params], R, 1.0, np.float32)
            fields["presence"] = _padded([p.presence_penalty for p in params], R, 0.0, np.float32)
            fields["frequency"] = _padded([p.frequency_penalty for p in params], R, 0.0, np.float32)
            history = np.full((R, self.max_history), -1, np.int32)
            for row, lane in enumerate(sampled):
                history[row, : len(lane.ids)] = lane.ids
            fields["history"] = history
            fields["prompt_lens"] = _padded([lane.prompt_len for lane in sampled], R, 0)
            biases = [p.logit_bias for p in params]
            fields["bias_ids"] = _padded_rows([list(bias) for bias in biases], R, -1)
            fields["bias_values"] = _padded_rows([list(bias.values()) for bias in biases], R, 0.0, np.float32)
            bans = [lane.end_ids if lane.known - lane.prompt_len < lane.params.min_tokens else () for lane in sampled]
            fields["ban_ids"] = _padded_rows([list(ids) for ids in bans], R, -1)
        return SampleInputs(**fields)


@dataclasses.dataclass(frozen=True)
class Form:
    """How the arrays of a step's inputs lie in one: static, so a part of what is compiled.

    Attributes:
        tree: the structure of the inputs.
        parts: shape and dtype of each array, in order; all elements have 32 bits.
    """

    tree: jax.tree_util.PyTreeDef
    parts: tuple[tuple[tuple[int, ...], str], ...]


def pack(inputs: StepInputs) -> tuple[Int32[np.ndarray, " n"], Form]:
    """The arrays of the inputs behind each other, bit for bit, and how to find them again."""
    leaves, tree = jax.tree.flatten(inputs)
    flat = np.concatenate([leaf.reshape(-1).view(np.int32) for leaf in leaves])
    return flat, Form(tree, tuple((leaf.shape, leaf.dtype.name) for leaf in leaves))


def unpack(flat: Int32[Array, " n"], form: Form) -> StepInputs:
    """The inverse of :func:`pack`, inside a jitted step."""
    leaves, start = [], 0
    for shape, dtype in form.parts:
        stop = start + math.prod(shape)
        leaves.append(jax.lax.bitcast_convert_type(flat[start:stop], dtype).reshape(shape))
        start = stop
    return jax.tree.unflatten(form.tree, leaves)


def _padded(values: Sequence, size: int, fill, dtype=np.int32) -> np.ndarray:
    out = np.full(size, fill, dtype)
    out[: len(values)] = values
    return out


def _padded_rows(lists: Sequence[Sequence], size: int, fill, dtype=np.int32) -> np.ndarray:
    """[size, width] with the width rounded up to a power of two of at least 8, so that few shapes exist."""
    width = max(8, 1 << (max(map(len, lists), default=0) - 1).bit_length() if any(lists) else 8)
    out = np.full((size, width), fill, dtype)
    for row, values in enumerate(lists):
        out[row, : len(values)] = values
    return out
