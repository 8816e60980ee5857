"""Workers that join over TCP: results of attempts that are over are refused, whoever was stopped or cut off."""

from __future__ import annotations

import signal
import ssl
from typing import TYPE_CHECKING

import httpx
import networks
import numpy as np
import pytest
from certificates import make_certificate
from chaos.joined import worker_token
from gates import Gate
from join_peer import JoinPeer
from live_server import LiveServer, until
from stalling_proxy import StallingProxy
from standing import stand_still

from gemmserve import Client

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

N = 300
BY_EXCHANGE = "--result-inline", "0"
"""Options of an agent that sends no result by the link itself."""
SHORT = {"GEMMSERVE_HEARTBEAT_TIMEOUT_S": "2", "GEMMSERVE_MAX_ATTEMPTS": "50"}
"""Settings of a server that takes silence for death soon, and gives up no job for it."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with LiveServer(data_dir=tmp_path_factory.mktemp("data"), joins=["node"]) as live:
        yield live


@pytest.fixture
def alone(server: LiveServer) -> Iterator[LiveServer]:
    """The server while its only node has left; it is back afterwards."""
    (agent,) = server.joined.agents
    assert agent.end() == 0
    yield server
    agent.start()
    server.wait_ready()


def whole_numbers(seed: int) -> np.ndarray:
    """Their products are exact in float32, whoever computes them."""
    return np.random.default_rng(seed).integers(-8, 9, (N, N)).astype(np.float32)


X, Y = whole_numbers(1), whole_numbers(2)


def test_a_joined_worker_computes_and_is_shown_with_its_node(server: LiveServer) -> None:
    with Client(server.url) as client:
        assert np.array_equal(client.gemm(X, Y), X @ Y)
        assert np.array_equal((client.put(X) @ client.put(Y)).numpy(), X @ Y)
    with server.http() as http:
        (device,) = http.get("/v1/devices").json()["devices"]
    assert device["id"] == "node/cpu"


def test_a_result_of_an_attempt_that_is_over_is_refused(alone: LiveServer, client_of) -> None:
    """A worker has a task; another comes in its name, computes it; then the first one uploads."""
    client = client_of(alone)
    a, b = client.put(X), client.put(Y)
    with JoinPeer(alone.joined.port) as first:
        first.hello()
        job = client.submit("gemm", a, b)
        work = first.task()
        with JoinPeer(alone.joined.port) as second:  # by the same name: the newer one is it
            assert first.ended.wait(60)
            second.hello()
            again = second.task()
            assert (again.task, again.attempt) == (work.task, work.attempt + 1)
            assert second.put(again, "d", (X @ Y).tobytes()) == 204
            wrong = np.full_like(X, np.nan).tobytes()
            assert first.put(work, "d", wrong) == 409
            assert first.put(work, "d", wrong, attempt=again.attempt) == 409
            assert second.put(again, "d", wrong, attempt=work.attempt) == 409
            second.done(again)
            job.wait()
            assert second.put(again, "d", wrong) == 409  # nobody writes to what is a result
        assert np.array_equal(job.result().numpy(), X @ Y)


def test_an_upload_that_comes_late_is_refused(tmp_path) -> None:
    """The link of a node is cut as it begins to upload, and it stands still itself; its task goes to another; then it
    goes on, and what was on its way arrives.
    """
    with LiveServer(data_dir=tmp_path, joins=["first"], environment=SHORT) as server, Client(server.url) as client:
        a, b = client.put(X), client.put(Y)
        assert np.array_equal((a @ b).numpy(), X @ Y)
        (first,) = server.joined.agents
        assert first.end() == 0
        with StallingProxy(server.joined.port) as proxy:
            late = server.joined.add("cpu", "late", url=proxy.url, arguments=BY_EXCHANGE)
            # Of a connection with nothing but a head, or less, the server would wait for the rest for seconds only.
            proxy.stall_at(b"PUT /internal/results/", after=(X @ Y).nbytes // 2)
            late.start()
            job = client.submit("gemm", a, b, alpha=3)
            assert proxy.stalled.wait(120), server.text
            held = [stand_still(each.pid) for each in (*agents_of(server), *server.workers())]
            first.start()
            job.wait()
            assert proxy.statuses("/internal/results/") == []
            proxy.mend()
            until(lambda: 409 in proxy.statuses("/internal/results/"), 120)
            for each in held:
                each.resume()
            assert np.array_equal(job.result().numpy(), 3 * (X @ Y))
            # It finds its link closed, comes again, and works as before.
            assert first.end() == 0
            assert np.array_equal((a @ b).numpy(), X @ Y)
            assert set(proxy.statuses("/internal/results/")) <= {204, 409}


def test_a_node_that_stood_still_gives_up_by_itself(tmp_path) -> None:
    """Its worker has an answer for it when it goes on, and it uploads nothing of that: it looks at the clock first."""
    gate = Gate(tmp_path / "gate")
    settings = {**SHORT, **gate.environment}
    with LiveServer(data_dir=tmp_path, joins=["first"], environment=settings) as server, Client(server.url) as client:
        a, b = client.put(X), client.put(Y)
        (first,) = server.joined.agents
        assert first.end() == 0
        with StallingProxy(server.joined.port) as proxy:
            stopped = server.joined.add("cpu", "stopped", url=proxy.url, arguments=BY_EXCHANGE)
            stopped.start()
            gate.shut()
            job = client.submit("gemm", a, b)
            gate.wait_reached()
            held = [stand_still(each.pid) for each in agents_of(server)]
            first.start()
            gate.open()
            job.wait()
            for each in held:
                each.resume()
            assert np.array_equal(job.result().numpy(), X @ Y)
            assert first.end() == 0
            assert np.array_equal((b @ a).numpy(), Y @ X)
            assert proxy.statuses("/internal/results/") == [204]


@pytest.fixture
def client_of():
    """client_of(server): a client that is closed afterwards."""
    clients = []

    def make(server: LiveServer) -> Client:
        clients.append(Client(server.url))
        return clients[-1]

    yield make
    for each in clients:
        each.close()


def agents_of(server: LiveServer):
    """The processes of nodes that run now, but their workers."""
    return [
        each
        for each in server.processes()
        if "--join" in each.cmdline() or "gemmserve_service.executor.agent" in each.cmdline()
    ]


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_node_on_another_host_comes_back_after_its_link_was_cut(tmp_path, tls: bool) -> None:
    """Beyond loopback it needs a token, and TLS, or the word that this network may do without."""
    if (reason := networks.missing()) is not None:
        pytest.skip(reason)
    user, token = worker_token(tmp_path, "read,submit"), worker_token(tmp_path, "worker")
    with networks.Network(bits_per_s=1e9) as node:
        settings = {**SHORT, **(certificate(tmp_path, node.here) if tls else {"GEMMSERVE_JOIN_INSECURE": "1"})}
        server = LiveServer(data_dir=tmp_path, joins=[], environment=settings, join_host=node.here)
        scheme = "https" if tls else "http"
        server.joined.add(
            "cpu",
            "far",
            node=node,
            url=f"{scheme}://{node.here}:{server.joined.port}",
            arguments=["--ca-file", settings["GEMMSERVE_TLS_CERTIFICATE"]] if tls else [],
            GEMMSERVE_JOIN_TOKEN=token,
        )
        ca_file = settings.get("GEMMSERVE_TLS_CERTIFICATE")
        with server, Client(server.url, api_key=user, verify=ca_file or True) as client:
            a, b = client.put(X), client.put(Y)
            assert np.array_equal((a @ b).numpy(), X @ Y)
            node.cut()
            job = client.submit("gemm", b, a)
            until(lambda: not ready(server, ca_file))
            node.mend()
            assert np.array_equal(job.wait().result().numpy(), Y @ X)


def ready(server: LiveServer, ca_file: str | None) -> bool:
    """Whether it has a worker."""
    verify = True if ca_file is None else ssl.create_default_context(cafile=ca_file)
    return httpx.get(f"{server.url}/readyz", verify=verify, timeout=120, trust_env=False).status_code == 200


def certificate(folder: Path, host: str) -> dict[str, str]:
    """Settings of a server with a certificate of its own for that address, and this machine's."""
    made, key = make_certificate(folder, addresses=f"IP:{host},IP:127.0.0.1,DNS:localhost")
    return {"GEMMSERVE_TLS_CERTIFICATE": str(made), "GEMMSERVE_TLS_KEY": str(key)}


def test_a_server_whose_node_is_killed_computes_with_the_next_one(server: LiveServer) -> None:
    (agent,) = server.joined.agents
    assert agent.end(signal.SIGKILL) == -signal.SIGKILL
    until(lambda: not server.workers())  # whoever kills an agent has killed its worker
    agent.start()
    with Client(server.url) as client:
        assert np.array_equal(client.gemm(X, Y), X @ Y)
