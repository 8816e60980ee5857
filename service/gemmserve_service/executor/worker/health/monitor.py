"""Monitor of a device's sensors: reads them every few seconds, in a thread that the work never waits for."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Final

from gemmserve_service.schemas import DeviceHealth

if TYPE_CHECKING:
    from collections.abc import Callable

    Probe = Callable[[], DeviceHealth]

PERIOD_S: Final = 5.0
"""Seconds between two readings."""
_STALE_PERIODS: Final = 3
"""Periods after which a reading that none followed counts no more: the driver's library hangs."""
_NOTHING: Final = DeviceHealth()

log = logging.getLogger(__name__)


class Monitor:
    """Latest reading of one device's sensors."""

    def __init__(self, open_probe: Callable[[], Probe] | None, period_s: float = PERIOD_S) -> None:
        """`open_probe()` opens the driver's library and returns what reads the sensors; both are called in the
        monitor's thread, and whatever they raise, or if they never return, is no more than missing figures. None: the
        device has no sensors.
        """
        self._open_probe = open_probe
        self._period_s = period_s
        self._reading = _NOTHING
        self._read_at = 0.0

    def begin(self) -> None:
        """Start the thread; it ends with the process, or when there is nothing to read."""
        if self._open_probe is not None:
            threading.Thread(target=self._run, args=(self._open_probe,), name="gemmserve-health", daemon=True).start()

    @property
    def latest(self) -> DeviceHealth:
        """The last reading; one without figures where there is none, or none that is recent. Asked by any thread."""
        if time.monotonic() - self._read_at > _STALE_PERIODS * self._period_s:
            return _NOTHING
        return self._reading

    def _run(self, open_probe: Callable[[], Probe]) -> None:
        try:
            probe = open_probe()
        except Exception as error:
            log.info("the device's sensors cannot be read: %s", error or type(error).__name__)
            return
        while True:
            try:
                reading = probe()
            except Exception as error:
                log.debug("a reading of the device's sensors failed: %s", error)
                reading = _NOTHING
            self._reading, self._read_at = reading, time.monotonic()
            time.sleep(self._period_s)
