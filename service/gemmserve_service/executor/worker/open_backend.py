"""Choice of a worker's backend by its device's name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemmserve_service.executor.worker.backend import DeviceBackend
    from gemmserve_service.executor.worker.blocks.panel_table import PanelsFile
    from gemmserve_service.executor.worker.memory.host_arena import ArenaFile


def open_backend(
    device: str,
    cache_share: float,
    arena: ArenaFile | None = None,
    *,
    memory_bytes: int | None = None,
    panels: PanelsFile | None = None,
) -> DeviceBackend:
    """Return the backend of "cpu", "cuda:0", "rocm:1". `arena`: memory that an accelerator's results may go to.
    `memory_bytes`: of the device's memory that it may use (`Settings.device_memory_bytes`). `panels`: by which devices
    of one host share panels of large products. Raises DeviceUnavailable.
    """
    kind, _, ordinal = device.partition(":")
    if kind == "cpu":
        from gemmserve_service.executor.worker.host.backend import CpuBackend

        return CpuBackend(memory_bytes)
    from gemmserve_service.executor.worker.cuda.backend import CupyBackend

    return CupyBackend(kind, int(ordinal), cache_share, arena, memory_bytes=memory_bytes, panels=panels)
