"""What the processes of the service do to their surroundings."""

from __future__ import annotations

import os
import sys

import pytest

from gemmserve_service.processes import front
from gemmserve_service.runtime import tuning
from gemmserve_service.runtime.handoff import FrontHandoff


@pytest.fixture
def switch_interval():
    """The interpreter's, put back afterwards."""
    before = sys.getswitchinterval()
    yield sys.getswitchinterval
    sys.setswitchinterval(before)


def test_threads_of_the_front_need_not_wait_long_for_its_event_loop(monkeypatch, settings, switch_interval):
    async def serve(_):
        return switch_interval() <= 0.00011

    class Handoff:
        def __init__(self):
            self.settings = settings

    monkeypatch.setattr(FrontHandoff, "receive", Handoff)
    monkeypatch.setattr(front, "_serve", serve)
    monkeypatch.setattr(front.logs, "configure", lambda _: None)
    assert switch_interval() > 0.001
    assert front.main() == 0


@pytest.fixture
def processors(monkeypatch, tmp_path):
    """processors(count, quota, platform): of the affinity, and the text of the container's cpu.max."""

    def fake(count, quota=None, platform="linux"):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)), raising=False)
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr(tuning, "_CGROUP", tmp_path)
        if quota is not None:
            (tmp_path / "cpu.max").write_text(f"{quota}\n", "ascii")

    return fake


@pytest.mark.parametrize(
    ("count", "quota", "found"),
    [
        (16, None, 16), (16, "max 100000", 16), (16, "400000 100000", 4), (16, "250000 100000", 2),
        (16, "50000 100000", 1), (2, "400000 100000", 2), (16, "nonsense", 16),
    ],
)  # fmt: skip
def test_processors_are_those_of_affinity_and_container(processors, count, quota, found):
    processors(count, quota)
    assert tuning.cpu_count() == found


@pytest.mark.parametrize(
    ("count", "quota", "platform", "transfers"),
    [
        (1, None, "linux", 0), (7, None, "linux", 0), (8, None, "linux", 2), (12, None, "linux", 3),
        (16, None, "linux", 4), (192, None, "linux", 4), (64, "600000 100000", "linux", 0),
        (64, "800000 100000", "linux", 2), (16, None, "darwin", 0),
    ],
)  # fmt: skip
def test_transfer_processes_by_default(processors, count, quota, platform, transfers):
    processors(count, quota, platform)
    assert tuning.transfer_processes("auto") == transfers
    assert tuning.transfer_processes(1) == 1
    assert tuning.transfer_processes(0) == 0
