"""A witness: which mechanisms a run went through, request by request, from its plans and results alone."""

from __future__ import annotations

from collections.abc import Iterable

from paxkv.sched import beam
from paxkv.sched.plan import StepPlan, StepResult
from paxkv.sched.sequence import Group

SEEN = ("recompute", "swap", "cached", "chunks", "fork", "copied", "beam")
"""Put out either way; prompt pages found; prompt cut; several samples; shared page copied; beam in another's place."""


class Witness:
    """Notes what happened to which request.

    Attributes:
        seen: mechanism → names of the requests that went through it.
    """

    def __init__(self) -> None:
        self.seen: dict[str, set[int | str]] = {}
        self.forget()

    def forget(self) -> None:
        """Begins anew."""
        self.seen = {name: set() for name in SEEN}

    def plan(self, plan: StepPlan, groups: Iterable[Group]) -> None:
        """Takes a plan, before it runs, and the scheduler's groups."""
        seen, groups = self.seen, list(groups)
        for event in plan.preempted:
            seen[event.mode].add(event.request_id)
        seen["cached"].update(event.request_id for event in plan.admitted if event.cached_tokens)
        cut = {chunk.seq_id for chunk in plan.prefills if not chunk.last}
        decodes, targets = set(plan.decodes), {target for _, target in plan.copies}
        for group in groups:
            name, ids = group.request.request_id, {seq.seq_id for seq in group.seqs}
            if ids & cut:
                seen["chunks"].add(name)
            if len(ids & decodes) > 1 and not group.request.beam:
                seen["fork"].add(name)
            if any(targets.intersection(seq.table) for seq in group.seqs):
                seen["copied"].add(name)

    def result(self, result: StepResult) -> None:
        """Takes what came of a plan."""
        for name, parents in (result.parents or {}).items():
            if beam.place(parents, len(parents)) != tuple(range(len(parents))):
                self.seen["beam"].add(name)
