"""Digests of bodies in both directions: what is sent with one is checked, what is wanted with one has one."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import json

import numpy as np
import pytest
from raw_connection import Raw

from gemmserve_kernels import gemm

WANT = {"Want-Content-Digest": "sha-256=3"}


def field(data: bytes) -> str:
    return f"sha-256=:{base64.b64encode(hashlib.sha256(data).digest()).decode()}:"


@pytest.fixture(params=[(6, 5, 7), (300, 200, 300)], ids=["small", "landed past the parser"])
def operands(request, random_array):
    m, k, n = request.param
    return random_array((m, k)), random_array((k, n), seed=1)


@pytest.fixture
def requests(form, npy, operands):
    """A request to every checked route: path, body, headers."""
    a, b = operands
    content, headers = form([("a", npy(a)), ("b", npy(b))])
    stack, stack_headers = form([("a", npy(a[None])), ("b", npy(b))])
    return {
        "/v1/gemm": (content, headers),
        "/v1/gemm-reduce": (content, headers),
        "/v1/batch": (stack, stack_headers),
    }


@pytest.mark.parametrize("path", ["/v1/gemm", "/v1/gemm-reduce", "/v1/batch"])
async def test_a_body_that_changed_on_its_way_is_refused(client, requests, path, problem):
    content, headers = requests[path]
    right = await client.post(path, content=content, headers=headers | {"Content-Digest": field(content)})
    assert right.status_code == 200, right.text
    assert right.headers["gemmserve-checked-digest"] == field(content)
    flipped = bytearray(content)
    flipped[-20] ^= 1  # of the last operand
    wrong = await client.post(path, content=bytes(flipped), headers=headers | {"Content-Digest": field(content)})
    problem(wrong, 400, "digest-mismatch")
    assert "gemmserve-checked-digest" not in wrong.headers
    plain = await client.post(path, content=bytes(flipped), headers=headers)
    assert plain.status_code == 200  # nobody could know
    assert "gemmserve-checked-digest" not in plain.headers


async def test_jobs_too(client, put, problem):
    array_id = await put(np.eye(4, dtype="f4"))
    body = json.dumps({"op": "gemm", "a": array_id, "b": array_id, "alpha": 1}).encode()
    headers = {"Content-Type": "application/json", "Content-Digest": field(body)}
    wrong = await client.post("/v1/jobs", content=body.replace(b'"alpha": 1', b'"alpha": 3'), headers=headers)
    problem(wrong, 400, "digest-mismatch")
    assert (await client.get("/v1/jobs")).json()["items"] == []
    assert (await client.post("/v1/jobs", content=body, headers=headers)).status_code == 202


async def test_deletions_too(client, put, problem):
    array_id = await put(np.eye(4, dtype="f4"))
    body = json.dumps({"older_than_s": 8}).encode()
    headers = {"Content-Type": "application/json", "Content-Digest": field(body)}
    wrong = await client.post("/v1/deletions", content=body.replace(b"8", b"0"), headers=headers)
    problem(wrong, 400, "digest-mismatch")
    assert (await client.get(f"/v1/arrays/{array_id}")).status_code == 200
    right = await client.post("/v1/deletions", content=body, headers=headers)
    assert (right.status_code, right.json()["count"]) == (200, 0)
    assert right.headers["gemmserve-checked-digest"] == field(body)


async def test_uploads_confirm_what_they_compared_whole_and_in_parts(client, npy, problem):
    content = npy(np.eye(4))
    headers = {"Content-Type": "application/x-npy", "Content-Digest": field(content)}
    right = await client.post("/v1/arrays", content=content, headers=headers)
    assert (right.status_code, right.headers["gemmserve-checked-digest"]) == (201, field(content))
    wrong = await client.post("/v1/arrays", content=content[:-1] + b"x", headers=headers)
    problem(wrong, 400, "digest-mismatch")
    bare = {"Content-Type": "application/octet-stream"}
    upload = await client.post("/v1/uploads?dtype=float64&shape=4,4", headers=bare)
    assert upload.status_code == 201, upload.text
    part = np.eye(4).tobytes()
    path = f"/v1/uploads/{upload.json()['id']}/parts/0"
    headers = bare | {"Content-Digest": field(part)}
    sent = await client.put(path, content=part, headers=headers)
    assert sent.is_success, sent.text
    assert sent.headers["gemmserve-checked-digest"] == field(part)
    problem(await client.put(path, content=part[:-1] + b"x", headers=headers), 400, "digest-mismatch")


async def test_what_was_not_compared_is_not_confirmed(client):
    answer = await client.request("GET", "/v1/jobs", headers={"Content-Digest": field(b"body")})
    assert answer.status_code == 200
    assert "gemmserve-checked-digest" not in answer.headers


@pytest.mark.parametrize(("method", "status"), [("POST", 400), ("PUT", 405), ("GET", 200)])
async def test_a_malformed_one_of_an_upload_is_its_route_s_to_refuse(client, npy, method, status):
    """What the path has no such method for is told that."""
    headers = {"Content-Digest": "0", "Content-Type": "application/x-npy"}
    answer = await client.request(method, "/v1/arrays", content=npy(np.eye(2)), headers=headers)
    assert answer.status_code == status


@pytest.mark.parametrize("value", ["sha-256=:AAAA:", "nonsense"])
async def test_a_malformed_one_is_refused(client, requests, value, problem):
    content, headers = requests["/v1/gemm"]
    answer = await client.post("/v1/gemm", content=content, headers=headers | {"Content-Digest": value})
    problem(answer, 400, "invalid-request")


@pytest.mark.parametrize(
    ("path", "params"),
    [("/v1/gemm", {}), ("/v1/gemm-reduce", {"reduce": ["sum", "absmax"]}), ("/v1/batch", {"op": "gemm"})],
)
async def test_an_answer_has_one_where_it_is_wanted(client, form, npy, operands, path, params):
    a, b = operands
    content, headers = form([("params", json.dumps(params).encode()), ("a", npy(a)), ("b", npy(b))])
    answer = await client.post(path, content=content, headers=headers | WANT)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-digest"] == field(answer.content)
    for want in ({}, {"Want-Content-Digest": "sha-256=0"}, {"Want-Content-Digest": "sha-512=9"}):
        assert "content-digest" not in (await client.post(path, content=content, headers=headers | want)).headers


async def test_so_have_documents_and_problems(client, put):
    array_id = await put(np.eye(4, dtype="f4"))
    for path, status in ((f"/v1/arrays/{array_id}", 200), ("/v1/jobs", 200), ("/v1/arrays/none", 404), ("/nope", 404)):
        answer = await client.get(path, headers=WANT)
        assert answer.status_code == status
        assert answer.headers["content-digest"] == field(answer.content)
    gone = await client.delete(f"/v1/arrays/{array_id}", headers=WANT)
    assert gone.status_code == 204
    assert "content-digest" not in gone.headers


def test_over_a_socket(live, form, npy, operands):
    """Where bodies would land past the middleware, and small requests past the app."""
    a, b = operands
    content, headers = form([("a", npy(a)), ("b", npy(b))])
    expected = gemm(a, b)
    with contextlib.closing(Raw(live)) as connection:
        for _ in range(3):
            connection.send(content, headers, f"Content-Digest: {field(content)}", "Want-Content-Digest: sha-256=9")
            status, fields, body = connection.answer()
            assert (status, fields["content-digest"]) == (200, field(body))
            np.testing.assert_array_equal(np.load(io.BytesIO(body)), expected)
            connection.send(content, headers, f"Content-Digest: {field(content + b'x')}")
            status, _, body = connection.answer()
            assert (status, json.loads(body)["type"].rpartition("/")[2]) == (400, "digest-mismatch")
            connection.send(content, headers)
            assert connection.answer()[0] == 200


class TestDownloads:
    @pytest.fixture
    async def stored(self, client, put, random_array):
        return f"/v1/arrays/{await put(random_array((50, 60)))}"

    async def digest(self, client, path, **headers):
        answer = await client.get(f"{path}/data", headers=headers)
        return answer.headers.get("repr-digest"), answer.content

    @pytest.mark.parametrize("accept", ["application/x-npy", "application/octet-stream"])
    async def test_the_whole_representation_s_once_it_is_known(self, client, stored, accept):
        assert (await self.digest(client, stored, Accept=accept))[0] is None
        wanted = await client.head(f"{stored}/data", headers={"Accept": accept, "Want-Repr-Digest": "sha-256=1"})
        found, whole = await self.digest(client, stored, Accept=accept)
        assert wanted.headers["repr-digest"] == found == field(whole)
        part, content = await self.digest(client, stored, Accept=accept, Range="bytes=5-99")
        assert (part, content) == (found, whole[5:100])
        head = await client.head(f"{stored}/data", headers={"Accept": accept})
        assert head.headers["repr-digest"] == found

    @pytest.mark.parametrize("accept", ["application/x-npy", "application/octet-stream"])
    async def test_it_is_worked_out_where_it_is_wanted(self, client, put, random_array, accept):
        """Digest of a result, which nobody hashes unasked; from then on it is known."""
        array_id = await put(random_array((30, 30)))
        body = {"op": "gemm", "a": array_id, "b": array_id}
        job = (await client.post("/v1/jobs", json=body, headers={"Prefer": "wait=60"})).json()
        path = f"/v1/arrays/{job['result']['d']}"
        assert (await self.digest(client, path, Accept=accept))[0] is None
        want = {"Want-Repr-Digest": "unixsum=1, sha-256=10"}
        found, whole = await self.digest(client, path, Accept=accept, **want)
        assert found == field(whole)
        assert (await self.digest(client, path, Accept=accept))[0] == found
        assert (await client.get(path)).json()["sha256"]

    async def test_not_of_what_is_compressed(self, client, put):
        pytest.importorskip("backports.zstd")
        path = f"/v1/arrays/{await put(np.zeros((100, 100)))}"
        want = {"Want-Repr-Digest": "sha-256=1", "Accept-Encoding": "zstd"}
        answer = await client.get(f"{path}/data", headers=want)
        assert answer.headers["content-encoding"] == "zstd"
        assert "repr-digest" not in answer.headers

    async def test_of_an_array_without_elements(self, client, put):
        path = f"/v1/arrays/{await put(np.zeros((0, 3)))}"
        found, whole = await self.digest(client, path, **{"Want-Repr-Digest": "sha-256=1"})
        assert found == field(whole)

    @pytest.mark.parametrize("big", [">f8", "<f8"])
    async def test_of_what_was_checked_as_it_came(self, client, npy, big):
        """Its digest is that of what is sent again: of this machine's order, and with this service's own header."""
        content = npy(np.arange(600.0).astype(big).reshape(20, 30))
        headers = {"Content-Type": "application/x-npy", "Content-Digest": field(content)}
        array_id = (await client.post("/v1/arrays", content=content, headers=headers)).json()["id"]
        found, whole = await self.digest(client, f"/v1/arrays/{array_id}", **{"Want-Repr-Digest": "sha-256=1"})
        assert found == field(whole)
