"""A bounded store of what can be made again."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["LRU"]

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRU(Generic[K, V]):
    """Keeps the values used last.

    Args:
        size: how many, at least 1.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._kept: dict[K, V] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key, made if it is not there. What `make` raises is raised, and nothing is kept."""
        value = self._kept.pop(key) if key in self._kept else make()
        self._kept[key] = value  # to the end: the order is that of the last use
        while len(self._kept) > self._size:
            del self._kept[next(iter(self._kept))]
        return value

    def clear(self) -> None:
        """Forget everything."""
        self._kept.clear()
