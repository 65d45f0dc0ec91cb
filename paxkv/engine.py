"""The engine: requests in, tokens out. It carries out every plan that the scheduler makes, on real pages.

One call of :meth:`Engine.step` is one plan::

    schedule ──▶ commit ──▶ build inputs ──▶ dispatch ──▶ complete ─┐        (host)
                                               │                    └─▶ next plan, while the device runs
                                               └─ tokens stay on the device; the host reads them a step later

Reading a step late costs nothing where the next plan does not depend on the tokens. Where it does (beams, several
sequences of a request, penalties) the engine waits. A sequence whose end token is seen late has computed one dispatch
too many; what it sampled after its end is dropped.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence

from paxkv import admission
from paxkv.config import require
from paxkv.driver import Driver
from paxkv.engine_config import EngineConfig, pool_pages
from paxkv.intake import take_tokens
from paxkv.metrics import Counters
from paxkv.models.decoder import DecoderConfig
from paxkv.output import Live, RequestOutput, RequestTimes, Transcript
from paxkv.request import Request
from paxkv.sampling import SamplingParams, request_seed
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.events import RequestRejected
from paxkv.sched.memory import Memory
from paxkv.sched.plan import StepOutcome, StepPlan, StepResult
from paxkv.sched.scheduler import ForcePolicy, Scheduler
from paxkv.sched.sequence import GroupState
from paxkv.steps.beam import BeamSearch
from paxkv.steps.buckets import Buckets
from paxkv.steps.compile_log import CompileLog, use_compile_cache
from paxkv.steps.executor import DeviceExecutor, Ticket
from paxkv.steps.inputs import InputBuilder, StepKey
from paxkv.steps.lane import Lane
from paxkv.steps.step import StepOutputs

__all__ = ["Engine", "EngineConfig", "EngineError", "EngineStats"]

StepHook = Callable[[float, float, StepPlan, StepResult, StepOutcome], None]


class EngineError(RuntimeError):
    """A step failed. The requests in flight are lost; the engine has a fresh pool and serves the next ones."""


@dataclasses.dataclass
class EngineStats:
    """Sums since the engine was made.

    Attributes:
        dispatches, steps: dispatches made and steps run in them.
        prompt_tokens, output_tokens: computed prompt tokens, and output tokens given to requests.
        host_s: host seconds of planning, building and reading, waits for the device left out.
        wait_s: host seconds spent waiting for tokens.
    """

    dispatches: int = 0
    steps: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    host_s: float = 0.0
    wait_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A dispatched plan and what completing it said."""

    ticket: Ticket
    outcome: StepOutcome
    result: StepResult


class Engine:
    """Serves requests with one model on the device that jax has.

    Args:
        model: the architecture.
        params: its weights, as :func:`paxkv.models.checkpoint.load` gives them.
        config: limits and choices.
        tokenizer: turns prompts given as text into ids, and outputs into text.
        end_ids: the model's end tokens; None takes the tokenizer's.
        memory: another memory over the same pool: Orca's reservations, static batches.
        force: makes preemptions and evictions happen at chosen steps (tests).
        check: verify the scheduler's conservation laws after every step (slow).
        on_plan: called with each plan before it runs.
        on_step: called with (start, end, plan, result, outcome) after each plan's tokens were read.
        clock: seconds.

    Raises:
        ValueError: the limits do not fit the model or the device.
    """

    def __init__(
        self,
        model: DecoderConfig,
        params,
        config: EngineConfig | None = None,
        *,
        tokenizer=None,
        end_ids: Sequence[int] | None = None,
        memory: Memory | None = None,
        force: ForcePolicy | None = None,
        check: bool = False,
        on_plan: Callable[[StepPlan], None] | None = None,
        on_step: StepHook | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        config = config if config is not None else EngineConfig()
        limit = config.scheduler.max_model_len
        model = model.at_length(limit)
        if config.implementation is not None:
            model = dataclasses.replace(model, attention=config.implementation)
        if config.compile_cache is not None:
            use_compile_cache(config.compile_cache)
        self.model = model
        self.config = config
        self.tokenizer = tokenizer
        if end_ids is None:
            end_ids = tokenizer.end_ids if tokenizer is not None else ()
        self.end_ids = frozenset(end_ids)
        self.stats = EngineStats()
        self.log = CompileLog()
        self._on_plan, self._on_step, self._clock = on_plan, on_step, clock
        self._force, self._check = force, check
        if memory is None:
            memory = PagedMemory(config.cache(pool_pages(model, params, config)))
        self._fresh_memory = copy.deepcopy(memory)
        layout = model.cache_layout(memory.num_pages, memory.page_size, config.k_format, config.v_format)
        places = min(config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens)
        buckets = Buckets(places, config.scheduler.max_num_batched_tokens)
        builder = InputBuilder(
            buckets,
            page_size=memory.page_size,
            num_pages=memory.num_pages,
            max_pages=-(-limit // memory.page_size),
            max_history=limit,
            top=config.max_logprobs,
        )
        self.executor = DeviceExecutor(
            model,
            params,
            layout,
            builder=builder,
            # Twice: a finished sequence keeps its place until its last tokens are read, one dispatch after the next
            # sequence took its seat.
            num_places=2 * places,
            num_host_pages=config.num_host_pages,
            max_steps=config.scheduler.max_horizon,
            log=self.log,
        )
        self._driver = Driver(self)
        self._closed = False
        self._names = itertools.count()
        self._start_afresh()

    def _start_afresh(self) -> None:
        self.memory = copy.deepcopy(self._fresh_memory)
        self.scheduler = Scheduler(self.config.scheduler, self.memory, force=self._force, check=self._check)
        self._live: dict[int | str, Live] = {}
        self._lanes: dict[int, Lane] = {}
        self._owner: dict[int, Live] = {}
        self._places = list(range(self.executor.num_places - 1, -1, -1))
        self._flight: _Flight | None = None
        self._fetched = False
        self._late_ends: list[int | str] = []
        self._early_ends: list[int] = []
        self._changed: dict[int | str, Live] = {}
        self._outbox: list[RequestOutput] = []

    # --- requests --------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: int | str | None = None,
        arrival_s: float | None = None,
        salt: str | None = None,
        adapter: str | None = None,
    ) -> int | str:
        """Takes a request into the queue.

        Args:
            prompt: text, or token ids.
            sampling: how tokens are chosen; None is greedy with the defaults of :class:`SamplingParams`.
            request_id: a name; None makes one.
            arrival_s: when it was due, on the engine's clock; None is now. Latencies count from here.
            salt, adapter: keep its cached pages apart from those of others.

        Returns:
            The request's name.

        Raises:
            RequestRejected: it cannot be served; the message says why. No other request is touched.
        """
        self._require_open()
        sampling = sampling if sampling is not None else SamplingParams(temperature=0.0)
        name = request_id if request_id is not None else next(self._names)
        while request_id is None and (name in self._live or any(name == out.request_id for out in self._outbox)):
            name = next(self._names)
        ids = admission.prompt_ids(name, prompt, self.tokenizer, self.model.vocab_size)
        limits = (self.model.vocab_size, self.config.max_logprobs)
        admission.check_sampling(name, sampling, self.tokenizer, *limits)
        arrival = self._clock() if arrival_s is None else arrival_s
        try:
            request = Request(
                name,
                prompt_tokens=len(ids),
                max_tokens=sampling.max_tokens,
                num_seqs=sampling.num_seqs,
                beam=sampling.beam_width is not None,
                prompt_ids=tuple(ids),
                salt=salt,
                adapter=adapter,
            )
        except ValueError as error:
            raise RequestRejected(name, str(error)) from error
        detokenizers = admission.detokenizers(name, self.tokenizer, sampling.num_seqs)
        self.scheduler.submit(request)
        group = self.scheduler.group(name)
        end_ids = frozenset(sampling.stop_ids) | (frozenset() if sampling.ignore_eos else self.end_ids)
        seed = sampling.seed if sampling.seed is not None else int.from_bytes(os.urandom(4), "little")
        transcripts = []
        for index, (sequence, detokenizer) in enumerate(zip(group.seqs, detokenizers, strict=True)):
            key = request_seed(seed, ids, index)
            lane = Lane(sequence, index, ids, sampling, key, tuple(sorted(end_ids)))
            transcripts.append(Transcript(lane, detokenizer))
        beam = None
        if sampling.beam_width is not None:
            beam = BeamSearch(
                sampling.beam_width,
                tuple(sorted(end_ids)),
                length_penalty=sampling.length_penalty,
                early_stopping=sampling.early_stopping,
                max_tokens=group.target,
            )
        live = Live(name, sampling, tuple(ids), group, transcripts, arrival, end_ids, beam)
        self._live[name] = live
        for item in transcripts:
            self._lanes[item.lane.sequence.seq_id] = item.lane
            self._owner[item.lane.sequence.seq_id] = live
        return name

    def abort(self, request_id: int | str) -> bool:
        """Drops a request wherever it is; its last output has the reason ``abort``. False if it is not in flight."""
        live = self._live.get(request_id)
        if live is None:
            return False
        self.scheduler.abort(request_id)
        self._close_request(live, "abort")
        return True

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or any output was not handed out."""
        return bool(self._live or self._outbox)

    @property
    def counters(self) -> Counters:
        """The scheduler's counters."""
        return self.scheduler.counters

    # --- running ---------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Carries out one plan and returns the requests whose output changed, each name once.

        Raises:
            EngineError: the step failed. All requests in flight have ended with the reason ``error``, which the
                next call returns; the pool is fresh, and new requests are served.
        """
        outputs = {}
        for output in self._run_plan():
            if output.request_id in outputs:  # its name was taken again, and that one ended too
                self._outbox.append(output)
            else:
                outputs[output.request_id] = output
        for name in [name for name in self._changed if name not in outputs]:
            outputs[name] = self._changed.pop(name).output()
        return list(outputs.values())

    def _run_plan(self) -> list[RequestOutput]:
        """Carries out one plan and returns the requests that ended; those that grew are in ``_changed``."""
        self._require_open()
        begin, waited = self._clock(), self.stats.wait_s
        try:
            self._advance()
        except BaseException as error:
            self._fail()
            if not isinstance(error, Exception):
                raise  # an interrupt in the middle of a step costs as much as a failure, and stays an interrupt
            raise EngineError(f"a step failed, the requests in flight are lost: {error}") from error
        self.stats.host_s += self._clock() - begin - (self.stats.wait_s - waited)
        done, self._outbox = self._outbox, []
        return done

    def _advance(self) -> None:
        scheduler = self.scheduler
        plan = scheduler.schedule()
        if plan is None:
            self._land()
            return
        if self._on_plan is not None:
            self._on_plan(plan)
        for admitted in plan.admitted:
            live = self._live[admitted.request_id]
            if not admitted.resumed:
                live.cached_tokens = admitted.cached_tokens
            for item in live.transcripts:
                item.lane.padding = live.group.padding
        for preempted in plan.preempted:
            live = self._live[preempted.request_id]
            for item in live.transcripts:
                self._free_place(item.lane)
                item.lane.held = None
                if live.wide:
                    # Some of its sequences may have sampled while others were still being computed: they will again.
                    item.lane.known = live.group.known
        steps = self._steps_of(plan)
        scheduler.commit(steps)
        if self._flight is not None and self._needs_tokens(plan):
            self._read()
        seqs = itertools.chain(plan.decodes, (chunk.seq_id for chunk in plan.prefills))
        # Rows that a static batch keeps after their end belong to nobody.
        lives = {id(live): live for live in map(self._owner.get, seqs) if live is not None}.values()
        tops = any(live.wants_tops for live in lives)
        for lane in map(self._lanes.__getitem__, plan.decodes):
            if not lane.done:
                self._take_place(lane)
        ticket = self.executor.dispatch(plan, self._lanes, steps, siblings=self._siblings, tops=tops, clock=self._clock)
        self.stats.dispatches += 1
        self.stats.steps += steps
        self.stats.prompt_tokens += plan.prefill_tokens
        if ticket.work is not None:
            for lane in ticket.work.sampled:
                lane.known += steps
        self._land()
        if self._must_wait(plan, lives):
            self._run_now(ticket)
            self._apply_ends()
            return
        result = StepResult(steps)
        outcome = scheduler.complete(result)
        self._flight, self._fetched = _Flight(ticket, outcome, result), False
        self._apply_ends()

    def _steps_of(self, plan: StepPlan) -> int:
        if plan.horizon == 1:
            return 1
        if any(self._lanes[seq_id].variant == "full" for seq_id in plan.decodes):
            return 1
        return min(plan.horizon, self.executor.max_steps)

    def _needs_tokens(self, plan: StepPlan) -> bool:
        """Whether the plan computes tokens whose ids the host has not read yet."""
        for chunk in plan.prefills:
            lane = self._lanes[chunk.seq_id]
            if chunk.start + chunk.count - lane.padding > len(lane.ids):
                return True
        return any(
            not (lane.fetched or lane.done) and (lane.slot < 0 or lane.variant == "full")
            for lane in map(self._lanes.__getitem__, plan.decodes)
        )

    def _must_wait(self, plan: StepPlan, lives) -> bool:
        """Whether the next plan needs to know this one's tokens."""
        if not self.config.overlap or any(live.wide or live.transcripts[0].lane.variant == "full" for live in lives):
            return True
        if self.memory.finds_content:
            # The last pages of a sequence are found by content only if its ids are known before it leaves.
            return any(
                item.lane.known - item.lane.prompt_len >= live.target for live in lives for item in live.transcripts
            )
        return False

    def _siblings(self, seq_id: int) -> list[Lane]:
        """The lanes that sample from the last token of a prompt: its own, and at first all that share it."""
        live = self._owner[seq_id]
        lane = self._lanes[seq_id]
        chosen = [lane]
        if live.wide and lane.index == 0 and lane.known == lane.prompt_len:
            own = {job[0].seq_id for job in live.group.jobs}
            chosen += [item.lane for item in live.transcripts[1:] if item.lane.sequence.seq_id not in own]
        for each in chosen:
            self._take_place(each)
        return chosen

    def _run_now(self, ticket: Ticket) -> None:
        """Completes a plan with its tokens in hand: what ended, and which beams continue which."""
        outputs = self._wait(ticket)
        intake = take_tokens(ticket, outputs, self._owner)
        self.stats.output_tokens += intake.tokens
        ended = self._due_ends(ticket.plan, intake.ended)
        tokens = self._sampled_ids(ticket, outputs)
        result = StepResult(ticket.num_steps, ended=tuple(ended), tokens=tokens, parents=intake.parents)
        outcome = self.scheduler.complete(result)
        self._finish(ticket, result, outcome)

    def _due_ends(self, plan: StepPlan, ended: list[int]) -> list[int]:
        """The ends that the scheduler can take now: those of a request whose sequences are all computed."""
        self._early_ends += ended
        due, early = [], []
        for seq_id in self._early_ends:
            live = self._owner.get(seq_id)
            if live is None:
                continue  # aborted since
            complete = live.group.state is GroupState.RUNNING and (
                live.group.jobs or not live.group.decoding or plan.decodes
            )
            (due if complete and live.group.completes(plan.prefills) else early).append(seq_id)
        self._early_ends = early
        return due

    def _land(self) -> None:
        """Reads the tokens of the dispatch before, and hands out what they changed."""
        flight = self._flight
        if flight is None:
            return
        if not self._fetched:
            self._read()
        self._flight = None
        self._finish(flight.ticket, flight.result, flight.outcome)

    def _read(self) -> None:
        flight = self._flight
        assert flight is not None
        outputs = self._wait(flight.ticket)
        intake = take_tokens(flight.ticket, outputs, self._owner)
        self.stats.output_tokens += intake.tokens
        self._learn(flight.ticket)
        self._late_ends += [self._owner[seq_id].request_id for seq_id in intake.ended]
        self._fetched = True

    def _apply_ends(self) -> None:
        """Sequences whose end token was read late leave the scheduler now that no plan is open."""
        ends, self._late_ends = self._late_ends, []
        for request_id in ends:
            self.scheduler.end(request_id)
        if len(self._lanes) > 2 * len(self._owner) + 64:
            # A plan names only what the scheduler holds: closed requests, until then, in a static batch.
            held = [seq.seq_id for group in self.scheduler.groups() for seq in group.seqs]
            self._lanes = {seq_id: self._lanes[seq_id] for seq_id in held}

    def _wait(self, ticket: Ticket) -> StepOutputs | None:
        begin = self._clock()
        outputs = self.executor.fetch(ticket)
        self.stats.wait_s += self._clock() - begin
        return outputs

    def _sampled_ids(self, ticket: Ticket, outputs: StepOutputs | None) -> dict[int, tuple[int, ...]] | None:
        """Every token of the dispatch, those behind an end too: their keys and values are in the pages."""
        if ticket.work is None or outputs is None or not self.memory.finds_content:
            return None
        rows = outputs.tokens.T.tolist()
        return {lane.sequence.seq_id: tuple(rows[row]) for row, lane in enumerate(ticket.work.sampled)}

    def _learn(self, ticket: Ticket) -> None:
        """Tells the scheduler the ids of requests of one sequence, so that their pages are found by content."""
        if ticket.work is None or not self.memory.finds_content:
            return
        for lane in ticket.work.sampled:
            live = self._owner.get(lane.sequence.seq_id)
            if live is None or live.wide:
                continue
            group = live.group
            if group.ids is not None:
                self.scheduler.learn(live.request_id, lane.ids[len(group.ids) :])

    # --- endings ---------------------------------------------------------------------------------

    def _finish(self, ticket: Ticket, result: StepResult, outcome: StepOutcome) -> None:
        """Hands out what a dispatch changed and closes the requests that have all their tokens."""
        now = self._clock()
        if ticket.work is not None:
            owner = self._owner
            for live in dict.fromkeys(owner.get(lane.sequence.seq_id) for lane in ticket.work.sampled):
                if live is not None:
                    self._report(live, now)
        if self._on_step is not None:
            self._on_step(ticket.start_s, now, ticket.plan, result, outcome)

    def _report(self, live: Live, now: float) -> None:
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
            self._close_request(live, None)
        elif grown:
            self._changed[live.request_id] = live

    def _close_request(self, live: Live, reason) -> None:
        self._outbox.append(live.output(self._clock(), reason, self.tokenizer))
        for item in live.transcripts:
            item.lane.done = True
            self._free_place(item.lane)
            self._owner.pop(item.lane.sequence.seq_id, None)
            # A static batch keeps the row of a finished sequence, and an end seen late may be in a dispatch: the lane
            # stays for as long as plans can name it.
        del self._live[live.request_id]
        self._changed.pop(live.request_id, None)

    def _take_place(self, lane: Lane) -> None:
        if lane.slot < 0:
            lane.slot = self._places.pop()

    def _free_place(self, lane: Lane) -> None:
        if lane.slot >= 0:
            self._places.append(lane.slot)
            lane.slot = -1

    def _fail(self) -> None:
        """Ends everything in flight and starts with a fresh pool, or closes the engine if even that fails."""
        now = self._clock()
        lost = [live.output(now, "error", self.tokenizer) for live in self._live.values()]
        lost = [out for out in self._outbox if out.finished] + lost
        try:
            self.executor.reset()
            self._start_afresh()
        except Exception:
            self._closed = True
            raise
        self._outbox = lost

    def _require_open(self) -> None:
        if self._closed:
            raise EngineError("the engine is closed; make a new one")

    # --- conveniences ----------------------------------------------------------------------------

    def generate(
        self, prompts: Sequence[str | Sequence[int]], sampling: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Serves all prompts and returns their outputs in order.

        Args:
            prompts: texts or lists of token ids.
            sampling: one for all, or one for each.

        A request that cannot be served comes back with ``refused`` set; the others are served.
        """
        require(not isinstance(prompts, str), "generate takes a list of prompts, got one text; write [prompt]")
        if not isinstance(sampling, Sequence):
            sampling = [sampling] * len(prompts)
        require(
            len(sampling) == len(prompts),
            f"one SamplingParams for all prompts or one for each, got {len(sampling)} for {len(prompts)}",
        )
        done: dict[int | str, RequestOutput] = {}
        order: list[int | str] = []
        for prompt, params in zip(prompts, sampling, strict=True):
            try:
                order.append(self.add_request(prompt, params))
            except RequestRejected as refusal:
                order.append(refusal.request_id)
                ids = tuple(prompt) if isinstance(prompt, Iterable) and not isinstance(prompt, str) else ()
                done[refusal.request_id] = RequestOutput(
                    refusal.request_id, ids, (), True, RequestTimes(self._clock()), refused=refusal.reason
                )
        others = []
        waiting = set(order) - done.keys()
        try:
            while waiting:
                for output in self._run_plan():
                    if output.request_id in waiting:
                        waiting.remove(output.request_id)
                        done[output.request_id] = output
                    else:
                        others.append(output)
        finally:
            self.put_back(others)
        return [done[name] for name in order]

    def stream(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None, **options
    ) -> Iterator[RequestOutput]:
        """Serves one request and yields it each time that it has grown; the last one is finished.

        Leaving the loop early aborts the request.
        """
        name = self.add_request(prompt, sampling, **options)
        others: list[RequestOutput] = []
        try:
            while name in self._live or any(output.request_id == name for output in self._outbox):
                for output in self.step():
                    if output.request_id == name:
                        yield output
                    else:
                        others.append(output)
        finally:
            self.forget(name)
            self.put_back(others)

    def forget(self, request_id: int | str) -> None:
        """Aborts a request if it still runs, and hands out nothing of it any more."""
        self.abort(request_id)
        self._outbox = [output for output in self._outbox if output.request_id != request_id]

    def put_back(self, outputs: list[RequestOutput]) -> None:
        """The next steps hand these out: what ended as it is, what runs on as it stands then."""
        self._outbox = [output for output in outputs if output.finished] + self._outbox
        for name in {output.request_id for output in outputs if not output.finished} & self._live.keys():
            self._changed[name] = self._live[name]

    def agenerate(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None, **options
    ) -> AsyncIterator[RequestOutput]:
        """Like :meth:`stream` for several callers at once: they share the engine's steps."""
        return self._driver.stream(prompt, sampling, **options)

    def warm_up(self, variants: Sequence[str] = ("greedy",), *, tops: bool = False) -> list[tuple[StepKey, float]]:
        """Compiles every bucket beforehand.

        Args:
            variants: of sampling, see :attr:`SamplingParams.variant`.
            tops: whether requests will ask for log-probabilities, ``best_of`` or beams.

        Returns:
            Each step with the seconds that it cost. From here on a compilation is explained in ``log``.
        """
        keys = []
        for variant in variants:
            for top in (0, self.config.max_logprobs) if tops else (0,):
                for bucket in self.executor.builder.buckets.all():
                    if bucket.kind == "copies":
                        continue
                    size = bucket.sizes
                    keys.append(StepKey(bucket.kind, size[0], size[-1], variant, top))
        costs = self.executor.warm_up(keys)
        self.log.warmed_up()
        return costs

    def close(self) -> None:
        """Ends all requests in flight and gives the pool back."""
        if self._closed:
            return
        for request_id in list(self._live):
            self.abort(request_id)
        self._closed = True
        self.executor.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception) -> None:
        self.close()
