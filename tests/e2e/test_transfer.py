"""Large arrays between the SDK and the real server: in parts, over several connections, some of which break."""

from __future__ import annotations

import asyncio
import signal
import threading
import uuid
from pathlib import Path

import httpx
import numpy as np
import pytest
from cutting_proxy import CuttingProxy
from live_server import LiveServer, until

import gemmserve
from gemmserve import AsyncClient, Client, RetryPolicy
from gemmserve._calls import arrays as array_flows
from gemmserve._transfer import parts

A = (np.arange(1 << 19) % 997).astype("c8").reshape(512, 1024)  # 4 MiB: sixteen parts here
PATIENT = RetryPolicy(attempts=8, base_s=0.01, cap_s=0.05)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(array_flows, "PARTS_FROM", 1 << 20)
    monkeypatch.setattr(array_flows, "PART", 1 << 18)
    monkeypatch.setattr(parts, "PART", 1 << 18)


def requests(server):
    """The fields of every request that the server has logged."""
    lines = [line for line in server.text.split("\n")[:-1] if "method=" in line]  # the last one may be half a line
    return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]


def logged(server):
    """How many requests are logged once all that were answered are: lines are written a little later."""
    path = f"/v1/arrays/{uuid.uuid4().hex}"
    with server.http() as http:
        http.get(path)
    return until(lambda: [one["path"] for one in requests(server)].index(path) + 1 if path in server.text else 0)


def sent(server, since):
    """What was asked for to store an array, since so many requests."""
    routes = (f"{one['method']} {one['route']}" for one in requests(server)[since:])
    return [route for route in routes if route.startswith(("POST /v1/arrays", "POST /v1/uploads", "PUT /v1/uploads"))]


def fetched(server, array_id):
    """How often that array was asked for."""
    return [one["path"] for one in requests(server)].count(f"/v1/arrays/{array_id}/data")


@pytest.mark.parametrize("connections", [1, 2, 4])
@pytest.mark.parametrize("array", [A, np.asfortranarray(A), A.T.real.copy()], ids=["C", "F", "real"])
def test_there_and_back(server, connections, array):
    before = logged(server)
    with Client(server.url, connections=connections, progress=False) as client:
        remote = client.put(array, digest=connections == 4)
        found = remote.numpy()
        remote.delete()
    assert np.array_equal(found, array)
    assert found.flags.f_contiguous == array.flags.f_contiguous
    parts = -(-array.nbytes // (1 << 18))
    logged(server)
    assert sent(server, before).count("PUT /v1/uploads/{upload_id}/parts/{offset}") == parts
    until(lambda: fetched(server, remote.id) >= parts)


def test_the_awaited_client(server):
    async def main():
        async with AsyncClient(server.url, connections=3, progress=False) as client:
            remote = await client.put(A, digest=True)
            found = await remote.numpy()
            await remote.delete()
            return found

    assert np.array_equal(asyncio.run(main()), A)


@pytest.mark.parametrize(
    ("array", "connections"),
    [(A[::2], 2), (A.astype(">c8"), 2), (A, 0), (A[:1], 2)],
    ids=["strided", "big-endian", "switched off", "small"],
)
def test_whole_where_parts_are_not_slices_or_not_wanted(server, array, connections):
    before = logged(server)
    with Client(server.url, connections=connections, progress=False) as client:
        remote = client.put(array)
        assert np.array_equal(client.get(remote.id), array)
        remote.delete()
    logged(server)
    assert sent(server, before) == ["POST /v1/arrays"]


def test_an_upload_goes_on_where_its_connections_broke(server):
    cuts = [(200_000 + 20_000 * n, None) for n in range(8)]
    with CuttingProxy(server.url, cuts) as proxy, Client(proxy.url, retry=PATIENT, progress=False) as client:
        remote = client.put(A)
        assert proxy.cut >= 6
        # Each connection that broke had sent most of a part: less than half of these was sent again.
        assert proxy.up < A.nbytes + proxy.cut * 100_000
    with Client(server.url) as client:
        assert np.array_equal(client.get(remote.id), A)
        client.delete(remote.id)


def test_an_upload_with_digests_over_breaking_connections(server):
    cuts = [(100_000, None), (None, 100), (150_000, None)]
    with (
        CuttingProxy(server.url, cuts, reset=True) as proxy,
        Client(proxy.url, retry=PATIENT, progress=False) as client,
    ):
        remote = client.put(A, digest=True)
        assert np.array_equal(client.get(remote.id), A)
        remote.delete()
        assert proxy.cut >= 2


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("awaited", [False, True])
def test_a_download_goes_on_where_it_broke(server, known, awaited):
    with Client(server.url, progress=False) as client:
        array_id = client.put(A).id
    # Within the headers, within the .npy header, and within the data.
    cuts = [(None, 100), (None, 700), *[(None, 500_000 + 90_000 * n) for n in range(5)]]

    async def download(url):
        async with AsyncClient(url, retry=PATIENT, progress=False) as client:
            return await ((await client.array(array_id)).numpy() if known else client.get(array_id))

    with CuttingProxy(server.url, cuts) as proxy:
        if awaited:
            found = asyncio.run(download(proxy.url))
        else:
            with Client(proxy.url, retry=PATIENT, progress=False) as client:
                found = client.array(array_id).numpy() if known else client.get(array_id)
        assert proxy.cut >= 5
        assert proxy.down < A.nbytes + (1 << 20), "what had come was fetched again"
    assert np.array_equal(found, A)
    with Client(server.url) as client:
        client.delete(array_id)


def test_a_download_into_its_place(server, monkeypatch):
    """Past httpx, which is not used below 8 MiB; also when that connection breaks."""
    from gemmserve._transport import direct

    landed = []
    original = direct.landed

    def spy(*arguments):
        for count in original(*arguments):
            landed.append(count)
            yield count

    monkeypatch.setattr(direct, "DIRECT_FROM", 1 << 16)
    monkeypatch.setattr(direct, "landed", spy)
    with Client(server.url, progress=False) as client:
        array_id = client.put(A).id
        assert np.array_equal(client.array(array_id).numpy(), A)
        assert np.array_equal(client.gemm(A[:, :1].copy(), A[:1].copy()), A[:, :1] @ A[:1])
    assert sum(landed) > 1.5 * A.nbytes
    cuts = [(None, 300_000), (None, 100_000), (None, 900_000)]
    with CuttingProxy(server.url, cuts) as proxy, Client(proxy.url, retry=PATIENT, progress=False) as client:
        assert np.array_equal(client.get(array_id), A)
        assert proxy.cut == 3
        client.delete(array_id)


def test_a_server_that_hangs_up_for_good(server):
    # The first connection begins the upload and sends some parts; then nothing ever goes on.
    cuts = [(600_000, None), *[(10, None)] * 100]
    retry = RetryPolicy(attempts=2, base_s=0.01, total_s=5)
    with CuttingProxy(server.url, cuts) as proxy, Client(proxy.url, retry=retry, progress=False) as client:
        with pytest.raises(gemmserve.TransportError):
            client.put(A)
        until(lambda: not any(thread.name.startswith("gemmserve-part") for thread in threading.enumerate()))


def test_a_failed_upload_leaves_nothing(server, monkeypatch):
    """One part is refused: the others end, and the space is free at once."""
    server.wait_quiet()
    with Client(server.url) as client:
        before = client.usage()["store_bytes"]
    original = array_flows.requests.send_part

    def send(upload_id, offset, data, **options):
        if offset == 1 << 19:
            data = memoryview(b"x" * (A.nbytes + 1))
        return original(upload_id, offset, data, **options)

    monkeypatch.setattr(array_flows.requests, "send_part", send)
    with Client(server.url, progress=False) as client:
        with pytest.raises(gemmserve.InvalidRequest) as caught:
            client.put(A)
        assert caught.value.slug == "body-length"
        # Others' arrays that were deleted may go meanwhile.
        assert client.usage()["store_bytes"] <= before


def test_parts_survive_the_server(tmp_path):
    """kill -9 of every process between two parts; the upload goes on with the next server on the folder."""
    data = A.tobytes()
    kind = {"Content-Type": "application/octet-stream"}
    with LiveServer(data_dir=tmp_path / "data") as first, first.http() as http:
        query = {"dtype": "complex64", "shape": "512,1024"}
        url = http.post("/v1/uploads", params=query, headers=kind).headers["location"]
        assert http.put(f"{url}/parts/{1 << 20}", content=data[1 << 20 :], headers=kind).status_code == 204
        first.terminate(signal.SIGKILL)
    with LiveServer(data_dir=tmp_path / "data") as second, second.http() as http:
        assert http.get(url).json()["received"] == [[1 << 20, A.nbytes]]
        assert http.put(f"{url}/parts/0", content=data[: 1 << 20], headers=kind).status_code == 204
        done = http.post(f"{url}/complete")
        assert done.status_code == 201
        with Client(second.url) as client:
            assert np.array_equal(client.get(done.json()["id"]), A)


def test_a_later_request_takes_the_place_of_one_that_hangs(server):
    """A connection that is dead for the client, and that the server still waits for."""
    kind = {"Content-Type": "application/octet-stream"}
    data = A.tobytes()
    server.wait_quiet()
    with server.http() as http, httpx.Client(base_url=server.url, timeout=300, trust_env=False) as hanging:
        query = {"dtype": "complex64", "shape": "512,1024"}
        url = http.post("/v1/uploads", params=query, headers=kind).headers["location"]
        goes_on, answers = threading.Event(), []

        def stalled():
            yield data[: 1 << 20]
            goes_on.wait(200)
            yield data[1 << 20 :]

        def send():
            headers = {**kind, "Content-Length": str(len(data))}
            try:
                answers.append(hanging.put(f"{url}/parts/0", content=stalled(), headers=headers).status_code)
            except httpx.TransportError as error:
                answers.append(error)

        thread = threading.Thread(target=send)
        thread.start()
        until(lambda: http.get("/v1/usage").json()["quotas"]["inflight_bytes"]["used"])
        assert http.put(f"{url}/parts/0", content=data, headers=kind).status_code == 204
        goes_on.set()
        thread.join(200)
        assert answers
        assert answers[0] == 409 or isinstance(answers[0], httpx.TransportError)
        assert http.post(f"{url}/complete").status_code == 201


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
@pytest.mark.parametrize("connections", [0, 2])
def test_the_front_s_memory_stays_flat(server, connections):
    """128 MiB pass through; `benchmarks/service` does the same with 4 GiB."""
    server.wait_quiet()
    front = server.front()

    def rss_anon():
        status = Path(f"/proc/{front.pid}/status").read_text()
        return int(status.partition("RssAnon:")[2].split()[0]) << 10

    array = np.zeros((1 << 14, 1 << 10), "c8")
    over, seen = threading.Event(), []

    def watch():
        while not over.wait(0.01):
            seen.append(rss_anon())
        seen.append(rss_anon())

    with Client(server.url, connections=connections, progress=False) as client:
        client.put(A).delete()
        idle = rss_anon()
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            remote = client.put(array)
            assert np.array_equal(remote.numpy()[::4096], array[::4096])
            remote.delete()
        finally:
            over.set()
            watcher.join()
    assert max(seen) - idle < 64 << 20
