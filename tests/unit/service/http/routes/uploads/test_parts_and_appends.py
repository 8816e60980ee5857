"""/v1/uploads: parts in any order, appends as the draft has them, digests."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from upload_parts import BARE, NPY, A, digest, raw


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


@pytest.mark.parametrize("first", [0, 5, 100, 200, 5000])
@pytest.mark.parametrize("dtype", ["<c8", ">c8", ">f8"])
async def test_appends_of_a_npy_file(client, append, stored, npy, first, dtype):
    array = A.real.astype(dtype) if "f8" in dtype else A.astype(dtype)
    data = npy(array)
    begun = await client.post("/v1/uploads", content=data[:first], headers={**NPY, "Upload-Complete": "?0"})
    assert (begun.status_code, begun.headers["upload-offset"]) == (201, str(first))
    url, offset = begun.headers["location"], first
    for step in (3, 130, 100_000, 1 << 30):
        answer = await append(url, data, offset, min(offset + step, len(data) - 1))
        assert (answer.status_code, answer.headers["upload-complete"]) == (204, "?0"), answer.text
        offset = int(answer.headers["upload-offset"])
        where = await client.head(url)
        assert (where.status_code, where.headers["upload-offset"]) == (204, str(offset))
    assert where.headers["upload-length"] == str(len(data))
    assert "max-age=" in where.headers["upload-limit"]
    done = await append(url, data, offset, last=True)
    assert done.headers["upload-complete"] == "?1"
    assert np.array_equal(await stored(done), array)
    where = await client.head(url)
    assert (where.headers["upload-complete"], where.headers["location"]) == ("?1", done.headers["location"])


async def test_a_whole_array_at_once(client, npy, stored):
    done = await client.post("/v1/uploads", content=npy(A), headers={**NPY, "Upload-Complete": "?1"})
    assert done.headers["upload-complete"] == "?1"
    assert np.array_equal(await stored(done), A)


async def test_the_header_s_part_may_be_sent_again_and_parts_may_overlap(client, put, stored, npy):
    data = npy(A)
    begun = await client.post("/v1/uploads", content=data[:150], headers=NPY)
    url = begun.headers["location"]
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
    assert answer.headers["upload-offset"] == "0"
    await put(url, data, 0, 100)
    await put(url, data, 200, 300)
    assert np.array_equal(await stored(await client.post(f"{url}/complete")), A)


async def test_a_npy_header_comes_first(client, put, refused, npy):
    data = npy(A)
    url = (await client.post("/v1/uploads", content=data[:50], headers=NPY)).headers["location"]
    refused(await put(url, data, 5000, 6000), 409, "upload-incomplete")
    refused(await client.post(f"{url}/complete"), 409, "upload-incomplete")
    other = npy(A[:1])
    refused(
        await client.put(f"{url}/parts/50", content=other[50:] + b"too much", headers=BARE),
        400,
        "inconsistent-upload-length",
    )
    url = (await client.post("/v1/uploads", content=data[:300], headers=NPY)).headers["location"]
    refused(await client.put(f"{url}/parts/0", content=other[:100], headers=BARE), 400, "inconsistent-upload-length")
    refused(await client.post("/v1/uploads", content=b"no .npy file", headers=NPY), 400, "invalid-npy")


async def test_a_part_with_a_digest(client, begin, put, append, refused, stored):
    url, data = await begin(), raw(A)
    refused(await put(url, data, 0, 100, **{"Content-Digest": digest(b"else")}), 400, "digest-mismatch")
    assert (await client.get(url)).json()["received"] == []
    assert (await put(url, data, 0, 100, **{"Content-Digest": digest(data[:100])})).status_code == 204
    refused(await put(url, data, 0, 50, **{"Content-Digest": digest(b"else")}), 400, "digest-mismatch")
    assert (await client.get(url)).json()["received"] == [[50, 100]], "bytes that are in doubt count as received"
    await put(url, data, 0, 100)
    answer = await append(
        url, data, 100, last=True, **{"Content-Digest": digest(data[100:]), "Repr-Digest": digest(data)}
    )
    assert np.array_equal(await stored(answer), A)


@pytest.mark.parametrize("first", [60, 400])
async def test_digests_of_a_npy_file(client, append, refused, stored, npy, first):
    data = npy(A.astype(">c8"))
    for wrong in (True, False):
        begun = await client.post(
            "/v1/uploads", content=data[:first], headers={**NPY, "Content-Digest": digest(data[:first])}
        )
        url = begun.headers["location"]
        answer = await append(url, data, first, first + 500, **{"Content-Digest": digest(data[first : first + 500])})
        assert answer.status_code == 204
        whole = digest(b"else" if wrong else data)
        answer = await append(url, data, first + 500, last=True, **{"Repr-Digest": whole})
        if wrong:
            refused(answer, 400, "digest-mismatch")
            assert (await client.head(url)).status_code == 404
        else:
            assert np.array_equal(await stored(answer), A)
    answer = await client.post("/v1/uploads", content=data[:first], headers={**NPY, "Content-Digest": digest(b"else")})
    refused(answer, 400, "digest-mismatch")
    assert (await client.get("/v1/usage")).json()["store_bytes"] == A.nbytes
