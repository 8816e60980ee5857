"""Shared memory as a client passes it, over the real sockets: what is used, what is copied, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import io
import json
import os
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from local_app import LocalApp

from gemmserve.wire import DATA_HEADER, NPY_HEADER, RESULT_HEADER, SESSION_HEADER, format_npy_header
from gemmserve_service.api_keys import Quota
from gemmserve_service.descriptors import Descriptors
from gemmserve_service.keyring import create_key

OPEN = SimpleNamespace(current=SimpleNamespace(closed=False))
"""A keyring without keys."""

pytestmark = [
    pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory is passed on Linux"),
    pytest.mark.timeout(120),
]

SEAL, SHRINK, GROW, WRITE, FUTURE_WRITE = 1, 2, 4, 8, 16
N = 64
A = np.random.default_rng(5).standard_normal((N, N)).astype(np.float32)
B = np.eye(N, dtype=np.float32) * 2


def memory(array=None, *, nbytes=0, seals=0, offset=0):
    """A memfd that holds the array's bytes from `offset` on, or `nbytes` zeros."""
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    data = bytes(nbytes) if array is None else bytes(offset) + array.tobytes()
    os.pwrite(fd, data, 0)
    if seals:
        fcntl.fcntl(fd, 1033, seals)
    return fd


def open_descriptors():
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def head(array):
    return format_npy_header(array.dtype, array.shape)


class Peer:
    """A client by hand."""

    def __init__(self, app, key=None):
        self.app = app
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(30)
        self.socket.connect(f"{app.path}.fds")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(
            transport=httpx.HTTPTransport(uds=str(app.path)), base_url="http://localhost", timeout=60, headers=headers
        )
        self.send({"kind": "hello", "version": 1, "api_key": key})
        self.welcome = json.loads(self.socket.recv(1 << 16))
        self.secret = self.welcome.get("session", "")
        self.number = 0

    def send(self, frame, *fds):
        data = frame if isinstance(frame, bytes) else json.dumps(frame).encode()
        socket.send_fds(self.socket, [data], fds)

    def share(self, fd, offset=0, *, close=True):
        self.number += 1
        self.send({"kind": "memory", "number": self.number, "offset": offset}, fd)
        if close:
            os.close(fd)
        return self.number

    def gemm(self, *, shared, plain=(), params=b"{}", result=None, secret=None, **headers):
        """`shared`: name -> (array, number); `plain`: name -> array."""
        body = b'--X\r\nContent-Disposition: form-data; name="params"\r\n\r\n' + params
        for name, (array, number) in shared.items():
            body += b'\r\n--X\r\nContent-Disposition: form-data; name="%s"\r\n' % name.encode()
            body += f"Content-Type: {NPY_HEADER}\r\n{DATA_HEADER}: {number}\r\n\r\n".encode() + head(array)
        for name, array in dict(plain).items():
            body += b'\r\n--X\r\nContent-Disposition: form-data; name="%s"\r\n\r\n' % name.encode()
            body += head(array) + array.tobytes()
        headers["Content-Type"] = "multipart/form-data; boundary=X"
        headers[SESSION_HEADER] = self.secret if secret is None else secret
        if result is not None:
            headers[RESULT_HEADER] = str(result)
        return self.http.post("/v1/gemm", content=body + b"\r\n--X--\r\n", headers=headers)

    def ended(self):
        try:
            return self.socket.recv(100) == b""
        except ConnectionResetError:
            return True

    def close(self):
        self.socket.close()
        self.http.close()


@pytest.fixture
def sockets(tmp_path_factory):
    return tmp_path_factory.mktemp("s") / "g.sock"


@pytest.fixture
def make(sockets, tmp_path):
    with contextlib.ExitStack() as stack:

        def start(**settings):
            return stack.enter_context(LocalApp(sockets, tmp_path / "data", **settings))

        yield start


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    folder = tmp_path_factory.mktemp("s")
    with LocalApp(folder / "g.sock", folder / "data") as app:
        yield app


@pytest.fixture
def app(running):
    """One for all tests that leave it as it was."""
    running.executor.sent.clear()
    yield running
    running.end_sessions()
    running.until(lambda: running.descriptors.held == 0 and running.core.store.scratch_bytes == 0)


@pytest.fixture
def peers():
    with contextlib.ExitStack() as stack:

        def connect(app, key=None):
            peer = Peer(app, key)
            stack.callback(peer.close)
            return peer

        yield connect


@pytest.fixture
def peer(app, peers):
    return peers(app)


def array_of(answer):
    assert answer.status_code == 200, answer.text
    return np.load(io.BytesIO(answer.content))


def refused(answer, detail):
    assert (answer.status_code, answer.json()["type"]) == (422, "/problems/descriptor-refused"), answer.text
    assert detail in answer.json()["detail"], answer.json()
    return True


# -- operands -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seals", [0, SHRINK | GROW, SHRINK | GROW | WRITE, SEAL | SHRINK | GROW | WRITE, FUTURE_WRITE])
def test_an_operand_is_used_where_it_lies_only_if_nobody_can_change_it(app, peer, seals):
    number = peer.share(memory(A, seals=seals))
    np.testing.assert_array_equal(array_of(peer.gemm(shared={"a": (A, number)}, plain={"b": B})), A * 2)
    path = app.executor.sent[0].operands["a"].path
    in_place = seals & (SHRINK | GROW | WRITE) == SHRINK | GROW | WRITE
    recycled = {each.path for each in app.core.store._memory._free.values()}
    assert (path in recycled) == (not in_place), "sealed memory of a client serves no other array"


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
    thread.join(30)
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
    assert app.descriptors.held == 0


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


# -- results --------------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", ["small", "holes", "sealed", "read-only"])
def test_a_result_that_does_not_go_into_the_memory_goes_by_the_socket(app, peer, kind):
    fd = memory(nbytes=A.nbytes - 1 if kind == "small" else A.nbytes)
    if kind == "holes":
        os.ftruncate(fd, 0)
        os.ftruncate(fd, A.nbytes)
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
    if kind == "holes":
        assert os.fstat(watched).st_blocks == 0, "the server's pages in the client's memory"
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
    assert app.descriptors.held == 0


# -- stored arrays --------------------------------------------------------------------------------------------------


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
    assert app.core.store.used_bytes == before


def test_a_body_beside_the_memory(app, peer):
    headers = {"Content-Type": NPY_HEADER, SESSION_HEADER: peer.secret, DATA_HEADER: str(peer.share(memory(A)))}
    answer = peer.http.post("/v1/arrays", content=head(A) + b"more", headers=headers)
    assert answer.json()["type"] == "/problems/body-length"
    headers[DATA_HEADER] = "7777"
    assert refused(peer.http.post("/v1/arrays", content=head(A), headers=headers), "no descriptor 7777")


# -- limits and quotas ----------------------------------------------------------------------------------------------


def test_memory_of_clients_counts_against_the_memory_for_scratch(make, peers):
    app = make(max_scratch_bytes=A.nbytes)
    peer = peers(app)
    numbers = [peer.share(memory(A, seals=SHRINK | GROW | WRITE)) for _ in range(2)]
    answer = peer.gemm(shared={"a": (A, numbers[0]), "b": (A, numbers[1])})
    np.testing.assert_allclose(array_of(answer), A @ A, rtol=1e-4, atol=1e-4)
    operands = app.executor.sent[0].operands
    assert operands["a"].path.startswith("/proc/"), "in place"
    assert "extents" in operands["b"].path, "no memory left: a copy in a file"


def test_an_array_that_is_too_large(make, peers):
    app = make(max_array_bytes=A.nbytes - 1)
    peer = peers(app)
    number = peer.share(memory(A, seals=SHRINK | GROW | WRITE))
    answer = peer.gemm(shared={"a": (A, number)}, plain={"b": B})
    assert answer.json()["type"] == "/problems/too-large"


def test_descriptors_that_wait_are_counted(make, peers):
    app = make(max_shared_descriptors=3)
    first, second = peers(app), peers(app)
    numbers = [first.share(memory(A)) for _ in range(3)]
    app.until(lambda: app.descriptors.held == 3)
    late = second.share(memory(A))
    assert refused(second.gemm(shared={"a": (A, late)}, plain={"b": B}), "too many")
    array_of(first.gemm(shared={"a": (A, numbers[0])}, plain={"b": B}))
    late = second.share(memory(A))
    array_of(second.gemm(shared={"a": (A, late)}, plain={"b": B}))


def test_thousands_of_descriptors_end_the_session_and_are_closed(app, peer):
    before = open_descriptors()
    fd = memory(A)
    with pytest.raises(OSError):  # noqa: PT012 (whichever of them it is that fails)
        for _ in range(5000):
            peer.share(fd, close=False)
    os.close(fd)
    app.until(lambda: app.descriptors.sessions == 0)
    assert app.descriptors.held == 0
    app.until(lambda: open_descriptors() <= before)


def test_the_longest_idle_session_makes_way(app, peers, monkeypatch):
    from gemmserve_service import descriptors

    monkeypatch.setattr(descriptors, "_MOST_SESSIONS", 2)
    one, two = peers(app), peers(app)
    array_of(one.gemm(shared={"a": (A, one.share(memory(A)))}, plain={"b": B}))
    three = peers(app)
    assert two.ended()
    for peer in (one, three):
        array_of(peer.gemm(shared={"a": (A, peer.share(memory(A)))}, plain={"b": B}))
    assert refused(two.gemm(shared={"a": (A, 1)}, plain={"b": B}), "no such session")


def test_connections_that_say_nothing(make, monkeypatch):
    from gemmserve_service import descriptors

    monkeypatch.setattr(descriptors, "_MOST_SESSIONS", 2)
    app = make(head_timeout_s=0.2)
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(3)]
    for each in silent:
        each.settimeout(30)
        each.connect(f"{app.path}.fds")
    for each in silent:  # the first at once, the others when their time is up
        assert each.recv(10) == b""
        each.close()


# -- nonsense -------------------------------------------------------------------------------------------------------

MEMORY = {"kind": "memory", "number": 1, "offset": 0}


@pytest.mark.parametrize(
    "frame",
    [
        b"{", b"[]", b"\x80\x04N.", b"null", {"kind": "other"}, MEMORY | {"number": -1}, MEMORY | {"number": 1.5},
        MEMORY | {"number": 1 << 60}, MEMORY | {"offset": -1}, MEMORY | {"more": 1}, {"kind": "memory"},
        {"kind": "hello", "version": 1}, b"x" * (17 << 10),
    ],
)  # fmt: skip
def test_what_is_no_frame_ends_the_session(app, peer, frame):
    fd = memory(A)
    peer.send(frame, fd)
    os.close(fd)
    assert peer.ended()
    app.until(lambda: app.descriptors.sessions == 0)
    assert peer.http.get("/livez").status_code == 200


@pytest.mark.parametrize("count", [0, 2, 6])
def test_a_frame_has_one_descriptor(app, peer, count):
    before = open_descriptors()
    fds = [memory(A) for _ in range(count)]
    peer.send(MEMORY, *fds)
    for fd in fds:
        os.close(fd)
    assert peer.ended()
    app.until(lambda: open_descriptors() <= before)


def test_a_number_that_is_taken_ends_the_session(app, peer):
    for _ in range(2):
        fd = memory(A)
        peer.send(MEMORY, fd)
        os.close(fd)
    assert peer.ended()


@pytest.mark.parametrize("hello", [{"kind": "hello", "version": 2}, MEMORY, b"GET / HTTP/1.1\r\n\r\n"])
def test_whoever_does_not_say_hello_is_not_heard(app, hello):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.settimeout(30)
        connection.connect(f"{app.path}.fds")
        connection.send(hello if isinstance(hello, bytes) else json.dumps(hello).encode())
        assert connection.recv(100) == b""


# -- in one loop -----------------------------------------------------------------------------------------------------


@pytest.fixture
async def registry(sockets):
    """A registry without an app, in this test's loop, and its listener."""
    registry = Descriptors(SimpleNamespace(max_shared_descriptors=8, head_timeout_s=30), OPEN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(sockets))
        listener.listen()
        registry.start(listener)
        yield registry, listener
        registry.stop()


async def turn(condition):
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 (what the registry does has no event)
            await asyncio.sleep(0.001)


async def test_what_was_sent_before_the_request_is_found_though_the_loop_has_not_looked(registry, sockets):
    registry, _ = registry
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(sockets))
        connection.send(b'{"kind": "hello", "version": 1}')
        await turn(lambda: registry.sessions)
        session = registry.session(json.loads(connection.recv(1000))["session"], "")
        fd = memory(A)
        socket.send_fds(connection, [json.dumps(MEMORY).encode()], [fd])
        os.close(fd)
        session.take(1).close()  # with no await between


async def test_no_descriptors_left_for_a_connection(registry, sockets, monkeypatch, caplog):
    registry, listener = registry
    monkeypatch.setattr("gemmserve_service.descriptors._PAUSE_S", 0.01)
    attempts = []

    class Full:
        fileno = listener.fileno

        def accept(self):
            attempts.append(1)
            if len(attempts) < 3:
                raise OSError(24, "Too many open files")
            return listener.accept()

    registry._listener = Full()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(str(sockets))
        connection.send(b'{"kind": "hello", "version": 1}')
        await turn(lambda: registry.sessions)
    assert "Too many open files" in caplog.text


# -- sessions and keys ----------------------------------------------------------------------------------------------


def test_a_session_is_known_by_its_secret_alone(app, peers):
    one, other = peers(app), peers(app)
    assert one.secret != other.secret
    assert len(one.secret) == 64
    number = one.share(memory(A))
    assert refused(other.gemm(shared={"a": (A, number)}, plain={"b": B}), "no descriptor")
    assert refused(other.gemm(shared={"a": (A, number)}, plain={"b": B}, secret="0" * 64), "no such session")
    array_of(one.gemm(shared={"a": (A, number)}, plain={"b": B}))


def test_memory_without_a_session(app, peer):
    body = b'--X\r\nContent-Disposition: form-data; name="a"\r\nContent-Type: %s\r\n%s: 1\r\n\r\n' % (
        NPY_HEADER.encode(), DATA_HEADER.encode(),
    ) + head(A) + b"\r\n--X--\r\n"  # fmt: skip
    answer = peer.http.post("/v1/gemm", content=body, headers={"Content-Type": "multipart/form-data; boundary=X"})
    assert refused(answer, SESSION_HEADER)


def test_keys_hold_here_as_everywhere(make, peers, tmp_path):
    keys = {}
    for name in ("alice", "bob"):
        _, keys[name] = create_key(tmp_path / "data", name)
    app = make()
    nobody = peers(app)
    assert nobody.welcome["kind"] == "refused"
    assert nobody.welcome["problem"]["type"] == "/problems/unauthorized"
    assert nobody.ended()
    wrong = peers(app, keys["alice"][:-1] + "x")
    assert wrong.welcome["problem"]["type"] == "/problems/unauthorized"
    alice, bob = peers(app, keys["alice"]), peers(app, keys["bob"])
    number = alice.share(memory(A))
    # Bob has come by Alice's secret: it is of no use with his key.
    assert refused(bob.gemm(shared={"a": (A, number)}, plain={"b": B}, secret=alice.secret), "no such session")
    array_of(alice.gemm(shared={"a": (A, number)}, plain={"b": B}))
    anonymous = httpx.Client(transport=httpx.HTTPTransport(uds=str(app.path)), base_url="http://localhost")
    assert anonymous.get("/v1/arrays").status_code == 401
    anonymous.close()


def test_the_quota_of_bytes_in_flight_counts_shared_operands(make, peers, tmp_path):
    _, key = create_key(tmp_path / "data", "alice", quota=Quota(inflight_bytes=A.nbytes))
    app = make()
    alice = peers(app, key)
    numbers = [alice.share(memory(A, seals=SHRINK | GROW | WRITE)) for _ in range(2)]
    answer = alice.gemm(shared={"a": (A, numbers[0]), "b": (A, numbers[1])})
    assert (answer.status_code, answer.json()["type"]) == (429, "/problems/quota-exceeded")
    app.until(lambda: app.core.quotas.inflight_bytes(key.split("_")[1]) == 0)


# -- death ----------------------------------------------------------------------------------------------------------


def test_a_client_that_goes_between_passing_and_asking(app, peers):
    peer = peers(app)
    for _ in range(5):
        peer.share(memory(A))
    app.until(lambda: app.descriptors.held == 5)
    peer.socket.close()
    app.until(lambda: app.descriptors.held == 0)
    assert refused(peer.gemm(shared={"a": (A, 1)}, plain={"b": B}), "no such session")


def test_a_session_that_ends_during_its_request_harms_nobody(app, peer):
    app.executor.hold = True
    fd = memory(nbytes=A.nbytes)
    numbers = peer.share(memory(A, seals=SHRINK | GROW | WRITE)), peer.share(fd, close=False)
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(peer.gemm(shared={"a": (A, numbers[0])}, plain={"b": B}, result=numbers[1]))
    )
    thread.start()
    app.until(lambda: app.executor.held)
    app.end_sessions()
    app.executor.release()
    thread.join(30)
    assert answers[0].headers["content-type"] == NPY_HEADER
    assert os.pread(fd, A.nbytes, 0) == (A * 2).tobytes()
    os.close(fd)


def test_hanging_up_gives_the_memory_back(app, peer):
    app.executor.hold = True
    number = peer.share(memory(A, seals=SHRINK | GROW | WRITE))
    peer.http.timeout = httpx.Timeout(0.5)
    with pytest.raises(httpx.ReadTimeout):
        peer.gemm(shared={"a": (A, number)}, plain={"b": B})
    peer.http.close()
    app.until(lambda: app.core.scheduler.queued + len(app.core.scheduler._wanted()) == 0)
    app.executor.release()
    app.until(lambda: app.core.store.scratch_bytes == 0)


@pytest.mark.parametrize("there", [True, False])
def test_room_for_a_result_that_an_upload_has_no_use_for_is_closed(app, peer, there):
    def of_clients():
        count = 0
        for path in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                count += "memfd:test" in str(path.readlink())
        return count

    for _ in range(10):
        data = peer.share(memory(A)) if there else 999
        headers = {
            "Content-Type": NPY_HEADER,
            SESSION_HEADER: peer.secret,
            RESULT_HEADER: str(peer.share(memory(nbytes=A.nbytes))),
            DATA_HEADER: str(data),
        }
        answer = peer.http.post("/v1/arrays", content=head(A), headers=headers)
        assert answer.status_code == (201 if there else 422), answer.text
    app.until(lambda: of_clients() == 0)
