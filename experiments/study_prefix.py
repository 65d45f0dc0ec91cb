r"""Beyond the paper: what sharing a prefix stores, what it saves, and how often real prompts share one.

Claim 10: two requests that share a 2,000-token system prompt store it once.
Claim 11: prefix caching removes the prefill of a shared prompt; conversational hit rates should pass 60%.
Claim 12: "paging avoids recomputing keys and values" (it does not: caching does, paging places them).

    python -m experiments.reproduce --preset=paper --only=study_prefix [--traces=DIR]     (10 seconds)

Expected: 125 pages of 16 for the 2,000 tokens, once, if the second request comes after the first was computed; and for
Mooncake's traces the hit rates that an independent count over the same files gives (to four digits). Conversations are
replayed through the prefix index alone, with their history kept or cut as in figure 17.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

from experiments.context import Context, Preset
from experiments.figure import Chapter, Table
from experiments.finding import Finding, graded
from experiments.kept import kept
from experiments.prefix_replay import History, chat_prompts, interleaved, replay, trace_prompts
from experiments.setting import Setting, build_cost, num_pages
from experiments.shared_prompt import SharedPrompt, run_pair
from paxkv.workload import Conversations, load_conversations, read_mooncake

PREFIX, OWN = 2000, 40
CARD = Setting("paged", "opt-13b", "sharegpt", 1.0, 1.0)
"""Names the model, its card and the page size; nothing is drawn from its workload."""

CLAIMED_HIT_RATE = 0.60
CONVERSATIONS = {"smoke": 300, "paper": 1000}
OPEN = {"smoke": (64,), "paper": (16, 64, 256)}
POOLS = (1, 4, None)
"""Cache sizes, in pools of `CARD`; None has no limit."""
CONTEXTS: tuple[tuple[History, int], ...] = (("kept", 2048), ("kept", 8192), ("cut", 1024))

MOONCAKE = {
    "mooncake_conversation": (0.3664, 0.3637, 0.3257, 0.2116, 0.0653, 0.0445),
    "mooncake_synthetic": (0.6396, 0.6396, 0.6242, 0.4239, 0.1906, 0.0841),
}
"""Hit rates by an independent count over the trace files, at the sizes below."""
MOONCAKE_BLOCKS = (None, 100_000, 30_000, 10_000, 3_000, 1_000)


def settings(preset: Preset) -> list[Setting]:
    return []


# -- claims 10 and 12: two requests ----------------------------------------------------------------------------------

CASES = {
    "the second comes after the first was computed": (False, True),
    "both come before the first step": (True, True),
    "pages are not found by content": (False, False),
}


def pair(context: Context, case: str, prefix: int = PREFIX) -> SharedPrompt:
    """One of `CASES`, run now (milliseconds)."""
    together, caching = CASES[case]
    return run_pair(CARD, build_cost(CARD, context.calibration), prefix, OWN, together=together, caching=caching)


def pair_table(context: Context) -> Table:
    """Pages and work of the two requests in each case; the last row's prefix does not end with a page."""
    cases = [(case, PREFIX) for case in CASES] + [(next(iter(CASES)), PREFIX + CARD.page_size // 2)]
    rows = []
    for case, prefix in cases:
        seen = pair(context, case, prefix)
        rows.append(
            (case, prefix, seen.pages, seen.prefix_pages, seen.prefix_pages / (prefix // CARD.page_size),
             *seen.computed_tokens, *(1e3 * seconds for seconds in seen.first_token_s))
        )  # fmt: skip
    return Table(
        f"Two requests with one system prompt and {OWN} tokens of their own (OPT-13B, pages of {CARD.page_size})",
        ("case", "shared tokens", "pages of both prompts", "pages of the shared part", "times stored",
         "tokens computed, first", "second", "first token, ms, first", "second"),
        tuple(rows),
        "Through the scheduler and the paged memory. Only computed pages can be found: requests that come together "
        "each compute the prompt. Only whole pages are shared: the tokens behind the last whole page are computed "
        "again.",
    )  # fmt: skip


def finding_stored_once(context: Context) -> Finding:
    """Claim 10."""
    stored = {case: pair(context, case).prefix_pages / (PREFIX // CARD.page_size) for case in list(CASES)[:2]}
    after, together = stored.values()
    return Finding(
        10,
        graded([after == 1, together == 1]),
        f"stored {after:g} time(s) ({PREFIX // CARD.page_size} pages of {CARD.page_size}) when the second request "
        f"comes after the first was computed, {together:g} time(s) when both come together",
        "pages counted in both block tables: exactly once, whenever the two arrive",
        "study_prefix",
    )


def finding_recomputing(context: Context) -> Finding:
    """Claim 12."""
    without = pair(context, "pages are not found by content").computed_tokens
    found = pair(context, "the second comes after the first was computed").computed_tokens
    return Finding(
        12,
        "confirmed" if sum(without) < 2 * (PREFIX + OWN) else "refuted",
        f"paged without a prefix index, the second request computes all its {without[1]:,} prompt tokens, as it would "
        f"in contiguous memory; with the index {found[1]:,}. Keeping keys and values is caching, in every system "
        "here; paging decides where they lie, and makes it cheap to share them",
        "confirmed if paging without a prefix index computes fewer tokens than the two prompts have",
        "study_prefix",
    )


# -- claim 11: how often prompts are found -----------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def _conversations(count: int, traces: str | None) -> Conversations:
    whole = load_conversations(traces)
    offsets = whole.offsets[: min(count, len(whole)) + 1]
    turns = offsets[-1]
    return dataclasses.replace(whole, human=whole.human[:turns], reply=whole.reply[:turns], offsets=offsets)


def chat_hit_rate(
    context: Context, history: History, context_tokens: int, open_at_once: int, pools: int | None
) -> dict[str, float]:
    """Share of prompt tokens found, kept as a run."""
    count, pages = CONVERSATIONS[context.preset], num_pages(CARD)
    config = {
        "study": "prefix",
        "conversations": count,
        "history": history,
        "context_tokens": context_tokens,
        "open": open_at_once,
        "capacity": None if pools is None else pools * pages,
        "page_size": CARD.page_size,
    }

    def compute() -> dict[str, float]:
        talks = _conversations(count, context.traces)
        order = interleaved(talks.rounds, open_at_once)
        prompts = chat_prompts(talks, order, CARD.page_size, context_tokens=context_tokens, history=history)
        rate = replay(prompts, CARD.page_size, config["capacity"])  # type: ignore[arg-type]
        return {"found": rate.by_token, "tokens": rate.tokens, "found_tokens": rate.found_tokens}

    return kept(context, f"prefix-chat-{history}{context_tokens}-open{open_at_once}", config, compute)


def chat_table(context: Context) -> Table:
    """Hit rates by history rule, conversations open at once and cache size."""
    rows = []
    for history, tokens in CONTEXTS:
        for count in OPEN[context.preset]:
            rates = [100 * chat_hit_rate(context, history, tokens, count, pools)["found"] for pools in POOLS]
            rule = f"kept, up to {tokens:,} tokens" if history == "kept" else f"cut to the last {tokens:,} tokens"
            rows.append((rule, count, *rates))
    pages = num_pages(CARD)
    return Table(
        f"Chat: prompt tokens found in the cache, % ({CONVERSATIONS[context.preset]} conversations, "
        f"{context.workload('sharegpt turns')}, pages of {CARD.page_size})",
        ("history", "conversations open at once",
         *("no limit" if pools is None else f"{pools * pages:,} pages" for pools in POOLS)),
        tuple(rows),
        f"{pages:,} pages are the whole pool of OPT-13B on one A100-40GB, a generous cache for it. First rounds have "
        "no history and find nothing. Once a history is cut at its head it begins elsewhere each round, and nothing "
        "of it is found any more.",
    )  # fmt: skip


def mooncake_rates(context: Context, name: str) -> list[float] | None:
    """Hit rates of a Mooncake trace at the sizes of `MOONCAKE_BLOCKS`; None without the trace."""
    path = None if context.traces is None else Path(context.traces) / f"{name}.jsonl.gz"
    if path is None or not path.exists():
        return None

    def compute() -> dict[str, list[float]]:
        workload = read_mooncake(path)
        prompts = trace_prompts(workload)
        return {"rates": [replay(prompts, workload.hash_block, size).by_page for size in MOONCAKE_BLOCKS]}

    config = {"study": "prefix", "trace": name, "sizes": list(MOONCAKE_BLOCKS)}
    return kept(context, f"prefix-{name.replace('_', '-')}", config, compute)["rates"]


def mooncake_table(context: Context) -> Table:
    """Mooncake's traces, ours beside the independent count."""
    rows = []
    for name, expected in MOONCAKE.items():
        rates = mooncake_rates(context, name)
        if rates is None:
            rows.append((name, "this run (needs --traces)", *([None] * len(MOONCAKE_BLOCKS)), None))
        else:
            agree = all(abs(ours - theirs) < 0.00005 for ours, theirs in zip(rates, expected, strict=True))
            rows.append((name, "this run", *(round(rate, 4) for rate in rates), agree))
        rows.append((name, "independent count", *expected, None))
    return Table(
        "Mooncake's traces: prompt blocks of 512 tokens found in the cache",
        ("trace", "source", *("no limit" if size is None else f"{size:,} blocks" for size in MOONCAKE_BLOCKS), "equal"),
        tuple(rows),
        "LRU. The longest cached prefix counts; a request's blocks are stored after its lookup.",
    )


def finding_hit_rate(context: Context) -> Finding:
    """Claim 11."""
    second = pair(context, "the second comes after the first was computed").computed_tokens[1]
    middle = 64 if 64 in OPEN[context.preset] else OPEN[context.preset][0]
    ideal = chat_hit_rate(context, "kept", 8192, middle, None)["found"]
    pool = chat_hit_rate(context, "kept", 8192, middle, 1)["found"]
    cut = chat_hit_rate(context, "cut", 1024, middle, None)["found"]
    tests = [second <= OWN + CARD.page_size] + [rate > CLAIMED_HIT_RATE for rate in (ideal, pool, cut)]
    mooncake = mooncake_rates(context, "mooncake_conversation")
    words = "not at hand" if mooncake is None else f"{mooncake[0]:.0%} with no limit"
    if mooncake is not None:
        tests.append(mooncake[0] > CLAIMED_HIT_RATE)
    return Finding(
        11,
        graded(tests),
        f"the second request computes {second} of {PREFIX + OWN:,} prompt tokens. Chat with kept history finds "
        f"{ideal:.0%} of its prompt tokens with no limit, {pool:.0%} in one pool with {middle} conversations open; "
        f"cut to 1,024 tokens {cut:.0%}. Mooncake's production chat: {words}",
        f"only the request's own tokens and a partial page are computed; hit rates above {CLAIMED_HIT_RATE:.0%} with "
        "no limit, in one pool, with cut history, and on Mooncake's conversations",
        "study_prefix",
    )


def chapter(context: Context) -> Chapter:
    tables = (pair_table(context), chat_table(context), mooncake_table(context))
    return Chapter("study_prefix", tables=tables, title="Shared prefixes: what is stored, saved and found")
