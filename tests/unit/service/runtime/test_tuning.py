"""What the processes of the service do to their surroundings."""

from __future__ import annotations

import sys

import pytest

from gemmserve_service.processes import front
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
