"""Choice of a worker's backend by its device's name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemmserve_service.executor.worker.backend import DeviceBackend


def open_backend(device: str, cache_share: float, write_back_delay_s: float = 0.0) -> DeviceBackend:
    """Return the backend of "cpu", "cuda:0", "rocm:1". Raises DeviceUnavailable."""
    kind, _, ordinal = device.partition(":")
    if kind == "cpu":
        from gemmserve_service.executor.worker.host.backend import CpuBackend

        return CpuBackend()
    from gemmserve_service.executor.worker.cuda.backend import CupyBackend

    return CupyBackend(kind, int(ordinal), cache_share, write_back_delay_s)
