"""/v1/uploads: parts in any order, .npy files among them, digests."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from upload_parts import NPY, A, digest, raw


@pytest.mark.parametrize("array", [A, np.asfortranarray(A), A[:, :0], np.array(1 + 2j)], ids=["C", "F", "empty", "0-d"])
async def test_parts_in_any_order(client, begin, put, stored, array):
    url, data = await begin(array), raw(array)
    step = max(1, len(data) // 7)
    answers = await asyncio.gather(*(put(url, data, n, n + step) for n in range((len(data) // step) * step, -1, -step)))
    assert {answer.status_code for answer in answers} == {204}
    done = await client.post(f"{url}/complete")
    found = await stored(done)
    assert np.array_equal(found, array)
    assert found.flags.f_contiguous == array.flags.f_contiguous
    assert (await client.post(f"{url}/complete")).json()["id"] == done.json()["id"], "again, another array"
    assert (await client.get("/v1/usage")).json()["arrays"] == 1


@pytest.fixture
def begin_npy(client):
    """begin_npy() -> the URL of an upload of a .npy file."""

    async def make():
        answer = await client.post("/v1/uploads", headers=NPY)
        assert answer.status_code == 201, answer.text
        assert answer.json()["length"] is None
        return answer.headers["location"]

    return make


@pytest.mark.parametrize("first", [128, 129, 5000])
@pytest.mark.parametrize("dtype", ["<c8", ">c8", ">f8"])
async def test_parts_of_a_npy_file(client, begin_npy, put, stored, npy, first, dtype):
    array = A.real.astype(dtype) if "f8" in dtype else A.astype(dtype)
    url, data = await begin_npy(), npy(array)
    for start, end in ((0, first), (100_000, None), (first, 100_000)):
        assert (await put(url, data, start, end)).status_code == 204
    assert (await client.get(url)).json()["length"] == len(data)
    done = await client.post(f"{url}/complete")
    assert np.array_equal(await stored(done), array)
    found = (await client.get(url)).json()
    assert found["complete"]
    assert found["array"]["id"] == done.json()["id"]


async def test_the_header_s_part_may_be_sent_again_and_parts_may_overlap(client, begin_npy, put, stored, npy):
    url, data = await begin_npy(), npy(A)
    for start, end in ((0, 150), (1000, 5000), (10, 4000), (3000, len(data)), (0, 20)):
        assert (await put(url, data, start, end)).status_code == 204
    assert (await client.get(url)).json()["received"] == [[0, len(data)]]
    assert np.array_equal(await stored(await client.post(f"{url}/complete")), A)


async def test_gaps(client, begin, put, refused, stored):
    url, data = await begin(), raw(A)
    await put(url, data, 100, 200)
    await put(url, data, 300, len(data))
    answer = await client.post(f"{url}/complete")
    assert refused(answer, 409, "upload-incomplete")["missing"] == [[0, 100], [200, 300]]
    await put(url, data, 0, 100)
    await put(url, data, 200, 300)
    assert np.array_equal(await stored(await client.post(f"{url}/complete")), A)


async def test_a_npy_header_comes_first(client, begin_npy, put, refused, npy):
    url, data, other = await begin_npy(), npy(A), npy(A[:1])
    refused(await put(url, data, 5000, 6000), 409, "upload-incomplete")
    refused(await client.post(f"{url}/complete"), 409, "upload-incomplete")
    refused(await put(url, b"no .npy file", 0, None), 400, "invalid-npy")
    refused(await put(url, data, 0, 50), 400, "invalid-npy")
    refused(await put(url, other + b"too much", 0, None), 400, "body-length")
    assert (await client.get(url)).json()["received"] == []
    assert (await put(url, data, 0, 300)).status_code == 204
    refused(await put(url, other, 0, 100), 400, "invalid-npy")
    assert (await client.get(url)).json()["received"] == [[0, 300]]


async def test_a_part_with_a_digest(client, begin, put, refused, stored):
    url, data = await begin(), raw(A)
    refused(await put(url, data, 0, 100, **{"Content-Digest": digest(b"else")}), 400, "digest-mismatch")
    assert (await client.get(url)).json()["received"] == []
    assert (await put(url, data, 0, 100, **{"Content-Digest": digest(data[:100])})).status_code == 204
    refused(await put(url, data, 0, 50, **{"Content-Digest": digest(b"else")}), 400, "digest-mismatch")
    assert (await client.get(url)).json()["received"] == [[50, 100]], "bytes that are in doubt count as received"
    await put(url, data, 0, 100)
    answer = await put(url, data, 100, None, **{"Content-Digest": digest(data[100:])})
    assert answer.status_code == 204
    answer = await client.post(f"{url}/complete", headers={"Repr-Digest": digest(data)})
    assert np.array_equal(await stored(answer), A)


@pytest.mark.parametrize("first", [128, 400])
async def test_digests_of_a_npy_file(client, begin_npy, put, refused, stored, npy, first):
    data = npy(A.astype(">c8"))
    for wrong in (True, False):
        url = await begin_npy()
        for start, end in ((0, first), (40, first), (first, first + 500)):
            answer = await put(url, data, start, end, **{"Content-Digest": digest(data[start:end])})
            assert answer.status_code == 204, answer.text
        assert (await put(url, data, first + 500, None)).status_code == 204
        whole = digest(b"else" if wrong else data)
        answer = await client.post(f"{url}/complete", headers={"Repr-Digest": whole})
        if wrong:
            refused(answer, 400, "digest-mismatch")
            assert (await client.get(url)).status_code == 404
        else:
            assert np.array_equal(await stored(answer), A)
    url = await begin_npy()
    refused(await put(url, data, 0, first, **{"Content-Digest": digest(b"else")}), 400, "digest-mismatch")
    assert (await client.delete(url)).status_code == 204
    assert (await client.get("/v1/usage")).json()["store_bytes"] == A.nbytes


async def test_a_header_that_was_damaged_on_its_way_is_not_kept(client, begin_npy, put, refused, stored, npy):
    data = npy(A)
    shape = data.index(b"'shape': (") + len(b"'shape': (")
    other = bytes([ord("9") if data[shape] != ord("9") else ord("8")])
    damaged = data[:shape] + other + data[shape + 1 :]
    url = await begin_npy()
    refused(await put(url, damaged, 0, 300, **{"Content-Digest": digest(data[:300])}), 400, "digest-mismatch")
    assert (await put(url, data, 0, 300, **{"Content-Digest": digest(data[:300])})).status_code == 204
    assert (await put(url, data, 300, None)).status_code == 204
    assert np.array_equal(await stored(await client.post(f"{url}/complete")), A)
    assert (await client.get("/v1/usage")).json()["store_bytes"] == A.nbytes


async def test_name_and_labels_are_the_array_s(client, begin, put, npy):
    for first in (await begin(A, name="weights", label=["run=7", "step=1"]), None):
        if first is None:  # a .npy file, whose space is reserved later
            data = npy(A)
            query = {"name": "weights", "label": ["run=7", "step=1"]}
            headers = {"Content-Type": "application/x-npy", "Content-Length": "0"}
            url = (await client.post("/v1/uploads", params=query, headers=headers)).headers["location"]
        else:
            url, data = first, A.tobytes()
        await put(url, data, 0, len(data))
        info = (await client.post(f"{url}/complete")).json()
        assert (info["name"], info["labels"]) == ("weights", {"run": "7", "step": "1"})
