"""What an upload in parts refuses, and its limits."""

from __future__ import annotations

import pytest
from upload_parts import BARE, NPY, PARTIAL, A, raw


async def test_an_append_elsewhere(begin, append, refused):
    url, data = await begin(), raw(A)
    assert (await append(url, data, 0, 100)).status_code == 204
    answer = await append(url, data, 50, 200)
    found = refused(answer, 409, "mismatching-upload-offset")
    assert found["type"] == "https://iana.org/assignments/http-problem-types#mismatching-upload-offset"
    assert (found["expected-offset"], found["provided-offset"]) == (100, 50)
    assert answer.headers["upload-offset"] == "100"


async def test_lengths_that_do_not_agree(client, begin, append, put, refused):
    url, data = await begin(), raw(A)
    refused(await append(url, data, 0, 100, last=True), 400, "inconsistent-upload-length")
    refused(await append(url, data, 0, 100, **{"Upload-Length": "100"}), 400, "inconsistent-upload-length")
    refused(await append(url, data + b"x", 0), 400, "inconsistent-upload-length")
    refused(await put(url, data + b"x", len(data), None), 400, "inconsistent-upload-length")
    refused(await put(url, b"x" * (1 << 20), 1 << 19, None), 400, "inconsistent-upload-length")
    fields = {"dtype": "float32", "shape": "10"}
    answer = await client.post("/v1/uploads", params=fields, headers={**BARE, "Upload-Length": "41"})
    refused(answer, 400, "inconsistent-upload-length")
    assert (await client.get(url)).json()["received"] == []


async def test_after_the_end(client, begin, append, put, refused):
    url, data = await begin(), raw(A)
    done = await append(url, data, 0, last=True)
    refused(await append(url, data, 0, 100), 400, "inconsistent-upload-length")
    refused(await put(url, data, 0, 100), 400, "inconsistent-upload-length")
    answer = await append(url, b"", 0)
    refused(answer, 400, "completed-upload")
    assert answer.headers["location"] == done.headers["location"]
    assert (await client.delete(url)).status_code == 204
    assert (await client.head(url)).status_code == 404
    assert (await client.get(done.headers["location"])).status_code == 200, "the array went with its upload"


@pytest.mark.parametrize("missing", ["Upload-Offset", "Upload-Complete"])
@pytest.mark.parametrize("value", ["", "x", "?2", "-1", "1.5", "true"])
async def test_an_append_says_where_and_whether_it_is_the_last(begin, append, refused, missing, value):
    url = await begin()
    refused(await append(url, raw(A), 0, 100, **{missing: value}), 400, "invalid-request")


async def test_content_types(client, begin, append, refused):
    url, data = await begin(), raw(A)
    refused(await append(url, data, 0, 100, **BARE), 415, "unsupported-media-type")
    refused(await client.put(f"{url}/parts/0", content=data, headers=NPY), 415, "unsupported-media-type")
    refused(await client.post("/v1/uploads", headers={"Content-Type": "text/plain"}), 415, "unsupported-media-type")
    refused(await client.post("/v1/uploads", headers=BARE), 422, "parameter-invalid")
    refused(await client.post("/v1/uploads?dtype=complex64", headers=NPY), 422, "parameter-invalid")
    refused(await client.put(f"{url}/parts/-1", content=data, headers=BARE), 422, "parameter-invalid")

    async def chunks():
        yield data[:10]

    refused(await client.put(f"{url}/parts/0", content=chunks(), headers=BARE), 411, "length-required")


async def test_space_is_taken_at_the_beginning_and_given_back(client, begin, put, core):
    url = await begin()
    assert core.store.used_bytes == A.nbytes
    await put(url, raw(A), 0, 1000)
    assert (await client.delete(url)).status_code == 204
    assert core.store.used_bytes == 0
    assert (await client.get(url)).status_code == 404
    assert (await put(url, raw(A), 0, 1000)).status_code == 404


async def test_options(client):
    answer = await client.options("/v1/uploads")
    assert answer.headers["accept-patch"] == "application/partial-upload"
    assert answer.headers["upload-limit"] == "max-size=1073741824, max-append-size=95000000"


class TestLimits:
    @pytest.fixture
    def settings(self, make_settings):
        return make_settings(max_part_bytes=1000, max_uploads=2, max_store_bytes=2 * A.nbytes)

    async def test_a_part_that_is_too_large(self, client, begin, append, put, refused):
        url, data = await begin(), raw(A)
        for answer in (await append(url, data, 0, 1001), await put(url, data, 0, 1001)):
            refused(answer, 413, "too-large")
            assert "max-append-size=1000" in answer.headers["upload-limit"]
        assert (await put(url, data, 0, 1000)).status_code == 204

    async def test_as_many_as_are_allowed(self, client, begin, refused):
        await begin(A[:1])
        await begin(A[:1])
        answer = await client.post("/v1/uploads", params={"dtype": "float32", "shape": "1"}, headers=BARE)
        assert refused(answer, 429, "quota-exceeded")["quota"] == "uploads"
        assert "retry-after" in answer.headers

    async def test_a_full_store(self, client, begin, refused):
        await begin()
        answer = await client.post("/v1/uploads", params={"dtype": "complex64", "shape": "61,1000"}, headers=BARE)
        refused(answer, 507, "store-full")


async def test_of_others_nothing_is_seen(as_, make_key, begin, refused, core):
    alice, bob, reader = as_("alice"), as_("bob"), as_("carol", scopes=["read"])
    url = await begin(http=alice)
    for answer in (
        await bob.get(url),
        await bob.put(f"{url}/parts/0", content=b"1234", headers=BARE),
        await bob.patch(url, content=b"", headers={**PARTIAL, "Upload-Offset": "0", "Upload-Complete": "?0"}),
        await bob.post(f"{url}/complete"),
        await bob.delete(url),
    ):
        refused(answer, 404, "not-found")
    assert (await bob.head(url)).status_code == 404
    answer = await reader.post("/v1/uploads", params={"dtype": "float32", "shape": "1"}, headers=BARE)
    refused(answer, 403, "forbidden")
    assert core.quotas.stored_bytes(alice.key_id) == A.nbytes
    assert (await alice.head(url)).status_code == 204
