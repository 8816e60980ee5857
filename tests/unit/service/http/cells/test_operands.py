"""Jobs whose operands are in two cells, each a server of its own on a socket in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl

import httpx
import numpy as np
import pytest
from certificates import make_certificate
from spy_executor import SpyExecutor

from gemmserve_service.http.app import create_app
from gemmserve_service.http.server import main_server
from gemmserve_service.jobs.cells.operands import COPY_OF
from gemmserve_service.jobs.core import Core
from gemmserve_service.settings import Settings

TALL = np.arange(24.0).reshape(8, 3)
WIDE = np.arange(12.0).reshape(3, 4)


class Cell:
    """One of the servers."""

    def __init__(self, settings, listener, verify=None):
        self.core = Core(settings, SpyExecutor())
        self.app = create_app(self.core.settings, self.core)
        self.server = main_server(self.app, settings)
        self.url = f"{'https' if verify else 'http'}://127.0.0.1:{listener.getsockname()[1]}"
        self.http = httpx.AsyncClient(base_url=self.url, timeout=60, trust_env=False, verify=verify or False)
        self._listener = listener

    async def __aenter__(self):
        self._serving = asyncio.ensure_future(self.server.serve([self._listener]))
        while not self.server.started and not self._serving.done():  # noqa: ASYNC110 (uvicorn has no event for it)
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_):
        await self.http.aclose()
        await self.stop()

    async def stop(self):
        self.server.should_exit = True
        await self._serving

    async def put(self, array, **query):
        query = {"dtype": str(array.dtype), "shape": ",".join(map(str, array.shape)), **query}
        answer = await self.http.post(
            "/v1/arrays", params=query, content=array.tobytes(), headers={"Content-Type": "application/octet-stream"}
        )
        assert answer.status_code == 201, answer.text
        return answer.json()["id"]

    async def submit(self, job, **headers):
        return await self.http.post("/v1/jobs", json=job, headers={"Prefer": "wait=30", **headers})

    async def copies(self):
        return (await self.http.get("/v1/arrays")).json()["items"]


@pytest.fixture
async def pair(tmp_path):
    """Cells 0 and 7."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    urls = {number: f"http://127.0.0.1:{each.getsockname()[1]}" for number, each in zip((0, 7), listeners, strict=True)}
    path = tmp_path / "cells.json"
    path.write_text(json.dumps({"cells": urls, "secret": "x" * 32}))
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for number, listener in zip(urls, listeners, strict=True):
            settings = Settings(data_dir=tmp_path / str(number), cell=number, cells_file=path, verify_share=0.0)
            made.append(await stack.enter_async_context(Cell(settings, listener)))
        yield made


@pytest.fixture
def certificate(tmp_path):
    """The folder of a certificate for 127.0.0.1, which is its own authority, and its key."""
    make_certificate(tmp_path, files=("a.pem", "a.key"))
    return tmp_path


@pytest.mark.parametrize("believed", [True, False])
async def test_over_tls(certificate, tmp_path, believed):
    """A cell believes another by the authority that their file names, and gets nothing from one that it does not."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [each.getsockname()[1] for each in listeners]
    document = {"cells": {"0": f"https://127.0.0.1:{ports[0]}", "7": f"https://127.0.0.1:{ports[1]}"}}
    document |= {"secret": "x" * 32} | ({"ca_file": str(certificate / "a.pem")} if believed else {})
    path = tmp_path / "cells.json"
    path.write_text(json.dumps(document))
    verify = ssl.create_default_context(cafile=certificate / "a.pem")
    files = {"tls_certificate": certificate / "a.pem", "tls_key": certificate / "a.key"}
    async with contextlib.AsyncExitStack() as stack:
        made = []
        for number, listener in zip((0, 7), listeners, strict=True):
            settings = Settings(data_dir=tmp_path / str(number), cell=number, cells_file=path, verify_share=0, **files)
            made.append(await stack.enter_async_context(Cell(settings, listener, verify)))
        zero, seven = made
        a, b = await zero.put(TALL), await seven.put(WIDE)
        answer = await zero.submit({"op": "gemm", "a": a, "b": b})
        if believed:
            found, _ = await product(zero, answer)
            np.testing.assert_array_equal(found.reshape(8, 4), TALL @ WIDE)
        else:
            assert (answer.status_code, answer.json()["type"]) == (503, "/problems/cell-away")
            assert [each["id"] for each in await zero.copies()] == [a]


async def product(cell, answer):
    assert answer.status_code == 200, answer.text
    job = answer.json()
    assert job["state"] == "succeeded", job
    (result,) = job["result"].values()
    data = await cell.http.get(f"/v1/arrays/{result}/data", headers={"Accept": "application/octet-stream"})
    return np.frombuffer(data.content), job


async def test_the_smaller_operand_is_copied(pair):
    zero, seven = pair
    a, b = await zero.put(TALL), await seven.put(WIDE)
    found, job = await product(zero, await zero.submit({"op": "gemm", "a": a, "b": b}))
    np.testing.assert_array_equal(found.reshape(8, 4), TALL @ WIDE)
    (copy,) = [each for each in await zero.copies() if each["labels"] == {COPY_OF: b}]
    assert job["request"]["b"] == copy["id"]
    assert copy["expires_at"] is not None
    # The next job uses the same copy.
    await product(zero, await zero.submit({"op": "gemm", "a": a, "b": b, "alpha": 2}))
    assert [each["id"] for each in await zero.copies() if each["labels"]] == [copy["id"]]


async def test_the_job_is_sent_to_the_largest_operand(pair):
    """And from there nowhere else: whichever cell it comes to first, the same has it."""
    zero, seven = pair
    a, b = await seven.put(TALL), await zero.put(WIDE)
    job = {"op": "gemm", "a": a, "b": b}
    answer = await zero.submit(job)
    assert (answer.status_code, answer.headers["location"]) == (307, f"{seven.url}/v1/jobs")
    found, _ = await product(seven, await seven.submit(job))
    np.testing.assert_array_equal(found.reshape(8, 4), TALL @ WIDE)


async def test_operands_of_one_size(pair):
    """Both cells agree."""
    zero, seven = pair
    square = np.eye(3)
    job = {"op": "gemm", "a": await seven.put(square), "b": await zero.put(square)}
    assert (await seven.submit(job)).headers["location"] == f"{zero.url}/v1/jobs"
    await product(zero, await zero.submit(job))


async def test_all_operands_in_another_cell(pair):
    zero, seven = pair
    a = await seven.put(np.eye(3))
    answer = await zero.submit({"op": "gemm", "a": a, "b": a})
    assert (answer.status_code, answer.headers["location"]) == (307, f"{seven.url}/v1/jobs")
    assert await zero.copies() == []


async def test_programs_and_views(pair):
    zero, seven = pair
    a, b = await zero.put(TALL), await seven.put(WIDE)
    view = {"id": b, "shape": [3, 2], "strides": [4, 2]}
    steps = [
        {"id": "x", "op": "gemm", "a": a, "b": view},
        {"id": "y", "op": "gemm", "a": "$x", "b": "$x", "trans_b": "T"},
    ]
    found, _ = await product(zero, await zero.submit({"op": "program", "steps": steps, "keep": ["y"]}))
    x = TALL @ WIDE[:, ::2]
    np.testing.assert_array_equal(found.reshape(8, 8), x @ x.T)
    found, _ = await product(zero, await zero.submit({"op": "gemm", "a": a, "b": view}))
    np.testing.assert_array_equal(found.reshape(8, 2), x)


async def test_many_at_once_fetch_once(pair):
    zero, seven = pair
    a, b = await zero.put(TALL), await seven.put(WIDE)
    answers = await asyncio.gather(*(zero.submit({"op": "gemm", "a": a, "b": b, "alpha": n}) for n in range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    assert len([each for each in await zero.copies() if each["labels"]]) == 1


async def test_an_operand_that_is_deleted_is_none_any_more(pair):
    """Also where a copy of it is left."""
    zero, seven = pair
    a, b = await zero.put(TALL), await seven.put(WIDE)
    job = {"op": "gemm", "a": a, "b": b}
    await product(zero, await zero.submit(job))
    await seven.http.delete(f"/v1/arrays/{b}")
    answer = await zero.submit({**job, "alpha": 2})
    assert (answer.status_code, answer.json()["type"]) == (404, "/problems/not-found")
    assert "cell 7" in answer.json()["detail"]


async def test_an_operand_that_has_expired(pair):
    zero, seven = pair
    a, b = await zero.put(TALL), await seven.put(WIDE, ttl_s=0.05)
    for _ in range(600):
        if (await seven.http.get(f"/v1/arrays/{b}")).status_code == 410:
            break
        await asyncio.sleep(0.05)
    answer = await zero.submit({"op": "gemm", "a": a, "b": b})
    assert (answer.status_code, answer.json()["type"]) == (410, "/problems/gone")


async def test_a_repetition_finds_its_job(pair):
    """Though the job's record names the copy."""
    zero, seven = pair
    job = {"op": "gemm", "a": await zero.put(TALL), "b": await seven.put(WIDE)}
    first = await zero.submit(job, **{"Idempotency-Key": "k"})
    again = await zero.submit(job, **{"Idempotency-Key": "k"})
    assert first.json()["id"] == again.json()["id"]
    assert again.headers["idempotent-replayed"] == "true"


async def test_a_cell_that_does_not_answer(pair):
    zero, seven = pair
    a, b = await zero.put(TALL), await seven.put(WIDE)
    await seven.stop()
    answer = await zero.submit({"op": "gemm", "a": a, "b": b})
    assert (answer.status_code, answer.json()["type"]) == (503, "/problems/cell-away")
    assert int(answer.headers["retry-after"]) >= 1


async def test_bytes_that_are_damaged_on_the_way(pair, monkeypatch):
    """Nothing of them is kept."""
    zero, seven = pair
    a, b = await zero.put(TALL), await seven.put(WIDE)

    async def wrong(*_, **__):
        return "00" * 32

    monkeypatch.setattr(seven.core.store.digests, "of", wrong)
    answer = await zero.submit({"op": "gemm", "a": a, "b": b})
    assert (answer.status_code, answer.json()["type"]) == (503, "/problems/cell-away")
    assert [each["id"] for each in await zero.copies()] == [a]
    assert (await zero.http.get("/v1/usage")).json()["store_bytes"] == TALL.nbytes


@pytest.mark.parametrize("end", ["", "/data"])
async def test_what_cells_ask_each_other_is_for_them_alone(pair, end):
    zero, seven = pair
    path = f"/internal/cells/arrays/{await seven.put(WIDE)}{end}"
    assert (await seven.http.get(path)).status_code == 401
    assert (
        await seven.http.get(path, headers={"Gemmserve-Peer": seven.core.cells.token("GET", path, "")})
    ).status_code == 401
    answer = await seven.http.get(path, headers={"Gemmserve-Peer": zero.core.cells.token("GET", path, "")})
    assert answer.status_code == 200
    other = f"/internal/cells/arrays/{await zero.put(WIDE)}{end}"  # which cell 7 would have to ask for itself
    answer = await seven.http.get(other, headers={"Gemmserve-Peer": zero.core.cells.token("GET", other, "")})
    assert answer.status_code == 404
