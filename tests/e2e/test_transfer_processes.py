"""The real server with transfer processes: large arrays of the SDK, and what a kill of process or front leaves."""

from __future__ import annotations

import signal
import socket
import tempfile
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest
from live_server import LiveServer, until
from standing import stand_still

from gemmserve import Client, RetryPolicy
from gemmserve._calls import arrays as array_flows
from gemmserve._transfer import parts

A = np.random.default_rng(3).standard_normal((1 << 10, 1 << 11)).astype("c8")  # 16 MiB
OCTETS = {"Content-Type": "application/octet-stream"}


@pytest.fixture(scope="module")
def folder():
    """Its path is short enough for a socket's."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.fixture(scope="module")
def server(folder):
    with LiveServer("--transfer-processes", "2", "--uds", str(folder / "s"), data_dir=folder / "data") as live:
        yield live


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Parts of 4 MiB, four of them."""
    monkeypatch.setattr(array_flows, "PARTS_FROM", 1 << 20)
    monkeypatch.setattr(array_flows, "PART", 4 << 20)
    monkeypatch.setattr(parts, "PART", 4 << 20)


def metric(server, name):
    with server.http() as http:
        lines = http.get("/metrics").text.splitlines()
    return sum(float(line.split()[1]) for line in lines if line.startswith(name))


def transfers(server):
    return server.processes("gemmserve_service.http.transfer")


def all_there(server, count=2):
    until(lambda: metric(server, "gemmserve_transfer_processes ") == count)


@pytest.fixture
def company(server):
    """Another connection, in the middle of a request: one that is alone is served by the front itself."""
    where = httpx.URL(server.url)
    head = (
        f"POST /v1/arrays?dtype=complex64&shape=4 HTTP/1.1\r\nHost: {where.netloc.decode()}\r\n"
        f"Content-Type: {OCTETS['Content-Type']}\r\nContent-Length: 32\r\nExpect: 100-continue\r\n\r\n"
    )
    with socket.create_connection((where.host, where.port), timeout=120) as other:
        other.sendall(head.encode())
        assert other.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
        yield


@pytest.mark.parametrize("connections", [0, 1, 3])
@pytest.mark.usefixtures("company")
def test_there_and_back(server, connections):
    all_there(server)
    with Client(server.url, connections=connections, progress=False) as client:
        remote = client.put(A, digest=True)
        assert np.array_equal(remote.numpy(), A)
        remote.delete()
    assert metric(server, 'gemmserve_transfer_bytes_total{direction="in"}')
    assert metric(server, 'gemmserve_transfer_bytes_total{direction="out"}')
    until(lambda: metric(server, "gemmserve_transfers_running") == 0)


def test_over_the_unix_socket(server, folder):
    all_there(server)
    before = metric(server, "gemmserve_transfer_bytes_total")
    transport = httpx.HTTPTransport(uds=str(folder / "s"))
    with httpx.Client(transport=transport, base_url="http://localhost", timeout=120) as http:
        query = {"dtype": "complex64", "shape": "1024,2048"}
        array_id = http.post("/v1/arrays", params=query, headers=OCTETS, content=A.tobytes()).json()["id"]
        bare = {"Accept": OCTETS["Content-Type"]}
        found = http.get(f"/v1/arrays/{array_id}/data", headers=bare).content
        assert np.array_equal(np.frombuffer(found, "c8").reshape(A.shape), A)
        http.delete(f"/v1/arrays/{array_id}")
    assert metric(server, "gemmserve_transfer_bytes_total") > before


def test_transfer_processes_are_killed_while_arrays_come_and_go(server):
    all_there(server)
    before = metric(server, "gemmserve_transfer_process_restarts_total")
    patient = RetryPolicy(attempts=20, base_s=0.01, cap_s=0.1)
    with Client(server.url, connections=2, progress=False, retry=patient) as client:
        for round_ in range(4):
            for process in transfers(server)[: 1 + round_ % 2]:
                process.kill()
            remote = client.put(A)
            assert np.array_equal(remote.numpy(), A)
            remote.delete()
    until(lambda: metric(server, "gemmserve_transfer_process_restarts_total") > before)
    all_there(server)


def test_the_front_is_killed_while_a_transfer_process_stands_still(tmp_path):
    """What it was told before must not reach the part that comes again, with other bytes."""
    with LiveServer("--transfer-processes", "1", data_dir=tmp_path / "data") as server, server.http() as http:
        all_there(server, 1)
        (transfer,) = transfers(server)
        query = {"dtype": "complex64", "shape": "1024,2048"}
        url = http.post("/v1/uploads", params=query, headers=OCTETS).headers["location"]
        stand_still(transfer.pid)
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            head = (
                f"PUT {url}/parts/0 HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/octet-stream\r\n"
                f"Content-Length: {A.nbytes}\r\n\r\n"
            )
            connection.sendall(head.encode())
            until(lambda: metric(server, "gemmserve_transfers_running") == 1)
            connection.sendall(b"\xff" * (1 << 16))
            server.front().kill()
            until(lambda: not psutil.pid_exists(transfer.pid))
        server.wait_ready()
        with server.http() as again:
            assert again.put(f"{url}/parts/0", content=A.tobytes(), headers=OCTETS).status_code == 204
            array_id = again.post(f"{url}/complete").json()["id"]
        with Client(server.url, progress=False) as client:
            assert np.array_equal(client.get(array_id), A)
        all_there(server, 1)


def test_kill_9_of_the_supervisor_leaves_no_transfer_process(tmp_path):
    server = LiveServer("--transfer-processes", "2", data_dir=tmp_path / "data")
    with server:
        all_there(server)
        server.terminate(signal.SIGKILL)  # asserts that no process is left
