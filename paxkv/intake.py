"""The tokens of a dispatch on their way into the requests: what grows, what ends, which beams go on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping

from paxkv.output import Live, TokenLogprob, Transcript
from paxkv.steps.executor import Ticket
from paxkv.steps.step import StepOutputs


@dataclasses.dataclass
class Intake:
    """What a dispatch's tokens changed.

    Attributes:
        tokens: how many were given to requests.
        ended: sequences that met an end token or a stop text, that have no text, or whose beam search is over.
        parents: of each beam search that went on, the parent of each slot.
    """

    tokens: int = 0
    ended: list[int] = dataclasses.field(default_factory=list)
    parents: dict[int | str, tuple[int, ...]] = dataclasses.field(default_factory=dict)


def take_tokens(ticket: Ticket, outputs: StepOutputs | None, owner: Mapping[int, Live]) -> Intake:
    """Gives every sequence its tokens, and beam searches their candidates.

    Args:
        ticket: the dispatch.
        outputs: what came of it, on the host; None if it computed nothing.
        owner: sequence id to its request. What belongs to nobody any more is dropped.
    """
    intake = Intake()
    if ticket.work is None or outputs is None:
        return intake
    beams: dict[int | str, list[int]] = {}
    rows = outputs.tokens.T.tolist()
    for row, lane in enumerate(ticket.work.sampled):
        seq_id = lane.sequence.seq_id
        live = owner.get(seq_id)
        if live is None or lane.done:
            continue
        if live.beam is not None:
            beams.setdefault(live.request_id, []).append(row)
            continue
        if live.wide and len(lane.ids) >= lane.known:
            continue  # sampled before its request was put out in the middle of a recomputation
        item = live.by_seq[seq_id]
        taken = item.take(rows[row], live.end_ids, live.target)
        intake.tokens += taken
        if live.wants_tops:
            for step in range(taken):
                _note_logprob(item, outputs, step, row)
        if item.reason in ("stop", "error"):
            intake.ended.append(seq_id)
    for candidates in beams.values():
        live = owner[ticket.work.sampled[candidates[0]].sequence.seq_id]
        _step_beams(live, ticket, outputs, candidates, intake)
    return intake


def _note_logprob(item: Transcript, outputs: StepOutputs, step: int, row: int) -> None:
    logprob = float(outputs.logprobs[step, row])
    item.total += logprob
    wanted = item.lane.params.logprobs
    if wanted is not None:
        pairs = zip(outputs.top_ids[step, row].tolist(), outputs.top_logprobs[step, row].tolist(), strict=True)
        top = tuple(itertools.islice(pairs, wanted))
        item.logprobs.append(TokenLogprob(int(outputs.tokens[step, row]), logprob, top))


def _step_beams(live: Live, ticket: Ticket, outputs: StepOutputs, rows: list[int], intake: Intake) -> None:
    """One step of a beam search whose candidates lie in ``rows``."""
    assert live.beam is not None and ticket.work is not None
    lanes = [item.lane for item in live.transcripts]
    width = 2 * len(lanes)
    for row in rows:
        tops = (outputs.top_ids[0, row, :width], outputs.top_logprobs[0, row, :width])
        ticket.work.sampled[row].held = tops
    if any(lane.held is None for lane in lanes):
        # A recomputation whose beams are computed in different steps: all compete when the last is there.
        for row in rows:
            ticket.work.sampled[row].known -= 1
        return
    for lane in lanes:
        lane.known = len(lane.ids) + 1
    held = [lane.held for lane in lanes]
    before = [lane.ids for lane in lanes]
    if lanes[0].produced:
        ids, scores = ([tops[part] for tops in held] for part in (0, 1))
        parents, tokens, done = live.beam.step(ids, scores)
        intake.parents[live.request_id] = parents
        before = [before[parent] for parent in parents]
    else:
        tokens, done = live.beam.first(*held[0])
    for lane, ids, token in zip(lanes, before, tokens, strict=True):
        lane.ids = [*ids, int(token)]
        lane.held = None
        lane.done = done
    intake.tokens += len(lanes)
    if done:
        intake.ended += [lane.sequence.seq_id for lane in lanes]
