"""The list of what is proved: which calls, on which implementation, compiled for which device.

Three kinds of calls of ``paged_attention``:

- covered: what has to run natively, combined so that any three choices meet as often as 64 calls allow, and any two at
  least once: every pair of page formats, with decoding, prefill and a mix, head sizes, page sizes, options.
- gated: decoding in the shape that schedules are compared in; what the compiler makes of it must not get worse. So are
  two writes and three copies.
- wider: one thing each that is beyond the above, and may be refused.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from types import ModuleType
from typing import Any, Literal, Protocol

from pallas_kernels.kv_write import api as kv_write
from pallas_kernels.mla_attention import api as mla_attention
from pallas_kernels.page_copy import api as page_copy
from pallas_kernels.paged_attention import api as paged_attention
from pallas_kernels.paged_attention.arg_specs import ArgSpec
from pallas_kernels.pages import PageFormat
from pallas_kernels.proof import targets
from pallas_kernels.proof.specs import CopySpec, LatentSpec, WriteSpec

OPS: dict[str, ModuleType] = {
    "paged_attention": paged_attention,
    "mla_attention": mla_attention,
    "kv_write": kv_write,
    "page_copy": page_copy,
}
MUST = {"tpu": ("tpu", ("v5e", "v6e", "7x")), "gpu": ("mosaic_gpu", ("sm_90a",))}
"""Platform → the implementation that has to do the covered calls, and where."""


class Spec(Protocol):
    """What is called. ``donated`` names the arguments that are changed in place."""

    name: str
    donated: tuple[str, ...]

    def shapes(self) -> dict[str, Any]:
        """Every array of the call by its name."""
        ...

    def call(self, arrays: dict[str, Any], implementation: str | None) -> Any:
        """Makes the call."""
        ...


@dataclasses.dataclass(frozen=True)
class Case:
    """One compile.

    Attributes:
        op, implementation, target: of ``OPS``, of its ``IMPLEMENTATIONS`` (or of ``MUST``), of ``targets.TARGETS``.
        spec: the call.
        must: whether the proof fails if this is refused or does not compile.
        gated: whether the compiler's figures are kept and compared.
        ci: what ``--ci`` does with it: ``compile``, ``lower``, or ``nothing``.
    """

    op: str
    implementation: str
    target: str
    spec: Spec
    must: bool = False
    gated: bool = False
    ci: Literal["compile", "lower", "nothing"] = "nothing"

    @property
    def name(self) -> str:
        """Unique among cases."""
        return f"{self.op}/{self.spec.name}/{self.implementation}/{self.target}"


FORMATS = (
    PageFormat("bfloat16"),
    *(PageFormat("float8_e4m3fn", scale) for scale in ("none", "tensor", "head", "token")),
    *(PageFormat("int8", scale) for scale in ("tensor", "head", "token")),
)
SHORT = {"bfloat16": "bf16", "float16": "f16", "float32": "f32", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
ROWS = {
    "decode": ((1, 1000), (1, 1), (1, 129), (1, 700)) * 2,
    "prefill": ((300, 300), (40, 500)),
    "mixed": ((1, 900), (70, 70), (1, 17), (5, 400)),
}


def short(fmt: PageFormat) -> str:
    """``e4m3/token``, or ``bf16``."""
    dtype = SHORT.get(fmt.dtype, fmt.dtype)
    return f"{dtype}/{fmt.scale}" if fmt.quantised else dtype


CHOICES: dict[str, tuple[Any, ...]] = {
    "mode": tuple(ROWS),
    "size": (128, 64),
    "page_size": (16, 128),
    "heads": ((32, 8), (12, 4), (8, 8)),
    "window": (None, 200),
    "soft_cap": (None, 30.0),
    "sinks": (False, True),
    "lse": (False, True),
}


@functools.cache
def covered() -> tuple[ArgSpec, ...]:
    """A call for each pair of page formats; the other choices are taken so that most new triples of choices meet."""
    rest = list(itertools.product(*CHOICES.values()))
    numbers: dict[tuple[Any, ...], int] = {}

    def numbered(found: list[tuple[Any, ...]]) -> int:
        """A set of things as the bits of an integer."""
        return sum(1 << numbers.setdefault(thing, len(numbers)) for thing in found)

    combined = [[list(itertools.combinations(enumerate(choice), count)) for count in (2, 3)] for choice in rest]
    pairs, triples = ([numbered(found[i]) for found in combined] for i in (0, 1))
    seen, seen_with = 0, dict.fromkeys(itertools.product("kv", FORMATS), 0)
    calls = []
    for k, v in itertools.product(FORMATS, FORMATS):
        ours = (("k", k), ("v", v))
        with_format = [~seen_with[one] for one in ours]
        gains = [
            (three & ~seen).bit_count() + sum((two & new).bit_count() for new in with_format)
            for two, three in zip(pairs, triples, strict=True)
        ]
        best = gains.index(max(gains))
        seen |= triples[best]
        for one in ours:
            seen_with[one] |= pairs[best]
        calls.append(covered_spec(k, v, **dict(zip(CHOICES, rest[best], strict=True))))
    return tuple(calls)


def covered_spec(
    k: PageFormat, v: PageFormat, mode: str, size: int, page_size: int, heads: tuple[int, int], **options: Any
) -> ArgSpec:
    """The call, with a name that says all of it."""
    words = [mode, f"d{size}", f"p{page_size}", f"h{heads[0]}:{heads[1]}", f"k:{short(k)}", f"v:{short(v)}"]
    words += [name for name, value in options.items() if value]
    shape = {"heads": heads[0], "kv_heads": heads[1], "size": size, "page_size": page_size}
    return ArgSpec(" ".join(words), ROWS[mode], k=k, v=v, **shape, **options)


def gated() -> tuple[ArgSpec, ...]:
    """32 query heads, 8 KV heads, head size 128: 64 rows that decode, and prefill."""
    found = []
    for dtype, scale in (("bfloat16", "none"), ("float8_e4m3fn", "tensor"), ("int8", "tensor")):
        fmt = PageFormat(dtype, scale)
        for page_size in (128, 16):
            name = f"decode 64x2048 {short(fmt)} p{page_size}"
            found.append(ArgSpec(name, ((1, 2048),) * 64, page_size=page_size, k=fmt, v=fmt))
    token = PageFormat("float8_e4m3fn", "token")
    found.append(ArgSpec(f"decode 64x2048 {short(token)} p128", ((1, 2048),) * 64, k=token, v=token))
    found.append(ArgSpec("prefill 2048 bf16 p128", ((2048, 2048),)))
    return tuple(found)


def wider() -> tuple[ArgSpec, ...]:
    """One more thing each."""

    def formats(dtype: str, scale: str = "none") -> dict[str, PageFormat]:
        fmt = PageFormat(dtype, scale)
        return {"k": fmt, "v": fmt}

    base = ArgSpec("", ROWS["decode"])
    things: dict[str, dict[str, Any]] = {
        "float32 queries and pages": {"query": "float32", **formats("float32")},
        "float32 queries, bf16 pages": {"query": "float32"},
        "float16 queries and pages": {"query": "float16", **formats("float16")},
        "e5m2 pages, scale per token": formats("float8_e5m2", "token"),
        "int4 pages, scale per token": formats("int4", "token"),
        "head size 80": {"size": 80},
        "head size 96": {"size": 96},
        "head size 256": {"size": 256},
        "pages of 1": {"page_size": 1},
        "pages of 8": {"page_size": 8},
        "pages of 32": {"page_size": 32},
        "pages of 24": {"page_size": 24},
        "pages of 256": {"page_size": 256},
        "71 heads on one KV head": {"heads": 71, "kv_heads": 1, "size": 64, "page_size": 16},
        "28 heads on 4 KV heads": {"heads": 28, "kv_heads": 4},
        "ALiBi": {"rows": ROWS["mixed"], "alibi": True},
        "not causal": {"rows": ROWS["prefill"], "causal": False},
        "tree mask": {"rows": ((5, 400), (8, 900), (1, 100)), "tree": True},
    }
    return tuple(dataclasses.replace(base, name=name, **thing) for name, thing in things.items())


def latent() -> tuple[LatentSpec, ...]:
    """Calls of ``mla_attention``."""
    return (
        LatentSpec("decode bf16", ROWS["decode"]),
        LatentSpec("mixed bf16", ROWS["mixed"]),
        LatentSpec("decode e4m3/token", ROWS["decode"], PageFormat("float8_e4m3fn", "token")),
    )


def writes() -> tuple[WriteSpec, ...]:
    """Calls of ``kv_write``: every format on either side, head sizes and page sizes in turn."""
    shapes = itertools.cycle(((64, 128, 128), (512, 64, 16), (64, 128, 16), (1, 64, 128)))
    found = []
    for i, fmt in enumerate(FORMATS):
        for other in (fmt, FORMATS[(i + 3) % len(FORMATS)]):
            tokens, size, page_size = next(shapes)
            name = f"{tokens} tokens d{size} p{page_size} k:{short(fmt)} v:{short(other)}"
            found.append(WriteSpec(name, tokens, size=size, page_size=page_size, k=fmt, v=other))
    return tuple(found)


def copies() -> tuple[CopySpec, ...]:
    """Calls of ``page_copy``."""
    found = []
    for kind in ("copy", "take", "put"):
        for page_size, size, dtypes in (
            (128, 128, ("bfloat16", "bfloat16")),
            (16, 64, ("float8_e4m3fn", "int8")),
            (16, 128, ("int8", "bfloat16")),
            (128, 64, ("float8_e4m3fn", "float8_e4m3fn")),
        ):
            pool = "+".join(SHORT.get(dtype, dtype) for dtype in dtypes)
            name = f"{kind} d{size} p{page_size} {pool}"
            found.append(CopySpec(name, kind, page_size=page_size, size=size, dtypes=dtypes))
    return tuple(found)


def implementations(op: str, target: str) -> list[str]:
    """What is made for a device's platform and does an op, best first."""
    platform = targets.platform(target)
    return [name for name, module in OPS[op].IMPLEMENTATIONS.items() if getattr(module, "PLATFORM", None) == platform]


@functools.cache
def all_cases() -> tuple[Case, ...]:
    """The whole list, by target."""
    return tuple(case for target in targets.TARGETS for case in cases_for(target))


LOWERED = ("7x", "sm_90a")
"""Where ``--ci`` lowers a part of the covered and wider calls; elsewhere it lowers the gated ones."""


def cases_for(target: str) -> list[Case]:
    """The list for one target."""
    name, there = MUST[targets.platform(target)]
    must = target in there
    kept: dict[Spec, Literal["compile"]] = dict.fromkeys((*writes()[::8], *copies()[::4]), "compile")
    found = []
    for op, specs in (("paged_attention", covered()), ("kv_write", writes()), ("page_copy", copies())):
        if must:
            found += [Case(op, name, target, spec, True, spec in kept, kept.get(spec, "nothing")) for spec in specs]
    for spec in gated():
        for one in implementations("paged_attention", target):
            native = must and one == name
            found.append(Case("paged_attention", one, target, spec, native, native, in_ci(spec, native)))
    for spec in wider():
        found += [Case("paged_attention", one, target, spec) for one in implementations("paged_attention", target)]
        found.append(Case("paged_attention", "xla", target, spec, must=True))
    found += [
        Case("mla_attention", one, target, x) for x in latent() for one in implementations("mla_attention", target)
    ]
    found += [Case("mla_attention", "xla", target, spec, must=True) for spec in latent()]
    for op, specs in (("kv_write", writes()), ("page_copy", copies())):
        if not must:  # one of each kind tells
            found += [Case(op, one, target, x) for x in specs[::4] for one in implementations(op, target)]
        found += [Case(op, "xla", target, spec, must=True) for spec in specs[::4]]
    if target not in LOWERED:
        return found
    some = {case.name for case in found[::4] if case.implementation == name and case.ci == "nothing"}
    return [dataclasses.replace(case, ci="lower") if case.name in some else case for case in found]


def in_ci(spec: ArgSpec, native: bool) -> Literal["compile", "lower"]:
    """``--ci`` compiles decoding with each dtype where it has to be native."""
    plain = spec.max_query_len == 1 and spec.page_size == 128 and spec.k.scale != "token"
    return "compile" if native and plain else "lower"
