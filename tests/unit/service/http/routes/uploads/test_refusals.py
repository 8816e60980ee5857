"""What an upload in parts refuses, and its limits."""

from __future__ import annotations

import asyncio

import pytest
from upload_parts import BARE, NPY, A, raw


async def test_bytes_past_the_end(client, begin, put, refused):
    url, data = await begin(), raw(A)
    refused(await put(url, data + b"x", len(data), None), 400, "body-length")
    refused(await put(url, b"x" * (1 << 20), 1 << 19, None), 400, "body-length")
    assert (await client.get(url)).json()["received"] == []


async def test_bytes_with_the_beginning(client, refused, core):
    query = {"dtype": "complex64", "shape": "60,1000"}
    refused(await client.post("/v1/uploads", params=query, content=raw(A), headers=BARE), 400, "body-length")
    assert core.store.used_bytes == 0


async def test_after_the_end(client, begin, put, refused):
    url, data = await begin(), raw(A)
    await put(url, data, 0, None)
    done = await client.post(f"{url}/complete")
    answer = await put(url, data, 0, 100)
    refused(answer, 400, "completed-upload")
    assert answer.headers["location"] == done.headers["location"]
    assert (await client.delete(url)).status_code == 204
    assert (await client.get(url)).status_code == 404
    assert (await client.get(done.headers["location"])).status_code == 200, "the array went with its upload"


async def test_content_types(client, begin, refused):
    url, data = await begin(), raw(A)
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


class TestLimits:
    @pytest.fixture
    def settings(self, make_settings):
        return make_settings(max_part_bytes=1000, max_uploads=2, max_store_bytes=2 * A.nbytes)

    async def test_a_part_that_is_too_large(self, client, begin, put, refused):
        url, data = await begin(), raw(A)
        refused(await put(url, data, 0, 1001), 413, "too-large")
        assert (await client.get(url)).json()["max_part_bytes"] == 1000
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


class TestIdle:
    @pytest.fixture
    def settings(self, make_settings):
        return make_settings(upload_idle_s=0.4)

    async def test_one_that_nobody_goes_on_with(self, client, begin, core, refused):
        url = await begin()
        async with asyncio.timeout(60):
            while core.store.used_bytes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        refused(await client.get(url), 410, "gone")


async def test_of_others_nothing_is_seen(as_, make_key, begin, refused, core):
    alice, bob, reader = as_("alice"), as_("bob"), as_("carol", scopes=["read"])
    url = await begin(http=alice)
    for answer in (
        await bob.get(url),
        await bob.put(f"{url}/parts/0", content=b"1234", headers=BARE),
        await bob.post(f"{url}/complete"),
        await bob.delete(url),
    ):
        refused(answer, 404, "not-found")
    answer = await reader.post("/v1/uploads", params={"dtype": "float32", "shape": "1"}, headers=BARE)
    refused(answer, 403, "forbidden")
    assert core.quotas.stored_bytes(alice.key_id) == A.nbytes
    assert (await alice.get(url)).status_code == 200
