"""Beam search as memory sees it: which slot of a group continues which parent.

The caller scores candidates (a device, or a simulator's stand-in) and names a parent for each new beam.
Here the parents are laid out so that a beam that survives keeps its slot and block table, and only the
others are copied or shared (paper section 4.4, figure 9).
"""

from __future__ import annotations

from collections.abc import Sequence


def place(parents: Sequence[int], width: int) -> tuple[int, ...]:
    """Parent of each slot, surviving parents in their own slots.

    Args:
        parents: chosen parent per new beam, in any order, each in ``0..width - 1``.
        width: beams of the group.

    Returns:
        ``width`` parents; ``result[p] == p`` for every parent that was chosen at all.

    Raises:
        ValueError: not ``width`` parents, or one out of range.
    """
    if len(parents) != width or (width and not (min(parents) >= 0 and max(parents) < width)):
        raise ValueError(f"a beam step needs {width} parents in 0..{width - 1}, got {tuple(parents)}")
    slots = [-1] * width
    spare = []
    for parent in parents:
        if slots[parent] < 0:
            slots[parent] = parent
        else:
            spare.append(parent)
    for slot in range(width):
        if slots[slot] < 0:
            slots[slot] = spare.pop(0)
    return tuple(slots)
