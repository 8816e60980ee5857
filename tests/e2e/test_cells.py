"""Two cells behind haproxy: where things are, what a lost cell takes along, and what it does not.

The SDK's own tests run through the same router: `server` of test_sdk.py.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import threading

import numpy as np
import pytest
from cells import Cells
from live_server import until
from proxies import found

from gemmserve import Client, ParameterInvalid
from gemmserve.wire import STRAIGHT_FROM

SMALL = np.arange(12.0).reshape(3, 4)
LARGE = np.arange(STRAIGHT_FROM / 8 + 1)

pytestmark = pytest.mark.skipif(found("haproxy") is None, reason="haproxy is not installed")


@pytest.mark.parametrize("number", [0, 1])
def test_an_owner_s_things_are_in_one_cell(cells, number):
    with Client(cells.url, api_key=cells.owners[number]) as client:
        stored = client.put(SMALL)
        result = stored.T @ stored
        job = client.submit("gemm", stored.T, stored)
        for identifier in (stored.id, result.id, job.id):
            assert identifier.endswith("_1") is (number == 1)
        job.wait(60)
        np.testing.assert_array_equal(result.numpy(), SMALL.T @ SMALL)
        assert {array.id for array in client.arrays()} >= {stored.id, result.id}


@pytest.mark.parametrize("number", [0, 1])
def test_no_large_body_by_the_router(cells, number):
    """Neither up nor down, and it is sent once: the router is asked which cells there are, and has no other request."""
    key = cells.owners[number]
    with Client(cells.url, api_key=key) as client:
        stored = client.put(LARGE)
        np.testing.assert_array_equal(stored.numpy(), LARGE)
    with cells.http(key) as http:
        path = f"/v1/arrays/{stored.id}/data"
        answer = http.get(path)
        assert (answer.status_code, answer.headers["location"]) == (307, cells.urls[number] + path)


def test_curl_follows_and_sends_a_large_body_once(cells, tmp_path):
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    np.save(tmp_path / "a.npy", LARGE)
    command = [
        curl,
        "-q",
        "-sS",
        "--fail",
        "--location-trusted",
        "--expect100-timeout",
        "120",
        "-w",
        "%{stderr}%{size_upload} %{num_redirects}",
    ]
    headers = ["-H", f"Authorization: Bearer {cells.owners[1]}", "-H", "Content-Type: application/x-npy",
               "-H", "Expect: 100-continue"]  # fmt: skip
    done = subprocess.run([*command, *headers, "--data-binary", f"@{tmp_path}/a.npy", f"{cells.url}/v1/arrays"],
                          capture_output=True, text=True, timeout=120, check=True)  # fmt: skip
    assert '_1"' in done.stdout
    assert done.stderr.split() == [str((tmp_path / "a.npy").stat().st_size), "1"]


def test_what_arrives_at_the_wrong_cell_is_sent_on(cells):
    key = cells.owners[0]
    with Client(cells.url, api_key=key) as client:
        stored = client.put(SMALL)
    with Client(cells.urls[1], api_key=key) as astray:
        np.testing.assert_array_equal(astray.array(stored.id).numpy(), SMALL)


def test_deletions_in_two_cells(cells):
    """Each by the cell that has it, and `missing` is said of what is nowhere alone."""
    key = cells.owners[0]
    ids = []
    for url in cells.urls:
        with Client(url, api_key=key) as client:
            ids += [client.put(SMALL).id for _ in range(2)]
    with cells.http(key) as http:
        told = http.post("/v1/deletions", json={"ids": ids, "dry_run": True}).json()
        assert (told["count"], told["missing"], told["elsewhere"]) == (2, [], ids[2:])
        with Client(cells.url, api_key=key) as client:
            assert client.delete(*ids) == 4
            assert client.delete(*ids) == 0
        assert {http.get(f"/v1/arrays/{each}", follow_redirects=True).status_code for each in ids} == {404}


def test_a_batch_on_another_cell_s_arrays(cells):
    """It is sent on; what names two cells' arrays says so of the products that cannot be had there."""
    key = cells.owners[0]
    with Client(cells.urls[1], api_key=key) as client:
        away = client.put(SMALL)
    with Client(cells.url, api_key=key) as client:
        own, other = client.put(SMALL), client.array(away.id)
        (result,) = client.gemm_many([other], [other.T])
        assert result.id.endswith("_1")
        np.testing.assert_array_equal(result.numpy(), SMALL @ SMALL.T)
        with pytest.raises(ParameterInvalid, match="cell 1 has"):
            client.gemm_many([own], [other.T])


def test_operands_in_two_cells(cells):
    """The client has the router's URL alone; the job is in the cell of the larger operand."""
    key = cells.owners[0]
    ids = []
    for url, array in zip(cells.urls, (SMALL, np.tile(SMALL, (1, 4)).T), strict=True):
        with Client(url, api_key=key) as client:
            ids.append(client.put(array).id)
    with Client(cells.url, api_key=key) as client:
        small, tall = (client.array(identifier) for identifier in ids)
        result = tall @ small
        assert result.id.endswith("_1")
        np.testing.assert_array_equal(result.numpy(), np.tile(SMALL, (1, 4)).T @ SMALL)


def test_one_shots_go_to_both(cells):
    """To the one with fewer under way of two: both are idle here, so it is chance which."""
    key = cells.owners[0]
    with cells.http(key) as http:
        files = {name: (name, _npy(SMALL @ SMALL.T), "application/x-npy") for name in ("a", "b")}
        before = [_products(cell, key) for cell in cells.cells]

        def both_did() -> bool:
            assert http.post("/v1/gemm", files=files).status_code == 200
            return all(_products(cell, key) > earlier for cell, earlier in zip(cells.cells, before, strict=True))

        until(both_did)


def _npy(array):
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def _products(cell, key):
    """One-shot products that a cell has computed."""
    with cell.http() as http:
        text = http.get("/metrics", headers={"X-API-Key": key}).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("gemmserve_jobs_total{"))


def test_the_router_keeps_what_cells_say_to_each_other_out(cells):
    with cells.http(cells.owners[0]) as http:
        assert http.get("/internal/cells/arrays/x").status_code == 404
        assert http.get("/metrics").status_code == 404


def test_a_cell_is_killed(tmp_path):
    """No error for owners of the other, whatever they do meanwhile; new work of its own owners goes there; what was in
    it is away for a while, and there again when it is back.
    """
    with Cells(tmp_path) as cells:
        lost, safe = cells.owners[0], cells.owners[1]
        with cells.http(lost) as http:
            owned = http.post("/v1/arrays", content=_npy(SMALL), headers={"Content-Type": "application/x-npy"}).json()
        done, stop, errors = [], threading.Event(), []

        def work():
            """One request after another, none of which is repeated."""
            try:
                with cells.http(safe) as http:
                    while not stop.is_set():
                        made = http.post(
                            "/v1/arrays", content=_npy(SMALL), headers={"Content-Type": "application/x-npy"}
                        )
                        assert made.status_code == 201, made.text
                        array = made.json()["id"]
                        job = {"op": "gemm", "a": array, "b": array, "trans_b": "T"}
                        answer = http.post("/v1/jobs", json=job, headers={"Prefer": "wait=60"})
                        assert answer.status_code == 200, answer.text
                        result = http.get(f"/v1/arrays/{answer.json()['result']['d']}/data")
                        np.testing.assert_array_equal(np.load(io.BytesIO(result.content)), SMALL @ SMALL.T)
                        assert http.delete(f"/v1/arrays/{array}").status_code == 204
                        done.append(array)
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            until(lambda: errors or len(done) > 2)
            for process in cells.cells[0].processes():
                process.kill()
            cells.cells[0].wait_end()
            killed = len(done)
            # One-shots went to both: through the SDK, which repeats what broke, none of them fails either.
            with Client(cells.url, api_key=safe) as client:
                for _ in range(16):
                    np.testing.assert_array_equal(client.gemm(SMALL, SMALL.T), SMALL @ SMALL.T)
            until(lambda: errors or len(done) > killed + 3)
        finally:
            stop.set()
            thread.join()
        assert not errors, errors
        assert all(array.endswith("_1") for array in done)
        with cells.http(lost) as http:
            until(lambda: http.get("/v1/cells").json().get("cell") == 1)
            away = http.get(f"/v1/arrays/{owned['id']}")
            assert (away.status_code, away.json()["type"]) == (503, "/problems/cell-away")
            assert int(away.headers["retry-after"]) > 0
            with Client(cells.url, api_key=lost) as client:
                assert client.put(SMALL).id.endswith("_1")
            cells.cells[0] = cells.start(0)
            until(lambda: http.get("/v1/cells").json().get("cell") == 0)
            until(lambda: http.get(f"/v1/arrays/{owned['id']}").json().get("id") == owned["id"])
