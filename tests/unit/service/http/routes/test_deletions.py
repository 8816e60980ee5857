"""/v1/deletions through the app: many at once, by their ids, name, labels or age."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gemmserve.wire import MAX_DELETED

NPY = {"Content-Type": "application/x-npy"}


@pytest.fixture
def delete(client):
    async def ask(http=client, **choice):
        answer = await http.post("/v1/deletions", json=choice)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return ask


@pytest.fixture
def left(client):
    async def listing():
        return {info["id"] for info in (await client.get("/v1/arrays")).json()["items"]}

    return listing


async def test_by_id(delete, put, left, core):
    ids = [await put(np.ones(1000)) for _ in range(5)]
    unknown = "arr_" + "0" * 26
    assert await delete(ids=[*ids[:4], unknown, ids[0]]) == {
        "count": 4, "nbytes": 32_000, "missing": [unknown], "elsewhere": [], "more": False,
    }  # fmt: skip
    assert await left() == {ids[4]}
    assert (await delete(ids=ids))["missing"] == ids[:4], "so it may be sent again"
    assert await left() == set()
    assert core.store.used_bytes == 0


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ({"name": "a"}, {0, 1}),
        ({"labels": {"run": "7"}}, {0, 2}),
        ({"name": "a", "labels": {"run": "7"}}, {0}),
        ({"name": "nobody"}, set()),
        ({"older_than_s": 0}, {0, 1, 2, 3}),
        ({"older_than_s": 1e12}, set()),
        ({"older_than_s": 3600, "name": "a"}, set()),
    ],
)
async def test_by_what_they_are(delete, put, left, choice, chosen):
    tags = [{"name": "a", "label": "run=7"}, {"name": "a"}, {"label": ["run=7", "step=1"]}, {}]
    ids = [await put(np.ones(3), **each) for each in tags]
    counted = await delete(dry_run=True, **choice)
    assert await left() == set(ids)
    assert (await delete(**choice)) == counted == {
        "count": len(chosen), "nbytes": 24 * len(chosen), "missing": [], "elsewhere": [], "more": False,
    }  # fmt: skip
    assert await left() == {ids[number] for number in range(4) if number not in chosen}


async def test_a_dry_run_by_id(delete, put, left):
    array = await put(np.ones(3))
    assert (await delete(ids=[array], dry_run=True))["count"] == 1
    assert await left() == {array}


async def test_the_oldest_first_and_no_more_than_so_many(delete, put, left, monkeypatch):
    monkeypatch.setattr("gemmserve_service.http.routes.deletions.MAX_DELETED", 2)
    ids = [await put(np.ones(3), name="a") for _ in range(5)]
    assert (await delete(name="a"))["more"] is True
    assert await left() == set(ids[2:])
    assert [(await delete(name="a"))["more"] for _ in range(2)] == [True, False]
    assert await left() == set()


@pytest.mark.parametrize(
    "body",
    [
        b"{}", b'{"dry_run": true}', b'{"ids": []}', b'{"ids": ["x"]}', b'{"labels": {}}', b'{"name": ""}',
        b'{"ids": ["arr_00000000000000000000000000"], "name": "a"}', b'{"older_than_s": -1}', b'{"name": "a\\n"}',
        b'{"ids": "arr_00000000000000000000000000"}', b'{"everything": true}', b"[]",
        json.dumps({"ids": [f"arr_{number:026d}" for number in range(MAX_DELETED + 1)]}).encode(),
    ],
)  # fmt: skip
async def test_what_chooses_nothing_is_refused(client, put, left, problem, body):
    array = await put(np.ones(3))
    answer = await client.post("/v1/deletions", content=body, headers={"Content-Type": "application/json"})
    problem(answer, 422, "parameter-invalid")
    assert await left() == {array}


@pytest.mark.parametrize(
    ("content", "kind", "status", "slug"),
    [
        (b"{", "application/json", 400, "malformed-json"),
        (b"{}", "text/plain", 415, "unsupported-media-type"),
        (b'{"name": "%s"}' % (b"a" * 70_000), "application/json", 413, "too-large"),
    ],
)
async def test_bodies(client, problem, content, kind, status, slug):
    answer = await client.post("/v1/deletions", content=content, headers={"Content-Type": kind})
    problem(answer, status, slug)


async def test_a_thousand(delete, put, left):
    ids = [await put(np.ones(1)) for _ in range(30)]
    unknown = [f"arr_{number:026d}" for number in range(MAX_DELETED - 30)]
    found = await delete(ids=[*unknown, *ids])
    assert (found["count"], found["missing"]) == (30, unknown)
    assert await left() == set()


async def test_owners_are_apart(as_, npy, delete):
    alice, bob = as_("alice"), as_("bob")
    made = [
        (await each.post("/v1/arrays", params={"name": "a"}, content=npy(np.ones(3)), headers=NPY)).json()["id"]
        for each in (alice, bob)
    ]
    assert (await delete(bob, ids=made))["missing"] == made[:1]
    assert (await delete(bob, name="a"))["count"] == 0
    assert (await delete(bob, older_than_s=0, dry_run=True))["count"] == 0
    assert (await delete(alice, name="a"))["count"] == 1


async def test_a_key_that_may_only_look(as_, problem):
    reader = as_("reader", scopes=["read"])
    problem(await reader.post("/v1/deletions", json={"older_than_s": 0}), 403, "forbidden")
    submitter = as_("submitter", scopes=["submit"])
    answer = await submitter.post("/v1/deletions", params={"all": "true"}, json={"older_than_s": 0})
    problem(answer, 403, "forbidden")
