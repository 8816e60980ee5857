"""/v1/job-states through the app: several jobs at once, of which the first may be waited for."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from gemmserve.wire import MAX_STATES
from gemmserve_service.http.routes import jobs

NPY = {"Content-Type": "application/x-npy"}
UNKNOWN = "job_" + "0" * 26


@pytest.fixture
def submit(client, put, random_array):
    """Submits products of a small array; returns their ids."""

    async def jobs(count, *, http=client, prefer=None):
        a = await put(random_array((5, 5)))
        job = {"op": "gemm", "a": a, "b": a}
        headers = {} if prefer is None else {"Prefer": prefer}
        answer = await http.post("/v1/jobs", json={"jobs": [job] * count}, headers=headers)
        return [each["id"] for each in answer.json()["jobs"]]

    return jobs


@pytest.fixture
def states(client):
    async def ask(http=client, **question):
        answer = await http.post("/v1/job-states", json=question)
        assert answer.status_code == 200, answer.text
        assert answer.headers["cache-control"] == "no-store"
        return answer.json()

    return ask


@pytest.fixture
def forgotten(core):
    """Has finished jobs be in the database alone."""
    return core.jobs._recent.clear


@pytest.mark.parametrize("where", ["memory", "database"])
async def test_states_are_those_that_each_job_tells_of_itself_but_for_its_request(
    client, submit, states, forgotten, where
):
    ids = await submit(4, prefer="wait=60")
    if where == "database":
        forgotten()
    told = await states(ids=[*ids[::-1], UNKNOWN])
    assert (told["missing"], told["elsewhere"]) == ([UNKNOWN], [])
    assert [job["id"] for job in told["jobs"]] == ids[::-1]
    for job in told["jobs"]:
        alone = (await client.get(f"/v1/jobs/{job['id']}")).json()
        assert job.get("request") is None
        assert job["state"] == "succeeded"
        assert {**job, "request": None} == {**alone, "request": None}


async def test_the_first_one_is_waited_for_and_no_other(core, submit, states, spy):
    (done,) = await submit(1, prefer="wait=60")
    spy.hold = True
    held = [(await submit(1))[0] for _ in range(2)]
    told = await states(ids=[done, *held], wait=60)
    assert [job["state"] == "succeeded" for job in told["jobs"]] == [True, False, False], "it is over already"
    told = await states(ids=[held[0], done], wait=0.01)
    assert [job["state"] == "succeeded" for job in told["jobs"]] == [False, True], "it was waited for in vain"
    asked = asyncio.create_task(states(ids=[held[0], done, held[1]], wait=60))
    live = core.jobs._live[held[0]]
    async with asyncio.timeout(20):
        while live._watchers is None:  # noqa: ASYNC110 (another task's doing)
            await asyncio.sleep(0.001)
    assert not asked.done()
    spy.release()
    told = await asked
    assert [job["id"] for job in told["jobs"]] == [held[0], done, held[1]]
    assert [job["state"] for job in told["jobs"][:2]] == ["succeeded"] * 2


async def test_of_the_others_those_alone_that_are_final(submit, states, spy, forgotten):
    done = await submit(3, prefer="wait=60")
    spy.hold = True
    held = [(await submit(1))[0] for _ in range(2)]
    for _ in range(2):
        told = await states(ids=[held[0], done[0], held[1], *done[1:], UNKNOWN], final=True)
        assert [job["id"] for job in told["jobs"]] == [held[0], *done]
        assert told["missing"] == [UNKNOWN]
        forgotten()
    spy.release()


async def test_the_setting_caps_the_wait(core, submit, states, monkeypatch):
    waits = []

    async def wait(job_id, timeout_s, *, owner):
        waits.append((job_id, timeout_s, owner))

    ids = await submit(2, prefer="wait=60")
    monkeypatch.setattr(core.jobs, "wait_until_over", wait)
    await states(ids=ids, wait=86_400)
    await states(ids=ids)
    assert waits == [(ids[0], core.settings.max_wait_s, "")]


async def test_programs_and_jobs_that_failed(client, put, states, spy, forgotten):
    a = await put(np.ones((3, 3)))
    program = {"op": "program", "steps": [{"id": "x", "op": "gemm", "a": a, "b": a}], "keep": ["x"]}
    made = []
    for job in (program, {"op": "gemm", "a": a, "b": a, "timeout_s": 0.01}):
        made.append((await client.post("/v1/jobs", json=job, headers={"Prefer": "wait=60"})).json()["id"])
        spy.hold = True  # the second is not computed in time
    spy.release()
    for _ in range(2):
        told = (await states(ids=made))["jobs"]
        assert [job["state"] for job in told] == ["succeeded", "expired"]
        assert all(job.get("request") is None for job in told)
        assert told[1]["error"]["status"] == 504
        forgotten()


@pytest.mark.parametrize(
    "body",
    [
        b"{}", b'{"ids": []}', b'{"ids": ["x"]}', b'{"ids": "job_00000000000000000000000000"}', b"[]", b'{"ids": [7]}',
        b'{"ids": ["arr_00000000000000000000000000"]}', b'{"ids": ["job_00000000000000000000000000"], "wait": -1}',
        b'{"ids": ["job_00000000000000000000000000"], "wait": "1"}',
        b'{"ids": ["job_00000000000000000000000000"], "wait": 86401}',
        b'{"ids": ["job_00000000000000000000000000"], "all": true}',
        json.dumps({"ids": [f"job_{number:026d}" for number in range(MAX_STATES + 1)]}).encode(),
    ],
)  # fmt: skip
async def test_a_question_that_is_none(client, problem, body):
    answer = await client.post("/v1/job-states", content=body, headers={"Content-Type": "application/json"})
    problem(answer, 422, "parameter-invalid")


@pytest.mark.parametrize(
    ("content", "kind", "status", "slug"),
    [
        (b"{", "application/json", 400, "malformed-json"),
        (b"", "application/json", 400, "malformed-json"),
        (b'{"ids": ["job_00000000000000000000000000"], "wait": NaN}', "application/json", 400, "malformed-json"),
        (b"{}", "text/plain", 415, "unsupported-media-type"),
        (b'{"ids": ["%s"]}' % (b"a" * jobs._MAX_QUESTION), "application/json", 413, "too-large"),
    ],
)
async def test_bodies(client, problem, content, kind, status, slug):
    answer = await client.post("/v1/job-states", content=content, headers={"Content-Type": kind})
    problem(answer, status, slug)


async def test_as_many_as_there_may_be(submit, states):
    ids = await submit(20, prefer="wait=60")
    unknown = [f"job_{number:026d}" for number in range(MAX_STATES - 20)]
    told = await states(ids=[*unknown, *ids], wait=60)
    assert [job["id"] for job in told["jobs"]] == ids
    assert told["missing"] == unknown


async def test_owners_are_apart_and_a_key_that_may_only_look_may_ask(as_, npy, states, problem):
    alice, bob = as_("alice"), as_("bob")
    reader = as_("alice", scopes=["read"])
    a = (await alice.post("/v1/arrays", content=npy(np.ones((3, 3))), headers=NPY)).json()["id"]
    job = {"op": "gemm", "a": a, "b": a}
    made = (await alice.post("/v1/jobs", json=job, headers={"Prefer": "wait=60"})).json()["id"]
    assert (await states(bob, ids=[made], wait=5))["missing"] == [made]
    assert [each["id"] for each in (await states(alice, ids=[made]))["jobs"]] == [made]
    answer = await reader.post("/v1/job-states", json={"ids": [made]})
    assert answer.status_code == 200
    problem(await bob.post("/v1/job-states", params={"all": "true"}, json={"ids": [made]}), 403, "forbidden")
