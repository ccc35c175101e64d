"""What was worked out before from the same frozen objects.

From one decision to the next most of what a pipeline is known by stays what it was: the very same objects. What follows
from them alone is kept by their identity, so that nothing has to be compared, and a result is the same whether it is
remembered or not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

V = TypeVar("V")


class Remembered(Generic[V]):
    """The last ``most`` results."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: dict[Hashable, tuple[tuple[object, ...], V]] = {}

    def of(self, objects: tuple[object, ...], values: tuple[Hashable, ...], make: Callable[[], V]) -> V:
        """``make()``, which depends on nothing but these ``objects``, which never change, and ``values``."""
        key = (*map(id, objects), *values)
        found = self._kept.pop(key, None)  # and back, as the latest
        if found is None:
            # The objects are kept too: no other one can come to have the same id.
            found = objects, make()
            while len(self._kept) >= self._most:
                del self._kept[next(iter(self._kept))]
        self._kept[key] = found
        return found[1]
