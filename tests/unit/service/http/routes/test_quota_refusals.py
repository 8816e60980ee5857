"""Quotas over HTTP: refused with the right status and time, exact under concurrency, given back in full."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from gemmserve_service.tenancy.api_keys import Quota, Scope

NOON = 20_000 * 86_400 + 43_200.0


@pytest.fixture
def core(core, monkeypatch):
    """It is noon for its quotas: no day ends within a test."""
    monkeypatch.setattr(core.quotas, "_clock", lambda: NOON)
    return core


async def put(client, body):
    answer = await client.post("/v1/arrays", content=body, headers={"Content-Type": "application/x-npy"})
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


async def test_stored_bytes(as_, npy, problem, core):
    alice = as_("alice", quota=Quota(stored_bytes=10_000))
    bob = as_("bob")
    first = await put(alice, npy(np.zeros(1000)))
    answer = await alice.post("/v1/arrays", content=npy(np.zeros(300)), headers={"Content-Type": "application/x-npy"})
    document = problem(answer, 507, "quota-exceeded")
    assert (document["quota"], document["limit"], document["used"]) == ("stored_bytes", 10_000, 8000)
    assert "retry-after" not in answer.headers
    await put(bob, npy(np.zeros(300)))
    await alice.delete(f"/v1/arrays/{first}")
    await put(alice, npy(np.zeros(1250)))
    assert core.quotas.stored_bytes(alice.key_id) == 10_000


async def test_results_are_charged_when_the_job_is_accepted(as_, npy, problem, spy):
    alice = as_("alice", quota=Quota(stored_bytes=3 * 800))
    spy.hold = True
    a = await put(alice, npy(np.zeros((10, 10))))
    job = {"op": "gemm", "a": a, "b": a}
    first = (await alice.post("/v1/jobs", json=job)).json()
    assert (await alice.post("/v1/jobs", json=job)).status_code == 202
    problem(await alice.post("/v1/jobs", json=job), 507, "quota-exceeded")
    await alice.delete(f"/v1/jobs/{first['id']}")
    spy.release()
    async with asyncio.timeout(60):
        while (await alice.post("/v1/jobs", json=job)).status_code != 202:  # noqa: ASYNC110 (its room is free once it has ended)
            await asyncio.sleep(0.02)


async def test_concurrent_uploads_never_exceed_the_quota(as_, npy, core):
    """Twenty at once, each of which needs a tenth: exactly ten are taken."""
    alice = as_("alice", quota=Quota(stored_bytes=8000))
    body = npy(np.zeros(100))
    answers = await asyncio.gather(
        *[alice.post("/v1/arrays", content=body, headers={"Content-Type": "application/x-npy"}) for _ in range(20)]
    )
    assert sorted(answer.status_code for answer in answers) == [201] * 10 + [507] * 10
    assert core.quotas.stored_bytes(alice.key_id) == 8000
    assert core.quotas.inflight_bytes(alice.key_id) == 0


async def test_bytes_in_flight(as_, npy, form, problem, core):
    alice = as_("alice", quota=Quota(inflight_bytes=2000))
    small, large = npy(np.zeros((10, 10))), npy(np.zeros((16, 16)))
    body, headers = form([("a", small), ("b", small)])
    answer = await alice.post("/v1/gemm", content=body, headers=headers)
    problem(answer, 429, "quota-exceeded")  # two operands of 800 bytes fit, their product does not
    assert int(answer.headers["retry-after"]) >= 1
    answer = await alice.post("/v1/arrays", content=large, headers={"Content-Type": "application/x-npy"})
    problem(answer, 429, "quota-exceeded")
    assert core.quotas.inflight_bytes(alice.key_id) == 0
    body, headers = form([("a", npy(np.zeros((4, 10)))), ("b", small)])
    assert (await alice.post("/v1/gemm", content=body, headers=headers)).status_code == 200
    assert core.quotas.inflight_bytes(alice.key_id) == 0


async def test_queued_jobs(as_, npy, problem, spy):
    alice, bob = as_("alice", quota=Quota(queued_jobs=2)), as_("bob")
    spy.hold = True
    ids = {}
    for client in (alice, bob):
        ids[client] = await put(client, npy(np.eye(4)))

    async def submit(client):
        return await client.post("/v1/jobs", json={"op": "gemm", "a": ids[client], "b": ids[client]})

    first = [await submit(alice) for _ in range(3)]  # one runs, two wait
    assert [answer.status_code for answer in first] == [202] * 3
    answer = await submit(alice)
    document = problem(answer, 429, "quota-exceeded")
    assert (document["quota"], document["used"]) == ("queued_jobs", 2)
    assert int(answer.headers["retry-after"]) >= 1
    assert (await submit(bob)).status_code == 202
    await alice.delete(f"/v1/jobs/{first[2].json()['id']}")
    assert (await submit(alice)).status_code == 202
    spy.release()


async def test_device_seconds(as_, npy, form, problem, core):
    alice = as_("alice", quota=Quota(device_seconds_per_day=1e-9))
    a = await put(alice, npy(np.ones((64, 64))))
    job = {"op": "gemm", "a": a, "b": a}
    assert (await alice.post("/v1/jobs", json=job, headers={"Prefer": "wait=60"})).json()["state"] == "succeeded"
    answer = await alice.post("/v1/jobs", json=job)
    assert problem(answer, 429, "quota-exceeded")["quota"] == "device_seconds_per_day"
    assert 0 < int(answer.headers["retry-after"]) <= 86_400
    body, headers = form([("a", npy(np.eye(2))), ("b", npy(np.eye(2)))])
    problem(await alice.post("/v1/gemm", content=body, headers=headers), 429, "quota-exceeded")


async def test_one_shots_use_device_seconds_too(as_, npy, form, core):
    alice = as_("alice")
    body, headers = form([("a", npy(np.ones((64, 64)))), ("b", npy(np.ones((64, 64))))])
    assert (await alice.post("/v1/gemm", content=body, headers=headers)).status_code == 200
    assert core.quotas.device_seconds(alice.key_id) > 0


async def test_usage(npy, as_):
    alice, bob, admin = as_("alice"), as_("bob"), as_("admin", scopes=[Scope.ADMIN])
    carol = as_("carol", quota=Quota(stored_bytes=10_000, queued_jobs=5))
    await put(carol, npy(np.zeros(100)))
    a = await put(alice, npy(np.ones((64, 64))))
    await alice.post("/v1/jobs", json={"op": "gemm", "a": a, "b": a}, headers={"Prefer": "wait=60"})
    usage = (await carol.get("/v1/usage")).json()
    assert usage["owner"] == carol.key_id
    assert (usage["arrays"], usage["store_bytes"], usage["jobs_queued"]) == (1, 800, 0)
    assert usage["quotas"]["stored_bytes"] == {"used": 800, "limit": 10_000}
    assert usage["quotas"]["queued_jobs"] == {"used": 0, "limit": 5}
    assert usage["quotas"]["inflight_bytes"]["limit"] is None
    used = (await alice.get("/v1/usage")).json()["quotas"]
    assert used["stored_bytes"]["used"] == 2 * 64 * 64 * 8
    assert used["device_seconds_per_day"]["used"] > 0
    everybody = (await admin.get("/v1/usage", params={"all": True})).json()
    assert everybody["store_bytes"] == 800 + 2 * 64 * 64 * 8
    by_owner = {entry["owner"]: entry["store_bytes"] for entry in everybody["owners"]}
    assert (by_owner[carol.key_id], by_owner[bob.key_id]) == (800, 0)
    assert (await carol.get("/v1/usage", params={"all": True})).status_code == 403
