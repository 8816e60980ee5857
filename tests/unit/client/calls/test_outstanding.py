"""Outstanding jobs: who waits for one is told of others by the same exchange."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import threading
from types import SimpleNamespace

import httpx
import pytest
from fake_service import problem

import gemmserve
from gemmserve._calls.outstanding import MOST, Outstanding
from gemmserve._model import JobInfo


async def done(result):
    return await result if inspect.isawaitable(result) else result


def handle(number, state="queued", cell=""):
    info = JobInfo.parse({"id": f"job_{number:026d}{cell}", "state": state, "request": {"op": "gemm"}})

    class Handle(SimpleNamespace):
        __hash__ = object.__hash__

    return Handle(info=info)


def ids(handles):
    return [each.info.id for each in handles]


def over(each):
    return JobInfo.parse({"id": each.info.id, "state": "succeeded", "result": {"d": "arr_1"}})


@pytest.fixture
def outstanding():
    return Outstanding()


def test_the_oldest_others_are_asked_for_and_no_two_exchanges_ask_for_the_same(outstanding) -> None:
    handles = [handle(number) for number in range(2 * MOST + 10)]
    for each in handles:
        outstanding.add(each)
    first = outstanding.ask(handles[5].info.id)
    assert first == ids([*handles[:5], *handles[6 : MOST + 1]])
    second = outstanding.ask(handles[-1].info.id)
    assert second == ids(handles[MOST + 1 : 2 * MOST + 1])
    outstanding.asked([handles[5].info.id, *first])
    assert outstanding.ask(handles[0].info.id) == ids(handles[1 : MOST + 1])


def test_what_is_over_or_forgotten_or_another_cell_s_is_not_asked_for(outstanding) -> None:
    there, ended, elsewhere, gone = handle(1), handle(2, "succeeded"), handle(3, cell="_7"), handle(4)
    ends_later = handle(5)
    for each in (there, ended, elsewhere, gone, ends_later):
        outstanding.add(each)
    ends_later.info = over(ends_later)
    del gone, each
    gc.collect()
    assert outstanding.ask("job_" + "9" * 26) == ids([there])
    outstanding.asked(ids([there]))
    assert outstanding.ask("job_" + "9" * 26 + "_7") == ids([elsewhere])


def test_states_are_learnt_with_the_request_that_is_known_and_none_goes_back(outstanding) -> None:
    each = handle(1)
    outstanding.add(each)
    outstanding.learn(over(each))
    assert (each.info.state, each.info.fields["request"]) == ("succeeded", {"op": "gemm"})
    outstanding.learn(handle(1, "running").info)
    assert each.info.state == "succeeded"
    outstanding.learn(handle(2).info)  # of which there is no handle


@pytest.fixture
async def jobs(connected, service, random_complex):
    """Six jobs, each of which is done when it has been asked for twice."""
    remote = await done(connected.put(random_complex(3, 3)))
    service.polls_until_done = 1
    found = await done(connected.submit_many([{"op": "gemm", "a": remote, "b": remote, "name": "n"}] * 6))
    service.requests.clear()
    return found


async def test_one_exchange_tells_of_all_that_are_done(service, jobs) -> None:
    await done(jobs[2].wait())
    assert service.calls == ["POST /v1/job-states"] * 2
    asked = json.loads(service.requests[0].content)
    assert asked["ids"] == [jobs[2].id, *(job.id for job in jobs if job is not jobs[2])]
    assert asked["wait"] > 1
    for job in jobs:
        assert job.done
        assert job.info.fields["request"]["name"] == "n"
        await done(job.result())
    assert not [call for call in service.calls[2:] if "jobs" in call or "job-states" in call]


async def test_a_job_alone_is_asked_for_alone(connected, service, random_complex) -> None:
    remote = await done(connected.put(random_complex(3, 3)))
    service.polls_until_done = 1
    job = await done(connected.submit("gemm", remote, remote))
    await done(job.wait())
    assert "POST /v1/job-states" not in service.calls


@pytest.mark.parametrize("status", [403, 404, 405])
async def test_a_server_without_the_route_is_asked_for_each_and_not_tried_again(service, jobs, status) -> None:
    service.script.append(problem(status, {403: "forbidden", 404: "not-found", 405: "method-not-allowed"}[status]))
    for job in jobs:
        await done(job.wait())
    assert service.calls[0] == "POST /v1/job-states"
    assert set(service.calls[1:]) == {"GET /v1/jobs/job"}
    assert all(job.state == "succeeded" for job in jobs)


async def test_a_job_that_the_server_does_not_know_is_not_found(service, jobs) -> None:
    del service.jobs[jobs[0].id]
    with pytest.raises(gemmserve.NotFound):
        await done(jobs[0].wait())
    await done(jobs[1].wait())
    assert all(job.done for job in jobs[1:])


async def test_other_errors_are_raised_and_others_may_be_asked_for_again(service, jobs) -> None:
    service.script.append(problem(401, "unauthorized"))
    with pytest.raises(gemmserve.Unauthorized):
        await done(jobs[0].wait())
    service.requests.clear()
    await done(jobs[1].wait())
    assert len(json.loads(service.requests[0].content)["ids"]) == 6


async def test_a_wait_that_ends_at_its_deadline_tells_of_others_all_the_same(service, jobs, clock) -> None:
    slow = jobs[0]
    service.jobs[slow.id]["polls"] = 10**9
    with pytest.raises(gemmserve.JobTimeout):
        await done(slow.wait(timeout=30))
    assert all(job.done for job in jobs[1:])
    assert not slow.done
    assert clock.slept, "an answer that comes early is no reason to ask at once"


def test_many_threads_that_wait_at_once(client, service, random_complex) -> None:
    remote = client.put(random_complex(3, 3))
    service.polls_until_done = 3
    jobs = client.submit_many([{"op": "gemm", "a": remote, "b": remote}] * 40)
    threads = [threading.Thread(target=job.wait) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {job.state for job in jobs} == {"succeeded"}
    assert not client._flows.outstanding._asked


async def test_tasks_that_are_cancelled_leave_nothing_asked_for(async_client, service, random_complex) -> None:
    remote = await async_client.put(random_complex(3, 3))
    service.polls_until_done = 10**9
    jobs = await async_client.submit_many([{"op": "gemm", "a": remote, "b": remote}] * 4)
    asked = asyncio.Event()

    async def sleep(_seconds: float) -> None:
        asked.set()
        await asyncio.sleep(0.001)

    async_client._io._sleep = sleep
    waits = [asyncio.create_task(job.wait()) for job in jobs]
    await asked.wait()
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    assert not async_client._flows.outstanding._asked


def test_a_broken_answer_is_told(client, service, random_complex) -> None:
    remote = client.put(random_complex(3, 3))
    service.polls_until_done = 5
    jobs = client.submit_many([{"op": "gemm", "a": remote, "b": remote}] * 2)
    service.script.append(httpx.Response(200, json={"jobs": 7}))
    with pytest.raises(gemmserve.ProtocolError, match="list jobs"):
        jobs[0].wait()
