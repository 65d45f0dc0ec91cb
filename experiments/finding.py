"""What a study concludes about one claim: a verdict that follows from runs by a stated rule."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Literal, get_args

Verdict = Literal["confirmed", "conditional", "refuted", "not judged"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """Our answer to a claim.

    Attributes:
        claim: its number in `experiments.claims`.
        verdict: `conditional` is true only under the conditions that `ours` names.
        ours: our figures, in words.
        rule: the thresholds that the verdict follows from.
        shown_by: the experiment and run that show it.
    """

    claim: int
    verdict: Verdict
    ours: str
    rule: str
    shown_by: str

    def __post_init__(self) -> None:
        if self.verdict not in get_args(Verdict):
            raise ValueError(f"a verdict is one of {', '.join(get_args(Verdict))}, got {self.verdict!r}")


def graded(tests: Iterable[bool]) -> Verdict:
    """Confirmed when every test holds, refuted when none does, conditional between; no test, no judgement."""
    results = list(tests)
    if not results:
        return "not judged"
    return "confirmed" if all(results) else "conditional" if any(results) else "refuted"
