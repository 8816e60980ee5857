"""What a worker makes of its handoff."""

from __future__ import annotations

import pytest

from gemmserve_service.executor.worker.__main__ import panels_of
from gemmserve_service.executor.worker.blocks.panel_table import PanelsFile
from gemmserve_service.runtime.handoff import WorkerHandoff
from gemmserve_service.settings import Settings


@pytest.mark.parametrize(("how", "always"), [("auto", False), ("always", True)])
def test_panels_are_shared_by_the_table_that_it_is_told_of(tmp_path, how, always) -> None:
    settings = Settings(data_dir=tmp_path, peer_copies=how)
    handoff = WorkerHandoff(settings=settings, pipe_fd=0, device="cuda:1", control_path="c")
    assert panels_of(handoff) is None
    handoff = handoff.model_copy(update={"panels_path": "/proc/1/fd/8", "panels_row": 1})
    assert panels_of(handoff) == PanelsFile("/proc/1/fd/8", 1, always=always)
