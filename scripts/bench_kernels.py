"""The attention kernels on the device that is there: every implementation, over named calls.

    python -m scripts.bench_kernels                       (all calls; on a CPU the small ones, about a minute)
    python -m scripts.bench_kernels --small               (the small ones, for CPUs)
    python -m scripts.bench_kernels --specs=decode_64x4096,prefill_2048 --implementations=mosaic_gpu,xla
    python -m scripts.bench_kernels --table=runs/bench_kernels.json        (prints the tables of a run)

One JSON file is written, with a row for each call and implementation: seconds, tokens per second, the bytes of keys and
values that the call has to read and the bandwidth that this makes, as a share of what the device itself reaches when it
copies. With an NVIDIA GPU, jax's own op and, where torch is installed, its scaled_dot_product_attention over a
contiguous cache stand beside ours.

Figure 18a of the paper (attention over pages against attention over a contiguous cache) is answered in our own kernel:
the same call with pages of 16 in random order, and with each row in one page.

Implementations take turns, round by round, and a ratio compares times of one round: the median of these is shown.
"""

from __future__ import annotations

import datetime
import importlib.util
import json
import pathlib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags

from experiments.live.attention import measure_figure, names_here
from pallas_kernels import implementations, platforms
from pallas_kernels.paged_attention import bench
from pallas_kernels.paged_attention.api import IMPLEMENTATIONS
from pallas_kernels.paged_attention.arg_specs import ARG_SPECS, FIGURE_18A, SMALL, ArgSpec
from paxkv.record import environment, write_atomically
from scripts.peers.tables import markdown

ROOT = pathlib.Path(__file__).resolve().parents[1]
JAX_OP, TORCH = "jax's own", "torch sdpa"

_SMALL = flags.DEFINE_bool("small", None, "the small calls; the default on a CPU")
_SPECS = flags.DEFINE_list("specs", None, "names of calls, instead of all")
_FIGURE = flags.DEFINE_bool("figure_18a", True, "answer figure 18a")
_NAMES = flags.DEFINE_list("implementations", None, "some of ours; all that are for this platform, without reference")
_REPEATS = flags.DEFINE_integer("repeats", 5, "rounds", lower_bound=1)
_SECONDS = flags.DEFINE_float("seconds", 0.1, "that a timing should take at least", lower_bound=0.0)
_SEED = flags.DEFINE_integer("seed", 0, "seed of contents and of the order of pages", lower_bound=0)
_OUT = flags.DEFINE_string("out", str(ROOT / "runs" / "bench_kernels.json"), "the file that is written")
_TABLE = flags.DEFINE_string("table", None, "a file that was written: print its tables, measure nothing")


def chosen_specs() -> list[ArgSpec]:
    """The calls of --specs, or all, or the small ones."""
    if _SPECS.value is not None:
        unknown = [name for name in _SPECS.value if name not in ARG_SPECS]
        if unknown or not _SPECS.value:
            raise ValueError(f"--specs={','.join(_SPECS.value)} must name some of {', '.join(ARG_SPECS)}")
        return [ARG_SPECS[name] for name in _SPECS.value]
    if is_small():
        return list(SMALL)
    return [spec for spec in ARG_SPECS.values() if spec not in (*SMALL, *FIGURE_18A)]


def is_small() -> bool:
    """Whether the small calls are meant."""
    return platforms.current() == "cpu" if _SMALL.value is None else _SMALL.value


def chosen_names() -> list[str]:
    """Implementations to time."""
    if _NAMES.value is None:
        return names_here()
    here = implementations.here(IMPLEMENTATIONS)
    unknown = [name for name in _NAMES.value if name not in here]
    if unknown or not _NAMES.value:
        raise ValueError(f"--implementations={','.join(_NAMES.value)} must be some of {', '.join(here)} on this device")
    return _NAMES.value


def torch_timer(spec: ArgSpec, seed: int) -> bench.Timed:
    """Times torch's attention over a contiguous cache."""
    import torch
    import torch.nn.functional as functional

    rows, (queries, length) = len(spec.rows), spec.rows[0]
    generator = torch.Generator("cuda").manual_seed(seed)

    def make(heads: int, count: int) -> Any:
        shape = (rows, heads, count, spec.size)
        return torch.randn(shape, generator=generator, device="cuda", dtype=getattr(torch, spec.query))

    q, k, v = make(spec.heads, queries), make(spec.kv_heads, length), make(spec.kv_heads, length)

    def timed(count: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(count):
            functional.scaled_dot_product_attention(q, k, v, is_causal=queries > 1, enable_gqa=True)
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    timed(1)
    return timed


def why_not_torch(spec: ArgSpec) -> str | None:
    """Why torch's attention is not timed beside this call, or None."""
    if platforms.current() != "gpu" or importlib.util.find_spec("torch") is None:
        return "there is no NVIDIA GPU with torch installed"
    queries, length = spec.rows[0]
    if len(set(spec.rows)) != 1 or queries not in (1, length) or spec.k.dtype != spec.query or spec.v != spec.k:
        return "it is compared on rows of one length and on pages in the queries' dtype"
    return None


def candidates(spec: ArgSpec, names: Sequence[str]) -> tuple[dict[str, bench.Timed], dict[str, str], dict[str, float]]:
    """Who can do the call: timers; who cannot, and why; the largest difference from xla's output, which is ours too."""
    arrays = bench.make_arrays(spec, _SEED.value)
    timers: dict[str, bench.Timed] = {}
    left_out: dict[str, str] = {}
    outputs: dict[str, np.ndarray] = {}

    def add(name: str, make: Callable[[], tuple[bench.Step, bench.Arrays]]) -> None:
        try:
            step, mine = make()
            outputs[name] = np.asarray(jax.jit(step)(mine["q"], mine).astype(jnp.float32))
            timers[name] = bench.timer(step, mine)
        except Exception as error:  # refused, or more memory than there is: the row says so, and the others go on
            left_out[name] = next(iter(str(error).strip().splitlines()), type(error).__name__)

    for name in names:
        add(name, lambda name=name: (bench.ours(spec, name), arrays))
    reason = bench.why_not_jax(spec) if platforms.current() == "gpu" else "it is for NVIDIA GPUs"
    if reason is None:
        add(JAX_OP, lambda: bench.jax_op(spec, arrays))
    else:
        left_out[JAX_OP] = reason
    reason = why_not_torch(spec)
    if reason is None:
        timers[TORCH] = torch_timer(spec, _SEED.value)
    else:
        left_out[TORCH] = reason
    base = outputs.get("xla")
    differences = {} if base is None else {name: float(np.max(np.abs(x - base))) for name, x in outputs.items()}
    return timers, left_out, differences


def copy_timer() -> tuple[bench.Timed, int]:
    """Times a copy, and the bytes that it reads and writes."""
    size = 1 << (24 if is_small() else 28)
    arrays = {"q": jnp.zeros((size,), jnp.float32)}
    return bench.timer(bench.copy_step, arrays), 2 * 4 * size


def measure_spec(
    spec: ArgSpec, names: Sequence[str], copy: bench.Timed, copied: int
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A row for each implementation that can do the call, fastest first, and why the others cannot.

    ``copy`` times a copy, of ``copied`` bytes, which takes its turn among them.
    """
    timers, left_out, differences = candidates(spec, names)
    rounds = bench.compete({**timers, "copy": copy}, _REPEATS.value, _SECONDS.value)
    copies = rounds.pop("copy")
    rows = []
    for name, seconds in rounds.items():
        shares = [spec.read_bytes / one / (copied / other) for one, other in zip(seconds, copies, strict=True)]
        median = statistics.median(seconds)
        rows.append(
            {
                "call": spec.name,
                "implementation": name,
                "microseconds": 1e6 * median,
                "fastest": 1e6 * min(seconds),
                "tokens_per_s": spec.num_tokens / median,
                "read_bytes": spec.read_bytes,
                "gb_per_s": spec.read_bytes / median / 1e9,
                "share_of_copy": statistics.median(shares),
                "difference": differences.get(name, ""),
            }
        )
    return sorted(rows, key=lambda row: row["microseconds"]), left_out


def measure(save: Callable[[dict[str, Any]], None]) -> None:
    """All calls; ``save`` gets what there is after each."""
    names = chosen_names()
    device = jax.devices()[0]
    summary: dict[str, Any] = {
        "when": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "device": {"platform": platforms.current(), "kind": device.device_kind, "small": is_small()},
        "seed": _SEED.value,
        "rounds": _REPEATS.value,
        "calls": [],
        "left_out": {},
        "environment": environment(),
    }
    copy, copied = copy_timer()
    alone = bench.compete({"copy": copy}, _REPEATS.value, _SECONDS.value)["copy"]
    summary["copy_gb_per_s"] = copied / min(alone) / 1e9
    for spec in chosen_specs():
        rows, left_out = measure_spec(spec, names, copy, copied)
        summary["calls"] += rows
        summary["left_out"][spec.name] = left_out
        for row in rows:
            share = f"{row['share_of_copy']:.0%} of a copy's bandwidth"
            print(f"{spec.name} {row['implementation']}: {row['microseconds']:.1f} us, {share}", flush=True)
        save(summary)
    if _FIGURE.value:
        summary["figure_18a"] = measure_figure(
            names, is_small=is_small(), rounds=_REPEATS.value, seconds=_SECONDS.value, seed=_SEED.value
        )
        save(summary)


def report(summary: dict[str, Any]) -> str:
    """The tables of a run."""
    device = summary["device"]
    parts = [f"{device['kind']} ({device['platform']}), copies at {summary['copy_gb_per_s']:.0f} GB/s:"]
    if summary["calls"]:
        parts.append(markdown([{name: x for name, x in row.items() if name != "fastest"} for row in summary["calls"]]))
    if summary.get("figure_18a"):
        parts.append("Figure 18a, pages of 16 against one page a row, in the same kernel:")
        parts.append(markdown(summary["figure_18a"]))
    return "\n\n".join(parts)


def main(argv: Sequence[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {' '.join(argv[1:])}")
    try:
        if _TABLE.value is None:
            out = pathlib.Path(_OUT.value)
            out.parent.mkdir(parents=True, exist_ok=True)
            measure(lambda found: write_atomically(out, json.dumps(found, indent=1) + "\n"))
            print(f"wrote {out}")
        print(report(json.loads(pathlib.Path(_TABLE.value or _OUT.value).read_text())))
    except (ValueError, FileNotFoundError) as error:
        raise app.UsageError(str(error)) from error


if __name__ == "__main__":
    app.run(main)
