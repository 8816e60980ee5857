"""Programs over HTTP: what is answered, what is refused and how it is said, whose arrays they may use."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gemmserve_service.runtime.ids import new_id

A = (np.arange(16.0).reshape(4, 4) / 8 + 0.5j).astype("c8")


@pytest.fixture
def put(client, npy):
    async def upload(array, by=client):
        answer = await by.post("/v1/arrays", content=npy(array), headers={"Content-Type": "application/x-npy"})
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    return upload


async def fetch(client, array_id):
    answer = await client.get(f"/v1/arrays/{array_id}/data", headers={"Accept": "application/octet-stream"})
    info = (await client.get(f"/v1/arrays/{array_id}")).json()
    return np.frombuffer(answer.content, info["dtype"]).reshape(info["shape"], order=info["order"])


def gemm(step, a, b, **fields):
    return {"id": step, "op": "gemm", "a": a, "b": b, **fields}


async def submit(client, *steps, headers=None, **fields):
    return await client.post("/v1/jobs", json={"op": "program", "steps": list(steps), **fields}, headers=headers or {})


async def test_a_program(client, put):
    a = await put(A)
    answer = await submit(
        client,
        gemm("x2", a, a, trans_a="C"),
        gemm("x4", "$x2", "$x2"),
        {"id": "y", "op": "gemm_reduce", "a": "$x4", "b": a, "reduce": "absmax"},
        keep=["x4", "y"],
        verify=True,
        headers={"Prefer": "wait=60"},
    )
    assert answer.status_code == 200, answer.text
    job = answer.json()
    assert (job["state"], job["op"]) == ("succeeded", "program")
    assert list(job["result"]) == ["x4", "y.absmax"]
    assert [step["id"] for step in job["steps"]] == ["x2", "x4", "y"]
    assert {step["algorithm"] for step in job["steps"]} == {"numpy"}
    assert "kernel;dur=" in answer.headers["Server-Timing"]
    x2 = A.astype("c16").conj().T @ A
    np.testing.assert_allclose(await fetch(client, job["result"]["x4"]), x2 @ x2, rtol=1e-4)
    np.testing.assert_allclose(await fetch(client, job["result"]["y.absmax"]), np.abs(x2 @ x2 @ A).max(0), rtol=1e-4)
    listed = (await client.get("/v1/jobs")).json()["items"][0]
    assert (listed["id"], listed["request"], listed["steps"]) == (job["id"], None, None)
    assert listed["result"] == job["result"]


async def test_accepted_at_once_and_answered_again_by_its_key(client, put, spy):
    spy.hold = True
    a = await put(A)
    headers = {"Idempotency-Key": "k"}
    first = await submit(client, gemm("x", a, a), headers=headers)
    again = await submit(client, gemm("x", a, a), headers=headers)
    other = await submit(client, gemm("x", a, a, alpha=2), headers=headers)
    assert (first.status_code, again.status_code, other.status_code) == (202, 202, 422)
    assert first.json()["id"] == again.json()["id"]
    assert again.headers["Idempotent-Replayed"] == "true"
    assert first.headers["Location"] == f"/v1/jobs/{first.json()['id']}"
    spy.release()
    done = (await client.get(first.headers["Location"], params={"wait": 60})).json()
    assert done["state"] == "succeeded"


async def test_cancelled_over_http(client, put, spy):
    spy.hold = True
    a = await put(A)
    job = (await submit(client, gemm("x", a, a), gemm("y", "$x", a))).json()
    assert (await client.delete(f"/v1/jobs/{job['id']}")).json()["state"] == "cancelled"
    spy.release()


def named(step, pointer, **fields):
    return {"step": step, "pointer": pointer, **fields}


@pytest.mark.parametrize(
    ("steps", "fields", "status", "slug", "extra"),
    [
        ([gemm("x", "A", "A"), gemm("y", "$x", "$z")], {}, 422, "parameter-invalid", named("y", "/steps/1/b")),
        ([gemm("x", "A", "A"), gemm("y", "$x", "NARROW"), gemm("z", "$y", "$y")], {}, 422, "shape-mismatch",
         named("z", "/steps/2")),
        ([gemm("x", "A", "A", alpha=2), gemm("r", "REAL", "REAL", alpha=[0, 1])], {}, 422, "parameter-invalid",
         named("r", "/steps/1/alpha", parameter="alpha")),
        ([gemm("x", "A", "A"), gemm("y", "$x", "A", compute="ozaki")], {}, 422, "compute-unsupported",
         named("y", "/steps/1")),
        ([gemm("x", "A", "INT")], {}, 422, "dtype-unsupported", named("x", "/steps/0")),
        ([gemm("x", "A", "UNKNOWN")], {}, 404, "not-found", named("x", "/steps/0/b")),
        ([gemm("x", "A", "A"), gemm("x", "A", "A")], {}, 422, "parameter-invalid", named("x", "/steps/1/id")),
        ([gemm("x", "A", "A")], {"keep": ["y"]}, 422, "parameter-invalid", {"parameter": "keep"}),
        ([gemm("x", "A", "A", op="gemv")], {}, 422, "parameter-invalid", {}),
        ([gemm("x", "A", "A", beta="1")], {}, 422, "parameter-invalid", {"parameter": "steps.0.beta"}),
        ([gemm("x", "A", {"step": "y"})], {}, 422, "parameter-invalid", {"parameter": "steps.0.b.id"}),
        ([gemm("x", "A", 5)], {}, 422, "parameter-invalid", {"parameter": "steps.0.b"}),
        ([gemm("x", "A", "nothing")], {}, 422, "parameter-invalid", {"parameter": "steps.0.b"}),
        ([gemm("x", "A", {"id": "$x"})], {}, 422, "parameter-invalid", named("x", "/steps/0/b", parameter="b")),
        ([gemm("x", "A", {"id": "$x", "offset": -1})], {}, 422, "parameter-invalid", {"parameter": "steps.0.b.offset"}),
        ([gemm("x", "A", "A")], {"alpha": 2}, 422, "parameter-invalid", {"parameter": "alpha"}),
        ([], {}, 422, "parameter-invalid", {"parameter": "steps"}),
        (["x"], {}, 422, "parameter-invalid", {"parameter": "steps.0"}),
    ],
)  # fmt: skip
async def test_refused(client, put, core, spy, steps, fields, status, slug, extra):
    arrays = {
        "A": await put(A),
        "NARROW": await put(np.ones((4, 2), "c8")),
        "REAL": await put(np.ones((4, 4), "f4")),
        "UNKNOWN": new_id("arr"),
    }
    if "INT" in json.dumps(steps):
        found = await submit(client, {"id": "i", "op": "gemm_reduce", "a": arrays["A"], "b": arrays["A"],
                                      "reduce": "argmax"}, headers={"Prefer": "wait=60"})  # fmt: skip
        arrays["INT"] = found.json()["result"]["i.argmax"]
    sent = len(spy.sent)
    steps = [
        {name: arrays.get(value, value) if isinstance(value, str) else value for name, value in step.items()}
        if isinstance(step, dict)
        else step
        for step in steps
    ]
    answer = await submit(client, *steps, **fields)
    problem = answer.json()
    assert (answer.status_code, problem["type"]) == (status, f"/problems/{slug}"), problem
    assert {name: problem.get(name) for name in extra} == extra, problem
    if "step" in extra:
        assert problem["detail"].startswith(f"step {extra['step']}: ")
    assert len(spy.sent) == sent
    assert core.scheduler.admissions.steps == 0


async def test_too_many_steps_are_refused_before_they_are_looked_at(client, core):
    steps = [None] * (core.settings.max_program_steps + 1)
    answer = await submit(client, *steps)
    assert (answer.status_code, answer.json()["parameter"]) == (422, "steps")
    assert "at most 1000" in answer.json()["detail"]


async def test_steps_of_something_else(client, put):
    a = await put(A)
    answer = await client.post("/v1/jobs", json={"op": "gemm", "a": a, "b": a, "steps": []})
    assert answer.status_code == 422
    answer = await client.post("/v1/jobs", json={"steps": [gemm("x", a, a)]})
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/parameter-invalid")


async def test_another_owners_arrays_are_not_found(as_, put):
    alice, bob = as_("alice", scopes=["read", "submit"]), as_("bob", scopes=["read", "submit"])
    hers, his = await put(A, by=alice), await put(A, by=bob)
    answer = await submit(bob, gemm("x", his, his), gemm("y", "$x", hers))
    assert (answer.status_code, answer.json()["type"]) == (404, "/problems/not-found")
    assert (answer.json()["step"], answer.json()["pointer"]) == ("y", "/steps/1/b")
    answer = await submit(bob, gemm("x", his, his), headers={"Prefer": "wait=60"})
    assert answer.json()["state"] == "succeeded"
    result = answer.json()["result"]["x"]
    assert (await bob.get(f"/v1/arrays/{result}")).status_code == 200
    assert (await alice.get(f"/v1/arrays/{result}")).status_code == 404
    assert (await alice.get(answer.headers["Location"])).status_code == 404


async def test_events_and_metrics(client, put):
    a = await put(A)
    answer = await submit(client, gemm("x", a, a), gemm("y", "$x", a), headers={"Prefer": "wait=60"})
    events = (await client.get(f"{answer.headers['Location']}/events")).text
    assert '"state":"succeeded"' in events
    assert '"steps":[{"id":"x"' in events
    metrics = (await client.get("/metrics")).text
    assert 'gemmserve_jobs_total{algorithm="numpy",op="program",state="succeeded"} 1.0' in metrics
    assert f'gemmserve_flops_total{{op="program"}} {2 * 8 * 64:.1f}' in metrics
