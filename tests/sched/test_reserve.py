"""Orca's memory: the buddy allocator against a naive one, the estimates, and reservations that hold for life."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paxkv.config import SchedulerConfig
from paxkv.request import Request
from paxkv.sched.events import Blocked, RequestRejected
from paxkv.sched.reserve import BuddyAllocator, ReservedMemory
from paxkv.sched.scheduler import Scheduler
from paxkv.testing.scripted import ScriptedRun


def test_regions_of_the_paper():
    """983 pages: seven regions of 128, then 64, 16, 4, 2 and 1."""
    chunks = BuddyAllocator(983, 128).free_chunks()
    assert {size: len(starts) for size, starts in chunks.items()} == {
        128: 7,
        64: 1,
        32: 0,
        16: 1,
        8: 0,
        4: 1,
        2: 1,
        1: 1,
    }
    assert sorted(chunks[128]) == [128 * i for i in range(7)]
    assert [chunks[size] for size in (64, 16, 4, 2, 1)] == [[896], [960], [976], [980], [982]]


def test_smallest_that_fits_is_split_and_the_lower_half_goes_first():
    buddies = BuddyAllocator(128 + 16, 128)
    assert buddies.take(4) == 128
    assert {size: starts for size, starts in buddies.free_chunks().items() if starts} == {128: [0], 8: [136], 4: [132]}
    assert buddies.take(4) == 132
    assert buddies.take(16) == 0  # the 16 is broken up, so a region is split
    assert buddies.free_chunks()[64] == [64]


def test_freed_chunks_are_reused_last_in_first_out():
    buddies = BuddyAllocator(64, 16)
    starts = [buddies.take(16) for _ in range(4)]
    assert starts == [48, 32, 16, 0]
    for start in (32, 0):
        buddies.give(start, 16)
    assert (buddies.take(16), buddies.take(16), buddies.take(16)) == (0, 32, None)


def test_regions_do_not_merge():
    buddies = BuddyAllocator(32, 16)
    assert (buddies.take(16), buddies.take(16)) == (16, 0)
    buddies.give(0, 16)
    buddies.give(16, 16)
    assert buddies.free_chunks() == {16: [0, 16], 8: [], 4: [], 2: [], 1: []}


@pytest.mark.parametrize(("pages", "estimate"), [(0, "max"), (9, "guess"), (9, "")])
def test_bad_reservations(pages, estimate):
    with pytest.raises(ValueError, match="must be"):
        ReservedMemory(pages, 16, 2048, estimate)


@pytest.mark.parametrize("region", [0, 3, 12, -4])
def test_regions_are_powers_of_two(region):
    with pytest.raises(ValueError, match="power of two"):
        BuddyAllocator(64, region)


class BuddyMachine(RuleBasedStateMachine):
    """Chunks as sets of pages. A free chunk of a size exists where its aligned pages are free inside one region."""

    @initialize(num_pages=st.integers(1, 150), region=st.sampled_from([1, 4, 16, 64]))
    def build(self, num_pages, region):
        self.buddies = BuddyAllocator(num_pages, region)
        self.fresh = {size: sorted(starts) for size, starts in self.buddies.free_chunks().items()}
        self.roots = [(start, size) for size, starts in self.fresh.items() for start in starts]
        self.num_pages, self.taken = num_pages, {}

    def free_somewhere(self, size: int) -> bool:
        used = {page for start, taken in self.taken.items() for page in range(start, start + taken)}
        return any(
            not used & set(range(start, start + size))
            for root, length in self.roots
            for start in range(root, root + length - size + 1, size)
        )

    @rule(power=st.integers(0, 6))
    def take(self, power):
        size = 1 << power
        if size > self.buddies.region:
            return
        possible = self.free_somewhere(size)
        start = self.buddies.take(size)
        assert (start is not None) == possible
        if start is not None:
            pages = set(range(start, start + size))
            assert pages <= set(range(self.num_pages))
            assert not any(pages & set(range(s, s + n)) for s, n in self.taken.items())
            self.taken[start] = size

    @precondition(lambda self: self.taken)
    @rule(index=st.integers(0, 99))
    def give(self, index):
        start = sorted(self.taken)[index % len(self.taken)]
        self.buddies.give(start, self.taken.pop(start))

    @invariant()
    def tiles(self):
        if not hasattr(self, "buddies"):
            return
        chunks = [*self.taken.items()]
        chunks += [(start, size) for size, starts in self.buddies.free_chunks().items() for start in starts]
        pages = [page for start, size in chunks for page in range(start, start + size)]
        assert sorted(pages) == list(range(self.num_pages))

    def teardown(self):
        if hasattr(self, "buddies"):
            for start, size in self.taken.items():
                self.buddies.give(start, size)
            assert {size: sorted(starts) for size, starts in self.buddies.free_chunks().items()} == self.fresh


TestBuddyMachine = BuddyMachine.TestCase
TestBuddyMachine.settings = settings(max_examples=200, stateful_step_count=40)


# --- reservations ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimate", "prompt", "output", "tokens"),
    [
        ("oracle", 100, 25, 125),
        ("pow2", 100, 25, 132),
        ("pow2", 100, 32, 132),
        ("pow2", 100, 33, 164),
        ("pow2", 100, 1, 101),
        ("pow2", 1500, 540, 2048),  # 1500 + 1024, capped
        ("max", 100, 25, 2048),
        ("max", 2000, 1, 2048),
    ],
)
def test_estimates(estimate, prompt, output, tokens):
    assert ReservedMemory(983, 16, 2048, estimate).reserve_tokens(prompt, output) == tokens


def orca(num_pages: int = 983, page_size: int = 16, estimate="max", limit: int = 2048, **limits) -> Scheduler:
    return Scheduler(
        SchedulerConfig(max_model_len=limit, **limits),
        ReservedMemory(num_pages, page_size, limit, estimate),
        check=True,
    )


def test_orca_max_runs_seven():
    """floor(15,728 / 2048) = 7: why figure 13 shows 7.00 for both data sets."""
    scheduler = orca()
    for name in range(12):
        scheduler.submit(Request(name, 20, 30))
    plan = scheduler.schedule()
    assert (len(plan.admitted), plan.blocked) == (7, Blocked.CHUNK)
    usage = scheduler.usage()
    assert (usage.live, usage.reserved, usage.internal) == (7 * 20, 7 * 30, 7 * (2048 - 50))
    assert (usage.external, usage.free) == (0, 87 * 16)


@pytest.mark.parametrize(("output", "chunk"), [(9, 2), (12, 2), (13, 4), (44, 4), (45, 8)])
def test_chunks_are_powers_of_two_pages(output, chunk):
    """20 prompt tokens and the output, in pages of 16: rounded up to pages, then to a power of two."""
    scheduler = orca(estimate="oracle")
    scheduler.submit(Request("a", 20, output))
    scheduler.schedule()
    assert scheduler.memory.num_free_pages == 983 - chunk
    usage = scheduler.usage()
    assert (usage.internal, usage.external) == (0, chunk * 16 - 20 - output)


def test_all_sequences_get_a_chunk_or_none_does():
    scheduler = orca(num_pages=12, estimate="oracle", limit=64)  # regions of 4 pages
    scheduler.submit(Request("a", 40, 20, num_seqs=2))
    scheduler.submit(Request("b", 40, 20, num_seqs=2))
    plan = scheduler.schedule()
    assert [event.request_id for event in plan.admitted] == ["a"]
    assert plan.blocked is Blocked.CHUNK
    assert scheduler.memory.num_free_pages == 4
    assert not any(seq.table for seq in scheduler.group("b").seqs)


def test_nothing_is_ever_preempted():
    scheduler = orca(num_pages=28, estimate="oracle", limit=128)
    run = ScriptedRun(scheduler)
    requests = [Request(i, 10 + 3 * i, 5 + 7 * i % 40, num_seqs=1 + i % 3) for i in range(20)]
    run.submit(*requests)
    assert run.run() == run.expected(*requests)
    assert scheduler.counters.preemptions == 0
    assert scheduler.memory.num_free_pages == 28


def test_samples_are_copied_not_shared():
    """One prefill answers for all sequences; the others get copies of the prompt's pages before they decode."""
    scheduler = orca(num_pages=32, estimate="oracle", limit=256)
    run = ScriptedRun(scheduler)
    run.submit(Request("a", 20, 5, num_seqs=3))
    assert run.step().prefill_tokens == 20
    tables = [seq.table for seq in scheduler.group("a").seqs]
    assert run.step().copies == tuple((tables[0][i], table[i]) for table in tables[1:] for i in range(2))
    assert run.step().copies == ()
    assert run.run() == run.expected(Request("a", 20, 5, num_seqs=3))


def test_a_beam_that_takes_anothers_place_copies_its_pages():
    scheduler = orca(num_pages=32, estimate="oracle", limit=256)
    request = Request("a", 20, 9, num_seqs=3, beam=True)
    run = ScriptedRun(scheduler)
    run.submit(request)
    assert run.run() == run.expected(request)
    assert sum(len(plan.copies) for plan in run.plans[2:]) > 2


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (Request("a", 100, 10, num_seqs=3), "3 chunk.s. of 8 pages for 128 tokens"),
        (Request("a", 120, 9), "at most 128"),
    ],
)
def test_what_never_fits_is_refused(request_, reason):
    scheduler = Scheduler(SchedulerConfig(max_model_len=200), ReservedMemory(20, 16, 128, "max"), check=True)
    with pytest.raises(RequestRejected, match=reason):
        scheduler.submit(request_)
    scheduler.submit(Request("a", 100, 10, num_seqs=2))
    assert scheduler.schedule().prefill_tokens == 100


def test_check_notices_a_lost_chunk():
    scheduler = orca(estimate="oracle")
    scheduler.submit(Request("a", 20, 10))
    scheduler.schedule()
    scheduler.memory._buddies.take(4)
    with pytest.raises(AssertionError, match="chunks must tile the pool"):
        scheduler.memory.check(scheduler.groups(), 0)
