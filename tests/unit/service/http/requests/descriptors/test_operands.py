"""Operands in a client's memory: what is used where it lies, what is copied, and what is refused."""

from __future__ import annotations

import fcntl
import os
import socket
import threading

import numpy as np
import pytest
from memory_peer import FUTURE_WRITE, GROW, NEEDS_MEMFD, SEAL, SHRINK, WRITE, A, B, N, array_of, head, memory, refused
from works import unpacked

from gemmserve.wire import DATA_HEADER, NPY_HEADER, SESSION_HEADER

pytestmark = NEEDS_MEMFD


@pytest.mark.parametrize("seals", [0, SHRINK | GROW, SHRINK | GROW | WRITE, SEAL | SHRINK | GROW | WRITE, FUTURE_WRITE])
def test_an_operand_is_used_where_it_lies_only_if_nobody_can_change_it(app, peer, seals):
    number = peer.share(memory(A, seals=seals))
    np.testing.assert_array_equal(array_of(peer.gemm(shared={"a": (A, number)}, plain={"b": B})), A * 2)
    path = unpacked(app.executor.sent[0])[0].operands["a"].path
    in_place = seals & (SHRINK | GROW | WRITE) == SHRINK | GROW | WRITE
    app.until(lambda: app.core.store.scratch_bytes == 0)
    recycled = app.core.store._memory._free
    if in_place:
        assert path not in {each.path for each in tuple(recycled.values())}, "a client's memory serves another array"
    else:
        app.until(lambda: path in {each.path for each in tuple(recycled.values())})


def test_an_operand_at_an_offset_is_copied(app, peer):
    number = peer.share(memory(A, offset=4096, seals=SHRINK | GROW | WRITE), offset=4096)
    np.testing.assert_array_equal(array_of(peer.gemm(shared={"a": (A, number)}, plain={"b": B})), A * 2)


def test_big_endian_operands_are_turned_round_in_a_copy(app, peer):
    swapped = A.astype(">f4")
    fd = memory(swapped, seals=SHRINK | GROW | WRITE)
    kept = os.dup(fd)
    number = peer.share(fd)
    body = peer.gemm(shared={}, plain={})  # no operands: only to see that the session lives
    assert body.status_code == 422
    header = head(A).replace(b"<f4", b">f4")
    form = (
        b'--X\r\nContent-Disposition: form-data; name="a"\r\n'
        + f"Content-Type: {NPY_HEADER}\r\n{DATA_HEADER}: {number}\r\n\r\n".encode()
        + header
        + b'\r\n--X\r\nContent-Disposition: form-data; name="b"\r\n\r\n'
        + head(B)
        + B.tobytes()
        + b"\r\n--X--\r\n"
    )
    answer = peer.http.post(
        "/v1/gemm",
        content=form,
        headers={"Content-Type": "multipart/form-data; boundary=X", SESSION_HEADER: peer.secret},
    )
    np.testing.assert_array_equal(array_of(answer), A * 2)
    assert os.pread(kept, A.nbytes, 0) == swapped.tobytes()
    os.close(kept)


def test_the_operand_is_what_it_was_when_it_was_read_whatever_the_client_does_then(app, peer):
    app.executor.hold = True
    fd = memory(A)
    number = peer.share(fd, close=False)
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(peer.gemm(shared={"a": (A, number)}, plain={"b": B})), daemon=True
    )
    thread.start()
    app.until(lambda: app.executor.held)
    os.pwrite(fd, bytes(A.nbytes), 0)
    os.ftruncate(fd, 0)
    os.close(fd)
    app.executor.release()
    thread.join(60)
    np.testing.assert_array_equal(array_of(answers[0]), A * 2)


def test_sealed_memory_cannot_be_changed_while_it_is_used(app, peer):
    fd = memory(A, seals=SHRINK | GROW | WRITE)
    number = peer.share(fd, close=False)
    with pytest.raises(PermissionError):
        os.pwrite(fd, b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)
    array_of(peer.gemm(shared={"a": (A, number)}, plain={"b": B}))


def test_holes_in_sealed_memory_are_not_mapped(app, peer):
    """Reading a hole through a mapping takes a page, which would be the server's."""
    zeros = np.zeros((512, 512), np.float32)
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, zeros.nbytes)
    fcntl.fcntl(fd, 1033, SHRINK | GROW | WRITE)
    watched = os.dup(fd)
    number = peer.share(fd)
    result = array_of(peer.gemm(shared={"a": (zeros, number)}, plain={"b": zeros}))
    np.testing.assert_array_equal(result, zeros)
    assert os.fstat(watched).st_blocks == 0
    os.close(watched)


def test_a_number_serves_one_request(app, peer):
    number = peer.share(memory(A))
    array_of(peer.gemm(shared={"a": (A, number)}, plain={"b": B}))
    assert refused(peer.gemm(shared={"a": (A, number)}, plain={"b": B}), "used before")
    app.until(lambda: app.descriptors.held == 0)


def test_memory_that_is_too_small(app, peer):
    number = peer.share(memory(nbytes=A.nbytes - 1, seals=SHRINK | GROW | WRITE))
    assert refused(peer.gemm(shared={"a": (A, number)}, plain={"b": B}), f"has {A.nbytes} bytes")
    number = peer.share(memory(A), offset=4)
    assert refused(peer.gemm(shared={"a": (A, number)}, plain={"b": B}), f"{A.nbytes - 4} from its offset on")
    number = peer.share(memory(A), offset=1 << 40)
    assert refused(peer.gemm(shared={"a": (A, number)}, plain={"b": B}), " 0 from its offset on")


def descriptor_of(kind, tmp_path):
    if kind == "file":
        path = tmp_path / "file"
        path.write_bytes(A.tobytes())
        return os.open(path, os.O_RDWR)
    if kind == "pipe":
        read, write = os.pipe()
        os.close(write)
        return read
    if kind == "socket":
        one, other = socket.socketpair()
        other.close()
        return one.detach()
    return os.open({"device": "/dev/zero", "folder": str(tmp_path)}[kind], os.O_RDONLY)


@pytest.mark.parametrize("kind", ["file", "pipe", "socket", "device", "folder"])
def test_what_is_no_memory_is_refused_and_the_session_goes_on(app, peer, tmp_path, kind):
    number = peer.share(descriptor_of(kind, tmp_path))
    assert refused(peer.gemm(shared={"a": (A, number)}, plain={"b": B}), "no shared memory")
    number = peer.share(memory(A))
    array_of(peer.gemm(shared={"a": (A, number)}, plain={"b": B}))


def test_a_descriptor_that_cannot_be_read_is_an_error_of_the_request_alone(app, peer):
    fd = memory(A)
    write_only = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
    os.close(fd)
    number = peer.share(write_only)
    assert refused(peer.gemm(shared={"a": (A, number)}, plain={"b": B}), "cannot be read")
    assert peer.http.get("/livez").status_code == 200


def test_shapes_are_judged_before_the_memory_is_read(app, peer):
    wide = np.zeros((N, N + 1), np.float32)
    number = peer.share(memory(nbytes=8))
    answer = peer.gemm(shared={"a": (wide, number)}, plain={"b": B})
    assert refused(answer, "bytes")
    numbers = peer.share(memory(wide)), peer.share(memory(nbytes=8))
    answer = peer.gemm(shared={"a": (wide, numbers[0]), "b": (B, numbers[1])})
    assert answer.json()["type"] == "/problems/shape-mismatch"


def test_data_after_a_header_that_has_its_data_elsewhere(app, peer):
    number = peer.share(memory(A))
    form = (
        b'--X\r\nContent-Disposition: form-data; name="a"\r\n'
        + f"Content-Type: {NPY_HEADER}\r\n{DATA_HEADER}: {number}\r\n\r\n".encode()
        + head(A)
        + b"more\r\n--X--\r\n"
    )
    headers = {"Content-Type": "multipart/form-data; boundary=X", SESSION_HEADER: peer.secret}
    answer = peer.http.post("/v1/gemm", content=form, headers=headers)
    assert answer.json()["type"] == "/problems/body-length"


@pytest.mark.parametrize("number", ["", "-1", "x", "9" * 40, "\u0661"])
def test_numbers_that_are_none(app, peer, number):
    array = np.ones((4, 4), np.float32)
    answer = peer.gemm(shared={"a": (array, number.encode().decode("latin-1"))}, plain={"b": array})
    assert (answer.status_code, answer.json()["type"]) == (400, "/problems/invalid-request")
