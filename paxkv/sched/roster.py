"""Who is where: the groups in flight by what they are doing, and the sums that every step asks for."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator

from paxkv.sched.memory import Memory
from paxkv.sched.sequence import Group, GroupState


class Roster:
    """Moves groups between the states of :mod:`paxkv.sched.sequence`, and tells the memory when they start and stop.

    Args:
        memory: that the groups live in.

    Attributes:
        groups: all groups in flight, by request id.
        waiting: not admitted or preempted by recomputation, in arrival order.
        swapped: whose pages are in the host pool, in arrival order.
        running: that hold device memory, in the order in which they came to do so.
        prefilling: those of them with prompt tokens left to compute.
        decoding: the group of each decoding sequence, by sequence id.
        beams: decoding groups that search with beams and are not held.
        wide: running groups of several sequences.
        num_seqs: sequences of running groups.
        num_decoding_groups: groups that decode.
        offsets: sum of ``offset`` over decoding sequences.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.groups: dict[int | str, Group] = {}
        self.waiting: deque[Group] = deque()
        self.swapped: deque[Group] = deque()
        self.running: dict[Group, None] = {}
        self.prefilling: dict[Group, None] = {}
        self.decoding: dict[int, Group] = {}
        self.beams: dict[Group, None] = {}
        self.wide: dict[Group, None] = {}
        self.num_seqs = 0
        self.num_decoding_groups = 0
        self.offsets = 0
        self._deadlines: list[tuple[int, int, int, Group]] = []  # tick of the last token, order, epoch

    # --- what steps ask for ----------------------------------------------------------------------

    @property
    def width(self) -> int:
        """Sequences of the widest running group."""
        return max((len(group.seqs) for group in self.wide), default=1) if self.wide else 1

    def decode_tokens(self, tick: int) -> int:
        """Tokens of all decoding sequences at ``tick``."""
        return self.offsets + len(self.decoding) * tick

    def steps_to_deadline(self, tick: int) -> int:
        """Steps until the first decoding group reaches its length limit."""
        deadlines = self._deadlines
        while deadlines and (deadlines[0][3].epoch != deadlines[0][2] or deadlines[0][3].held):
            heapq.heappop(deadlines)
        return deadlines[0][0] - tick if deadlines else 1  # none: the rest of a static batch was aborted

    def pop_due(self, tick: int) -> Iterator[Group]:
        """Decoding groups that have reached their length limit at ``tick``; each is named once."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= tick:
            _, _, epoch, group = heapq.heappop(deadlines)
            if group.epoch == epoch and not group.held:
                yield group

    # --- moves -----------------------------------------------------------------------------------

    def submit(self, group: Group) -> None:
        """A new group waits."""
        self.groups[group.request.request_id] = group
        self.waiting.append(group)

    def enter(self, group: Group) -> None:
        """The group, which no queue holds any more, has device memory."""
        group.state = GroupState.RUNNING
        self.running[group] = None
        self.num_seqs += len(group.seqs)
        if len(group.seqs) > 1:
            self.wide[group] = None

    def start(self, group: Group, tick: int) -> None:
        """The running group, whose ``known`` is set, decodes from ``tick`` on."""
        group.offset = group.known - tick
        group.decoding = True
        for seq in group.seqs:
            self.decoding[seq.seq_id] = group
        self.num_decoding_groups += 1
        self.offsets += group.offset * len(group.seqs)
        if group.request.beam:
            self.beams[group] = None
        last = tick + group.target - group.generated_at(tick)
        heapq.heappush(self._deadlines, (last, group.order, group.epoch, group))
        self.memory.start(group, tick)

    def stop(self, group: Group, tick: int) -> int:
        """The running group computes no longer. Returns how many tokens of each sequence have keys and values."""
        self.prefilling.pop(group, None)
        if not group.decoding:
            return group.known
        self.memory.stop(group, tick)
        group.known = group.known_at(tick)
        group.decoding = False
        group.epoch += 1
        for seq in group.seqs:
            del self.decoding[seq.seq_id]
        self.num_decoding_groups -= 1
        self.offsets -= group.offset * len(group.seqs)
        self.beams.pop(group, None)
        return group.known - 1  # the newest token has no slot yet

    def leave(self, group: Group) -> None:
        """The stopped group has no device memory any more."""
        del self.running[group]
        self.wide.pop(group, None)
        self.num_seqs -= len(group.seqs)

    def queue(self, group: Group, state: GroupState) -> None:
        """A victim, which has left, goes back into a queue by its arrival: nearly always to the head."""
        group.state = state
        queue = self.swapped if state is GroupState.SWAPPED else self.waiting
        index = 0
        while index < len(queue) and queue[index].order < group.order:
            index += 1
        queue.insert(index, group)

    def drop(self, group: Group, tick: int) -> None:
        """The group is gone, wherever it was, and gives back what it held there."""
        if group.state is GroupState.WAITING:
            self.waiting.remove(group)
        elif group.state is GroupState.SWAPPED:
            self.memory.release_swapped(group, group.known - 1)
            self.swapped.remove(group)
        else:
            self.memory.release(group, self.stop(group, tick))
            self.leave(group)
        group.state = GroupState.FINISHED
        del self.groups[group.request.request_id]

    def drop_sequence(self, group: Group, seq_id: int, tick: int) -> None:
        """One of several sequences of a decoding group is gone; the group goes on without it."""
        index = next(i for i, seq in enumerate(group.seqs) if seq.seq_id == seq_id)
        self.memory.release_sequence(group, index, group.known_at(tick) - 1)
        del group.seqs[index], self.decoding[seq_id]
        self.offsets -= group.offset
        self.num_seqs -= 1

    def hold(self, group: Group) -> None:
        """The group has all its tokens and waits for its static batch to end."""
        group.held = True
        self.beams.pop(group, None)

    # --- inspection ------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises AssertionError where the sums and sets contradict the groups themselves."""
        by_state = {state: [x for x in self.groups.values() if x.state is state] for state in GroupState}
        counts = (len(self.waiting), len(self.running), len(self.swapped))
        states = tuple(len(by_state[s]) for s in (GroupState.WAITING, GroupState.RUNNING, GroupState.SWAPPED))
        if counts != states or by_state[GroupState.FINISHED]:
            raise AssertionError(f"queues hold {counts} waiting, running, swapped groups; the groups say {states}")
        for group in by_state[GroupState.WAITING]:
            if any(seq.table for seq in group.seqs):
                raise AssertionError(f"{group} waits but holds pages")
        decoding = [group for group in self.running if group.decoding]
        wide = {group for group in self.running if group.request.num_seqs > 1}
        found = {
            "sequences": (self.num_seqs, sum(len(group.seqs) for group in self.running)),
            "decoding groups": (self.num_decoding_groups, len(decoding)),
            "decoding sequences": (set(self.decoding), {seq.seq_id for group in decoding for seq in group.seqs}),
            "offsets": (self.offsets, sum(group.offset * len(group.seqs) for group in decoding)),
            "prefilling": (set(self.prefilling), {group for group in self.running if not group.decoding}),
            "wide groups": (self.wide.keys() | wide, wide),
            "beams": (set(self.beams), {group for group in decoding if group.request.beam and not group.held}),
        }
        for name, (counted, seen) in found.items():
            if counted != seen:
                raise AssertionError(f"{name}: the scheduler counts {counted}, the groups give {seen}")

    def __str__(self) -> str:
        return (
            f"running {list(self.running)[:8]}\n"
            f"swapped {list(self.swapped)[:8]}\n"
            f"waiting ({len(self.waiting)}) {list(self.waiting)[:8]}"
        )
