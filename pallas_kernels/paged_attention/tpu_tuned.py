"""Block sizes that ``pallas_kernels.tune`` found, and the entry that fits a call.

``tuning/<device>.json`` holds entries for some kinds of calls. A call of a kind between them takes the nearest, if that
is near enough to trust: the same page formats and head size, and no more than a factor of two in each of page size,
KV heads and group.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
from typing import Any

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "tuning"
SIZES = ("queries", "tokens", "depth", "parts")
"""What an entry says, fields of ``Blocks``."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """What of a call decides which blocks are good.

    Attributes:
        several: whether the rows attended have several queries.
        k, v: dtypes of the pages, "/token" behind those with a scale per token.
        page_size, size, heads, kv_heads: B, D, H, K.
    """

    several: bool
    k: str
    v: str
    page_size: int
    size: int
    heads: int
    kv_heads: int

    @property
    def name(self) -> str:
        """As in ``decode bfloat16 p128 d128 h32/8``."""
        sides = self.k if self.k == self.v else f"{self.k}+{self.v}"
        mode = "several" if self.several else "decode"
        return f"{mode} {sides} p{self.page_size} d{self.size} h{self.heads}/{self.kv_heads}"

    def distance(self, other: Kind) -> float:
        """In factors of two; infinite where blocks good for one kind say nothing about the other."""
        if any(getattr(self, name) != getattr(other, name) for name in ("several", "k", "v", "size")):
            return math.inf
        apart = [
            abs(math.log2(ours / theirs))
            for ours, theirs in (
                (self.page_size, other.page_size),
                (self.kv_heads, other.kv_heads),
                (self.heads / self.kv_heads, other.heads / other.kv_heads),
            )
        ]
        return sum(apart) if max(apart) <= 1 else math.inf


@functools.cache
def read(device: str, folder: pathlib.Path = FOLDER) -> dict[Kind, dict[str, Any]]:
    """The entries for a device by kind; none if it has not been tuned for.

    Raises:
        ValueError: the file is not what ``pallas_kernels.tune`` writes.
    """
    path = folder / f"{device}.json"
    if not path.is_file():
        return {}
    try:
        entries = json.loads(path.read_text())["entries"]
        found = {Kind(**entry["kind"]): {name: entry[name] for name in SIZES} for entry in entries}
    except (ValueError, KeyError, TypeError) as error:
        text = f"{path.name}: must be as python -m pallas_kernels.tune writes it; got {type(error).__name__} {error}"
        raise ValueError(f"{text}; run it again") from None
    return found


def nearest(kind: Kind, entries: dict[Kind, dict[str, Any]]) -> dict[str, int] | None:
    """Sizes of the nearest entry, the first by name of several; None if all are too far away.

    Into how many parts a block falls is taken over only by the very same kind: by rule it adapts.
    """
    near = min(entries, key=lambda other: (kind.distance(other), other.name), default=None)
    if near is None or kind.distance(near) == math.inf:
        return None
    return dict(entries[near]) if near == kind else {**entries[near], "parts": 0}
