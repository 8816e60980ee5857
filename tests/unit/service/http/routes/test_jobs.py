"""/v1/jobs through the app: submit, wait, watch, cancel, replay."""

from __future__ import annotations

import asyncio
import json

import numpy as np
import pytest

from gemmserve.wire import MAX_JOBS
from gemmserve_service.http.routes import jobs as routes


@pytest.fixture
async def operands(put, random_array):
    a, b = random_array((40, 30)), random_array((30, 20), seed=1)
    return {"op": "gemm", "a": await put(a), "b": await put(b)}, a @ b


@pytest.fixture
def result(client, read_npy):
    async def fetch(info, name="d"):
        return read_npy((await client.get(f"/v1/arrays/{info['result'][name]}/data")).content)

    return fetch


async def test_submit_then_poll(client, operands, result):
    job, expected = operands
    answer = await client.post("/v1/jobs", json=job)
    assert answer.status_code == 202
    assert answer.headers["location"] == f"/v1/jobs/{answer.json()['id']}"
    assert "preference-applied" not in answer.headers
    answer = await client.get(answer.headers["location"], params={"wait": 60})
    info = answer.json()
    assert (info["state"], info["op"], info["error"]) == ("succeeded", "gemm", None)
    assert info["algorithm"]
    assert {"queue", "h2d", "kernel", "d2h"} <= {
        entry.split(";")[0] for entry in answer.headers["server-timing"].split(", ")
    }
    assert np.allclose(await result(info), expected, rtol=1e-4)


async def test_every_field_arrives(client, put, result, random_array):
    a, b, c = (random_array(shape, "complex128", seed) for seed, shape in enumerate([(6, 4), (5, 6), (4, 5)]))
    job = {
        "op": "gemm", "a": await put(a), "b": await put(b), "c": await put(c), "alpha": [2, -1], "beta": 3,
        "trans_a": "C", "trans_b": "T", "order": "F", "compute": "fp64",
    }  # fmt: skip
    info = (await client.post("/v1/jobs", json=job, headers={"Prefer": "wait=60"})).json()
    d = await result(info)
    assert np.allclose(d, (2 - 1j) * a.conj().T @ b.T + 3 * c)
    assert d.flags.f_contiguous


async def test_reduce_with_several_results(client, put, result, random_array):
    a, b = random_array((9, 7)), random_array((7, 5), seed=1)
    job = {"op": "gemm_reduce", "a": await put(a), "b": await put(b), "reduce": ["absmax", "argmax"], "return_c": True}
    info = (await client.post("/v1/jobs", json=job, headers={"Prefer": "wait=60"})).json()
    assert list(info["result"]) == ["absmax", "argmax", "c"]
    assert np.allclose(await result(info, "absmax"), abs(a @ b).max(0), rtol=1e-4)
    argmax = await result(info, "argmax")
    assert argmax.dtype == np.int64
    assert np.array_equal(argmax, abs(a @ b).argmax(0))
    assert np.allclose(await result(info, "c"), a @ b, rtol=1e-3, atol=1e-4)


async def test_prefer_wait_answers_the_final_state(client, operands):
    job, _ = operands
    answer = await client.post("/v1/jobs", json=job, headers={"Prefer": "respond-async, wait=60"})
    assert (answer.status_code, answer.json()["state"]) == (200, "succeeded")
    assert answer.headers["preference-applied"] == "respond-async, wait=60"
    assert "server-timing" in answer.headers


class TestCappedWait:
    @pytest.fixture
    def settings(self, make_settings):
        return make_settings(max_wait_s=0.2)

    async def test_prefer_wait_ends_in_202(self, client, operands, spy):
        job, _ = operands
        spy.hold = True
        answer = await client.post("/v1/jobs", json=job, headers={"Prefer": "wait=100"})
        assert answer.status_code == 202
        assert answer.json()["state"] in {"queued", "running"}
        answer = await client.get(answer.headers["location"], params={"wait": 100})
        assert (answer.status_code, answer.json()["finished_at"]) == (200, None)
        spy.release()


async def test_unknown_preferences_are_ignored(client, operands):
    job, _ = operands
    answer = await client.post("/v1/jobs", json=job, headers={"Prefer": "wait=soon, handling=strict"})
    assert answer.status_code == 202
    assert "preference-applied" not in answer.headers


async def test_idempotency(client, operands, problem):
    job, _ = operands
    headers = {"Idempotency-Key": "k1", "Prefer": "wait=60"}
    first = await client.post("/v1/jobs", json=job, headers=headers)
    again = await client.post("/v1/jobs", json=job, headers=headers)
    assert again.json()["id"] == first.json()["id"]
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    other = await client.post("/v1/jobs", json=job | {"alpha": 2}, headers=headers)
    problem(other, 422, "idempotency-mismatch")
    assert len((await client.get("/v1/jobs")).json()["items"]) == 1


@pytest.mark.parametrize("program", [False, True])
async def test_beta_that_is_not_given_is_1_with_c(client, operands, put, result, random_array, program):
    job, expected = operands
    c = random_array(expected.shape, seed=2)
    job = job | {"c": await put(c)}

    def asked(product):
        return {"op": "program", "steps": [product | {"id": "d"}]} if program else product

    made = []
    for product in (job, job | {"beta": 1}, job | {"beta": None}):  # the same params: one key serves all
        headers = {"Idempotency-Key": "beta", "Prefer": "wait=60"}
        made.append((await client.post("/v1/jobs", json=asked(product), headers=headers)).json())
    assert len({info["id"] for info in made}) == 1
    request = made[0]["request"]["steps"][0] if program else made[0]["request"]
    assert request["beta"] == 1
    assert np.allclose(await result(made[0]), expected + c, rtol=1e-4)


async def test_a_running_job_has_an_estimate(client, operands, spy):
    job, _ = operands
    spy.hold = True
    submitted = await client.post("/v1/jobs", json=job)
    path = submitted.headers["location"]
    while (info := (await client.get(path)).json())["state"] == "queued":  # noqa: ASYNC110 (over HTTP)
        await asyncio.sleep(0.01)
    assert (info["state"], info["estimated_s"] > 0) == ("running", True)
    spy.release()
    done = (await client.get(path, params={"wait": 60})).json()
    assert (done["state"], done["estimated_s"]) == ("succeeded", None)


async def test_listing_by_state(client, operands, spy):
    job, _ = operands
    done = (await client.post("/v1/jobs", json=job, headers={"Prefer": "wait=60"})).json()["id"]
    spy.hold = True
    waiting = (await client.post("/v1/jobs", json=job)).json()["id"]
    ids = [item["id"] for item in (await client.get("/v1/jobs")).json()["items"]]
    assert ids == [waiting, done]
    only = await client.get("/v1/jobs", params={"state": "succeeded"})
    assert [item["id"] for item in only.json()["items"]] == [done]
    spy.release()


async def test_cancel(client, operands, spy):
    job, _ = operands
    spy.hold = True
    ids = [(await client.post("/v1/jobs", json=job)).json()["id"] for _ in range(3)]
    answer = await client.delete(f"/v1/jobs/{ids[2]}")
    assert (answer.status_code, answer.json()["state"]) == (200, "cancelled")
    spy.release()
    done = await client.get(f"/v1/jobs/{ids[0]}", params={"wait": 60})
    assert done.json()["state"] == "succeeded"
    again = await client.delete(f"/v1/jobs/{ids[0]}")
    assert (again.status_code, again.json()["state"]) == (200, "succeeded")


def parse_events(text):
    events = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if fields:
            events.append((fields["id"], fields["event"], json.loads(fields["data"])))
    return events


@pytest.fixture
def streamed(monkeypatch):
    """streamed(b"id:", 1) -> an event that is set when so many pieces that begin so have been sent to watchers."""
    wanted = []
    stream = routes._event_stream

    async def watch(changes):
        pieces = []
        async for piece in stream(changes):
            yield piece
            pieces.append(piece)
            for beginning, count, event in wanted:
                if sum(one.startswith(beginning) for one in pieces) >= count:
                    event.set()

    monkeypatch.setattr(routes, "_event_stream", watch)

    def want(beginning, count):
        wanted.append((beginning, count, asyncio.Event()))
        return wanted[-1][-1]

    return want


async def test_events_end_with_the_final_state(client, operands, spy, streamed):
    job, _ = operands
    spy.hold = True
    location = (await client.post("/v1/jobs", json=job)).headers["location"]
    told = streamed(b"id:", 1)
    watching = asyncio.ensure_future(client.get(f"{location}/events"))
    async with asyncio.timeout(60):
        await told.wait()
        spy.release()
        answer = await watching
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = parse_events(answer.text)
    states = [data["state"] for _, _, data in events]
    assert states[-1] == "succeeded"
    assert states[0] in {"queued", "running"}
    assert len(set(states)) == len(states)
    assert {kind for _, kind, _ in events} == {"job"}
    assert events[-1][2] == (await client.get(location)).json()
    # What an EventSource does when the stream ends: it comes back with the last id, and is told to stop.
    stop = await client.get(f"{location}/events", headers={"Last-Event-ID": events[-1][0]})
    assert (stop.status_code, stop.content) == (204, b"")
    for stale in ("", "0.queued", "anything at all"):
        again = await client.get(f"{location}/events", headers={"Last-Event-ID": stale})
        assert [data["state"] for _, _, data in parse_events(again.text)] == ["succeeded"]


async def test_events_keep_the_connection_alive(client, operands, spy, streamed, monkeypatch):
    monkeypatch.setattr(routes, "KEEP_ALIVE_S", 0.02)
    job, _ = operands
    spy.hold = True
    location = (await client.post("/v1/jobs", json=job)).headers["location"]
    kept = streamed(b": still here", 3)
    watching = asyncio.ensure_future(client.get(f"{location}/events"))
    async with asyncio.timeout(60):
        await kept.wait()
        spy.release()
        answer = await watching
    assert answer.text.count(": still here\n\n") >= 3


async def test_a_deleted_operand_serves_the_jobs_that_have_it(client, operands, spy, result):
    job, expected = operands
    spy.hold = True
    location = (await client.post("/v1/jobs", json=job)).headers["location"]
    for name in ("a", "b"):
        assert (await client.delete(f"/v1/arrays/{job[name]}")).status_code == 204
    spy.release()
    info = (await client.get(location, params={"wait": 60})).json()
    assert np.allclose(await result(info), expected, rtol=1e-4)
    assert (await client.post("/v1/jobs", json=job)).status_code == 404


class TestQueueFull:
    @pytest.fixture
    def settings(self, make_settings):
        return make_settings(max_queued_jobs=2)

    async def test_retry_after(self, client, operands, spy, problem):
        job, _ = operands
        spy.hold = True
        answers = [await client.post("/v1/jobs", json=job) for _ in range(12)]
        refused = [answer for answer in answers if answer.status_code != 202]
        assert refused
        problem(refused[-1], 429, "queue-full")
        assert int(refused[-1].headers["retry-after"]) >= 1
        assert refused[-1].json()["retry_after_s"] > 0
        spy.release()


class TestSeveral:
    async def test_all_in_one_exchange(self, client, operands, result):
        job, expected = operands
        asked = {"jobs": [job, job | {"alpha": 2}, {**job, "op": "gemm_reduce", "reduce": ["sum", "absmax"]}]}
        answer = await client.post("/v1/jobs", json=asked, headers={"Prefer": "wait=60"})
        assert (answer.status_code, answer.headers["preference-applied"]) == (200, "wait=60")
        assert "location" not in answer.headers
        one, two, reduced = answer.json()["jobs"]
        assert {info["state"] for info in (one, two, reduced)} == {"succeeded"}
        assert "request" not in one
        assert np.allclose(await result(one), expected, rtol=1e-4)
        assert np.allclose(await result(two), 2 * expected, rtol=1e-4)
        assert list(reduced["result"]) == ["sum", "absmax"]
        whole = (await client.get(f"/v1/jobs/{two['id']}")).json()
        assert whole["request"]["alpha"] == 2

    async def test_accepted_at_once(self, client, operands, spy):
        job, _ = operands
        spy.hold = True
        answer = await client.post("/v1/jobs", json={"jobs": [job] * 300})
        assert answer.status_code == 202
        ids = [info["id"] for info in answer.json()["jobs"]]
        assert len(set(ids)) == 300
        spy.release()
        for job_id in ids:
            assert (await client.get(f"/v1/jobs/{job_id}", params={"wait": 60})).json()["state"] == "succeeded"

    async def test_sent_again_with_the_key_it_asks_for_their_states(self, client, operands, problem):
        job, _ = operands
        headers = {"Idempotency-Key": "several"}
        first = await client.post("/v1/jobs", json={"jobs": [job] * 3}, headers=headers)
        assert "idempotent-replayed" not in first.headers
        again = await client.post("/v1/jobs", json={"jobs": [job] * 3}, headers=headers | {"Prefer": "wait=60"})
        assert (again.status_code, again.headers["idempotent-replayed"]) == (200, "true")
        assert [info["id"] for info in again.json()["jobs"]] == [info["id"] for info in first.json()["jobs"]]
        problem(await client.post("/v1/jobs", json={"jobs": [job] * 2}, headers=headers), 422, "idempotency-mismatch")
        assert len((await client.get("/v1/jobs")).json()["items"]) == 3

    @pytest.mark.parametrize("company", [1, 100])  # a short body, and one that is read piece by piece
    async def test_none_where_one_is_wrong(self, client, operands, put, random_array, problem, company):
        job, _ = operands
        missing = job | {"a": "arr_" + "0" * 26}
        narrow = job | {"b": await put(random_array((7, 7)))}
        for wrong, status, slug in ((missing, 404, "not-found"), (narrow, 422, "shape-mismatch")):
            answer = await client.post("/v1/jobs", json={"jobs": [job] * company + [wrong]})
            found = problem(answer, status, slug)
            assert (found["item"], found["pointer"]) == (company, f"/jobs/{company}")
        answer = await client.post("/v1/jobs", json={"jobs": [job] * company + [job | {"alpah": 2}]})
        found = problem(answer, 422, "parameter-invalid")
        assert [entry["field"] for entry in found["errors"]] == [f"jobs.{company}.alpah"]
        assert (found["item"], found["pointer"]) == (company, f"/jobs/{company}")
        assert (await client.get("/v1/jobs")).json()["items"] == []

    @pytest.mark.parametrize(
        ("asked", "said"),
        [
            ({"jobs": []}, "jobs"),
            ({"jobs": {}}, "jobs"),
            ({"jobs": None}, "jobs"),
            ({"jobs": [1]}, "jobs.0"),
            ({"jobs": [{}]}, "jobs.0.op"),
        ],
    )
    async def test_what_is_no_list_of_jobs(self, client, problem, asked, said):
        found = problem(await client.post("/v1/jobs", json=asked), 422, "parameter-invalid")
        assert found["errors"][0]["field"] == said

    async def test_nothing_beside_the_list(self, client, operands, problem):
        job, _ = operands
        for company in (1, 100):
            answer = await client.post("/v1/jobs", json={"jobs": [job] * company, "priority": 3})
            assert problem(answer, 422, "parameter-invalid")["errors"][0]["field"] == "priority"

    async def test_too_many(self, client, operands, problem):
        job, _ = operands
        for count in (MAX_JOBS + 1, 2 * MAX_JOBS):
            answer = await client.post("/v1/jobs", json={"jobs": [job] * count})
            assert problem(answer, 422, "parameter-invalid")["parameter"] == "jobs"
        few = {"jobs": [1] * (MAX_JOBS + 1)}  # short enough to be read at one go
        assert problem(await client.post("/v1/jobs", json=few), 422, "parameter-invalid")["parameter"] == "jobs"


async def test_results_by_name(client, operands, put, random_array):
    job, _ = operands
    wait = {"Prefer": "wait=60"}

    async def named(name):
        return [info["id"] for info in (await client.get("/v1/arrays", params={"name": name})).json()["items"]]

    single = (await client.post("/v1/jobs", json={**job, "name": "d7", "labels": {"run": "7"}}, headers=wait)).json()
    assert (single["request"]["name"], single["request"]["labels"]) == ("d7", {"run": "7"})
    assert await named("d7") == [single["result"]["d"]]
    several = {**job, "op": "gemm_reduce", "reduce": ["sumsq", "absmax"], "name": "power", "labels": {"run": "7"}}
    made = (await client.post("/v1/jobs", json=several, headers=wait)).json()
    for name, array in made["result"].items():
        assert await named(f"power.{name}") == [array]
    step = {"id": "x", "op": "gemm", "a": job["a"], "b": job["b"]}
    program = {"op": "program", "steps": [step], "name": "p", "labels": {"run": "7"}}
    made = (await client.post("/v1/jobs", json=program, headers=wait)).json()
    assert await named("p") == [made["result"]["x"]]
    assert len((await client.get("/v1/arrays", params={"label": "run=7"})).json()["items"]) == 4
    plain = (await client.post("/v1/jobs", json=job, headers=wait)).json()
    assert not {"name", "labels"} & plain["request"].keys()


@pytest.mark.parametrize("field", [{"name": "a b"}, {"labels": {"a b": "7"}}, {"labels": {"a": "\n"}}, {"name": 7}])
async def test_names_of_results_that_are_none(client, operands, problem, field):
    problem(await client.post("/v1/jobs", json={**operands[0], **field}), 422, "parameter-invalid")
