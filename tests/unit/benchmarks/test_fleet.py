"""The front's work for a job does not grow with the workers: function calls, which no noise touches."""

from __future__ import annotations

import asyncio
import sys

import pytest
from benchmarks.service import fleet


def calls(workers, *, busy, jobs=150):
    counted = 0

    def count(_, event, __):
        nonlocal counted
        counted += event == "call"

    sys.setprofile(count)
    try:
        asyncio.run(fleet.measure(workers, jobs, busy=busy, warm=20))
    finally:
        sys.setprofile(None)
    return counted


@pytest.mark.parametrize("busy", [True, False])
def test_a_job_takes_as_many_calls_with_many_workers_as_with_few(busy):
    calls(4, busy=busy, jobs=10)  # imports, and what is kept for every process
    start = {workers: calls(workers, busy=busy, jobs=0) for workers in (4, 128)}
    few, many = (calls(workers, busy=busy) - start[workers] for workers in (4, 128))
    assert few > 100 * 50, "something was run"
    assert many < 1.3 * few
