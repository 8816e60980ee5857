"""Results and stored arrays in a client's memory, and what goes by the socket nevertheless."""

from __future__ import annotations

import fcntl
import io
import os

import numpy as np
import pytest
from memory_peer import GROW, NEEDS_MEMFD, SHRINK, WRITE, A, B, array_of, head, memory, refused, without_pages

from gemmserve.wire import DATA_HEADER, NPY_HEADER, RESULT_HEADER, SESSION_HEADER

pytestmark = NEEDS_MEMFD


def test_the_result_comes_in_memory(app, peer):
    fd = memory(nbytes=A.nbytes)
    result = peer.share(fd, close=False)
    answer = peer.gemm(shared={"a": (A, peer.share(memory(A)))}, plain={"b": B}, result=result)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == NPY_HEADER
    assert RESULT_HEADER in answer.headers
    assert "gemm-algorithm" in answer.headers
    assert answer.content == head(A)
    assert os.pread(fd, A.nbytes, 0) == (A * 2).tobytes()
    os.close(fd)


@pytest.mark.parametrize("kind", ["small", "holes", "one hole", "sealed", "read-only"])
def test_a_result_that_does_not_go_into_the_memory_goes_by_the_socket(app, peer, kind):
    fd = memory(nbytes=A.nbytes - 1 if kind == "small" else A.nbytes)
    if kind == "holes":
        os.ftruncate(fd, 0)
        os.ftruncate(fd, A.nbytes)
    if kind == "one hole":
        without_pages(fd, A.nbytes)
    if kind == "sealed":
        fcntl.fcntl(fd, 1033, WRITE)
    if kind == "read-only":
        reader = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        os.close(fd)
        fd = reader
    watched = os.dup(fd)
    answer = peer.gemm(shared={}, plain={"a": A, "b": B}, result=peer.share(fd))
    assert RESULT_HEADER not in answer.headers
    np.testing.assert_array_equal(array_of(answer), A * 2)
    if "hole" in kind:
        assert os.lseek(watched, 0, os.SEEK_HOLE) == 0, "the server's pages in the client's memory"
    os.close(watched)


def test_several_results_go_by_the_socket(app, peer):
    result = peer.share(memory(nbytes=1 << 16))
    body = b'--X\r\nContent-Disposition: form-data; name="params"\r\n\r\n{"reduce": ["sum", "max"]}'
    for name in (b"a", b"b"):
        body += b'\r\n--X\r\nContent-Disposition: form-data; name="%s"\r\n\r\n' % name + head(A) + A.tobytes()
    headers = {
        "Content-Type": "multipart/form-data; boundary=X", SESSION_HEADER: peer.secret, RESULT_HEADER: str(result),
    }  # fmt: skip
    answer = peer.http.post("/v1/gemm-reduce", content=body + b"\r\n--X--\r\n", headers=headers)
    assert set(np.load(io.BytesIO(answer.content)).files) == {"sum", "max"}
    app.until(lambda: app.descriptors.held == 0)


@pytest.mark.parametrize("seals", [0, SHRINK | GROW | WRITE])
def test_a_stored_array_is_a_copy_in_the_store(app, peer, seals):
    fd = memory(A, seals=seals)
    headers = {"Content-Type": NPY_HEADER, SESSION_HEADER: peer.secret, DATA_HEADER: str(peer.share(fd, close=False))}
    info = peer.http.post("/v1/arrays", content=head(A), headers=headers)
    assert info.status_code == 201, info.text
    if not seals:
        os.pwrite(fd, bytes(A.nbytes), 0)
    os.close(fd)
    url = f"{info.headers['location']}/data"
    np.testing.assert_array_equal(array_of(peer.http.get(url)), A)
    target = memory(nbytes=A.nbytes)
    headers = {SESSION_HEADER: peer.secret, RESULT_HEADER: str(peer.share(target, close=False))}
    answer = peer.http.get(url, headers=headers)
    assert (answer.headers["content-type"], answer.content) == (NPY_HEADER, head(A))
    assert "etag" in answer.headers
    assert os.pread(target, A.nbytes, 0) == A.tobytes()
    os.close(target)


def test_a_range_and_a_head_go_by_the_socket(app, peer):
    headers = {"Content-Type": "application/x-npy"}
    array_id = peer.http.post("/v1/arrays", content=head(A) + A.tobytes(), headers=headers).json()["id"]
    for method, more, status, length in (("GET", {"Range": "bytes=0-9"}, 206, 10), ("HEAD", {}, 200, 0)):
        headers = {SESSION_HEADER: peer.secret, RESULT_HEADER: str(peer.share(memory(nbytes=A.nbytes))), **more}
        answer = peer.http.request(method, f"/v1/arrays/{array_id}/data", headers=headers)
        assert (answer.status_code, len(answer.content)) == (status, length)
        assert RESULT_HEADER not in answer.headers


def test_the_digest_of_a_stored_array_is_checked(app, peer):
    before = app.core.store.used_bytes
    headers = {"Content-Type": NPY_HEADER, SESSION_HEADER: peer.secret, "Content-Digest": f"sha-256=:{'A' * 43}=:"}
    answer = peer.http.post("/v1/arrays", content=head(A), headers={**headers, DATA_HEADER: str(peer.share(memory(A)))})
    assert answer.json()["type"] == "/problems/digest-mismatch"
    app.until(lambda: app.core.store.used_bytes == before)


def test_a_body_beside_the_memory(app, peer):
    headers = {"Content-Type": NPY_HEADER, SESSION_HEADER: peer.secret, DATA_HEADER: str(peer.share(memory(A)))}
    answer = peer.http.post("/v1/arrays", content=head(A) + b"more", headers=headers)
    assert answer.json()["type"] == "/problems/body-length"
    headers[DATA_HEADER] = "7777"
    assert refused(peer.http.post("/v1/arrays", content=head(A), headers=headers), "no descriptor 7777")
