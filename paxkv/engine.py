"""The engine: requests in, tokens out. It carries out every plan that the scheduler makes, on real pages.

One call of :meth:`Engine.step` is one plan, see :mod:`paxkv.plan_loop`.
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
from paxkv.inflight import InFlight
from paxkv.metrics import Counters
from paxkv.models.decoder import DecoderConfig
from paxkv.output import Live, RequestOutput, RequestTimes, Transcript
from paxkv.plan_loop import EngineStats, Hooks, PlanLoop, StepHook
from paxkv.request import Request
from paxkv.sampling import SamplingParams, request_seed
from paxkv.sched.block_manager import PagedMemory
from paxkv.sched.events import RequestRejected
from paxkv.sched.memory import Memory
from paxkv.sched.plan import StepPlan
from paxkv.sched.scheduler import ForcePolicy, Scheduler
from paxkv.steps.beam import BeamSearch
from paxkv.steps.buckets import Buckets
from paxkv.steps.compile_log import CompileLog, use_compile_cache
from paxkv.steps.executor import DeviceExecutor
from paxkv.steps.inputs import InputBuilder, StepKey
from paxkv.steps.lane import Lane

__all__ = ["Engine", "EngineConfig", "EngineError", "EngineStats"]


class EngineError(RuntimeError):
    """A step failed. The requests in flight are lost; the engine has a fresh pool and serves the next ones."""


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
        self._clock, self._hooks = clock, Hooks(clock, on_plan, on_step)
        self._force, self._check = force, check
        if memory is None:
            memory = PagedMemory(config.cache(pool_pages(model, params, config)))
        self._fresh_memory = copy.deepcopy(memory)
        layout = model.cache_layout(memory.num_pages, memory.page_size, config.k_format, config.v_format)
        places = config.scheduler.max_step_seqs
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
        self.inflight = InFlight(self.executor.num_places, self.tokenizer)
        self._loop = PlanLoop(
            self.scheduler,
            self.executor,
            self.inflight,
            self.stats,
            overlap=self.config.overlap,
            hooks=self._hooks,
        )

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
        while request_id is None and name in self.inflight:
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
        self.inflight.add(Live(name, sampling, tuple(ids), group, transcripts, arrival, end_ids, beam))
        return name

    def abort(self, request_id: int | str) -> bool:
        """Drops a request wherever it is; its last output has the reason ``abort``. False if it is not in flight."""
        live = self.inflight.live.get(request_id)
        if live is None:
            return False
        self.scheduler.abort(request_id)
        self.inflight.close(live, self._clock(), "abort")
        return True

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished or any output was not handed out."""
        return bool(self.inflight)

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
        self._run_plan()
        return self.inflight.take_all()

    def _run_plan(self) -> None:
        self._require_open()
        try:
            self._loop.advance()
        except BaseException as error:
            self._fail()
            if not isinstance(error, Exception):
                raise  # an interrupt in the middle of a step costs as much as a failure, and stays an interrupt
            raise EngineError(f"a step failed, the requests in flight are lost: {error}") from error

    def _fail(self) -> None:
        """Ends everything in flight and starts with a fresh pool, or closes the engine if even that fails."""
        lost = self.inflight.lost(self._clock())
        try:
            self.executor.reset()
            self._start_afresh()
        except Exception:
            self._closed = True
            raise
        self.inflight.outbox = lost

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
                self._run_plan()
                for output in self.inflight.take_ended():
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
            while name in self.inflight:
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
        self.inflight.forget(request_id)

    def put_back(self, outputs: list[RequestOutput]) -> None:
        """The next steps hand these out: what ended as it is, what runs on as it stands then."""
        self.inflight.put_back(outputs)

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
        for request_id in list(self.inflight.live):
            self.abort(request_id)
        self._closed = True
        self.executor.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception) -> None:
        self.close()
