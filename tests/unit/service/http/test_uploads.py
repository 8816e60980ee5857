"""/v1/uploads: parts in any order, appends as the draft has them, what is refused, and what is kept."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
import re
import time

import httpx
import numpy as np
import pytest

from gemmserve_service import partial_uploads
from gemmserve_service.core import Core
from gemmserve_service.errors import DigestMismatch, NotFound, StoreFull
from gemmserve_service.ingest import Declared

A = (np.arange(60 * 1000) % 251).astype("c8").reshape(60, 1000)
LARGE = (np.arange(1 << 19) % 997).astype("c8").reshape(512, 1024)  # 4 MiB
BARE = {"Content-Type": "application/octet-stream"}
NPY = {"Content-Type": "application/x-npy"}
PARTIAL = {"Content-Type": "application/partial-upload"}


def wait_until(condition, within_s=30):
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def digest(data):
    return f"sha-256=:{base64.b64encode(hashlib.sha256(data).digest()).decode()}:"


def raw(array):
    return array.tobytes(order="A")


def npy_bytes(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


class Body:
    """A request's body that is there at once."""

    def __init__(self, data):
        self._data = memoryview(data)

    async def piece(self):
        piece, self._data = self._data, self._data[:0]
        return piece

    def unread(self, piece):
        self._data = memoryview(piece)

    async def fill(self, view, advance):
        view[:] = self._data[: len(view)]
        advance(len(view))
        return True


@pytest.fixture
def begin(client):
    """begin(array) -> the URL of an upload of bare bytes."""

    async def make(array=A, http=client, **query):
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        fields = {"dtype": array.dtype.name, "shape": ",".join(map(str, array.shape)), "order": order, **query}
        answer = await http.post("/v1/uploads", params=fields, headers={**BARE, "Content-Length": "0"})
        assert answer.status_code == 201, answer.text
        return answer.headers["location"]

    return make


@pytest.fixture
def put(client):
    async def send(url, data, start, end, **headers):
        return await client.put(f"{url}/parts/{start}", content=data[start:end], headers={**BARE, **headers})

    return send


@pytest.fixture
def append(client):
    async def send(url, data, start, end=None, *, last=False, **headers):
        fields = {**PARTIAL, "Upload-Offset": str(start), "Upload-Complete": f"?{last:d}", **headers}
        return await client.patch(url, content=data[start:end], headers=fields)

    return send


@pytest.fixture
def refused():
    def check(answer, status, slug):
        found = answer.json()
        assert (answer.status_code, re.split("[/#]", found["type"])[-1]) == (status, slug), answer.text
        return found

    return check


@pytest.fixture
def stored(client, read_npy):
    async def download(answer):
        assert answer.status_code == 201, answer.text
        data = await client.get(f"{answer.headers['location']}/data")
        return read_npy(data.content)

    return download


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
        return make_settings(max_part_bytes=1000, max_uploads=2, max_store_bytes=2 * A.nbytes, upload_idle_s=0.4)

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

    async def test_one_that_nobody_goes_on_with(self, client, begin, core, refused):
        url = await begin()
        async with asyncio.timeout(30):
            while core.store.used_bytes:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        refused(await client.get(url), 410, "gone")


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


async def test_what_was_acknowledged_survives_the_process(settings, npy):
    """A core stopped without a word to its uploads, and another on the same folder."""
    data = raw(A)
    core = Core(settings)
    await core.start()
    declared = Declared(A.dtype, A.shape, "C", A.nbytes)
    one = await core.uploads.create("", "application/octet-stream", declared, length=None, ttl_s=None)
    done = await core.uploads.create("", "application/octet-stream", declared, length=None, ttl_s=None)
    await core.uploads.receive(one, Body(data[1000:]), 1000, 2000, None, append=False)
    await core.uploads.receive(done, Body(data), 0, len(data), None, append=False)
    info = await core.uploads.complete(done, None)
    await core.stop()

    core = Core(settings)
    await core.start()
    try:
        assert core.store.used_bytes == 2 * A.nbytes
        again = core.uploads.get(one.id, "")
        assert list(again.received) == [(1000, 3000)]
        for start, end in again.received.missing(len(data)):
            await core.uploads.receive(again, Body(data[start:]), start, end - start, None, append=False)
        made = await core.uploads.complete(again, hashlib.sha256(data).digest())
        with core.store.pin(made.id) as pinned:
            assert bytes(pinned.view) == data
        assert (await core.uploads.complete(core.uploads.get(done.id, ""), None)).id == info.id
        await core.uploads.cancel(again)
        assert core.store.used_bytes == 2 * A.nbytes
    finally:
        await core.stop()


async def test_bytes_that_a_broken_repetition_has_overwritten_are_not_on_record(settings):
    """A part that came is sent again with a digest, for it to be checked, and the process is killed meanwhile."""
    data, half = raw(A), A.nbytes // 2
    written, never = asyncio.Event(), asyncio.Event()

    class Breaking(Body):
        async def fill(self, view, advance):
            view[:100] = b"x" * 100
            advance(100)
            written.set()
            await never.wait()

    core = Core(settings)
    await core.start()
    declared = Declared(A.dtype, A.shape, "C", A.nbytes)
    upload = await core.uploads.create("", "application/octet-stream", declared, length=None, ttl_s=None)
    await core.uploads.receive(upload, Body(data), 0, half, None, append=False)
    again = asyncio.ensure_future(
        core.uploads.receive(upload, Breaking(b""), 0, 1000, hashlib.sha256(data[:1000]).digest(), append=False)
    )
    await written.wait()
    await core.uploads.receive(upload, Body(data[half:]), half, len(data) - half, None, append=False)
    assert core.uploads.get(upload.id, "").offset == len(data)
    await core.database.stop()
    again.cancel()
    await asyncio.wait([again])

    core = Core(settings)
    await core.start()
    try:
        assert list(core.uploads.get(upload.id, "").received) == [(1000, len(data))]
    finally:
        await core.stop()


async def test_space_that_a_row_still_names_serves_nobody_else(settings, monkeypatch):
    """The digest is wrong, the disk too full for the row to go, and then the process is killed."""
    data = raw(A)
    core = Core(settings)
    await core.start()
    declared = Declared(A.dtype, A.shape, "C", A.nbytes)
    upload = await core.uploads.create("alice", "application/octet-stream", declared, length=None, ttl_s=None)
    await core.uploads.receive(upload, Body(data), 0, len(data), None, append=False)
    with monkeypatch.context() as patch:

        async def full(_):
            raise StoreFull("the disk is full")

        patch.setattr(core.database, "write", full)
        with pytest.raises(DigestMismatch):
            await core.uploads.complete(upload, hashlib.sha256(b"other").digest())
    others = await core.store.reserve(A.dtype, A.shape, "C", ttl_s=None, owner="bob")
    others.write(b"secret" * 100)
    await core.database.stop()

    core = Core(settings)
    await core.start()
    try:
        with pytest.raises(NotFound):
            core.uploads.get(upload.id, "alice")
        assert core.store.used_bytes == 0
    finally:
        await core.stop()


async def test_a_part_that_comes_while_its_upload_is_given_up_is_refused(make_settings, monkeypatch):
    """Not taken in by an upload whose space goes a moment later."""
    core = Core(make_settings(upload_idle_s=0.5))
    await core.start()
    write = core.database.write
    removing, go = asyncio.Event(), asyncio.Event()

    async def slow(fn):
        if getattr(fn, "func", None) is partial_uploads._remove:
            removing.set()
            await go.wait()
        return await write(fn)

    monkeypatch.setattr(core.database, "write", slow)
    upload = await core.uploads.create("", "application/x-npy", None, length=None, ttl_s=None)
    async with asyncio.timeout(30):
        await removing.wait()
        part = asyncio.ensure_future(
            core.uploads.receive(upload, Body(npy_bytes(A)), 0, len(npy_bytes(A)), None, append=False)
        )
        await asyncio.sleep(0)
        go.set()
        with pytest.raises(NotFound):
            await part
    assert core.store.used_bytes == 0
    await core.stop()


class TestLive:
    """Over a socket: connections that break, and that hang."""

    @pytest.fixture
    def app(self, request, serve):
        return serve(**getattr(request, "param", {}))

    @pytest.fixture
    def http(self, app):
        with httpx.Client(base_url=app.url, timeout=30, trust_env=False) as http:
            yield http

    def begin(self, http):
        query = {"dtype": "complex64", "shape": "512,1024"}
        return http.post("/v1/uploads", params=query, headers=BARE).headers["location"]

    def send_some(self, app, method, url, count, *, more=""):
        """Promises all of the array, sends the first `count` bytes, and waits until they have landed."""
        connection = app.connect()
        connection.sendall(
            f"{method} {url} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {LARGE.nbytes}\r\n{more}\r\n".encode()
            + raw(LARGE)[:count]
        )
        record = app.core.uploads.get(url.split("/")[3], "")
        wait_until(lambda: any(one.landed == count for one in record.transfers))
        return connection, record

    @pytest.mark.parametrize("way", ["append", "part", "part with a digest"])
    def test_what_came_before_a_connection_broke(self, app, http, way):
        url, some = self.begin(http), 3 << 20
        if way == "append":
            more = "Content-Type: application/partial-upload\r\nUpload-Offset: 0\r\nUpload-Complete: ?1\r\n"
            connection, record = self.send_some(app, "PATCH", url, some, more=more)
        else:
            more = "Content-Type: application/octet-stream\r\n"
            more += f"Content-Digest: {digest(raw(LARGE))}\r\n" if "digest" in way else ""
            connection, record = self.send_some(app, "PUT", f"{url}/parts/0", some, more=more)
        connection.close()
        wait_until(lambda: not record.transfers)
        kept = 0 if "digest" in way else some
        answer = http.head(url)
        assert (answer.headers["upload-offset"], answer.headers["upload-complete"]) == (str(kept), "?0")
        headers = {**PARTIAL, "Upload-Offset": str(kept), "Upload-Complete": "?1"}
        done = http.patch(url, content=raw(LARGE)[kept:], headers=headers)
        assert done.status_code == 201
        with app.core.store.pin(done.json()["id"]) as pinned:
            assert bytes(pinned.view) == raw(LARGE)

    def test_a_question_ends_an_append_that_hangs(self, app, http):
        url, some = self.begin(http), 2 << 20
        more = "Content-Type: application/partial-upload\r\nUpload-Offset: 0\r\nUpload-Complete: ?1\r\n"
        connection, record = self.send_some(app, "PATCH", url, some, more=more)
        with connection:
            assert http.get(url).json()["received"] == [], "GET disturbs nothing"
            assert record.transfers
            assert http.head(url).headers["upload-offset"] == str(some)
            assert not record.transfers
            assert b" 409 " in connection.recv(1000).split(b"\r\n")[0]

    def test_a_question_leaves_parts_alone(self, app, http):
        url, some = self.begin(http), 2 << 20
        more = "Content-Type: application/octet-stream\r\n"
        connection, record = self.send_some(app, "PUT", f"{url}/parts/0", some, more=more)
        with connection:
            assert http.head(url).headers["upload-offset"] == "0"
            assert record.transfers
            connection.sendall(raw(LARGE)[some:])
            assert b" 204 " in connection.recv(1000).split(b"\r\n")[0]
        assert http.post(f"{url}/complete").status_code == 201

    @pytest.mark.parametrize("ends", ["complete", "cancel"])
    def test_the_end_of_an_upload_ends_its_parts(self, app, http, ends):
        url = self.begin(http)
        assert http.put(f"{url}/parts/0", content=raw(LARGE), headers=BARE).status_code == 204
        more = "Content-Type: application/octet-stream\r\n"
        connection, record = self.send_some(app, "PUT", f"{url}/parts/0", 1 << 20, more=more)
        with connection:
            if ends == "complete":
                assert http.post(f"{url}/complete").status_code == 201
            else:
                assert http.delete(url).status_code == 204
                assert app.core.store.used_bytes == 0
            assert not record.transfers
            connection.sendall(b"x" * (1 << 20))  # too late for the array
            assert b" 409 " in connection.recv(1000).split(b"\r\n")[0]
        if ends == "complete":
            with app.core.store.pin(record.array_id) as pinned:
                assert bytes(pinned.view) == raw(LARGE)

    @pytest.mark.parametrize("app", [{"body_window_s": 0.5}], indirect=True)
    def test_a_part_that_trickles(self, app, http):
        url = self.begin(http)
        more = "Content-Type: application/octet-stream\r\n"
        connection, record = self.send_some(app, "PUT", f"{url}/parts/0", 1 << 20, more=more)
        with connection:
            assert b" 408 " in connection.recv(1000).split(b"\r\n")[0]
        wait_until(lambda: not record.transfers)
        assert http.get(url).json()["received"] == [[0, 1 << 20]]
