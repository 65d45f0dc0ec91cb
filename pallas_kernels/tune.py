"""Finds block sizes of the TPU kernel with the TPU's own compiler, for chips that need not be here.

    python -m pallas_kernels.tune --targets=v5e,v6e,7x      (writes pallas_kernels/tuning/<target>.json)
    python -m pallas_kernels.tune --targets=v6e --only='decode int8*' --dry      (prints what it would write)
    python -m pallas_kernels.tune --list                    (the kinds of calls, and compiles nothing)

For each kind of call it starts from the sizes that ``tpu_blocks.rule`` gives, and varies the tokens of a block, the
parts that it is attended in, then the queries of a job. The depth of the ring follows: the least that keeps enough
bytes on their way. Each candidate is compiled. What spills too much, does not fit, has too few bytes in flight or takes
more bundles per token and query than the rule is out; of the rest the cheapest is stored, with the compiler's figures.
A kind whose schedule cannot be counted, since a loop inside has trips that it does not say, is left to the rule.

Needs libtpu, ``pip install -e '.[aot]'``. What is compiled already is not compiled again (``--workdir``), unless the
kernel's sources or the compiler have changed. A process per target; a target takes about ten minutes on a core.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import fnmatch
import hashlib
import inspect
import json
import multiprocessing
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp

from pallas_kernels import schedule
from pallas_kernels.paged_attention import tpu, tpu_blocks, tpu_chip, tpu_tuned
from pallas_kernels.paged_attention.arg_specs import ArgSpec
from pallas_kernels.paged_attention.arguments import Call
from pallas_kernels.paged_attention.tpu_blocks import Blocks
from pallas_kernels.paged_attention.tpu_chip import Chip
from pallas_kernels.pages import PageFormat
from pallas_kernels.proof import runner, sources, targets

DEVICES = {"v4": "TPU v4", "v5e": "TPU v5 lite", "v5p": "TPU v5", "v6e": "TPU v6 lite", "7x": "TPU7x"}
"""Targets, and what JAX calls the devices."""

SPILLED = 200
"""Fills and spills together, at most, in one trip of the loop over blocks of rows that decode."""

LATENCY_S = 1e-6
"""From the issue of a copy until its bytes are there: an order of magnitude, which no data sheet gives."""

ROW = 4096
"""Tokens of the row whose cost is compared; of its last block, on average, half is computed for nothing."""

TOKENS = (512, 1024)
DEPTHS = range(3, 9)
QUERIES = (8, 32)
"""What is tried; queries only for rows that have several. The parts that the rule makes are halved and doubled."""


def specs() -> tuple[ArgSpec, ...]:
    """A call of every kind."""
    bf16, e4m3, int8 = PageFormat("bfloat16"), PageFormat("float8_e4m3fn"), PageFormat("int8", "head")
    by_token = (PageFormat("float8_e4m3fn", "token"), PageFormat("int8", "token"))
    decode, several = ((1, 2048),) * 8, ((256, 1024), (64, 2048))
    found = [
        ArgSpec("", decode, page_size=page_size, k=fmt, v=fmt)
        for fmt in (bf16, e4m3, int8, *by_token)
        for page_size in (128, 16)
    ]
    found += [
        ArgSpec("", several, page_size=page_size, k=fmt, v=fmt) for fmt in (bf16, e4m3, int8) for page_size in (128, 16)
    ]
    found += [
        ArgSpec("", decode, size=64, page_size=page_size, k=fmt, v=fmt)
        for fmt in (bf16, e4m3)
        for page_size in (128, 16)
    ]
    return tuple(dataclasses.replace(spec, name=kind_of(spec).name) for spec in found)


def is_several(spec: ArgSpec) -> bool:
    """Whether the spec's rows have several queries."""
    return spec.max_query_len > 1


def kind_of(spec: ArgSpec) -> tpu_tuned.Kind:
    """The kind of a spec's call."""
    return tpu_blocks.kind_of(make_call(spec, spec.shapes()), is_several(spec))


def make_call(spec: ArgSpec, arrays: dict[str, Any]) -> Call:
    """The call of a spec on these arrays, or shapes."""
    given = {"k_scale": None, "v_scale": None, "window": None, "alibi_slopes": None, "sinks": None, "tree_mask": None}
    plain = {"v_width": spec.size, "scale": spec.size**-0.5, "causal": True, "soft_cap": None}
    return Call(**plain, **{**given, **arrays}, max_query_len=None if is_several(spec) else 1)


def chip_of(target: str) -> Chip:
    """The chip that is compiled for."""
    with abstract_mesh(target):
        return tpu_chip.current()


def abstract_mesh(target: str) -> contextlib.AbstractContextManager:
    """What makes traced code be for this target."""
    return targets.abstract_mesh(DEVICES[target], "tpu")


# --- one candidate ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Trial:
    """Sizes, and what the compiler made of them.

    Attributes:
        blocks: with as many parts and queries as the layout has.
        bundles_per_token: of one trip of the loop over blocks, per KV token of a row.
        fills, spills: of vector registers, in one trip.
        vmem_bytes, smem_bytes: allocated.
        flight_bytes: of pages, on their way while a block is attended.
    """

    blocks: Blocks
    bundles_per_token: float
    fills: int
    spills: int
    vmem_bytes: int
    smem_bytes: int
    flight_bytes: int

    @property
    def fits(self) -> bool:
        """Whether it keeps nearly everything in registers. What several queries spill pays: it is in their bundles."""
        return self.fills + self.spills <= SPILLED or self.blocks.queries > 1

    @property
    def rate(self) -> float:
        """Bundles per KV token and query."""
        return self.bundles_per_token / self.blocks.queries

    @property
    def cost(self) -> float:
        """Bundles per KV token and query of a row of ``ROW`` tokens, what is computed for nothing included."""
        return self.rate * (1 + self.blocks.tokens / 2 / ROW)

    def figures(self) -> dict[str, Any]:
        """As stored."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "blocks"}


def choose(rule: Trial, others: Sequence[Trial], wanted_bytes: float) -> Trial:
    """The cheapest candidate, of equals the one with less VMEM; the rule's where no other is as good.

    Args:
        wanted_bytes: of pages, on their way while a block is attended.
    """
    worst = rule.rate if rule.fits else float("inf")
    fit = [x for x in (rule, *others) if x.fits and x.rate <= worst and x.flight_bytes >= wanted_bytes]
    return min(fit, key=lambda x: (x.cost, x.vmem_bytes, x.blocks.tokens, x.blocks.parts), default=rule)


def token_bytes(call: Call) -> int:
    """Bytes of a token's keys and values."""
    return call.num_kv_heads * call.q.shape[2] * (call.k_pages.dtype.itemsize + call.v_pages.dtype.itemsize)


def wanted_bytes(chip: Chip) -> float:
    """Bytes that have to be on their way for the memory to be busy."""
    return chip.bandwidth * LATENCY_S


def deepen(call: Call, blocks: Blocks, chip: Chip) -> Blocks:
    """The same sizes with the least depth that keeps the memory busy, or the most that is tried."""
    block_bytes = blocks.tokens * token_bytes(call)
    enough = (depth for depth in DEPTHS if (depth - 1) * block_bytes >= wanted_bytes(chip))
    return dataclasses.replace(blocks, depth=next(enough, DEPTHS[-1]))


def settle(call: Call, blocks: Blocks, chip: Chip) -> Blocks:
    """The sizes that a launch really has."""
    layout = tpu_blocks.arrange(call, blocks, chip)
    return Blocks(queries=layout.queries, tokens=layout.block_tokens, depth=layout.depth, parts=layout.parts)


def compile_trial(spec: ArgSpec, blocks: Blocks, target: str) -> Trial:
    """Compiles one launch in blocks of these settled sizes, and reads its schedule."""
    shapes = spec.shapes()

    def function(*arrays):
        call = make_call(spec, dict(zip(shapes, arrays, strict=True)))
        out = jnp.zeros(call.q.shape, jnp.bfloat16)
        lse = jnp.full(call.q.shape[:2], -jnp.inf)
        return tpu.launch(call, blocks, "several" if is_several(spec) else "all", out, lse)

    kernels = schedule.measure(function, list(shapes.values()), target)
    [found] = [kernel for name, kernel in kernels.items() if name.startswith("paged_attention")]
    return Trial(
        blocks=blocks,
        bundles_per_token=round(found.bundles_per_token, 4),
        fills=found.fills,
        spills=found.spills,
        vmem_bytes=found.vmem_bytes,
        smem_bytes=found.smem_bytes,
        flight_bytes=(blocks.depth - 1) * blocks.tokens * token_bytes(make_call(spec, shapes)),
    )


# --- the search ------------------------------------------------------------------------------------------------------


class Trials:
    """Compiled candidates of a target, kept in a folder under a hash of all that decides them."""

    def __init__(self, target: str, folder: pathlib.Path) -> None:
        self.target, self.folder = target, folder
        self.versions = targets.versions(target)
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, spec: ArgSpec, blocks: Blocks) -> Trial | str:
        """What the compiler makes of these settled sizes, or why it refuses them or cannot be compared."""
        ours = [inspect.getsource(compile_trial), inspect.getsource(schedule)]
        facts = [
            self.target,
            repr(spec),
            repr(blocks),
            self.versions,
            sources.fingerprint("paged_attention", "tpu", data=False),
            ours,
        ]
        path = self.folder / f"{hashlib.sha256(json.dumps(facts).encode()).hexdigest()}.json"
        if path.is_file():
            known = json.loads(path.read_text())
        else:
            known = self.compile(spec, blocks, path.with_suffix(".begun"))
            runner.keep(path, known)
        return known["why"] if "why" in known else Trial(blocks, **known)

    def compile(self, spec: ArgSpec, blocks: Blocks, begun: pathlib.Path) -> dict[str, Any]:
        """Figures, or ``why`` there are none. A compiler may abort; what has ended two processes is not begun again."""
        with begun.open("a") as file:
            file.write(".")
        if begun.stat().st_size > 2:
            return {"why": "the compiler ended the process"}
        try:
            known = compile_trial(spec, blocks, self.target).figures()
        except Exception as error:  # whatever a compiler raises is a result
            known = {"why": f"{type(error).__name__}: {error}"[:300]}
        begun.unlink()
        return known


def search(spec: ArgSpec, chip: Chip, compiled: Callable[[ArgSpec, Blocks], Trial | str]) -> tuple[Trial, Trial] | str:
    """The rule's sizes and the best ones; or why the rule's have nothing that others could be compared with."""
    call = make_call(spec, spec.shapes())
    start = settle(call, tpu_blocks.rule(call, is_several(spec)), chip)
    rule = compiled(spec, start)
    if isinstance(rule, str):
        return rule
    tried: dict[Blocks, Trial | str] = {start: rule}

    def best(*ahead: Blocks) -> Trial:
        for blocks in ahead:
            settled = settle(call, deepen(call, blocks, chip), chip)
            # With two blocks the next one waits until the one before has been attended.
            if settled not in tried and settled.depth >= DEPTHS[0]:
                tried[settled] = compiled(spec, settled)
        return choose(rule, [x for x in tried.values() if isinstance(x, Trial)], wanted_bytes(chip))

    plain = [settle(call, dataclasses.replace(start, tokens=tokens, parts=0), chip) for tokens in TOKENS]
    best(*plain)
    halved = [dataclasses.replace(x, parts=x.parts // 2) for x in plain if x.parts > 1 and x.tokens >= start.tokens]
    doubled = [dataclasses.replace(x, parts=x.parts * 2) for x in plain if x.tokens >= start.tokens]
    now = best(*halved, *doubled).blocks
    if is_several(spec):
        return rule, best(*(dataclasses.replace(now, queries=queries, parts=0) for queries in QUERIES))
    return rule, best()


def tune(target: str, only: str, workdir: pathlib.Path) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The entries for a target, and why other kinds have none; both in order of the kinds' names."""
    chip, trials, begin = chip_of(target), Trials(target, workdir), time.monotonic()
    chosen = sorted((spec for spec in specs() if fnmatch.fnmatchcase(spec.name, only)), key=lambda spec: spec.name)
    entries, left_out = [], {}
    for count, spec in enumerate(chosen, 1):
        found = search(spec, chip, trials.get)
        if isinstance(found, str):
            left_out[spec.name] = text = found
        else:
            rule, best = found
            entries.append(entry_of(spec, rule, best))
            text = f"{rule.bundles_per_token:.3f} -> {best.bundles_per_token:.3f} bundles per token, {best.blocks}"
        seconds = time.monotonic() - begin
        print(f"{target} {count}/{len(chosen)} {seconds:.0f} s: {spec.name}: {text}", file=sys.stderr, flush=True)
    return entries, left_out


def entry_of(spec: ArgSpec, rule: Trial, best: Trial) -> dict[str, Any]:
    """What is stored of a kind: its best sizes and their figures, and what the rule would have taken."""
    ruled = {f"rule_{name}": value for name, value in dataclasses.asdict(rule.blocks).items()}
    return {
        "name": spec.name,
        "kind": dataclasses.asdict(kind_of(spec)),
        **dataclasses.asdict(best.blocks),
        **best.figures(),
        **ruled,
        "rule_bundles_per_token": rule.bundles_per_token,
    }


def text_of(target: str, entries: Sequence[dict[str, Any]], left_out: dict[str, str]) -> str:
    """The file of a target: JSON, an entry a line."""
    head = {"command": f"python -m pallas_kernels.tune --targets={target}", "versions": targets.versions(target)}
    rows = ",\n".join(f"  {json.dumps(entry)}" for entry in entries)
    return f'{json.dumps({**head, "left_out": left_out})[:-1]}, "entries": [\n{rows}\n]}}\n'


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.tune", description=__doc__.split("\n\n")[0])
    folder = pathlib.Path(tempfile.gettempdir()) / "paxkv-tune"
    parser.add_argument("--targets", default="v5e,v6e,7x", help=f"some of {', '.join(DEVICES)}; default: %(default)s")
    parser.add_argument("--only", default="*", help="a pattern of names of kinds, as in a shell; needs --dry")
    parser.add_argument("--workdir", type=pathlib.Path, default=folder, help="where results are kept (%(default)s)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument("--dry", action="store_true", help="print the files, and write none")
    parser.add_argument("--list", action="store_true", help="print the names of the kinds, and compile nothing")
    options = parser.parse_args(arguments)
    options.targets = list(dict.fromkeys(options.targets.split(",")))
    unknown = [target for target in options.targets if target not in DEVICES]
    if unknown:
        parser.error(f"--targets: must be some of {', '.join(DEVICES)}; got {', '.join(unknown)}")
    if options.jobs < 1:
        parser.error(f"--jobs: must be at least 1; got {options.jobs}")
    if not any(fnmatch.fnmatchcase(spec.name, options.only) for spec in specs()):
        parser.error(f"--only: must fit a kind that --list names; got {options.only!r}")
    if options.only != "*" and not options.dry and not options.list:
        parser.error("--only: a file holds all kinds, so a part of them is only printed; add --dry")
    return options


def main(arguments: Sequence[str]) -> int:
    """Tunes; returns the exit status."""
    options = parse(arguments)
    if options.list:
        print("\n".join(spec.name for spec in specs() if fnmatch.fnmatchcase(spec.name, options.only)))
        return 0
    try:
        for target in options.targets:
            targets.versions(target)
    except ModuleNotFoundError as error:
        print(error, file=sys.stderr)
        return 2
    with concurrent.futures.ProcessPoolExecutor(
        options.jobs, multiprocessing.get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        running = {target: pool.submit(tune, target, options.only, options.workdir) for target in options.targets}
        for target, tuned in running.items():
            text = text_of(target, *tuned.result())
            if options.dry:
                print(text, end="")
            else:
                tpu_tuned.FOLDER.mkdir(exist_ok=True)
                (tpu_tuned.FOLDER / f"{target}.json").write_text(text)
                print(f"wrote {tpu_tuned.FOLDER / target}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
