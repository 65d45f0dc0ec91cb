"""The prefix index and its eviction orders: against a naive model, and the public faults about stale and early hits."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paxkv.config import CacheConfig, SchedulerConfig
from paxkv.request import Request
from paxkv.sched import prefix_cache
from paxkv.sched.block import PagePool
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.events import Blocked, Miss
from paxkv.sched.eviction import ORDERS
from paxkv.sched.plan import StepResult
from paxkv.sched.prefix_cache import PrefixCache
from paxkv.sched.scheduler import Scheduler
from paxkv.testing.force import ForceAt
from paxkv.testing.scripted import ScriptedRun

POOL = 6


class NaiveOrder:
    """Idle pages with everything that any order may ask about them; the victim is found by sorting."""

    def __init__(self, order: str) -> None:
        self.order, self.clock = order, 0
        self.since: dict[int, int] = {}  # idle page → when it became so
        self.born: dict[int, int] = {}  # when it first became so
        self.uses: dict[int, int] = {}

    def leave(self, page: int) -> None:
        self.clock += 1
        self.since[page] = self.clock
        self.born.setdefault(page, self.clock)
        self.uses[page] = self.uses.get(page, 0) + 1

    def victim(self) -> int:
        rank = {
            "lru": lambda page: self.since[page],
            "mru": lambda page: -self.since[page],
            "fifo": lambda page: (self.born[page], self.since[page]),
            "lfu": lambda page: (self.uses[page], self.since[page]),
        }[self.order]
        return min(self.since, key=rank)

    def forget(self, page: int) -> None:
        del self.since[page], self.born[page], self.uses[page]


class CacheMachine(RuleBasedStateMachine):
    """Tables of keyed pages come and go over a small pool."""

    @initialize(order=st.sampled_from(sorted(ORDERS)))
    def build(self, order):
        self.cache = PrefixCache(order)
        self.pool = PagePool(POOL, self.cache)
        self.naive = NaiveOrder(order)
        self.index: dict[str, int] = {}  # key → page
        self.free = set(range(POOL))
        self.tables: list[tuple[list[str], list[int]]] = []

    def given_away(self, page: int) -> None:
        """A page was handed out; check that it was the right one."""
        if self.free:
            self.free.remove(page)
            return
        assert page == self.naive.victim()
        self.naive.forget(page)
        self.index = {key: owner for key, owner in self.index.items() if owner != page}

    @rule(root=st.sampled_from("ab"), length=st.integers(1, 4))
    def begin(self, root, length):
        keys = [root * (index + 1) for index in range(length)]
        hits = self.cache.lookup(keys)
        expected = [self.index[key] for key in keys if key in self.index]
        assert hits == expected[: len(hits)]
        assert len(hits) == length or keys[len(hits)] not in self.index
        idle = [page for page in hits if page in self.naive.since]
        if self.pool.num_free - len(idle) < length - len(hits):
            return
        for page in hits:
            self.pool.share(page, 4)
            self.naive.since.pop(page, None)
        table = list(hits)
        for _ in range(length - len(hits)):
            table.append(self.pool.take())
            self.given_away(table[-1])
        self.tables.append((keys, table))

    @precondition(lambda self: self.tables)
    @rule(choice=st.integers(0, 99), count=st.integers(0, 4))
    def publish(self, choice, count):
        keys, table = self.tables[choice % len(self.tables)]
        for key, page in list(zip(keys, table, strict=True))[:count]:
            new = key not in self.index and page not in self.index.values()
            assert self.cache.publish(key, page) == new
            if new:
                self.index[key] = page

    @precondition(lambda self: self.tables)
    @rule(choice=st.integers(0, 99))
    def finish(self, choice):
        _, table = self.tables.pop(choice % len(self.tables))
        others = {page for _, pages in self.tables for page in pages}
        for page in reversed(table):
            if page not in others and page in self.index.values():
                self.naive.leave(page)
            elif page not in others:
                self.free.add(page)
        self.pool.drop_table(table, len(table) * 4, 4)

    @rule(pages=st.integers(1, 3))
    def evict(self, pages):
        count = min(pages, len(self.naive.since))
        for _ in range(count):
            page = self.naive.victim()
            self.naive.forget(page)
            self.index = {key: owner for key, owner in self.index.items() if owner != page}
            self.free.add(page)
        assert self.pool.evict(pages) == count

    @invariant()
    def agrees(self):
        if not hasattr(self, "cache"):
            return
        assert self.cache.items() == self.index
        assert {page for page in range(POOL) if self.cache.is_idle(page)} == set(self.naive.since)
        assert self.cache.num_idle == len(self.naive.since)
        assert self.pool.num_free == len(self.free) + len(self.naive.since)
        self.pool.check([table for _, table in self.tables])


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=400, stateful_step_count=40)


@pytest.mark.parametrize(("order", "victims"), [("lru", "bca"), ("mru", "acb"), ("fifo", "abc"), ("lfu", "bca")])
def test_orders(order, victims):
    """Three pages a, b, c become idle in turn; then a is used again."""
    idle = ORDERS[order]()
    names = "abc"
    for page in range(3):
        idle.add(page)
    idle.remove(0)
    assert 0 not in idle
    assert len(idle) == 2
    idle.add(0)
    assert "".join(names[idle.pop()] for _ in range(3)) == victims
    assert len(idle) == 0


def test_a_page_that_comes_back_starts_anew():
    """Eviction forgets: the count of uses and the age belong to the content, not to the page's number."""
    for order, victim in (("lfu", 1), ("fifo", 2)):
        idle = ORDERS[order]()
        idle.add(1)
        idle.remove(1)
        idle.add(1)
        assert idle.pop() == 1
        idle.add(2)
        idle.add(1)
        idle.remove(2)
        idle.add(2)
        assert idle.pop() == victim


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_pages_used_again_and_again_leave_nothing_behind(order):
    """A cache that never evicts must not grow with every hit, and still knows its order."""
    idle = ORDERS[order]()
    for page in range(50):
        idle.add(page)
    for turn in range(2000):
        idle.remove(turn % 50)
        idle.add(turn % 50)
    assert len(getattr(idle, "_heap", ())) <= 2 * 50 + 65
    victims = [idle.pop() for _ in range(50)]
    assert victims == (list(reversed(range(50))) if order == "mru" else list(range(50)))


def test_why_a_page_was_missed(monkeypatch):
    cache = PrefixCache()
    for page, key in enumerate("abc"):
        cache.publish(key, page)
        cache.leave(page)
    assert cache.why_missed("abc", 3) is Miss.NONE
    assert cache.why_missed("abx", 2) is Miss.NEVER_STORED
    assert cache.evict() == 0
    assert cache.why_missed("abc", 0) is Miss.EVICTED
    cache.publish("a", 7)
    assert cache.why_missed("xa", 1) is Miss.NEVER_STORED  # it is stored now, and was not looked up
    monkeypatch.setattr(prefix_cache, "EVICTED_KEYS_REMEMBERED", 1)
    cache.evict()
    cache.evict()
    assert cache.why_missed("b", 0) is Miss.NEVER_STORED  # forgotten
    assert cache.why_missed("c", 0) is Miss.EVICTED
    assert cache.evictions == 3
    with pytest.raises(LookupError, match="ask num_idle"):
        cache.evict()


# --- through the scheduler ------------------------------------------------------------------------


def cached(num_pages: int, page_size: int = 16, *, force=None, watermark: float = 0.0, **limits) -> ScriptedRun:
    memory = PagedMemory(CacheConfig(num_pages, page_size, prefix_caching=True, watermark=watermark))
    return ScriptedRun(Scheduler(SchedulerConfig(**limits), memory, check=True, force=force))


def request(name: str, tokens: int, output: int = 2, first: int = 0, **more) -> Request:
    return Request(name, tokens, output, prompt_ids=tuple(range(first, first + tokens)), **more)


def hits(run: ScriptedRun) -> dict[int | str, int]:
    return {event.request_id: event.cached_tokens for plan in run.plans for event in plan.admitted}


def misses(run: ScriptedRun) -> dict[int | str, Miss]:
    return {event.request_id: event.miss for plan in run.plans for event in plan.admitted}


@pytest.mark.parametrize(("tokens", "found"), [(16, 0), (31, 16), (32, 16), (33, 32), (48, 32)])
def test_whole_prompt_cached(tokens, found):
    """B09: the last token is always computed, and the third run hits as much as the second."""
    run = cached(40)
    for name in "abc":
        run.submit(request(name, tokens, 20))
        run.run()
    assert hits(run) == {"a": 0, "b": found, "c": found}
    assert found <= tokens - 1
    assert run.outputs["a"] == run.outputs["b"] == run.outputs["c"]
    computed = [plan.prefill_tokens for plan in run.plans if plan.prefills]
    assert computed == [tokens, tokens - found, tokens - found]


def test_answers_are_found_again():
    """The next turn of a conversation: prompt and answer of the first are cached, as far as pages are full."""
    run = cached(40)
    run.submit(request("a", 20, 30))
    answer = run.run()["a"][0]
    history = (*range(20), *answer)
    run.submit(Request("b", 53, 2, prompt_ids=(*history, 7, 7, 7)))
    run.run()
    assert hits(run)["b"] == 48
    assert run.outputs["b"] == {0: run.expected(Request("b", 53, 2, prompt_ids=(*history, 7, 7, 7)))["b"][0]}


def test_answers_that_were_not_reported_are_not_found():
    """A gap in the reported ids ends what is found: the pages behind it have other content than it seems."""
    run = cached(40, 4)
    run._tells = lambda step: step != 5
    run.submit(request("a", 8, 20))
    answer = run.run()["a"][0]
    run.submit(Request("b", 28, 2, prompt_ids=(*range(8), *answer)))
    run.run()
    assert hits(run)["b"] == 12  # step 5 would have told the sixth token, the second of page 3


def test_a_group_reduced_to_one_sequence_offers_no_answers():
    """Two samples, one ends: the index does not know what the other one generated before."""
    run = cached(40, 4)
    scheduler = run.scheduler
    scheduler.submit(request("a", 8, 20, num_seqs=2))
    for step in range(12):
        plan = scheduler.schedule()
        tokens = {seq: (100 + step,) for seq in (0, 1)}
        scheduler.complete(StepResult(ended=(0,) if step == 3 else (), tokens=tokens))
        assert plan is not None
    assert len(scheduler.memory.cache.items()) == 2


def test_no_stale_hit():
    """B11 (a): pages of A were given to B; A's prompt finds nothing, and its answer is the cold one."""
    run = cached(3)
    a, again = request("a", 47, 2), request("again", 47, 2)
    for one in (a, request("b", 47, 2, first=1000), again):
        run.submit(one)
        run.run()
    assert hits(run) == {"a": 0, "b": 0, "again": 0}
    assert misses(run)["again"] is Miss.EVICTED
    assert run.outputs["again"] == run.outputs["a"]


def held_pages(run: ScriptedRun, pages: int) -> None:
    """Leaves ``pages`` pages free or idle: another request holds the rest, and goes on for long."""
    run.submit(request("holder", 16 * (run.scheduler.memory.num_free_pages - pages) - 15, 15, first=5000))
    run.step()
    assert run.scheduler.memory.num_free_pages == pages


def test_own_hits_are_not_counted_as_free():
    """B11 (b): five pages are left, two of them the request's own hits; four more must wait, three more fit."""
    run = cached(9)
    run.submit(request("a", 33, 1))
    run.run()
    assert run.scheduler.memory.cache.num_idle == 2
    held_pages(run, 5)
    memory, group = run.scheduler.memory, request("b", 16 * 6, 1)
    run.submit(group)
    owners, free, idle = list(memory.pool.owners), list(memory.pool._free), list(memory.cache._idle._idle)
    waiting = run.scheduler.group("b")
    assert memory.admit(waiting, alone=False, budget=None) is Blocked.PAGES
    assert (memory.pool.owners, memory.pool._free, list(memory.cache._idle._idle)) == (owners, free, idle)
    assert not waiting.seqs[0].table
    plan = run.step()
    assert plan.blocked is Blocked.PAGES
    run.abort("b")

    run.submit(request("c", 16 * 5, 1))
    two = memory.cache.lookup(memory.cache.items())[:2]
    plan = run.step()
    assert hits(run)["c"] == 32
    assert plan.prefill_tokens == 48
    assert set(two) <= set(range(9))
    run.run()


def test_hits_survive_their_own_request():
    """B11 (c): the pages that a request still needs are taken from others' idle pages, never from its own hits."""
    run = cached(8)
    for name, first in (("a", 0), ("b", 1000)):
        run.submit(request(name, 65, 1, first=first))  # four idle pages of a, then of b: a's are older
        run.run()
    run.submit(request("again", 65 + 48, 1))
    run.run()
    assert hits(run)["again"] == 48  # one of a's four went when b needed its fifth page
    assert run.outputs["again"] == {0: run.expected(request("again", 65 + 48, 1))["again"][0]}


def test_no_hit_before_the_page_is_computed():
    """B13: two equal prompts together, 32 tokens a step; then one that is aborted after one step, and a third."""
    run = cached(20, max_num_batched_tokens=32, max_num_seqs=8, step_kind="chunked")
    requests = [request("a", 64, 4), request("b", 64, 4)]
    run.submit(*requests)
    assert run.run() == run.expected(*requests)
    run.scheduler.memory.evict(20)
    run.submit(request("c", 64, 4))
    run.step()
    assert len(run.scheduler.memory.cache.items()) == 2  # what is computed, no more
    run.abort("c")
    run.submit(request("d", 64, 4))
    run.run()
    assert hits(run)["d"] == 32
    assert run.outputs["d"] == run.outputs["a"]


@pytest.mark.parametrize(("budget", "fits"), [(17, True), (16, False)])
def test_hits_cost_no_budget(budget, fits):
    """48 of 64 prompt tokens are cached: beside one decode, 16 tokens are all that the step needs for them."""
    run = cached(30, max_num_batched_tokens=budget, max_num_seqs=8)
    run.submit(request("a", 64, 1))
    run.run()
    run.submit(request("other", 3, 9, first=900))
    run.step()
    run.submit(request("b", 64, 1))
    plan = run.step()
    assert plan.blocked is (None if fits else Blocked.BUDGET)
    assert plan.prefill_tokens == (16 if fits else 0)


def test_equal_prompts_in_one_step_share_nothing():
    run = cached(20)
    run.submit(request("a", 33, 4), request("b", 33, 4))
    plan = run.step()
    assert hits(run) == {"a": 0, "b": 0}
    assert plan.prefill_tokens == 66
    run.run()
    assert len(run.scheduler.memory.cache.items()) == 2
    assert run.outputs["a"] == run.outputs["b"]


def test_pages_that_were_never_written_are_never_offered():
    """B13: preempted in the middle of a prompt; only what was computed can be found."""
    force = ForceAt({1: [("a", "recompute")]})
    run = cached(20, force=force, max_num_batched_tokens=20, max_num_seqs=8)
    run.submit(request("a", 60, 2))
    run.step()
    assert sorted(run.scheduler.memory.cache.items().values()) == [0]
    run.step()
    assert run.plans[1].preempted[0].tokens_lost == 20
    assert run.step().admitted[0].cached_tokens == 16
    run.run()


def test_hit_rate_counts_admissions():
    """B32: B waits for nine steps and is looked up ten times; 128 queries, 48 hits, rate 0.375."""
    run = cached(10)
    run.submit(request("A", 64, 1))
    run.run()
    held_pages(run, 3)
    run.submit(request("B", 64, 1))
    lookups = []
    lookup = run.scheduler.memory.cache.lookup
    run.scheduler.memory.cache.lookup = lambda keys: lookups.append(1) or lookup(keys)
    holder = run.scheduler.counters.prefix_queries - 64
    for _ in range(9):
        assert run.step().blocked is Blocked.PAGES
    run.abort("holder")
    run.run()
    assert len(lookups) == 10
    counters = run.scheduler.counters
    assert (counters.prefix_queries - holder, counters.prefix_hits) == (128, 48)
    assert counters.prefix_hits / (counters.prefix_queries - holder) == 0.375


def test_recomputation_is_no_hit():
    """B32: random prompts and preemptions: no hit is counted, and recomputed tokens have their own counter."""
    run = cached(14, 4, watermark=0.01, max_num_seqs=8)
    run.submit(*(request(str(i), 13, 20, first=1000 * i) for i in range(6)))
    run.run()
    counters = run.scheduler.counters
    events = [event for plan in run.plans for event in plan.preempted]
    resumed = [event for plan in run.plans for event in plan.admitted if event.resumed]
    assert counters.preemptions == len(events) == len(resumed) > 3
    assert (counters.prefix_queries, counters.prefix_hits) == (6 * 13, 0)
    computed = sum(plan.prefill_tokens for plan in run.plans)
    assert counters.recomputed_tokens == computed - 6 * 13 > 0
    assert any(event.cached_tokens for event in resumed)  # pages were found again, but that is another figure
    usage = run.scheduler.usage()
    assert (usage.live, usage.shared, usage.pages) == (0, 0, 0)
    usage.check(14 * 4)


@pytest.mark.parametrize(
    ("prompt", "miss"),
    [
        (Request("b", 33, 1), Miss.NO_IDS),
        (request("b", 16, 1), Miss.SHORT),
        (request("b", 33, 1), Miss.NONE),
        (request("b", 33, 1, first=500), Miss.NEVER_STORED),
        (request("b", 33, 1, salt="other"), Miss.NEVER_STORED),
    ],
)
def test_reasons_for_a_miss(prompt, miss):
    run = cached(10)
    run.submit(request("a", 33, 1))
    run.run()
    run.submit(prompt)
    run.run()
    assert misses(run)["b"] is miss


def test_without_an_index():
    run = ScriptedRun(Scheduler(SchedulerConfig(), PagedMemory(CacheConfig(10)), check=True))
    run.submit(request("a", 33, 1))
    run.run()
    assert misses(run) == {"a": Miss.OFF}
    assert run.scheduler.counters.prefix_queries == 0
