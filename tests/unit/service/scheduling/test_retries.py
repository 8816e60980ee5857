"""The rule of retries, by itself; that the scheduler holds to it is in test_scheduler.py and test_watchdog.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gemmserve_service.scheduling.retries import last_loss, losses


def task(*, crashes=0, attempt=1, stalled=False):
    return SimpleNamespace(crashes=crashes, attempt=attempt, stalled=stalled)


@pytest.mark.parametrize(("crashes", "found"), [(0, 1), (1, 2), (2, 3)])
def test_each_lost_worker_counts(crashes, found):
    assert losses(task(crashes=crashes), 3) == found


@pytest.mark.parametrize(("crashes", "most", "found"), [(0, 3, 2), (0, 5, 4), (2, 3, 3), (0, 1, 1)])
def test_a_task_that_stood_still_has_one_more_try(crashes, most, found):
    assert losses(task(crashes=crashes, stalled=True), most) == found


def test_the_last_loss_is_an_error_that_says_why():
    assert last_loss(task(crashes=2, attempt=2), 3) is None
    assert "3 workers died" in str(last_loss(task(crashes=3, attempt=4), 3))
    assert "2 workers died" in str(last_loss(task(crashes=3, attempt=2), 3))
    assert "in attempt 2, which was the last" in str(last_loss(task(crashes=3, attempt=2, stalled=True), 3))
