"""Keys, quotas, TLS and the second port on the real server: made by the command line, used by the SDK, after a kill."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from certificates import make_certificate
from gates import Gate
from live_server import LiveServer, until

import gemmserve
from gemmserve import Client, RetryPolicy

ONCE = RetryPolicy(attempts=1)
PHASES = ("h2d_s", "kernel_s", "d2h_s")


def keys(data_dir, *arguments: str) -> str:
    command = [sys.executable, "-m", "gemmserve.cli", "keys", *arguments, "--data-dir", str(data_dir)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def create(data_dir, *arguments: str) -> str:
    """The key, as it was shown."""
    return keys(data_dir, "create", *arguments).strip()


def accepted(server, key: str = "") -> bool:
    """Whether the server answers who comes with that key: it hears of changes within about a second."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with server.http() as http:
        return http.get("/v1/arrays", headers=headers).status_code == 200


def create_and_wait(server, *arguments: str) -> str:
    """A key that the running server knows."""
    key = create(server.data_dir, *arguments)
    until(lambda: accepted(server, key))
    return key


def charged_s(jobs) -> float:
    """The device's time for those that have succeeded."""
    return sum(job.info.timings[phase] for job in jobs if job.state == "succeeded" for phase in PHASES)


def half_an_upload(server, key: str) -> socket.socket:
    address = urlsplit(server.url)
    connection = socket.create_connection((address.hostname, address.port), timeout=120)
    connection.sendall(
        f"POST /v1/arrays?dtype=float64&shape={1 << 20} HTTP/1.1\r\nHost: {address.netloc}\r\n"
        f"Content-Type: application/octet-stream\r\nContent-Length: {8 << 20}\r\n"
        f"Authorization: Bearer {key}\r\n\r\n".encode()
        + b"x" * 1000
    )
    return connection


def test_keys_and_quotas_over_a_kill(tmp_path) -> None:
    """Keys made and revoked beside a running server count within about a second, and all use is exact after kill -9."""
    data_dir = tmp_path / "data"
    gate = Gate(tmp_path / "gate")
    with LiveServer(data_dir=data_dir, environment=gate.environment) as server, server.http() as http:
        assert accepted(server)
        key = create(data_dir, "alice", "--quota-stored-bytes", "1G")
        until(lambda: not accepted(server))
        second = create_and_wait(server, "alice's second", "--owner", key.split("_")[1])
        keys(data_dir, "revoke", second.split("_")[1])
        until(lambda: not accepted(server, second))
        bearer = {"Authorization": f"Bearer {second}"}
        assert http.get("/v1/arrays", headers=bearer).status_code == 401
        with Client(server.url, api_key=key) as client:
            operand = client.put(np.random.default_rng(0).standard_normal((256, 256)))
            for job in [client.submit("gemm", operand, operand) for _ in range(10)]:
                job.wait(60)
            gate.shut(after=0)
            for _ in range(10):
                client.submit("gemm", operand, operand)
            gate.wait_reached()  # a worker is in the middle of a job
            half = half_an_upload(server, key)
            until(lambda: client.usage()["quotas"]["inflight_bytes"]["used"] == 8 << 20)

            def device_s() -> float:
                return client.usage()["quotas"]["device_seconds_per_day"]["used"]

            # The front is through with those that have ended; no other one is charged before the kill.
            until(lambda: device_s() == pytest.approx(charged_s(client.jobs()), abs=1e-4))
            assert sum(job.state == "succeeded" for job in client.jobs()) == 10
        server.front().kill()
        server.terminate(signal.SIGKILL)
        half.close()
    gate.open()
    with LiveServer(data_dir=data_dir) as server, server.http() as http:
        assert http.get("/v1/arrays").status_code == 401
        assert http.get("/v1/arrays", headers=bearer).status_code == 401
        with Client(server.url, api_key=key) as client:
            jobs = client.jobs()
            assert len(jobs) == 20
            for job in jobs:
                job.wait(60)
            usage = client.usage()["quotas"]
            assert usage["inflight_bytes"]["used"] == 0
            assert usage["stored_bytes"]["used"] == 21 * 256 * 256 * 8
            used_s = usage["device_seconds_per_day"]["used"]
            assert used_s == pytest.approx(charged_s(jobs), abs=1e-4), "nothing was forgotten, nothing charged twice"
        listed = json.loads(keys(data_dir, "list", "--json"))
        assert [(entry["name"], entry["state"]) for entry in listed] == [
            ("alice", "valid"),
            ("alice's second", "revoked"),
        ]
    for secret in (key.split("_")[2], second.split("_")[2]):
        assert secret not in server.text + json.dumps(listed)


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    """A server with an administrator's key, made before its start."""
    data_dir = tmp_path_factory.mktemp("keyed")
    admin = create(data_dir, "admin", "--scopes", "admin")
    with LiveServer(data_dir=data_dir) as server:
        server.admin = admin
        yield server


def test_the_sdk_and_its_typed_errors(keyed) -> None:
    limits = ["--quota-stored-bytes", "20k", "--quota-device-seconds", "0.000000001"]
    alice = create_and_wait(keyed, "alice", *limits)
    reader = create_and_wait(keyed, "reader", "--scopes", "read", "--owner", alice.split("_")[1])
    with Client(keyed.url, api_key="", retry=ONCE) as client, pytest.raises(gemmserve.Unauthorized):
        client.arrays()
    wrong = alice[:-1] + ("a" if alice[-1] != "a" else "b")
    with (
        Client(keyed.url, api_key=wrong, retry=ONCE) as client,
        pytest.raises(gemmserve.Unauthorized, match="mistyped"),
    ):
        client.arrays()
    with Client(keyed.url, api_key=alice, retry=ONCE) as client:
        remote = client.put(np.eye(32))
        with pytest.raises(gemmserve.QuotaExceeded) as stored:
            client.put(np.zeros((64, 64)))
        assert (stored.value.status, stored.value.quota, stored.value.retry_after) == (507, "stored_bytes", None)
        np.testing.assert_array_equal((remote @ remote).numpy(), np.eye(32))
        with pytest.raises(gemmserve.QuotaExceeded) as device:
            client.gemm(np.eye(2), np.eye(2))
        assert device.value.quota == "device_seconds_per_day"
        assert 0 < device.value.retry_after <= 86_400
        assert client.usage()["quotas"]["stored_bytes"]["limit"] == 20 << 10
    with Client(keyed.url, api_key=reader, retry=ONCE) as client:
        np.testing.assert_array_equal(client.get(remote.id), np.eye(32))
        with pytest.raises(gemmserve.Forbidden) as forbidden:
            client.delete(remote.id)
        assert forbidden.value.scope == "submit"
    with Client(keyed.url, api_key=keyed.admin, retry=ONCE) as client, pytest.raises(gemmserve.NotFound):
        client.get(remote.id)


def test_the_command_line_takes_the_key_from_its_variable(keyed, tmp_path) -> None:
    np.save(tmp_path / "a.npy", np.eye(3))
    command = [sys.executable, "-m", "gemmserve.cli", "put", str(tmp_path / "a.npy"), "--server", keyed.url]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GEMMSERVE_")}
    refused = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert refused.returncode == 1
    assert "Unauthorized" in refused.stderr
    environment["GEMMSERVE_API_KEY"] = keyed.admin
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.startswith("arr_"), done.stderr


def test_concurrent_uploads_stay_within_the_quota(keyed) -> None:
    key = create_and_wait(keyed, "carol", "--quota-stored-bytes", str(10 * 8000))

    def upload(_: int) -> int:
        with Client(keyed.url, api_key=key, retry=ONCE) as client:
            try:
                client.put(np.zeros(1000))
            except gemmserve.QuotaExceeded as error:
                return error.status
            return 201

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(upload, range(24)))
    assert sorted(answers) == [201] * 10 + [507] * 14


@pytest.fixture(scope="module")
def exposed(tmp_path_factory):
    """A server as one would expose it: on every address, with a key, TLS and a second port."""
    folder = tmp_path_factory.mktemp("exposed")
    certificate, private = make_certificate(folder, addresses="IP:127.0.0.1,DNS:localhost")
    key = create(folder / "data", "alice")
    flags = ["--host", "0.0.0.0", "--metrics-port", "0", "--tls-key", str(private)]
    flags += ["--tls-certificate", str(certificate)]
    with LiveServer(*flags, data_dir=folder / "data") as server:
        server.key, server.certificate = key, str(certificate)
        server.url = server.url.replace("0.0.0.0", "127.0.0.1")
        yield server


def test_tls(exposed) -> None:
    assert exposed.url.startswith("https://")
    with Client(exposed.url, api_key=exposed.key, verify=exposed.certificate) as client:
        a = np.random.default_rng(0).standard_normal((300, 300))
        np.testing.assert_allclose(client.gemm(a, a), a @ a)
        np.testing.assert_array_equal(client.put(a).numpy(), a)
    for url in (exposed.url, exposed.url.replace("https", "http")):  # who trusts nobody of that name; without TLS
        with Client(url, retry=ONCE) as client, pytest.raises(gemmserve.TransportError):
            client.health()
    address = urlsplit(exposed.url)
    context = ssl.create_default_context(cafile=exposed.certificate)
    with (
        socket.create_connection((address.hostname, address.port), timeout=120) as raw,
        context.wrap_socket(raw, server_hostname="127.0.0.1") as connection,
    ):
        assert connection.version() in {"TLSv1.2", "TLSv1.3"}


def test_any_host_name_but_nobody_without_a_key(exposed) -> None:
    get = lambda **headers: httpx.get(
        f"{exposed.url}/v1/arrays", headers=headers, verify=False, timeout=120, trust_env=False
    )
    assert get(Host="any.example").status_code == 401
    assert get(**{"X-API-Key": exposed.key}).status_code == 200


def test_the_second_port(exposed) -> None:
    side = exposed.text.split("metrics: ")[1].split(")")[0]
    assert side.startswith("http://127.0.0.1:")
    with httpx.Client(verify=False, timeout=120, trust_env=False) as ask:
        check_second_port(ask, side, exposed)


def check_second_port(ask, side, exposed) -> None:
    for path, status in (
        ("/metrics", 200), ("/docs", 200), ("/openapi.json", 200), ("/readyz", 200), ("/v1/arrays", 404),
        ("/v1/jobs", 404), ("/problems", 404),
    ):  # fmt: skip
        assert ask.get(side + path).status_code == status, path
    assert ask.post(f"{side}/v1/gemm").status_code == 404
    assert ask.get(f"{side}/metrics", headers={"Host": "evil.example"}).status_code == 403
    for path, status in (
        ("/metrics", 404),
        ("/", 200),
        ("/docs", 200),
        ("/openapi.json", 200),
        ("/readyz", 200),
        ("/v1/arrays", 200),
    ):
        answer = ask.get(exposed.url + path, headers={"X-API-Key": exposed.key})
        assert answer.status_code == status, path
