"""Blocking I/O in other processes."""

from __future__ import annotations

import os

import numpy as np
import pytest
from fake_service import FakeService, serving

import gemmserve
from gemmserve import Client
from gemmserve._transport.connection import ELSEWHERE


def test_a_stream_that_goes_on_in_a_child_is_left(monkeypatch) -> None:
    """Before another byte of it is read."""
    service = FakeService()
    service.polls_until_done = 3
    with serving(service) as url, Client(url) as client:
        job = client.submit("gemm", np.eye(2), np.eye(2))
        events = client._io.events(gemmserve._calls.requests.job_events(job.id))
        next(events)
        pid = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: pid + 1)
        with pytest.raises(gemmserve.TransportError, match=ELSEWHERE):
            next(events)
        monkeypatch.undo()
