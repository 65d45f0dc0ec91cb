"""The named data sets of the figures: from real trace files, or rebuilt from embedded statistics."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from paxkv.workload import embedded
from paxkv.workload.chat import Conversations
from paxkv.workload.readers import read_lengths
from paxkv.workload.table import read_table
from paxkv.workload.validate import require
from paxkv.workload.workload import Lengths

PAPER_MAX_TOTAL = 2047
"""The artifact keeps prompt + output strictly below OPT's 2048 positions."""

_FILES = {
    "sharegpt": ("sharegpt_sosp23_lengths.csv.gz", "input_tokens", "output_tokens"),
    "alpaca": ("alpaca_52k.csv.gz", "prompt_opt", "output_opt"),
    "wmt16": ("wmt16_ende_llama2.csv.gz", "source", "target"),
}
_TURNS_FILE = "sharegpt_turns.csv.gz"
NAMES = (*_FILES, "sharegpt_turns")


def load_lengths(
    name: str, traces_dir: str | os.PathLike | None = None, *, max_total_tokens: int = PAPER_MAX_TOTAL
) -> Lengths:
    """Return a data set from ``traces_dir`` if given, else from the embedded statistics."""
    if traces_dir is None:
        return embedded_lengths(name, max_total_tokens=max_total_tokens)
    return real_lengths(name, traces_dir, max_total_tokens=max_total_tokens)


def real_lengths(name: str, traces_dir: str | os.PathLike, *, max_total_tokens: int = PAPER_MAX_TOTAL) -> Lengths:
    """Read the pairs of a data set in file order.

    Args:
        name: ``sharegpt`` (first rounds, OPT tokens, the artifact's pairs), ``alpaca`` (OPT tokens), ``wmt16``
            (English to German, Llama tokens), or ``sharegpt_turns`` (every round as a chat request, see
            ``Conversations.as_requests``).
        traces_dir: folder with the trace files.
        max_total_tokens: pairs above it are left out. The default is the artifact's filter when it runs; the
            means printed in figure 11 are over the pairs up to 2048.
    """
    _require_name(name)
    if name == "sharegpt_turns":
        return real_conversations(traces_dir).as_requests().with_total_at_most(max_total_tokens)
    file, prompt, output = _FILES[name]
    pairs = read_lengths(Path(traces_dir) / file, prompt=prompt, output=output, name=name)
    return pairs.with_total_at_most(max_total_tokens)


def embedded_lengths(name: str, *, max_total_tokens: int = PAPER_MAX_TOTAL) -> Lengths:
    """Rebuild the pairs of a data set from its embedded statistics; same arguments as ``real_lengths``.

    As many pairs as the trace has, in an order that is random but always the same. The embedded ShareGPT
    covers totals up to 2048 only.
    """
    _require_name(name)
    if name == "sharegpt_turns":
        return embedded_conversations().as_requests().with_total_at_most(max_total_tokens)
    require(
        name != "sharegpt" or max_total_tokens <= 2048,
        f"the embedded ShareGPT holds pairs with prompt + output <= 2048, got max_total_tokens={max_total_tokens}; "
        "use the real trace for longer ones",
    )
    return embedded.rebuild_pairs(name).with_total_at_most(max_total_tokens)


def load_conversations(traces_dir: str | os.PathLike | None = None) -> Conversations:
    """Return the conversations of figure 17 from ``traces_dir`` if given, else from the embedded statistics."""
    return embedded_conversations() if traces_dir is None else real_conversations(traces_dir)


def real_conversations(traces_dir: str | os.PathLike) -> Conversations:
    """Read ``sharegpt_turns.csv.gz``: conv, turn (from 0, without gaps), human_opt, gpt_opt (tokens, may be 0)."""
    table = read_table(Path(traces_dir) / _TURNS_FILE)
    conv = table.integers(table.find("conv", (), "conversation"), least=0)
    turn = table.integers(table.find("turn", (), "turn"), least=0)
    starts = np.flatnonzero(np.concatenate([[True], np.diff(conv) != 0]))
    offsets = np.append(starts, len(conv))
    wanted = np.arange(len(turn)) - np.repeat(starts, np.diff(offsets))
    wrong = np.flatnonzero(turn != wanted)
    if wrong.size:
        row = int(wrong[0])
        table.fail(row, f"turns of a conversation must count from 0, expected turn {wanted[row]}, got {turn[row]}")
    return Conversations(
        "sharegpt_turns",
        table.integers(table.find("human_opt", (), "human"), least=0),
        table.integers(table.find("gpt_opt", (), "reply"), least=0),
        offsets,
        f"real:{_TURNS_FILE}",
    )


def embedded_conversations() -> Conversations:
    """Rebuild the conversations of figure 17 from the embedded statistics; always the same ones.

    Turns are cut at ``embedded.MAX_TURN_TOKENS``: contexts up to that size see the trace's distribution.
    """
    return embedded.rebuild_conversations()


def _require_name(name: str) -> None:
    require(
        name in NAMES, f"the data set must be one of {', '.join(NAMES)}, got {name!r}; for other files use read_lengths"
    )
