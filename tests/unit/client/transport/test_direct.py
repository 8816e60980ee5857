"""Exchanges past the HTTP library: the same answers and the same errors as by it."""

from __future__ import annotations

import contextlib
import itertools
import socket
import ssl
import threading
import traceback

import h11
import httpx
import numpy as np
import pytest
from certificates import make_certificate
from fake_service import FakeService, serving
from scripted_server import ScriptedServer, ok

import gemmserve
from gemmserve import Client, RetryPolicy, wire
from gemmserve._transport import direct
from gemmserve._transport.auth import KeyAuth
from gemmserve._transport.library import httpx as library

KEY = "gs_Secret"
BODY = bytes(range(256)) * 700


def wire_to(address, *, path="", auth=None, headers=()) -> direct.Wire:
    host, port = address
    base = library.URL(f"http://{host}:{port}{path}")
    return direct.Wire(base, path=None, context=None, headers=dict(headers), auth=auth)


def asked(connection, *, method="GET", path="/x", query=(), headers=(), content=None, silence=60.0):
    """(Status, header fields, body) by a wire."""
    connection.ready(silence)
    answer = connection.exchange(
        method, path, dict(query), dict(headers), None if content is None else iter(content), silence=silence, wait=0.0
    )
    return answer.status_code, dict(answer.headers), b"".join(answer.pieces())


def by_the_library(address):
    host, port = address
    with library.Client(trust_env=False) as client, client.stream("GET", f"http://{host}:{port}/x") as response:
        return response.status_code, dict(response.headers), b"".join(response.iter_raw())


HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n4\r\nbody\r\n0\r\n\r\n"
ANSWERS = {
    "plain": ok(b"body", "X-Request-Id: 7", "Content-Type: application/json"),
    "empty": ok(b""),
    "large": ok(BODY),
    "no reason": b"HTTP/1.1 200 \r\nContent-Length: 4\r\n\r\nbody",
    "spaces": HEAD + b"content-LENGTH: \t4 \r\nA:b \t c\t\r\nEmpty:\r\n\r\nbody",
    "latin": HEAD + b"Content-Length: 4\r\nName: \xe9\r\n\r\nbody",
    "no content": b"HTTP/1.1 204 No Content\r\n\r\n",
    "not modified": b'HTTP/1.1 304 Not Modified\r\nETag: "x"\r\nContent-Length: 9\r\n\r\n',
    "error": b"HTTP/1.1 503 Busy\r\nRetry-After: 1\r\nContent-Length: 4\r\n\r\nbusy",
    "repeated field": HEAD + b"Content-Length: 4\r\nVia: a\r\nVia: b\r\n\r\nbody",
    "repeated length": HEAD + b"Content-Length: 4\r\nContent-Length: 4\r\n\r\nbody",
    "chunks": CHUNKED,
    "after early hints": b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + ok(b"body"),
    "after continue": b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED,
    "folded": HEAD + b"Content-Length: 4\r\nA: b\r\n c\r\n\r\nbody",
    "bare line feeds": b"HTTP/1.1 200 OK\nContent-Length: 4\n\nbody",
    "closing": HEAD + b"Connection: close\r\nContent-Length: 4\r\n\r\nbody",
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_what_the_library_makes_of_it(name) -> None:
    """In one piece, and in pieces of every length that divides a head elsewhere."""
    with ScriptedServer(lambda _body, _number: ANSWERS[name]) as server:
        expected = by_the_library(server.address)
        connection = wire_to(server.address)
        assert asked(connection) == expected
        assert asked(connection) == expected  # by the same connection, or another one
        connection.close()
    for size in (1, 3, 17) if len(ANSWERS[name]) < 1000 else (4001, 20_011):
        assert asked(pieces_of(ANSWERS[name], size)) == expected


def pieces_of(data: bytes, size: int) -> direct.Wire:
    """A wire by which `data` come in pieces of that size, whatever is sent."""

    class Pieces:
        def __init__(self) -> None:
            self._left = [data[low : low + size] for low in range(0, len(data), size)]

        def recv(self, most: int) -> bytes:
            return self._left.pop(0) if self._left else b""

        def send(self, piece) -> int:
            return len(piece)

        def settimeout(self, seconds) -> None: ...

        def close(self) -> None: ...

    connection = wire_to(("host", 1))
    connection.ready = lambda _silence: None  # type: ignore[method-assign]
    connection.socket = Pieces()  # type: ignore[assignment]
    return connection


BROKEN = {
    "nothing": b"",
    "half a head": HEAD + b"Content-Le",
    "half a body": ok(b"body")[:-2],
    "half a chunk": CHUNKED[:-8],
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "another protocol": b"HTTP/2 200\r\nContent-Length: 4\r\n\r\nbody",
    "two lengths": HEAD + b"Content-Length: 4\r\nContent-Length: 5\r\n\r\nbody",
    "no length": HEAD + b"Content-Length: -4\r\n\r\nbody",
    "a field without a name": HEAD + b": 4\r\nContent-Length: 4\r\n\r\nbody",
    "a space in a name": HEAD + b"Content-Length : 4\r\n\r\nbody",
    "a zero in a value": HEAD + b"Content-Length: 4\r\nA: b\0c\r\n\r\nbody",
    "a head without an end": HEAD + b"A: " + b"b" * (200 << 10),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_answer_is_refused_as_by_the_library(name) -> None:
    def answered(ask):
        listener = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                while b"\r\n\r\n" not in connection.recv(1 << 16):
                    pass
                with contextlib.suppress(OSError):  # whoever asked has seen enough
                    connection.sendall(BROKEN[name])
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(1 << 16):
                        pass

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with pytest.raises(library.HTTPError) as caught:
                ask(listener.getsockname()[:2])
        finally:
            thread.join(60)
            listener.close()
        return type(caught.value)

    def by_wire(address) -> None:
        connection = wire_to(address)
        try:
            asked(connection)
        finally:
            connection.leave()
            assert connection.is_closed

    assert answered(by_wire) is answered(by_the_library) is library.RemoteProtocolError


def test_more_than_the_answer() -> None:
    """Two answers to one request: the second would be taken for the next one's."""
    with pytest.raises(library.RemoteProtocolError, match="more"):
        asked(pieces_of(ok(b"body") + ok(b"other"), 1 << 16))


def test_a_request_as_a_server_s_parser_reads_it() -> None:
    ours, theirs = socket.socketpair()
    connection = wire_to(("gpu.example", 8000), path="/gpu", headers={"Accept": "application/json", "User-Agent": "g"})
    connection.socket = ours
    with ours, theirs:
        theirs.sendall(ok(b"", "Connection: close"))
        content = [b"begin", memoryview(BODY), b"end"]
        headers = {"Accept": "x/y", "Content-Length": str(len(BODY) + 8)}
        connection.ready = lambda _silence: None  # type: ignore[method-assign]
        thread = threading.Thread(
            target=lambda: asked(
                connection, method="POST", path="/v1/a_b", query={"wait": 1.5, "label": ["a=b c", "é"]},
                headers=headers, content=content,
            )
        )  # fmt: skip
        thread.start()
        parser = h11.Connection(h11.SERVER)
        events = []
        while not events or not isinstance(events[-1], h11.EndOfMessage):
            event = parser.next_event()
            if event is h11.NEED_DATA:
                parser.receive_data(theirs.recv(1 << 16))
            else:
                events.append(event)
        thread.join(60)
    request = events[0]
    assert (request.method, request.target) == (b"POST", b"/gpu/v1/a_b?wait=1.5&label=a%3Db+c&label=%C3%A9")
    fields = dict(request.headers)
    assert (fields[b"host"], fields[b"accept"], fields[b"user-agent"]) == (b"gpu.example:8000", b"x/y", b"g")
    assert b"".join(bytes(event.data) for event in events[1:-1]) == b"begin" + BODY + b"end"


@pytest.mark.parametrize("value", ["a\r\nOther: b", "a\nb", "a\rb", "a\0b", "é"])
def test_a_field_is_one_field(value) -> None:
    connection = pieces_of(ok(b""), 1 << 16)
    with pytest.raises(library.LocalProtocolError, match="character"):
        asked(connection, headers={"Name": value})


def test_connections_serve_again_until_the_server_closes_them() -> None:
    for answers, connections in (
        ([ok(b"1"), ok(b"2"), ok(b"3")], 1),
        ([ok(b"1", "Connection: close"), ok(b"2"), ok(b"3")], 2),
        ([CHUNKED, ok(b"2"), CHUNKED], 1),
    ):
        with ScriptedServer(lambda _body, number, answers=answers: answers[number]) as server:
            connection = wire_to(server.address)
            for _ in answers:
                assert asked(connection)[0] == 200
            assert len(server._open) == connections
            server._open[-1].shutdown(socket.SHUT_RDWR)  # while nobody uses it
            assert connection._readable(connection.socket) or connection._poll.poll(60_000)
            answers.append(ok(b"4"))
            assert asked(connection)[2] == b"4"
            assert len(server._open) == connections + 1
            connection.close()


@pytest.fixture
def pair_of_contexts(tmp_path):
    """(Server's, client's) TLS contexts, by a certificate of their own."""
    certificate, key = make_certificate(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificate, key)
    return server, ssl.create_default_context(cafile=certificate)


def test_what_nobody_asked_for_is_seen_within_tls(pair_of_contexts) -> None:
    """It came by the answer's last record, so the socket itself has nothing more to read."""
    theirs, ours = pair_of_contexts
    head, body = ok(b"first")[:-5], b"first"
    writes = [[head, body + ok(b"stray")], [ok(b"second")]]  # a record each

    def serve() -> None:
        for records in writes:
            with theirs.wrap_socket(listener.accept()[0], server_side=True) as connection:
                held.append(connection)
                received = b""
                while b"\r\n\r\n" not in received:
                    received += connection.recv(1 << 16)
                for record in records:
                    connection.sendall(record)
                with contextlib.suppress(OSError):
                    connection.recv(1)  # until the client has closed it

    held: list[ssl.SSLSocket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        base = library.URL(f"https://127.0.0.1:{listener.getsockname()[1]}")
        connection = direct.Wire(base, path=None, context=ours, headers={}, auth=None)
        assert asked(connection)[2] == b"first"
        assert connection.socket.pending() == len(ok(b"stray"))
        assert not connection._poll.poll(0)
        assert asked(connection)[2] == b"second"
        connection.close()
        thread.join(60)
    assert len(held) == 2


def test_what_was_not_read_is_nobody_s_answer() -> None:
    with ScriptedServer(lambda _body, _number: ok(BODY)) as server:
        connection = wire_to(server.address)
        connection.ready(60.0)
        answer = connection.exchange("GET", "/x", {}, {}, None, silence=60.0, wait=0.0)
        next(answer.pieces())
        connection.leave()
        assert connection.is_closed
        assert asked(connection)[2] == BODY


def test_an_answer_that_comes_before_the_body_is_sent() -> None:
    """As a server's that refuses a body for its length, and closes."""
    ours, theirs = socket.socketpair()
    connection = wire_to(("host", 1))
    connection.ready = lambda _silence: None  # type: ignore[method-assign]
    connection.socket = ours
    theirs.sendall(b"HTTP/1.1 413 Too Large\r\nContent-Length: 4\r\n\r\nbody")
    theirs.close()
    assert asked(connection, method="POST", content=[BODY] * 100)[0] == 413
    assert connection.is_closed


def test_silence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = wire_to(listener.getsockname()[:2])
        with pytest.raises(library.ReadTimeout):
            asked(connection, silence=0.05)
        connection.close()
        with pytest.raises(library.WriteTimeout):
            asked(connection, method="POST", content=itertools.repeat(memoryview(BODY)), silence=0.05)
        connection.close()
    with pytest.raises(library.ConnectError):
        asked(connection)


@pytest.mark.parametrize("answer", [None, b"nonsense\r\n\r\n", b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nb"])
def test_the_key_is_sent_and_in_no_traceback(answer) -> None:
    """Return a traceback that shows the frames' variables, as many tools do, and those of the causes."""
    service = FakeService()
    with serving(service) as url, Client(url, api_key=KEY) as client:
        client.health()
        assert service.requests[0].headers["authorization"] == f"Bearer {KEY}"
    with ScriptedServer(lambda _body, _number: None if answer is None else answer) as server:
        url = "http://{}:{}".format(*server.address)
        with Client(url, api_key=KEY, retry=RetryPolicy(attempts=1), timeout=0.2) as client:
            with pytest.raises(gemmserve.TransportError) as caught:
                client.put(np.eye(4))
            shown = traceback.TracebackException.from_exception(caught.value, capture_locals=True).format()
    assert "Secret" not in "".join(shown)
    stuck = wire_to(("host", 1), auth=KeyAuth(KEY, "http://host:1"))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stuck.ready = lambda _silence: None  # type: ignore[method-assign]
        stuck.socket = ours
        for headers in ({}, {"Name": "a\nb"}):
            with pytest.raises(library.HTTPError) as stopped:
                asked(stuck, method="POST", headers=headers, content=itertools.repeat(BODY), silence=0.05)
            shown = traceback.TracebackException.from_exception(stopped.value, capture_locals=True).format()
            assert "Secret" not in "".join(shown)


@pytest.mark.parametrize(
    ("variable", "url", "past"),
    [
        (None, "http://gpu.example", True),
        ("HTTP_PROXY", "http://gpu.example", False),
        ("https_proxy", "https://gpu.example", False),
        ("ALL_PROXY", "http://gpu.example:99", False),
        ("HTTP_PROXY", "http://127.0.0.1:99", True),
        (None, "http://user:word@gpu.example", False),
        ("HTTP_PROXY", "unix:/run/g.sock", True),
    ],
)
def test_proxies_are_the_library_s_affair(monkeypatch, variable, url, past) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "http://proxy.invalid:1")
    with Client(url) as client, client._io.pool().connection() as found:
        assert isinstance(found, direct.Wire if past else library.Client)


def test_by_a_proxy(monkeypatch) -> None:
    """Which is asked, though nobody is behind it."""
    asked_for = []
    with ScriptedServer(lambda body, _number: asked_for.append(body) or ok(b"{}")) as proxy:
        monkeypatch.setenv("http_proxy", "http://{}:{}".format(*proxy.address))
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
        with Client("http://gpu.invalid:99") as client, pytest.raises(gemmserve.ProtocolError, match="another one"):
            client.health()
    assert asked_for == [b""]


def test_cookies_are_the_library_s_affair() -> None:
    """One that a balancer of loads sets is sent back."""
    cookies = []

    def answer(request: httpx.Request) -> httpx.Response:
        cookies.append(request.headers.get("cookie"))
        name = {wire.EXCHANGE_HEADER: request.headers[wire.EXCHANGE_HEADER]}
        return httpx.Response(200, json={}, headers={"Set-Cookie": "node=7", **name})

    with serving(answer) as url, Client(url) as client:
        for _ in range(3):
            client.health()
    assert cookies == [None, None, "node=7"]


def test_large_answers_are_read_to_where_they_belong(monkeypatch) -> None:
    """Whole, and to no other place than what the receiver says."""
    monkeypatch.setattr(direct, "MAX_AT_ONCE", 70_001)
    array = np.random.default_rng(3).standard_normal((300, 300))
    placed = []
    received = direct._received
    monkeypatch.setattr(direct, "_received", lambda source, place: placed.append(received(source, place)) or placed[-1])
    service = FakeService()
    with serving(service) as url:
        for transport in (None, library.HTTPTransport()):
            with Client(url, transport=transport) as client:
                np.testing.assert_array_equal(client.put(array).numpy(), array)
    assert sum(placed) > array.nbytes // 2
