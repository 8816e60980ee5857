"""What belongs to one process."""

from __future__ import annotations

import os

import httpx
import pytest

import gemmserve
from gemmserve import Client, wire
from gemmserve._transport import connection


def test_a_transport_of_ones_own_stays_in_its_process(service) -> None:
    """It has connections that nobody else can make anew: a child is told so."""
    with Client(transport=httpx.MockTransport(service)) as client:
        client.health()
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            try:
                client.health()
            except gemmserve.TransportError as error:
                os.write(writing, str(error).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as said:
            assert "another process" in said.read()
        os.waitpid(child, 0)
        client.health()


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        ("http://gpu.example:8000", "http://gpu.example:8000/healthz"),
        ("https://gpu.example/below/", "https://gpu.example/below/healthz"),
        ("unix:/run/gemmserve", "http://localhost/healthz"),
    ],
)
def test_urls_are_those_that_httpx_makes_of_the_server_s_paths(server, expected) -> None:
    asked = []

    def answer(request):
        asked.append(str(request.url))
        exchange = request.headers[wire.EXCHANGE_HEADER]
        return httpx.Response(200, json={}, headers={wire.EXCHANGE_HEADER: exchange})

    with Client(server, transport=httpx.MockTransport(answer)) as client:
        client.health()
        client.health()
    assert asked == [expected] * 2


def test_what_is_known_of_paths_does_not_grow_without_an_end(service, monkeypatch) -> None:
    monkeypatch.setattr(connection, "_MAX_URLS", 3)
    with Client(transport=httpx.MockTransport(service)) as client, httpx.Client(base_url="http://gpu.example") as http:
        for number in range(10):
            assert str(client._io.url_of(http, f"/v1/{number}")) == f"http://gpu.example/v1/{number}"
            assert len(client._io._urls) <= 3
