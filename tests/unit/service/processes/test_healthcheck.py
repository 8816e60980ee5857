"""What an engine's health check finds, and how soon it gives up."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import pytest

from gemmserve_service.processes.healthcheck import address, main, status


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ("127.0.0.1", 8000, False)),
        ({"GEMMSERVE_HOST": "0.0.0.0", "GEMMSERVE_PORT": "9000"}, ("127.0.0.1", 9000, False)),
        ({"GEMMSERVE_HOST": "10.0.0.5"}, ("10.0.0.5", 8000, False)),
        ({"GEMMSERVE_TLS_CERTIFICATE": "/x.pem"}, ("127.0.0.1", 8000, True)),
        ({"GEMMSERVE_TLS_CERTIFICATE": "none", "GEMMSERVE_METRICS_PORT": "none"}, ("127.0.0.1", 8000, False)),
        (
            {"GEMMSERVE_METRICS_PORT": "9464", "GEMMSERVE_METRICS_HOST": "::", "GEMMSERVE_TLS_CERTIFICATE": "/x.pem"},
            ("::1", 9464, False),
        ),
    ],
)
def test_it_asks_where_the_server_listens(environment, expected):
    assert address(environment) == expected


@pytest.fixture
def answering():
    """answering(bytes) -> the port of a listener that answers one connection with them, or keeps silent with None."""
    listeners, kept = [], []

    def listen(answer):
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def serve():
            connection, _ = listener.accept()
            kept.append(connection)
            connection.recv(4096)
            if answer is not None:
                connection.sendall(answer)
                connection.close()

        threading.Thread(target=serve, daemon=True).start()
        return listener.getsockname()[1]

    yield listen
    for each in (*kept, *listeners):
        each.close()


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", 0, "200"),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", 1, "503"),
        (b"SSH-2.0-OpenSSH\r\n", 1, "no HTTP answer"),
        (b"", 1, "no HTTP answer"),
    ],
)
def test_the_exit_status(answering, monkeypatch, capsys, answer, code, said):
    monkeypatch.setenv("GEMMSERVE_PORT", str(answering(answer)))
    monkeypatch.delenv("GEMMSERVE_METRICS_PORT", raising=False)
    monkeypatch.setitem(status.__kwdefaults__, "timeout_s", 60)
    assert main() == code
    assert said in capsys.readouterr().out


def test_nobody_there_and_somebody_silent(answering, monkeypatch):
    monkeypatch.delenv("GEMMSERVE_METRICS_PORT", raising=False)
    with socket.socket() as bound:  # which nobody else can take meanwhile, and where nobody listens
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("GEMMSERVE_PORT", str(bound.getsockname()[1]))
        assert main() == 1
    with pytest.raises(TimeoutError):
        status("127.0.0.1", answering(None), tls=False, timeout_s=0.2)


def test_it_is_light():
    """It runs every other second: neither the server nor NumPy is loaded for it."""
    script = (
        "import gemmserve_service.processes.healthcheck, sys; print(sorted({m.split('.')[0] for m in sys.modules}))"
    )
    loaded = subprocess.run(
        [sys.executable, "-I", "-c", script], capture_output=True, text=True, check=True, env=os.environ
    ).stdout
    for heavy in ("numpy", "pydantic", "fastapi", "ssl", "asyncio", "gemmserve_kernels"):
        assert f"'{heavy}'" not in loaded
