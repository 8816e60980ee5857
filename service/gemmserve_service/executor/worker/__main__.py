"""`python -m gemmserve_service.executor.worker`: the process that owns one device. `--probe` prints the devices."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

from gemmserve_kernels.blocks.grid import GridRule
from gemmserve_service.executor.worker.backend import DeviceUnavailable
from gemmserve_service.executor.worker.blocks.panel_table import PanelsFile
from gemmserve_service.executor.worker.checks.selftest import verified_error
from gemmserve_service.executor.worker.loop import serve
from gemmserve_service.executor.worker.memory.host_arena import ArenaFile
from gemmserve_service.executor.worker.open_backend import open_backend
from gemmserve_service.executor.worker.runner import Runner
from gemmserve_service.runtime import logs
from gemmserve_service.runtime.handoff import WorkerHandoff
from gemmserve_service.runtime.tuning import keep_from_collector
from gemmserve_service.store.extents.memfd import arena_ahead_bytes

log = logging.getLogger(__name__)


def main() -> int:
    """Opens the device, verifies a product on it, and serves. EX_UNAVAILABLE: starting again would not help."""
    handoff = WorkerHandoff.receive()
    logs.configure(handoff.settings)
    try:
        settings = handoff.settings
        arena = None
        if handoff.arena_path is not None:
            ahead_bytes = arena_ahead_bytes(settings, handoff.arena_bytes)
            arena = ArenaFile(handoff.arena_path, handoff.arena_bytes, ahead_bytes)
        backend = open_backend(
            handoff.device,
            settings.device_cache_share,
            arena,
            memory_bytes=settings.device_memory_bytes,
            panels=panels_of(handoff),
        )
        error = verified_error(backend)
    except DeviceUnavailable as unavailable:
        log.error("%s cannot be used: %s", handoff.device, unavailable)  # noqa: TRY400 (the message says it all)
        return os.EX_UNAVAILABLE
    timeout_s = handoff.settings.heartbeat_timeout_s
    keep_from_collector()
    serve(Path(handoff.control_path), handoff.device, Runner(backend, GridRule(settings.block_side)), error, timeout_s)
    return 0


def panels_of(handoff: WorkerHandoff) -> PanelsFile | None:
    """Return how panels of large products are shared with other devices; None: they are not."""
    if handoff.panels_path is None:
        return None
    return PanelsFile(handoff.panels_path, handoff.panels_row, always=handoff.settings.peer_copies == "always")


def probe() -> int:
    """Prints the accelerators' names as a JSON list. In a process of its own: asking the driver makes a context."""
    from gemmserve_kernels import DeviceSpec

    print(json.dumps([f"{spec.kind}:{ordinal}" for ordinal, spec in enumerate(DeviceSpec.all())]))
    return 0


if __name__ == "__main__":
    raise SystemExit(probe() if sys.argv[1:] == ["--probe"] else main())
