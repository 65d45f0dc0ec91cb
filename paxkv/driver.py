"""Several asynchronous callers over one engine: they wait for their own tokens and share its steps.

A single task, the pump, runs steps in a worker thread while any request is unfinished. A lock, which waiters get in
turn, stands between a step and a new request or an abort, so the engine itself never sees two calls at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paxkv.engine import Engine
    from paxkv.output import RequestOutput


class Driver:
    """Runs the steps of an engine for asynchronous callers, which must all live in one event loop at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock: asyncio.Lock
        self._pump: asyncio.Task | None = None
        self._queues: dict[int | str, asyncio.Queue[RequestOutput | Exception]] = {}

    async def stream(self, prompt, sampling=None, **options) -> AsyncIterator[RequestOutput]:
        """Serves one request; see :meth:`paxkv.engine.Engine.agenerate`.

        Raises:
            RequestRejected: the request cannot be served.
            EngineError: a step failed, and with it every request in flight.
        """
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._queues:
                raise RuntimeError("the engine already serves callers of another event loop; share one loop")
            self._loop, self._lock, self._pump = loop, asyncio.Lock(), None
        queue: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        async with self._lock:
            name = self._engine.add_request(prompt, sampling, **options)
            self._queues[name] = queue
        if self._pump is None or self._pump.done():
            self._pump = loop.create_task(self._run())
        finished = False
        try:
            while not finished:
                output = await queue.get()
                if isinstance(output, Exception):
                    raise output
                finished = output.finished
                yield output
        finally:
            try:
                if not finished:
                    async with self._lock:
                        self._engine.forget(name)
            finally:  # last, so that what a step gives until then is not taken for somebody else's
                self._queues.pop(name, None)

    async def _run(self) -> None:
        others: list[RequestOutput] = []  # of requests that did not come this way
        try:
            while self._queues:
                try:
                    async with self._lock:
                        if not self._engine.has_work:
                            return
                        outputs = await asyncio.to_thread(self._engine.step)
                except Exception as error:
                    for queue in self._queues.values():
                        queue.put_nowait(error)
                    return
                for output in outputs:
                    queue = self._queues.get(output.request_id)
                    if queue is not None:
                        queue.put_nowait(output)
                    else:
                        others.append(output)
                await asyncio.sleep(0)
        finally:
            self._engine.put_back(others)
