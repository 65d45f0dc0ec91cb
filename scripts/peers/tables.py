"""Results as markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

PROBES = {
    "host": "The host's own work",
    "profile": "A decode step of 128 sequences and its parts",
    "contiguous": "A decode step over pages against one over a contiguous cache",
    "context": "Decoding by the length of the context",
}


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows with equal keys as a table; numbers are right-aligned and rounded to what can be read."""
    names = list(rows[0])
    numeric = [not isinstance(rows[0][name], str) for name in names]
    lines = ["| " + " | ".join(name.replace("_", " ") for name in names) + " |"]
    lines.append("|" + "|".join("---:" if right else "---" for right in numeric) + "|")
    lines += ["| " + " | ".join(_cell(row[name]) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def engines_table(part: Mapping[str, Any]) -> str:
    """The table of a part that compares engines: an engine a row, best first, its figures by number of cores.

    Raises:
        ValueError: no engine has a result.
    """
    if not part["engines"]:
        raise ValueError("the run holds no result of any engine; see `failed` in its file")
    counts = sorted({row["cores"] for row in part["engines"]})
    engines: dict[str, dict[int, Mapping[str, Any]]] = {}
    for row in sorted(part["engines"], key=lambda row: (row["cores"], -row["tokens_per_s"])):
        engines.setdefault(f"{row['engine']} {row['version']}", {})[row["cores"]] = row
    head = ["engine"]
    for count in counts:
        noun = "core" if count == 1 else "cores"
        head += [f"tokens/s, {count} {noun}", "paxkv / it"]
    lines = ["| " + " | ".join([*head, "equal outputs"]) + " |"]
    lines.append("|---" + "|---:" * len(head) + "|")
    for engine, by_cores in engines.items():
        cells = [engine]
        for count in counts:
            row = by_cores.get(count)
            cells += ["" if row is None or name not in row else _cell(row[name]) for name in ("tokens_per_s", "ratio")]
        equal = min((row["equal"] for row in by_cores.values() if "equal" in row), default=None)
        cells.append("" if equal is None else f"{equal} of {part['requests']}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def report(summary: Mapping[str, Any]) -> str:
    """All parts of a file, each as a sentence that says what was measured, and a table; where and when at the end.

    Raises:
        ValueError: a file without any part.
    """
    parts = []
    for name in ("peers", "many"):
        if name in summary:
            part = summary[name]
            served = f"{part['requests']} requests, {part['prompt_tokens']:,} prompt and {part['output_tokens']:,}"
            parts.append(f"{served} output tokens, greedy, float32:\n\n{engines_table(part)}")
    for name, sentence in PROBES.items():
        if name in summary:
            parts.append(f"{sentence}:\n\n{markdown(summary[name])}")
    if not parts:
        raise ValueError("the file holds no part of scripts.bench_engine")
    where = summary["environment"]
    facts = [summary["when"][:10], where["machine"], f"jax {where['packages']['jax']}", f"Python {where['python']}"]
    facts += [f"commit {where['git_commit'][:7]}"] if where["git_commit"] else []
    parts.append(f"({', '.join(facts)})")
    return "\n\n".join(parts)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)
