"""How many steps of programs may wait or run at one time: each takes some kilobytes of memory, whatever its arrays."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from gemmserve_service.errors import QueueFull
from gemmserve_service.schemas import ProgramJob

if TYPE_CHECKING:
    from collections.abc import Callable

    from gemmserve_service.schemas import GemmJob, GemmReduceJob

_ALPHA: Final = 4.0  # as in `admission`: an owner gets at most so many times what is still free


class StepRoom:
    """Counts steps by owner; without API keys there is one owner, who may take all."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._taken: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        """Steps of all programs that are not over."""
        return self._taken.total()

    def take(
        self, owner: str, steps: int, *, retry_after_s: float = 1.0, recovered: bool = False
    ) -> Callable[[], None]:
        """Room for a program of so many steps; returns what gives it back.

        One program always fits. `recovered`: it had been admitted by an earlier process. Raises QueueFull.
        """
        if steps and self.taken and not recovered:
            total, own = self.taken, self._taken[owner]
            if total + steps > self._most:
                raise QueueFull(f"{total} steps of programs are waiting already", retry_after_s=retry_after_s)
            if owner and own + steps > max(_ALPHA * (self._most - total), steps):
                raise QueueFull(f"{own} steps of this key's programs are waiting already", retry_after_s=retry_after_s)
        self._taken[owner] += steps

        def release() -> None:
            self._taken[owner] -= steps
            if not self._taken[owner]:
                del self._taken[owner]

        return release


def steps_of(request: GemmJob | GemmReduceJob | ProgramJob) -> int:
    """Steps of a program; 0 of a product."""
    return len(request.steps) if isinstance(request, ProgramJob) else 0
