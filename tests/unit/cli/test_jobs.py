"""jobs: list, show, wait, cancel."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gemmserve import Client


@pytest.fixture
def job(url):
    with Client(url) as client:
        yield client.submit("gemm", np.eye(2), np.eye(2))


def test_list_show_wait(cli, job) -> None:
    assert cli("jobs").out.splitlines()[1].split()[:3] == [job.id, "gemm", "queued"]
    done = cli("jobs", "wait", job.id)
    assert done.status == 0
    assert "succeeded" in done.out
    assert "0.500" in done.out
    assert "d=arr_" in cli("jobs", "list").out
    shown = cli("jobs", "show", job.id).out
    assert "algorithm" in shown
    assert "numpy" in shown
    (listed,) = json.loads(cli("jobs", "--json").out)
    assert (listed["id"], listed["state"]) == (job.id, "succeeded")


def test_cancel(cli, service, job) -> None:
    assert "cancelled" in cli("jobs", "cancel", job.id).out
    assert service.jobs[job.id]["state"] == "cancelled"
    assert cli("jobs", "wait", job.id).status == 1


def test_a_wait_that_ends(cli, service, job) -> None:
    service.polls_until_done = 10**9
    service.jobs[job.id]["polls"] = 10**9
    done = cli("jobs", "wait", job.id, "--timeout", "0.05")
    assert done.status == 1
    assert "JobTimeout" in done.err


@pytest.mark.parametrize("arguments", [("show",), ("wait",), ("cancel",), ("list", "job_1"), ("burn", "job_1")])
def test_wrong_usage(cli, arguments) -> None:
    assert cli("jobs", *arguments).status == 2


def test_a_job_that_is_not_there(cli) -> None:
    assert cli("jobs", "show", "job_none").status == 1


def test_state_and_limit_reach_the_server(cli, service, job) -> None:
    cli("jobs", "--state", "failed", "--limit", "3")
    assert dict(service.requests[-1].url.params) == {"state": "failed", "limit": "3"}
