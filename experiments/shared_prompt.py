"""Two requests with one system prompt, run through the scheduler and the paged memory step by step."""

from __future__ import annotations

import dataclasses

from experiments.setting import Setting, num_pages
from paxkv.config import CacheConfig, SchedulerConfig
from paxkv.request import Request
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.scheduler import Scheduler
from paxkv.sim.cost_model import CostExecutor, CostModel


@dataclasses.dataclass(frozen=True)
class SharedPrompt:
    """What was seen when both requests decoded.

    Attributes:
        pages: distinct pages that hold the two prompts.
        prefix_pages: distinct pages among them that hold whole pages of the system prompt.
        computed_tokens: prompt tokens computed for the two, in order of arrival.
        first_token_s: seconds from the arrival to the first token of each.
    """

    pages: int
    prefix_pages: int
    computed_tokens: tuple[int, int]
    first_token_s: tuple[float, float]


def run_pair(
    setting: Setting, cost: CostModel, prefix: int, own: int, *, together: bool, caching: bool
) -> SharedPrompt:
    """Serves two prompts of `prefix` shared and `own` different tokens each.

    Args:
        setting: names the model, the page size and, through them, the pool.
        together: whether both arrive before the first step; else the second arrives when the first decodes.
        caching: whether pages are found by content.
    """
    memory = PagedMemory(CacheConfig(num_pages(setting), page_size=setting.page_size, prefix_caching=caching))
    limit = prefix + own + 64
    scheduler = Scheduler(SchedulerConfig(max_num_batched_tokens=2 * limit, max_model_len=limit), memory, check=True)
    executor = CostExecutor(cost)
    executor.until_s = 0.0  # one step at a time
    arrivals: list[float] = []
    firsts: dict[int, float] = {}
    computed = [0, 0]

    def arrive() -> None:
        index = len(arrivals)
        ids = (*range(prefix), *range(prefix + index * own, prefix + (index + 1) * own))
        scheduler.submit(Request(index, prefix + own, 32, executor.clock_s, prompt_ids=ids))
        arrivals.append(executor.clock_s)

    def step() -> None:
        plan = scheduler.schedule()
        assert plan is not None
        for chunk in plan.prefills:
            computed[chunk.seq_id] += chunk.count  # one sequence each, so its id is the request's
        outcome = scheduler.complete(executor.execute(plan))
        firsts.update(dict.fromkeys(outcome.first_tokens, executor.clock_s))

    arrive()
    if together:
        arrive()
    while 0 not in firsts:
        step()
    if not together:
        arrive()
    while 1 not in firsts:
        step()
    return _look(scheduler, prefix, own, computed, [firsts[i] - arrivals[i] for i in (0, 1)], setting.page_size)


def _look(
    scheduler: Scheduler, prefix: int, own: int, computed: list[int], first_s: list[float], page: int
) -> SharedPrompt:
    tables = [scheduler.group(i).seqs[0].table[: -(-(prefix + own) // page)] for i in (0, 1)]
    whole = prefix // page
    return SharedPrompt(
        pages=len({p for table in tables for p in table}),
        prefix_pages=len({p for table in tables for p in table[:whole]}),
        computed_tokens=(computed[0], computed[1]),
        first_token_s=(first_s[0], first_s[1]),
    )
