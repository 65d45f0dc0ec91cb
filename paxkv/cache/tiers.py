"""Where pages wait that were swapped out: a pool in host memory (paper section 4.5).

State of a host page::

    empty ──put──▶ on its way (a copy on the device, the transfer begun) ──settle──▶ held ──put──▶ on its way …
                                        └──────────────get──────────────▶ held (get settles, then copies)

What ``put`` takes is the result of ``swap_out``: a buffer of its own, computed from the pages as they were, so the next
step may already be dispatched and may overwrite them. What ``get`` returns is a copy, so the host page may be reused
while the way back is still under way.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from paxkv.cache.layout import PageLayout
from paxkv.cache.pages import PageContent


class HostPool:
    """Pages in numpy arrays, bit for bit as they are stored on the device.

    Args:
        layout: of the device's pool; its number of pages does not matter.
        num_pages: host pages.
        pinned: whether content passes through pinned memory; None: where a device other than a CPU offers it.
        max_pending: most puts on their way; the oldest is waited for beyond. Each keeps its content on the device.

    Raises:
        ValueError: a negative number of pages, or fewer than one pending put.
    """

    def __init__(self, layout: PageLayout, num_pages: int, *, pinned: bool | None = None, max_pending: int = 4) -> None:
        if not isinstance(num_pages, int) or num_pages < 0:
            raise ValueError(f"a host pool has 0 pages or more, got {num_pages!r}")
        if max_pending < 1:
            raise ValueError(f"max_pending must be at least 1, got {max_pending}; 1 waits for all puts but the newest")
        self.num_pages = num_pages
        self._pinned = _offers_pinned() if pinned is None else pinned
        self._max_pending = max_pending
        self._pending: collections.deque[tuple[np.ndarray, PageContent]] = collections.deque()
        self._held = np.zeros(num_pages, bool)
        self._store: dict[str, np.ndarray] = {}
        for side, head_size, fmt in layout.sides:
            num_layers, _, *rest = layout.data_shape(head_size, fmt)
            self._store[side] = np.zeros((num_pages, num_layers, *rest), fmt.storage_dtype)
            if fmt.scale == "token":
                self._store[f"{side}_scale"] = np.zeros((num_pages, num_layers, *rest[:2]), np.float32)

    @property
    def bytes(self) -> int:
        """Bytes that the pool holds."""
        return sum(array.nbytes for array in self._store.values())

    def put(self, host_ids: Sequence[int] | np.ndarray, content: PageContent) -> None:
        """Begins to store ``content[i]`` as host page ``host_ids[i]`` and returns; -1 drops it.

        Raises:
            ValueError: an id outside -1..num_pages-1 or named twice, or content of another pool's shape or dtype.
        """
        ids = self._checked(host_ids)
        real = ids[ids >= 0]
        if len(np.unique(real)) != len(real):
            raise ValueError(f"each host page can be put once at a time, got {ids.tolist()}")
        for name, array in self._store.items():
            given, want = getattr(content, name), (len(ids), *array.shape[1:])
            if given is None or given.shape != want or given.dtype != array.dtype:
                got = "nothing" if given is None else f"{given.dtype} {list(given.shape)}"
                raise ValueError(f"{name} of the content must be {array.dtype} {list(want)} for these ids, got {got}")
        self._pending.append((ids, jax.tree.map(self._send, content)))
        self._held[real] = True
        while self._pending and (len(self._pending) > self._max_pending or _arrived(self._pending[0][1])):
            self._settle_one()

    def get(self, host_ids: Sequence[int] | np.ndarray) -> PageContent:
        """What the host pages hold, copied; zeros for -1. Waits for every put.

        Raises:
            ValueError: an id outside -1..num_pages-1, or of a page that nothing was put into.
        """
        ids = self._checked(host_ids)
        real = ids >= 0
        empty = ids[real][~self._held[ids[real]]]
        if empty.size:
            raise ValueError(f"host page {empty[0]} holds nothing: put content into it first")
        self.settle()
        found: dict[str, np.ndarray | None] = {field.name: None for field in dataclasses.fields(PageContent)}
        for name, array in self._store.items():
            found[name] = np.zeros((len(ids), *array.shape[1:]), array.dtype)
            found[name][real] = array[ids[real]]
        return PageContent(**found)

    def settle(self) -> None:
        """Waits until everything put is held."""
        while self._pending:
            self._settle_one()

    def _settle_one(self) -> None:
        ids, content = self._pending.popleft()
        real = ids >= 0
        for name, array in self._store.items():
            array[ids[real]] = np.asarray(getattr(content, name))[real]

    def _send(self, leaf):
        if not isinstance(leaf, jax.Array):
            return np.array(leaf)  # the caller may overwrite its own
        if self._pinned:
            return jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host"))
        leaf.copy_to_host_async()
        return leaf

    def _checked(self, host_ids) -> np.ndarray:
        ids = np.asarray(host_ids, np.int64)
        if ids.ndim != 1 or (ids < -1).any() or (ids >= self.num_pages).any():
            raise ValueError(f"host ids are a list in -1..{self.num_pages - 1}, got {ids.tolist()}")
        return ids


def _arrived(content: PageContent) -> bool:
    return all(not isinstance(leaf, jax.Array) or leaf.is_ready() for leaf in jax.tree.leaves(content))


def _offers_pinned() -> bool:
    device = jax.devices()[0]
    return device.platform != "cpu" and any(kind.kind == "pinned_host" for kind in device.addressable_memories())
