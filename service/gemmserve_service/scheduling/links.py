"""Rates at which devices are brought operands from the store: of a probe of this host, or of a known device; and of the
link to the host of a worker that joined, as that has measured it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from gemmserve_kernels.planning.rates import read_rates, shipped, shipped_hosts

if TYPE_CHECKING:
    from pathlib import Path

    from gemmserve_service.executor.port import Worker

DEFAULT_RATE: Final = 10e9
"""Bytes a second to a device of which nothing is known, about; also to a CPU, whose copies are page faults."""
DEFAULT_LINK: Final = 125e6
"""Bytes a second to a host that has not measured it: 1 Gb/s."""


class Links:
    """Bytes a second from the store to each worker's device, as one device alone is copied to."""

    def __init__(self, probe_file: Path | None = None) -> None:
        """`probe_file`: what `gemmserve probe` wrote. Raises OSError, ParameterInvalid."""
        self._probed = None if probe_file is None else read_rates(probe_file)
        self._rates: dict[int, float] = {}

    def rate(self, worker: Worker) -> float:
        """Return the rate of a worker's device; workers of equal devices have the same on this host. What comes over a
        network goes one way after the other: it is whole on its host before it goes to the device.
        """
        here = self._of_device(worker)
        if worker.link is None:
            return here
        over = worker.link.bytes_s or DEFAULT_LINK
        return here * over / (here + over)

    def _of_device(self, worker: Worker) -> float:
        if worker.spec is None:
            return DEFAULT_RATE
        found = self._rates.get(worker.device_class)
        if found is None:
            found = self._rates[worker.device_class] = self._measured(worker.spec.name)
        return found if math.isfinite(found) else DEFAULT_RATE

    def _measured(self, device: str) -> float:
        """Return the rate that was measured for a device of that name; infinite where none was."""
        known = [self._probed] if self._probed is not None else []
        known += map(shipped, shipped_hosts())
        return next((rates.pageable.up for rates in known if rates.spec.name == device), math.inf)
