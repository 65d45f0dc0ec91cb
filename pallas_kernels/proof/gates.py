"""What fails a proof: calls that have to run natively and do not, and compilers' figures that got worse."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pallas_kernels.proof.cases import Case

Figures = Mapping[str, Any]

SLACK = {
    "bundles_per_token": (0.01, 0),
    "bundles": (0.01, 0),
    "fills": (0.0, 8),
    "spills": (0.0, 8),
    "vmem_bytes": (0.02, 0),
    "smem_bytes": (0.02, 0),
    "registers": (0.0, 4),
    "spill_bytes": (0.0, 0),
    "shared_bytes": (0.02, 0),
}
"""By how much a figure may pass the committed one: a share of it, and a number."""

PRESENT = ("bulk_copies", "wgmma", "mma")
"""Counts of instructions that must not fall to zero."""


def roles(kernels: Mapping[str, Figures]) -> dict[str, Figures]:
    """Kernels by the part of their names that says what they do, without block sizes, unless two share it."""
    short = {name: re.split(r"_[a-z]\d", name)[0] for name in kernels}
    names = list(short.values())
    return {
        (short[name] if names.count(short[name]) == 1 else name): {"kernel": name, **figures}
        for name, figures in kernels.items()
    }


def missing(cases: Sequence[Case], found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """A line for each call that has to run natively and was refused, or did not compile."""
    results = [(case, found[case.name]) for case in cases if case.must]
    return [
        f"{case.name}: {result['outcome']}: {result['why']}"
        for case, result in results
        if result["outcome"] not in ("compiled", "lowered")
    ]


def compare(
    cases: Sequence[Case],
    found: Mapping[str, Mapping[str, Any]],
    committed: Mapping[str, Any],
    versions: Mapping[str, Mapping[str, str]],
) -> tuple[list[str], list[str]]:
    """Holds figures against those committed.

    Args:
        committed: what ``committed.read_gates`` gives.
        versions: of the compilers of each target, now.

    Returns:
        A line for each figure that is worse; and notes: what is better, what has no committed figures, and what is
        worse but came from other compilers than those committed.
    """
    worse, notes = [], []
    for case in cases:
        kernels = found[case.name].get("kernels")
        if not case.gated or kernels is None:
            continue
        if not kernels:
            worse.append(f"{case.name}: the compiler wrote nothing about a kernel; is it native?")
        before = committed["gates"].get(case.name)
        if before is None:
            notes.append(f"{case.name}: no gates are committed; --write keeps these")
            before = {}
        same = committed["versions"].get(case.target) == versions[case.target]
        for role, figures in roles(kernels).items():
            lines = [f"{case.name} {role}: {line}" for line in broken(figures)]
            lines += [f"{case.name} {role}: {line}" for line in regressions(before.get(role, {}), figures)]
            if not same:
                lines = [f"{line} (other compilers than those of the gates)" for line in lines]
            (worse if same or not before else notes).extend(lines)
            better = [f"{case.name} {role}: {line}" for line in regressions(figures, before.get(role, {}))]
            notes += [f"{line} (better than committed; --write keeps it)" for line in better if before]
        notes += [f"{case.name}: kernel {role} is gone" for role in before if role not in roles(kernels)]
    return worse, notes


def broken(figures: Figures) -> list[str]:
    """Rules that hold whatever is committed: a GPU kernel spills nothing."""
    spilled = figures.get("spill_bytes", 0)
    return [f"spill_bytes: must be 0, seen {spilled}"] if spilled else []


def regressions(before: Figures, now: Figures) -> list[str]:
    """A line for each figure by which ``now`` is worse than ``before``."""
    lines = []
    for name, (share, number) in SLACK.items():
        if name in before and name in now and now[name] > before[name] * (1 + share) + number:
            lines.append(f"{name}: committed {before[name]}, seen {now[name]}")
    for name in PRESENT:
        if before.get(name) and not now.get(name, 0):
            lines.append(f"{name}: committed {before[name]}, seen none")
    return lines
