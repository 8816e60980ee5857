"""Use of the machine's processors by this worker."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Final

from gemmserve_service.schemas import DeviceHealth

if TYPE_CHECKING:
    from collections.abc import Callable

_SHORTEST_S: Final = 0.5  # clocks of processes tick in hundredths of a second on some systems


def open_processor() -> Callable[[], DeviceHealth]:
    """Return what reads this process's share of the cores that it may use, 0 to 1, since the last reading."""
    cores = len(os.sched_getaffinity(0))
    began, used = time.perf_counter(), time.process_time()

    def read() -> DeviceHealth:
        nonlocal began, used
        now, used_now = time.perf_counter(), time.process_time()
        elapsed_s, used_s = now - began, used_now - used
        if elapsed_s < _SHORTEST_S:
            return DeviceHealth()
        began, used = now, used_now
        return DeviceHealth(utilisation=round(min(used_s / (cores * elapsed_s), 1.0), 4))

    return read
