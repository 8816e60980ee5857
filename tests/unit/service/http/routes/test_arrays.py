"""/v1/arrays through the app: what goes in comes out, by whole, by part, by either media type."""

from __future__ import annotations

import asyncio
import base64
import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

NPY = {"Content-Type": "application/x-npy"}
BARE = {"Content-Type": "application/octet-stream"}


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("endian", ["<", ">"])
@pytest.mark.parametrize("order", ["C", "F"])
async def test_npy_round_trip(client, npy, read_npy, random_array, dtype, endian, order):
    array = np.asarray(random_array((3, 5, 7), dtype), order=order)
    sent = array.astype(array.dtype.newbyteorder(endian), order="K")
    answer = await client.post("/v1/arrays", content=npy(sent), headers=NPY)
    assert answer.status_code == 201
    info = answer.json()
    assert answer.headers["location"] == f"/v1/arrays/{info['id']}"
    assert (info["dtype"], info["shape"], info["order"], info["nbytes"]) == (dtype, [3, 5, 7], order, array.nbytes)
    back = read_npy((await client.get(f"/v1/arrays/{info['id']}/data")).content)
    assert back.dtype == array.dtype
    assert back.flags.f_contiguous == (order == "F")
    assert np.array_equal(back, array)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (3, 0, 2)])
async def test_small_and_empty_shapes(client, put, read_npy, shape):
    array = np.ones(shape, "f4")
    back = read_npy((await client.get(f"/v1/arrays/{await put(array)}/data")).content)
    assert (back.shape, back.tolist()) == (array.shape, array.tolist())


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
async def test_npy_versions(client, npy, random_array, version):
    answer = await client.post("/v1/arrays", content=npy(random_array((4, 4)), version), headers=NPY)
    assert answer.status_code == 201


@pytest.mark.parametrize("order", [None, "C", "F"])
async def test_bare_bytes(client, read_npy, random_array, order):
    array = np.asarray(random_array((6, 4)), order=order or "C")
    query = {"dtype": "complex64", "shape": "6,4"} | ({"order": order} if order else {})
    answer = await client.post("/v1/arrays", params=query, content=array.tobytes(order="A"), headers=BARE)
    assert answer.status_code == 201, answer.text
    data = f"/v1/arrays/{answer.json()['id']}/data"
    assert np.array_equal(read_npy((await client.get(data)).content), array)
    bare = await client.get(data, headers={"Accept": "application/octet-stream"})
    assert (bare.headers["content-type"], bare.content) == ("application/octet-stream", array.tobytes(order="A"))


async def test_body_in_many_pieces(client, npy, read_npy, random_array):
    array = random_array((300, 400))
    data = npy(array)

    async def pieces():
        for start in range(0, len(data), 997):
            yield data[start : start + 997]

    answer = await client.post("/v1/arrays", content=pieces(), headers=NPY | {"Content-Length": str(len(data))})
    assert answer.status_code == 201, answer.text
    assert np.array_equal(read_npy((await client.get(answer.headers["location"] + "/data")).content), array)


async def test_header_in_single_bytes(client, npy):
    data = npy(np.ones((2, 2), "f4"))

    async def pieces():
        for start in range(len(data)):
            yield data[start : start + 1]

    answer = await client.post("/v1/arrays", content=pieces(), headers=NPY | {"Content-Length": str(len(data))})
    assert answer.status_code == 201, answer.text


async def test_sha256_is_known_once_it_was_asked_for(client, put, random_array):
    array = random_array((64, 64))
    array_id = await put(array)
    path = f"/v1/arrays/{array_id}"
    assert (await client.get(path)).json()["sha256"] is None
    head = await client.head(f"{path}/data", headers={"Want-Repr-Digest": "sha-256=1"})
    assert head.headers["repr-digest"]
    assert (await client.get(path)).json()["sha256"] == hashlib.sha256(array.tobytes()).hexdigest()


async def test_ttl(client, put, problem):
    kept, brief = await put(np.ones(2, "f4")), await put(np.ones(2, "f4"), ttl_s=0.05)
    assert (await client.get(f"/v1/arrays/{kept}")).json()["expires_at"] is None
    async with asyncio.timeout(60):
        while (await client.get(f"/v1/arrays/{brief}")).status_code == 200:  # noqa: ASYNC110 (it passes by itself)
            await asyncio.sleep(0.01)
    for path in (f"/v1/arrays/{brief}", f"/v1/arrays/{brief}/data"):
        problem(await client.get(path), 410, "gone")
    problem(await client.delete(f"/v1/arrays/{brief}"), 410, "gone")
    assert [item["id"] for item in (await client.get("/v1/arrays")).json()["items"]] == [kept]


async def test_delete_hides_at_once(client, put, problem):
    array_id = await put(np.ones(2, "f4"))
    assert (await client.delete(f"/v1/arrays/{array_id}")).status_code == 204
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/data")):
        problem(await client.request(method, f"/v1/arrays/{array_id}{path}"), 404, "not-found")
    assert (await client.head(f"/v1/arrays/{array_id}/data")).status_code == 404


async def test_listing_in_pages(client, put):
    made = [await put(np.ones(2, "f4")) for _ in range(5)]
    seen, path = [], "/v1/arrays?limit=2"
    while path:
        answer = await client.get(path)
        seen += [item["id"] for item in answer.json()["items"]]
        path = answer.links.get("next", {}).get("url")
        assert (path is None) == (answer.json()["next_cursor"] is None)
    assert seen == made[::-1]


@pytest.fixture
async def stored(client, put, npy, random_array):
    array = random_array((50, 60))
    array_id = await put(array)
    return f"/v1/arrays/{array_id}/data", npy(array), array.tobytes()


async def test_whole(client, stored):
    path, npy_bytes, _ = stored
    answer = await client.get(path)
    assert answer.status_code == 200
    assert answer.content == (await client.get(path, headers={"Accept": "application/x-npy"})).content
    # NumPy pads its header by its own habit, so only the data are compared as bytes.
    assert answer.content[-1000:] == npy_bytes[-1000:]
    assert answer.headers["content-length"] == str(len(answer.content))
    assert answer.headers["accept-ranges"] == "bytes"
    assert answer.headers["vary"] == "Accept, Accept-Encoding"


@pytest.mark.parametrize("accept", ["application/x-npy", "application/octet-stream"])
async def test_head_is_get_without_the_bytes(client, stored, accept):
    path, *_ = stored
    await client.get(path, headers={"Want-Repr-Digest": "sha-256=1"})  # nothing becomes known between the two
    get, head = await client.get(path, headers={"Accept": accept}), await client.head(path, headers={"Accept": accept})
    assert head.content == b""
    skip = {"x-request-id"}
    assert {k: v for k, v in get.headers.items() if k not in skip} == {
        k: v for k, v in head.headers.items() if k not in skip
    }


@pytest.mark.parametrize(
    "value", ["bytes=0-0", "bytes=0-127", "bytes=100-1000", "bytes=5000-", "bytes=-77", "bytes=10-9999999"]
)
@pytest.mark.parametrize("accept", ["application/x-npy", "application/octet-stream"])
async def test_one_range_of_either_representation(client, stored, value, accept):
    path, *_ = stored
    whole = (await client.get(path, headers={"Accept": accept})).content
    answer = await client.get(path, headers={"Accept": accept, "Range": value})
    assert answer.status_code == 206
    first, last = answer.headers["content-range"].removeprefix("bytes ").split("/")[0].split("-")
    assert answer.headers["content-range"].endswith(f"/{len(whole)}")
    assert answer.content == whole[int(first) : int(last) + 1]
    assert len(answer.content) == int(answer.headers["content-length"])
    head = await client.head(path, headers={"Accept": accept, "Range": value})
    assert (head.status_code, head.headers["content-length"]) == (200, str(len(whole)))


async def test_resumed_download_is_whole(client, stored):
    path, *_ = stored
    whole = await client.get(path)
    cut = len(whole.content) // 3
    rest = await client.get(path, headers={"Range": f"bytes={cut}-", "If-Range": whole.headers["etag"]})
    assert rest.status_code == 206
    assert whole.content[:cut] + rest.content == whole.content


async def test_if_range_of_another_representation_sends_the_whole(client, stored):
    path, *_ = stored
    bare = await client.head(path, headers={"Accept": "application/octet-stream"})
    answer = await client.get(path, headers={"Range": "bytes=5-9", "If-Range": bare.headers["etag"]})
    assert answer.status_code == 200


async def test_several_ranges_send_the_whole(client, stored):
    path, *_ = stored
    assert (await client.get(path, headers={"Range": "bytes=0-1,5-6"})).status_code == 200


async def test_unsatisfiable_range(client, stored, problem):
    path, *_ = stored
    size = len((await client.get(path)).content)
    answer = await client.get(path, headers={"Range": f"bytes={size}-"})
    problem(answer, 416, "range-not-satisfiable")
    assert answer.headers["content-range"] == f"bytes */{size}"


async def test_etag(client, stored):
    path, *_ = stored
    etag = (await client.get(path)).headers["etag"]
    same = await client.get(path, headers={"If-None-Match": f'"other", W/{etag}'})
    assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", etag)
    assert (await client.head(path, headers={"If-None-Match": "*"})).status_code == 304
    other = await client.get(path, headers={"If-None-Match": etag, "Accept": "application/octet-stream"})
    assert other.status_code == 200
    assert other.headers["etag"] != etag


async def test_not_acceptable(client, stored, problem):
    path, *_ = stored
    problem(await client.get(path, headers={"Accept": "text/html"}), 406, "not-acceptable")


@pytest.mark.parametrize(("bare", "endian"), [(True, "<"), (False, "<"), (False, ">")])
async def test_content_digest(client, npy, random_array, footprint, problem, bare, endian):
    array = random_array((300, 300)).astype(f"{endian}c8")
    body = array.tobytes() if bare else npy(array)
    query, headers = ({"dtype": "complex64", "shape": "300,300"}, BARE) if bare else ({}, NPY)
    right = base64.b64encode(hashlib.sha256(body).digest()).decode()
    wrong = base64.b64encode(hashlib.sha256(body + b"x").digest()).decode()
    answer = await client.post(
        "/v1/arrays",
        params=query,
        content=body,
        headers=headers | {"Content-Digest": f"sha-512=:AA==:, sha-256=:{right}:"},
    )
    assert answer.status_code == 201, answer.text
    listed = (await client.get("/v1/arrays")).json()["items"]
    answer = await client.post(
        "/v1/arrays", params=query, content=body, headers=headers | {"Content-Digest": f"sha-256=:{wrong}:"}
    )
    problem(answer, 400, "digest-mismatch")
    assert [item["id"] for item in (await client.get("/v1/arrays")).json()["items"]] == [listed[0]["id"]]


@given(st.data())
def test_any_range_is_the_slice(data):
    from gemmserve_service.http.answers.pieces import Pieces
    from gemmserve_service.http.headers.ranges import UnsatisfiableError, parse_range

    whole = bytes(range(200))
    head, tail = whole[:64], whole[64:]
    value = data.draw(st.from_regex(r"bytes=(\d{0,3}-\d{0,3})", fullmatch=True))
    try:
        span = parse_range(value, len(whole))
    except UnsatisfiableError:
        return
    if span is not None:
        assert b"".join(Pieces((head, memoryview(tail)), span)) == whole[span.start : span.stop]


async def test_name_and_labels(client, put):
    query = {"name": "run-7/weights", "label": ["run=7", "equation=a=b c", "empty="]}
    array = await put(np.ones(3), **query)
    info = (await client.get(f"/v1/arrays/{array}")).json()
    assert info["name"] == "run-7/weights"
    assert info["labels"] == {"run": "7", "equation": "a=b c", "empty": ""}
    plain = (await client.get(f"/v1/arrays/{await put(np.ones(3))}")).json()
    assert (plain["name"], plain["labels"]) == (None, {})


async def test_listings_by_name_and_labels(client, put):
    tags = [{"name": "a", "label": "run=7"}, {"name": "a"}, {"name": "b", "label": ["run=7", "step=1"]}, {}]
    ids = [await put(np.ones(3), **each) for each in tags]

    async def found(**query):
        return [ids.index(info["id"]) for info in (await client.get("/v1/arrays", params=query)).json()["items"]]

    assert await found() == [3, 2, 1, 0]
    assert await found(name="a") == [1, 0]
    assert await found(label="run=7") == [2, 0]
    assert await found(label=["step=1", "run=7"]) == [2]
    assert await found(name="a", label="run=7") == [0]
    assert await found(name="b", label="run=8") == []
    first = await client.get("/v1/arrays", params={"name": "a", "label": "run=7", "limit": 1})
    assert "link" not in first.headers
    for query in ({"name": "a"}, {"label": ["run=7"]}):
        first = await client.get("/v1/arrays", params={**query, "limit": 1})
        following = await client.get(first.headers["link"].partition(">")[0][1:])
        assert [ids.index(each.json()["items"][0]["id"]) for each in (first, following)] == await found(**query)


@pytest.mark.parametrize(
    "query",
    [
        {"name": ""}, {"name": "a b"}, {"name": "-a"}, {"name": "\u00fc"}, {"name": "a\n"}, {"name": "a" * 129},
        {"label": "run"}, {"label": "=7"}, {"label": "a b=7"}, {"label": f"{'a' * 64}=7"}, {"label": f"a={'7' * 129}"},
        {"label": "a=\u00fc"}, {"label": "a=\n"}, {"label": ["a=1", "a=2"]},
        {"label": [f"a{number}=1" for number in range(17)]},
    ],
)  # fmt: skip
async def test_names_and_labels_that_are_none(client, npy, problem, query):
    found = problem(
        await client.post("/v1/arrays", params=query, content=npy(np.ones(3)), headers=NPY), 422, "parameter-invalid"
    )
    assert found["parameter"].startswith(next(iter(query)))
    problem(await client.get("/v1/arrays", params=query), 422, "parameter-invalid")
    assert (await client.get("/v1/arrays")).json()["items"] == []


async def test_names_belong_to_their_owners(as_, npy):
    alice, bob = as_("alice"), as_("bob")
    for each in (alice, bob):
        await each.post("/v1/arrays", params={"name": "a"}, content=npy(np.ones(3)), headers=NPY)
    listed = [(await each.get("/v1/arrays", params={"name": "a"})).json()["items"] for each in (alice, bob)]
    assert [len(each) for each in listed] == [1, 1]
    assert listed[0] != listed[1]
    admin = as_("root", scopes=["admin"])
    assert len((await admin.get("/v1/arrays", params={"name": "a", "all": "true"})).json()["items"]) == 2
