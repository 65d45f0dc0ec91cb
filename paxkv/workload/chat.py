"""Chat: conversations of several rounds, and the workload of figure 17 built from them.

A round is a human turn and the reply to it. The paper (section 6.5) rebuilds the history for each request,
keeps its last 1024 tokens and stores no KV between rounds.
"""

from __future__ import annotations

import dataclasses
import random

import numpy as np

from paxkv.workload import validate
from paxkv.workload.arrivals import MAX_SEED, ArrivalProcess, arrival_times
from paxkv.workload.validate import WorkloadError, require
from paxkv.workload.workload import Lengths, Workload

CONTEXT_TOKENS = 1024
MAX_OUTPUT_TOKENS = 1016
"""The artifact's cap: what 2048 positions leave after 1024 of context, less 8."""


@dataclasses.dataclass(frozen=True, eq=False)
class Conversations:
    """Turn lengths of conversations: C conversations of T rounds in all.

    Attributes:
        name: short name, such as ``sharegpt_turns``.
        human: int64 [T], tokens of each human turn; a turn may be empty (0).
        reply: int64 [T], tokens of the reply of the same round; may be 0.
        offsets: int64 [C + 1]; conversation c has the rounds ``offsets[c]`` to ``offsets[c + 1]``, at least one.
        source: as in ``Lengths``.
    """

    name: str
    human: np.ndarray
    reply: np.ndarray
    offsets: np.ndarray
    source: str

    def __post_init__(self) -> None:
        validate.text(self.name, "Conversations.name")
        validate.text(self.source, "Conversations.source")
        for field in ("human", "reply", "offsets"):
            checked = validate.tokens_array(getattr(self, field), f"Conversations.{field}", least=0)
            object.__setattr__(self, field, checked)
        rounds = len(self.human)
        require(
            len(self.reply) == rounds,
            f"Conversations needs as many replies as human turns, got {len(self.reply)} and {rounds}",
        )
        require(
            len(self.offsets) >= 2 and self.offsets[0] == 0 and self.offsets[-1] == rounds,
            f"Conversations.offsets must hold at least one conversation and run from 0 to the number of rounds, "
            f"{rounds}, got {self.offsets[:1]} .. {self.offsets[-1:]}",
        )
        empty = np.flatnonzero(np.diff(self.offsets) < 1)
        if empty.size:
            raise WorkloadError(f"every conversation needs at least one round, conversation {empty[0]} has none")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __reduce__(self) -> tuple:
        # Through the constructor, so that a copy in another process is validated and read-only too.
        return Conversations, (self.name, self.human, self.reply, self.offsets, self.source)

    @property
    def rounds(self) -> np.ndarray:
        """Rounds of each conversation, int64 [C]."""
        return np.diff(self.offsets)

    def first_rounds(self, *, start_tokens: int = 0) -> Lengths:
        """Return the first round of each conversation as pairs, as the paper's ShareGPT data set is made.

        Args:
            start_tokens: added to prompt and output each (1 where the tokenizer opens a text with a start
                token, as OPT's does). Pairs that are still empty are left out.
        """
        first = self.offsets[:-1]
        prompt, output = self.human[first] + start_tokens, self.reply[first] + start_tokens
        keep = (prompt > 0) & (output > 0)
        require(bool(keep.any()), f"no first round of {self.name!r} has a prompt and an output")
        return Lengths(f"{self.name}_first", prompt[keep], output[keep], self.source)

    def as_requests(
        self, *, context_tokens: int = CONTEXT_TOKENS, max_output_tokens: int = MAX_OUTPUT_TOKENS
    ) -> Lengths:
        """Return every round as the request that figure 17 sends for it, in file order.

        The prompt is all earlier turns and replies of the conversation and this turn, cut to the last
        ``context_tokens``; the output is the recorded reply, cut to ``max_output_tokens``. An empty prompt
        or reply counts as one token.
        """
        context = validate.whole_number(context_tokens, "context_tokens", least=1)
        cap = validate.whole_number(max_output_tokens, "max_output_tokens", least=1)
        before = np.concatenate([[0], np.cumsum(self.human + self.reply)])
        at_start = np.repeat(before[self.offsets[:-1]], self.rounds)
        prompt = before[:-1] - at_start + self.human
        return Lengths(self.name, np.clip(prompt, 1, context), np.clip(self.reply, 1, cap), self.source)


def chat_workload(
    conversations: Conversations,
    rate: float,
    duration_s: float,
    *,
    new_probability: float,
    seed: int = 0,
    context_tokens: int = CONTEXT_TOKENS,
    max_output_tokens: int = MAX_OUTPUT_TOKENS,
    arrivals: ArrivalProcess = "slots",
) -> Workload:
    """Build the chat workload of figure 17.

    Each arrival starts a new conversation with probability ``new_probability`` (any that has not been
    started, all equally likely), else continues an open one (started, with rounds left; all equally
    likely). Without an open conversation it starts one; when every conversation has been started it
    continues one; when none is left at all, every conversation may be started again. A round does not wait
    for the reply before it: the recorded reply is its history.

    The artifact ran vLLM with 0.5 and the Orcas with 0.1, and the paper does not mention the number: use one
    for all systems and state it.
    """
    if not isinstance(conversations, Conversations):
        raise WorkloadError(
            f"conversations must be a Conversations value (see load_conversations), got {type(conversations).__name__}"
        )
    probability = validate.share(new_probability, "new_probability")
    seed = validate.whole_number(seed, "seed", most=MAX_SEED)
    requests = conversations.as_requests(context_tokens=context_tokens, max_output_tokens=max_output_tokens)
    times = arrival_times(rate, duration_s, arrivals=arrivals, seed=seed)
    picked = _pick_rounds(conversations.offsets.tolist(), len(times), probability, random.Random(seed))
    return Workload(
        name=f"{conversations.name}-chat-{rate:g}rps-{duration_s:g}s-p{probability:g}-seed{seed}",
        arrival_s=times,
        prompt_tokens=requests.prompt[picked],
        output_tokens=requests.output[picked],
        source=f"{conversations.source}; chat, new_probability {probability:g}, context {context_tokens}, "
        f"output <= {max_output_tokens}; arrivals {arrivals}, rate {rate:g}/s, {duration_s:g} s, seed {seed}",
    )


def _pick_rounds(offsets: list[int], count: int, probability: float, rng: random.Random) -> list[int]:
    """Choose ``count`` rounds, as indices into the turns, by the rule of ``chat_workload``."""
    unstarted: list[int] = []
    open_rounds: list[tuple[int, int]] = []  # next round and end of each open conversation
    picked = []
    for _ in range(count):
        if not unstarted and not open_rounds:
            unstarted = list(range(len(offsets) - 1))
        new = rng.random() < probability
        if unstarted and (new or not open_rounds):
            conversation = _pop_any(unstarted, rng)
            at, end = offsets[conversation], offsets[conversation + 1]
        else:
            at, end = _pop_any(open_rounds, rng)
        picked.append(at)
        if at + 1 < end:
            open_rounds.append((at + 1, end))
    return picked


def _pop_any(items: list, rng: random.Random):
    """Remove and return any item; the last one takes its place, so that the cost does not grow."""
    i = int(rng.random() * len(items))
    items[i], items[-1] = items[-1], items[i]
    return items.pop()
