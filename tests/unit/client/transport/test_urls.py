"""Addresses: with TLS or without it, and what is said where the server is of the other kind."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from typing import TYPE_CHECKING

import pytest
from certificates import make_certificate
from fake_service import FakeService, serving
from scripted_server import ScriptedServer, ok

import gemmserve
from gemmserve import AsyncClient, Client, RetryPolicy
from gemmserve._calls.requests import Pause
from gemmserve._transport import connection
from gemmserve._transport.library import httpx
from gemmserve._transport.urls import speaks_tls

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def accepting(serve) -> Iterator[int]:
    """A server that does `serve` with each connection; gives its port."""

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                made = listener.accept()[0]
                with made, contextlib.suppress(OSError):
                    serve(made)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(60)


@pytest.fixture
def tls_port(tmp_path) -> Iterator[int]:
    """Port of a server that ends connections which do not begin with a TLS handshake, as ours does."""
    certificate, key = make_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def serve(made: socket.socket) -> None:
        with context.wrap_socket(made, server_side=True) as connection:
            connection.recv(1)

    with accepting(serve) as port:
        yield port


def test_who_speaks_tls(tls_port) -> None:
    assert speaks_tls("127.0.0.1", tls_port, 10)
    with accepting(lambda made: made.sendall(b"\x15\x03\x03\x00\x02\x02\x28")) as port:
        assert speaks_tls("127.0.0.1", port, 10), "handshake_failure: an alert is TLS, too"
    with accepting(lambda made: made.sendall(ok(b"plain"))) as port:
        assert not speaks_tls("127.0.0.1", port, 10)
    with accepting(lambda made: made.shutdown(socket.SHUT_RDWR)) as port:
        assert not speaks_tls("127.0.0.1", port, 10)
    assert not speaks_tls("127.0.0.1", port, 10), "nobody listens"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not speaks_tls("127.0.0.1", silent.getsockname()[1], 0.05)


def never(_seconds: float) -> None:
    raise AssertionError("the error is final, and nothing is tried again")


def ask(url: str, kind: str, **options) -> None:
    """A first request, by a client of either kind."""

    async def awaited() -> None:
        async with AsyncClient(url, **options) as client:
            client._io._sleep = never
            await client.health()

    if kind == "async":
        asyncio.run(awaited())
        return
    with Client(url, **options) as client:
        client._io._sleep = never
        client.put([[1.0]]) if kind == "put" else client.health()


@pytest.mark.parametrize("kind", ["sync", "put", "async"])
def test_a_server_of_the_other_kind_is_told_at_once(tls_port, kind) -> None:
    with pytest.raises(gemmserve.TransportError) as caught:
        ask(f"http://127.0.0.1:{tls_port}", kind)
    assert str(caught.value) == f"http://127.0.0.1:{tls_port} speaks TLS: it is asked by https://127.0.0.1:{tls_port}"
    with serving(FakeService()) as url, pytest.raises(gemmserve.TransportError) as caught:
        ask(url.replace("http", "https"), kind)
    assert str(caught.value).endswith(f"a server without it is asked by {url}")


def test_a_server_of_the_other_kind_at_the_scheme_s_own_port(monkeypatch) -> None:
    monkeypatch.setattr(connection, "speaks_tls", lambda host, port, _limit_s: (host, port) == ("127.0.0.1", 80))
    with Client("http://127.0.0.1") as client:
        ask_tls = client._io.doubt(Pause(0, gemmserve.TransportError("broke"), 60))
        assert ask_tls is not None
        with pytest.raises(gemmserve.TransportError, match=r"speaks TLS: it is asked by https://127\.0\.0\.1:80$"):
            ask_tls()


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_the_question_about_tls_takes_no_more_than_is_left(monkeypatch, kind) -> None:
    """Limits of the probe: the time left for repeating, and the client's timeout, which bounds one silence."""
    limits: list[float] = []
    monkeypatch.setattr(connection, "speaks_tls", lambda _host, _port, limit_s: limits.append(limit_s))

    def asked(total_s: float, silence_s: float) -> list[float]:
        limits.clear()
        with pytest.raises((gemmserve.TransportError, AssertionError)):  # at the end, or at the pause
            ask("http://{}:{}".format(*server.address), kind, retry=RetryPolicy(total_s=total_s), timeout=silence_s)
        return limits[:]

    with ScriptedServer(lambda _body, _number: None) as server:
        assert asked(60, 10) == [connection.TLS_LIMIT_S]
        assert asked(60, 1.5) == [1.5]
        (left,) = asked(0.5, 10)
        assert 0.4 < left <= 0.5
        assert asked(0, 10) == []


@pytest.fixture
def proxied(monkeypatch):
    """Name a proxy for all schemes, and none else."""

    def name(url: str) -> None:
        for variable in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
            monkeypatch.delenv(variable, raising=False)
            monkeypatch.delenv(variable.upper(), raising=False)
        monkeypatch.setenv("all_proxy", url)

    return name


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_proxy_without_tls_is_no_server_without_it(proxied, kind) -> None:
    """A recommendation of http:// would have the key sent in clear text by whoever followed it."""
    with accepting(lambda made: made.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as port:
        proxied(f"https://user:secret@127.0.0.1:{port}")
        for url in ("https://gpu.invalid", "http://gpu.invalid"):
            with pytest.raises(
                gemmserve.TransportError, match=f"the proxy https://127.0.0.1:{port} .*not speak"
            ) as caught:
                ask(url, kind)
            assert "asked by" not in str(caught.value)
            assert "secret" not in str(caught.value)


def test_a_server_without_tls_behind_a_proxy(proxied) -> None:
    def tunnel(made: socket.socket) -> None:
        assert made.recv(1 << 16).startswith(b"CONNECT gpu.invalid:443 ")
        made.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
        made.recv(1 << 16)
        made.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with accepting(tunnel) as port:
        proxied(f"127.0.0.1:{port}")
        expected = f"^https://gpu.invalid does not speak TLS behind the proxy http://127.0.0.1:{port}: [^;]*$"
        with pytest.raises(gemmserve.TransportError, match=expected):
            ask("https://gpu.invalid", "sync")


def test_a_proxy_that_is_to_be_passed_by(proxied, monkeypatch) -> None:
    """The library decides that, so both may be meant."""
    proxied("https://proxy.invalid:1")
    monkeypatch.setenv("no_proxy", "gpu.example")
    with Client("https://gpu.example") as client:
        error = client._io.as_error(httpx.ConnectError("[SSL: WRONG_VERSION_NUMBER] wrong version number"))
    assert str(error).startswith("https://gpu.example does not speak TLS, or a proxy before it does not:")


def test_a_server_without_tls_that_breaks_is_asked_again() -> None:
    """The question about TLS is one more connection, which it breaks as well."""
    answers = iter([None])
    answer = ok(b'{"status": "ok"}', "Content-Type: application/json")
    with ScriptedServer(lambda _body, _number: next(answers, answer)) as server:
        url = "http://{}:{}".format(*server.address)
        with Client(url, retry=RetryPolicy(base_s=0)) as client, pytest.raises(gemmserve.ProtocolError):
            client.health()
        assert len(server._open) == 3
