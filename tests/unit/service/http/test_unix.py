"""HTTP on the Unix socket: who the client is, and that limits and proxies' rules are those of its user."""

from __future__ import annotations

import json
import os
import socket

import httpx
import pytest
from local_app import LocalApp


def connect(app):
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(app.path)), base_url="http://localhost", timeout=60)


@pytest.fixture
def serve(tmp_path_factory, tmp_path):
    apps = []

    def start(**settings):
        apps.append(LocalApp(tmp_path_factory.mktemp("s") / "g.sock", tmp_path / "data", **settings))
        return apps[-1].__enter__()

    yield start
    for app in apps:
        app.__exit__(None)


def test_the_audit_names_the_user(serve, tmp_path):
    log = tmp_path / "audit.jsonl"
    app = serve(audit_log=log, trusted_proxies="127.0.0.1,10.0.0.0/8")
    with connect(app) as http:
        # Nobody's X-Forwarded-For is believed here.
        refused = http.get("/v1/arrays", headers={"Host": "evil.example", "X-Forwarded-For": "10.1.2.3"})
    assert refused.status_code == 403
    app.until(lambda: log.exists() and log.read_text().endswith("\n"))  # it is written after the answer
    (line,) = [json.loads(text) for text in log.read_text().splitlines()]
    assert line["address"] == f"uid:{os.getuid()}"


def test_a_user_has_the_connections_of_an_address(serve):
    app = serve(max_connections_per_address=1, trusted_proxies="127.0.0.1")
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as other:
        for connection in (one, other):
            connection.settimeout(60)
            connection.connect(str(app.path))
            connection.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        while one.recv(1 << 16):  # the idle one made way
            pass
