"""The checks check: faults planted in the real classes are found by scripted runs, and forced events are events.

Each fault is one that was reported from a public engine, or one that this scheduler once had.
"""

from __future__ import annotations

import dataclasses

import pytest

from paxkv.config import CacheConfig, SchedulerConfig
from paxkv.request import Request
from paxkv.sched import block, block_manager, draft, prefix_cache, sequence
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.scheduler import Scheduler
from paxkv.testing.fake_model import FakeModel
from paxkv.testing.force import ForceAt, ForceRandomly
from paxkv.testing.naive import NaivePages
from paxkv.testing.scripted import ScriptedRun


def requests() -> list[Request]:
    """Prefixes that are shared, samples, beams, and more than the pool holds."""
    return [
        Request(
            index,
            9 + index % 5,
            14,
            num_seqs=1 + index % 3,
            beam=index % 6 == 5,
            prompt_ids=tuple(range(8)) + (index % 5,) * (1 + index % 5),
        )
        for index in range(12)
    ]


def full_run(*, check: bool = False) -> None:
    memory = PagedMemory(CacheConfig(26, 4, num_host_pages=12, prefix_caching=True))
    limits = SchedulerConfig(max_num_seqs=12, max_num_batched_tokens=40)
    force = ForceRandomly(3, preempt=0.1)
    run = ScriptedRun(Scheduler(limits, memory, force=force, check=check), FakeModel(end_share=0.02))
    run.submit(*requests())
    assert run.run(2000) == run.expected(*requests())


def test_no_fault():
    full_run()
    full_run(check=True)


def no_copy_on_write(patch):
    def append_shared(self, group, tick):
        if (group.offset + tick - 1) % self.page_size == 0:
            return original(self, group, tick)
        if group in self._forks:
            del self._forks[group]
            self._fork_need -= len(group.seqs)
            self._join(group)
        return []

    original = PagedMemory._append_shared
    patch.setattr(PagedMemory, "_append_shared", append_shared)


def copy_for_the_last_owner_too(patch):
    source = PagedMemory._append_shared

    def append_shared(self, group, tick):
        copies = source(self, group, tick)
        if copies:
            page = group.seqs[-1].table[-1]
            fresh = self.pool.take()
            self.pool.drop(page, 0)
            group.seqs[-1].table[-1] = fresh
            copies.append((page, fresh))
        return copies

    patch.setattr(PagedMemory, "_append_shared", append_shared)


def lost_copy(patch):
    source = PagedMemory.grow
    patch.setattr(PagedMemory, "grow", lambda self, tick: source(self, tick)[1:])


def publish_before_compute(patch):
    source = PagedMemory.admit

    def admit(self, group, **options):
        blocked = source(self, group, **options)
        if blocked is None:
            self.publish(group, group.known)
        return blocked

    patch.setattr(PagedMemory, "admit", admit)


def stale_key(patch):
    def evict(self):
        return self._idle.pop()

    patch.setattr(prefix_cache.PrefixCache, "evict", evict)


def hits_not_pinned(patch):
    """The hits are found, then others' needs are served from the idle pages, then the hits are used."""

    def cached(self, group):
        hits = source(self, group)
        self.pool.evict(2)
        return hits

    source = PagedMemory._cached
    patch.setattr(PagedMemory, "_cached", cached)


def salt_left_out(patch):
    source = block_manager.hashing.root_key
    patch.setattr(block_manager.hashing, "root_key", lambda salt=None, adapter=None: source(None, None))


def last_token_not_computed(patch):
    """B09: the whole prompt counts as found."""

    def cached(self, group):
        hits = source(self, group)
        if self.cache is None or len(hits) * self.page_size != (group.known - 1) // self.page_size * self.page_size:
            return hits
        return self.cache.lookup(group.keys[: group.known // self.page_size])

    source = PagedMemory._cached
    patch.setattr(PagedMemory, "_cached", cached)


def swap_to_the_wrong_page(patch):
    source = PagedMemory._move

    def move(self, *args):
        copies = source(self, *args)
        return [(old, new) for (old, _), (_, new) in zip(copies, copies[1:] + copies[:1], strict=True)]

    patch.setattr(PagedMemory, "_move", move)


def ids_with_a_gap(patch):
    def learn(self, ids, known):
        if self.ids is None or len(self.seqs) > 1:
            return False
        self.ids += tuple(ids)
        return True

    patch.setattr(sequence.Group, "learn", learn)


def token_of_the_recomputation_lost(patch):
    source = draft.Draft.preempt

    def preempt(self, group, *args, **options):
        source(self, group, *args, **options)
        if group.state.value == "waiting" and group.known > group.request.prompt_tokens:
            group.known -= 1

    patch.setattr(draft.Draft, "preempt", preempt)


def page_freed_too_early(patch):
    def drop(self, page, fill):
        source(self, page, fill)
        if self.owners[page] == 1:
            self._free.append(page)

    source = block.PagePool.drop
    patch.setattr(block.PagePool, "drop", drop)


def beams_not_asked_after_recomputation(patch):
    patch.setattr(draft.Draft, "resuming_beams", lambda self: [])


def shared_pages_counted_as_live(patch):
    source = PagedMemory.usage

    def usage(self, *args):
        found = source(self, *args)
        return dataclasses.replace(found, live=found.live + found.shared, shared=0)

    patch.setattr(PagedMemory, "usage", usage)


FAULTS = [
    no_copy_on_write,
    copy_for_the_last_owner_too,
    lost_copy,
    publish_before_compute,
    stale_key,
    hits_not_pinned,
    last_token_not_computed,
    swap_to_the_wrong_page,
    ids_with_a_gap,
    token_of_the_recomputation_lost,
    page_freed_too_early,
    beams_not_asked_after_recomputation,
    shared_pages_counted_as_live,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(monkeypatch, fault):
    """Without the scheduler's own checks: the scripted run alone must see it."""
    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        full_run()


def test_a_salt_left_out_is_found(monkeypatch):
    salt_left_out(monkeypatch)
    run = ScriptedRun(Scheduler(SchedulerConfig(), PagedMemory(CacheConfig(20, 4, prefix_caching=True))))
    run.submit(Request("a", 9, 2, prompt_ids=tuple(range(9)), salt="x"))
    run.run()
    run.submit(Request("b", 9, 2, prompt_ids=tuple(range(9)), salt="y"))
    with pytest.raises(AssertionError):
        run.run()


def test_order_of_transfers():
    """A page that is swapped out may be the target of a copy in the same step: the swap comes first."""
    limits = SchedulerConfig(preemption="swap")
    memory = PagedMemory(CacheConfig(5, 4, num_host_pages=9, watermark=0))
    run = ScriptedRun(Scheduler(limits, memory, check=True))
    wanted = [Request("a", 6, 5, num_seqs=2), Request("b", 9, 3)]
    run.submit(*wanted)
    assert run.run() == run.expected(*wanted)
    (plan,) = [plan for plan in run.plans if plan.swap_out]
    assert {page for page, _ in plan.swap_out} & {page for _, page in plan.copies}


def test_fake_model():
    """Streams differ, runs agree, everything before a token decides it."""
    model, request = FakeModel(), Request("a", 5, 9, num_seqs=3)
    first, second, third = model.outputs(request, 9)
    assert first != second != third
    assert FakeModel().outputs(request, 9) == [first, second, third]
    assert model.outputs(Request("b", 5, 9), 9)[0] != first
    ids = Request("c", 5, 9, prompt_ids=(1, 2, 3, 4, 5))
    assert model.outputs(ids, 9) == model.outputs(dataclasses.replace(ids, request_id="d"), 9)
    assert model.outputs(ids, 9) != model.outputs(dataclasses.replace(ids, salt="s"), 9)
    assert model.outputs(ids, 9) != model.outputs(dataclasses.replace(ids, prompt_ids=(0, 2, 3, 4, 5)), 9)
    lengths = [len(out) for out in FakeModel(end_share=0.2).outputs(Request("e", 5, 30, num_seqs=8), 30)]
    assert min(lengths) < 30
    assert len(set(lengths)) > 2


def test_naive_pages():
    """The oracle itself, on figure 8."""
    naive = NaivePages(4)
    naive.admit([0, 1], known=7, prompt=7)
    naive.compute(0, 0, 7)
    assert naive.usage() == {"live": 0, "shared": 7, "reserved": 0, "internal": 1, "pages": 2, "logical_pages": 4}
    assert [naive.append(0), naive.append(1)] == [True, False]
    assert naive.usage() == {"live": 8, "shared": 4, "reserved": 0, "internal": 0, "pages": 3, "logical_pages": 4}
    assert naive.compare({0: [7, 3], 1: [7, 1]}) == {7: 0, 3: 2, 1: 1}
    for wrong in ({0: [7, 3], 1: [7, 3]}, {0: [7, 3], 1: [8, 1]}, {0: [7, 3], 1: [7]}, {0: [7, 3]}):
        with pytest.raises(AssertionError):
            naive.compare(wrong)
    assert naive.swap_out([0, 1]) == 3
    assert (naive.num_pages, naive.num_host_pages) == (0, 3)
    assert naive.swap_in([0, 1]) == 3
    naive.reorder([0, 1], [1, 1])
    assert naive.num_pages == 2
    naive.drop([0, 1])
    assert naive.usage()["pages"] == 0


def test_force_at():
    force = ForceAt({2: [("b", "swap"), ("a", "recompute")]}, {3: 4})
    groups = [sequence.Group(Request(name, 3, 3), 0, 0) for name in "ab"]
    assert force.preempt(2, groups) == [(groups[1], "swap"), (groups[0], "recompute")]
    assert (force.preempt(1, groups), force.evict(3), force.evict(2)) == ([], 4, 0)
    with pytest.raises(ValueError, match="request 'b' is not running at step 2, only .'a'. are"):
        force.preempt(2, groups[:1])
    with pytest.raises(ValueError, match="recompute or swap, got 'drop'"):
        ForceAt({1: [("a", "drop")]})


@pytest.mark.parametrize("options", [{"preempt": 1.0}, {"swap": 2}, {"evict": -0.1}, {"most_pages": 0}])
def test_force_randomly_refuses(options):
    with pytest.raises(ValueError, match="must be|probabilit"):
        ForceRandomly(0, **options)


def test_force_randomly_repeats_itself():
    def events(seed: int) -> list:
        memory = PagedMemory(CacheConfig(60, 4, num_host_pages=20, prefix_caching=True))
        run = ScriptedRun(Scheduler(SchedulerConfig(), memory, force=ForceRandomly(seed, preempt=0.2)))
        run.submit(*requests())
        run.run()
        return [(plan.step, plan.preempted) for plan in run.plans if plan.preempted]

    assert events(1) == events(1) != events(2)
    assert {event.mode for _, group in events(1) for event in group} == {"swap", "recompute"}
