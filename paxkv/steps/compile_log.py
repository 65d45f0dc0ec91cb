"""Who compiles what, and why: compilations counted and explained, implicit transfers refused.

JAX reports each trace, lowering and compilation to listeners, on the thread that runs it. A :class:`CompileLog` listens
while a step is dispatched and files what it hears under the step's bucket. Warm-up names the buckets that it has
compiled; whatever compiles after it is an event that a run reports and that a test forbids.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import threading
from collections.abc import Hashable, Iterator

import jax

_TRACE = "/jax/core/compile/jaxpr_trace_duration"
_LOWER = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_COMPILE = "/jax/core/compile/backend_compile_duration"
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


@dataclasses.dataclass(frozen=True)
class Compilation:
    """One program that XLA compiled (or took from the persistent cache).

    Attributes:
        bucket: the step that needed it, as text.
        program: name of the jitted function.
        reason: why it was new.
        trace_s, lower_s, compile_s: seconds. Functions traced inside it count as its own.
        cached: whether the persistent cache had it; ``compile_s`` is then the time to read it.
        warm: whether it came after warm-up.
    """

    bucket: str
    program: str
    reason: str
    trace_s: float
    lower_s: float
    compile_s: float
    cached: bool
    warm: bool

    @property
    def seconds(self) -> float:
        """All that it cost."""
        return self.trace_s + self.lower_s + self.compile_s


class CompileForbidden(RuntimeError):
    """Something compiled after warm-up, and the log forbids it."""


class CompileLog:
    """Counts compilations by bucket.

    Args:
        forbid: whether a compilation after warm-up raises :class:`CompileForbidden`. The step has run by then, so that
            nothing is lost; the error is for tests.

    Attributes:
        entries: the compilations, oldest first.
        is_warm: whether warm-up is over.
    """

    def __init__(self, *, forbid: bool = False) -> None:
        self.forbid = forbid
        self.entries: list[Compilation] = []
        self.is_warm = False
        self._seen: collections.Counter[Hashable] = collections.Counter()

    def warmed_up(self) -> None:
        """Ends warm-up."""
        self.is_warm = True

    @property
    def after_warm_up(self) -> tuple[Compilation, ...]:
        """The compilations that came after warm-up."""
        return tuple(entry for entry in self.entries if entry.warm)

    @property
    def seconds(self) -> float:
        """What all of them cost."""
        return sum(entry.seconds for entry in self.entries)

    @contextlib.contextmanager
    def watch(self, bucket: Hashable) -> Iterator[None]:
        """Files what this thread compiles inside under ``bucket``. Logs may watch inside each other: both hear it.

        Raises:
            CompileForbidden: after the body, if it compiled something after warm-up and the log forbids that.
        """
        ear = _Ear()
        try:
            with ear:
                yield
        finally:
            # Heard even if the step failed: what it compiled is there for the next one.
            new = [self.record(bucket, program, **costs) for program, costs in ear.heard]
            self._seen[bucket] += 1
        if self.forbid and self.is_warm and new:
            raise CompileForbidden("nothing may compile after warm-up: " + "; ".join(map(_line, new)))

    def record(
        self,
        bucket: Hashable,
        program: str,
        *,
        trace_s: float = 0.0,
        lower_s: float = 0.0,
        compile_s: float = 0.0,
        cached: bool = False,
    ) -> Compilation:
        """Files one compilation; for those that no listener hears, such as ahead-of-time compilation elsewhere."""
        entry = Compilation(
            str(bucket), program, self._reason(bucket), trace_s, lower_s, compile_s, cached, self.is_warm
        )
        self.entries.append(entry)
        return entry

    def _reason(self, bucket: Hashable) -> str:
        if self._seen[bucket]:
            return (
                f"{bucket} had run {self._seen[bucket]} times: a shape, dtype, static option or placement that is "
                "not part of the bucket changed"
            )
        if not self.is_warm:
            return f"first use of bucket {bucket}"
        return f"after warm-up: {bucket} was not warmed up"

    def report(self) -> str:
        """One line per compilation, then the totals."""
        warm = self.after_warm_up
        total = f"{len(self.entries)} compilations, {self.seconds:.2f} s; {len(warm)} after warm-up"
        return "\n".join([*map(_line, self.entries), total])


class _Ear:
    """Listens to JAX on this thread while it is entered.

    Attributes:
        heard: (program, its costs) of each compilation, in order.
    """

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict]] = []
        self._thread = threading.get_ident()
        self._costs: dict = {"trace_s": 0.0, "lower_s": 0.0, "cached": False}

    def _duration(self, event: str, seconds: float, **details: object) -> None:
        if threading.get_ident() != self._thread:
            return
        if event == _TRACE:
            # The outermost function is reported last and its time contains those traced inside it.
            self._costs["trace_s"] = max(self._costs["trace_s"], seconds)
        elif event == _LOWER:
            self._costs["lower_s"] += seconds
        elif event == _COMPILE:
            self.heard.append((str(details.get("fun_name", "unnamed")), {**self._costs, "compile_s": seconds}))
            self._costs = {"trace_s": 0.0, "lower_s": 0.0, "cached": False}

    def _event(self, event: str, **details: object) -> None:
        if event == _CACHE_HIT and threading.get_ident() == self._thread:
            self._costs["cached"] = True

    def __enter__(self) -> _Ear:
        jax.monitoring.register_event_duration_secs_listener(self._duration)
        jax.monitoring.register_event_listener(self._event)
        return self

    def __exit__(self, *error: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._duration)
        jax.monitoring.unregister_event_listener(self._event)


def _line(entry: Compilation) -> str:
    source = " (read from the cache)" if entry.cached else ""
    return f"{entry.bucket}: {entry.program} {entry.seconds:.2f} s{source}: {entry.reason}"


def no_implicit_transfers() -> contextlib.AbstractContextManager[None]:
    """Refuses transfers that nobody wrote down: a step gets its inputs by ``jax.device_put`` and gives its results by
    ``jax.device_get``. A Python number or numpy array handed to a jitted function raises inside."""
    return jax.transfer_guard("disallow")


def use_compile_cache(path: str | os.PathLike[str], *, min_compile_s: float = 0.5) -> None:
    """Keeps compiled programs in a folder, for this process and later ones. Call it before anything compiles.

    Args:
        path: the folder; made when the first program is stored.
        min_compile_s: programs that compile faster are not stored.
    """
    jax.config.update("jax_compilation_cache_dir", os.fspath(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", min_compile_s)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
