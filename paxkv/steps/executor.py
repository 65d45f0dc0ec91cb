"""The device executor: carries out a plan's swaps, copies and step on the pages, and brings the tokens back.

The pages are donated to every step and replaced by its result. Work is dispatched without waiting for it; what a plan
moves is ordered by the device, which runs dispatches in turn: pages leave for the host before they can be written
again, come back next, are copied last, and then the step runs (paper section 4.3 and 4.5).
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from paxkv.cache.pages import KVPages, PageContent, PageLayout, copy_pages, init, swap_in, swap_out
from paxkv.cache.tiers import HostPool
from paxkv.compat import step_compiler_options
from paxkv.models.decoder import DecoderConfig
from paxkv.sched.plan import StepPlan
from paxkv.steps.compile_log import CompileLog
from paxkv.steps.inputs import Form, InputBuilder, StepInputs, StepKey, StepWork, pack, unpack
from paxkv.steps.lane import Lane
from paxkv.steps.step import StepOutputs, decode_steps, mixed_step


@dataclasses.dataclass(frozen=True)
class Ticket:
    """A dispatched plan whose tokens are still on the device.

    Attributes:
        plan: what was dispatched.
        num_steps: steps of it.
        work: its inputs and sampled lanes; None if it only moved pages.
        outputs: on the device.
        start_s: clock when it was begun.
    """

    plan: StepPlan
    num_steps: int
    work: StepWork | None
    outputs: StepOutputs | None
    start_s: float


@functools.cache
def _step_program(kind: str, dtype: str) -> Callable:
    """A jitted step, shared by all executors of a process: what one has compiled serves the others too."""
    step = decode_steps if kind == "decode" else mixed_step

    def packed(config: DecoderConfig, params, pages: KVPages, newest: jax.Array, flat: jax.Array, form: Form, **static):
        return step(config, params, pages, newest, unpack(flat, form), **static)

    packed.__name__ = step.__name__  # the compile log shows it
    return jax.jit(
        packed,
        static_argnames=("config", "form", "variant", "top", "max_steps"),
        donate_argnums=(2, 3),
        compiler_options=step_compiler_options(dtype),
    )


@functools.cache
def _page_programs() -> dict[str, Callable]:
    """The jitted page moves, shared likewise."""
    return {
        "copy": jax.jit(copy_pages, donate_argnums=0),
        "swap_out": jax.jit(swap_out),
        "swap_in": jax.jit(swap_in, donate_argnums=0),
    }


class DeviceExecutor:
    """Runs plans on the device that jax has.

    Args:
        config: the model.
        params: its weights, on the device.
        layout: the pool.
        builder: makes inputs.
        num_places: sequences that can run together; each keeps its newest token in a place on the device.
        num_host_pages: pages of the host pool that swapping uses.
        max_steps: most decode steps of one dispatch.
        log: counts and explains compilations.

    Attributes:
        pages: the cache now; an earlier value is gone, since steps are given it to write into.
    """

    def __init__(
        self,
        config: DecoderConfig,
        params,
        layout: PageLayout,
        *,
        builder: InputBuilder,
        num_places: int,
        num_host_pages: int = 0,
        max_steps: int = 1,
        log: CompileLog | None = None,
    ) -> None:
        self.layout = layout
        self.params = params
        self.builder = builder
        self.num_places = num_places
        self.max_steps = max_steps
        self.log = log if log is not None else CompileLog()
        self.host = HostPool(layout, num_host_pages) if num_host_pages else None
        self.config = config
        self.pages: KVPages
        self.newest: jax.Array
        self.reset()

    def reset(self) -> None:
        """A fresh pool: every page is empty."""
        self.pages = init(self.layout)
        self.newest = jnp.zeros(self.num_places, jnp.int32)

    def close(self) -> None:
        """Gives the pool back; the executor can run nothing after that."""
        for leaf in jax.tree.leaves((self.pages, self.newest)):
            leaf.delete()

    def dispatch(
        self,
        plan: StepPlan,
        lanes: Mapping[int, Lane],
        num_steps: int,
        *,
        siblings: Callable[[int], Sequence[Lane]],
        tops: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> Ticket:
        """Starts a plan; the lanes then know ``num_steps`` more tokens (one, where a prompt ends).

        Raises:
            ValueError: the plan does not fit the pool. Nothing was started then.
        """
        start = clock()
        work = self.builder.build(plan, lanes, num_steps, siblings, tops)
        self._move(plan)
        outputs = None
        if work is not None:
            outputs = self.run(work.key, work.inputs)
        return Ticket(plan, num_steps, work, outputs, start)

    def run(self, key: StepKey, inputs: StepInputs) -> StepOutputs:
        """One step on the device."""
        flat, form = pack(inputs)
        options: dict = {"variant": key.variant, "top": key.top}
        if key.kind == "decode":
            options["max_steps"] = self.max_steps if key.variant != "full" else 1
        # The one transfer of a step, allowed by name, so that a transfer guard can forbid every other. The call itself
        # sends the array: a device_put before it costs the host a third as much as all else that it does for a step.
        with self.log.watch(key), jax.transfer_guard_host_to_device("allow"):
            self.pages, self.newest, outputs = _step_program(key.kind, self.config.dtype)(
                self.config, self.params, self.pages, self.newest, flat, form, **options
            )
        return outputs

    def fetch(self, ticket: Ticket) -> StepOutputs | None:
        """Waits for the tokens of a ticket: numpy arrays, the steps that ran."""
        if ticket.outputs is None:
            return None
        outputs = jax.device_get(ticket.outputs)
        return jax.tree.map(lambda x: x[: ticket.num_steps], outputs)

    def warm_up(self, keys: Sequence[StepKey]) -> list[tuple[StepKey, float]]:
        """Compiles the steps of ``keys`` and every page move; returns each with the seconds that it cost."""
        costs = []
        for key in keys:
            start = time.perf_counter()
            jax.block_until_ready(self.run(key, self.builder.empty(key)))
            costs.append((key, time.perf_counter() - start))
        for count in self.builder.buckets.pairs.sizes:
            nowhere = np.full(count, -1, np.int32)
            self._copy(nowhere, nowhere)
            if self.host is not None:
                self._put_in(nowhere, jax.device_get(self._take_out(nowhere)))
        return costs

    def _move(self, plan: StepPlan) -> None:
        for device, host in self._pieces(plan.swap_out):
            self._host_pool().put(host, self._take_out(device))
        for host, device in self._pieces(plan.swap_in):
            self._put_in(device, self._host_pool().get(host))
        for source, target in self._pieces(plan.copies):
            self._copy(source, target)

    def _take_out(self, pages: np.ndarray) -> PageContent:
        with self.log.watch(f"swaps[{len(pages)}]"):
            return _page_programs()["swap_out"](self.pages, jax.device_put(pages))

    def _put_in(self, pages: np.ndarray, content: PageContent) -> None:
        with self.log.watch(f"swaps[{len(pages)}]"):
            self.pages = _page_programs()["swap_in"](self.pages, jax.device_put(pages), jax.device_put(content))

    def _copy(self, source: np.ndarray, target: np.ndarray) -> None:
        with self.log.watch(f"copies[{len(source)}]"):
            self.pages = _page_programs()["copy"](self.pages, jax.device_put(source), jax.device_put(target))

    def _host_pool(self) -> HostPool:
        if self.host is None:
            raise ValueError("the plan swaps and there is no host pool; set num_host_pages")
        return self.host

    def _pieces(self, pairs: Sequence[tuple[int, int]]):
        """The pairs as two arrays, padded with -1 to a bucket, at most the largest bucket at a time."""
        buckets = self.builder.buckets
        largest = buckets.pairs.limit
        for begin in range(0, len(pairs), largest):
            piece = pairs[begin : begin + largest]
            array = np.full((2, buckets.copies(len(piece))), -1, np.int32)
            array[:, : len(piece)] = np.asarray(piece, np.int32).T
            yield array[0], array[1]
