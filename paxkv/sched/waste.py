"""Where every token slot of the pool is, step by step (paper figure 2).

The six shares add up to the pool exactly; :meth:`Usage.check` asserts it.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

CATEGORIES = ("live", "shared", "reserved", "internal", "external", "free")


@dataclasses.dataclass(slots=True)
class Usage:
    """Token slots by use, for one step or summed over steps.

    Attributes:
        live: slots that hold a token of exactly one sequence.
        shared: slots that hold a token of several sequences, each slot counted once.
        reserved: empty slots that the sequence they belong to will fill.
        internal: empty slots inside an allocation that will not be filled by reservation (the rest of the last
            page when paged; reserved beyond the true end in Orca's schemes).
        external: slots lost to rounding an allocation up (buddy and block rounding).
        free: slots that belong to nobody, cached prefixes that nobody uses included.
        pages: physical pages in use.
        logical_pages: pages of all block tables, a page counted once per table.
        cached: idle pages that the prefix cache could still give (a part of ``free``).
    """

    live: int = 0
    shared: int = 0
    reserved: int = 0
    internal: int = 0
    external: int = 0
    free: int = 0
    pages: int = 0
    logical_pages: int = 0
    cached: int = 0

    @property
    def total(self) -> int:
        """All slots of the pool."""
        return self.live + self.shared + self.reserved + self.internal + self.external + self.free

    def check(self, slots: int) -> None:
        """Asserts that no slot is missing, counted twice or negative."""
        values = [getattr(self, name) for name in CATEGORIES]
        if sum(values) != slots or min(values) < 0:
            shares = ", ".join(f"{name} {value}" for name, value in zip(CATEGORIES, values, strict=True))
            raise AssertionError(f"the shares of the pool must add up to its {slots} slots, got {shares}")


class WasteMeter:
    """Sums of :class:`Usage` over the steps of a window, exact integers.

    Inside a plan's horizon decode tokens move slots from one share to ``live`` at a constant rate and pages
    arrive by the plan's growth cycle, so a run of steps is added in closed form.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.groups = 0
        self.sums = Usage()
        self.sharing = 0.0

    def add(
        self,
        usage: Usage,
        steps: int,
        *,
        groups: int,
        growing: int,
        growth: tuple[int, ...],
        page_size: int,
        absorbs: Literal["internal", "reserved"],
    ) -> None:
        """Adds ``steps`` steps that begin with ``usage``.

        Args:
            groups: request groups in each step.
            growing: sequences that gain one live token per step.
            growth: pages allocated by the second and later steps, cyclic.
            absorbs: the share that live tokens are taken from.
        """
        s = self.sums
        self.steps += steps
        self.groups += groups * steps
        pages = 0  # sum over the steps of the pages allocated since the first
        evicted = 0  # and of the idle cached pages among them, taken once no page is free without
        if growth and steps > 1:
            if not any(growth):
                self.sharing += (usage.logical_pages / usage.pages if usage.pages else 1.0) * steps
            else:
                grown, cycle = 0, len(growth)
                logical, used = usage.logical_pages, usage.pages
                plain = usage.free // page_size - usage.cached
                sharing = logical / used if used else 1.0
                for j in range(1, steps):
                    grown += growth[(j - 1) % cycle]
                    pages += grown
                    if grown > plain:
                        evicted += grown - plain
                    sharing += (logical + grown) / (used + grown) if used + grown else 1.0
                self.sharing += sharing
        else:
            self.sharing += (usage.logical_pages / usage.pages if usage.pages else 1.0) * steps
        tokens = growing * (steps * (steps - 1) // 2)
        s.live += usage.live * steps + tokens
        s.shared += usage.shared * steps
        s.external += usage.external * steps
        if absorbs == "internal":
            s.internal += usage.internal * steps - tokens + pages * page_size
            s.reserved += usage.reserved * steps
            s.free += usage.free * steps - pages * page_size
            s.pages += usage.pages * steps + pages
            s.logical_pages += usage.logical_pages * steps + pages
            s.cached += usage.cached * steps - evicted
        else:
            s.internal += usage.internal * steps
            s.reserved += usage.reserved * steps - tokens
            s.free += usage.free * steps
            s.pages += usage.pages * steps
            s.logical_pages += usage.logical_pages * steps

    def shares(self) -> dict[str, float]:
        """Mean share of the pool per category, in percent. Empty when no step was added."""
        total = self.sums.total
        return {name: 100.0 * getattr(self.sums, name) / total for name in CATEGORIES} if total else {}

    @property
    def mean_groups(self) -> float:
        """Mean number of request groups per step (figure 13)."""
        return self.groups / self.steps if self.steps else 0.0

    @property
    def sharing_saved(self) -> float:
        """Share of logical pages that sharing saves, in percent: 1 - 1/mean(logical / physical) (figure 15)."""
        return 100.0 * (1.0 - self.steps / self.sharing) if self.sharing else 0.0
