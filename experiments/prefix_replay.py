"""Replays prompts through the prefix index alone: what share of them would be found, at which cache size.

No clock and no scheduler: a request looks up its prompt, and what it computed is stored when it is done. Pages of a
request that is being served are in use; the others are idle and leave in LRU order. A request leaves its pages last to
first, so that the head of a prefix, which more requests share, is the last to go.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np

from paxkv.sched.prefix_cache import PrefixCache
from paxkv.workload import Conversations, Workload

Keys = range | tuple[int, ...]
History = Literal["kept", "cut"]


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One request: content keys of the pages that it may find and of those that it leaves behind."""

    tokens: int
    wanted: Keys
    stored: Keys


@dataclasses.dataclass(frozen=True)
class HitRate:
    """Pages asked for and found, prompt tokens and those of them that were found."""

    pages: int
    found_pages: int
    tokens: int
    found_tokens: int

    @property
    def by_page(self) -> float:
        return self.found_pages / self.pages

    @property
    def by_token(self) -> float:
        return self.found_tokens / self.tokens


def replay(prompts: Iterable[Prompt], page_size: int, capacity: int | None = None) -> HitRate:
    """Looks up and stores every prompt in order.

    Args:
        prompts: requests in the order in which they are served.
        page_size: tokens of a page.
        capacity: pages of the cache, or None for no limit.
    """
    cache, spare, made = PrefixCache(), [], 0
    pages = found = tokens = 0
    for prompt in prompts:
        hits = len(cache.lookup(prompt.wanted))
        pages, found, tokens = pages + len(prompt.wanted), found + hits, tokens + prompt.tokens
        held = cache.lookup(prompt.stored)
        for page in held:
            cache.use(page)
        for key in prompt.stored[len(held) :]:
            if spare:
                page = spare.pop()
            elif capacity is None or made < capacity:
                page, made = made, made + 1
            elif cache.num_idle:
                page = cache.evict()
            else:
                break  # the request alone fills the cache
            (held if cache.publish(key, page) else spare).append(page)
        for page in reversed(held):
            cache.leave(page)
    return HitRate(pages, found, tokens, found * page_size)


def trace_prompts(workload: Workload) -> list[Prompt]:
    """Prompts of a trace that carries block hashes (Mooncake's): every started block counts."""
    assert workload.hash_ids is not None
    lengths = workload.prompt_tokens.tolist()
    return [Prompt(tokens, ids, ids) for tokens, ids in zip(lengths, workload.hash_ids, strict=True)]


def interleaved(rounds: np.ndarray, open_at_once: int, seed: int = 0) -> Iterator[tuple[int, int]]:
    """(conversation, round) in an order of serving: always a random one of the open conversations goes on.

    `open_at_once` conversations are open; where one ends, the next begins.
    """
    pick = random.Random(seed)
    following = iter(range(len(rounds)))
    active = [[conversation, 0] for conversation in itertools.islice(following, open_at_once)]
    while active:
        index = int(pick.random() * len(active))
        conversation, at = active[index]
        yield conversation, at
        if at + 1 < rounds[conversation]:
            active[index][1] = at + 1
            continue
        active[index] = active[-1]
        active.pop()
        begun = next(following, None)
        if begun is not None:
            active.append([begun, 0])


def chat_prompts(
    conversations: Conversations,
    order: Iterable[tuple[int, int]],
    page_size: int,
    *,
    context_tokens: int,
    history: History,
) -> Iterator[Prompt]:
    """The request of each round, with all earlier rounds as its history.

    Args:
        order: (conversation, round) as they are served.
        context_tokens: longest prompt.
        history: `kept`: the prompt begins where the conversation began, and rounds whose prompt would be longer than
            the context are not asked; `cut`: only the last `context_tokens` are sent, as in the paper's figure 17.

    Pages are named by conversation, place and where the prompt began: the same tokens behind another beginning are
    other keys and values. The newest token of a reply has no keys and values yet.
    """
    human, reply = conversations.human.tolist(), conversations.reply.tolist()
    before = np.concatenate([[0], np.cumsum(conversations.human + conversations.reply)]).tolist()
    offsets = conversations.offsets.tolist()
    roots: dict[tuple[int, int], int] = {}
    stride = 1 + (before[-1] + 1) // page_size
    for conversation, at in order:
        turn = offsets[conversation] + at
        length = before[turn] - before[offsets[conversation]] + human[turn]
        if length < 1 or (history == "kept" and length > context_tokens):
            continue
        begin = max(0, length - context_tokens)
        root = stride * roots.setdefault((conversation, begin), len(roots))
        tokens = length - begin
        wanted, stored = (tokens - 1) // page_size, (tokens + max(reply[turn], 1) - 1) // page_size
        yield Prompt(tokens, range(root, root + wanted), range(root, root + stored))
