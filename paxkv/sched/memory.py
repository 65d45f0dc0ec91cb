"""What the scheduler asks of memory. Three kinds answer: paged, reserved and static.

A system of the paper is a choice of memory; the scheduler is the same for all. Memory decides whether a
group may enter and whether running groups may grow; it never decides whom to serve.
"""

from __future__ import annotations

import abc
from typing import ClassVar, Literal

from paxkv.request import Request
from paxkv.sched.events import Blocked, Miss
from paxkv.sched.sequence import Group
from paxkv.sched.waste import Usage

Copies = list[tuple[int, int]]


class Memory(abc.ABC):
    """The contract. Methods change state only where they say so; a refusal leaves no trace.

    ``tick`` is the scheduler's decode clock: at tick t a decoding sequence has ``offset + t`` tokens, the
    last of which is written in the step at t. ``stored`` counts tokens with keys and values.
    """

    absorbs: ClassVar[Literal["internal", "reserved"]] = "reserved"
    """The share of the pool that decoded tokens are taken from."""

    num_held = 0
    """Sequences that have finished but wait for their static batch."""

    num_pages: int
    page_size: int

    @property
    def finds_content(self) -> bool:
        """Whether pages are found again by what they hold (:meth:`publish`)."""
        return False

    # --- admission -------------------------------------------------------------------------------

    @abc.abstractmethod
    def never_fits(self, request: Request, target: int) -> str | None:
        """Why the request could not be served even alone, with the numbers; None if it could."""

    @abc.abstractmethod
    def admit(self, group: Group, *, alone: bool, budget: int | None) -> Blocked | None:
        """Gives the group its pages and sets ``group.jobs``, or says why not.

        Args:
            alone: nothing else holds memory, so the watermark is waived.
            budget: tokens that may be computed in this step; None when the group may be cut into chunks.
        """

    def lookup_result(self) -> tuple[int, Miss]:
        """(prompt tokens found in the cache, why not more) of the last admission."""
        return 0, Miss.OFF

    def seal(self) -> None:
        """Admissions of this step are complete."""

    # --- growth ----------------------------------------------------------------------------------

    @abc.abstractmethod
    def start(self, group: Group, tick: int) -> None:
        """The group decodes from the step at ``tick`` on; ``group.offset`` is set."""

    @abc.abstractmethod
    def stop(self, group: Group, tick: int) -> None:
        """The group decodes no longer; its next step would have been at ``tick``."""

    def fits(self, tick: int, width: int) -> bool:
        """Whether every running group passes its can-append test at ``tick``; may err on the safe side.

        Args:
            width: sequences of the widest running group.
        """
        return True

    @abc.abstractmethod
    def grow(self, tick: int) -> Copies:
        """Gives all decoding sequences their slot for the step at ``tick``. Returns page copies to make."""

    def can_append(self, group: Group) -> bool:
        """The paper's test: at least one free page per sequence of the group."""
        return True

    def can_append_alone(self, group: Group, tick: int) -> bool:
        """Whether the group, with the pool to itself, can take its next slot (exact need)."""
        return True

    def append(self, group: Group, tick: int) -> Copies:
        """Gives one group its slot for the step at ``tick``, where :meth:`grow` is too much."""
        return []

    def horizon(self, tick: int, limit: int, width: int) -> tuple[int, tuple[int, ...]]:
        """How many steps from ``tick`` on (the first is already given), at most ``limit``, surely pass
        their can-append tests; and the pages that the second and later steps allocate, cyclic."""
        return limit, ()

    @abc.abstractmethod
    def advance(self, tick: int, steps: int) -> None:
        """Gives the slots of the steps after the first of a horizon that began at ``tick``."""

    def fork(self, group: Group) -> Copies:
        """The prompt is computed, by the first sequence for all. Returns page copies to make before the next step."""
        return []

    def reorder(self, group: Group, parents: tuple[int, ...], stored: int) -> Copies:
        """Beam i continues beam ``parents[i]``. Returns page copies to make before the next step."""
        return []

    # --- leaving ---------------------------------------------------------------------------------

    @abc.abstractmethod
    def release(self, group: Group, stored: int) -> None:
        """Takes back everything the group holds."""

    def release_sequence(self, group: Group, index: int, stored: int) -> None:
        """Takes back what one sequence of a decoding group holds; the group goes on without it."""

    def hold(self, group: Group, tick: int) -> bool:
        """The group has finished. True if it must stay until its batch ends."""
        return False

    def swap_out(self, group: Group, stored: int) -> Copies | None:
        """Moves the group's pages to the host pool: (device, host) pairs, or None if they do not fit."""
        return None

    def can_swap_in(self, group: Group, tick: int, *, alone: bool) -> bool:
        """Whether a swapped group may come back."""
        return False

    def swap_in(self, group: Group, stored: int) -> Copies:
        """Brings a group back: (host, device) pairs."""
        return []

    def release_swapped(self, group: Group, stored: int) -> None:
        """Takes back what a swapped group holds in the host pool."""

    # --- accounting ------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def num_free_pages(self) -> int:
        """Device pages that could be given out now."""

    @abc.abstractmethod
    def context_pages(self) -> int:
        """Pages read by the decodes of the current step, summed over sequences."""

    @abc.abstractmethod
    def usage(self, tick: int, logical_tokens: int, unfilled: tuple[int, int]) -> Usage:
        """The pool by use in the step at ``tick``.

        Args:
            logical_tokens: tokens of all running sequences, the slots of prompts in prefill included.
            unfilled: how many of those prompt slots are not computed yet, in (groups of one, wider groups).
        """

    def publish(self, group: Group, stored: int) -> None:
        """Makes the group's full pages up to ``stored`` tokens findable by content."""

    def evict(self, pages: int) -> int:
        """Gives up idle cached pages; returns how many."""
        return 0

    def check(self, groups: list[Group], tick: int) -> None:
        """Raises AssertionError if any page is lost, free twice or counted wrongly."""
