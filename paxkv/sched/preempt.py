"""How a victim gives up its pages (paper section 4.5)."""

from __future__ import annotations

from typing import Literal

from paxkv.config import PreemptionMode
from paxkv.sched.sequence import Group


def tokens_lost(group: Group, stored: int, page_size: int) -> int:
    """Tokens to compute again for a group whose sequences have ``stored`` tokens each, those of pages that they will
    share counted once, those not computed yet left out."""
    apart = (len(group.seqs) - 1) * max(0, stored - group.common_tokens(page_size))
    return stored + apart - sum(end - start for _, start, end in group.jobs)


def choose_mode(group: Group, preference: PreemptionMode) -> Literal["recompute", "swap"]:
    """Recompute for groups of one sequence, swap for wider ones, unless one kind is forced.

    A group that is still in prefill has nothing worth moving: it is recomputed.
    """
    if not group.decoding:
        return "recompute"
    if preference == "auto":
        return "swap" if len(group.seqs) > 1 else "recompute"
    return preference
