"""What a caller may see of the core, and how it is put."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gemmserve_service.executor.protocol import Kept
from gemmserve_service.http.overview import snapshot as module
from gemmserve_service.http.overview.recent import Recent
from gemmserve_service.schemas import DeviceHealth
from gemmserve_service.tenancy.api_keys import Scope


async def overview(client):
    answer = await client.get("/v1/overview")
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def submit(put):
    async def make(client, npy, shape=(4, 6), **fields):
        headers = {"Content-Type": "application/x-npy"}
        ids = []
        for extents in (shape, shape[::-1]):
            body = npy(np.ones(extents, "complex64"))
            ids.append((await client.post("/v1/arrays", content=body, headers=headers)).json()["id"])
        answer = await client.post("/v1/jobs", json={"op": "gemm", "a": ids[0], "b": ids[1], **fields})
        assert answer.status_code == 202, answer.text
        return answer.json()["id"]

    return make


async def test_an_idle_server(client, core):
    found = await overview(client)
    assert (found["state"], found["ready"], found["reasons"]) == ("ready", True, [])
    assert (found["queue"], found["failures"], found["history"]) == ([], [], None)
    assert found["started"] == core.started_at
    assert abs(found["time"] - core.started_at) < 3600
    (device,) = found["devices"]
    assert (device["index"], device["id"], device["backend"], device["state"]) == (0, "cpu", "cpu", "ready")
    assert device["memory_bytes"] == core.executor.workers()[0].spec.memory_bytes
    assert (device["utilisation"], device["health"], device["running"]) == (None, [], [])
    assert found["memory"]["arena"] is None
    assert found["memory"]["tier"] is None


async def test_what_runs_and_what_waits(client, npy, submit, spy):
    spy.hold = True
    first = await submit(client, npy)
    second = await submit(client, npy)
    found = await overview(client)
    (running,) = found["devices"][0]["running"]
    assert (running["id"], running["kind"], running["owner"]) == (first, "gemm", None)
    assert running["what"] == "4 x 4 x 6 complex64"
    assert found["started"] - 1 <= running["since"] <= found["time"]
    (line,) = found["queue"]
    assert (line["owner"], line["queued"], line["running"]) == (None, 1, 1)
    assert running["since"] - 1 <= line["oldest"] <= found["time"]
    spy.release()
    for job in (first, second):
        await client.get(f"/v1/jobs/{job}?wait=60")
    found = await overview(client)
    assert (found["queue"], found["devices"][0]["running"]) == ([], [])


@pytest.mark.parametrize("fraction", [0.0, 0.0049, 0.005, 0.0099])
async def test_no_moment_is_one_to_come(client, npy, submit, spy, core, monkeypatch, fraction):
    spy.hold = True
    await submit(client, npy)
    await submit(client, npy)
    now = 1795472876.32 + fraction
    monkeypatch.setattr(module.clock, "time", lambda: now)
    monkeypatch.setattr(module.time, "monotonic", lambda: core.scheduler.queue.oldest(""))
    snapshot = module.Snapshot(core, Recent())
    monkeypatch.undo()
    found = snapshot.overview(module.View("", everybody=True))
    assert found.queue[0].oldest <= found.time < found.queue[0].oldest + 0.011
    spy.release()


async def test_batches_and_programs_in_words(client, put, spy):
    spy.hold = True
    a = await put(np.ones((3, 2, 2), "f4"))
    step = {"op": "gemm", "a": a, "b": a}
    await client.post("/v1/jobs", json=step)
    steps = [{"id": "x", **step}, {"id": "y", "op": "gemm", "a": "$x", "b": a}]
    await client.post("/v1/jobs", json={"op": "program", "steps": steps})
    tasks = [*spy.workers()[0].tasks.values(), *client._transport.app.state.core.scheduler.queue]
    assert {module._what(task) for task in tasks} == {"3 of 2 x 2 x 2 float32", "2 steps"}
    spy.release()


async def test_sensors_and_residency(client, core, spy):
    worker = spy.workers()[0]
    worker.health = DeviceHealth(utilisation=0.5, temperature_celsius=61, warnings=("throttled",))
    worker.kept = Kept(used=10, budget=100, hits=3, misses=4)
    found = await overview(client)
    (device,) = found["devices"]
    assert (device["utilisation"], device["temperature_celsius"], device["power_watts"]) == (0.5, 61, None)
    assert (device["health"], device["resident_bytes"]) == (["throttled"], 10)
    assert found["memory"]["resident"] == {"bytes": 10, "limit": 100, "hits": 3, "misses": 4}
    worker.ready = False
    (device,) = (await overview(client))["devices"]
    assert (device["state"], device["utilisation"], device["health"]) == ("starting", None, [])


async def test_why_it_is_not_ready_and_what_to_do(client, core, spy):
    spy.workers()[0].ready = False
    found = await overview(client)
    assert (found["state"], found["ready"]) == ("not ready", False)
    (reason,) = found["reasons"]
    assert reason["reason"] == "no worker has answered a verified product"
    assert "gemmserve doctor" in reason["remedy"]
    await core.drain(0)
    found = await overview(client)
    assert found["state"] == "draining"
    assert [each["reason"] for each in found["reasons"]] == core.ready()[1]


async def test_failures_with_their_problem_and_remedy(client, npy, submit, spy, form):
    spy.hold = True
    job = await submit(client, npy, timeout_s=0.01)
    await client.get(f"/v1/jobs/{job}?wait=60")
    body, headers = form([("a", npy(np.ones((8, 8)))), ("b", npy(np.ones((8, 8))))])
    answer = await client.post("/v1/gemm", params={"timeout_s": 0.01}, content=body, headers=headers)
    assert answer.status_code == 504
    newest, oldest = (await overview(client))["failures"]
    assert (oldest["job"], oldest["kind"], oldest["owner"]) == (job, "gemm", None)
    assert oldest["problem"]["type"] == "/problems/timeout"
    assert oldest["problem"] == {**oldest["problem"], "status": 504, "title": "The deadline passed"}
    assert "timeout_s" in oldest["remedy"]
    assert (newest["job"], newest["problem"]["type"]) == (None, "/problems/timeout")
    assert newest["time"] >= oldest["time"]
    spy.release()


async def test_others_are_summed_without_names(as_, npy, submit, spy):
    """Alice and Bob work, Carol reads, and an admin sees who it is."""
    alice, bob = as_("alice"), as_("bob")
    carol, admin = as_("carol", scopes=[Scope.READ]), as_("root", scopes=[Scope.ADMIN])
    spy.hold = True
    first = await submit(alice, npy)
    second = await submit(bob, npy, timeout_s=600)
    third = await submit(bob, npy, timeout_s=600)
    expired = await submit(bob, npy, timeout_s=0.01)
    await bob.get(f"/v1/jobs/{expired}?wait=60")

    found = await overview(alice)
    assert [each["id"] for each in found["devices"][0]["running"]] == [first]
    lines = [(line["owner"], line["queued"], line["running"]) for line in found["queue"]]
    assert lines == [("alice", 0, 1), (None, 2, 0)]
    assert found["failures"] == []

    found = await overview(bob)
    (running,) = found["devices"][0]["running"]
    assert running == {"id": None, "kind": None, "what": None, "since": running["since"], "owner": None}
    lines = [(line["owner"], line["queued"], line["running"]) for line in found["queue"]]
    assert lines == [("bob", 2, 0), (None, 0, 1)]
    assert [each["job"] for each in found["failures"]] == [expired]

    found = await overview(carol)
    assert [(line["owner"], line["queued"], line["running"]) for line in found["queue"]] == [(None, 2, 1)]
    text = json.dumps(found)
    assert not any(word in text for word in ("alice", "bob", first, second, third, expired, "4 x 4"))

    found = await overview(admin)
    assert [each["owner"] for each in found["devices"][0]["running"]] == ["alice"]
    assert {line["owner"]: line["queued"] for line in found["queue"]} == {"alice": 0, "bob": 2}
    assert [(each["owner"], each["job"]) for each in found["failures"]] == [("bob", expired)]
    spy.release()


async def test_many_owners_are_summed(core, monkeypatch):
    shares = {f"owner {number:03}": module._Share(queued=number + 1) for number in range(120)}
    monkeypatch.setattr(module, "_shares", lambda _: shares)
    found = module.Snapshot(core, Recent()).overview(module.View("", everybody=True)).queue
    assert len(found) == 51
    assert (found[0].owner, found[0].queued) == ("owner 119", 120)
    assert (found[-1].owner, found[-1].queued) == (None, sum(range(1, 71)))
