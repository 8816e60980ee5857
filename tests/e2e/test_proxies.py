"""Behind nginx and haproxy, with one kept connection for all: nobody gets another's answer, whatever a client sends.

Tests of a proxy that is not installed are skipped; .ci/run installs both.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import urlsplit

import numpy as np
import pytest
from live_server import LiveServer
from proxies import COMMANDS, Proxy, found
from raw_connection import Raw
from request_shapes import HIDDEN, SHAPES

from gemmserve import Client
from gemmserve_service.tenancy.keyring import create_key

QUIET_S = 0.15
"""A proxy that says nothing for so long waits for more of a request."""

LATE_S = 0.03
"""A body that comes so long behind its head is in another segment, also behind a proxy."""

LANES = 4
"""Shapes that are sent at one time: most of the time nobody says anything."""

SWALLOWING = HIDDEN[:-4] + b"\r\nX:"
"""The hidden request without its end: what comes behind it on the connection would be its last field."""

JAVA = """
import java.net.URI;
import java.net.http.*;
import java.nio.file.*;

public class Post {
    public static void main(String[] arguments) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (int i = 0; i < 3; i++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(arguments[0]))
                .header("Content-Type", arguments[1]).header("Authorization", arguments[2])
                .POST(HttpRequest.BodyPublishers.ofFile(Path.of(arguments[3]))).build();
            HttpResponse<byte[]> answer = client.send(request, HttpResponse.BodyHandlers.ofByteArray());
            System.out.println(answer.statusCode() + " " + answer.version() + " " + answer.body().length);
        }
    }
}
"""


class Service:
    """The server with two owners."""

    def __init__(self, live: LiveServer, keys: dict[str, str]) -> None:
        self.keys = keys
        address = urlsplit(live.url)
        self.url, self.host, self.port = live.url, address.hostname, address.port
        self.arrays = {}
        for name, key in keys.items():
            with Client(live.url, api_key=key) as client:
                self.arrays[name] = client.put(np.full((4, 4), float(len(name)))).id


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    data = tmp_path_factory.mktemp("data")
    keys = {name: create_key(data, name)[1] for name in ("alice", "bob")}
    with LiveServer(data_dir=data) as live:
        yield Service(live, keys)


@pytest.fixture(scope="module", params=["alone", *COMMANDS])
def port(request, service, tmp_path_factory):
    """Where clients connect to."""
    if request.param == "alone":
        yield service.port
    elif found(request.param) is None:
        pytest.skip(f"{request.param} is not installed")
    else:
        with Proxy(request.param, service.host, service.port, tmp_path_factory.mktemp(request.param)) as proxy:
            yield proxy.port


@pytest.fixture(scope="module", params=["alone", *COMMANDS])
def ports(request, service, tmp_path_factory):
    """Where clients connect to who do not meet: behind each, if it is a proxy, is a connection of its own."""
    with contextlib.ExitStack() as stack:
        if request.param == "alone":
            yield [service.port] * LANES
        elif found(request.param) is None:
            pytest.skip(f"{request.param} is not installed")
        else:
            folders = (tmp_path_factory.mktemp(request.param) for _ in range(LANES))
            proxies = (Proxy(request.param, service.host, service.port, folder) for folder in folders)
            yield [stack.enter_context(proxy).port for proxy in proxies]


class Owner:
    """A client that keeps its connection, and knows its own things."""

    def __init__(self, port: int, service: Service, name: str) -> None:
        self._port, self._key, self._array = port, service.keys[name], service.arrays[name]
        self._name, self._count = name, 0
        self._raw: Raw | None = None

    def connect(self):
        connection = socket.create_connection(("127.0.0.1", self._port), timeout=60)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection

    @property
    def port(self):
        return self._port

    def ask(self) -> None:
        """Lists its arrays, and expects its own answer."""
        self._raw = self._raw or Raw(self)
        self._count += 1
        request_id = f"{self._name}-{self._count}"
        self._raw.socket.sendall(
            f"GET /v1/arrays HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Request-Id: {request_id}\r\n"
            f"Authorization: Bearer {self._key}\r\n\r\n".encode()
        )
        answer = self._raw.answer()
        assert answer is not None
        status, headers, body = answer
        assert (status, headers["x-request-id"]) == (200, request_id)
        assert [item["id"] for item in json.loads(body)["items"]] == [self._array]

    def close(self) -> None:
        if self._raw is not None:
            self._raw.close()


def attack(port: int, data: bytes, *, late: bool = False) -> bytes:
    """What a connection of its own brings who sends `data`; if `late`, the body once the head is on its way."""
    got = b""
    with socket.create_connection(("127.0.0.1", port), timeout=QUIET_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(ConnectionError, TimeoutError):
            if late:
                head, end, data = data.partition(b"\r\n\r\n")
                connection.sendall(head + end)
                connection.settimeout(LATE_S)
                with contextlib.suppress(TimeoutError):
                    got = connection.recv(1 << 16)
                connection.settimeout(QUIET_S)
            connection.sendall(data)
            while piece := connection.recv(1 << 16):
                got += piece
    return got


def table(service, port, shapes, hidden, *, late):
    """Shapes by alice, bob's requests between them; how many were answered."""
    answered = 0
    with contextlib.closing(Owner(port, service, "bob")) as bob:
        bob.ask()
        for shape in shapes:
            key = f"Authorization: Bearer {service.keys['alice']}\r\nContent-Type: application/json\r\n".encode()
            data = shape.data.replace(HIDDEN, hidden).replace(b"Content-Type: application/json\r\n", key)
            answered += attack(port, data, late=late).startswith(b"HTTP/1.")
            try:
                bob.ask()
                bob.ask()
            except AssertionError as error:
                raise AssertionError(f"bob did not get his own answer behind {shape}") from error
    return answered


@pytest.mark.parametrize(("hidden", "late"), [(HIDDEN, False), (SWALLOWING, True)], ids=["whole", "swallowing, late"])
def test_the_table(service, ports, hidden, late):
    """Every shape."""
    with ThreadPoolExecutor(LANES) as pool:
        each = partial(table, service, hidden=hidden, late=late)
        answered = sum(pool.map(each, ports, [SHAPES[lane::LANES] for lane in range(LANES)]))
    assert answered > len(SHAPES) / 2


@pytest.fixture
def slow_job(service):
    """A job of alice's that others are before for as long as a test needs it. Later tests' products may have to wait
    for one of them, so none is long.
    """
    with Client(service.url, api_key=service.keys["alice"]) as client:
        operand = client.put(np.ones((2500, 2500)))
        jobs = [client.submit("gemm_reduce", operand, operand, reduce="absmax") for _ in range(20)]
        yield jobs[-1].id
        for job in jobs:
            job.cancel()
        operand.delete()


def test_requests_that_wait(service, ports, slow_job):
    """The body arrives while the app is at the request: read as a request of its own, it would be answered behind it,
    to whom the proxy gives the connection next."""
    wait = f"GET /v1/jobs/{slow_job}?wait=%s HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Request-Id: hidden\r\n".encode()
    key = f"Authorization: Bearer {service.keys['alice']}\r\n".encode()
    hidden = wait % b"0.5" + key + b"\r\n"
    shapes = [
        shape
        for shape in SHAPES
        if shape.outcome == "taken" and HIDDEN in shape.data and shape.data.startswith(b"POST /v1/jobs ")
    ]

    def attacks(port, shapes):
        with contextlib.closing(Owner(port, service, "bob")) as bob:
            bob.ask()
            for shape in shapes:
                data = shape.data.replace(HIDDEN, hidden).replace(b"%x\r\n" % len(HIDDEN), b"%x\r\n" % len(hidden))
                data = data.replace(b"th: %d" % len(HIDDEN), b"th: %d" % len(hidden))
                data = data.replace(b"POST /v1/jobs", b"GET /v1/jobs/%b?wait=0.1" % slow_job.encode(), 1)
                data = data.replace(b"Content-Type: application/json\r\n", key, 1)
                attack(port, data, late=True)
                try:
                    bob.ask()
                except AssertionError as error:
                    raise AssertionError(f"bob did not get his own answer behind {shape}") from error

    with ThreadPoolExecutor(LANES) as pool:
        list(pool.map(attacks, ports, [shapes[lane::LANES] for lane in range(LANES)]))


def form(a: np.ndarray, b: np.ndarray) -> tuple[bytes, str]:
    """A product's body and its type."""
    body = b""
    for name, array in (("a", a), ("b", b)):
        file = io.BytesIO()
        np.save(file, array)
        body += b'--XbX\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), file.getvalue())
    return body + b"--XbX--\r\n", "multipart/form-data; boundary=XbX"


def test_curl_with_http2(service, port, tmp_path, rng):
    """`--http2` asks for an Upgrade to h2c, which is ignored; prior knowledge is refused in words."""
    curl = shutil.which("curl")
    if curl is None or " HTTP2 " not in subprocess.run([curl, "-V"], capture_output=True, text=True, check=True).stdout:
        pytest.skip("curl is not installed, or knows no HTTP/2")
    a, b = rng.standard_normal((2, 40, 40))
    np.save(tmp_path / "a.npy", a)
    np.save(tmp_path / "b.npy", b)
    key = f"Authorization: Bearer {service.keys['alice']}"
    files = ["-F", f"a=@{tmp_path}/a.npy", "-F", f"b=@{tmp_path}/b.npy"]
    url = f"http://127.0.0.1:{port}/v1/gemm"
    command = [curl, "-q", "--fail", "-sS", "--http2", "-H", key, *files, url]
    done = subprocess.run([*command, "-o", tmp_path / "d.npy", "-w", "%{http_code} %{http_version}"],
                          capture_output=True, text=True, timeout=120, check=True)  # fmt: skip
    assert done.stdout == "200 1.1"
    np.testing.assert_allclose(np.load(tmp_path / "d.npy"), a @ b)
    if port == service.port:
        words = [curl, "-q", "-sS", "--max-time", "60", "--http2-prior-knowledge", url]
        refused = subprocess.run(words, capture_output=True, check=False)
        assert refused.returncode != 0
        assert b"/problems/http-version" in attack(port, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")


def java_s(path: str, key: str, content: bytes, kind: str) -> tuple[bytes, bytes]:
    """Head and body of a request as java.net.http.HttpClient (17) sends them by default, in two segments."""
    head = (
        f"POST {path} HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: {len(content)}\r\n"
        "Host: 127.0.0.1\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n"
        f"User-Agent: Java-http-client/17.0.15\r\nAuthorization: Bearer {key}\r\nContent-Type: {kind}\r\n\r\n"
    )
    return head.encode(), content


def test_java_s_bytes(service, port, rng):
    a, b = rng.standard_normal((2, 40, 40))
    content, kind = form(a, b)
    alice = Owner(port, service, "alice")
    with contextlib.closing(Raw(alice)) as connection:
        for _ in range(3):
            for piece in java_s("/v1/gemm", service.keys["alice"], content, kind):
                connection.socket.sendall(piece)
            answer = connection.answer()
            assert answer is not None
            assert answer[0] == 200
            np.testing.assert_allclose(np.load(io.BytesIO(answer[2])), a @ b)


@pytest.fixture(scope="module")
def java(tmp_path_factory):
    """Words that run the program."""
    java, javac = shutil.which("java"), shutil.which("javac")
    if java is None or javac is None:
        pytest.skip("there is no JDK")
    folder = tmp_path_factory.mktemp("java")
    (folder / "Post.java").write_text(JAVA)
    subprocess.run([javac, "-d", folder, folder / "Post.java"], check=True, timeout=300)
    return [java, "-cp", folder, "Post"]


def test_java(service, port, java, tmp_path, rng):
    content, kind = form(*rng.standard_normal((2, 40, 40)))
    (tmp_path / "body").write_bytes(content)
    url, key = f"http://127.0.0.1:{port}/v1/gemm", f"Bearer {service.keys['alice']}"
    arguments = [*java, url, kind, key, tmp_path / "body"]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=300)
    assert done.stdout.splitlines() == [f"200 HTTP_1_1 {128 + 40 * 40 * 8}"] * 3
