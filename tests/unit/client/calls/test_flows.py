"""What happens when a product is interrupted or fails half-way: nothing stays behind."""

from __future__ import annotations

import asyncio

import httpx
import numpy as np
import pytest
from fake_service import problem

import gemmserve


@pytest.fixture
def remote(client):
    return client.put(np.eye(3))


def interrupt(_request: httpx.Request) -> None:
    raise KeyboardInterrupt


def test_ctrl_c_before_the_job_is_known_cancels_it(client, service, remote) -> None:
    def arrives_then_interrupted(request: httpx.Request) -> None:
        service.requests.pop()
        service(request)
        raise KeyboardInterrupt

    service.polls_until_done = 5
    service.script.append(arrives_then_interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.gemm(remote, remote)
    assert [job["state"] for job in service.jobs.values()] == ["cancelled"]


@pytest.mark.parametrize("call", ["gemm", "submit", "submit_many", "map"])
def test_ctrl_c_before_jobs_are_known_that_are_done_leaves_none_of_their_results(client, service, remote, call) -> None:
    def done_then_interrupted(request: httpx.Request) -> None:
        service.requests.pop()
        service(request)
        for job in service.jobs.values():
            service._advance(job)
        raise KeyboardInterrupt

    product = {"op": "gemm", "a": remote, "b": remote}
    service.script.append(done_then_interrupted)
    calls = {
        "gemm": lambda: client.gemm(remote, remote),
        "submit": lambda: client.submit(**product),
        "submit_many": lambda: client.submit_many([product] * 3),
        "map": lambda: next(client.map([product] * 3)),
    }
    with pytest.raises(KeyboardInterrupt):
        calls[call]()
    assert {job["state"] for job in service.jobs.values()} == {"succeeded"}
    assert set(service.arrays) == {remote.id}


@pytest.mark.parametrize("operand", ["on the server", "here"])
@pytest.mark.parametrize("call", ["submit", "submit_many", "map"])
def test_ctrl_c_before_submitted_jobs_are_known_cancels_them(client, service, remote, call, operand) -> None:
    def arrives_then_interrupted(request: httpx.Request) -> None:
        service.requests.pop()
        service(request)
        raise KeyboardInterrupt

    here = operand == "here"
    product = {"op": "gemm", "a": remote, "b": np.ones((3, 3)) if here else remote}
    service.polls_until_done = 5
    service.script += [None, arrives_then_interrupted] if here else [arrives_then_interrupted]
    calls = {
        "submit": lambda: client.submit(**product),
        "submit_many": lambda: client.submit_many([product] * 3),
        "map": lambda: next(client.map([product] * 3)),
    }
    with pytest.raises(KeyboardInterrupt):
        calls[call]()
    count = 1 if call == "submit" else 3
    assert [job["state"] for job in service.jobs.values()] == ["cancelled"] * count
    assert set(service.arrays) == {remote.id}


def test_ctrl_c_while_waiting_cancels_and_tidies_up(client, service, remote) -> None:
    service.polls_until_done = 5
    service.script += [None, None, interrupt]  # the upload, the submission, the first poll
    with pytest.raises(KeyboardInterrupt):
        client.gemm(remote, np.ones((3, 3)))
    assert [job["state"] for job in service.jobs.values()] == ["cancelled"]
    assert set(service.arrays) == {remote.id}


def test_an_interrupt_is_not_hidden_by_a_server_that_is_gone(client, service, remote) -> None:
    gone = httpx.ConnectError("gone")
    service.script += [None, interrupt] + [gone] * 5
    with pytest.raises(KeyboardInterrupt):
        client.gemm(remote, np.ones((3, 3)))


def test_tidying_up_is_tried_once_and_not_for_long(client, service, remote) -> None:
    service.script += [None, interrupt]
    with pytest.raises(KeyboardInterrupt):
        client.gemm(remote, np.ones((3, 3)))
    for request in service.requests[-3:-1]:  # the submission again, its cancellation
        assert request.extensions["timeout"]["read"] <= 5.0


async def test_cancelling_the_task_cancels_the_job(async_client, service) -> None:
    remote = await async_client.put(np.eye(3))
    service.polls_until_done = 10**9
    task = asyncio.create_task(async_client.gemm(remote, np.ones((3, 3))))
    polling = asyncio.Event()

    async def sleep(_seconds: float) -> None:
        polling.set()
        await asyncio.sleep(0.001)

    async_client._io._sleep = sleep
    await polling.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [job["state"] for job in service.jobs.values()] == ["cancelled"]
    assert set(service.arrays) == {remote.id}


def test_a_key_that_may_not_look_waits_by_the_submission(client, service, remote, clock) -> None:
    service.polls_until_done = 3
    service.script += [None, problem(403, "forbidden")]  # the submission, the first look
    np.testing.assert_array_equal(client.gemm(remote, remote).numpy(), np.eye(3))
    assert len(service.jobs) == 1
    asked = [request for request in service.requests if request.method == "POST" and request.url.path == "/v1/jobs"]
    assert len(asked) == 4
    assert len({request.headers["idempotency-key"] for request in asked}) == 1
    assert clock.slept, "a server that answers early is not asked without a pause"


def test_a_key_that_may_not_look_has_its_deadline_too(client, service, remote) -> None:
    service.polls_until_done = 10**9
    service.script += [None, problem(403, "forbidden")]
    with pytest.raises(gemmserve.JobTimeout):
        client.gemm(remote, remote, timeout=20)
    assert [job["state"] for job in service.jobs.values()] == ["cancelled"]


def test_a_deadline_cancels_the_job(client, service, remote) -> None:
    service.polls_until_done = 10**9
    with pytest.raises(gemmserve.JobTimeout):
        client.gemm(remote, remote, timeout=20)
    job = next(iter(service.jobs.values()))
    assert job["state"] == "cancelled"
    assert job["request"]["timeout_s"] == 20


def test_a_one_shot_that_is_silent_past_its_deadline(client, service, clock, rng) -> None:
    def silent(_request: httpx.Request) -> None:
        clock.now += 8
        raise httpx.ReadTimeout("silent")

    service.script.append(silent)
    with pytest.raises(gemmserve.JobTimeout, match="within 7 s"):
        client.gemm(np.eye(3), np.eye(3), timeout=7)
    assert len(service.requests) == 1


@pytest.mark.parametrize("failing", ["second upload", "submission"])
def test_uploads_for_a_product_that_fails_do_not_stay(client, service, remote, failing) -> None:
    before = [None] if failing == "second upload" else [None, None]
    service.script += [*before, problem(507, "store-full")]
    with pytest.raises(gemmserve.StoreFull):
        client.gemm(remote, np.ones((3, 3)), np.ones((3, 3)), beta=1)
    assert set(service.arrays) == {remote.id}


def test_a_failure_to_tidy_up_does_not_hide_the_result(client, service, remote) -> None:
    service.script += [None, None, problem(500, "internal")]  # upload, submission, deletion
    np.testing.assert_array_equal(client.gemm(remote, np.ones((3, 3))).numpy(), np.ones((3, 3)))


async def test_a_loop_that_dies_leaves_no_noise(async_client, service) -> None:
    """A coroutine that is closed while it waits must not await again."""
    remote = await async_client.put(np.eye(3))
    service.polls_until_done = 10**9
    async_client._io._sleep = lambda _seconds: asyncio.sleep(0)
    coroutine = async_client.gemm(remote, np.ones((3, 3)))
    for _ in range(5):
        coroutine.send(None)
    coroutine.close()
