"""The results that are committed: a file of outcomes, one of gates, and the table in the README."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from pallas_kernels.proof import gates, tables
from pallas_kernels.proof.cases import Case, cases_for

HERE = pathlib.Path(__file__).resolve().parent
CAPABILITIES = HERE / "capabilities.json"
GATES = HERE / "gates.json"
README = HERE.parents[1] / "README.md"
BEGIN, END = "<!-- proof -->", "<!-- /proof -->"


def read_gates() -> dict[str, Any]:
    """``versions`` by target and ``gates`` by case and kernel; both empty if nothing is committed."""
    return json.loads(GATES.read_text()) if GATES.is_file() else {"versions": {}, "gates": {}}


def read_capabilities() -> dict[str, Any]:
    """``versions`` by target and ``results`` by case; both empty if nothing is committed."""
    return json.loads(CAPABILITIES.read_text()) if CAPABILITIES.is_file() else {"versions": {}, "results": {}}


def write(
    cases: Sequence[Case], found: Mapping[str, Mapping[str, Any]], versions: Mapping[str, Mapping[str, str]]
) -> str:
    """Puts results beside those committed, of which those of cases that are no longer in the list go.

    Returns:
        What was written.

    Raises:
        ValueError: a part of a target's cases, compiled by other versions than those of the rest.
    """
    kept = merged(read_capabilities(), cases, found, versions)
    figures = read_gates()
    gated = {case.name for target in kept["versions"] for case in cases_for(target) if case.gated}
    figures["versions"] = kept["versions"]
    figures["gates"] = {name: row for name, row in figures["gates"].items() if name in gated}
    for case in cases:
        if case.gated and found[case.name].get("kernels"):
            figures["gates"][case.name] = gates.roles(found[case.name]["kernels"])
    CAPABILITIES.write_text(lines(kept, "results"))
    GATES.write_text(lines(figures, "gates"))
    text = README.read_text()
    done = f"wrote {CAPABILITIES.name} and {GATES.name}"
    if text.count(BEGIN) != 1 or text.count(END) != 1:
        return f"{done}; not the table: {README.name} must hold {BEGIN} and {END}, once each, where it belongs"
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    README.write_text(f"{head}{BEGIN}\n{tables.readme(kept, figures)}\n{END}{tail}")
    return f"{done}, and the table in {README.name}"


def merged(
    kept: dict[str, Any],
    cases: Sequence[Case],
    found: Mapping[str, Mapping[str, Any]],
    versions: Mapping[str, Mapping[str, str]],
) -> dict[str, Any]:
    """Capabilities with new results."""
    names = {case.name for case in cases}
    listed: dict[str, Case] = {}
    for target in {*kept["versions"], *versions}:
        mine = {case.name: case for case in cases_for(target)}
        listed |= mine
        left = [name for name in mine if name not in names]
        before = kept["versions"].get(target)
        if target in versions and before not in (None, versions[target]) and left:
            raise ValueError(
                f"--write: {target} was proved with {before}; this is {versions[target]}: run all its cases"
            )
    results = {name: row for name, row in kept["results"].items() if name in listed}
    for case in cases:
        row = found[case.name]
        results[case.name] = {name: row[name] for name in ("outcome", "why", "temp_bytes") if name in row}
    ordered = {name: results[name] for name in listed if name in results}
    return {"versions": {**kept["versions"], **versions}, "results": dict(sorted(ordered.items()))}


def lines(found: Mapping[str, Any], part: str) -> str:
    """JSON with an entry of ``part`` a line, for diffs that can be read."""
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(found[part].items()))
    versions = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in sorted(found["versions"].items()))
    return f'{{\n "versions": {{\n{versions}\n }},\n "{part}": {{\n{rows}\n }}\n}}\n'
