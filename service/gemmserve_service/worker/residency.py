"""Device copies of immutable host arrays, least recently used first to go."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


class Residency:
    """Copies by array id, `budget` bytes in all. An id never comes back for other bytes, so nothing here goes stale."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.used = 0
        self._copies: OrderedDict[str, Any] = OrderedDict()

    def get(self, key: str | None, nbytes: int, load: Callable[[], Any]) -> Any:
        """The copy under `key`, made by `load` where there is none; not kept without a key or past the budget."""
        if key is None or nbytes > self.budget:
            return load()
        copy = self._copies.get(key)
        if copy is not None:
            self._copies.move_to_end(key)
            return copy
        while self.used + nbytes > self.budget:
            _, old = self._copies.popitem(last=False)
            self.used -= old.nbytes
        copy = load()
        self._copies[key] = copy
        self.used += copy.nbytes
        return copy

    def clear(self) -> None:
        """Drops every copy."""
        self._copies.clear()
        self.used = 0
