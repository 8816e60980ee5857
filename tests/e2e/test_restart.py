"""The whole server stops and starts again while clients are at it: they wait for it, and lose nothing."""

from __future__ import annotations

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import numpy as np
import pytest
from gates import Gate
from live_server import LiveServer, until

from gemmserve import AsyncClient, Client

if TYPE_CHECKING:
    from pathlib import Path

    from gemmserve import JobInfo

SOON = {"GEMMSERVE_DRAIN_S": "0.2"}


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_everything_goes_on(tmp_path: Path, rng: np.random.Generator, how: signal.Signals) -> None:
    gate = Gate(tmp_path / "gate")
    options = {"data_dir": tmp_path / "data", "environment": {**gate.environment, **SOON}}
    x, y = (rng.integers(-8, 9, (60, 60)).astype(np.float64) for _ in range(2))
    began: set[str] = set()

    with ThreadPoolExecutor(8) as pool, LiveServer(**options) as server, Client(server.url) as client:
        a, b = client.put(x), client.put(y)
        gate.shut()
        job = client.submit("gemm", a, b)
        gate.wait_reached()

        def waited() -> np.ndarray:
            began.add("wait")
            return job.wait().result().numpy()

        def watched() -> list[JobInfo]:
            seen = []
            for info in client.job(job.id).events():
                seen.append(info)
                began.add("events")
            return seen

        def program() -> np.ndarray:
            with client.program() as recorded:
                product = recorded.gemm(a, b)
                result = product @ b
                began.add("program")
            return result.numpy()

        def product() -> np.ndarray:
            began.add("product")
            return client.gemm(x, x)

        def submitted() -> list[np.ndarray]:
            """One job after the other, through it all."""
            jobs = []
            while "over" not in began:
                jobs.append(client.submit("gemm", a, a))
                began.add("submit")
            return [each.result().numpy() for each in jobs[:3] + jobs[-3:]]

        async def watched_awaited() -> list[JobInfo]:
            async with AsyncClient(server.url) as awaited:
                seen = []
                async for info in (await awaited.job(job.id)).events():
                    seen.append(info)
                    began.add("awaited")
                return seen

        works = [waited, watched, program, product, submitted, lambda: asyncio.run(watched_awaited())]
        running = [pool.submit(work) for work in works]
        until(lambda: began >= {"wait", "events", "program", "product", "submit", "awaited"})
        port = str(urlsplit(server.url).port)
        server.terminate(how)
        gate.open()
        with LiveServer("--port", port, **options) as again:
            began.add("over")
            found = [each.result(180) for each in running]
            client.close()
            assert again.returncode is None
    assert all(np.array_equal(got, expected) for got, expected in [
        (found[0], x @ y), (found[2], x @ y @ y), (found[3], x @ x), *[(each, x @ x) for each in found[4]],
    ])  # fmt: skip
    for infos in (found[1], found[5]):
        states = [info.state for info in infos]
        assert states[0] == "running"
        assert states[-1] == "succeeded"
        assert states.count("succeeded") == 1
        assert all(one != other for one, other in pairwise(infos))  # what was known is not told again
