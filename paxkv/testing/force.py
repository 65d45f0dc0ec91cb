"""Force policies: preemption, swapping and eviction at chosen steps, or at random ones.

Memory that runs short does all of this by itself, but rarely and never where a test wants it. A policy goes to
``Scheduler(..., force=policy)``; every plan then covers one step.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

from paxkv.config import require
from paxkv.sched.sequence import Group

Victim = tuple[int | str, str]


class ForceAt:
    """Preempts named requests and evicts pages before named steps.

    Args:
        preempt: step → (request id, ``recompute`` or ``swap``) of the victims, in this order.
        evict: step → idle cached pages to give up.
    """

    def __init__(
        self, preempt: Mapping[int, Sequence[Victim]] | None = None, evict: Mapping[int, int] | None = None
    ) -> None:
        self._preempt = {step: tuple(victims) for step, victims in (preempt or {}).items()}
        self._evict = dict(evict or {})
        for mode in (mode for victims in self._preempt.values() for _, mode in victims):
            require(mode in ("recompute", "swap"), f"a victim goes by recompute or swap, got {mode!r}")

    def preempt(self, step: int, running: list[Group]) -> list[tuple[Group, str]]:
        """The step's victims.

        Raises:
            ValueError: one of them is not running, so the test would not test what it means to.
        """
        groups = {group.request.request_id: group for group in running}
        victims = self._preempt.get(step, ())
        for request_id, _ in victims:
            require(request_id in groups, f"request {request_id!r} is not running at step {step}, only {[*groups]} are")
        return [(groups[request_id], mode) for request_id, mode in victims]

    def evict(self, step: int) -> int:
        """Idle cached pages to give up before ``step``."""
        return self._evict.get(step, 0)


class ForceRandomly:
    """Preempts and evicts with fixed probabilities; the same seed does the same.

    Args:
        seed: of the draws.
        preempt: probability that a running group is put out before a step; below 1, else nothing ever finishes.
        swap: share of the victims that are swapped rather than recomputed, where the host pool has room.
        evict: probability that idle cached pages are given up before a step.
        most_pages: most pages given up at once.
    """

    def __init__(
        self, seed: int, *, preempt: float = 0.1, swap: float = 0.5, evict: float = 0.1, most_pages: int = 4
    ) -> None:
        require(0 <= preempt < 1, f"preempt is a probability in [0, 1), got {preempt!r}")
        require(0 <= swap <= 1 and 0 <= evict <= 1, f"swap and evict are probabilities, got {swap!r} and {evict!r}")
        require(most_pages >= 1, f"most_pages must be at least 1, got {most_pages!r}")
        self._random = random.Random(seed)
        self._preempt_share, self._swap_share, self._evict_share = preempt, swap, evict
        self._most_pages = most_pages

    def preempt(self, step: int, running: list[Group]) -> list[tuple[Group, str]]:
        """The step's victims, in any order."""
        draw = self._random.random
        victims = [group for group in running if draw() < self._preempt_share]
        self._random.shuffle(victims)
        return [(group, "swap" if draw() < self._swap_share else "recompute") for group in victims]

    def evict(self, step: int) -> int:
        """Idle cached pages to give up before ``step``."""
        return self._random.randint(1, self._most_pages) if self._random.random() < self._evict_share else 0
