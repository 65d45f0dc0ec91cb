"""Conservation, checked from outside: nothing lost, nothing twice, every share of the pool accounted for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paxkv.sched.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler, tick: int) -> None:
    """Raises AssertionError where the scheduler and its memory contradict themselves.

    Args:
        tick: the decode clock for which slots have been given: the scheduler's own between plans, one more
            while a plan with decodes is open.
    """
    scheduler.roster.check()
    groups = scheduler.groups()
    for group in scheduler.roster.running:
        generated = group.generated_at(scheduler.tick)
        if generated > group.target and not group.held:
            raise AssertionError(f"{group} generated {generated} tokens, its limit is {group.target}")
    scheduler.memory.check(groups, tick)
    scheduler.usage().check(scheduler.memory.num_pages * scheduler.memory.page_size)
