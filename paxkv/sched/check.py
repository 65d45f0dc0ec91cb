"""Conservation, checked from outside: nothing lost, nothing twice, every share of the pool accounted for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paxkv.sched.sequence import GroupState

if TYPE_CHECKING:
    from paxkv.sched.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler, tick: int) -> None:
    """Raises AssertionError where the scheduler and its memory contradict themselves.

    Args:
        tick: the decode clock for which slots have been given: the scheduler's own between plans, one more
            while a plan with decodes is open.
    """
    groups = scheduler.groups()
    by_state = {state: [g for g in groups if g.state is state] for state in GroupState}
    counts = (scheduler.num_waiting, scheduler.num_running, scheduler.num_swapped)
    states = tuple(len(by_state[s]) for s in (GroupState.WAITING, GroupState.RUNNING, GroupState.SWAPPED))
    if counts != states or by_state[GroupState.FINISHED]:
        raise AssertionError(f"queues hold {counts} waiting, running, swapped groups; the groups' states say {states}")
    for group in by_state[GroupState.WAITING]:
        if any(seq.table for seq in group.seqs):
            raise AssertionError(f"{group} waits but holds pages")
    for group in by_state[GroupState.RUNNING]:
        generated = group.generated_at(scheduler.tick)
        if generated > group.target and not group.held:
            raise AssertionError(f"{group} generated {generated} tokens, its limit is {group.target}")
    _check_counters(scheduler)
    scheduler.memory.check(groups, tick)
    scheduler.usage().check(scheduler.memory.num_pages * scheduler.memory.page_size)


def _check_counters(scheduler: Scheduler) -> None:
    running = list(scheduler._running)
    decoding = [group for group in running if group.decoding]
    wide = {group for group in running if group.request.num_seqs > 1}
    counts = {
        "sequences": (scheduler._num_seqs, sum(len(group.seqs) for group in running)),
        "decoding groups": (scheduler._num_decoding_groups, len(decoding)),
        "decoding sequences": (set(scheduler._decoding), {seq.seq_id for group in decoding for seq in group.seqs}),
        "offsets": (scheduler._offsets, sum(group.offset * len(group.seqs) for group in decoding)),
        "prefilling": (set(scheduler._prefilling), {group for group in running if not group.decoding}),
        "wide groups": (scheduler._wide.keys() | wide, wide),
        "beams": (set(scheduler._beams), {group for group in decoding if group.request.beam and not group.held}),
    }
    for name, (counted, found) in counts.items():
        if counted != found:
            raise AssertionError(f"{name}: the scheduler counts {counted}, the groups give {found}")
