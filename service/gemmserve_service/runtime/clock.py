"""The service's time: the wall clock as it was at the start, carried on by one that nobody sets.

Arrays, deadlines and Idempotency-Keys live for a number of seconds, not until an hour on the wall: when somebody sets
the wall clock, nothing here expires earlier or later. `Clock.adjust` notices such a jump; whoever has moments on record
(`expiry.py`) then moves them along, so that they mean the same after the next start.
"""

from __future__ import annotations

import time as system
from datetime import UTC, datetime
from functools import partial
from typing import Final

_JUMP_S: Final = 5.0  # less is the wall clock being slewed; it is adopted once it has added up

_steady = (
    partial(system.clock_gettime, system.CLOCK_BOOTTIME) if hasattr(system, "CLOCK_BOOTTIME") else system.monotonic
)
"""Goes on while the machine sleeps, where the system has such a clock."""


class Clock:
    """Seconds since the epoch that run evenly."""

    def __init__(self) -> None:
        self._offset = system.time() - _steady()

    def time(self) -> float:
        """Now."""
        return _steady() + self._offset

    def adjust(self) -> float:
        """Follows the wall clock if it has jumped; by how many seconds, 0 if it has not."""
        jump = system.time() - self.time()
        if abs(jump) < _JUMP_S:
            return 0.0
        self._offset += jump
        return jump


CLOCK: Final = Clock()
"""Clock of this process."""


def time() -> float:
    """Now, by this process's clock."""
    return CLOCK.time()


def now() -> datetime:
    """Return the service's time, in UTC."""
    return datetime.fromtimestamp(CLOCK.time(), UTC)
