"""A mapping that cannot be changed, can be hashed, and can be sent to another process (a mapping proxy cannot)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, repr=False)
class FrozenMap(Mapping[K, V], Generic[K, V]):
    """Built from a mapping, read like one. Meant for a handful of entries: looking one up walks them."""

    items_: tuple[tuple[K, V], ...]

    @classmethod
    def of(cls, values: Mapping[K, V]) -> FrozenMap[K, V]:
        return cls(tuple(values.items()))

    def __getitem__(self, key: K) -> V:
        for known, value in self.items_:
            if known == key:
                return value
        raise KeyError(key)

    def __iter__(self) -> Iterator[K]:
        return (key for key, _ in self.items_)

    def __len__(self) -> int:
        return len(self.items_)

    def __repr__(self) -> str:
        return f"FrozenMap({dict(self.items_)})"
