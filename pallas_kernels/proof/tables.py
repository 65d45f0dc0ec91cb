"""Results as tables: a short one for the terminal, and the README's."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from pallas_kernels.proof import cases, targets
from pallas_kernels.proof.cases import Case

Results = Mapping[str, Mapping[str, Any]]


def summary(chosen: Sequence[Case], found: Results) -> str:
    """Outcomes by target and implementation."""
    counts: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for case in chosen:
        counts[case.target, case.implementation][found[case.name]["outcome"]] += 1
    lines = [f"{'target':8}  {'implementation':14}  outcomes"]
    for (target, name), row in counts.items():
        lines.append(f"{target:8}  {name:14}  {', '.join(f'{count} {outcome}' for outcome, count in row.items())}")
    return "\n".join(lines)


def groups() -> list[tuple[str, str, tuple[cases.Spec, ...]]]:
    """The rows of the capability table: op, what it says, calls."""
    decode = tuple(spec for spec in cases.gated() if spec.name.startswith("decode"))
    prefill = tuple(spec for spec in cases.gated() if not spec.name.startswith("decode"))
    covered, writes, copies = cases.covered(), cases.writes(), cases.copies()
    every = f"{len(covered)} calls that cover every pair of bf16, e4m3 and int8 pages at each scale granularity, "
    every += "decode, prefill and mixed, D 64 and 128, pages of 16 and 128, window, soft cap, sinks, log-sum-exp"
    return [
        ("paged_attention", every, covered),
        ("paged_attention", "decode, 64 rows of 2,048: bf16, e4m3, int8; pages of 16 and 128", decode),
        ("paged_attention", "prefill of 2,048: bf16", prefill),
        *(("paged_attention", spec.name, (spec,)) for spec in cases.wider()),
        *(("mla_attention", f"{spec.name}, 576/512", (spec,)) for spec in cases.latent()),
        ("kv_write", f"{len(writes)} calls that cover every format on either side", writes),
        ("page_copy", f"{len(copies)} calls: copy, take, put", copies),
    ]


class Notes:
    """Compilers' and refusals' words, each once, by number."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def mark(self, words: Sequence[str]) -> str:
        """The numbers of some notes, raised."""
        found = sorted({self.numbers.setdefault(text, len(self.numbers) + 1) for text in words})
        return f" <sup>{', '.join(map(str, found))}</sup>" if found else ""

    def __str__(self) -> str:
        return "\n".join(f"{number}. {text}" for text, number in self.numbers.items())


def cell(op: str, specs: Sequence[cases.Spec], target: str, results: Results, notes: Notes) -> str:
    """Which implementation does these calls on a device, and why no better one."""
    words: list[str] = []
    best = ""
    for name in (*cases.implementations(op, target), "xla"):
        rows = [results.get(f"{op}/{spec.name}/{name}/{target}") for spec in specs]
        rows = [row for row in rows if row is not None]
        if not rows:
            continue
        good = sum(row["outcome"] == "compiled" for row in rows)
        if good == len(rows):
            return f"{f'{best}, else ' if best else ''}`{name}`{notes.mark(words)}"
        if good and not best:
            best = f"`{name}` {good} of {len(rows)}"
        words += [row["why"] for row in rows if row["outcome"] != "compiled"]
    return f"{best or '-'}{notes.mark(words)}" if words else ""


def capability(results: Results, chosen: Sequence[str]) -> str:
    """The capability table, and its notes."""
    notes = Notes()
    lines = [f"| call | {' | '.join(chosen)} |", "|---" * (1 + len(chosen)) + "|"]
    for op, label, specs in groups():
        row = [cell(op, specs, target, results, notes) for target in chosen]
        lines.append(f"| {op}: {label} | {' | '.join(row)} |")
    return "\n".join(lines) + (f"\n\n{notes}" if notes.numbers else "")


COLUMNS = {
    "tpu": {
        "bundles per KV token": lambda row: row.get("bundles_per_token", ""),
        "fills + spills": lambda row: row["fills"] + row["spills"],
        "VMEM KiB": lambda row: row["vmem_bytes"] >> 10,
        "SMEM KiB": lambda row: round(row["smem_bytes"] / 1024, 1),
    },
    "gpu": {
        "registers": lambda row: row["registers"],
        "spilled bytes": lambda row: row["spill_bytes"],
        "shared KiB": lambda row: round(row["shared_bytes"] / 1024, 1),
        "TMA copies": lambda row: row["bulk_copies"],
        "mma": lambda row: row["wgmma"] + row["mma"],
    },
}


def schedules(gates: Mapping[str, Any], platform: str) -> str:
    """The gates of one platform's devices."""
    columns = COLUMNS[platform]
    lines = [f"| device | call | kernel | {' | '.join(columns)} |", "|---|---|---" + "|---:" * len(columns) + "|"]
    named = [(name, split(name)) for name in gates if targets.platform(split(name)[3]) == platform]
    rows = [(targets.TARGETS.index(target), target, call, gates[name]) for name, (_, call, _, target) in named]
    for _, target, call, kernels in sorted(rows, key=lambda row: row[:3]):
        for row in kernels.values():
            figures = " | ".join(str(show(row)) for show in columns.values())
            lines.append(f"| {target} | {call} | {row['kernel']} | {figures} |")
    return "\n".join(lines)


def split(name: str) -> tuple[str, str, str, str]:
    """Op, call, implementation and target of a case's name; calls may have slashes in theirs."""
    op, rest = name.split("/", 1)
    call, implementation, target = rest.rsplit("/", 2)
    return op, call, implementation, target


def readme(kept: Mapping[str, Any], gates: Mapping[str, Any]) -> str:
    """What stands in the README: both tables, and what they were made with."""
    chosen = [target for target in targets.TARGETS if target in kept["versions"]]
    by_versions: dict[str, list[str]] = collections.defaultdict(list)
    for target in chosen:
        text = ", ".join(f"{name} {version}" for name, version in kept["versions"][target].items())
        by_versions[text].append(target)
    made = "; ".join(f"{', '.join(names)}: {text}" for text, names in by_versions.items())
    parts = [capability(kept["results"], chosen)]
    for platform in COLUMNS:
        if any(targets.platform(split(name)[3]) == platform for name in gates["gates"]):
            parts.append(schedules(gates["gates"], platform))
    return "\n\n".join([*parts, f"({made})"])
