"""Requests in flight: their outputs so far, the lanes that dispatches know them by, and what is to be handed out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from paxkv.output import Live, RequestOutput
from paxkv.sched.plan import StepPlan
from paxkv.sched.sequence import GroupState
from paxkv.steps.lane import Lane


class InFlight:
    """What an engine knows of the requests that it has not finished or not handed out.

    Args:
        num_places: rows that the device keeps for sequences.
        tokenizer: for the text of outputs, or None.

    Attributes:
        live: unfinished requests by name.
        lanes: by sequence id. A static batch keeps the row of a finished sequence, and an end seen late may be in a
            dispatch: a lane stays for as long as plans can name it (see :meth:`keep_lanes`).
        owner: the unfinished request of each sequence.
        changed: unfinished requests that have grown since they were last handed out.
        outbox: outputs of finished requests that were not handed out.
    """

    def __init__(self, num_places: int, tokenizer=None) -> None:
        self.live: dict[int | str, Live] = {}
        self.lanes: dict[int, Lane] = {}
        self.owner: dict[int, Live] = {}
        self.changed: dict[int | str, Live] = {}
        self.outbox: list[RequestOutput] = []
        self._tokenizer = tokenizer
        self._places = list(range(num_places - 1, -1, -1))
        self._early_ends: list[int] = []

    def __contains__(self, name: int | str) -> bool:
        return name in self.live or any(name == output.request_id for output in self.outbox)

    def __bool__(self) -> bool:
        return bool(self.live or self.outbox)

    # --- coming and going ------------------------------------------------------------------------

    def add(self, live: Live) -> None:
        """A new request."""
        self.live[live.request_id] = live
        for item in live.transcripts:
            self.lanes[item.lane.sequence.seq_id] = item.lane
            self.owner[item.lane.sequence.seq_id] = live

    def report(self, live: Live, now: float) -> None:
        """Notes that a request may have grown, and closes it if it has all its tokens."""
        first = live.transcripts[0].lane
        grown = produced = first.produced
        if produced:
            if live.first_token_s is None:
                live.first_token_s = now
            live.token_s += [now] * (produced - len(live.token_s))
        complete = first.done
        if live.beam is not None:
            complete = complete or produced >= live.target
        elif live.wide:
            complete = all(item.lane.done for item in live.transcripts)
            grown = any(item.lane.produced for item in live.transcripts)
        if complete:
            self.close(live, now)
        elif grown:
            self.changed[live.request_id] = live

    def close(self, live: Live, now: float, reason: Literal["abort"] | None = None) -> None:
        """A request has ended: its output is ready, its places are free."""
        self.outbox.append(live.output(now, reason, self._tokenizer))
        for item in live.transcripts:
            item.lane.done = True
            self.free_place(item.lane)
            self.owner.pop(item.lane.sequence.seq_id, None)
        del self.live[live.request_id]
        self.changed.pop(live.request_id, None)

    def lost(self, now: float) -> list[RequestOutput]:
        """Outputs for when a step failed: what was finished, and the rest with the reason ``error``."""
        return self.outbox + [live.output(now, "error", self._tokenizer) for live in self.live.values()]

    def due_ends(self, plan: StepPlan, ended: Iterable[int]) -> list[int]:
        """The ends, of these and of those kept before, that the scheduler can take with this plan.

        It takes those of requests whose sequences are all computed; the others are kept.
        """
        self._early_ends += ended
        due, early = [], []
        for seq_id in self._early_ends:
            live = self.owner.get(seq_id)
            if live is None:
                continue  # aborted since
            complete = live.group.state is GroupState.RUNNING and (
                live.group.jobs or not live.group.decoding or plan.decodes
            )
            (due if complete and live.group.completes(plan.prefills) else early).append(seq_id)
        self._early_ends = early
        return due

    # --- handing out -----------------------------------------------------------------------------

    def take_ended(self) -> list[RequestOutput]:
        """Outputs of finished requests, which are handed out with this."""
        ended, self.outbox = self.outbox, []
        return ended

    def take_all(self) -> list[RequestOutput]:
        """Outputs of finished requests and of those that have grown, each name once."""
        outputs = {}
        for output in self.take_ended():
            if output.request_id in outputs:  # its name was taken again, and that one ended too
                self.outbox.append(output)
            else:
                outputs[output.request_id] = output
        for name in [name for name in self.changed if name not in outputs]:
            outputs[name] = self.changed.pop(name).output()
        return list(outputs.values())

    def put_back(self, outputs: list[RequestOutput]) -> None:
        """The next steps hand these out: what ended as it is, what runs on as it stands then."""
        self.outbox = [output for output in outputs if output.finished] + self.outbox
        for name in {output.request_id for output in outputs if not output.finished} & self.live.keys():
            self.changed[name] = self.live[name]

    def forget(self, name: int | str) -> None:
        """Hands out nothing of a finished request."""
        self.outbox = [output for output in self.outbox if output.request_id != name]

    # --- lanes -----------------------------------------------------------------------------------

    def siblings(self, seq_id: int) -> list[Lane]:
        """The lanes that sample from the last token of a prompt: its own, and at first all that share it."""
        live = self.owner[seq_id]
        lane = self.lanes[seq_id]
        chosen = [lane]
        if live.wide and lane.index == 0 and lane.known == lane.prompt_len:
            own = {job[0].seq_id for job in live.group.jobs}
            chosen += [item.lane for item in live.transcripts[1:] if item.lane.sequence.seq_id not in own]
        for each in chosen:
            self.take_place(each)
        return chosen

    def take_place(self, lane: Lane) -> None:
        """Gives a lane a row on the device, if it has none."""
        if lane.slot < 0:
            lane.slot = self._places.pop()

    def free_place(self, lane: Lane) -> None:
        """Takes a lane's row back, if it has one."""
        if lane.slot >= 0:
            self._places.append(lane.slot)
            lane.slot = -1

    def keep_lanes(self, seq_ids: Iterable[int]) -> None:
        """Drops all other lanes: plans name only what the scheduler holds."""
        self.lanes = {seq_id: self.lanes[seq_id] for seq_id in seq_ids}
