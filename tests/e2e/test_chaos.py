"""A small dose of `make chaos`: processes killed under load, disks full, clocks set."""

from __future__ import annotations

import pytest
from chaos import faults, joined

pytestmark = pytest.mark.flaky(reruns=0)  # a job that is lost once is lost


def test_no_accepted_job_is_lost_or_wrong_whoever_is_killed(tmp_path) -> None:
    found = faults.kills(tmp_path, jobs=24, over_s=3.0, pause_s=(0.1, 0.4))
    assert found["ok"], found
    assert min(found["faults"].values()) >= 1, found
    assert found["jobs"]["succeeded"] >= 24


def test_no_result_that_a_device_alone_has_is_lost_or_wrong_when_that_is_killed(tmp_path) -> None:
    kinds = ("worker", "all")  # they take it with them; and the ends of jobs that are not on record
    found = faults.kills(tmp_path, jobs=24, over_s=3.0, pause_s=(0.1, 0.4), kinds=kinds, environment=faults.DEVICE)
    assert found["ok"], found
    assert min(found["faults"].values()) >= 1, found
    assert found["jobs"]["succeeded"] >= 24


def test_no_job_is_lost_or_wrong_whichever_node_is_killed_or_cut_off(tmp_path) -> None:
    found = joined.joined(tmp_path, jobs=24, over_s=3.0, pause_s=(0.1, 0.4), cut_s=(3.0, 4.0))
    assert found["ok"], found
    assert min(found["faults"].values()) >= 1, found
    assert found["jobs"]["succeeded"] >= 24


def test_a_full_disk_refuses_what_is_new_and_loses_nothing(tmp_path) -> None:
    found = faults.disk_full(tmp_path)
    assert found["ok"], found
    if "skipped" in found:
        pytest.skip(found["skipped"])


def test_a_clock_that_is_set_expires_nothing(tmp_path) -> None:
    found = faults.clock_jumps(tmp_path)
    assert found["ok"], found
