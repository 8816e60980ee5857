"""307: what is another cell's, and what is too large for the router."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gemmserve.wire import ROUTED_HEADER
from gemmserve_service.tenancy.api_keys import Quota

ID = "01jd2w7m4h8k3n5p6q9r0s1t2v"
URLS = {"0": "http://127.0.0.1:1", "1": "http://127.0.0.1:2/below"}
ROUTED = {ROUTED_HEADER: "1"}
LARGE = b"x" * ((1 << 20) + 1)


@pytest.fixture
def settings(make_settings, tmp_path):
    path = tmp_path / "cells.json"
    path.write_text(json.dumps({"cells": URLS, "secret": "x" * 32}))
    return make_settings(cell=1, cells_file=path)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", f"/v1/arrays/arr_{ID}"),
        ("GET", f"/v1/arrays/arr_{ID}/data?all=false"),
        ("DELETE", f"/v1/arrays/arr_{ID}"),
        ("GET", f"/v1/jobs/job_{ID}?wait=3"),
        ("PUT", f"/v1/uploads/upl_{ID}/parts/0"),
    ],
)
async def test_what_another_cell_made_is_there(client, method, path):
    answer = await client.request(method, path)
    assert (answer.status_code, answer.headers["location"]) == (307, URLS["0"] + path)
    assert answer.json()["type"] == "/problems/other-cell"


@pytest.mark.parametrize("path", [f"/v1/arrays/arr_{ID}_1", f"/v1/jobs/job_{ID}_1", f"/v1/arrays/arr_{ID}_9"])
async def test_what_this_one_made_and_has_no_more(client, path):
    """Nor is anything sent to a cell that there is not."""
    assert (await client.get(path)).status_code == 404


@pytest.mark.parametrize("path", ["/v1/arrays", "/v1/gemm", "/v1/batch"])
async def test_a_large_body_by_the_router(client, path):
    answer = await client.post(path, content=LARGE, headers=ROUTED | {"Content-Type": "application/x-npy"})
    assert (answer.status_code, answer.headers["location"]) == (307, URLS["1"] + path)
    assert answer.headers["connection"] == "close"


async def test_a_large_body_that_comes_straight(client):
    answer = await client.post("/v1/arrays", content=LARGE, headers={"Content-Type": "application/x-npy"})
    assert answer.json()["type"] == "/problems/invalid-npy"


@pytest.mark.parametrize(("side", "status"), [(512, 200), (513, 307)])
async def test_a_large_download_by_the_router(client, upload, side, status):
    info = await upload(side)
    path = f"/v1/arrays/{info['id']}/data"
    assert (await client.get(path)).status_code == 200
    answer = await client.get(path, headers=ROUTED)
    assert answer.status_code == status
    assert answer.headers.get("location") == (None if status == 200 else URLS["1"] + path)
    assert (await client.head(path, headers=ROUTED)).status_code == 200


@pytest.fixture
def upload(client):
    """upload(n) -> ArrayInfo of n x n float32."""

    async def uploading(side):
        answer = await client.post(
            f"/v1/arrays?dtype=float32&shape={side},{side}",
            content=bytes(4 * side * side),
            headers={"Content-Type": "application/octet-stream"},
        )
        return answer.json()

    return uploading


async def test_ids_say_the_cell(upload):
    assert (await upload(4))["id"].endswith("_1")


async def test_the_key_comes_first(client, make_key):
    """A caller without a key learns nothing of what is where."""
    make_key("alice")
    assert (await client.get(f"/v1/arrays/arr_{ID}")).status_code == 401


async def test_each_cell_grants_its_part_of_a_quota(as_, npy):
    alice = as_("alice", quota=Quota(stored_bytes=2001, queued_jobs=5, device_seconds_per_day=3.0))
    quotas = (await alice.get("/v1/usage")).json()["quotas"]
    limits = {name: quotas[name]["limit"] for name in ("stored_bytes", "queued_jobs", "device_seconds_per_day")}
    assert limits == {"stored_bytes": 1001, "queued_jobs": 3, "device_seconds_per_day": 1.5}
    kind = {"Content-Type": "application/x-npy"}
    assert (await alice.post("/v1/arrays", content=npy(np.zeros(125)), headers=kind)).status_code == 201
    assert (await alice.post("/v1/arrays", content=npy(np.zeros(1)), headers=kind)).status_code == 507


@pytest.mark.parametrize("dry_run", [False, True])
async def test_deletions_of_what_one_other_cell_made_are_there(client, dry_run):
    choice = {"ids": [f"arr_{ID}", f"arr_{ID[::-1]}"], "dry_run": dry_run}
    answer = await client.post("/v1/deletions?all=false", json=choice)
    assert (answer.status_code, answer.headers["location"]) == (307, URLS["0"] + "/v1/deletions?all=false")
    assert answer.json()["type"] == "/problems/other-cell"


async def test_deletions_of_what_several_cells_made(client, upload):
    """Each cell answers for its own; an id of a cell that there is not is this one's to answer for."""
    own = (await upload(4))["id"]
    other, gone, nowhere = f"arr_{ID}", f"arr_{ID}_1", f"arr_{ID}_9"
    choice = {"ids": [other, own, gone, nowhere, other]}
    said = {"count": 1, "nbytes": 64, "missing": [gone, nowhere], "elsewhere": [other], "more": False}
    assert (await client.post("/v1/deletions", json={**choice, "dry_run": True})).json() == said
    assert (await client.get(f"/v1/arrays/{own}")).status_code == 200
    assert (await client.post("/v1/deletions", json=choice)).json() == said
    assert (await client.get(f"/v1/arrays/{own}")).status_code == 404


async def test_states_of_what_one_other_cell_made_are_there(client):
    answer = await client.post("/v1/job-states?all=false", json={"ids": [f"job_{ID}", f"job_{ID[::-1]}"], "wait": 9})
    assert (answer.status_code, answer.headers["location"]) == (307, URLS["0"] + "/v1/job-states?all=false")
    assert answer.json()["type"] == "/problems/other-cell"


async def test_states_of_what_several_cells_made(client, upload):
    """Each cell tells of its own; an id of a cell that there is not is this one's to answer for."""
    array = (await upload(4))["id"]
    job = {"op": "gemm", "a": array, "b": array}
    own = (await client.post("/v1/jobs", json=job, headers={"Prefer": "wait=60"})).json()["id"]
    other, gone, nowhere = f"job_{ID}", f"job_{ID}_1", f"job_{ID}_9"
    for _ in range(2):
        told = (await client.post("/v1/job-states", json={"ids": [other, own, gone, nowhere], "wait": 1})).json()
        assert [each["id"] for each in told["jobs"]] == [own]
        assert (told["missing"], told["elsewhere"]) == ([gone, nowhere], [other])


@pytest.mark.parametrize("results", ["each", "packed", "inline"])
async def test_a_batch_on_what_one_other_cell_made_is_there(client, results):
    items = [{"a": f"arr_{ID}", "b": f"arr_{ID[::-1]}"}]
    answer = await client.post("/v1/batch?timeout_s=9", json={"items": items, "results": results})
    assert (answer.status_code, answer.headers["location"]) == (307, URLS["0"] + "/v1/batch?timeout_s=9")


async def test_a_batch_on_what_several_cells_made(client, upload):
    """What is elsewhere is told of the products that need it; no answer sends the client from cell to cell."""
    own, other = (await upload(4))["id"], f"arr_{ID}"
    items = [{"a": own, "b": own}, {"a": own, "b": other}, {"a": own, "b": f"arr_{ID}_9"}]
    answer = await client.post("/v1/batch", json={"items": items, "results": "each"})
    assert answer.status_code == 200, answer.text
    first, second, third = answer.json()["items"]
    assert first["state"] == "succeeded"
    assert second["error"]["type"] == "/problems/parameter-invalid"
    assert f"cell 0 has {other}" in second["error"]["detail"]
    assert third["error"]["type"] == "/problems/not-found"
    whole = await client.post("/v1/batch", json={"items": items[:2], "results": "packed"})
    assert (whole.status_code, whole.json()["type"]) == (422, "/problems/parameter-invalid")
