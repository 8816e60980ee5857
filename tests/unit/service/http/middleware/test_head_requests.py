"""HEAD wherever GET does: the same head, nothing behind it, and no work that goes on."""

from __future__ import annotations

import numpy as np
import pytest


def paths(app):
    """Every GET of the API without a parameter in its path, and operators' pages."""
    document = app.openapi()
    found = {"/", "/docs", "/openapi.json", *(path for path, it in document["paths"].items() if "get" in it)}
    # The stream does not end, and there is no region of shared memory.
    return sorted(found - {"/v1/overview/stream", "/v2/systemsharedmemory/region/{name}/status"})


async def test_every_get(app, client, put):
    array = await put(np.ones((3, 2)))
    job = (await client.post("/v1/jobs", json={"op": "gemm_reduce", "a": array, "b": array, "trans_b": "T"})).json()
    assert (await client.get(f"/v1/jobs/{job['id']}", params={"wait": 30})).json()["state"] == "succeeded"
    headers = {"Content-Type": "application/octet-stream"}
    upload = (await client.post("/v1/uploads?dtype=float32&shape=4", headers=headers)).headers["location"]
    names = {
        "array_id": array, "job_id": job["id"], "upload_id": upload.rpartition("/")[2], "slug": "not-found",
        "model": "gemm", "version": "1",
    }  # fmt: skip
    seen = 0
    for path in paths(app):
        url = path.format(**names)
        got, asked = await client.get(url), await client.head(url)
        assert asked.status_code == got.status_code < 400, url
        assert asked.headers.get("content-type") == got.headers.get("content-type"), url
        assert asked.headers["x-content-type-options"] == "nosniff"
        assert asked.content == b"", url
        seen += 1
    assert seen > 12


async def test_what_has_no_get(client, problem):
    for path, status in (("/v1/gemm", 405), ("/nowhere", 404), ("/v1/arrays/arr_x", 404)):
        assert (await client.head(path)).status_code == status


async def test_a_get_is_told_of(client):
    assert (await client.post("/livez")).headers["allow"] == "GET, HEAD"


@pytest.mark.parametrize("path", ["/livez", "/v1/arrays", "/metrics", "/v1/jobs"])
def test_on_the_wire(live, path):
    """Its length is told, and the next answer begins where it ends."""
    with live.http() as http:
        for _ in range(3):
            answer = http.head(path)
            assert (answer.status_code, answer.content) == (200, b"")
            assert int(answer.headers["content-length"]) > 0
            assert http.get("/livez").json()["status"] == "ok"


def test_a_stream_of_events_ends_with_its_head(live, npy):
    live.executor.hold = True
    with live.http() as http:
        upload = http.post("/v1/arrays", content=npy(np.eye(2)), headers={"Content-Type": "application/x-npy"})
        array = upload.json()["id"]
        job = http.post("/v1/jobs", json={"op": "gemm", "a": array, "b": array}).json()["id"]
        answer = http.head(f"/v1/jobs/{job}/events")
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert http.head("/v1/overview/stream").headers["content-type"].startswith("text/event-stream")
        assert http.get("/livez").status_code == 200
        live.executor.release()


async def test_the_log_knows_the_route(app, client):
    counted = []
    app.state.metrics.request_done = lambda *args, **_: counted.append(args)
    await client.head("/v1/arrays")
    assert counted == [("/v1/arrays", "HEAD", 200)]
