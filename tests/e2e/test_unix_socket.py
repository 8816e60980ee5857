"""`gemmserve serve --uds`: the socket, the clients on it, and what killed processes leave behind."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading

import httpx
import numpy as np
import psutil
import pytest
from gates import Gate
from live_server import LiveServer, until

from gemmserve import Client, RetryPolicy
from gemmserve._local import memory
from gemmserve._local.memory import find
from gemmserve._local.session import Session
from gemmserve._transfer.bodies import MultipartBody
from gemmserve.wire import RESULT_HEADER, SESSION_HEADER


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("u") / "g.sock"


@pytest.fixture(scope="module")
def gate(tmp_path_factory):
    return Gate(tmp_path_factory.mktemp("gate") / "gate")


@pytest.fixture(scope="module")
def server(tmp_path_factory, path, gate):
    data_dir = tmp_path_factory.mktemp("data")
    with LiveServer("--uds", str(path), data_dir=data_dir, environment=gate.environment) as live:
        yield live
    assert not list(path.parent.iterdir()), "the sockets are removed at the end"


@pytest.fixture
def client(server, path):
    with Client(f"unix:{path}") as connected:
        yield connected


@pytest.fixture
def operands(random_complex):
    return random_complex(300, 300), random_complex(300, 300)


def test_the_sockets(server, path) -> None:
    assert f"socket: unix:{path}" in server.text
    for each in path.parent.iterdir():
        assert stat.S_ISSOCK(each.lstat().st_mode)
        assert stat.S_IMODE(each.lstat().st_mode) == 0o600
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost") as http:
        assert http.get("/readyz").status_code == 200
        # The same rule as on the port: names of this machine alone, while there are no keys.
        assert http.get("/readyz", headers={"Host": "evil.example"}).status_code == 403


def test_products_through_every_process(client, operands) -> None:
    a, b = operands
    d = client.gemm(a, b)
    np.testing.assert_allclose(d, a @ b, rtol=1e-3, atol=1e-3)
    frozen = client.freeze(a)
    np.testing.assert_array_equal(client.gemm(frozen, b), d)
    np.testing.assert_array_equal(client.gemm(client.put(frozen), b).numpy(), d)
    if memory.supported():
        assert find(d) is not None


def test_the_command_line(server, path, tmp_path, operands) -> None:
    a, b = operands
    np.save(tmp_path / "a.npy", a)
    np.save(tmp_path / "b.npy", b)
    command = [sys.executable, "-m", "gemmserve.cli", "gemm", "a.npy", "b.npy", "-o", "d.npy"]
    environment = {**os.environ, "GEMMSERVE_SERVER": f"unix:{path}"}
    subprocess.run(command, cwd=tmp_path, env=environment, check=True, capture_output=True, timeout=120)
    np.testing.assert_allclose(np.load(tmp_path / "d.npy"), a @ b, rtol=1e-3, atol=1e-3)


def test_the_front_is_killed(server, path, operands) -> None:
    a, b = operands
    with Client(f"unix:{path}", retry=RetryPolicy(attempts=10_000, total_s=120)) as client:
        x = client.freeze(a)
        wanted = client.gemm(x, b)
        kept = client.put(a)
        server.front().send_signal(signal.SIGKILL)
        np.testing.assert_array_equal(client.gemm(x, b), wanted)
        np.testing.assert_array_equal(kept.numpy(), a)
    server.wait_ready()


def test_a_client_is_killed_with_memory_passed_and_jobs_under_way(server, path, gate) -> None:
    before = server.front().num_fds()
    code = (
        "import sys, threading, numpy as np\n"
        "from gemmserve import Client\n"
        "client = Client(sys.argv[1]); a = client.freeze(np.ones((1024, 1024), np.complex128))\n"
        "for _ in range(4): threading.Thread(target=lambda: client.gemm(a, a), daemon=True).start()\n"
        "threading.Event().wait()\n"
    )
    gate.shut(after=1)
    with subprocess.Popen([sys.executable, "-c", code, f"unix:{path}"]) as child:
        gate.wait_reached()  # a worker is in the middle of the first product
        child.kill()
    with Client(f"unix:{path}") as client:
        until(lambda: client.usage()["scratch_bytes"] == 0)  # nobody wants the others, nor the end of that one
        gate.open()
        until(lambda: server.front().num_fds() <= before + 8)  # some of them for memory that is kept for the next
        big = np.ones((300, 300))
        np.testing.assert_array_equal(client.gemm(big, big), big @ big)
    assert server.workers()


def test_memory_that_is_cut_short_while_it_is_read_kills_nobody(server, path) -> None:
    """SIGBUS is what a process would die of that had mapped it."""
    before = {each.pid for each in server.processes()}
    a = np.ones((1024, 1024), np.complex64)
    fd = os.memfd_create("cut", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stop = threading.Event()

    def cut() -> None:
        while not stop.is_set():
            os.ftruncate(fd, 0)
            os.ftruncate(fd, a.nbytes)

    thread = threading.Thread(target=cut)
    session = Session(f"{path}.fds", None)
    statuses = set()
    transport = httpx.HTTPTransport(uds=str(path))
    thread.start()
    try:
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=120) as http:
            for _ in range(60):
                body = MultipartBody({}, {"a": a, "b": np.ones((1024, 1), np.complex64)}, {"a": session.send(fd)})
                headers = {"Content-Type": body.content_type, "Content-Length": str(body.nbytes)}
                headers[SESSION_HEADER] = session.secret
                headers[RESULT_HEADER] = str(session.send(fd))
                statuses.add(http.post("/v1/gemm", content=body.pieces(), headers=headers).status_code)
    finally:
        stop.set()
        thread.join()
        session.close()
        os.close(fd)
    assert statuses <= {200, 422}
    with Client(f"unix:{path}") as client:
        ones = np.ones((300, 300))
        np.testing.assert_array_equal(client.gemm(ones, ones), ones @ ones)
    assert {each.pid for each in server.processes()} == before


def test_two_servers_do_not_share_a_socket(server, path, tmp_path) -> None:
    command = [sys.executable, "-m", "gemmserve.cli", "serve", "--port", "0", "--data-dir", str(tmp_path), "--uds"]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert f"another server listens on {path}" in done.stderr
    done = subprocess.run([*command, "/tmp/" + "x" * 120], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "too long for a Unix socket" in done.stderr
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))


def test_what_a_killed_server_left_is_replaced(tmp_path_factory, tmp_path) -> None:
    path = tmp_path_factory.mktemp("u") / "g.sock"
    first = LiveServer("--uds", str(path), data_dir=tmp_path).__enter__()
    processes = first.processes()
    first.process.kill()
    psutil.wait_procs(processes, timeout=120)
    first.stop()
    assert path.exists()
    with LiveServer("--uds", str(path), data_dir=tmp_path), Client(f"unix:{path}") as client:
        ones = np.ones((300, 300))
        np.testing.assert_array_equal(client.gemm(ones, ones), ones @ ones)
    assert not path.exists()
